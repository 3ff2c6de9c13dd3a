"""Chooses which units of FSDP2 gather their weights in FP8: those whose gathers are faster so, by measured times.

    FP8         quantize own rows     gather bytes for forward, for backward      transpose for grad_input
    own dtype   cast own rows         gather for forward, for backward            quantize, both layouts

A unit whose times tie gathers in its own dtype, which rounds nothing. All FP8 units together need one all-reduce of
scales in each forward; where they do not save more than it takes, no unit gathers in FP8. Units are timed with nothing
running beside them, so gathers that training hides cost less than measured. Weights are quantized as sites do it
eagerly; a compiled region does it in other launches.
"""

from functools import partial

import torch
from torch import nn

from loka.core.exchange import ranks_of
from loka.core.problem import round_up
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.records.report import HP, site_name
from loka.core.table import format_table
from loka.distributed.choice import Choice, Timer, compared, is_faster, time_in_turns
from loka.distributed.fp8_all_gather import Exchange, fp8_all_gather
from loka.kernels.quantize.quantizer import quantize_pair
from loka.kernels.quantize.side import Side
from loka.kernels.quantize.weight_copies import SIDE
from loka.nn.fp8_weight import CAST, Fp8Weight, bytes_transposed
from loka.nn.fsdp_units import gathers_in_a_step, units_of


def choose_gather(model: nn.Module, plan: Plan, *, timer: Timer = time_in_turns) -> Choice:
    """The units to gather in FP8: `fp8_all_gather(model, plan, units=choose_gather(model, plan).taken)`.

    A collective: call it where `fp8_all_gather` may be called, never between two steps of training. Weights
    are gathered, no forward runs, and the model is left as it was. Raises as `fp8_all_gather`.
    """
    gathering = fp8_all_gather(model, plan)
    try:
        return _choice(model, plan, gathering.exchange, timer).of_the_first()
    finally:
        gathering.remove()


@torch.no_grad()
def _choice(model: nn.Module, plan: Plan, exchange: Exchange | None, timer: Timer) -> Choice:
    if exchange is None:
        return Choice(ranks_of(), (), "no unit has weights that FP8 gathers can take")
    exchange.by_hand = True
    device, every = exchange.chosen[0].padded.device, range(len(exchange.chosen))
    scales = compared({HP: partial(exchange.agree_on_scales, every)}, device, timer)[HP].microseconds
    by_unit: dict[str, list[int]] = {}
    for index, one in enumerate(exchange.chosen):
        by_unit.setdefault(one.unit, []).append(index)
    rows, taken, saved = [], [], 0.0
    for unit, which in by_unit.items():
        timed = compared(
            {how: partial(_gathers, model, unit, plan, exchange, which, how) for how in ("fp8", HP)}, device, timer
        )
        us = {how: timing.microseconds.value for how, timing in timed.items()}
        if is_faster(timed["fp8"]):
            taken.append(unit)
            saved += us[HP] - us["fp8"]
        told = (f"{us['fp8']:.1f}", f"{us[HP]:.1f}", timed["fp8"].speedup)
        rows.append((unit or "(root)", len(which), *told, "FP8" if unit in taken else "own dtype"))
    header = ("unit", "weights", "FP8 us", "own dtype us", "speedup of FP8", "faster in")
    last = f"by times of {ranks_of()} ranks; agreeing on scales takes {scales.value:.1f} us a step"
    if taken and saved <= scales.high:
        taken = []
        last += f", and FP8 saves no more than {saved:.1f} us: all gather in their own dtype"
    return Choice(ranks_of(), tuple(taken), f"{format_table(header, rows)}\n{last}")


def _gathers(model: nn.Module, path: str, plan: Plan, exchange: Exchange, which: list[int], how: str) -> None:
    units, low = units_of(model), how != HP
    unit = units[path]
    exchange.hook(which, on=low)
    if low:
        exchange.quantize(which)
    for number in range(gathers_in_a_step(unit, root=path == next(iter(units)))):
        unit.unshard()  # type: ignore[operator]
        for site in (exchange.sites[index] for index in which if number == 0):
            weight = site.module.weight
            grad_input = site_name(site.site.name, Gemm.GRAD_INPUT) in plan.decisions
            if isinstance(weight, Fp8Weight):
                if grad_input:
                    bytes_transposed(weight.row)
                continue
            assert isinstance(weight, torch.Tensor)
            rows, columns = (round_up(side, SIDE) for side in weight.shape)
            column = Side(cast=CAST, padded=(columns, rows)) if grad_input else None
            quantize_pair(weight, row=Side(cast=CAST, padded=(rows, columns)), column=column)
        unit.reshard()  # type: ignore[operator]
