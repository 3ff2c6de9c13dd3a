"""What the ops of a chain are made of: GEMMs on FP8 operands, producers with their scales, priming.

`current`, in all of them: the scales of a forward or a backward that takes them from its own tensors
(core/current.py), as `RunningChain.current_scales` gave them; None where they are the book's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from loka.core.chain import NOTHING, Chain, Epilogue, Norm, constant_scale
from loka.core.chain_recipe import FUSED_GEMM
from loka.core.exceptions import NoKernelFits
from loka.core.problem import dtype_name, linear_problem, round_up, target_of
from loka.core.producer import (
    NO_PARAMETERS,
    Parameters,
    Rounded,
    apply_epilogue,
    differentiate,
    empty_rounded,
)
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.core.reference import Quantized
from loka.core.report import site_name
from loka.kernels.current import scale_derived, scale_produced
from loka.kernels.fused_gemm import gemm_produce
from loka.kernels.launches import note_launch
from loka.kernels.producer import produce
from loka.kernels.quantizer import Side, quantize_pair
from loka.kernels.registry import candidate_named
from loka.kernels.run import fit, note_run, scaled_gemm
from loka.nn.chain_state import RunningChain
from loka.nn.scale_book import ScaleBook

_TENSOR = Cast(Format.E4M3, Granularity.TENSOR)
_STEEPEST = 1.5  # act' of hard swish, at 3; no other activation has a larger slope


def split_parameters(
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


class Gradients:
    """A gradient for each parameter of a chain, in the order and dtype of the parameters."""

    def __init__(self, chain: Chain, parameters: Sequence[torch.Tensor], wanted: Sequence[bool]) -> None:
        self._parameters, self._wanted = parameters, wanted
        self.values = [parameter.new_empty(0) for parameter in parameters]
        names: list[tuple[int, str]] = [(-1, name) for name in _norm_names(chain.prologue)]
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


def run_links(
    running: RunningChain,
    a: torch.Tensor,
    rows: int,
    dtype: torch.dtype,
    links: Sequence[tuple[torch.Tensor, Parameters]],
    current: torch.Tensor | None,
    *,
    training: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All links of a chain, from the FP8 operand `a` of the first one: the chain's output [rows, out], and
    for backward Z of each link that has a producer behind it, or what is kept instead (`saved_of`)."""
    chain, bank = running.chain, running.state.bank
    saved: list[torch.Tensor] = []
    out = a
    for place, (link, (_, own)) in enumerate(zip(chain.links, links, strict=True)):
        weight, scale = (bank.row(link.path), bank.scale(link.path)), running.input_scale(place, current)
        last = place + 1 == len(chain.links)
        keep = training and not (last and link.epilogue.identity)
        into = None
        if keep and running.rounds_z(place):
            into, keep = empty_rounded(rows, link.out_features, link.epilogue, a.device), False
            saved += into
        name = running.kernel(place, Gemm.OUTPUT, dtype, training=training)
        if name.startswith(FUSED_GEMM) and (last or running.knows_scale(place + 1)):
            following = None if last else running.input_scale(place + 1)
            a, z = fused_link(
                running, place, rows, dtype, a, scale, weight, following, name, keep=keep, into=into
            )
            out = a
        else:
            z = chain_gemm(running, place, Gemm.OUTPUT, rows, dtype, a, scale, *weight)
            if not last:
                a = produce_input(
                    running, place + 1, z, link.epilogue, own, current, training=training, into=into
                )
            elif link.epilogue.identity and own.bias is None:
                out = z
            else:
                note_launch("produce")
                out = produce(z, link.epilogue, own, scale=None, columns=z.shape[1], into=into)
        if keep:
            assert z is not None
            saved.append(z)
    return out, saved


def saved_of(
    running: RunningChain, saved: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | Rounded | None], list[torch.Tensor], torch.Tensor | None]:
    """What forward kept of each link, as `derive` reads it; of the chain's input; its scales, if current."""
    left = iter(saved)
    found: list[torch.Tensor | Rounded | None] = []
    for place, link in enumerate(running.chain.links):
        if link is running.chain.links[-1] and link.epilogue.identity:
            found.append(None)
        elif running.rounds_z(place):
            found.append(Rounded(next(left), next(left)))
        else:
            found.append(next(left))
    kept_x = list(left)
    return found, kept_x, kept_x.pop() if running.recipe.current else None


def fused_link(
    running: RunningChain,
    link: int,
    rows: int,
    dtype: torch.dtype,
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    following: torch.Tensor | None,
    name: str,
    *,
    keep: bool,
    into: Rounded | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A link in one launch, by kernel `name`: its output in FP8 under `following`, or in bf16; and Z.

    `into`: where to keep Z in eight bits, instead of in bf16.
    """
    spec = running.chain.links[link]
    if dtype != torch.bfloat16:
        raise NoKernelFits(
            f"{FUSED_GEMM} cannot run {spec.path} in {dtype}",
            why=["its results outside of FP8 are bfloat16"],
            way_out="run the model in bfloat16 or under autocast, or probe, measure and plan in this dtype",
        )
    note_launch("gemm")
    note_run(name, Gemm.OUTPUT)
    running.state.runs[site_name(spec.path, Gemm.OUTPUT)] += 1
    return gemm_produce(
        fit(a, (rows, a.shape[1])),
        weight[0],
        a_scale,
        weight[1],
        spec.epilogue,
        scale_out=following,
        keep=keep,
        into=into,
        fast=not name.startswith(f"{FUSED_GEMM}_exact"),
    )


def quantize_input(
    running: RunningChain, x: torch.Tensor, current: torch.Tensor | None, *, training: bool, keep: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x in FP8 for the first GEMM, and [x^T, its scale] for backward, in one launch."""
    slot, book = running.inputs[0], running.state.book
    assert slot is not None
    scale = running.input_scale(0, current)
    if current is not None:
        scale_produced(x, NOTHING, NO_PARAMETERS, scale=scale)
    elif running.state.calibrates(slot):
        book.prime(slot, _largest(book, slot, x))
    rows, columns = round_up(x.shape[0], 16), round_up(x.shape[1], 16)
    note_launch("quantize")
    row, turned = quantize_pair(
        x,
        row=Side(cast=_TENSOR, padded=(rows, columns)),
        column=Side(cast=_TENSOR, padded=(columns, rows)) if keep else None,
        given=scale,
        seen=book.seen(slot) if training else None,
    )
    assert row is not None
    # The scale may move before backward comes: what was written under it keeps a copy.
    return row.data, [turned.data, scale.clone()] if turned is not None else []


def _largest(book: ScaleBook, slot: int, values: torch.Tensor) -> torch.Tensor:
    """max |values|, or what was seen before where that is more."""
    before = book.buffers.history[slot].amax()
    return torch.maximum(before, values.detach().abs().amax().float()) if values.numel() else before


def produce_input(
    running: RunningChain,
    link: int,
    z: torch.Tensor,
    epilogue: Epilogue,
    own: Parameters,
    current: torch.Tensor | None,
    *,
    training: bool,
    into: Rounded | None = None,
) -> torch.Tensor:
    """The FP8 input of `link` from what lies before its producer; `into` as in core/producer.produce."""
    slot, book = running.inputs[link], running.state.book
    scale = running.input_scale(link, current)
    if slot is not None and current is not None:
        scale_produced(z, epilogue, own, scale=scale)
    elif slot is not None and running.state.calibrates(slot):
        book.prime(slot, _largest(book, slot, apply_epilogue(z.detach(), epilogue, own)))
    note_launch("produce")
    return produce(
        z,
        epilogue,
        own,
        scale=scale,
        columns=round_up(z.shape[1], 16),
        seen=None if slot is None or not training else book.seen(slot),
        counts=None if slot is None or not training else book.counted(slot),
        into=into,
    )


def chain_gemm(
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
    run = scaled_gemm(name or running.kernel(link, gemm, dtype), problem)
    note_launch("gemm")
    running.state.runs[site_name(spec.path, gemm)] += 1
    return run(
        Quantized(fit(a, run.padded_a), _fit_scale(a_scale, run.padded_a[0]), run.casts[0]),
        Quantized(fit(b, run.padded_b), _fit_scale(b_scale, run.padded_b[0]), run.casts[1]),
    )


def _fit_scale(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """[1, 1], or a scale for each row [rows, 1]."""
    scale = scale.view(-1, 1)
    if scale.shape[0] in (1, rows):
        return scale
    return torch.nn.functional.pad(scale[:rows], (0, 0, 0, max(rows - scale.shape[0], 0)), value=1.0)


def weight_gradient(
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
    return chain_gemm(
        running, link, Gemm.GRAD_WEIGHT, rows, dtype, turned, turned_scale, activation, activation_scale
    )


def gradient_scale(
    running: RunningChain,
    link: int,
    grad: torch.Tensor,
    z: torch.Tensor | Rounded | None,
    own: Parameters,
    units: torch.Tensor | None,
    current: torch.Tensor | None,
    *,
    real: bool,
) -> torch.Tensor:
    """float32 [1]: the scale of dZ of `link` in units, for dA = `grad`; arguments as those of `derive`."""
    epilogue, format = running.chain.links[link].epilogue, running.recipe.gradient
    scale = running.gradient_scale(link, current)
    if current is None:
        return scale
    if real and units is not None and epilogue.norm is Norm.NONE:  # a row's largest is 1 before its slopes
        return running.state.constant(constant_scale(_STEEPEST, format.max))
    scale_derived(grad, z, epilogue, own, scale=scale, units=units, real=real, format=format)
    return scale


def grad_input(
    running: RunningChain,
    link: int,
    rows: int,
    dtype: torch.dtype,
    row: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor | None,
) -> torch.Tensor:
    """grad_input of a link: in units, or where it leaves the chain as it is, by row scales."""
    bank, path = running.state.bank, running.chain.links[link].path
    turned, name = bank.turned(path), running.kernel(link, Gemm.GRAD_INPUT)
    scales = scale, bank.scale(path)
    if row_scale is not None and running.recipe.units:
        if running.recipe.current:  # so far they are units: this scale came after them
            note_launch("units", 2)
            row_scale = row_scale * (scales[0] * scales[1])
        scales, name = (row_scale, running.state.ones(turned.shape[0])), _by_rows(name)
    return chain_gemm(
        running, link, Gemm.GRAD_INPUT, rows, dtype, row, scales[0], turned, scales[1], name=name
    )


@functools.cache
def _by_rows(name: str) -> str:
    """The candidate with row scales that is nearest to one with tensor scales: same accumulation."""
    kernel = candidate_named(name).kernel
    if "rowwise_e4m3" in kernel.recipes and kernel.name in ("torch", "torch_fast", "emulated"):
        return f"{kernel.name}:rowwise_e4m3"
    return "torch_fast:rowwise_e4m3" if kernel.fast else "torch:rowwise_e4m3"


def prime_gradients(
    running: RunningChain,
    grad: torch.Tensor,
    zs: Sequence[torch.Tensor | Rounded | None],
    links: Sequence[tuple[torch.Tensor, Parameters]],
) -> None:
    """Before the first step's gradients: their maxima, from a backward in high precision."""
    book = running.state.book
    if running.recipe.current or all(book.primed(slot) for slot in running.gradients):
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
