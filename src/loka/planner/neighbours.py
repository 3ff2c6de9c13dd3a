"""Which layers of a model are in regions, where the time of one depends on which of its neighbours are in one too.

    time(joined) = sum over layers of the time of each with those of its neighbours that are `joined`

A layer is joined if it runs in a region; its neighbours are those that feed it and those that it feeds. Finding the
fastest set of joined layers is a search, and two searches are made, of which the result that saves more is taken:

1. Consistency (`_consistent`). All layers are assumed to be joined, then fewer, until those that the planner chooses
   are those that were assumed. Where two layers slow each other down this leaves out both, or a layer that is worth
   more than the other.
2. Local search (`_climbed`). Layers and pairs of neighbours change sides while the sum above falls, once from none
   joined on and once from all. It ignores limits on KL/H. Where there are limits, a few more changes are tried
   (`_improved`), each with a choice of candidates for all layers, as only that choice keeps the limits.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from loka.core.exceptions import NoKernelFits
from loka.core.records.plan import IN_REGION, Decision
from loka.core.records.report import HP
from loka.planner.choice.layer_choice import Layer
from loka.planner.choice.ne_budget import Granted
from loka.planner.decision import saved_us
from loka.planner.placing import ends_of, not_neighbours

Decided = tuple[Granted | None, Mapping[str, Decision]]
"""What the limits on KL/H granted each layer, where there are limits; and the decisions by site."""
Reads = Mapping[str, Collection[str]]
"""By layer, those that feed it."""
OpenLayer = Callable[[str, Collection[str] | None], Layer]
"""A layer's choices, timed in a region with those of its neighbours that are joined; None: it may be in no region."""
Joined = frozenset[str]
"""Paths of the layers that are in regions."""

_TRIED = 16  # changes of the search that are tried at most, as each is a choice of candidates for all layers


class _DecideWith(Protocol):
    def __call__(self, joined: Joined, barred: Collection[str], required: Collection[str] = ()) -> Decided:
        """Decides all layers, with times that assume that those `joined` are in regions.

        Those that are `barred` may be in no region. Those that are `required` run in a region or in hp, not by
        candidates of their own. Any other layer may come into a region too.
        """


@dataclass(frozen=True)
class _Model:
    """The layers and their times; what was asked once is kept.

    Attributes:
        paths: all layers.
        reads: by layer, those that feed it.
        open_layer: gives a layer's choices.
        neighbours: by layer, those that feed it or that it feeds; layers without any are left out.
        layers, times: what was asked already, by path and by how many ends the layer has (`ends_of`), on which alone
            its time depends; -1 for no region.
    """

    paths: Collection[str]
    reads: Reads
    open_layer: OpenLayer
    neighbours: Mapping[str, frozenset[str]]
    layers: dict[tuple[str, int], Layer] = field(default_factory=dict)
    times: dict[tuple[str, int], float] = field(default_factory=dict)

    def layer(self, path: str, joined: Joined | None) -> Layer:
        """The choices of a layer; None: it may be in no region."""
        key = self._key(path, joined)
        if key not in self.layers:
            self.layers[key] = self.open_layer(path, joined)
        return self.layers[key]

    def time(self, path: str, joined: Joined | None) -> float:
        """Microseconds of a layer in a region or, where `joined` is None, in none; infinite where it cannot be.

        Limits on KL/H are ignored.
        """
        key = self._key(path, joined)
        if key not in self.times:
            choices = self.layer(path, joined).allowed
            times = (choice.microseconds for choice in choices if (choice.arm is None) == (joined is None))
            self.times[key] = min(times, default=inf)
        return self.times[key]

    def expected(self, joined: Joined) -> float:
        """Microseconds of all layers that have neighbours; the time of the others does not depend on `joined`."""
        return sum(self.time(path, joined if path in joined else None) for path in self.neighbours)

    def gaining(self, joined: Joined) -> Joined:
        """`joined` without the layers that are no faster in a region; what leaves may make others slower, so this
        goes on until all that stay gain."""
        while losing := {path for path in joined if not self.time(path, joined) < self.time(path, None)}:
            joined = joined - losing
        return joined

    def _key(self, path: str, joined: Joined | None) -> tuple[str, int]:
        if joined is None:
            return path, -1
        return path, ends_of(self.reads, path, joined & self.neighbours.get(path, frozenset()))


def choose_joined(
    paths: Collection[str],
    reads: Reads,
    open_layer: OpenLayer,
    decide: Callable[[Mapping[str, Layer]], Decided],
    *,
    placed: bool,
    limited: bool,
) -> Decided:
    """Decides all layers, where each is timed beside those of its neighbours that are in regions.

    Args:
        paths: the layers.
        reads: by layer, those that feed it.
        open_layer: gives the choices of a layer beside the neighbours that are joined.
        decide: chooses candidates for all layers, given the choices of each.
        placed: whether times depend on neighbours at all, as they do where chains of layers were timed.
        limited: whether `decide` keeps limits on KL/H.
    """
    neighbours = _neighbours(paths, reads) if placed else {}
    model = _Model(paths, reads, open_layer, neighbours)

    def decide_with(joined: Joined, barred: Collection[str], required: Collection[str] = ()) -> Decided:
        layers = {path: model.layer(path, None if path in barred else joined) for path in paths}
        return decide(layers | {path: _in_region_or_hp(layers[path]) for path in required})

    everything = frozenset(paths)
    if not neighbours:
        return decide_with(everything, ())
    joined, found = _consistent(everything, reads, decide_with)
    changes = _changes(neighbours)
    climbed = [_climbed(model, start, changes) for start in (frozenset[str](), everything & neighbours.keys())]
    fastest = min(climbed, key=model.expected) | (joined - neighbours.keys())
    return _improved(model, joined, found, fastest, changes, decide_with, tries=_TRIED if limited else 0)


def _consistent(joined: Joined, reads: Reads, decide_with: _DecideWith) -> tuple[Joined, Decided]:
    """The first search: from `joined` on, until the layers that are chosen to be in regions are those assumed to be.

    A layer that was left out for a slow neighbour may come back where that one stays away. One that is left out
    twice stays out, so the rounds end.
    """
    left_once, barred = set[str](), set[str]()
    while True:
        found = decide_with(joined, barred)
        chosen = _joined_in(found)
        if chosen == joined:
            return joined, found
        leaving = joined - chosen
        barred |= leaving & left_once
        left_once |= leaving
        # Of those that come back no two neighbours do at once, as they may be the ones that slow each other down.
        joined = joined & chosen if leaving else joined | set(not_neighbours(reads, chosen - joined))


def _climbed(model: _Model, joined: Joined, changes: Iterable[Joined]) -> Joined:
    """The second search: the layers joined once none of `changes` lowers the expected time of all layers."""
    joined = model.gaining(joined)
    improved = True
    while improved:
        improved = False
        for change in changes:
            tried = model.gaining(joined ^ change)
            now = model.expected(joined)
            if model.expected(tried) < now - 1e-9 * abs(now):  # abs: more may be saved than all layers take
                joined, improved = tried, True
    return joined


def _improved(
    model: _Model,
    joined: Joined,
    found: Decided,
    fastest: Joined,
    changes: Sequence[Joined],
    decide_with: _DecideWith,
    *,
    tries: int,
) -> Decided:
    """`found`, which has those `joined`, or what saves more: with the `fastest` set, or after some of `changes`.

    Up to `tries` changes are decided in full, each of which lowers the expected time.
    """
    for change in (joined ^ fastest, *changes):
        changed = joined ^ change
        promising = tries and model.expected(changed) < model.expected(joined)
        if not change or (changed != fastest and not promising):
            continue
        tries -= changed != fastest
        tried = _decided_with(model, changed, decide_with)
        if tried is not None and _saved(tried) > _saved(found) * (1 + 1e-9):
            joined, found = _joined_in(tried), _with_reasons(model, tried, decide_with)
    return found


def _decided_with(model: _Model, joined: Joined, decide_with: _DecideWith) -> Decided | None:
    """What is decided with just these in regions, or with those of them that limits on KL/H leave there; None where
    neither is consistent, or the budget raises as no candidate is left."""
    with contextlib.suppress(NoKernelFits):
        for _ in range(2):
            found = decide_with(joined, frozenset(model.paths) - joined, joined & model.neighbours.keys())
            chosen = _joined_in(found)
            if chosen == joined:
                return found
            joined = model.gaining(chosen & model.neighbours.keys()) | (chosen - model.neighbours.keys())
    return None


def _with_reasons(model: _Model, found: Decided, decide_with: _DecideWith) -> Decided:
    """`found` with better reasons: layers outside of regions are timed beside those inside, instead of barred.

    Barred are only the layers that would then come in, as they slow their neighbours down. Where this changes what is
    joined, or saves less, it is `found` as it was.
    """
    joined = _joined_in(found)
    required = joined & model.neighbours.keys()
    with contextlib.suppress(NoKernelFits):
        coming_in = _joined_in(decide_with(joined, (), required)) - joined
        reasoned = decide_with(joined, coming_in, required)
        if _joined_in(reasoned) == joined and _saved(reasoned) >= _saved(found):
            return reasoned
    return found


def _in_region_or_hp(layer: Layer) -> Layer:
    """The layer without candidates of single GEMMs.

    One of these may be tied with the region for the layer itself, and would win the tie, but its neighbours would lose
    by it: they are faster beside a layer in a region.
    """
    only = {gemm: {HP: each[HP]} if HP in each else each for gemm, each in layer.options.items()}
    slower = {
        gemm: dict.fromkeys(each.keys() - only[gemm].keys(), "slower than in a region")
        for gemm, each in layer.options.items()
    }
    rejected = {gemm: {**slower.get(gemm, {}), **each} for gemm, each in layer.rejected.items()}
    return replace(layer, options=only, rejected=rejected)


def _neighbours(paths: Collection[str], reads: Reads) -> dict[str, frozenset[str]]:
    neighbours: dict[str, set[str]] = {}
    for path, fed_by in reads.items():
        for other in fed_by:
            if path in paths and other in paths:
                neighbours.setdefault(path, set()).add(other)
                neighbours.setdefault(other, set()).add(path)
    return {path: frozenset(neighbours[path]) for path in sorted(neighbours)}


def _changes(neighbours: Mapping[str, Collection[str]]) -> list[Joined]:
    """Each layer, and each pair of neighbours: sets whose layers change sides together."""
    pairs = [frozenset([path, other]) for path in neighbours for other in sorted(neighbours[path]) if path < other]
    return [*(frozenset([path]) for path in neighbours), *pairs]


def _joined_in(found: Decided) -> Joined:
    return frozenset(d.path for d in found[1].values() if d.reason.startswith(IN_REGION))


def _saved(found: Decided) -> float:
    return sum(map(saved_us, found[1].values()))
