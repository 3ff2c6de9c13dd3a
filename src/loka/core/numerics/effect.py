"""What an error at one site's output costs the model: KL/H, which needs no labels, and how sure that is.

    term_i = 1/2 sum_t p_it (1 - p_it) (J_it . dY_i)^2        nats lost on sample i, to second order
    KL/H   = mean_i term_i / H,      H = sum_t h(mean_i p_it),   h(q) = -q ln q - (1-q) ln(1-q)

J_it is the gradient of logit t of sample i at the site's output and dY_i the error there: the
Gauss-Newton form of the loss (Martens, arXiv 1412.1193), whose first-order part has no sign to trust
at the sizes of FP8. Effects of several sites add up. H is the entropy of the base rate, which a calibrated
model predicts on average (in place of p_it there may stand the known rate); with several tasks,
loss and H are summed over them. A few samples carry most of the sum (the terms' standard deviation is 2 to 4
times their mean, their skewness 10 to 30), so most draws lack some of those that carry it: the mean is more
often too low than too high, and far. The lower end is one of the logarithm, which stays positive; the
upper one inverts the cubic that takes the skewness out of Student's statistic (Hall, JRSS B 54, 1992), where
that lies further out:

    low  = v / exp(t sqrt(c^2 / n + u)),          c = sd / mean,  t = t_95(n - 1)
    high = v exp(sqrt(max(t c / sqrt(n), ln h)^2 + t^2 u))
    h    = 1 + c / sqrt(n) (3 / a) (1 - cbrt(1 - a (t + a / 6))),     a = skewness / sqrt(n)

u is the variance that ln v has beyond the sampling of rows (`log_variance`): what the model moves until the
prediction is used (probe/model_effects/movement.py), and what the labels' rate, hence H, is unsure by.
Records of before hold no third moment (`cubes` is 0); their upper end is that of the logarithm.

What does not add up is what an error does to all samples alike, a shift of the logit: the rounding
error of a weight is the same for every row. Shifts add before they are squared (`joint_loss`):

    shift_t = sum_i p_it (1 - p_it) J_it . dY_i / sum_i p_it (1 - p_it)
    joint   = sum_sites (term - 1/2 sum_t c_t shift_t^2) + 1/2 sum_t c_t (sum_sites shift_t)^2

with c_t the mean of p_it (1 - p_it).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.core.error import Estimate, exactly, student_t_95
from loka.core.numerics.label_rate import entropy
from loka.core.storage.codec import record, sparse

NO_PROMISE = "nothing can be promised on KL/H: "  # begins the reason why no site's effect is known
_WIDEST = 700.0  # exp() of more is no float
OLD = "not by the latest sampled steps: "  # begins the reason why effects are known, but not renewed
OTHER_PARTS = "of centred and hot recipes: merged from parts of other means or columns; renew_effects after merging"
"""Begins the reason why effects of these recipes are not known, beside known ones of the others."""


def _check(found: Effect) -> None:
    sums = (found.count, found.spread, found.total, found.squares, found.log_variance, found.cubes, found.weight)
    positive = (*sums, *found.probabilities, *found.curvatures)
    fits = len(found.pulls) == len(found.curvatures) and all(map(math.isfinite, found.pulls))
    if not fits or not all(math.isfinite(number) and number >= 0 for number in positive):
        raise ValueError(f"{found} is no effect")


@record(check=_check)
@dataclass(frozen=True, kw_only=True)
class Effect:
    """Weighted sums over samples: of the terms, their squares and `cubes`, and per task of the predictions.

    `count` is the sum of the weights and `spread` that of their squares: both are the number of
    samples where all weigh 1, and count^2 / spread is the number that the interval reckons with.
    Effects of disjoint samples merge by addition. Samples are taken for independent, unless clusters of
    rows were named (probe/model_effects/renewal.py): `spread` is then larger by what their correlation costs.
    `pulls` and `curvatures` are the sums, per task, in the numerator and the denominator of the shift; empty
    where they are not known. `log_variance` is the variance of the effect's logarithm beyond the sampling.
    `weight`: the mean of unequal weights, which sums are relative to; else 0.
    """

    count: float
    spread: float
    total: float
    squares: float
    probabilities: tuple[float, ...]
    pulls: tuple[float, ...] = ()
    curvatures: tuple[float, ...] = ()
    log_variance: float = sparse(0.0)
    cubes: float = sparse(0.0)
    weight: float = sparse(0.0)

    @classmethod
    def of(
        cls,
        terms: Iterable[float],
        probabilities: Iterable[Sequence[float]],
        pulls: Iterable[Sequence[float]] | None = None,
        curvatures: Iterable[Sequence[float]] | None = None,
    ) -> Effect:
        """From `terms` [m] and the predictions [m][T] of the same samples, and what makes their shift.

        A sample whose term is not finite is left out: a NaN in its row says nothing of the rest.
        """
        terms = list(terms)
        finite = [math.isfinite(term) for term in terms]
        kept = [term for term in terms if math.isfinite(term)]
        return cls(
            count=len(kept),
            spread=len(kept),
            total=math.fsum(kept),
            squares=math.fsum(term * term for term in kept),
            cubes=math.fsum(term**3 for term in kept),
            probabilities=_sums(probabilities, finite),
            pulls=_sums(pulls or (), finite),
            curvatures=_sums(curvatures or (), finite),
        )

    @property
    def samples(self) -> float:
        """How many samples of weight 1 would be as informative."""
        return self.count**2 / self.spread if self.spread else 0.0

    @property
    def entropy(self) -> float:
        """H in nats; nan without samples."""
        return math.fsum(entropy(p / self.count) for p in self.probabilities) if self.count else math.nan

    @property
    def sampling_variance(self) -> float:
        """Variance of the mean's logarithm by the choice of samples; inf of fewer than 2, or of no effect."""
        samples = self.samples
        if samples < 2 or not self.total > 0:
            return math.inf
        mean = self.total / self.count
        return max(self.squares / self.count / mean**2 - 1, 0.0) / (samples - 1)

    @property
    def skewness(self) -> float:
        """Of the terms, E (term - mean)^3 / sd^3; 0 where it is not known, or nothing scatters."""
        if not self.count or not self.cubes:
            return 0.0
        mean = self.total / self.count
        variance = self.squares / self.count - mean**2
        if not variance > 1e-6 * mean**2:  # below, rounding of the sums is all
            return 0.0
        third = self.cubes / self.count - 3 * mean * self.squares / self.count + 2 * mean**3
        return third / variance**1.5

    def loss(self) -> Estimate:
        """The mean loss added, in nats a sample, with its 95 % interval."""
        if self.count == 0:
            return exactly(math.nan)
        mean = self.total / self.count
        samples = self.samples
        if samples < 2 or 0 < self.squares / self.count <= mean**2 * (1 + 1e-9):  # copies of a row are one
            return Estimate(mean, 0.0, math.inf)
        if mean == 0:
            return exactly(0.0)
        t = student_t_95(math.floor(samples) - 1)
        by_samples, beyond = t * math.sqrt(self.sampling_variance), t * math.sqrt(self.log_variance)
        above = max(by_samples, math.log(_upper(by_samples, self.skewness / math.sqrt(samples), t)))
        below, above = math.hypot(by_samples, beyond), math.hypot(above, beyond)
        return Estimate(mean, mean / math.exp(min(below, _WIDEST)), mean * math.exp(min(above, _WIDEST)))

    def kl(self) -> Estimate:
        """KL/H, absolute, with its 95 % interval; nan where predictions have no entropy."""
        loss, entropy = self.loss(), self.entropy
        if not entropy > 0:
            return exactly(math.nan)
        return loss.mapped(lambda lost: lost / entropy)

    def common(self) -> tuple[float, ...]:
        """The shift of each task's logit that is common to all samples; empty where not known."""
        pairs = zip(self.pulls, self.curvatures, strict=True)
        return tuple(pull / curvature if curvature else 0.0 for pull, curvature in pairs)

    def merge(self, other: Effect) -> Effect:
        """Of the samples of both, which share none.

        Raises ValueError for effects on different numbers of tasks.
        """
        if not self.count or not other.count:
            return other if not self.count else self
        if len(self.probabilities) != len(other.probabilities):
            raise ValueError(f"effects on {len(self.probabilities)} and {len(other.probabilities)} tasks do not merge")
        weight = 0.0
        if self.weight and other.weight:
            weight = (self.count * self.weight + other.count * other.weight) / (self.count + other.count)
        a, b = (each.faded(each.weight / weight) if weight else each for each in (self, other))
        pairs = zip(a.probabilities, b.probabilities, strict=True)
        return Effect(
            count=a.count + b.count,
            spread=a.spread + b.spread,
            total=a.total + b.total,
            squares=a.squares + b.squares,
            cubes=a.cubes + b.cubes,
            probabilities=tuple(mine + theirs for mine, theirs in pairs),
            pulls=_added(a.pulls, b.pulls),
            curvatures=_added(a.curvatures, b.curvatures),
            log_variance=(a.count * a.log_variance + b.count * b.log_variance) / (a.count + b.count),
            weight=weight,
        )

    def faded(self, factor: float) -> Effect:
        """The same samples with `factor` times their weight."""
        return replace(
            self,
            count=self.count * factor,
            spread=self.spread * factor**2,
            total=self.total * factor,
            squares=self.squares * factor,
            cubes=self.cubes * factor,
            probabilities=tuple(p * factor for p in self.probabilities),
            pulls=tuple(pull * factor for pull in self.pulls),
            curvatures=tuple(curvature * factor for curvature in self.curvatures),
        )


def _upper(half: float, a: float, t: float) -> float:
    """Hall's upper end over the mean, at least 1: `half` is t c / sqrt(n), `a` the skewness / sqrt(n)."""
    if abs(a) < 1e-9:
        return 1 + half
    return max(1 + half / t * (3 / a) * (1 - math.cbrt(1 - a * (t + a / 6))), 1.0)


def merged(effects: Mapping[str, Effect], others: Mapping[str, Effect]) -> dict[str, Effect]:
    """By name; a name in one of the two stays as it is."""
    both = {name: effect.merge(others[name]) for name, effect in effects.items() if name in others}
    return {**others, **effects, **both}


def joint_loss(effects: Sequence[Effect]) -> float:
    """Nats a sample that the errors of several sites add together, common shifts of logits included.

    Where one of them does not know its shift, the sum.
    """
    total = math.fsum(effect.loss().value for effect in effects)
    if not effects or not all(effect.pulls for effect in effects):
        return total
    weights = [curvature / effects[0].count for curvature in effects[0].curvatures]
    shifts = [effect.common() for effect in effects]
    for task, weight in enumerate(weights):
        mine = [shift[task] for shift in shifts]
        total += 0.5 * weight * (math.fsum(mine) ** 2 - math.fsum(shift * shift for shift in mine))
    return total


def _sums(rows: Iterable[Sequence[float]], finite: Sequence[bool]) -> tuple[float, ...]:
    return tuple(math.fsum(task) for task in zip(*itertools.compress(rows, finite), strict=True))


def _added(mine: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[float, ...]:
    if not mine or not theirs:
        return ()
    return tuple(a + b for a, b in zip(mine, theirs, strict=True))
