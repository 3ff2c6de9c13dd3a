"""Ends of what is told: every input of a step that has two ends, and the search for those of a ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from loka.core.error import Estimate
from loka.core.records.across import Swing
from loka.core.records.network import Network, Quantity
from loka.scaling.cluster.collectives import HOPS, End
from loka.scaling.cluster.compute import OTHER_RATE
from loka.scaling.cluster.pricing import GAINS, PRODUCTS, TIMES

Ends = Mapping[str, End]


def inputs_of(network: Network) -> dict[str, Quantity | None]:
    """Everything that has two ends, by name; None where the ends are GEMM times' own."""
    return {
        TIMES: None,
        GAINS: None,
        **network.quantities,
        HOPS: Quantity(
            value=2,
            low=1,
            high=2,
            origin="assumed",
            comment="two ways to count. 2: as NCCL's tuner does, a ring's for gathers, the fewer of ring "
            "and tree for all-reduce, and one to each rank for all-to-all; 1: log2 of the ranks, for "
            "all-to-all one",
        ),
        PRODUCTS: Quantity(
            value=OTHER_RATE.value,
            low=OTHER_RATE.low,
            high=OTHER_RATE.high,
            origin="assumed",
            comment="time of products that are no site, over that of as many FLOPs of sites; a guess",
        ),
    }


_FASTER = {"bandwidth inside a node", "bandwidth between nodes", "memory bandwidth", GAINS}
_ROUNDS = 2  # over all inputs, from each start
_TRIED: tuple[End, ...] = ("low", "high")


def _all_at(fast: bool, inputs: Iterable[str]) -> dict[str, End]:
    """Every input at the end at which a step is fast, or slow."""
    return {name: "high" if (name in _FASTER) is fast else "low" for name in inputs}


def time_between(value: Callable[[Ends], float], inputs: Iterable[str]) -> Estimate:
    """A step time. No start of the schedule falls when something takes longer, so its ends are those of all
    inputs at their fast and at their slow ends."""
    return Estimate(value({}), value(_all_at(True, inputs)), value(_all_at(False, inputs)))


def ratio_between(value: Callable[[Ends], float], inputs: Iterable[str]) -> tuple[Estimate, dict[str, Swing]]:
    """A ratio of step times, which an input may move either way, and the more the less another hides it: its
    ends are searched for, one input after the other moved to its best end. Where a fast wire makes way for
    GEMMs and a slow one hides them, that stops short of the best, so it begins in the middle and at both
    ends of all."""
    swings = {name: Swing(low=value({name: "low"}), high=value({name: "high"})) for name in inputs}
    order = sorted(swings, key=lambda name: -swings[name].size)
    starts: tuple[dict[str, End], ...] = ({}, _all_at(True, inputs), _all_at(False, inputs))
    low = min(-_highest(lambda ends: -value(ends), order, start) for start in starts)
    high = max(_highest(value, order, start) for start in starts)
    return Estimate(value({}), low, high), swings


def _highest(value: Callable[[Ends], float], order: Sequence[str], start: dict[str, End]) -> float:
    ends, best = start, value(start)
    for _ in range(_ROUNDS):
        before = best
        for name in order:
            for end in _TRIED:
                found = value({**ends, name: end})
                if found > best:
                    best, ends = found, {**ends, name: end}
        if best == before:
            break
    return best
