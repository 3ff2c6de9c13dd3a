"""Models by name: small ones for two CPU cores, and the published sizes.

Table sizes stay the caller's choice, because the published tables do not fit in one machine; so does the
count of features, and with it the shape of the first GEMM after the front. `inventory.FEATURES` has the
counts that the published sizes were made for. Wukong's sizes are named after GFLOP a sample in training,
forward and backward, as its paper counts. tests/zoo/test_published.py holds sizes against published totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from loka.core.exceptions import UnknownName
from loka.zoo.dcn import DCNv2
from loka.zoo.dhen import DHEN
from loka.zoo.dlrm import DLRM
from loka.zoo.history import HistoryTable
from loka.zoo.hstu import HSTU
from loka.zoo.interformer import InterFormer
from loka.zoo.layers import Front
from loka.zoo.wukong import Wukong

MODELS: dict[str, type[nn.Module]] = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "wukong": Wukong,
    "interformer": InterFormer,
    "dhen": DHEN,
    "hstu": HSTU,
}
PREDICTION_WIDTH = 8  # as in nn/linears.py, which this plain PyTorch does not import (tests/zoo)
TAKE_HISTORIES = ("interformer", "dhen", "hstu")

# SiLU and LayerNorm, so that the mods have something to replace.
_SMALL: dict[str, Any] = {"embedding_dim": 16, "activation": "silu", "norm": True}
# Wukong paper, Table 5: l, n_fm = n_lc, k, MLP; its section 7.1.4: d = 160; its appendix A: bottom MLP, ReLU.
# The MLP on top and LayerNorm in the MLPs are ours.
_WUKONG: dict[str, Any] = {
    "embedding_dim": 160,
    "bottom": (512, 256),
    "rank": 24,
    "hidden": (2048, 2048, 2048),
    "top": (1024, 512),
    "norm": True,
}
# What the small sequence models share with each other.
_SMALL_TOKENS: dict[str, Any] = {**_SMALL, "bottom": (64,), "layers": 2, "heads": 2, "top": (128, 64)}

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
    ("wukong", "1gf"): {**_WUKONG, "layers": 4, "fm_tokens": 32, "lc_tokens": 32},
    ("wukong", "2gf"): {**_WUKONG, "layers": 8, "fm_tokens": 32, "lc_tokens": 32},
    ("wukong", "6gf"): {
        **_WUKONG,
        "layers": 8,
        "fm_tokens": 48,
        "lc_tokens": 48,
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
    ("wukong", "61gf"): {
        **_WUKONG,
        "layers": 8,
        "fm_tokens": 96,
        "lc_tokens": 96,
        "rank": 96,
        "hidden": (16384, 16384, 16384),
    },
    ("wukong", "108gf"): {
        **_WUKONG,
        "layers": 8,
        "fm_tokens": 192,
        "lc_tokens": 192,
        "rank": 192,
        "hidden": (16384, 16384, 16384),
    },
    # small with attentive Y, which the published sizes above do without.
    ("wukong", "attentive"): {
        **_SMALL,
        "bottom": (64,),
        "layers": 2,
        "fm_tokens": 8,
        "lc_tokens": 8,
        "rank": 8,
        "hidden": (128,),
        "top": (128, 64),
        "attention": (64,),
    },
    # The paper's model for Criteo 1TB is known by its parameters and FLOP (Table 3) and by the space searched
    # (appendix A: l 1 to 4, n 8 or 16, k 24, d 128, ReLU, MLPs of 1 to 4 layers of 512, 1024 or 2048). In it
    # this is the nearest: 0.3 % fewer parameters, 0.2 % more FLOP.
    ("wukong", "criteo"): {
        "embedding_dim": 128,
        "bottom": (512, 256),
        "layers": 4,
        "fm_tokens": 16,
        "lc_tokens": 16,
        "rank": 24,
        "hidden": (512, 512),
        "top": (2048, 2048, 2048, 2048),
    },
    # TorchEasyRec, examples/wukong_criteo.config. Its dense MLP is written to end in 128, which its model
    # refuses for d = 16: here it ends in 16.
    ("wukong", "torcheasyrec"): {
        "embedding_dim": 16,
        "bottom": (512, 256),
        "layers": 2,
        "fm_tokens": 16,
        "lc_tokens": 16,
        "rank": 24,
        "hidden": (512,),
        "top": (512, 64),
    },
    # FuxiCTR, WuKong model_config.yaml: each of 39 fields is a token. Its ReLU after an FMB's last Linear and
    # its BatchNorm in the top MLP are left out.
    ("wukong", "fuxictr"): {
        "embedding_dim": 64,
        "bottom": None,
        "layers": 3,
        "fm_tokens": 40,
        "lc_tokens": 40,
        "rank": 8,
        "hidden": (512, 256),
        "top": (512, 256),
    },
    ("interformer", "small"): {
        **_SMALL_TOKENS,
        "module_tokens": 8,
        "dot_tokens": 16,
        "rank": 32,
        "hidden": (128,),
    },
    # The paper's appendix B: 4 CLS, 2 PMA and 2 recent tokens, head 1024, 512, 256, 128, Swish. 3 layers and
    # a sequence of 600 are of its industrial models (5.3.1), whose widths it does not tell: d = 160 is as in
    # our suite of shapes ("InterFormer-like", sizes assumed), the rest of the interaction arch is ours.
    ("interformer", "paper"): {
        "embedding_dim": 160,
        "bottom": (512, 256),
        "activation": "silu",
        "layers": 3,
        "module_tokens": 16,
        "dot_tokens": 32,
        "rank": 512,
        "hidden": (2048,),
        "heads": 4,
        "top": (1024, 512, 256, 128),
        "norm": True,
    },
    ("dhen", "small"): {
        **_SMALL_TOKENS,
        "module_tokens": 4,
        "dot_tokens": 16,
        "rank": 32,
        "hidden": 32,
        "pooled": 2,
    },
    # Stand-in for LoKA's External Large FM, of which two GEMMs are published, the smallest and the largest of
    # its 27 shapes (batch 2048): 256 -> 768, here in the dense MLP, and 123200 = 770 * 160 -> 1024, here the
    # first cross layer over 770 tokens. All else is ours.
    ("dhen", "elfm"): {
        "embedding_dim": 160,
        "bottom": (256, 768),
        "layers": 4,
        "module_tokens": 32,
        "dot_tokens": 64,
        "rank": 1024,
        "heads": 4,
        "hidden": 640,
        "pooled": 8,
        "top": (2048, 1024, 512),
        "norm": True,
    },
    ("hstu", "small"): {
        **_SMALL,
        "bottom": (64,),
        "width": 32,
        "layers": 2,
        "heads": 2,
        "value_dim": 16,
        "key_dim": 16,
        "top": (64,),
        "reach": 256,
    },
    # The paper's HSTU-large for MovieLens-1M, from its authors' configuration; the head is ours.
    ("hstu", "large"): {
        "embedding_dim": 50,
        "bottom": (64,),
        "width": 50,
        "layers": 8,
        "heads": 2,
        "value_dim": 25,
        "key_dim": 25,
        "top": (64,),
        "reach": 200,
    },
    # meta-recsys/generative-recommenders, dlrm_v3/configs.py; the head is ours.
    ("hstu", "dlrmv3"): {
        "embedding_dim": 512,
        "bottom": (256,),
        "width": 512,
        "layers": 5,
        "heads": 4,
        "value_dim": 128,
        "key_dim": 128,
        "top": (512,),
        "reach": 2048,
        "concat": True,
    },
    # NVIDIA/recsys-examples: kuairand_1k_ranking.gin and benchmark_ranking.gin.
    ("hstu", "kuairand"): {
        "embedding_dim": 512,
        "bottom": (256,),
        "width": 512,
        "layers": 3,
        "heads": 4,
        "value_dim": 128,
        "key_dim": 128,
        "top": (512,),
        "reach": 4096,
    },
    ("hstu", "nvidia"): {
        "embedding_dim": 128,
        "bottom": (256,),
        "width": 1024,
        "layers": 8,
        "heads": 4,
        "value_dim": 256,
        "key_dim": 256,
        "top": (512,),
        "reach": 4096,
    },
}


def presets() -> tuple[tuple[str, str], ...]:
    """All (name, size) pairs that `build` knows."""
    return tuple(_PRESETS)


def takes_history(name: str) -> bool:
    """Whether `build(name, ..., history=...)` gives a model that reads sequences."""
    return name in TAKE_HISTORIES


def needs_sequences(name: str) -> bool:
    """Whether the model is made for histories, and so degraded without `history` (docs/zoo.md says how)."""
    return name in ("interformer", "hstu")


def build(
    name: str,
    *,
    dense_features: int,
    vocab_sizes: Sequence[int],
    size: str = "small",
    history: HistoryTable | None = None,
    activation: str | None = None,
    tasks: int = 1,
) -> nn.Module:
    """A freshly initialized model, `forward(dense [B, D], sparse [B, F]) -> logits [B]`, or [B, tasks].

    Published sizes are large: build them under `torch.device("meta")` to look at their shapes.

    Args:
        name: of a model; `presets` has all names with their sizes.
        dense_features: D.
        vocab_sizes: of the F sparse features.
        size: of the model.
        history: what the rows' sequences hold. The model is then called with
            (dense, sparse, sequence [B, L] int64, lengths [B] int64).
        activation: of its MLPs, "relu", "silu" or "gelu", in place of the size's own.
        tasks: how many logits a row has; all that is before the last linear layer is shared (Caruana,
            Multitask Learning, 1997).

    Raises:
        ValueError: fewer than 1 task, or more than 8: a layer of 9 outputs counts as a hidden one, whose
            gradients a plan may run in FP8.
        UnknownName: there is no such name, size or activation, or no history for this model; with those
            there are.
    """
    if (name, size) not in _PRESETS:
        known = [f"{model}: {', '.join(s for m, s in _PRESETS if m == model)}" for model in MODELS]
        raise UnknownName(
            f"model {name!r} of size {size!r}", why=known, way_out="choose a name and one of its sizes"
        )
    if history is not None and not takes_history(name):
        raise UnknownName(
            f"{name} with a history",
            why=[f"{name} reads no sequences"],
            way_out=f"one of {', '.join(TAKE_HISTORIES)}",
        )
    arguments = dict(_PRESETS[name, size])
    if activation is not None:
        arguments["activation"] = activation
    front = Front(
        dense_features=dense_features,
        vocab_sizes=vocab_sizes,
        dim=arguments.pop("embedding_dim"),
        bottom=arguments.pop("bottom"),
        history=history,
        # What the MLPs of front and model have in common.
        **{key: arguments[key] for key in ("activation", "norm") if key in arguments},
    )
    if not 1 <= tasks <= PREDICTION_WIDTH:
        raise ValueError(
            f"tasks is {tasks}; from 1 to {PREDICTION_WIDTH}, the most outputs of what plans take for a "
            "prediction layer"
        )
    model = MODELS[name](front, **arguments)
    if tasks > 1:  # `squeeze(1)` of what it returns leaves several columns alone
        model.logit = nn.Linear(model.logit.in_features, tasks)  # type: ignore[arg-type, union-attr]
    return model
