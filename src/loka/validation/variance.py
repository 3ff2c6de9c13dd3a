"""The mean difference over pairs of runs, and how far it may be from the truth.

Pair s (a training seed) and evaluation row i give a difference of losses d_si. Both were drawn: other
seeds and other rows would have given another mean. With r_s = mean_i d_si / mean_i a_si the relative
difference of pair s (a: the control's loss) and u_si its linearized residual,

    r_s  = mu + seed_s + ...,      u_si = (d_si - r_s a_si) / mean_i a_si = row_i + rest_si
    variance of the mean of r  =  var(seed) / S  +  var(row) / N  +  var(rest) / (S N)

The variance between pairs, var(r) / S, holds the first and the third term: it is what a Student-t interval
over pairs covers. It is blind to the second, because all pairs are evaluated on the same rows: what FP8 does
to these rows in every pair looks like a constant. That term comes from the rows: the variance of the
rows' means over pairs, less what rest contributes to them (two-way layout; Cameron, Gelbach and Miller
2011 subtract the intersection in the same way). The two parts are independent and combine to

    half^2 = t(S-1)^2 var(r) / S  +  t(N-1)^2 var(row) / N

whose coverage is at least the nominal one for normal errors (Banerjee, Sankhya 22, 1960).

**The spread between pairs.** Differences of pairs are skewed: one seed in sixteen parts and lies 0.03 % above
the others. Four pairs without such a one have too low a mean and too small a standard deviation s at once,
and no t interval knows. So var(r) is not s^2 alone, but with a spread e that was to be expected and counts
as f degrees of freedom (moderated variance: Smyth, Statistical Applications in Genetics 3, 2004)

    var(r) = max(e^2, (f e^2 + (S-1) s^2) / (f + S-1)),    t(f + S-1) in the place of t(S-1)

never below e: pairs may show that they scatter more, too few of them cannot show that they scatter less.
Where s exceeds 2 e they contradict it (as 0.7 % of four normal pairs do), and count alone. e and f come from
other pairs on the same rows (validation/pair_bank.py). Without those f is 0, and e a third of the KL/H
between the two models of a pair: they scatter by their first-order term, which grows as they part. Of eight
arms of four models s was 0.26 to 1.17 of KL/H, 0.39 in the median (benchmarks/quality).

Rows of one
user or one request come together and are no independent draws. Where it is known which they are, the sum
of u over such a cluster takes the place of a row's, and their number that of N (Liang and Zeger,
Biometrika 73, 1986); else each row counts by itself, and the second part may be too small.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka.core.error import Estimate, around
from loka.core.storage.codec import sparse
from loka.train.metrics import Floats
from loka.validation.paired import PairedDifference
from loka.validation.quantile import student_t

MIN_PAIRS = 4
MOST_PAIRS = 10_000
"""Nobody trains more; beyond it a verdict counts as out of reach."""
KL_SHARE = 1 / 3
CONTRADICTION = 2.0


@dataclass(frozen=True)
class Expected:
    """The standard deviation between pairs to expect, in percent of NE, how many degrees of freedom it counts
    as beside those of the pairs, and where it came from."""

    spread: float
    freedom: int
    source: str


def by_kl(differences: Iterable[PairedDifference]) -> Expected | None:
    """By how far the models of each pair part, where nothing else is known; None of earlier comparisons."""
    parted = [found.kl_percent.value for found in differences if found.kl_percent is not None]
    if not parted:
        return None
    mean = float(np.mean(parted))
    return Expected(KL_SHARE * mean, 0, f"a third of the KL/H between the models of a pair, {mean:.3g} %")


def deviation(values: Sequence[float]) -> float:
    """Between pairs; nan of one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def seeds_half(own: npt.ArrayLike, pairs: int, tail: float, *, spread: npt.ArrayLike = 0.0, freedom: int = 0) -> Floats:
    """The half-width that other seeds make, where `pairs` pairs have the standard deviation `own` and
    `spread` was to be expected with `freedom` degrees of freedom; of each validation, in percent."""
    own, spread = np.asarray(own, np.float64), np.asarray(spread, np.float64)
    both = (freedom * spread**2 + (pairs - 1) * own**2) / (freedom + pairs - 1)
    together = student_t(freedom + pairs - 1, tail) * np.sqrt(np.maximum(spread**2, both))
    alone = student_t(pairs - 1, tail) * own
    return np.where(own > CONTRADICTION * spread, alone, together) / math.sqrt(pairs)


@dataclass(frozen=True, kw_only=True)
class PairVariance:
    """`mean` is that of the pairs' relative differences in percent of the control's loss.

    `between_pairs` is the standard deviation between pairs; `rows_error` the standard error that the choice
    of rows adds to the mean of any number of pairs. nan where it cannot be known (one pair, no rows).
    `clusters` counts what was drawn independently, `effective_clusters` how many of one size would say as
    much: (sum n)^2 / sum n^2 of their rows n. None: each row was drawn by itself. `expected` is
    the spread that was to be expected between pairs; None: that of the pairs is all. `by_rows`: what of
    `between_pairs` rows make.
    """

    mean: float
    pairs: int
    rows: int
    between_pairs: float
    rows_error: float
    clusters: int | None = None
    effective_clusters: int | None = None
    expected: Expected | None = sparse(None)
    by_rows: float | None = sparse(None)

    @property
    def draws(self) -> int:
        """How many draws the rows' part is of: a cluster that holds most rows is nearly alone."""
        return self.rows if self.effective_clusters is None else self.effective_clusters

    def half_width(self, tail: float, *, pairs: int | None = None) -> float:
        """Of the interval at level 1 - `tail`, had there been `pairs` pairs of the same variance."""
        count = pairs or self.pairs
        if self.pairs < 2 or self.draws < 2 or not math.isfinite(self.between_pairs + self.rows_error):
            return math.inf
        return math.hypot(self._seeds_half(tail, count), self.rows_half(tail))

    @property
    def contradicted(self) -> bool:
        """Whether the pairs scatter too much for what was expected."""
        return self.expected is not None and self.between_pairs > CONTRADICTION * self.expected.spread

    def _seeds_half(self, tail: float, pairs: int) -> float:
        if pairs < 2:
            return math.inf
        e = self.expected or Expected(0.0, 0, "")
        return float(seeds_half(self.between_pairs, pairs, tail, spread=e.spread, freedom=e.freedom))

    def rows_half(self, tail: float) -> float:
        """The part of the half-width that no number of pairs reduces."""
        return student_t(self.draws - 1, tail) * self.rows_error

    def interval(self, tail: float) -> Estimate:
        """Of other seeds and other rows: what a verdict needs."""
        return around(self.mean, self.half_width(tail))

    def over_seeds(self, tail: float) -> Estimate:
        """Of other seeds on the very same rows: without the rows' part."""
        half = self._seeds_half(tail, self.pairs) if math.isfinite(self.between_pairs) else math.inf
        return around(self.mean, half)

    def pairs_to(self, margin: float, tail: float) -> int | None:
        """The smallest number of pairs, MIN_PAIRS at least, whose half-width is at most `margin`.

        Iterated on its own t quantile, with the variance seen so far; None where no number does: the
        rows alone are too uncertain, or more than MOST_PAIRS would be needed.
        """
        if not margin > 0 or not self.half_width(tail, pairs=MOST_PAIRS) <= margin:
            return None
        low, high = MIN_PAIRS - 1, MOST_PAIRS  # the half-width falls with the number of pairs
        while high - low > 1:
            middle = (low + high) // 2
            if self.half_width(tail, pairs=middle) <= margin:
                high = middle
            else:
                low = middle
        return high

    def rows_to(self, margin: float, tail: float) -> int | None:
        """Rows at which their part takes half of `margin` squared, which leaves pairs the other half.

        None where no number is enough."""
        if not margin > 0 or not math.isfinite(self.rows_error):
            return None
        ratio = self.rows_half(tail) / margin
        needed = 2 * self.rows * ratio * ratio
        return math.ceil(needed) if math.isfinite(needed) else None


def pair_variances(
    losses: Iterable[tuple[Floats, Floats]],
    groups: npt.NDArray[np.int64],
    count: int,
    *,
    clusters: npt.NDArray[np.int64] | None = None,
) -> list[PairVariance]:
    """One `PairVariance` for each of `count` groups of rows, each relative to the control's loss in it.

    Args:
        losses: of each pair, the control's and the other's loss per row, both [N]; read once.
        groups: [N], the group of each row, 0 to count - 1.
        clusters: [N], equal for rows that are not independent; None: all of them are.
    """
    sizes = np.bincount(groups, minlength=count).astype(np.float64)
    draw, of_draw = _draws(groups, count, clusters)
    draws = np.bincount(of_draw, minlength=count).astype(np.float64)
    effective = draws
    if draw is not None:
        together = np.bincount(draw, minlength=len(of_draw)).astype(np.float64)
        effective = sizes**2 / np.maximum(_sums(of_draw, together**2, count), 1)
    draw_sums = np.zeros(len(of_draw))
    squares = np.zeros(count)
    ratios = []
    with np.errstate(divide="ignore", invalid="ignore"):  # an empty group has no mean: nan
        for control, other in losses:
            difference = other - control
            base = _sums(groups, control, count) / sizes
            ratio = _sums(groups, difference, count) / sizes / base
            residual = (difference - ratio[groups] * control) / base[groups]
            if draw is not None:
                residual = _sums(draw, residual, len(of_draw))
            draw_sums += residual
            squares += _sums(of_draw, residual * residual, count)
            ratios.append(100 * ratio)
        pairs = len(ratios)
        of_pairs = np.stack(ratios)
        between = of_pairs.std(axis=0, ddof=1) if pairs > 1 else np.full(count, math.nan)
        by_draw = _sums(of_draw, np.square(draw_sums / pairs), count)
        rows_variance = by_draw * draws / (draws - 1) / sizes**2
        freedom = max(pairs - 1, 1) * (draws - 1)  # one pair: `squares` equals `by_draw`, and rest is 0
        rest = (squares - pairs * by_draw) / freedom * draws / (pairs * sizes**2)
        rows_error = 100 * np.sqrt(np.maximum(rows_variance - rest, 0))
        by_rows = 100 * np.sqrt(np.maximum(pairs * rest, 0))
    return [
        PairVariance(
            mean=float(of_pairs[:, group].mean()),
            pairs=pairs,
            rows=int(sizes[group]),
            between_pairs=float(between[group]),
            rows_error=float(rows_error[group]),
            clusters=None if clusters is None else int(draws[group]),
            effective_clusters=None if clusters is None else int(effective[group]),
            by_rows=float(by_rows[group]),
        )
        for group in range(count)
    ]


def _draws(
    groups: npt.NDArray[np.int64], count: int, clusters: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64]]:
    """Of each row its draw, a cluster's part in a group, and of each draw its group; None: rows are draws."""
    if clusters is None:
        return None, groups
    known, cluster = np.unique(clusters, return_inverse=True)
    found, draw = np.unique(groups * len(known) + cluster, return_inverse=True)
    return draw.astype(np.int64), found // max(len(known), 1)


def _sums(groups: npt.NDArray[np.int64], values: Floats, count: int) -> Floats:
    return np.bincount(groups, weights=values, minlength=count).astype(np.float64)
