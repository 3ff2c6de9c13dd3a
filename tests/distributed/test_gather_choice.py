"""The gather of each unit, chosen by times: two ranks whose clocks differ end with one choice, and train what
one process does whose weights are quantized alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gather_jobs import shard, trained
from ranks import on_ranks
from towers import alone, plan_of, uneven

import loka
from loka.core.exceptions import LokaError
from loka.distributed import GatherChoice, choose_gather, fp8_all_gather
from loka.distributed.gather_choice import FP8, HP, decide
from loka.distributed.timed_ways import Way, compared, slowest

ROUNDS = 11
CHOSEN = {"0.weight", "6.weight"}
# Microseconds of (FP8, own dtype) by unit, on the first rank and on the second.
CLOCKS = {
    "0": ((10.0, 20.0), (11.0, 25.0)),
    "2": ((10.0, 20.0), (30.0, 20.0)),  # the slower rank is what all wait for
    "4": ((10.0, 10.05), (9.0, 9.0)),  # equal within what counts as equal
    "6": ((40.0, 90.0), (10.0, 20.0)),
}


@dataclass
class Clock:
    """A timer that runs what it is to time once, and tells what `CLOCKS` says."""

    rank: int
    scales: float = 5.0
    units: list[str] = field(default_factory=lambda: list(CLOCKS))

    def __call__(self, ways: Mapping[str, Way], device: torch.device) -> dict[str, list[float]]:
        for way in ways.values():
            way.prepare()
            way.run()
        if set(ways) != {FP8, HP}:
            return {name: [self.scales] * ROUNDS for name in ways}
        fp8, hp = CLOCKS[self.units.pop(0)][self.rank]
        return {FP8: [fp8 + 0.01 * i for i in range(ROUNDS)], HP: [hp + 0.01 * i for i in range(ROUNDS)]}


@dataclass(frozen=True)
class Job:
    plan: loka.Plan

    def __call__(self, rank: int, folder: Path) -> dict[str, Any]:
        model = shard(loka.convert(uneven(), self.plan))
        choice = choose_gather(model, self.plan, timer=Clock(rank))
        gathering = fp8_all_gather(model, self.plan, choice=choice)
        found = {"told": str(gathering), "fp8": gathering.in_fp8, "losses": trained(model, rank)}
        dear = choose_gather(shard(loka.convert(uneven(), self.plan)), self.plan, timer=Clock(rank, 100.0))
        found["dear"] = (str(dear), [one.unit for one in dear.units if one.in_fp8])
        found["by time"] = self.by_time(rank)
        with pytest.raises(LokaError) as raised:
            slowest({FP8: [1.0] * (rank + 1)})
        with pytest.raises(LokaError, match="chosen on 4 ranks, and 2 are here"):
            fp8_all_gather(shard(uneven()), self.plan, choice=replace(choice, ranks=4))
        return {**found, "uneven rounds": str(raised.value)}

    def by_time(self, rank: int) -> dict[str, Any]:
        """The real clock, before and after a step; the weights that are trained are those of no choice."""
        untimed, model = (shard(loka.convert(uneven(), self.plan)) for _ in range(2))
        choice = choose_gather(model, self.plan)
        losses = trained(model, rank, 1)
        again = choose_gather(model, self.plan)
        losses += trained(model, rank, 2, first=1)
        return {
            "untouched": losses == trained(untimed, rank, 1) + trained(untimed, rank, 2, first=1),
            "times": [min(one.fp8_us, one.hp_us) for c in (choice, again) for one in c.units],
            "told": str(choice),
        }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(Job(plan_of(uneven)), 2, tmp_path_factory.mktemp("choice"))


def test_ranks_that_see_other_times_end_with_one_choice(two: list[dict[str, Any]]) -> None:
    first, second = two
    assert set(first["fp8"]) == CHOSEN
    assert first["told"] == second["told"]
    assert first["by time"]["told"] == second["by time"]["told"]
    assert "30.1" in first["told"], "of unit 2 in FP8 counts what the second rank took"
    assert "not faster by time" in first["told"]


def test_units_of_either_kind_train_what_one_process_does(two: list[dict[str, Any]]) -> None:
    """Of two ranks sums have one order, so losses are those of one process bit for bit."""
    losses = alone(loka.convert(uneven(), plan_of(uneven)), CHOSEN, 2)
    for rank, found in enumerate(two):
        assert found["losses"] == [each[rank] for each in losses]


def test_scales_that_take_longer_than_all_units_save(two: list[dict[str, Any]]) -> None:
    told, units = two[0]["dear"]
    assert units == []
    assert "FP8 gathers would save 64.0 us a step" in told


def test_timing_leaves_the_model_as_it_was(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert found["by time"]["untouched"]
        assert len(found["by time"]["times"]) == 2 * len(CLOCKS)
        assert min(found["by time"]["times"]) > 0
        assert "rank 1: rounds {'fp8': 2}" in found["uneven rounds"]


def test_a_tie_takes_what_rounds_nothing() -> None:
    timings = compared({FP8: [10.0] * ROUNDS, HP: [20.0] * ROUNDS}, HP)
    choice = decide({"a": (2, timings)}, timings[FP8], ranks=4)
    assert choice.why_not("a") == "not faster by time: 2 [2, 2] times bf16's speed"  # saves what scales take
    assert choice.why_not("b") == "its gather was not timed"
    assert decide({}, None, ranks=1) == GatherChoice(ranks=1, scales_us=0.0, units=())
