"""How far the model moves until a prediction is used, and how much wider that makes the interval.

    d_sr   = ln(effect now) - ln(effect earlier)                    of site s by recipe r
    own_s = mean over r of  d_sr^2 - u_sr(now) - u_sr(earlier), at least 0      u: variance of sampling
    sigma_s^2 = max(own_s, median over sites of own_s / 0.455)      0.455: the median of chi^2 with 1 degree
    added_s = sigma_s^2 ln(until / now) / ln(now / earlier)         to the variance of ln(effect)

Effects move by factors, fast in a young model and slowly in an old one: over equal ratios of steps they
move about alike (steps 100 to 200 as 1000 to 2000), as a random walk does, whose variance grows with its
time, here ln(step). One d says little about its sigma, so a site that stood still counts as one of the
middle; one that moved further than those goes by itself. It is symmetric: where effects grow throughout, the
lower end is too low and the upper one about right. A decaying learning rate moves the model less than this.

`earlier` is the model of the record that is renewed. Samples of sampled steps are of no single model; their
weights fall by a constant f for each sampled step, so they are f / (1 - f) sampled steps old on average,
and f follows from the sums of the weights and of their squares: f = count / spread - 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from loka.core.numerics.effect import Effect
from loka.core.records.stats import Stats
from loka.statistics.effect_casts import LEARNING

_UNKNOWN = 0.5
"""Standard deviation of ln(effect) over a doubling of the steps, where no earlier model is known. In
`ne_prediction` (benchmarks/README.md) effects moved over the last one by 0.30 in the median and by
0.79 in the root of the mean square."""
_MEDIAN_OF_CHI2 = 0.455

Effects = Mapping[str, Mapping[str, Effect]]
"""By site and recipe."""


@dataclass(frozen=True, kw_only=True)
class Horizon:
    """Steps of training: of the model that a record's effects are of, of the model now, and until when the
    renewed effects are to hold."""

    earlier: float
    now: float
    until: float

    def __post_init__(self) -> None:
        if not 0 <= self.earlier <= self.now <= self.until < math.inf:
            raise ValueError(
                f"earlier {self.earlier}, now {self.now}, until {self.until}: they must be in order of time"
            )

    @classmethod
    def of_probe(cls, stats: Stats, *, until: float) -> Horizon:
        """Of fading samples: `stats` is what a Probe learnt up to now."""
        return cls(earlier=max(stats.steps - _age(stats), 0.0), now=stats.steps, until=max(until, stats.steps))


def added_variance(earlier: Effects, now: Effects, horizon: Horizon) -> dict[str, float]:
    """By site, the variance that ln(effect) gains until `horizon.until`: `added_s` above."""
    ahead = math.log(max(horizon.until, 1) / max(horizon.now, 1))
    behind = math.log(max(horizon.now, 1) / max(horizon.earlier, 1))
    own = {path: _moved(earlier.get(path, {}), effects) for path, effects in now.items()}
    known = [moved for moved in own.values() if moved is not None]
    if not known or not behind > 0:
        return dict.fromkeys(now, _UNKNOWN**2 * ahead / math.log(2))
    middle = statistics.median(known) / _MEDIAN_OF_CHI2
    return {path: max(moved or 0.0, middle) * ahead / behind for path, moved in own.items()}


def _moved(earlier: Mapping[str, Effect], now: Mapping[str, Effect]) -> float | None:
    """own_s; None where no recipe has an effect in both.

    Centred and hot ones do not count: what was learnt of means and columns moves them in a model that stands still.
    """
    squares = [
        math.log(effect.loss().value / before.loss().value) ** 2 - effect.sampling_variance - before.sampling_variance
        for recipe, effect in now.items()
        if recipe not in LEARNING
        and (before := earlier.get(recipe)) is not None
        and math.isfinite(effect.sampling_variance + before.sampling_variance)
    ]
    return max(math.fsum(squares) / len(squares), 0.0) if squares else None


def widened(effects: Mapping[str, Effect], variance: float) -> dict[str, Effect]:
    """The same effects, the logarithm of each less sure by `variance`."""
    return {name: replace(effect, log_variance=effect.log_variance + variance) for name, effect in effects.items()}


def _age(stats: Stats) -> float:
    """Mean age in steps of the samples behind the effects. Where gaps between sampled steps grew it is less
    than the true one, which widens intervals."""
    if not stats.sampled_steps:
        return 0.0
    known = [e for layer in stats.layers.values() for e in layer.effects.values() if e.spread > 0]
    fade = max((effect.count / effect.spread - 1 for effect in known), default=0.0)
    ages = (stats.sampled_steps - 1) / 2
    if 0 < fade < 1:
        ages = min(ages, fade / (1 - fade))
    return ages * stats.steps / stats.sampled_steps
