"""A chain's forward and backward as two opaque custom ops (core/producer.py has the equations).

    forward    x -> FP8 -> GEMM -> producer -> ... -> GEMM -> last producer, in high precision
    backward   units of the rows, then for each link: derive, GEMM for grad_input, GEMM for grad_weight

Of each link two launches in forward and three in backward, with current scales more (docs/chains.md). Kept
between the two: Z of each link in high precision, or by a recipe that says so in eight bits; and x^T in FP8.
What else backward needs follows from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loka.core.problem import round_up
from loka.core.producer import Rounded, empty_rounded
from loka.core.recipe import Format
from loka.kernels.launches import note_launch
from loka.kernels.producer import derive, row_units
from loka.nn.chain_state import running_chain
from loka.nn.chain_steps import (
    Gradients,
    grad_input,
    gradient_scale,
    prime_gradients,
    produce_input,
    quantize_input,
    run_links,
    saved_of,
    split_parameters,
    weight_gradient,
)


@torch.library.custom_op("loka::chain_forward", mutates_args=())
def chain_forward(
    x: torch.Tensor,
    dtype: torch.dtype,
    parameters: list[torch.Tensor],
    handle: int,
    place: int,
    training: bool,
    keep_input: bool,
) -> list[torch.Tensor]:
    """[output, what backward wants...] of the chain at `place` of the model `handle`, for x [T, in].

    `dtype` is what it computes in outside of FP8; x may be wider where a prologue reads it first.

    What backward wants: Z of each link that has a producer behind it, or it in eight bits and steps; then
    x^T in FP8 and its scale where `keep_input` and the chain has no prologue; then forward's scales where
    they are current. Nothing but the output without `training`.
    The state it reads and moves (scales, weight copies) is no input: no result depends on the order
    of chains in a step.
    """
    running = running_chain(handle, place)
    chain = running.chain
    prologue, links = split_parameters(chain, parameters)
    running.state.begin(running, training=training)
    current = running.current_scales()
    kept_x: list[torch.Tensor] = []
    if chain.prologue.identity:
        a, kept_x = quantize_input(running, x, current, training=training, keep=training and keep_input)
    else:
        a = produce_input(running, 0, x, chain.prologue, prologue, current, training=training)
    out, saved = run_links(running, a, x.shape[0], dtype, links, current, training=training)
    return [out, *saved, *kept_x, *([current] if training and current is not None else [])]


@chain_forward.register_fake
def _(
    x: torch.Tensor,
    dtype: torch.dtype,
    parameters: list[torch.Tensor],
    handle: int,
    place: int,
    training: bool,
    keep_input: bool,
) -> list[torch.Tensor]:
    running = running_chain(handle, place)
    chain = running.chain
    out = x.new_empty(x.shape[0], chain.links[-1].out_features, dtype=dtype)
    if not training:
        return [out]
    saved: list[torch.Tensor] = []
    for number, link in enumerate(chain.links):
        if running.rounds_z(number):
            saved += empty_rounded(x.shape[0], link.out_features, link.epilogue, x.device)
        elif link is not chain.links[-1] or not link.epilogue.identity:
            saved.append(x.new_empty(x.shape[0], link.out_features, dtype=dtype))
    kept_x = []
    if keep_input and chain.prologue.identity:
        sides = round_up(x.shape[1], 16), round_up(x.shape[0], 16)
        kept_x = [x.new_empty(sides, dtype=Format.E4M3.dtype), x.new_empty(1, dtype=torch.float32)]
    if running.recipe.current:
        kept_x.append(x.new_empty(running.state.book.buffers.scale.shape, dtype=torch.float32))
    return [out, *saved, *kept_x]


@torch.library.custom_op("loka::chain_backward", mutates_args=())
def chain_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    saved: list[torch.Tensor],
    parameters: list[torch.Tensor],
    handle: int,
    place: int,
    want_input: bool,
    wanted: list[bool],
    release: bool,
) -> list[torch.Tensor]:
    """[dx, a gradient for each of `parameters`], empty where not wanted; `saved` as `chain_forward` left it.

    `x` [T, in] where the chain has a prologue, else empty. With `release` the memory of each saved
    tensor is given back as soon as it was used: autograd would hold all of them to the end.
    """
    running = running_chain(handle, place)
    chain, state = running.chain, running.state
    prologue, links = split_parameters(chain, parameters)
    rows, dtype = grad.shape[0], grad.dtype
    zs, kept_x, scales = saved_of(running, saved)
    current = running.current_scales()  # of gradients; `scales` are forward's
    found = Gradients(chain, parameters, wanted)
    through = want_input or not chain.prologue.identity
    units = row_scale = largest = None
    prime_gradients(running, grad, zs, links)
    if running.recipe.units:
        # Of this backward alone: one bad gradient must not be in the units of all that follow.
        largest = running.largest_unit().zero_()
        known = want_input and current is None
        factors = (running.gradient_scale(0), state.bank.scale(chain.links[0].path)) if known else ()
        note_launch("units")
        units, row_scale = row_units(grad, largest, factors=factors)
    pending: Sequence[torch.Tensor] = ()  # dZ^T of the link before, and its scale
    nothing, real = grad.new_empty(0), True
    for link in range(len(chain.links) - 1, -1, -1):
        spec, (_, own) = chain.links[link], links[link]
        down = link > 0 or through
        slot = running.gradients[link]
        unit_in_turned = units is not None and link == 0 and chain.prologue.identity
        scale = gradient_scale(running, link, grad, zs[link], own, units, current, real=real)
        note_launch("derive")
        made = derive(
            grad,
            zs[link],
            spec.epilogue,
            own,
            sides=(round_up(spec.out_features, 16), round_up(rows, 16)),
            units=units,
            largest=largest,
            real=real,
            grad_scale=scale,
            format=running.recipe.gradient,
            row=down,
            turned=found.wants_weight(link),
            unit_in_turned=unit_in_turned,
            activation_scale=running.input_scale(link + 1, scales) if pending else None,
            seen=state.book.seen(slot),
            counts=state.book.counted(slot),
        )
        # What was read is let go before the GEMMs make more: the peak of a step's memory lies here.
        grad = nothing
        if release:
            _give_back(zs[link])
        found.put_vectors(link, made.bias, made.gamma, made.beta)
        row, turned = made.row, _scaled(made.turned, made.turned_scale)
        activation = _scaled(made.activation, made.activation_scale)
        del made
        if pending:
            found.put_weight(link + 1, weight_gradient(running, link + 1, rows, links, *pending, *activation))
        pending, turned, activation, real = turned, (), (), False
        if link == 0 and chain.prologue.identity and pending:
            found.put_weight(0, weight_gradient(running, 0, rows, links, *pending, *kept_x))
            pending = ()
            if release:
                _give_back(kept_x[0])
        if down:
            assert row is not None
            by_row = row_scale if link == 0 and chain.prologue.identity else None
            grad = grad_input(running, link, rows, dtype, row, scale, by_row)
        row = None
    if not chain.prologue.identity:
        note_launch("derive")
        made = derive(
            grad,
            x,
            chain.prologue,
            prologue,
            sides=(round_up(x.shape[1], 16), round_up(rows, 16)),
            units=units,
            largest=largest,
            activation_scale=running.input_scale(0, scales) if pending else None,
            hp=want_input,
        )
        found.put_vectors(-1, None, made.gamma, made.beta)
        grad = nothing if made.hp is None else made.hp
        activation = _scaled(made.activation, made.activation_scale)
        del made
        if pending:
            found.put_weight(0, weight_gradient(running, 0, rows, links, *pending, *activation))
    return [grad if want_input else nothing, *found.values]


def _scaled(data: torch.Tensor | None, scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """(data, scale), or nothing where it was not asked for."""
    return () if data is None or scale is None else (data, scale)


def _give_back(kept: torch.Tensor | Rounded | None) -> None:
    for tensor in (kept,) if isinstance(kept, torch.Tensor) else kept or ():
        tensor.untyped_storage().resize_(0)


@chain_backward.register_fake
def _(
    grad: torch.Tensor,
    x: torch.Tensor,
    saved: list[torch.Tensor],
    parameters: list[torch.Tensor],
    handle: int,
    place: int,
    want_input: bool,
    wanted: list[bool],
    release: bool,
) -> list[torch.Tensor]:
    chain = running_chain(handle, place).chain
    dx = grad.new_empty(grad.shape[0], chain.links[0].in_features) if want_input else grad.new_empty(0)
    return [
        dx,
        *(
            torch.empty_like(p) if want else p.new_empty(0)
            for p, want in zip(parameters, wanted, strict=True)
        ),
    ]


def _may_release(kept: Sequence[torch.Tensor]) -> bool:
    """Whether nobody can ask for this backward again. A compiler plans memory by itself."""
    if torch.compiler.is_compiling():
        return False
    if any(tensor.numel() and not tensor.untyped_storage().size() for tensor in kept):
        raise RuntimeError(
            "backward through a chain a second time: what it kept was given back after the first; "
            "pass retain_graph=True to the first one"
        )
    return not torch._C._autograd._get_current_graph_task_keep_graph()


class ChainGemms(torch.autograd.Function):
    """The chain as one node of autograd: x [T, in] -> [T, out]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dtype: torch.dtype,
        handle: int,
        place: int,
        prologue: bool,
        training: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = [training and p.requires_grad for p in parameters]
        out, *saved = chain_forward(x, dtype, list(parameters), handle, place, training, any(wanted))
        if training:
            ctx.save_for_backward(x if prologue else x.new_empty(0), *parameters, *saved)
        ctx.where = handle, place, len(parameters)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handle, place, size = ctx.where
        x, *rest = ctx.saved_tensors
        want_input, wanted = ctx.needs_input_grad[0], list(ctx.needs_input_grad[6:])
        release = _may_release(rest[size:])
        dx, *found = chain_backward(
            grad, x, rest[size:], rest[:size], handle, place, want_input, wanted, release
        )
        return (
            dx if want_input else None,
            *(None,) * 5,
            *(g if want else None for g, want in zip(found, wanted, strict=True)),
        )
