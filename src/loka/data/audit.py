"""Whether a set of rows, such as those that calibrate a server, is like the traffic that aggregates describe.

Aggregates are shares of rows: of a domain, of a missing value, below a quantile. Each is compared by the exact
binomial test, all of them together at one level (Bonferroni).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loka.core.exceptions import LokaError, UnknownName
from loka.core.table import format_table


@dataclass(frozen=True, kw_only=True)
class Share:
    """Of the traffic's rows, `share` have `value` in `column` (NaN: none is there), or `at_most` so much."""

    column: str
    share: float
    value: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.at_most is None) or not 0 <= self.share <= 1:
            raise ValueError(f"{self!r}: a share between 0 and 1, of a value or of all values at most so large")

    def __str__(self) -> str:
        sign, bound = ("<=", self.at_most) if self.value is None else ("=", self.value)
        assert bound is not None
        return f"{self.column} {sign} " + (f"{int(bound)}" if bound % 1 == 0 else f"{bound:.12g}")

    def hits(self, values: torch.Tensor) -> int:
        """Floats are compared as the column has them, integers exactly."""
        bound = self.at_most if self.value is None else self.value
        assert bound is not None
        if math.isnan(bound):
            return int(values.isnan().sum()) if self.at_most is None else 0
        if not values.is_floating_point():  # torch would round or wrap what is compared
            if self.at_most is None and (math.isinf(bound) or bound != int(bound)):
                return 0
            if math.isinf(bound):
                return len(values) if bound > 0 else 0
            least, bound = torch.iinfo(torch.int64).min, math.floor(bound)
            if values.dtype == torch.uint64:  # few ops know it: moved, in order, to where int64 has them all
                values, bound = values.view(torch.int64) ^ least, bound + least
            if not least <= bound < -least:
                return len(values) if self.at_most is not None and bound > 0 else 0
            values = values.long()
        return int((values <= bound if self.value is None else values == bound).sum())


@dataclass(frozen=True, kw_only=True)
class Audited:
    """`p`: how often rows of the traffic are so far from its share, or farther, by chance. `lacking`: how many more
    rows it takes to notice that none of the part is there, or nothing else."""

    of: Share
    hits: int
    rows: int
    p: float
    lacking: int
    apart: bool

    @property
    def verdict(self) -> str:
        if self.apart:
            return "more than in the traffic" if self.hits > self.of.share * self.rows else "less than in the traffic"
        return f"cannot tell: {self.lacking} more rows needed" if self.lacking else "alike"


@dataclass(frozen=True)
class Audit:
    parts: tuple[Audited, ...]

    @property
    def apart(self) -> tuple[Audited, ...]:
        return tuple(part for part in self.parts if part.apart)

    def __str__(self) -> str:
        rows = [(str(a.of), f"{a.of.share:.3%}", f"{a.hits / a.rows:.3%}", str(a.rows), a.verdict) for a in self.parts]
        return format_table(("part", "traffic", "here", "rows", ""), rows)


def audit(
    columns: Mapping[str, torch.Tensor], traffic: Sequence[Share], *, level: float = 0.05, within: float = 0.0
) -> Audit:
    """Compares `columns`, [rows] each, with shares of the traffic, taken as exact, or as exact to `within` of each.

    Many rows tell any difference, also one that is no harm, or that comes of aggregates of another day: `within=0.1`
    lets a share of 2 % be 1.8 to 2.2 %.

    Where all rows are drawn from the traffic, one by one, any part is told apart in `level` of all audits at most.
    Rows of one user are not drawn one by one: give one of each.

    Raises UnknownName for a column that is not given, LokaError for one without rows or of another shape,
    ValueError for a level or `within` that is not between 0 and 1, or no share.
    """
    if not traffic or not 0 < level < 1 or not 0 <= within < 1:
        raise ValueError(f"{level=}, {within=}, {len(traffic)} shares: both between 0 and 1, and one share or more")
    each = level / len(traffic)
    return Audit(tuple(_audited(share, columns, each, within) for share in traffic))


def _audited(share: Share, columns: Mapping[str, torch.Tensor], level: float, within: float) -> Audited:
    if share.column not in columns:
        raise UnknownName(f"no column {share.column!r}", way_out=f"one of {', '.join(columns)}")
    values = torch.as_tensor(columns[share.column]).detach().cpu()
    if values.ndim != 1:
        raise LokaError(
            f"column {share.column!r} is {list(values.shape)}, not [rows]", way_out="a column for each value of a row"
        )
    if not len(values):
        raise LokaError(f"column {share.column!r} has no rows to audit", way_out="give rows")
    hits, rows = share.hits(values), len(values)
    least, most = share.share * (1 - within), min(share.share * (1 + within), 1.0)
    p, lacking = _p_value(hits, rows, min(max(hits / rows, least), most)), 0
    if 0 < share.share < 1:
        needed = math.log(level / 2) / math.log1p(-min(least, 1 - most or 1.0))
        lacking = max(math.floor(min(needed, 2.0**62)) + 1 - rows, 0)
    return Audited(of=share, hits=hits, rows=rows, p=p, lacking=lacking, apart=p < level)


def _p_value(hits: int, rows: int, share: float) -> float:
    """Twice the smaller tail of the binomial distribution, to 50 standard deviations from `hits`."""
    if share in (0, 1):
        return float(hits == share * rows)
    below = hits <= share * rows
    far = math.ceil(50 * math.sqrt(rows * share * (1 - share))) + 1000
    ends = (max(hits - far, 0), hits) if below else (hits, min(hits + far, rows))
    counts = torch.arange(ends[0], ends[1] + 1, dtype=torch.float64)
    whole = torch.tensor(float(rows), dtype=torch.float64)
    ways = torch.lgamma(whole + 1) - torch.lgamma(counts + 1) - torch.lgamma(whole - counts + 1)
    tail = (ways + counts * math.log(share) + (whole - counts) * math.log1p(-share)).exp().sum()
    return min(1.0, 2 * float(tail))
