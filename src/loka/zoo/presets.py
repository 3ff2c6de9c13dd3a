"""Models by name: small ones for two CPU cores, and the published sizes.

Table sizes stay the caller's choice, because the published tables do not fit in one machine; so does the
count of features, and with it the shape of the first GEMM after the front. `inventory.FEATURES` has the
counts that the published sizes were made for. Wukong's sizes are named after GFLOP a sample in training,
forward and backward, as its paper counts. tests/zoo/test_published.py holds sizes against published totals.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from loka.core.exceptions import UnknownName
from loka.zoo.dcn import DCNv2
from loka.zoo.dhen import DHEN
from loka.zoo.dlrm import DLRM
from loka.zoo.history import HistoryTable
from loka.zoo.layers import Front
from loka.zoo.mmoe import MMoE
from loka.zoo.sequences.hstu import HSTU
from loka.zoo.sequences.interformer import InterFormer
from loka.zoo.sequences.kunlun import Kunlun
from loka.zoo.wukong import Wukong

MODELS: dict[str, type[nn.Module]] = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "wukong": Wukong,
    "interformer": InterFormer,
    "dhen": DHEN,
    "hstu": HSTU,
    "kunlun": Kunlun,
    "mmoe": MMoE,
}
PREDICTION_WIDTH = 8  # as in nn/linears.py, which this plain PyTorch does not import (tests/zoo)
TAKE_HISTORIES = ("interformer", "dhen", "hstu", "kunlun")

# SiLU and LayerNorm, so that the mods have something to replace.
_SMALL: dict[str, Any] = {"embedding_dim": 16, "bottom": (64,), "activation": "silu", "norm": True}
_MLPERF: dict[str, Any] = {"embedding_dim": 128, "bottom": (512, 256)}
# Wukong paper, Table 5: l, n_fm = n_lc, k, MLP; its section 7.1.4: d = 160; its appendix A: bottom MLP, ReLU.
# The MLP on top and LayerNorm in the MLPs are ours.
_WUKONG: dict[str, Any] = {"embedding_dim": 160, "bottom": (512, 256), "top": (1024, 512), "norm": True}
# What the small sequence models share with each other.
_SMALL_TOKENS: dict[str, Any] = {**_SMALL, "layers": 2, "heads": 2, "top": (128, 64)}


def _wukong(layers: int, tokens: int, rank: int, *hidden: int) -> dict[str, Any]:
    return {"layers": layers, "fm_tokens": tokens, "lc_tokens": tokens, "rank": rank, "hidden": hidden}


def _hstu(
    dim: int,
    width: int,
    *,
    layers: int,
    each: int,
    heads: int = 4,
    bottom: int = 256,
    top: int = 512,
    reach: int = 4096,
) -> dict[str, Any]:
    size = {"width": width, "layers": layers, "heads": heads, "value_dim": each, "key_dim": each}
    return {"embedding_dim": dim, "bottom": (bottom,), **size, "top": (top,), "reach": reach}


_SMALL_WUKONG = {**_SMALL, **_wukong(2, 8, 8, 128), "top": (128, 64)}
_SMALL_HSTU = _hstu(16, 32, layers=2, each=16, heads=2, bottom=64, top=64, reach=256) | _SMALL
_PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    ("dlrm", "small"): {**_SMALL, "top": (256, 128, 64)},
    # facebookresearch/dlrm, torchrec_dlrm README: dense 512,256,128, over 1024,1024,512,256,1.
    ("dlrm", "mlperf"): {**_MLPERF, "top": (1024, 1024, 512, 256)},
    ("dcnv2", "small"): {**_SMALL, "cross_layers": 2, "rank": 64, "deep": (256, 128, 64)},
    # mlcommons/training, recommendation_v2 README.
    ("dcnv2", "mlperf"): {**_MLPERF, "cross_layers": 3, "rank": 512, "deep": (1024, 1024, 512, 256)},
    # BARS benchmark, DCNv2 on Criteo_x1.
    ("dcnv2", "bars"): {
        "embedding_dim": 10,
        "bottom": None,
        "cross_layers": 3,
        "rank": None,
        "deep": (500, 500, 500),
        "parallel": True,
    },
    ("wukong", "small"): _SMALL_WUKONG,
    # 22gf has the size of the FP8 experiments in the LoKA paper (24 GFLOP a sample, batch 6144 a GPU).
    **{
        ("wukong", size): {**_WUKONG, **_wukong(layers, tokens, rank, width, width, width)}
        for size, layers, tokens, rank, width in (
            ("0.5gf", 2, 8, 24, 2048),
            ("1gf", 4, 32, 24, 2048),
            ("2gf", 8, 32, 24, 2048),
            ("6gf", 8, 48, 48, 4096),
            ("22gf", 8, 96, 96, 8192),
            ("61gf", 8, 96, 96, 16384),
            ("108gf", 8, 192, 192, 16384),
        )
    },
    # small with attentive Y, which the published sizes above do without.
    ("wukong", "attentive"): {**_SMALL_WUKONG, "attention": (64,)},
    # The paper's model for Criteo 1TB is known by its parameters and FLOP (Table 3) and by the space searched
    # (appendix A: l 1 to 4, n 8 or 16, k 24, d 128, ReLU, MLPs of 1 to 4 layers of 512, 1024 or 2048). In it
    # this is the nearest: 0.3 % fewer parameters, 0.2 % more FLOP.
    ("wukong", "criteo"): {**_MLPERF, **_wukong(4, 16, 24, 512, 512), "top": (2048, 2048, 2048, 2048)},
    # TorchEasyRec, examples/wukong_criteo.config. Its dense MLP is written to end in 128, which its model
    # refuses for d = 16: here it ends in 16.
    ("wukong", "torcheasyrec"): {
        "embedding_dim": 16,
        "bottom": (512, 256),
        **_wukong(2, 16, 24, 512),
        "top": (512, 64),
    },
    # FuxiCTR, WuKong model_config.yaml: each of 39 fields is a token. Its ReLU after an FMB's last Linear and
    # its BatchNorm in the top MLP are left out.
    ("wukong", "fuxictr"): {"embedding_dim": 64, "bottom": None, **_wukong(3, 40, 8, 512, 256), "top": (512, 256)},
    ("interformer", "small"): {**_SMALL_TOKENS, "module_tokens": 8, "dot_tokens": 16, "rank": 32, "hidden": (128,)},
    # The paper's appendix B: 4 CLS, 2 PMA and 2 recent tokens, head 1024, 512, 256, 128, Swish. 3 layers and
    # a sequence of 600 are of its industrial models (5.3.1), whose widths it does not tell: d = 160 is as in
    # our suite of shapes ("InterFormer-like", sizes assumed), the rest of the interaction arch is ours.
    ("interformer", "paper"): {
        **_WUKONG,
        "activation": "silu",
        "layers": 3,
        "module_tokens": 16,
        "dot_tokens": 32,
        "rank": 512,
        "hidden": (2048,),
        "heads": 4,
        "top": (1024, 512, 256, 128),
    },
    ("dhen", "small"): {**_SMALL_TOKENS, "module_tokens": 4, "dot_tokens": 16, "rank": 32, "hidden": 32, "pooled": 2},
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
    ("hstu", "small"): _SMALL_HSTU,
    # small with a chunked scan in place of its first attention: ours.
    ("hstu", "hybrid"): {**_SMALL_HSTU, "scans": (0,), "chunk": 16},
    # The paper's HSTU-large for MovieLens-1M, from its authors' configuration; the head is ours.
    ("hstu", "large"): _hstu(50, 50, layers=8, heads=2, each=25, top=64, bottom=64, reach=200),
    # Mamba-2's heads of 64 and expansion of 2, every other layer a scan: ours.
    ("hstu", "hybrid512"): {**_hstu(512, 512, layers=4, heads=16, each=64, reach=512), "scans": (0, 2)},
    # meta-recsys/generative-recommenders, dlrm_v3/configs.py; the head is ours.
    ("hstu", "dlrmv3"): {**_hstu(512, 512, layers=5, each=128, reach=2048), "concat": True},
    # NVIDIA/recsys-examples: kuairand_1k_ranking.gin and benchmark_ranking.gin.
    ("hstu", "kuairand"): _hstu(512, 512, layers=3, each=128),
    ("hstu", "nvidia"): _hstu(128, 1024, layers=8, each=256),
    # Over 8 outputs everywhere: fewer are planned as a prediction layer.
    ("kunlun", "small"): {
        **_SMALL_TOKENS,
        "layers": 3,
        "summary": 12,
        "seeds": 8,
        "pooled": 4,
        "kron_rank": 4,
        "window": 2,
        "longest": 8,
        "experts": 2,
        "rank": 16,
        "hidden": 64,
    },
    # As accounts quote the paper: S, T, D, k of its SumKron (256, 32, 384, 8), about 1000 events; 3 layers, 8
    # heads and a window of 100 as for clicks. Its other widths are not published: ours.
    ("kunlun", "paper"): {
        **_WUKONG,
        "embedding_dim": 384,
        "layers": 3,
        "heads": 8,
        "summary": 32,
        "seeds": 256,
        "pooled": 32,
        "kron_rank": 8,
        "window": 100,
        "longest": 1000,
        "experts": 2,
        "rank": 24,
        "hidden": 2048,
    },
    ("mmoe", "small"): {**_SMALL, "experts": 4, "expert": (128, 64), "tower": (32,)},
    # The front of MLPerf's DLRM; experts and widths are ours.
    ("mmoe", "wide"): {**_MLPERF, "experts": 8, "expert": (1024, 512), "tower": (256, 128)},
}


def presets() -> tuple[tuple[str, str], ...]:
    """All (name, size) pairs that `build` knows."""
    return tuple(_PRESETS)


def takes_history(name: str) -> bool:
    """Whether `build(name, ..., history=...)` gives a model that reads sequences."""
    return name in TAKE_HISTORIES


def needs_sequences(name: str) -> bool:
    """Whether the model is made for histories, and so degraded without `history` (docs/zoo.md says how)."""
    return name in ("interformer", "hstu", "kunlun")


def build(
    name: str,
    *,
    dense_features: int,
    vocab_sizes: Sequence[int],
    size: str = "small",
    history: HistoryTable | None = None,
    activation: str | None = None,
    tasks: int = 1,
    domain: int | None = None,
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
            Multitask Learning, 1997), but in mmoe.
        domain: the sparse feature that chooses mmoe's gates.

    Raises:
        ValueError: fewer than 1 task, or more than 8: a layer of 9 outputs counts as a hidden one, whose
            gradients a plan may run in FP8; a domain that is no sparse feature, or of another model.
        UnknownName: there is no such name, size or activation, or no history for this model; with those
            there are.
    """
    if (name, size) not in _PRESETS:
        known = [f"{model}: {', '.join(s for m, s in _PRESETS if m == model)}" for model in MODELS]
        raise UnknownName(f"model {name!r} of size {size!r}", why=known, way_out="choose a name and one of its sizes")
    if history is not None and not takes_history(name):
        raise UnknownName(
            f"{name} with a history", why=[f"{name} reads no sequences"], way_out=f"one of {', '.join(TAKE_HISTORIES)}"
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
    if name == "mmoe":
        return MMoE(front, tasks=tasks, domain=domain, **arguments)
    if domain is not None:
        raise ValueError(f"{name} has no gates for domain {domain} to choose; mmoe has")
    model = MODELS[name](front, **arguments)
    if tasks > 1:  # `squeeze(1)` of what it returns leaves several columns alone
        model.logit = nn.Linear(model.logit.in_features, tasks)  # type: ignore[arg-type, union-attr]
    return model
