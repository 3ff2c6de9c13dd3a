"""Parts of a model's loss that have a KL/H of their own: a task, a segment of rows, a task in a segment.

    KL/H of task t in segment g  =  mean over the rows of g of  1/2 p_t (1 - p_t) (J_t . dY)^2  /  H_t there

None is scaled from the whole's. Meta's Lattice (arXiv 2512.09200) serves many pairs of a domain and an
objective, "portfolios", by one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from loka.core.budget import known_effect, total_effect, upper_bound
from loka.core.error import Estimate
from loka.core.numerics.effect import Effect
from loka.core.storage.codec import record, sparse

WHOLE = ""
"""The name of the part that is everything: losses summed over tasks, on all rows."""
REFERENCE = "rowwise_e4m3"
"""The recipe whose effects say how well a part is known."""
ANY_LAYER = "*"
"""In the place of a layer's path in `Part.alike`; no module has this path."""
_MOST_SHARE = 10.0  # of a correlation that is kept, which is a tenth or more
WIDTH = 2.0
LEAST_ROWS = 128
"""Below it an interval holds less often than it says: few rows carry most of the sum."""


def part_name(task: str = "", segment: str = "") -> str:
    """Such as "click", "domain = 7", or "click, domain = 7"."""
    return ", ".join(name for name in (task, segment) if name)


def are_correlations(alike: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether `Part.alike` may be so. Shares of `ANY_LAYER` exceed 1 where layers agree more than in the reference."""
    most = {name: _MOST_SHARE if name.split("@")[0] == ANY_LAYER else 1.0 for name in alike}
    return all(abs(r) <= most[name] for name, others in alike.items() for r in others.values())


def _check(part: Part) -> None:
    if not (part.rows >= 0 and part.read >= 0 and part.allowed > 1 and are_correlations(part.alike)):
        raise ValueError("a number of rows, a width or a correlation that cannot be")


@record(check=_check)
@dataclass(frozen=True, kw_only=True)
class Part:
    """`rows` of it were probed and tell, of `read` that were there to choose from.

    `width` is what a budget is charged for all layers together over their estimate, by the reference recipe:
    2 says that the upper end is twice the estimate; inf where nothing is known. At most `allowed` counts as
    known. `unknown` says why no KL/H can be stated at all, such as labels that are all alike; "" else.
    `alike`: correlations of the changes that two layers make to its logit, such as of those that round one tensor:
    of the reference recipe by layers, and where another's differ, or in two recipes, by layers `in_recipe`. Where
    these were too many to keep, `ANY_LAYER` in two recipes has how many times the reference's correlation others are.
    """

    task: str = ""
    segment: str = ""
    rows: int = 0
    read: int = 0
    width: float = math.inf
    allowed: float = WIDTH
    unknown: str = ""
    alike: Mapping[str, Mapping[str, float]] = sparse(default_factory=dict)

    @property
    def name(self) -> str:
        return part_name(self.task, self.segment)

    @property
    def missing(self) -> int:
        """About how many more rows would do: widths of logarithms fall with the square root of the rows."""
        if not math.isfinite(self.width):
            return LEAST_ROWS  # these count as none
        factor = (math.log(self.width) / math.log(self.allowed)) ** 2
        return max(math.ceil(self.rows * factor), LEAST_ROWS, self.rows) - self.rows

    @property
    def unsupported(self) -> str:
        """Why no budget can go by it; "" where one can."""
        if self.unknown or not self.missing:
            return self.unknown
        told = f"tell its KL/H to a factor of {self.width:.2f}, not {self.allowed:g}"
        if not math.isfinite(self.width):
            told = "give it no upper end at any layer (one cluster, copies or no effect)"
        return f"{self.rows} rows of it were probed, which {told}: about {self.missing} more are needed"

    def __str__(self) -> str:
        if self.unsupported:
            return f"{self.name}: KL/H not known: {self.unsupported}"
        return f"{self.name}: KL/H known to a factor of {self.width:.2f}, from {self.rows} rows"


def in_recipe(path: str, recipe: str) -> str:
    """The name in `alike` of a layer whose changes are those of `recipe`; the reference's have the layer's own."""
    return path if recipe == REFERENCE else f"{path}@{recipe}"


def beyond_sum(
    alike: Mapping[str, Mapping[str, float]], recipes: Mapping[str, str], effects: Mapping[str, float]
) -> float:
    """What layers lose together beyond the sum of their `effects`: 2 r sqrt(a b) of each two, which is exact to first
    order. Below zero where changes cancel (`Part.alike`). Where no r of two layers is kept in their recipes, the
    reference's counts times the share of `ANY_LAYER`, which is 1 in one recipe and 0 in two unless it is kept too."""
    own = {in_recipe(path, recipes[path]): path for path in effects}
    used = {recipes[path] for path in effects}
    shares = {(one, other): _share(alike, one, other) for one in used for other in used}  # of pairs there are many
    found: dict[frozenset[str], float] = {}
    for one, others in alike.items():
        for other, r in others.items():
            if one in own and other in own:
                found[frozenset((own[one], own[other]))] = r
            elif one in effects and other in effects and (share := shares[recipes[one], recipes[other]]):
                found.setdefault(frozenset((one, other)), min(max(r * share, -1.0), 1.0))
    return math.fsum(2 * r * math.sqrt(math.prod(effects[path] for path in pair)) for pair, r in found.items())


def _share(alike: Mapping[str, Mapping[str, float]], recipe: str, other: str) -> float:
    """What a correlation that is not kept in two recipes is of the reference's."""
    one, two = in_recipe(ANY_LAYER, recipe), in_recipe(ANY_LAYER, other)
    kept = alike.get(one, {}).get(two, alike.get(two, {}).get(one))
    return float(recipe == other) if kept is None else kept


def lost_together(
    alike: Mapping[str, Mapping[str, float]], recipes: Mapping[str, str], effects: Mapping[str, Estimate]
) -> float:
    """The upper end of what layers with these `effects` lose together; 0 where that is their sum."""
    charged = {path: upper_bound(effect) for path, effect in effects.items()}
    beyond = beyond_sum(alike, recipes, charged)
    return max(math.fsum(charged.values()) + beyond, 0.0) if beyond else 0.0


def joined_alike(
    a: Mapping[str, Mapping[str, float]], b: Mapping[str, Mapping[str, float]], rows: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """Correlations of the rows of both: of a pair that both name, their mean by `rows`.

    A pair that one does not name keeps what the other says: of few rows a record leaves out what chance could make,
    which is not to say that it is none.
    """
    of_a, of_b = ({(min(p, q), max(p, q)): r for p, near in known.items() for q, r in near.items()} for known in (a, b))
    share = rows[0] / sum(rows) if sum(rows) else 0.5
    both = {pair: share * of_a[pair] + (1 - share) * of_b[pair] for pair in of_a.keys() & of_b.keys()}
    found: dict[str, dict[str, float]] = {}
    for (one, other), r in {**of_a, **of_b, **both}.items():
        found.setdefault(one, {})[other] = r
    return found


def judged(part: Part, effects: Iterable[Mapping[str, Effect]]) -> Part:
    """`part` with its width, by the effects of each layer, and with no more rows than those are of."""
    found = [by_recipe[REFERENCE] for by_recipe in effects if REFERENCE in by_recipe]
    # A layer without an upper end stays in high precision: what is charged is the others'.
    total = total_effect(filter(None, (known_effect(effect.kl()) for effect in found)))
    width = upper_bound(total) / total.value if total.value > 0 else math.inf
    told = max((round(effect.count) for effect in found), default=part.rows)
    return replace(part, width=width, rows=min(part.rows, told))


def joined(part: Part, other: Part) -> Part:
    """The same part of other rows too; its width and rows are to be judged anew."""
    return replace(
        part,
        rows=part.rows + other.rows,
        read=part.read + other.read,
        unknown=part.unknown and other.unknown,
        allowed=min(part.allowed, other.allowed),
        alike=joined_alike(part.alike, other.alike, (part.rows, other.rows)),
    )


def tasks_in(parts: Mapping[str, Part]) -> tuple[str, ...]:
    """Names of the tasks; none where the model has one, or nobody named them."""
    return _distinct(part.task for part in parts.values())


def segments_in(parts: Mapping[str, Part]) -> tuple[str, ...]:
    return _distinct(part.segment for part in parts.values())


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))
