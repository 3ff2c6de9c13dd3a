"""One budget for the whole model, spent where it saves most: a multiple-choice knapsack.

    minimize sum_i time_i(way)   subject to   sum_i effect_i(way) <= limit

    for a price lambda:  each item takes its least  time + lambda effect

An item's answer changes only where lambda passes the slope of a step of its lower convex hull, so
the steps of all items, sorted by time saved per effect, are every answer there is; walking down them
until the limit is reached ends where bisection on lambda would. It is the exact optimum for the
effect it spends. What is left of the limit, less than the one step that did not fit, goes to whatever
still fits, or to a step that did not after the least worthy ones before it are undone. What is lost against
the true optimum is at most the time of one step (tests/planner/choice/test_knapsack.py).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_TRIED = 32  # steps beyond the limit that are tried in the place of others
_ROUNDING = 1e-12  # a sum in another order must not be over the limit


@dataclass(frozen=True, kw_only=True)
class Way:
    name: str
    time: float
    effect: float


@dataclass(frozen=True)
class _Step:
    slope: float
    item: str
    way: Way


def spend(items: Mapping[str, Sequence[Way]], limit: float) -> dict[str, Way]:
    """The way of each item, by name. An item whose cheapest way alone is over the limit takes it all the
    same: what was forced cannot be refused here.

    Raises ValueError for an item without ways.
    """
    fronts = {name: pareto(ways) for name, ways in items.items()}
    empty = [name for name, front in fronts.items() if not front]
    if empty:
        raise ValueError(f"there is no way to run {', '.join(empty)}")
    ceiling = limit * (1 + _ROUNDING)
    start = {name: front[0] for name, front in fronts.items()}
    walk = steps(fronts)
    count = 0
    taken = start
    while count < len(walk) and _effect(further := {**taken, walk[count].item: walk[count].way}) <= ceiling:
        taken, count = further, count + 1
    starts = [taken]
    for step in walk[count : count + _TRIED]:
        starts += _in_place_of_others(step, walk[:count], start, ceiling)
    repaired = [_repair(ways, fronts, ceiling, worth) for ways in starts for worth in (_saved, _slope)]
    return min(repaired, key=lambda ways: math.fsum(way.time for way in ways.values()))


def pareto(ways: Sequence[Way]) -> list[Way]:
    """By rising effect: each way faster than all that spend no more. Equal ones go by name."""
    front: list[Way] = []
    known = [way for way in ways if math.isfinite(way.effect)]
    for way in sorted(known, key=lambda way: (way.effect, way.time, way.name)):
        if not front or way.time < front[-1].time:
            front.append(way)
    return front


def hull(front: Sequence[Way]) -> list[Way]:
    """The vertices of the lower convex hull of a Pareto front: what some price chooses."""
    kept: list[Way] = []
    for way in front:
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-1], way):
            kept.pop()
        kept.append(way)
    return kept


def steps(fronts: Mapping[str, Sequence[Way]]) -> list[_Step]:
    """All steps of all hulls, the one that saves most per effect first; equal ones by name."""
    found = []
    for name, front in fronts.items():
        vertices = hull(front)
        for before, after in itertools.pairwise(vertices):
            found.append(_Step(_slope(before, after), name, after))
    return sorted(found, key=lambda step: (-step.slope, step.item, step.way.effect))


def _slope(before: Way, after: Way) -> float:
    """Time saved per effect: above zero between neighbours of a front."""
    return (before.time - after.time) / max(after.effect - before.effect, 1e-300)


def _effect(taken: Mapping[str, Way]) -> float:
    return math.fsum(way.effect for way in taken.values())


def _repair(
    taken: Mapping[str, Way], fronts: Mapping[str, Sequence[Way]], ceiling: float, worth: Callable[[Way, Way], float]
) -> dict[str, Way]:
    """Upgrades while one fits into what is left, the worthiest first."""
    ways = dict(taken)
    while True:
        left = ceiling - _effect(ways)
        fitting = [
            (-worth(ways[name], way), name, way.effect, way)
            for name, front in fronts.items()
            for way in front
            if way.time < ways[name].time and way.effect - ways[name].effect <= left
        ]
        if not fitting:
            return ways
        _, name, _, way = min(fitting, key=lambda entry: entry[:3])
        ways[name] = way


def _in_place_of_others(
    step: _Step, walked: Sequence[_Step], start: Mapping[str, Way], ceiling: float
) -> list[dict[str, Way]]:
    """With `step`, and as many of the steps before it as leave room for it: at most one choice."""
    for count in range(len(walked) - 1, -1, -1):
        ways = {**start, **{each.item: each.way for each in walked[:count]}, step.item: step.way}
        if _effect(ways) <= ceiling:
            return [ways]
    return []


def _saved(before: Way, after: Way) -> float:
    return before.time - after.time
