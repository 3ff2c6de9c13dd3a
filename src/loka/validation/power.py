"""What a number of pairs can decide: before a validation from an earlier variance, afterwards pair by pair.

A validation of S pairs passes where |m| + half <= limit (validation/verdicts.py), with m the mean of the
pairs and half of their standard deviation s and of the rows' error. Both vary from one validation to the
next, so the share that passes is counted over simulated ones: pairs drawn from a normal of an assumed
variance, or with replacement from trained pairs (validation/pair_bank.py). Draws are seeded: one question has
one answer.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from loka.core.error import Z95, Estimate
from loka.train.metrics import Floats
from loka.validation.quantile import student_t
from loka.validation.record import ArmVerdict, SeedPair
from loka.validation.sequential import look_tail
from loka.validation.variance import KL_SHARE, MIN_PAIRS, Expected, PairVariance, by_kl, deviation, seeds_half
from loka.validation.verdicts import ERROR

POWER = 0.8
_DRAWS = 4000  # a share is known to 1.5 % at most
_MOST = 512
_MANY = 10**6  # degrees of freedom: the rows' part is known, not estimated


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Shares of simulated validations by verdict; `contains_zero` of their last intervals, `pairs` the mean
    number of pairs that they took."""

    passed: float
    failed: float
    contains_zero: float
    pairs: float


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """For a true difference of 0: `pairs` of which POWER pass (None: no number up to 512 does), the share
    that passes with the `planned` ones, and `rows` that leave half of the interval to the pairs (None: the
    rows' error is not known)."""

    pairs: int | None
    planned: int
    passing: float
    rows: int | None
    held_out: int
    limit: float
    between: float

    def __str__(self) -> str:
        need = f"{self.pairs} pairs" if self.pairs else f"more than {_MOST} pairs"
        lines = [
            f"at a standard deviation of {self.between:.3g} % between pairs, {need} pass at {self.limit:g} % "
            f"in {POWER:.0%} of validations where nothing is wrong; {self.planned} pairs pass in "
            f"{self.passing:.0%}: of all rows, segments need more"
        ]
        if self.rows is not None:
            enough = "enough are" if self.held_out >= self.rows else "FEWER are"
            lines.append(f"about {self.rows} held-out rows are needed, {enough} there ({self.held_out})")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Contribution:
    """One pair, in percent of NE: its own difference, the interval after it and the pairs before it, and the
    one that all others would give without it."""

    seed: int
    value: float
    after: Estimate
    without: Estimate


def forecast(
    prior: PairVariance,
    *,
    pairs: int,
    limit: float,
    held_out: int,
    by_rows: float = 0.0,
    sequential: bool = False,
    tail: float = ERROR,
) -> Forecast:
    """What `pairs` pairs on `held_out` rows will decide, if they vary as those of `prior` did.

    A `rows_error` of nan in it means that only the variance between pairs is known. `by_rows` is the part of
    that standard deviation which is the choice of rows (`deviation_by_rows`): other rows make another one.
    `tail` is 1 less the level of verdicts, which are taken to expect this spread, without degrees of freedom
    for it (validation/variance.py).
    """
    known = math.isfinite(prior.rows_error)
    fewer = prior.rows / held_out
    error = prior.rows_error * math.sqrt(fewer) if known else 0.0
    between = math.sqrt(max(prior.between_pairs**2 - by_rows**2, 0.0) + by_rows**2 * fewer)
    rng = np.random.default_rng(0)
    noise, shift = rng.normal(size=(_DRAWS, max(_MOST, pairs))), rng.normal(size=_DRAWS)

    def passing(count: int) -> float:
        values = between * noise[:, :count] + error * shift[:, None]
        expected = Expected(between, 0, "")
        return rates(values, rows_error=error, limit=limit, sequential=sequential, expected=expected, tail=tail).passed

    low, high = MIN_PAIRS - 1, _MOST
    needed = None
    if passing(_MOST) >= POWER:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if passing(middle) >= POWER else (middle, high)
        needed = high
    return Forecast(
        pairs=needed,
        planned=pairs,
        passing=passing(pairs),
        rows=max(prior.rows_to(limit, tail) or 1, 1) if known else None,
        held_out=held_out,
        limit=limit,
        between=between,
    )


def deviation_by_rows(arm: ArmVerdict) -> float:
    """The standard deviation between pairs that the choice of rows makes by itself, in percent of NE.

    A pair's own error over rows or clusters, less what all pairs share of it. It falls with the square root of
    the rows; what is left of the variance between pairs is that of training.
    """
    if arm.average is None or not arm.pairs:
        return 0.0
    if (known := arm.average.variance.by_rows) is not None:
        return known
    squares = [((p.ne_percent.high - p.ne_percent.low) / 2 / Z95) ** 2 for p in arm.differences.values()]
    return math.sqrt(max(float(np.mean(squares)) - arm.average.variance.rows_error**2, 0.0))


def rates(
    values: Floats,
    *,
    rows_error: float,
    limit: float,
    sequential: bool = False,
    expected: Expected | None = None,
    kl: Floats | None = None,
    tail: float = ERROR,
) -> Rates:
    """Decides validations whose pairs' differences are the rows of `values` [draws, pairs], in percent.

    The spread to expect is `expected`, else that by the KL/H of these pairs, `kl` [draws, pairs], else none.
    """
    draws, planned = values.shape
    if planned < MIN_PAIRS:
        return Rates(passed=0.0, failed=0.0, contains_zero=1.0, pairs=planned)
    passed, failed = np.zeros(draws, bool), np.zeros(draws, bool)
    taken, zero = np.full(draws, planned), np.zeros(draws, bool)
    for count in range(MIN_PAIRS if sequential else planned, planned + 1):
        level = look_tail(count, planned, tail) if sequential else tail
        mean = values[:, :count].mean(axis=1)
        between = values[:, :count].std(axis=1, ddof=1)
        spread: Floats | float = expected.spread if expected else 0.0
        if expected is None and kl is not None:
            spread = KL_SHARE * kl[:, :count].mean(axis=1)
        freedom = expected.freedom if expected else 0
        seeds = seeds_half(between, count, level, spread=spread, freedom=freedom)
        half = np.hypot(seeds, student_t(_MANY, level) * rows_error)
        still = ~(passed | failed)
        zero = np.where(still, np.abs(mean) <= half, zero)
        ends = still & ((np.abs(mean) + half <= limit) | (np.abs(mean) - half > limit))
        taken[ends] = count
        passed |= ends & (np.abs(mean) <= limit)
        failed |= ends & (np.abs(mean) > limit)
    return Rates(
        passed=float(passed.mean()),
        failed=float(failed.mean()),
        contains_zero=float(zero.mean()),
        pairs=float(taken.mean()),
    )


def contributions(arm: ArmVerdict) -> list[Contribution]:
    """Of each pair of `arm`, in the order of seeds, at the level of its verdict; empty before there is one."""
    if arm.average is None:
        return []
    variance, settled, tail = arm.average.variance, arm.average.variance.expected, arm.average.tail

    def interval(of: list[SeedPair]) -> Estimate:
        values = [pair.difference.ne_percent.value for pair in of]
        from_pairs = settled is not None and not settled.freedom
        found = replace(
            variance,
            mean=float(np.mean(values)) if of else math.nan,
            pairs=len(of),
            between_pairs=deviation(values),
            expected=by_kl(pair.difference for pair in of) if from_pairs else settled,
        )
        return found.interval(tail)

    pairs = list(arm.pairs)
    return [
        Contribution(
            seed=pair.seed,
            value=pair.difference.ne_percent.value,
            after=interval(pairs[: place + 1]),
            without=interval(pairs[:place] + pairs[place + 1 :]),
        )
        for place, pair in enumerate(pairs)
    ]
