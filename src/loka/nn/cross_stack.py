"""A stack of DCN-V2's cross layers in FP8, forward and backward, as pure functions.

    v_l = V_l x_l     u_l = U_l v_l     x_{l+1} = x_0 * (u_l + b_l) + x_l        where V_l is None: v_l = x_l

Every GEMM reads FP8 that the kernel before it wrote (kernels/cross.py, kernels/producer.py) under
delayed tensor scales. Of a layer, backward keeps u_l in high precision, and x_l and v_l transposed in
FP8: the unit of a row's gradient goes into the transposed gradient (core/cross.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from loka.core.chain import NOTHING
from loka.core.problem import Problem, dtype_name, round_up, target_of
from loka.core.producer import NO_PARAMETERS
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.core.reference import Quantized
from loka.kernels.cross import cross_derive, cross_gather, cross_produce
from loka.kernels.launches import note_launch
from loka.kernels.producer import derive, produce, row_units
from loka.kernels.run import fit, scaled_gemm

_CAST = Cast(Format.E4M3, Granularity.TENSOR)

Where = tuple[int, str]
"""A layer's place in the stack, and which of its linear layers: "u" or "v"."""
Multiply = Callable[[Where, Gemm, Quantized, Quantized, tuple[int, int, int], torch.dtype], torch.Tensor]
"""(where, gemm, A, B, (m, n, k) without padding, dtype of the result) -> A B^T [m, n]."""


@dataclass(frozen=True, kw_only=True)
class Delayed:
    """How one tensor is quantized: a slot of the scale book.

    scale: float32 [1], a power of two. seen: int32 [1]. counts: int64 [2]. All on the device.
    """

    scale: torch.Tensor
    seen: torch.Tensor | None = None
    counts: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LowWeight:
    """A weight [N, K] in e4m3: `row` [N16, K16], `turned` [K16, N16], both under `scale` [1]."""

    row: torch.Tensor
    turned: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class CrossLayer:
    """Of one layer: its FP8 weights, and the slots of x_l, v_l, du_l and dv_l, the latter in units.

    `v`, `inner` and `grad_inner` are None where the rank is full.
    """

    u: LowWeight
    x: Delayed
    grad_outer: Delayed
    v: LowWeight | None = None
    inner: Delayed | None = None
    grad_inner: Delayed | None = None


@dataclass(frozen=True, kw_only=True)
class CrossState:
    """largest: int32 [1], of each backward anew (a unit of the scale book)."""

    layers: tuple[CrossLayer, ...]
    largest: torch.Tensor
    multiply: Multiply


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What backward needs of forward. The scales of the FP8 copies are not in it: backward's state must
    have those that forward's had (nn/cross_state.py keeps a copy).

    outers: u_l [T, N]. inputs, inners: x_l^T [N16, T16] and v_l^T [R16, T16] in e4m3; an inner is
    None where the rank is full. joint: the first x was x_0 itself.
    """

    x0: torch.Tensor
    outers: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    inputs: tuple[torch.Tensor, ...]
    inners: tuple[torch.Tensor | None, ...]
    joint: bool


Weights = Sequence[tuple[torch.Tensor | None, torch.Tensor]]
"""(V [R, N] or None, U [N, R]) of every layer: their shapes, and the dtypes of their gradients."""


def multiply_by(named: Callable[[Where, Gemm], str]) -> Multiply:
    """Multiplies by the candidates that `named` names, which take e4m3 under tensor scales.

    The function raises NoKernelFits for a problem that its candidate cannot run.
    """

    def multiply(
        where: Where, gemm: Gemm, a: Quantized, b: Quantized, sides: tuple[int, int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        m, n, k = sides
        target = target_of(a.data.device)
        problem = Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype_name(dtype), target=target)
        run = scaled_gemm(named(where, gemm), problem)
        note_launch("gemm")
        return run(
            Quantized(fit(a.data, run.padded_a), a.scale, run.casts[0]),
            Quantized(fit(b.data, run.padded_b), b.scale, run.casts[1]),
        )

    return multiply


@torch.no_grad()
def cross_forward(
    x0: torch.Tensor,
    x: torch.Tensor,
    weights: Weights,
    biases: Sequence[torch.Tensor | None],
    state: CrossState,
    *,
    keep: bool = True,
) -> tuple[torch.Tensor, Kept | None]:
    """x_L [T, N] in the dtype of x, from x_0 and the first x [T, N]; T at least 1.

    `keep` False, for inference: nothing is kept, and no transposed copy is written.
    """
    rows, features = x.shape
    sides = round_up(features, 16), round_up(rows, 16)
    joint = x is x0
    row, turned = quantized(x, state.layers[0].x, keep=keep)
    outers, inputs, inners = [], [], []
    for place, (layer, (v, _)) in enumerate(zip(state.layers, weights, strict=True)):
        inputs.append(turned)
        low, rank, inner = operand(row, layer.x), features, None
        if v is not None:
            assert layer.v is not None, "a low-rank layer has an FP8 copy of V"
            assert layer.inner is not None, "a low-rank layer has a slot for v"
            rank = v.shape[0]
            made = state.multiply(
                (place, "v"), Gemm.OUTPUT, low, low_weight(layer.v), (rows, rank, features), x.dtype
            )
            inner_row, inner = quantized(made, layer.inner, keep=keep)
            low = operand(inner_row, layer.inner)
        outer = state.multiply(
            (place, "u"), Gemm.OUTPUT, low, low_weight(layer.u), (rows, features, rank), x.dtype
        )
        following = state.layers[place + 1].x if place + 1 < len(state.layers) else None
        note_launch("cross_produce")
        crossed = cross_produce(
            outer,
            biases[place],
            x0,
            x,
            scale=None if following is None else following.scale,
            sides=sides,
            turned=keep,
            seen=None if following is None else following.seen,
            counts=None if following is None else following.counts,
        )
        assert crossed.hp is not None
        x = crossed.hp
        if following is not None:
            assert crossed.row is not None
            row, turned = crossed.row, crossed.turned
        outers.append(outer)
        inners.append(inner)
    if not keep:
        return x, None
    kept = Kept(
        x0=x0,
        outers=tuple(outers),
        biases=tuple(biases),
        inputs=tuple(copy for copy in inputs if copy is not None),
        inners=tuple(inners),
        joint=joint,
    )
    return x, kept


@dataclass(frozen=True, kw_only=True)
class CrossGrads:
    """Gradients: x0 [T, N]; x [T, N], None where the first x was x_0 and x0 holds both; of every
    layer v [R, N] (None where the rank is full), u [N, R] and bias float32 [N] (None without one)."""

    x0: torch.Tensor
    x: torch.Tensor | None
    v: tuple[torch.Tensor | None, ...]
    u: tuple[torch.Tensor, ...]
    bias: tuple[torch.Tensor | None, ...]


@torch.no_grad()
def cross_backward(grad: torch.Tensor, kept: Kept, weights: Weights, state: CrossState) -> CrossGrads:
    """All gradients of a stack, from `grad` = dL/dx_L [T, N] in high precision."""
    rows, features = grad.shape
    sides = round_up(features, 16), round_up(rows, 16)
    note_launch("units")
    # Of this backward alone: one bad gradient must not be in the units of all that follow.
    units, _ = row_units(grad, state.largest.zero_())
    inner: torch.Tensor | None = None
    grads, biases, us = [], [], []
    vs: list[torch.Tensor | None] = []
    for place in reversed(range(len(state.layers))):
        layer, (v, u) = state.layers[place], weights[place]
        multiply_u = functools.partial(state.multiply, (place, "u"))
        multiply_v = functools.partial(state.multiply, (place, "v"))
        note_launch("cross_derive")
        du = cross_derive(
            grad,
            inner,
            kept.x0,
            units=units,
            largest=state.largest,
            grad_scale=layer.grad_outer.scale,
            sides=sides,
            bias=kept.biases[place] is not None,
            seen=layer.grad_outer.seen,
            counts=layer.grad_outer.counts,
        )
        grad = du.grad
        grads.append(grad)
        biases.append(du.bias)
        low = operand(du.row, layer.grad_outer)
        turned = Quantized(du.turned, du.turned_scale, _CAST)
        x_turned = operand(kept.inputs[place], layer.x)
        if v is None:
            inner = multiply_u(
                Gemm.GRAD_INPUT, low, low_weight(layer.u, turned=True), (rows, features, features), grad.dtype
            )
            us.append(multiply_u(Gemm.GRAD_WEIGHT, turned, x_turned, (features, features, rows), u.dtype))
            vs.append(None)
            continue
        assert layer.v is not None
        assert layer.inner is not None
        assert layer.grad_inner is not None, "a low-rank layer has a slot for dv"
        v_turned = kept.inners[place]
        assert v_turned is not None
        rank = v.shape[0]
        us.append(
            multiply_u(
                Gemm.GRAD_WEIGHT, turned, operand(v_turned, layer.inner), (features, rank, rows), u.dtype
            )
        )
        note_launch("derive")
        dv = derive(
            multiply_u(
                Gemm.GRAD_INPUT, low, low_weight(layer.u, turned=True), (rows, rank, features), grad.dtype
            ),
            None,
            NOTHING,
            NO_PARAMETERS,
            sides=(round_up(rank, 16), sides[1]),
            units=units,
            largest=state.largest,
            grad_scale=layer.grad_inner.scale,
            row=True,
            turned=True,
            unit_in_turned=True,
            seen=layer.grad_inner.seen,
            counts=layer.grad_inner.counts,
        )
        assert dv.row is not None
        assert dv.turned is not None
        assert dv.turned_scale is not None
        vs.append(
            multiply_v(
                Gemm.GRAD_WEIGHT,
                Quantized(dv.turned, dv.turned_scale, _CAST),
                x_turned,
                (rank, features, rows),
                v.dtype,
            )
        )
        inner = multiply_v(
            Gemm.GRAD_INPUT,
            operand(dv.row, layer.grad_inner),
            low_weight(layer.v, turned=True),
            (rows, features, rank),
            grad.dtype,
        )
    assert inner is not None, "a stack has a layer"
    note_launch("cross_gather")
    dx0, dx = cross_gather(grads[::-1], kept.outers, kept.biases, inner, units=units, joint=kept.joint)
    return CrossGrads(x0=dx0, x=dx, v=tuple(vs[::-1]), u=tuple(us[::-1]), bias=tuple(biases[::-1]))


def quantized(values: torch.Tensor, slot: Delayed, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`values` [T, N] in e4m3, row-major [T, N16] and, where `keep`, transposed [N16, T16]."""
    columns = round_up(values.shape[1], 16)
    note_launch("derive" if keep else "produce")
    if not keep:
        row = produce(
            values,
            NOTHING,
            NO_PARAMETERS,
            scale=slot.scale,
            columns=columns,
            seen=slot.seen,
            counts=slot.counts,
        )
        return row, None
    both = derive(
        values,
        None,
        NOTHING,
        NO_PARAMETERS,
        sides=(columns, round_up(values.shape[0], 16)),
        grad_scale=slot.scale,
        row=True,
        turned=True,
        seen=slot.seen,
        counts=slot.counts,
    )
    assert both.row is not None
    return both.row, both.turned


def operand(data: torch.Tensor, slot: Delayed) -> Quantized:
    return Quantized(data, slot.scale.view(1, 1), _CAST)


def low_weight(weight: LowWeight, *, turned: bool = False) -> Quantized:
    return Quantized(weight.turned if turned else weight.row, weight.scale.view(1, 1), _CAST)
