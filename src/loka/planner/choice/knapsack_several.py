"""Several budgets at once: a multiple-choice knapsack with a limit for each task and segment.

    minimize sum_i time_i(way)   subject to   sum_i effect_ic(way) <= limit_c   for every limit c

For weights mu_c >= 0 that sum to 1, sum_c mu_c effect_c / limit_c has to stay below 1 too: a knapsack with
one limit, the surrogate (Glover, Surrogate Constraint Duality, 1975). One walk down the hulls solves it, but
not its last step (knapsack.py). A limit that its answer breaks gets more weight, and it is solved again. Of
each answer what breaks a limit is taken back, the change first that loses least time for what it mends, and
what is left goes to whatever still fits. The fastest of all answers is taken. Equal ones go by name, so that
all ranks decide alike.

What is lost: with one limit it is less than one step of one layer. With several there is no such rule. In its
place the linear relaxation of every surrogate that was solved says how fast any choice could be at most
(`Spent.bound`), and the plan states the difference.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loka.planner.choice.knapsack import Way, pareto, steps

_ROUNDS = 60
_ROUNDING = 1e-12  # of a limit: less would be mended for ever


@dataclass(frozen=True, kw_only=True)
class WayByLimit:
    """One way to run an item, as knapsack.Way: its time, and what it spends of each limit, in their order."""

    name: str
    time: float
    effects: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """`taken` by item; no choice within the limits takes less than `bound` in all."""

    taken: Mapping[str, WayByLimit]
    bound: float

    @property
    def time(self) -> float:
        return math.fsum(choice.time for choice in self.taken.values())


def spend_several(items: Mapping[str, Sequence[WayByLimit]], limits: Sequence[float]) -> Spent:
    """The way of each item, by name. What all ways of an item spend is spent, even above a limit: what was
    forced cannot be refused here, and the others share what it leaves.

    Raises ValueError for an item without ways.
    """
    empty = [name for name, ways in items.items() if not ways]
    if empty:
        raise ValueError(f"there is no way to run {', '.join(empty)}")
    shares = _shares(items, limits)
    best: dict[str, int] | None = None
    seen: set[tuple[int, ...]] = set()
    weights, bound = [1 / len(limits)] * len(limits), 0.0
    for turn in range(_ROUNDS):
        surrogate = {
            name: [_way(place, way, weights) for place, way in enumerate(ways)] for name, ways in shares.items()
        }
        found, relaxed = _walked(surrogate)
        bound = max(bound, relaxed)
        used = _used(found, shares, len(limits))
        if tuple(found.values()) not in seen:
            seen.add(tuple(found.values()))
            kept = _filled(_within(found, shares, len(limits)), shares, len(limits))
            if best is None or _order(kept, shares, len(limits)) < _order(best, shares, len(limits)):
                best = kept
        step = 1 / math.sqrt(turn + 1)
        grown = [w * math.exp(step * (use - max(used))) for w, use in zip(weights, used, strict=True)]
        weights = [weight / math.fsum(grown) for weight in grown]
    assert best is not None
    taken = {name: _original(items[name], shares[name][place]) for name, place in best.items()}
    return Spent(taken=taken, bound=min(bound, math.fsum(choice.time for choice in taken.values())))


def _shares(items: Mapping[str, Sequence[WayByLimit]], limits: Sequence[float]) -> dict[str, list[WayByLimit]]:
    """The ways with shares of what is left of each limit, beyond what all ways of their item spend."""
    least = {
        name: tuple(min(column) for column in zip(*(way.effects for way in ways), strict=True))
        for name, ways in items.items()
    }
    forced = [math.fsum(column) for column in zip(*least.values(), strict=True)]
    left = [max(limit - used, 0.0) for limit, used in zip(limits, forced, strict=True)]
    found = {}
    for name, ways in items.items():
        beyond = [tuple(e - base for e, base in zip(way.effects, least[name], strict=True)) for way in ways]
        found[name] = [
            replace(way, effects=tuple(e / room if e else 0.0 for e, room in zip(over, left, strict=True)))
            for way, over in zip(ways, beyond, strict=True)
            if all(math.isfinite(e) and (room > 0 or e <= 0) for e, room in zip(over, left, strict=True))
        ]
    return found


def _original(ways: Sequence[WayByLimit], share: WayByLimit) -> WayByLimit:
    return next(way for way in ways if way.name == share.name and way.time == share.time)


def _way(place: int, choice: WayByLimit, weights: Sequence[float]) -> Way:
    effect = math.fsum(weight * share for weight, share in zip(weights, choice.effects, strict=True))
    return Way(name=f"{place:06d}", time=choice.time, effect=effect)


def _walked(surrogate: Mapping[str, Sequence[Way]]) -> tuple[dict[str, int], float]:
    """The walk down the hulls until the limit is reached (knapsack.py), and the least time where items may be
    split: the last step is then taken in part."""
    fronts = {name: pareto(ways) for name, ways in surrogate.items()}
    time = math.fsum(front[0].time for front in fronts.values())
    left = 1 - math.fsum(front[0].effect for front in fronts.values())
    at = {name: front[0] for name, front in fronts.items()}
    for step in steps(fronts):
        more = step.way.effect - at[step.item].effect
        part = min(1.0, max(left, 0.0) / more) if more > 0 else 1.0
        time -= part * (at[step.item].time - step.way.time)
        if part < 1:
            break
        left, at[step.item] = left - more, step.way
    return {name: int(way.name) for name, way in at.items()}, time


def _used(taken: Mapping[str, int], shares: Mapping[str, Sequence[WayByLimit]], count: int) -> list[float]:
    return [math.fsum(shares[name][place].effects[c] for name, place in taken.items()) for c in range(count)]


def _order(taken: Mapping[str, int], shares: Mapping[str, Sequence[WayByLimit]], count: int) -> tuple[float, ...]:
    """What breaks least of the limits, then what is fastest, then what spends least."""
    used = _used(taken, shares, count)
    over = math.fsum(max(use - 1 - _ROUNDING, 0.0) for use in used)
    return over, math.fsum(shares[name][place].time for name, place in taken.items()), max(used)


def _within(taken: Mapping[str, int], shares: Mapping[str, Sequence[WayByLimit]], count: int) -> dict[str, int]:
    """Takes back what breaks a limit."""
    ways = dict(taken)
    used = _used(ways, shares, count)
    while any(use > 1 + _ROUNDING for use in used):
        changes = []
        for name, place in ways.items():
            now = shares[name][place]
            for other, way in enumerate(shares[name]):
                mended = math.fsum(
                    max(use - 1, 0.0) - max(use - 1 + b - a, 0.0)
                    for use, a, b in zip(used, now.effects, way.effects, strict=True)
                )
                if mended > _ROUNDING / 2:
                    changes.append((max(way.time - now.time, 0.0) / mended, -mended, name, other))
        if not changes:
            break
        _, _, name, place = min(changes)
        ways[name] = place
        used = _used(ways, shares, count)
    return ways


def _filled(taken: Mapping[str, int], shares: Mapping[str, Sequence[WayByLimit]], count: int) -> dict[str, int]:
    """Upgrades while one fits into what is left of every limit, the one first that saves most time."""
    ways = dict(taken)
    while True:
        used = _used(ways, shares, count)
        fitting = [
            (way.time - now.time, name, other)
            for name, place in ways.items()
            for now in [shares[name][place]]
            for other, way in enumerate(shares[name])
            if way.time < now.time
            and all(
                use - a + b <= max(1 + _ROUNDING, use) for use, a, b in zip(used, now.effects, way.effects, strict=True)
            )
        ]
        if not fitting:
            return ways
        _, name, place = min(fitting)
        ways[name] = place
