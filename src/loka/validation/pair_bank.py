"""A bank of trained pairs keeps their differences over validations, to know power and error rates by.

A pair costs two trainings, and the variance that it adds to holds for the next validation of the same model
on the same rows. `resample` draws validations from the pairs of one arm, with replacement:

    A/A arms    the difference with a random sign: control and nudged control could change places
    others      effect + (difference - mean) sqrt(n / (n - 1)), for a true difference of `effect`

A bank of n pairs knows n values: shares of a percent need dozens of them, and the record says how many.

`expected_of` is the spread that the next verdict expects (validation/variance.py). Standard deviations of
four models on the same ten million rows differ by a factor of 1.6: by Smyth's estimate those of others are
worth 6 degrees of freedom, of one other about 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loka.core.storage.codec import record, sparse
from loka.core.storage.record_file import RecordFile
from loka.validation.arms import NUDGED, title_of
from loka.validation.power import Rates, deviation_by_rows, rates
from loka.validation.record import Validation
from loka.validation.variance import MIN_PAIRS, Expected, PairVariance, deviation
from loka.validation.verdicts import ERROR

_DRAWS = 4000
OTHER, MOST = 2, 6  # degrees of freedom: of an other model, and of all together


@record(row=True)
@dataclass(frozen=True)
class BankedPair:
    seed: int
    ne_percent: float
    kl_percent: float | None = sparse(None)


def _check(arm: BankedArm) -> None:
    if not arm.pairs or not all(math.isfinite(pair.ne_percent) for pair in arm.pairs):
        raise ValueError(f"the pairs of {arm.name} are no finite numbers")


@record(check=_check)
@dataclass(frozen=True, kw_only=True)
class BankedArm:
    """Pairs of one arm against one control.

    `world` is a digest of model, rows and configuration, which pairs have to share to be drawn together,
    `setting` one of rows and configuration alone (of earlier versions "");
    `rows_error` is that of all pairs' mean, over `rows` held-out rows; `by_rows` the part of the standard
    deviation between pairs that is the choice of these rows.
    """

    world: str
    key: str
    name: str
    model: str
    rows: int
    rows_error: float
    by_rows: float
    pairs: tuple[BankedPair, ...]
    task: str = sparse("")
    setting: str = sparse("")

    @property
    def title(self) -> str:
        return title_of(self.name, self.task)

    @property
    def values(self) -> list[float]:
        """The relative differences of the pairs, in percent of NE."""
        return [pair.ne_percent for pair in self.pairs]

    @property
    def variance(self) -> PairVariance:
        values = self.values
        return PairVariance(
            mean=float(np.mean(values)),
            pairs=len(values),
            rows=self.rows,
            between_pairs=deviation(values),
            rows_error=self.rows_error,
        )


@dataclass(frozen=True)
class Bank(
    RecordFile,
    kind="loka-pair-bank",
    version=1,
    way_out="choose another file; `loka validate --bank` adds its pairs to a new one",
):
    arms: tuple[BankedArm, ...] = ()

    def of(self, world: str) -> tuple[BankedArm, ...]:
        """Arms with at least two pairs of that model, rows and configuration."""
        return tuple(arm for arm in self.arms if arm.world == world and len(arm.pairs) > 1)


def deposit(bank: Bank, found: Validation) -> Bank:
    """`bank` with the pairs of `found`; a pair that it holds already is replaced."""
    kept = {(arm.world, arm.key): arm for arm in bank.arms}
    for arm in found.arms:
        if arm.average is None:
            continue
        new = tuple(
            BankedPair(seed, one.ne_percent.value, one.kl_percent.value if one.kl_percent else None)
            for seed, one in arm.differences.items()
        )
        added = BankedArm(
            world=found.world,
            key=arm.key,
            name=arm.name,
            model=found.model,
            rows=arm.average.variance.rows,
            rows_error=arm.average.variance.rows_error,
            by_rows=deviation_by_rows(arm),
            pairs=new,
            task=arm.task,
            setting=found.setting,
        )
        before = kept.get((added.world, added.key))
        if before is not None:
            # The rows' error is known best from the validation with the most pairs.
            better = added if len(new) >= len(before.pairs) else before
            by_seed = {pair.seed: pair for pair in (*before.pairs, *new)}
            added = replace(better, pairs=tuple(by_seed[seed] for seed in sorted(by_seed)))
        kept[added.world, added.key] = added
    return Bank(tuple(kept.values()))


def prior_of(bank: Bank, world: str, arms: tuple[str, ...]) -> BankedArm | None:
    """The arm to expect the variance of: of those called `arms` the widest, else the widest of that world."""
    known = bank.of(world)
    named = [arm for arm in known if arm.name in arms and len(arm.pairs) >= MIN_PAIRS]
    real = named or [arm for arm in known if arm.name != NUDGED] or list(known)
    return max(real, key=lambda arm: arm.variance.between_pairs, default=None)


def expected_of(bank: Bank, *, world: str, setting: str, seeds: Sequence[int], task: str = "") -> Expected | None:
    """The spread to expect between pairs of `world`, whose own `seeds` are about to be trained.

    From arms on the same rows with the same configuration, A/A arms apart: of each model the median over its
    arms, so that one that went wrong does not decide. Arms of one seed share its control and scatter alike:
    a model has the degrees of freedom of its seeds, and those to be trained are left out. Other models count
    as OTHER each, where there are two. None where the bank knows too little.
    """
    models: dict[str, list[BankedArm]] = {}
    for arm in bank.arms:
        own = arm.world == world
        if (own or (setting and arm.setting == setting)) and arm.task == task and arm.name != NUDGED:
            kept = tuple(pair for pair in arm.pairs if not (own and pair.seed in seeds))
            if len(kept) >= MIN_PAIRS:
                models.setdefault(arm.world, []).append(replace(arm, pairs=kept))
    if len(models.keys() - {world}) < 2:
        models = {name: arms for name, arms in models.items() if name == world}
    if not models:
        return None
    known, pairs = [], 0
    for name, arms in models.items():
        freedom = len({pair.seed for arm in arms for pair in arm.pairs}) - 1
        variance = float(np.median([arm.variance.between_pairs**2 for arm in arms]))
        known.append((freedom if name == world else OTHER, variance))
        pairs += freedom + 1
    total = sum(freedom for freedom, _ in known)
    spread = math.sqrt(sum(freedom * variance for freedom, variance in known) / total)
    of = ", ".join(sorted({arms[0].model for arms in models.values()}))
    return Expected(spread, min(total, MOST), f"{pairs} banked pairs of {of}")


def resample(
    arm: BankedArm,
    *,
    pairs: int,
    limit: float,
    effect: float = 0.0,
    sequential: bool = False,
    expected: Expected | None = None,
    tail: float = ERROR,
) -> Rates:
    """How validations of `pairs` pairs end whose true difference is `effect` percent, at the level 1 - `tail`.

    Without an `expected` spread each goes by the KL/H of the pairs that were drawn, where all have one.
    """
    rng = np.random.default_rng(0)
    values = np.array(arm.values)
    place = rng.integers(0, len(values), (_DRAWS, pairs))
    if arm.name == NUDGED:
        drawn = values[place] * rng.choice((-1.0, 1.0), (_DRAWS, pairs)) + effect
    else:
        residual = (values - values.mean()) * (len(values) / (len(values) - 1)) ** 0.5
        drawn = residual[place] + effect + arm.rows_error * rng.normal(size=(_DRAWS, 1))
    kl = np.array([np.nan if pair.kl_percent is None else pair.kl_percent for pair in arm.pairs])
    return rates(
        drawn,
        rows_error=arm.rows_error,
        limit=limit,
        sequential=sequential,
        expected=expected,
        kl=kl[place] if np.isfinite(kl).all() else None,
        tail=tail,
    )
