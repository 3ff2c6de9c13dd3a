"""Models by name: small ones for two CPU cores, and the published sizes.

Table sizes stay the caller's choice, because the published tables do not fit in one machine; so does the
count of features, and with it the shape of the first GEMM after the front. The sizes assume 13 dense and
26 sparse features, Wukong's own (0.5gf to 22gf) 769 sparse ones.
Wukong's sizes are named after GFLOP a sample in training, forward and backward, as its paper counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from loka.core.exceptions import UnknownName
from loka.zoo.dcn import DCNv2
from loka.zoo.dlrm import DLRM
from loka.zoo.wukong import Wukong

MODELS: dict[str, type[nn.Module]] = {"dlrm": DLRM, "dcnv2": DCNv2, "wukong": Wukong}

# SiLU and LayerNorm, so that the mods have something to replace.
_SMALL: dict[str, Any] = {"embedding_dim": 16, "activation": "silu", "norm": True}
# Wukong paper, scaling table: l, n_fm = n_lc, k, MLP; d = 160 is inferred from its FLOP counts. What follows
# each Linear it does not say; ReLU and LayerNorm are our reading.
_WUKONG: dict[str, Any] = {
    "embedding_dim": 160,
    "bottom": (512, 256),
    "rank": 24,
    "hidden": (2048, 2048, 2048),
    "top": (1024, 512),
    "norm": True,
}

_PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    ("dlrm", "small"): {**_SMALL, "bottom": (64,), "top": (256, 128, 64)},
    # facebookresearch/dlrm, torchrec_dlrm README: dense 512,256,128, over 1024,1024,512,256,1.
    ("dlrm", "mlperf"): {"embedding_dim": 128, "bottom": (512, 256), "top": (1024, 1024, 512, 256)},
    ("dcnv2", "small"): {**_SMALL, "bottom": (64,), "cross_layers": 2, "rank": 64, "deep": (256, 128, 64)},
    # mlcommons/training, recommendation_v2 README.
    ("dcnv2", "mlperf"): {
        "embedding_dim": 128,
        "bottom": (512, 256),
        "cross_layers": 3,
        "rank": 512,
        "deep": (1024, 1024, 512, 256),
    },
    # BARS benchmark, DCNv2 on Criteo_x1.
    ("dcnv2", "bars"): {
        "embedding_dim": 10,
        "bottom": None,
        "cross_layers": 3,
        "rank": None,
        "deep": (500, 500, 500),
        "parallel": True,
    },
    ("wukong", "small"): {
        **_SMALL,
        "bottom": (64,),
        "layers": 2,
        "fm_tokens": 8,
        "lc_tokens": 8,
        "rank": 8,
        "hidden": (128,),
        "top": (128, 64),
    },
    ("wukong", "0.5gf"): {**_WUKONG, "layers": 2, "fm_tokens": 8, "lc_tokens": 8},
    ("wukong", "2gf"): {**_WUKONG, "layers": 8, "fm_tokens": 32, "lc_tokens": 32},
    # Between its neighbours; not a row that we could check in the paper. As the paper scales from here on, l
    # stays 8 while n, k and the MLP grow together: here twice 2gf's. With 769 sparse features it has 2.02
    # GFLOP forward and 6.1 in training (2gf 0.49 and 1.5, 22gf 7.8 and 23). All sides are multiples of 16
    # except the count of input tokens.
    ("wukong", "6gf"): {
        **_WUKONG,
        "layers": 8,
        "fm_tokens": 64,
        "lc_tokens": 64,
        "rank": 48,
        "hidden": (4096, 4096, 4096),
    },
    # The size of the FP8 experiments in the LoKA paper (24 GFLOP a sample, batch 6144 a GPU).
    ("wukong", "22gf"): {
        **_WUKONG,
        "layers": 8,
        "fm_tokens": 96,
        "lc_tokens": 96,
        "rank": 96,
        "hidden": (8192, 8192, 8192),
    },
    # FuxiCTR, WuKong model_config.yaml: each of 39 fields is a token.
    ("wukong", "fuxictr"): {
        "embedding_dim": 64,
        "bottom": None,
        "layers": 3,
        "fm_tokens": 40,
        "lc_tokens": 40,
        "rank": 8,
        "hidden": (512,),
        "top": (512, 256),
    },
}


def presets() -> tuple[tuple[str, str], ...]:
    """All (name, size) pairs that `build` knows."""
    return tuple(_PRESETS)


def build(name: str, *, dense_features: int, vocab_sizes: Sequence[int], size: str = "small") -> nn.Module:
    """A freshly initialized model, `forward(dense [B, D], sparse [B, F]) -> logits [B]`.

    Published sizes are large: build them under `torch.device("meta")` to look at their shapes.
    """
    if (name, size) not in _PRESETS:
        known = [f"{model}: {', '.join(s for m, s in _PRESETS if m == model)}" for model in MODELS]
        raise UnknownName(
            f"model {name!r} of size {size!r}", why=known, way_out="choose a name and one of its sizes"
        )
    return MODELS[name](dense_features=dense_features, vocab_sizes=vocab_sizes, **_PRESETS[name, size])
