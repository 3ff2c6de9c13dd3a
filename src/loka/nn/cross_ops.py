"""A stack of cross layers as two opaque custom ops, forward and backward (nn/cross_stack.py computes, and
nn/cross_serving.py where no backward is to come)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loka.core.cross import Crossed
from loka.core.cross_record import CrossStack
from loka.core.problem import round_up
from loka.core.recipe import Format, Gemm
from loka.core.report import site_name
from loka.nn.chain_state import running_cross
from loka.nn.cross_serving import cross_serve
from loka.nn.cross_stack import Kept, Weights
from loka.nn.cross_stack import cross_backward as backward_of
from loka.nn.cross_stack import cross_forward as forward_of
from loka.nn.cross_state import RunningCross


@torch.library.custom_op("loka::cross_forward", mutates_args=())
def cross_forward(
    x0: torch.Tensor,
    x: torch.Tensor,
    parameters: list[torch.Tensor],
    handle: int,
    place: int,
    joint: bool,
    training: bool,
) -> list[torch.Tensor]:
    """[output, what backward wants...] of the stack at `place` of the model `handle`, for x_0 and x [T, N].

    What backward wants: u of each layer, then x^T of each in FP8, then v^T of each that has one, then
    the scales; nothing without `training`. `joint`: x is x_0, and the argument `x` is not read.
    """
    running = running_cross(handle, place)
    x = x0 if joint else x
    running.state.begin(running, training=training)
    if not training:
        out = serve(running, x0, x, parameters).hp
        assert out is not None, "nothing else was asked for"
        return [out]
    weights, biases = _split(running.stack, parameters)
    running.prime_inputs(x0, x, weights)
    scales = running.state.book.keep()
    out, kept = forward_of(x0, x, weights, biases, running.forward_state(scales))
    assert kept is not None, "backward is to come"
    inners = [inner for inner in kept.inners if inner is not None]
    return [out, *kept.outers, *kept.inputs, *inners, scales]


@cross_forward.register_fake
def _(
    x0: torch.Tensor,
    x: torch.Tensor,
    parameters: list[torch.Tensor],
    handle: int,
    place: int,
    joint: bool,
    training: bool,
) -> list[torch.Tensor]:
    running = running_cross(handle, place)
    rows, features = x0.shape
    out = x0.new_empty(rows, features)
    if not training:
        return [out]
    layers = running.stack.layers
    low, deep = Format.E4M3.dtype, round_up(rows, 16)
    return [
        out,
        *(x0.new_empty(rows, features) for _ in layers),
        *(x0.new_empty(round_up(features, 16), deep, dtype=low) for _ in layers),
        *(x0.new_empty(round_up(layer.rank, 16), deep, dtype=low) for layer in layers if layer.rank),
        x0.new_empty(running.state.book.buffers.scale.shape, dtype=torch.float32),
    ]


@torch.library.custom_op("loka::cross_backward", mutates_args=())
def cross_backward(
    grad: torch.Tensor,
    x0: torch.Tensor,
    saved: list[torch.Tensor],
    parameters: list[torch.Tensor],
    handle: int,
    place: int,
    joint: bool,
    wanted: list[bool],
) -> list[torch.Tensor]:
    """[dx_0, dx, a gradient for each of `parameters`]; `saved` as `cross_forward` left it.

    Empty: dx where `joint`, for then dx_0 holds both, and gradients of parameters that are not wanted.
    """
    running = running_cross(handle, place)
    weights, biases = _split(running.stack, parameters)
    running.prime_gradients(grad, x0, weights)
    count = len(weights)
    left = iter(saved[2 * count : -1])
    kept = Kept(
        x0=x0,
        outers=tuple(saved[:count]),
        biases=tuple(biases),
        inputs=tuple(saved[count : 2 * count]),
        inners=tuple(None if v is None else next(left) for v, _ in weights),
        joint=joint,
    )
    found = backward_of(grad, kept, weights, running.backward_state(saved[-1]))
    made: list[torch.Tensor] = []
    for v, u, bias, (_, shift) in zip(
        found.v, found.u, found.bias, zip(weights, biases, strict=True), strict=True
    ):
        made += [] if v is None else [v]
        made.append(u)
        if shift is not None:
            assert bias is not None
            made.append(bias.to(shift.dtype))
    gradients = [
        gradient if want else gradient.new_empty(0) for gradient, want in zip(made, wanted, strict=True)
    ]
    return [found.x0, found.x0.new_empty(0) if found.x is None else found.x, *gradients]


@cross_backward.register_fake
def _(
    grad: torch.Tensor,
    x0: torch.Tensor,
    saved: list[torch.Tensor],
    parameters: list[torch.Tensor],
    handle: int,
    place: int,
    joint: bool,
    wanted: list[bool],
) -> list[torch.Tensor]:
    return [
        x0.new_empty(x0.shape),
        x0.new_empty(0) if joint else x0.new_empty(x0.shape),
        *(
            parameter.new_empty(parameter.shape if want else 0)
            for parameter, want in zip(parameters, wanted, strict=True)
        ),
    ]


def serve(
    running: RunningCross,
    x0: torch.Tensor,
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    *,
    scale_out: torch.Tensor | None = None,
) -> Crossed:
    """The stack where no backward is to come, after the state's `begin`: x_L [T, N] in `hp`.

    With `scale_out` float32 [1] it is in `row` instead, in e4m3 [T, N16] under that scale, unless
    this stack is served as it is trained.
    """
    weights, biases = _split(running.stack, parameters)
    running.prime_inputs(x0, x, weights)
    state, served = running.backward_state(None), running.served(x.dtype, x.device)
    if served is not None:
        running.state.runs.update(site_name(path, Gemm.OUTPUT) for path in running.stack.linears)
        return cross_serve(x0, x, biases, state, served, scale_out=scale_out)
    return Crossed(hp=forward_of(x0, x, weights, biases, state, keep=False)[0])


def _split(
    stack: CrossStack, parameters: Sequence[torch.Tensor]
) -> tuple[Weights, list[torch.Tensor | None]]:
    """(V or None, U) of each layer, and the bias of each or None."""
    left = iter(parameters)
    weights: list[tuple[torch.Tensor | None, torch.Tensor]] = []
    biases: list[torch.Tensor | None] = []
    for layer in stack.layers:
        v = None if layer.v is None else next(left)
        weights.append((v, next(left)))
        biases.append(next(left) if layer.bias else None)
    return weights, biases


class CrossGemms(torch.autograd.Function):
    """The stack as one node of autograd: x_0 and x [T, N] -> [T, N]. `x` is None where it is x_0."""

    @staticmethod
    def forward(
        ctx: Any,
        x0: torch.Tensor,
        x: torch.Tensor | None,
        handle: int,
        place: int,
        training: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        joint = x is None
        given = x0.new_empty(0) if x is None else x
        out, *saved = cross_forward(x0, given, list(parameters), handle, place, joint, training)
        if training:
            ctx.save_for_backward(x0, *parameters, *saved)
        ctx.where = handle, place, joint, len(parameters)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handle, place, joint, size = ctx.where
        x0, *rest = ctx.saved_tensors
        want_x0, want_x = ctx.needs_input_grad[:2]
        wanted = list(ctx.needs_input_grad[5:])
        dx0, dx, *found = cross_backward(grad, x0, rest[size:], rest[:size], handle, place, joint, wanted)
        return (
            dx0 if want_x0 else None,
            dx if want_x and not joint else None,
            None,
            None,
            None,
            *(g if want else None for g, want in zip(found, wanted, strict=True)),
        )
