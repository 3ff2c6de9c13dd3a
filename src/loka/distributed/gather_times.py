"""What a unit's gathers cost a step in FP8 and in its own dtype, timed on the ranks that will do them.

    FP8         quantize own rows     gather bytes for forward, for backward      transpose for grad_input
    own dtype   cast own rows         gather for forward, for backward            quantize, both layouts

Each unit by itself and nothing beside it: where training hides gathers behind other work, both cost less, and
the difference between them too. Both are timed with the quantizers that sites call eagerly; a compiled region
quantizes in other launches. A unit that stays gathered from forward to backward is gathered once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from loka.core.exchange import ranks_of
from loka.core.problem import round_up
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.records.report import site_name
from loka.core.storage.codec import decode, encode
from loka.core.timing import Timing
from loka.distributed.fp8_all_gather import Exchange, fp8_all_gather
from loka.distributed.gather_choice import FP8, HP, GatherChoice, decide
from loka.distributed.timed_ways import Timer, Way, compared, of_the_first, slowest, time_in_turns
from loka.kernels.quantize.quantizer import quantize_pair
from loka.kernels.quantize.side import Side
from loka.kernels.quantize.weight_copies import SIDE
from loka.nn.fp8_weight import CAST, Fp8Weight, bytes_transposed
from loka.nn.fsdp_units import gathers_in_a_step, units_of

_SCALES = "scales"


def choose_gather(model: nn.Module, plan: Plan, *, timer: Timer = time_in_turns) -> GatherChoice:
    """Times the gather of each FSDP2 unit in FP8 and in its own dtype, and chooses. A collective.

    Call it where `fp8_all_gather` may be called, never between two steps of training, and give that the
    result: `fp8_all_gather(model, plan, choice=choose_gather(model, plan))`. Weights are gathered, no forward
    runs, and the model is left as it was. Rank 0 decides for all.

    Args:
        timer: takes the times, of several rounds.

    Raises:
        As `fp8_all_gather`; LokaError where ranks time other things.
    """
    gathering = fp8_all_gather(model, plan)
    timed: dict[str, tuple[int, Mapping[str, Timing]]] = {}
    scales = None
    try:
        if gathering.exchange is not None:
            scales, timed = _timed(model, plan, gathering.exchange, timer)
    finally:
        gathering.remove()
    text = json.dumps(encode(decide(timed, scales, ranks=ranks_of())))
    return decode(GatherChoice, json.loads(of_the_first(text)))


@torch.no_grad()
def _timed(
    model: nn.Module, plan: Plan, exchange: Exchange, timer: Timer
) -> tuple[Timing, dict[str, tuple[int, Mapping[str, Timing]]]]:
    """Of agreeing on scales; of each unit the number of its weights, and of `FP8` over `HP`."""
    device = exchange.chosen[0].padded.device
    of_scales = slowest(timer({_SCALES: Way(exchange.agree)}, device))
    by_unit: dict[str, list[int]] = {}
    for index, one in enumerate(exchange.chosen):
        by_unit.setdefault(one.unit, []).append(index)
    found: dict[str, tuple[int, Mapping[str, Timing]]] = {}
    for path, which in by_unit.items():
        unit = _Unit(model, path, plan, exchange, which)
        ways = {
            FP8: Way(unit.in_fp8, prepare=partial(exchange.hook, which, on=True)),
            HP: Way(unit.in_own_dtype, prepare=partial(exchange.hook, which, on=False)),
        }
        found[path] = (len(which), compared(slowest(timer(ways, device)), HP))
    return compared(of_scales, _SCALES)[_SCALES], found


class _Unit:
    """The gathers of one unit in a step, with what either way does to its weights besides."""

    def __init__(self, model: nn.Module, path: str, plan: Plan, exchange: Exchange, which: list[int]) -> None:
        units = units_of(model)
        self.unit, self.exchange, self.which = units[path], exchange, which
        self.gathers = gathers_in_a_step(units[path], root=path == next(iter(units)))
        self.sites = [exchange.sites[index] for index in which]
        self.transposed = [
            site_name(site.site.name, Gemm.GRAD_INPUT) in plan.decisions for site in self.sites
        ]

    def in_fp8(self) -> None:
        self.exchange.quantize(self.which)
        for last in range(self.gathers, 0, -1):
            self.unit.unshard()  # type: ignore[operator]
            if last == 1:
                self._transpose()
            self.unit.reshard()  # type: ignore[operator]

    def in_own_dtype(self) -> None:
        for number in range(self.gathers):
            self.unit.unshard()  # type: ignore[operator]
            if number == 0:
                self._quantize()
            self.unit.reshard()  # type: ignore[operator]

    def _transpose(self) -> None:
        for site, wanted in zip(self.sites, self.transposed, strict=True):
            weight = site.module.weight
            assert isinstance(weight, Fp8Weight)
            if wanted:
                bytes_transposed(weight.row)

    def _quantize(self) -> None:
        for site, wanted in zip(self.sites, self.transposed, strict=True):
            weight = site.module.weight
            assert isinstance(weight, torch.Tensor)
            rows, columns = (round_up(side, SIDE) for side in weight.shape)
            row = Side(cast=CAST, padded=(rows, columns))
            column = Side(cast=CAST, padded=(columns, rows)) if wanted else None
            quantize_pair(weight, row=row, column=column)
