"""The GEMMs of a site as two opaque custom ops: quantization and kernels, unseen by a compiler.

    forward    y  = x W^T                             x [T, in], W [out, in]
    backward   dx = dy W,  dW = dy^T x                dy [T, out]

An exposed scale tensor would let Inductor change its strides, which kernels with a fixed
scale layout then read out of bounds; inside an op nothing can be rearranged. The ops have
fakes, so torch.compile sees shapes and dtypes and graphs stay whole. FP8 copies of weights are made by the
op that uses them and kept for its own backward alone, so nothing can be stale: another thread, `.data`,
an optimizer or `load_state_dict` may write the weight at any time between two calls.

Each of x, W and dy feeds two GEMMs, once transposed. Where both run in FP8, one pass makes both
copies, and what backward needs is kept as FP8 (one byte an element instead of two or four).
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from loka.core.exceptions import NotConverted
from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem, dtype_name, linear_problem, target_of
from loka.core.recipe import Gemm
from loka.core.records.report import HP
from loka.kernels.custom_op import registered
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import ScaledGemm, run_gemm, scaled_gemm
from loka.kernels.quantize.quantizer import append_residuals, quantize_operand, quantize_pair, quantize_pairs
from loka.kernels.quantize.side import BAD_A, BAD_B, Side, empty_scale, health_index, run_index
from loka.nn.fp8_weight import Fp8Weight
from loka.nn.site_launches import Multiply, Results, can_record, recorded_pass

Candidates = tuple[str, str, str]
"""For output, grad_input and grad_weight: "hp" or "kernel:recipe"."""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    rows: int
    features: int
    outputs: int
    device: torch.device

    def fp8(self, gemm: Gemm, name: str, dtype: torch.dtype) -> ScaledGemm | None:
        """The FP8 GEMM, or None for "hp" and for an empty problem."""
        if name == HP or 0 in (self.rows, self.features, self.outputs):
            return None
        return scaled_gemm(name, self.problem(gemm, dtype))

    def problem(self, gemm: Gemm, dtype: torch.dtype) -> Problem:
        return linear_problem(
            gemm,
            rows=self.rows,
            in_features=self.features,
            out_features=self.outputs,
            dtype=dtype_name(dtype),
            target=target_of(self.device),
        )

    def second_side(self, gemm: Gemm, name: str) -> Side | None:
        """Operand B of a backward GEMM, made ahead of it; asks no kernel, so sides may be symbols."""
        if name == HP:
            return None
        candidate = candidate_named(name)
        casts = candidate.recipe.casts(gemm)
        assert casts is not None
        padded = candidate.padded(self.problem(gemm, torch.bfloat16))
        return Side(cast=casts[1], padded=(padded.n, padded.k), flag=health_index(gemm, BAD_B))


def _first_side(run: ScaledGemm) -> Side:
    flag = health_index(run.problem.gemm, BAD_A)
    return Side(cast=run.casts[0], padded=run.padded_a, flag=flag, count=run_index(flag))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Forward:
    """`recorded`: whether the pass is recorded as a whole (nn/site_launches.py), by this object."""

    run: ScaledGemm
    x: tuple[Side, Side | None]
    weight: tuple[Side, Side | None]
    recorded: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class _Backward:
    run: ScaledGemm
    side: Side
    recorded: bool


@functools.lru_cache(maxsize=4096)  # a ragged batch makes many problems
def _forward_of(
    sides: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    candidates: Candidates,
    keep: tuple[bool, bool],
) -> _Forward | None:
    """For `sides` rows, features, outputs; None where `output` is in hp, or empty."""
    layer = _Layer(rows=sides[0], features=sides[1], outputs=sides[2], device=device)
    output, grad_input, grad_weight = candidates
    run = layer.fp8(Gemm.OUTPUT, output, dtype)
    if run is None:
        return None
    second = Side(cast=run.casts[1], padded=run.padded_b, flag=health_index(Gemm.OUTPUT, BAD_B))
    return _Forward(
        run=run,
        x=(_first_side(run), layer.second_side(Gemm.GRAD_WEIGHT, grad_weight) if keep[0] else None),
        weight=(second, layer.second_side(Gemm.GRAD_INPUT, grad_input) if keep[1] else None),
        recorded=can_record(run, device),
    )


@functools.lru_cache(maxsize=4096)
def _backward_of(
    sides: tuple[int, int, int], device: torch.device, dtype: torch.dtype, name: str, gemm: Gemm
) -> _Backward | None:
    layer = _Layer(rows=sides[0], features=sides[1], outputs=sides[2], device=device)
    run = layer.fp8(gemm, name, dtype)
    return None if run is None else _Backward(run=run, side=_first_side(run), recorded=can_record(run, device))


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def forward_parts(
    x: torch.Tensor,
    weight: torch.Tensor,
    health: torch.Tensor,
    candidates: Candidates,
    keep: tuple[bool, bool],
    hot: torch.Tensor | None = None,
) -> Parts:
    sides = (x.shape[0], x.shape[1], weight.shape[0])
    made = _forward_of(sides, x.device, x.dtype, candidates, keep)
    if made is None:
        y = run_gemm(candidates[0], x, weight, gemm=Gemm.OUTPUT, dtype=x.dtype)
        return y, *_unmade(x, weight, candidates, keep)
    if x.device != weight.device:  # both are quantized together, and a launch made again is given addresses alone
        raise RuntimeError(f"the input is on {x.device}, the weight on {weight.device}: move one to the other's device")

    def make(multiply: Multiply = ScaledGemm.__call__) -> Results:
        if isinstance(weight, Fp8Weight):
            low_x, kept_x = quantize_pair(x, row=made.x[0], column=made.x[1], health=health)
            low_weight: Quantized | None = weight.quantized(made.weight[0], health)
            kept_weight: Quantized | None = None
        else:
            operands = (x, *made.x), (weight, *made.weight)
            (low_x, kept_x), (low_weight, kept_weight) = quantize_pairs(operands, health=health)
        assert low_x is not None
        assert low_weight is not None
        if not isinstance(weight, Fp8Weight):
            append_residuals(low_weight, weight, hot, second=True)
        append_residuals(low_x, x, hot)
        kept = [part for copy in (kept_x, kept_weight) for part in ((copy.data, copy.scale) if copy else (None, None))]
        return [multiply(made.run, low_x, low_weight), *kept]

    if made.recorded and not isinstance(weight, Fp8Weight):
        return _filled(recorded_pass((made,), (x, weight, health, hot), make, (made.run,)), x)
    return _filled(make(), x)


def _site(
    x: torch.Tensor,
    weight: torch.Tensor,
    health: torch.Tensor,
    site: str,
    output: str,
    grad_input: str,
    grad_weight: str,
    keep_input: bool,
    keep_weight: bool,
    join: bool,
    hot: torch.Tensor | None = None,
) -> Parts:
    """x [T, in] @ weight [out, in]^T through candidate `output`, and what backward wants of its operands.

    Returns y [T, out] in the dtype of x; x^T quantized for `grad_weight` and its scale, if
    `keep_input`; weight^T quantized for `grad_input` and its scale, if `keep_weight`. What is
    not kept is empty. `site` names it in a graph, and `join` says whether a compiler may join it with others
    (loka/compiler); neither changes anything here. `hot` int64 [32]: the columns of a hot recipe.

    `health` int64 [3, 3]: one row a GEMM, see kernels/quantize/quantizer.py. It is write-only telemetry
    that no result depends on, so the ops are declared without side effects and write through
    `.data`: a declared mutation would make autograd refuse the backward of a compiled model
    after any other forward, because the buffer that backward also takes had changed.
    """
    candidates = (output, grad_input, grad_weight)
    return forward_parts(x, weight, health.data, candidates, (keep_input, keep_weight), hot)


def _site_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    output: str,
    grad_input: str,
    grad_weight: str,
    keep_input: bool,
    keep_weight: bool,
) -> Parts:
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, *_unmade(x, weight, (output, grad_input, grad_weight), (keep_input, keep_weight))


def _unmade(
    x: torch.Tensor, weight: torch.Tensor, candidates: Candidates, keep: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is kept, unwritten: of a fake, and of an op without rows, which gives what its fake says."""
    layer, (output, grad_input, grad_weight) = _layer(x, weight), candidates
    keep_input, keep_weight = (kept and output != HP for kept in keep)
    kept_x = layer.second_side(Gemm.GRAD_WEIGHT, grad_weight) if keep_input else None
    kept_weight = layer.second_side(Gemm.GRAD_INPUT, grad_input) if keep_weight else None
    return *_parts(_unwritten(kept_x, x.device), x), *_parts(_unwritten(kept_weight, x.device), x)


def backward_parts(
    dy: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    health: torch.Tensor,
    names: tuple[str, str],
    want: tuple[bool, bool],
    features: int,
    weight_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    sides, device = (dy.shape[0], features, dy.shape[1]), dy.device
    dx = dw = None
    if dy.numel() == 0:
        dx = dy.new_zeros(sides[0], features) if want[0] else None
        dw = dy.new_zeros(sides[2], features, dtype=weight_dtype) if want[1] else None
        return _or_empty(dx, dy.dtype, dy), _or_empty(dw, weight_dtype, dy)
    for_input = _backward_of(sides, device, dy.dtype, names[0], Gemm.GRAD_INPUT) if want[0] else None
    for_weight = _backward_of(sides, device, weight_dtype, names[1], Gemm.GRAD_WEIGHT) if want[1] else None

    def make(multiply: Multiply = ScaledGemm.__call__) -> Results:
        row, column = (each.side if each else None for each in (for_input, for_weight))
        low, transposed = quantize_pair(dy, row=row, column=column, health=health)
        dx = dw = None
        if for_input and low:
            dx = multiply(for_input.run, low, _second(for_input.run, weight, weight_scale, health))
        if for_weight and transposed:
            dw = multiply(for_weight.run, transposed, _second(for_weight.run, x, x_scale, health))
        return [dx, dw]

    if _are_recorded((for_input, weight_scale), (for_weight, x_scale)):
        runs = tuple(each.run for each in (for_input, for_weight) if each)
        dx, dw = recorded_pass((for_input, for_weight), (dy, weight, weight_scale, x, x_scale, health), make, runs)
    elif for_input or for_weight:
        dx, dw = make()
    if want[0] and dx is None:
        dx = run_gemm(names[0], dy, weight.t(), gemm=Gemm.GRAD_INPUT, dtype=dy.dtype)
    if want[1] and dw is None:
        dw = run_gemm(names[1], dy.t(), x.t(), gemm=Gemm.GRAD_WEIGHT, dtype=weight_dtype)
    return _or_empty(dx, dy.dtype, dy), _or_empty(dw, weight_dtype, dy)


def _are_recorded(*gemms: tuple[_Backward | None, torch.Tensor]) -> bool:
    """Whether those that run in FP8 are, on operands that forward kept."""
    here = [made.recorded and scale.numel() > 0 for made, scale in gemms if made]
    return bool(here) and all(here)


def _or_empty(found: torch.Tensor | None, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0, dtype=dtype) if found is None else found


def _site_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    health: torch.Tensor,
    site: str,
    grad_input: str,
    grad_weight: str,
    want_input: bool,
    want_weight: bool,
    features: int,
    weight_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx [T, features] in the dtype of dy and dW [out, features] in `weight_dtype`; empty if not wanted.

    `x` is the input [T, features], or its transpose as `loka::site` quantized it; `weight`
    likewise. A scale is empty where its tensor is in high precision.
    """
    names, want = (grad_input, grad_weight), (want_input, want_weight)
    return backward_parts(dy, x, x_scale, weight, weight_scale, health.data, names, want, features, weight_dtype)


def _site_backward_fake(
    dy: torch.Tensor, want_input: bool, want_weight: bool, features: int, weight_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    dx = dy.new_empty(dy.shape[0], features) if want_input else dy.new_empty(0)
    dw = dy.new_empty(dy.shape[1], features, dtype=weight_dtype) if want_weight else dy.new_empty(0, dtype=weight_dtype)
    return dx, dw


def transformed(site: str) -> NotConverted:
    return NotConverted(
        f"{site}: FP8 sites do not run inside torch.func (vmap, grad, jvp, jacrev, ...) or forward-mode AD",
        why=["scales are of whole tensors, and the transforms hand on slices and tangents of them"],
        way_out=f"keep it in high precision (loka.plan(report, force={{'{site}/*': 'hp'}})), loka.revert(model) before "
        "the transform, or use torch.autograd",
    )


def _below_gradients(*given: Any, **named: Any) -> Parts:
    """An autograd function gives the gradients. The transforms of torch.func, compiled, drop it, and take the op
    for a constant."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise transformed(named["site"] if "site" in named else given[3])
    with torch._C._AutoDispatchBelowAutograd():
        return site_forward(*given, **named)


site_forward = registered("loka::site", _site, _site_fake)
torch.library.impl("loka::site", "Autograd", _below_gradients)
site_backward = registered("loka::site_backward", _site_backward, _site_backward_fake)


def _layer(x: torch.Tensor, weight: torch.Tensor) -> _Layer:
    return _Layer(rows=x.shape[0], features=x.shape[1], outputs=weight.shape[0], device=x.device)


def _parts(quantized: Quantized | None, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if quantized is None:
        return like.new_empty(0), like.new_empty(0)
    return quantized.data, quantized.scale


def _filled(found: Results, like: torch.Tensor) -> Parts:
    y, kept_x, x_scale, kept_weight, weight_scale = (like.new_empty(0) if part is None else part for part in found)
    return y, kept_x, x_scale, kept_weight, weight_scale


def _unwritten(side: Side | None, device: torch.device) -> Quantized | None:
    if side is None:
        return None
    data = torch.empty(*side.padded, dtype=side.cast.format.dtype, device=device)
    return Quantized(data, empty_scale(side.cast, side.padded, device), side.cast)


def _second(run: ScaledGemm, b: torch.Tensor, scale: torch.Tensor, health: torch.Tensor) -> Quantized:
    """Operand B of a backward GEMM: as forward kept it, or quantized now from its transpose."""
    if isinstance(b, Fp8Weight):
        side = Side(cast=run.casts[1], padded=run.padded_b, flag=health_index(run.problem.gemm, BAD_B))
        return b.transposed(side, health)
    if scale.numel():
        return Quantized(b, scale, run.casts[1])
    slot = health_index(run.problem.gemm, BAD_B)
    return quantize_operand(b.t(), run.casts[1], padded=run.padded_b, health=health, slot=slot)


def layer_pass(
    x: torch.Tensor,
    weight: torch.Tensor,
    grad_output: torch.Tensor,
    health: torch.Tensor,
    candidates: tuple[str, str, str],
    hot: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx and dW of a linear layer by three candidates, quantization shared, without autograd.

    x [T, in], weight [out, in], grad_output [T, out], health int64 [3, 3], `hot` int64 [32]. It is what a
    site runs in a training step, for timing.
    """
    _, grad_input, grad_weight = candidates
    keep = (grad_weight != HP, grad_input != HP)
    y, kept_x, x_scale, kept_weight, weight_scale = forward_parts(x, weight, health, candidates, keep, hot)
    dx, dw = backward_parts(
        grad_output,
        kept_x if x_scale.numel() else x,
        x_scale,
        kept_weight if weight_scale.numel() else weight,
        weight_scale,
        health,
        (grad_input, grad_weight),
        (True, True),
        x.shape[1],
        weight.dtype,
    )
    return y, dx, dw
