"""Which layers of a model are in regions, where what one takes there goes by which of its neighbours are in one too.

    time(joined) = sum over layers of what each takes with those of its neighbours that are `joined`

Three ways, of which the one that saves most is taken. All layers are joined at first, then fewer, until those that are
chosen are those that were assumed: that leaves out both of two that slow each other down, or one that is worth more
than the other. Or layers and pairs of neighbours change sides while that saves time, from none joined on and from all,
as if there were no limits on KL/H. With limits a few more change sides, each a choice for all layers.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from loka.core.exceptions import NoKernelFits
from loka.core.records.plan import IN_REGION, Decision
from loka.core.records.report import HP
from loka.planner.choice.layer_choice import Layer
from loka.planner.choice.ne_budget import Granted
from loka.planner.decision import saved_us
from loka.planner.placing import ends_of, not_neighbours

Decided = tuple[Granted | None, Mapping[str, Decision]]
By = Callable[[frozenset[str], Collection[str], Collection[str]], Decided]
"""What is decided with those `joined`, and with others that may come in but for those that are out."""
Open = Callable[[str, Collection[str] | None], Layer]
"""A layer in a region with its neighbours among those `joined`; None: in no region."""

_TRIED = 16  # moves at most, where each is a choice for all layers


@dataclass(frozen=True)
class _Model:
    """`near`: by layer that has any, those that feed it and that it feeds."""

    paths: Collection[str]
    reads: Mapping[str, Collection[str]]
    open_layer: Open
    near: Mapping[str, frozenset[str]]
    known: dict[tuple[str, int], Layer] = field(default_factory=dict)
    times: dict[tuple[str, int], float] = field(default_factory=dict)

    def opened(self, path: str, joined: frozenset[str] | None) -> Layer:
        key = self._key(path, joined)
        if key not in self.known:
            self.known[key] = self.open_layer(path, joined)
        return self.known[key]

    def time(self, path: str, joined: frozenset[str] | None) -> float:
        """Of a layer in a region or, where nothing is joined, in none, as if there were no limits on KL/H."""
        key = self._key(path, joined)
        if key not in self.times:
            ways = self.opened(path, joined).allowed
            self.times[key] = min((w.microseconds for w in ways if (w.arm is None) == (joined is None)), default=inf)
        return self.times[key]

    def expected(self, joined: frozenset[str]) -> float:
        return sum(self.time(path, joined if path in joined else None) for path in self.near)

    def gaining(self, joined: frozenset[str]) -> frozenset[str]:
        """Of those that are joined, without those that lose by it, one after the other."""
        while gone := {path for path in joined if not self.time(path, joined) < self.time(path, None)}:
            joined = joined - gone
        return joined

    def _key(self, path: str, joined: frozenset[str] | None) -> tuple[str, int]:
        return path, -1 if joined is None else ends_of(self.reads, path, joined & self.near.get(path, frozenset()))


def choose_joined(
    paths: Collection[str],
    reads: Mapping[str, Collection[str]],
    open_layer: Open,
    decide: Callable[[Mapping[str, Layer]], Decided],
    *,
    placed: bool,
    limited: bool,
) -> Decided:
    """What `decide` gives for the layers as they stand beside each other. `placed`: whether their times go by it;
    `limited`: whether `decide` keeps limits on KL/H."""
    near = _near(paths, reads) if placed else {}
    model = _Model(paths, reads, open_layer, near)

    def by(joined: frozenset[str], out: Collection[str], sure: Collection[str] = ()) -> Decided:
        opened = {path: model.opened(path, None if path in out else joined) for path in paths}
        return decide(opened | {path: _in_region_or_hp(opened[path]) for path in sure})

    everything = frozenset(paths)
    if not near:
        return by(everything, ())
    joined, found = _settled(everything, reads, by)
    moves = _moves(near)
    climbed = [_climbed(model, start, moves) for start in (frozenset[str](), everything & near.keys())]
    wanted = min(climbed, key=model.expected) | (joined - near.keys())
    tries = _TRIED if limited else 0
    for move in (joined ^ wanted, *moves):
        there = joined ^ move
        if not move or (there != wanted and not (tries and model.expected(there) < model.expected(joined))):
            continue
        tries -= there != wanted
        tried = _with(model, there, by)
        if tried is not None and _saved(tried) > _saved(found) * (1 + 1e-9):
            joined, found = _inside(tried), _told(model, tried, by)
    return found


def _with(model: _Model, joined: frozenset[str], by: By) -> Decided | None:
    """What is decided with just these in regions, or with those of them that limits on KL/H leave; None where that is
    not to be had."""
    with contextlib.suppress(NoKernelFits):  # of a budget that raises where no candidate is left
        for _ in range(2):
            found = by(joined, frozenset(model.paths) - joined, joined & model.near.keys())
            if _inside(found) == joined:
                return found
            joined = model.gaining(_inside(found) & model.near.keys()) | (_inside(found) - model.near.keys())
    return None


def _told(model: _Model, found: Decided, by: By) -> Decided:
    """The same, where the others tell what they would take beside those in regions; what would come in is kept out
    for its neighbours."""
    joined = _inside(found)
    sure = joined & model.near.keys()
    with contextlib.suppress(NoKernelFits):
        told = by(joined, _inside(by(joined, (), sure)) - joined, sure)
        if _inside(told) == joined and _saved(told) >= _saved(found):
            return told
    return found


def _climbed(model: _Model, joined: frozenset[str], moves: Iterable[frozenset[str]]) -> frozenset[str]:
    joined = model.gaining(joined)
    moved = True
    while moved:
        moved = False
        for move in moves:
            tried = model.gaining(joined ^ move)
            now = model.expected(joined)
            if model.expected(tried) < now - 1e-9 * abs(now):  # what is saved may be more than all takes
                joined, moved = tried, True
    return joined


def _settled(joined: frozenset[str], reads: Mapping[str, Collection[str]], by: By) -> tuple[frozenset[str], Decided]:
    """One that was left out for a slow neighbour may come back where that one stays away; left out twice, it stays
    out, so that the rounds end."""
    left, out = set[str](), set[str]()
    while True:
        found = by(joined, out, ())
        inside = _inside(found)
        gone = joined - inside
        if joined == inside:
            return inside, found
        out, left = out | (gone & left), left | gone
        joined = joined & inside if gone else joined | set(not_neighbours(reads, inside - joined))


def _in_region_or_hp(layer: Layer) -> Layer:
    """What is tied with a region for the layer itself is none for its neighbours."""
    only = {gemm: {HP: each[HP]} if HP in each else each for gemm, each in layer.options.items()}
    slower = {
        g: dict.fromkeys(each.keys() - only[g].keys(), "slower than in a region") for g, each in layer.options.items()
    }
    rejected = {gemm: {**slower.get(gemm, {}), **each} for gemm, each in layer.rejected.items()}
    return replace(layer, options=only, rejected=rejected)


def _near(paths: Collection[str], reads: Mapping[str, Collection[str]]) -> dict[str, frozenset[str]]:
    near: dict[str, set[str]] = {}
    for path, fed_by in reads.items():
        for other in fed_by:
            if path in paths and other in paths:
                near.setdefault(path, set()).add(other)
                near.setdefault(other, set()).add(path)
    return {path: frozenset(near[path]) for path in sorted(near)}


def _moves(near: Mapping[str, Collection[str]]) -> list[frozenset[str]]:
    pairs = [frozenset([path, other]) for path in near for other in sorted(near[path]) if path < other]
    return [*(frozenset([path]) for path in near), *pairs]


def _inside(found: Decided) -> frozenset[str]:
    return frozenset(d.path for d in found[1].values() if d.reason.startswith(IN_REGION))


def _saved(found: Decided) -> float:
    return sum(map(saved_us, found[1].values()))
