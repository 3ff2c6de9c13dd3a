"""A chain's forward and backward as two opaque custom ops (core/producer.py has the equations).

    forward    x -> FP8 -> GEMM -> producer -> ... -> GEMM -> last producer, in high precision
    backward   units of the rows, then for each link: derive, GEMM for grad_input, GEMM for grad_weight

Of each link two launches in forward and three in backward. Kept between the two: Z of each link in
high precision, and x^T in FP8. What else backward needs follows from Z.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from loka.core.chain import Chain, Epilogue
from loka.core.chain_recipe import FUSED_GEMM
from loka.core.exceptions import NoKernelFits
from loka.core.problem import Problem, dtype_name, linear_problem, round_up, target_of
from loka.core.producer import Parameters, apply_epilogue, differentiate
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.core.reference import Quantized
from loka.kernels.fused_gemm import gemm_produce
from loka.kernels.launches import note_launch
from loka.kernels.producer import derive, produce, row_units
from loka.kernels.quantizer import Side, quantize_pair
from loka.kernels.registry import candidate_named
from loka.kernels.run import ScaledGemm, note_run, scaled_gemm
from loka.nn.chain_state import RunningChain, running_chain

_TENSOR = Cast(Format.E4M3, Granularity.TENSOR)


@torch.library.custom_op("loka::chain_forward", mutates_args=())
def chain_forward(
    x: torch.Tensor, parameters: list[torch.Tensor], handle: int, place: int, training: bool, keep_input: bool
) -> list[torch.Tensor]:
    """[output, what backward wants...] of the chain at `place` of the model `handle`, for x [T, in].

    What backward wants: Z of each link that has a producer behind it, then x^T in FP8 and its scale
    where `keep_input` and the chain has no prologue. Nothing but the output without `training`.
    The state it reads and moves (scales, weight copies) is no input: no result depends on the order
    of chains in a step.
    """
    running = running_chain(handle, place)
    chain = running.chain
    prologue, links = _split(chain, parameters)
    running.state.begin(running, training=training)
    bank = running.state.bank
    kept_x: list[torch.Tensor] = []
    if chain.prologue.identity:
        a, kept_x = _quantize_input(running, x, keep=training and keep_input)
    else:
        a = _produce(running, 0, x, chain.prologue, prologue)
    saved = []
    out = a
    for place_, (link, (_, own)) in enumerate(zip(chain.links, links, strict=True)):
        weight = bank.row(link.path), bank.scale(link.path)
        last = place_ + 1 == len(chain.links)
        keep = training and not (last and link.epilogue.identity)
        if running.kernel(place_, Gemm.OUTPUT).startswith(FUSED_GEMM):
            following = None if last else running.input_scale(place_ + 1)
            a, z = _fused(running, place_, x, a, weight, following, keep=keep)
            out = a
        else:
            z = _gemm(
                running, place_, Gemm.OUTPUT, x.shape[0], x.dtype, a, running.input_scale(place_), *weight
            )
            if not last:
                a = _produce(running, place_ + 1, z, link.epilogue, own)
            elif link.epilogue.identity and own.bias is None:
                out = z
            else:
                note_launch("produce")
                out = produce(z, link.epilogue, own, scale=None, columns=z.shape[1])
        if keep:
            assert z is not None
            saved.append(z)
    return [out, *saved, *kept_x]


@chain_forward.register_fake
def _(
    x: torch.Tensor, parameters: list[torch.Tensor], handle: int, place: int, training: bool, keep_input: bool
) -> list[torch.Tensor]:
    chain = running_chain(handle, place).chain
    out = x.new_empty(x.shape[0], chain.links[-1].out_features)
    if not training:
        return [out]
    saved = [
        x.new_empty(x.shape[0], link.out_features)
        for link in chain.links
        if link is not chain.links[-1] or not link.epilogue.identity
    ]
    kept_x = []
    if keep_input and chain.prologue.identity:
        sides = round_up(x.shape[1], 16), round_up(x.shape[0], 16)
        kept_x = [x.new_empty(sides, dtype=Format.E4M3.dtype), x.new_empty(1, dtype=torch.float32)]
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
) -> list[torch.Tensor]:
    """[dx, a gradient for each of `parameters`], empty where not wanted; `saved` as `chain_forward` left it.

    `x` [T, in] where the chain has a prologue, else empty.
    """
    running = running_chain(handle, place)
    chain, state = running.chain, running.state
    prologue, links = _split(chain, parameters)
    rows = grad.shape[0]
    count = len(chain.links) - (1 if chain.links[-1].epilogue.identity else 0)
    zs = [*saved[:count], *([None] * (len(chain.links) - count))]
    kept_x = saved[count:]
    found = _Gradients(chain, parameters, wanted)
    through = want_input or not chain.prologue.identity
    units = row_scale = largest = None
    _prime_gradients(running, grad, zs, links)
    if running.recipe.units:
        largest = running.largest_unit()
        factors = (running.gradient_scale(0), state.bank.scale(chain.links[0].path)) if want_input else ()
        note_launch("units")
        units, row_scale = row_units(grad, largest, factors=factors)
    pending: tuple[torch.Tensor, torch.Tensor] | None = None
    real = True
    for link in range(len(chain.links) - 1, -1, -1):
        spec, (_, own) = chain.links[link], links[link]
        down = link > 0 or through
        above = pending
        slot = running.gradients[link]
        unit_in_turned = units is not None and link == 0 and chain.prologue.identity
        z = zs[link]
        note_launch("derive")
        made = derive(
            grad,
            z,
            spec.epilogue,
            own,
            sides=(round_up(spec.out_features, 16), round_up(rows, 16)),
            units=units,
            largest=largest,
            real=real,
            grad_scale=running.gradient_scale(link),
            format=running.recipe.gradient,
            row=down,
            turned=found.wants_weight(link),
            unit_in_turned=unit_in_turned,
            activation_scale=running.input_scale(link + 1) if above is not None else None,
            seen=state.book.seen(slot),
            counts=state.book.counts(slot),
        )
        found.put_vectors(link, made.bias, made.gamma, made.beta)
        if above is not None:
            assert made.activation is not None
            assert made.activation_scale is not None
            found.put_weight(
                link + 1,
                _weight_gradient(
                    running, link + 1, rows, links, *above, made.activation, made.activation_scale
                ),
            )
        pending = None
        if made.turned is not None:
            assert made.turned_scale is not None
            pending = made.turned, made.turned_scale
        real = False
        if down:
            assert made.row is not None
            grad = _down(
                running,
                link,
                rows,
                grad.dtype,
                made.row,
                row_scale if link == 0 and chain.prologue.identity else None,
            )
    if not chain.prologue.identity:
        slot_scale = running.input_scale(0)
        note_launch("derive")
        made = derive(
            grad,
            x,
            chain.prologue,
            prologue,
            sides=(round_up(x.shape[1], 16), round_up(rows, 16)),
            units=units,
            largest=largest,
            activation_scale=slot_scale if pending is not None else None,
            hp=want_input,
        )
        found.put_vectors(-1, None, made.gamma, made.beta)
        if pending is not None:
            assert made.activation is not None
            assert made.activation_scale is not None
            found.put_weight(
                0, _weight_gradient(running, 0, rows, links, *pending, made.activation, made.activation_scale)
            )
        grad = made.hp if made.hp is not None else grad
    elif pending is not None:
        found.put_weight(0, _weight_gradient(running, 0, rows, links, *pending, *kept_x))
    return [grad if want_input else grad.new_empty(0), *found.values]


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


class _Gradients:
    """A gradient for each parameter of a chain, in the order and dtype of the parameters."""

    def __init__(self, chain: Chain, parameters: Sequence[torch.Tensor], wanted: Sequence[bool]) -> None:
        self._parameters, self._wanted = parameters, wanted
        self.values = [parameter.new_empty(0) for parameter in parameters]
        self._places: dict[tuple[int, str], int] = {}
        names = [(-1, name) for name in _norm_names(chain.prologue)]
        for place, link in enumerate(chain.links):
            names += [(place, "weight"), *([(place, "bias")] if link.bias else [])]
            names += [(place, name) for name in _norm_names(link.epilogue)]
        self._places = {name: index for index, name in enumerate(names)}

    def wants_weight(self, link: int) -> bool:
        return self._wanted[self._places[link, "weight"]]

    def put_weight(self, link: int, gradient: torch.Tensor) -> None:
        self.values[self._places[link, "weight"]] = gradient

    def put_vectors(self, link: int, *vectors: torch.Tensor | None) -> None:
        for name, vector in zip(("bias", "gamma", "beta"), vectors, strict=True):
            place = self._places.get((link, name))
            if place is not None and vector is not None and self._wanted[place]:
                # A copy: the vectors of a link are rows of one tensor, and an op's results may not share one.
                self.values[place] = vector.to(self._parameters[place].dtype, copy=True)


def _norm_names(epilogue: Epilogue) -> list[str]:
    return [*(["gamma"] if epilogue.gamma else []), *(["beta"] if epilogue.beta else [])]


def _split(
    chain: Chain, parameters: Sequence[torch.Tensor]
) -> tuple[Parameters, list[tuple[torch.Tensor, Parameters]]]:
    """Of the prologue, and (weight, the others) of each link."""
    left = iter(parameters)

    def vectors(epilogue: Epilogue, bias: torch.Tensor | None) -> Parameters:
        gamma = next(left) if epilogue.gamma else None
        return Parameters(bias, gamma, next(left) if epilogue.beta else None)

    prologue = vectors(chain.prologue, None)
    links = []
    for link in chain.links:
        weight = next(left)
        links.append((weight, vectors(link.epilogue, next(left) if link.bias else None)))
    return prologue, links


def _fused(
    running: RunningChain,
    link: int,
    x: torch.Tensor,
    a: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    following: torch.Tensor | None,
    *,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A link in one launch: its output in FP8 under the scale `following`, or in bf16, and Z."""
    spec = running.chain.links[link]
    if x.dtype != torch.bfloat16:
        raise NoKernelFits(
            f"{FUSED_GEMM} cannot run {spec.path} in {x.dtype}",
            why=["its results outside of FP8 are bfloat16"],
            way_out="run the model in bfloat16 or under autocast, or probe, measure and plan in this dtype",
        )
    note_launch("gemm")
    note_run(running.kernel(link, Gemm.OUTPUT), Gemm.OUTPUT)
    return gemm_produce(
        _fit(a, (x.shape[0], a.shape[1])),
        weight[0],
        running.input_scale(link),
        weight[1],
        spec.epilogue,
        scale_out=following,
        keep=keep,
        fast=not running.kernel(link, Gemm.OUTPUT).startswith(f"{FUSED_GEMM}_exact"),
    )


def _quantize_input(
    running: RunningChain, x: torch.Tensor, *, keep: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x in FP8 for the first GEMM, and [x^T, its scale] for backward, in one launch."""
    slot, book = running.inputs[0], running.state.book
    assert slot is not None
    if not book.primed(slot):
        book.prime(slot, x.abs().amax() if x.numel() else x.new_zeros(()))
    rows, columns = round_up(x.shape[0], 16), round_up(x.shape[1], 16)
    scale = running.input_scale(0)
    note_launch("quantize")
    row, turned = quantize_pair(
        x,
        row=Side(cast=_TENSOR, padded=(rows, columns)),
        column=Side(cast=_TENSOR, padded=(columns, rows)) if keep else None,
        given=scale,
        seen=book.seen(slot),
    )
    assert row is not None
    # The scale may move before backward comes: what was written under it keeps a copy.
    return row.data, [turned.data, scale.clone()] if turned is not None else []


def _produce(
    running: RunningChain, link: int, z: torch.Tensor, epilogue: Epilogue, own: Parameters
) -> torch.Tensor:
    """The FP8 input of `link` from what lies before its producer."""
    slot, book = running.inputs[link], running.state.book
    if slot is not None and not book.primed(slot):
        book.prime(
            slot, apply_epilogue(z.detach(), epilogue, own).abs().amax() if z.numel() else z.new_zeros(())
        )
    note_launch("produce")
    return produce(
        z,
        epilogue,
        own,
        scale=running.input_scale(link),
        columns=round_up(z.shape[1], 16),
        seen=None if slot is None else book.seen(slot),
        counts=None if slot is None else book.counts(slot),
    )


@functools.lru_cache(maxsize=4096)
def _scaled(name: str, problem: Problem) -> ScaledGemm:
    return scaled_gemm(name, problem)


def _gemm(
    running: RunningChain,
    link: int,
    gemm: Gemm,
    rows: int,
    dtype: torch.dtype,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    name: str | None = None,
) -> torch.Tensor:
    spec = running.chain.links[link]
    problem = linear_problem(
        gemm,
        rows=rows,
        in_features=spec.in_features,
        out_features=spec.out_features,
        dtype=dtype_name(dtype),
        target=target_of(a.device),
    )
    run = _scaled(name or running.kernel(link, gemm), problem)
    note_launch("gemm")
    return run(
        Quantized(_fit(a, run.padded_a), _fit_scale(a_scale, run.padded_a[0]), run.casts[0]),
        Quantized(_fit(b, run.padded_b), _fit_scale(b_scale, run.padded_b[0]), run.casts[1]),
    )


def _fit(low: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
    """Operands are padded to 16; a kernel that wants other sides, of a ragged batch say, gets a copy."""
    if low.shape == sides:
        return low
    raw = low.view(torch.uint8)[: sides[0], : sides[1]]
    grown = torch.nn.functional.pad(raw, (0, sides[1] - raw.shape[1], 0, sides[0] - raw.shape[0]))
    return grown.contiguous().view(low.dtype)


def _fit_scale(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """[1, 1], or a scale for each row [rows, 1]."""
    scale = scale.view(-1, 1)
    if scale.shape[0] in (1, rows):
        return scale
    return torch.nn.functional.pad(scale[:rows], (0, 0, 0, max(rows - scale.shape[0], 0)), value=1.0)


def _weight_gradient(
    running: RunningChain,
    link: int,
    rows: int,
    links: Sequence[tuple[torch.Tensor, Parameters]],
    turned: torch.Tensor,
    turned_scale: torch.Tensor,
    activation: torch.Tensor,
    activation_scale: torch.Tensor,
) -> torch.Tensor:
    dtype = links[link][0].dtype
    return _gemm(
        running, link, Gemm.GRAD_WEIGHT, rows, dtype, turned, turned_scale, activation, activation_scale
    )


def _down(
    running: RunningChain,
    link: int,
    rows: int,
    dtype: torch.dtype,
    row: torch.Tensor,
    row_scale: torch.Tensor | None,
) -> torch.Tensor:
    """grad_input of a link: in units, or where it leaves the chain as it is, by row scales."""
    bank, path = running.state.bank, running.chain.links[link].path
    turned = bank.turned(path)
    if row_scale is None or not running.recipe.units:
        return _gemm(
            running,
            link,
            Gemm.GRAD_INPUT,
            rows,
            dtype,
            row,
            running.gradient_scale(link),
            turned,
            bank.scale(path),
        )
    ones = running.state.ones(turned.shape[0])
    return _gemm(
        running,
        link,
        Gemm.GRAD_INPUT,
        rows,
        dtype,
        row,
        row_scale,
        turned,
        ones,
        name=_by_rows(running.kernel(link, Gemm.GRAD_INPUT)),
    )


@functools.cache
def _by_rows(name: str) -> str:
    """The candidate with row scales that is nearest to one with tensor scales: same accumulation."""
    kernel = candidate_named(name).kernel
    if "rowwise_e4m3" in kernel.recipes and kernel.name in ("torch", "torch_fast", "emulated"):
        return f"{kernel.name}:rowwise_e4m3"
    return "torch_fast:rowwise_e4m3" if kernel.fast else "torch:rowwise_e4m3"


def _prime_gradients(
    running: RunningChain,
    grad: torch.Tensor,
    zs: Sequence[torch.Tensor | None],
    links: Sequence[tuple[torch.Tensor, Parameters]],
) -> None:
    """Before the first step's gradients: their maxima, from a backward in high precision."""
    book = running.state.book
    if all(book.primed(slot) for slot in running.gradients):
        return
    amax = grad.abs().amax(dim=1, keepdim=True).float() if grad.numel() else grad.new_ones(1, 1).float()
    flow = grad.float() / torch.where(amax > 0, amax, 1.0) if running.recipe.units else grad.float()
    for link in range(len(running.chain.links) - 1, -1, -1):
        weight, own = links[link]
        z = zs[link]
        if z is not None:
            flow = differentiate(flow, z, running.chain.links[link].epilogue, own)[0]
        book.prime(running.gradients[link], flow.abs().amax() if flow.numel() else flow.new_zeros(()))
        flow = flow @ weight.float()


class ChainGemms(torch.autograd.Function):
    """The chain as one node of autograd: x [T, in] -> [T, out]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        handle: int,
        place: int,
        prologue: bool,
        training: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        wanted = [training and p.requires_grad for p in parameters]
        out, *saved = chain_forward(x, list(parameters), handle, place, training, any(wanted))
        if training:
            ctx.save_for_backward(x if prologue else x.new_empty(0), *parameters, *saved)
        ctx.where = handle, place, len(parameters)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handle, place, size = ctx.where
        x, *rest = ctx.saved_tensors
        want_input, wanted = ctx.needs_input_grad[0], list(ctx.needs_input_grad[5:])
        dx, *found = chain_backward(grad, x, rest[size:], rest[:size], handle, place, want_input, wanted)
        return (
            dx if want_input else None,
            None,
            None,
            None,
            None,
            *(g if want else None for g, want in zip(found, wanted, strict=True)),
        )
