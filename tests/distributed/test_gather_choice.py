"""The gather of each unit, chosen by times: two ranks whose clocks differ end with one choice, and train what
one process does whose weights are quantized alike."""

from dataclasses import dataclass

import pytest
from gather_jobs import shard, trained
from ranks import on_ranks
from towers import alone, plan_of, uneven

import loka
from loka.core.records.report import HP
from loka.distributed import Choice, choose_gather, fp8_all_gather

CHOSEN = {"0.weight", "6.weight"}
# Microseconds in (FP8, own dtype) on the first rank and on the second, by unit.
CLOCKS = [
    ((10.0, 20.0), (11.0, 25.0)),
    ((10.0, 20.0), (30.0, 20.0)),  # the slower rank is what all wait for
    ((10.0, 10.05), (9.0, 9.0)),  # equal within what counts as equal
    ((40.0, 90.0), (10.0, 20.0)),
]


def clock(rank, scales):
    times = [(scales, scales), *(of_unit[rank] for of_unit in CLOCKS)]

    def timer(ways, device):
        for run in ways.values():
            run()
        fp8, hp = times.pop(0)
        return {name: [(hp if name == HP else fp8) + 0.01 * i for i in range(11)] for name in ways}

    return timer


@dataclass(frozen=True)
class Job:
    plan: loka.Plan

    def made(self):
        return shard(loka.convert(uneven(), self.plan))

    def __call__(self, rank, folder):
        model, untimed, timed = (self.made() for _ in range(3))
        choice = choose_gather(model, self.plan, timer=clock(rank, 5.0))
        gathering = fp8_all_gather(model, self.plan, units=choice.taken)
        found = {"told": str(choice), "fp8": gathering.in_fp8, "why": str(gathering)}
        found["losses"] = trained(model, rank)
        dear = choose_gather(self.made(), self.plan, timer=clock(rank, 100.0))
        found["dear"] = [str(dear), dear.taken]
        # By the real clock, before and after a step.
        told = [str(choose_gather(timed, self.plan))]
        losses = trained(timed, rank, 1)
        told.append(str(choose_gather(timed, self.plan)))
        losses += trained(timed, rank, 2, first=1)
        found["untouched"] = losses == trained(untimed, rank, 1) + trained(untimed, rank, 2, first=1)
        found["first"] = Choice(2, (f"rank {rank}",), "").of_the_first().taken
        return {**found, "by time": told}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(Job(plan_of(uneven)), 2, tmp_path_factory.mktemp("choice"))


def test_ranks_that_see_other_times_end_with_one_choice(two):
    first, second = two
    assert set(first["fp8"]) == set(second["fp8"]) == CHOSEN
    for name in ("told", "by time"):
        assert first[name] == second[name]
    assert second["first"] == ("rank 0",)
    assert "30.1" in first["told"], "of the second unit in FP8 counts what the second rank took"
    assert "its unit is not faster so" in first["why"]
    assert len(first["by time"][1].splitlines()) == 1 + len(CLOCKS) + 1


def test_units_of_either_kind_train_what_one_process_does(two):
    """Of two ranks sums have one order, so losses are those of one process bit for bit."""
    losses = alone(loka.convert(uneven(), plan_of(uneven)), CHOSEN, 2)
    for rank, found in enumerate(two):
        assert found["losses"] == [each[rank] for each in losses]
        assert found["untouched"]


def test_scales_that_take_longer_than_all_units_save(two):
    told, units = two[0]["dear"]
    assert units == ()
    assert "FP8 saves no more than 64.0 us" in told
