"""Sites of a frozen model: y [..., N] = x [..., K] @ W [N, K]^T with W quantized once and kept.

The input is quantized in every call by the recipe's own scales where those belong to a row or to a part of a
row: a row's answer then depends on that row alone, nothing saturates, and nothing need be calibrated. A scale
of the whole input would make it depend on the other rows of the batch, so such recipes have a static one.
These sites keep an FP8 copy of a weight, which is safe only because nothing else may write to a frozen model.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from loka.compiler.joint_sites import misfit, unjoined
from loka.core.compiling import traced_here
from loka.core.exceptions import ServeRefused
from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem, dtype_name, linear_problem, target_of
from loka.core.recipe import Cast, Gemm, Granularity
from loka.core.records.report import HP
from loka.kernels.custom_op import registered
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import fit, run_gemm, scaled_gemm
from loka.kernels.quantize.fp8_weights import fp8_weights
from loka.kernels.quantize.int8_weights import CAST as INT8
from loka.kernels.quantize.quantizer import quantize_pair
from loka.kernels.quantize.side import Side, new_health
from loka.nn.fp8_weight import CAST, dequantized
from loka.nn.site import DTYPES, site_forwards
from loka.nn.site_ops import Candidates, site_forward

_ROWS = 16  # of the problem by which a weight's padding is asked; it does not depend on the rows


@dataclass(frozen=True, kw_only=True)
class FrozenWeight:
    """`low` holds W [N, K] padded as the kernel wants; `dtype` is what W had.

    `even`: float32 [max(N, K)], one value all over, where W has one scale for all rows; else None.
    """

    low: Quantized
    sides: tuple[int, ...]
    dtype: torch.dtype
    even: torch.Tensor | None = None

    @property
    def joined(self) -> tuple[torch.Tensor, torch.dtype] | None:
        """The scale by which compiled sites of such a weight can be joined into regions, if they can: of all
        rows, or of each in INT8; and the dtype that has row * scale to the last bit."""
        if self.even is not None:
            return self.even, self.dtype
        if self.low.cast == INT8 and misfit(self.sides[1], self.sides[0]) is None:
            return self.low.scale.view(-1), torch.float32
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, what it holds."""
        held = {"data": self.low.data, "scale": self.low.scale}
        return held if self.even is None else held | {"even": self.even}

    @property
    def bytes(self) -> int:
        return self.low.data.numel() + 4 * self.low.scale.numel()


def input_cast(candidate: str) -> Cast:
    """How the candidate quantizes the input."""
    casts = candidate_named(candidate).recipe.casts(Gemm.OUTPUT)
    assert casts is not None
    return casts[0]


def scale_source(candidate: str) -> str:
    """Where a frozen site's input scales come from: "row" or "group", current; or "static".

    Raises ServeRefused for scales that rows of a batch share and that are not one for all, and for a centred
    or hot recipe, whose vector or residuals a frozen site does not know.
    """
    if what := candidate_named(candidate).unfrozen:
        raise ServeRefused(
            f"{candidate} {what}, which frozen sites do not",
            way_out="plan again without centred and hot recipes: leave them out of measure(candidates=[...]), or name "
            "another for its layer, plan(force={'layer/output': ...})",
        )
    granularity = input_cast(candidate).granularity
    if granularity is Granularity.TENSOR:
        return "static"
    if granularity is Granularity.ROW:
        return "row"
    if granularity is Granularity.GROUP_1X128:
        return "group"
    raise ServeRefused(
        f"{candidate} gives {granularity.value[0]} rows one scale: answers would depend on their neighbours",
        way_out="plan again with rowwise_e4m3, blockwise_e4m3 or tensorwise_e4m3 for `output`",
    )


def _problem(rows: int, sides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Problem:
    return linear_problem(
        Gemm.OUTPUT,
        rows=rows,
        in_features=sides[1],
        out_features=sides[0],
        dtype=dtype_name(dtype),
        target=target_of(device),
    )


def joinable(candidate: str, sides: Sequence[int]) -> bool:
    """Whether a site whose weight has `sides` N, K may be in a region of a compiled model."""
    return unjoined(candidate) is None and misfit(sides[1], sides[0]) is None


def even_weight(row: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> FrozenWeight:
    """Of row float8 [N, K] under one scale: float32 [max(N, K)], one value all over."""
    low = Quantized(row, scale[: row.shape[0]].view(-1, 1), CAST)
    return FrozenWeight(low=low, sides=tuple(row.shape), dtype=dtype, even=scale)


def freeze_weight(candidate: str, weight: torch.Tensor, dtype: torch.dtype, *, joined: bool) -> FrozenWeight:
    """Quantizes a weight [N, K] as the converted model would in a call whose input has `dtype`: eagerly, or
    `joined` into a region."""
    n, k = weight.shape
    if joined and joinable(candidate, (n, k)) and not input_cast(candidate).format.uniform:
        row, _, scale = fp8_weights([weight.detach()], [False])
        return even_weight(row, scale, weight.dtype)
    run = scaled_gemm(candidate, _problem(_ROWS, (n, k), dtype, weight.device))
    low, _ = quantize_pair(weight.detach(), row=Side(cast=run.casts[1], padded=run.padded_b), column=None)
    assert low is not None
    return FrozenWeight(low=low, sides=(n, k), dtype=weight.dtype)


class FrozenSite:
    """Multiplies by a kept weight; the one that a caller hands over is not looked at.

    `input_scale` float32 [1] where the scale is static, else None. Where it answers for a bucket of `in_hp`
    it is a site in high precision, and the weight is looked at. Raises as a converted site does for inputs
    of another width or dtype.
    """

    def __init__(
        self,
        name: str,
        candidate: str,
        weight: FrozenWeight,
        input_scale: torch.Tensor | None,
        in_hp: Collection[int] = (),
    ) -> None:
        self.name, self.candidate, self.in_hp = name, candidate, frozenset(in_hp)
        self.traced_in_hp = False
        self.weight, self.input_scale = weight, input_scale
        self.health = new_health(weight.low.data.device)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N] in the dtype of x, or autocast's where that is on."""
        rows = as_rows(self.name, x, self.weight.sides[1], self.weight.dtype)
        if _compiling():
            y = _precise(rows, weight) if self.traced_in_hp else self._traced(rows)
        else:
            if observer := observing():
                observer(self.name, rows)
            y = _precise(rows, weight) if _bucket() in self.in_hp else self.multiply(rows)
        return y.view(*x.shape[:-1], self.weight.sides[0])

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [T, K] -> [T, N]."""
        low, (n, k) = self.weight.low, self.weight.sides
        return _frozen_gemm(rows, low.data, low.scale, self.input_scale, self.candidate, n, k)

    def _traced(self, rows: torch.Tensor) -> torch.Tensor:
        """As ops that a compiler traces: one that a region may join, or one that it sees nothing of."""
        low, joined = self.weight.low, self.weight.joined
        if joined is None:
            n, k = self.weight.sides
            return frozen_gemm(rows, low.data, low.scale, self.input_scale, self.candidate, n, k, self.name)
        weight = dequantized(low.data, *joined)
        return site_forward(rows, weight, self.health, self.name, self.candidate, HP, HP, False, False, True)[0]


def _frozen_gemm(
    rows: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    candidate: str,
    n: int,
    k: int,
) -> torch.Tensor:
    """rows [T, K] -> [T, N] by a weight in FP8: `data` padded as the kernel wants, and its scale."""
    if rows.shape[0] == 0:
        return rows.new_zeros(0, n)
    run = scaled_gemm(candidate, _problem(rows.shape[0], (n, k), rows.dtype, rows.device))
    side = Side(cast=run.casts[0], padded=run.padded_a)
    low, _ = quantize_pair(rows, row=side, column=None, given=input_scale)
    assert low is not None
    data = data if data.shape == run.padded_b else fit(data, run.padded_b)
    return run(low, Quantized(data, scale, run.casts[1]))


def _frozen_gemm_shown(
    rows: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    candidate: str,
    n: int,
    k: int,
    name: str,
) -> torch.Tensor:
    if observer := observing():
        observer(name, rows)
    return _frozen_gemm(rows, data, scale, input_scale, candidate, n, k)


def _frozen_gemm_fake(rows: torch.Tensor, n: int) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], n)


frozen_gemm = registered("loka::frozen_gemm", _frozen_gemm_shown, _frozen_gemm_fake)


def _precise(rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    assert weight is not None
    if _compiling():
        return rows @ weight.to(rows.dtype).t()
    return run_gemm(HP, rows, weight, gemm=Gemm.OUTPUT, dtype=rows.dtype)


def frozen_sites(tree: nn.Module) -> dict[str, FrozenSite]:
    sites = [site for forward in site_forwards(tree).values() for site in forward.sites]
    return {site.name: site for site in sites if isinstance(site, FrozenSite)}


class HighPrecisionSite:
    """Of a layer whose gradients alone are planned in FP8."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = as_rows(self.name, x, weight.shape[1], weight.dtype)
        return _precise(rows, weight).view(*x.shape[:-1], weight.shape[0])


class UnreachedSite:
    """A planned site that no row reached when the model was frozen, so its weight was never seen."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise ServeRefused(
            f"{self.name} runs now and did not when the model was frozen",
            why=["its weight was not quantized and its input was not calibrated"],
            way_out="freeze again with calibration rows that take this path",
        )


Watch = Callable[[str, str, torch.Tensor, torch.Tensor], None]
"""Called with the site's name, its candidate for `output`, rows [T, K] and the weight [N, K]."""


class RecordingSite:
    def __init__(self, name: str, candidates: Candidates, watch: Watch) -> None:
        self.name, self.candidate, self.watch = name, candidates[0], watch

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = as_rows(self.name, x, weight.shape[1], weight.dtype)
        if self.candidate != HP:
            self.watch(self.name, self.candidate, rows, weight)
        y = run_gemm(HP, rows, weight, gemm=Gemm.OUTPUT, dtype=rows.dtype)
        return y.view(*x.shape[:-1], weight.shape[0])


def as_rows(name: str, x: torch.Tensor, features: int, dtype: torch.dtype) -> torch.Tensor:
    """x [..., K] as rows [T, K] in the dtype in which a converted site (nn/site.py) computes."""
    if x.shape[-1] != features:
        raise ValueError(f"{name}: input has {x.shape[-1]} features, the weight takes {features}")
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype in DTYPES:
        x = x.to(torch.get_autocast_dtype(kind))
    elif x.dtype != dtype:
        raise TypeError(f"{name}: input is {x.dtype}, the weight {dtype}; cast one, or freeze with autocast=")
    return x.reshape(-1, features)


Observer = Callable[[str, torch.Tensor], None]
_HERE = threading.local()


def observing() -> Observer | None:
    return getattr(_HERE, "observer", None)


def _compiling() -> bool:
    return traced_here() or getattr(_HERE, "traced", False)


def _bucket() -> int | None:
    return getattr(_HERE, "bucket", None)


@contextmanager
def _with(name: str, value: object) -> Iterator[None]:
    before = getattr(_HERE, name, None)  # a model's forward may ask another server
    setattr(_HERE, name, value)
    try:
        yield
    finally:
        setattr(_HERE, name, before)


def answering(bucket: int) -> AbstractContextManager[None]:
    """Inside, frozen sites that this thread runs go by the plan for `bucket` rows."""
    return _with("bucket", bucket)


def tracing() -> AbstractContextManager[None]:
    """Inside, frozen sites that this thread runs are ops that a compiler traces."""
    return _with("traced", True)


def observed_by(observer: Observer | None) -> AbstractContextManager[None]:
    """Inside, frozen sites that this thread runs show `observer` their name and rows [T, K], or nobody."""
    return _with("observer", observer)
