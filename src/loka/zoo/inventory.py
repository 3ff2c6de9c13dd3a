"""What a preset is made of, without building it: GEMMs of its linear layers, parameters, FLOP.

    M = rows of the batch, or rows times tokens        y [M, N] = x [M, K] W [N, K]^T

Everything runs on the meta device, so that the largest published size takes no memory. Parameters
are those of the dense part: tables are as large as the data's vocabularies. FLOP are PyTorch's count of
matrix products in a forward pass, 2 M N K each; training takes about three times as many.
"""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from loka.zoo.embedded import dense_part
from loka.zoo.history import HistoryTable
from loka.zoo.presets import build
from loka.zoo.shapes import GemmShape


@dataclass(frozen=True, kw_only=True)
class Features:
    """What a row has: so many dense and sparse features, and so many past events, if any."""

    dense: int = 13
    sparse: int = 26
    events: int | None = None


# The rows of its paper's Table 5. How many embeddings that paper's 720 features make it does not tell; 770,
# with the dense one, are inferred, as in our suite of shapes.
WUKONG_SIZES = ("0.5gf", "1gf", "2gf", "6gf", "22gf", "61gf", "108gf")
# What published sizes were made for, where it is not Criteo's 13 and 26.
FEATURES: dict[tuple[str, str], Features] = {
    **{("wukong", size): Features(sparse=769) for size in WUKONG_SIZES},
    ("dhen", "elfm"): Features(sparse=769),
    # 596 events and 4 CLS tokens: the 600 tokens of our suite of shapes.
    ("interformer", "paper"): Features(events=596),
    # The item is one of the sparse features, the others are context.
    ("hstu", "large"): Features(dense=0, sparse=1, events=200),
    ("hstu", "hybrid512"): Features(dense=0, sparse=3, events=509),
    ("hstu", "dlrmv3"): Features(dense=0, sparse=3, events=1021),
    ("hstu", "kuairand"): Features(dense=0, sparse=7, events=4089),
    ("hstu", "nvidia"): Features(dense=0, sparse=3, events=4096),
    ("kunlun", "paper"): Features(events=1000),
}


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Of one preset; `gflop` is for one row and a forward pass, `gemms` for a batch."""

    name: str
    size: str
    features: Features
    parameters: int
    gflop: float
    gemms: tuple[GemmShape, ...]

    def __str__(self) -> str:
        lines = [f"{self.name}:{self.size}  {self.parameters:,} parameters  {self.gflop:.4g} GFLOP a row"]
        lines += [f"  {gemm.count:>3} x  M={gemm.m} K={gemm.k} N={gemm.n}  {gemm.site}" for gemm in self.gemms]
        return "\n".join(lines)


def inventory(name: str, size: str = "small", *, batch: int = 1, features: Features | None = None) -> Inventory:
    """Looks at a preset with the features it was made for, or with `features`.

    Equal GEMMs are listed once, with their count, under the path of the first.
    Raises UnknownName as `build` does.
    """
    from torch.utils.flop_counter import FlopCounterMode  # not above: it imports triton

    features = features or FEATURES.get((name, size), Features())
    # An item's history shares its table, as in a ranking model.
    history = None if features.events is None else HistoryTable(column=features.sparse - 1)
    with torch.device("meta"):
        model = build(
            name, dense_features=features.dense, vocab_sizes=(1,) * features.sparse, size=size, history=history
        )
        inputs = [torch.empty(batch, features.dense), torch.empty(batch, features.sparse, dtype=torch.int64)]
        if features.events is not None:
            inputs += [torch.empty(batch, features.events, dtype=torch.int64), torch.empty(batch, dtype=torch.int64)]
        with FlopCounterMode(display=False) as counter:
            gemms = linear_gemms(model, *inputs)
    seen = Counter((gemm.m, gemm.k, gemm.n) for gemm in gemms)
    first = {(gemm.m, gemm.k, gemm.n): gemm.site for gemm in reversed(gemms)}
    return Inventory(
        name=name,
        size=size,
        features=features,
        parameters=sum(weight.numel() for weight in dense_part(model).parameters()),
        gflop=counter.get_total_flops() / batch / 1e9,
        gemms=tuple(_gemm(f"{name}:{size}", first[shape], shape, count) for shape, count in seen.items()),
    )


def linear_gemms(model: nn.Module, *inputs: torch.Tensor) -> tuple[GemmShape, ...]:
    """The GEMM of each nn.Linear of one forward pass `model(*inputs)`, in order of the calls."""
    calls: list[GemmShape] = []
    handles = []

    def note(path: str, linear: nn.Linear) -> None:
        def hook(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            shape = (arguments[0].numel() // linear.in_features, linear.in_features, linear.out_features)
            calls.append(_gemm(type(model).__name__, path, shape, 1))

        handles.append(linear.register_forward_pre_hook(hook))

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            note(path, module)
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(calls)


def _gemm(model: str, site: str, shape: tuple[int, int, int], count: int) -> GemmShape:
    m, k, n = shape
    return GemmShape(model=model, site=site, kind="linear", batch=1, m=m, k=k, n=n, count=count)
