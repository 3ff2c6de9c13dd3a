"""What a plan is allowed to cost, and what a speed-up must at least be worth."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from loka.core.error import Z95, Estimate
from loka.core.storage.codec import record, sparse

# What an earlier version allowed of layers that run together is passed over: a plan that has such layers is
# refused by itself (core/records/plan.py).
_BEFORE = frozenset({"chains", "chain_recipes"})


@record(ignore=_BEFORE)
@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits that every FP8 decision of a plan keeps.

    Attributes:
        ne: limit on the predicted KL/H of all FP8 `output` GEMMs together, absolute, spent where it saves
            most time. In a calibrated, annealed model NE by the labels rises as much in the mean, and 0.02 %
            of an NE of 0.8 is 1.6e-4. Each site counts with the upper end of its estimate, `upper_bound`; a
            site without an estimate stays in hp. None: no such limit (docs/budget.md). A mapping from the
            names of tasks gives each a limit of its own; one number holds for each task by itself, where the
            probe was told their names.
        segments: limits on the KL/H of single segments of rows, by their names, for each task there; beside
            `ne` or without it (docs/segments.md).
        min_sqnr_db: floor on the lower end of a site's `sqnr_db` interval. e4m3 on both
            operands gives about 28.5 dB, e5m2 gradients about 24.5 dB; the default admits the
            first and refuses the second, whose bias costs NE in training (docs/plan.md).
            None lifts it.
        max_mere: limit on the paper's metric, for parity (it used 0.2). None by default.
        min_speedup: least speed-up over bf16 worth having, on the lower end of its interval.
            It binds only where times were measured.
        keep: patterns (fnmatch) or names of sites "path/gemm", or of module paths, to keep in hp.
        keep_prediction: keep linear layers with at most 8 outputs in hp: quantizing the
            logit layer's gradients biases training (71 % of e5m2's damage).
        regions: whether layers may be planned by what they take as parts of compiled regions; without, by
            what their sites take alone, as they run eagerly.
        on_miss: "keep" a site in hp when no candidate fits, or "raise" NoKernelFits.
    """

    ne: float | Mapping[str, float] | None = sparse(None)
    min_sqnr_db: float | None = 25.0
    max_mere: float | None = None
    min_speedup: float = 1.05
    keep: tuple[str, ...] = ()
    keep_prediction: bool = True
    regions: bool = sparse(True)
    segments: Mapping[str, float] = sparse(default_factory=dict)
    on_miss: Literal["keep", "raise"] = "keep"

    def __post_init__(self) -> None:
        if self.on_miss not in ("keep", "raise"):
            raise ValueError(f"on_miss is {self.on_miss!r}; it must be 'keep' or 'raise'")
        for name in ("min_sqnr_db", "max_mere"):
            value = getattr(self, name)
            if value is not None and not _finite(value):
                raise ValueError(f"{name} is {value!r}; it must be a finite number, or None to lift the limit")
        if self.max_mere is not None and self.max_mere < 0:
            raise ValueError(f"max_mere is {self.max_mere!r}; an error is 0 or more, None lifts the limit")
        if not isinstance(self.segments, Mapping):
            raise ValueError(f"segments is {self.segments!r}; it must map names to limits")
        by_name: dict[str, object] = {f"segments[{name!r}]": limit for name, limit in self.segments.items()}
        if isinstance(self.ne, Mapping):
            by_name |= {f"ne[{name!r}]": limit for name, limit in self.ne.items()}
            if not self.ne:
                raise ValueError("ne names no task; None lifts the limit")
        elif self.ne is not None:
            by_name["ne"] = self.ne
        for name, limit in by_name.items():
            if not (_finite(limit) and limit >= 0):
                raise ValueError(f"{name} is {limit!r}; an increase allowed is 0 or more (ne: or None for no limit)")
        if not (_finite(self.min_speedup) and self.min_speedup >= 0):
            raise ValueError(f"min_speedup is {self.min_speedup!r}; a ratio of times is a finite number, 0 or more")
        for name in ("keep_prediction", "regions"):
            if not isinstance(getattr(self, name), bool):  # "no" would be true
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not (isinstance(self.keep, (tuple, list)) and all(isinstance(pattern, str) for pattern in self.keep)):
            raise ValueError(f"keep is {self.keep!r}; it must be a tuple of patterns")
        object.__setattr__(self, "keep", tuple(self.keep))  # a list would not be equal to what is loaded

    @property
    def whole(self) -> float | None:
        """The one number of `ne`; None where there is none, or a limit for each task."""
        return None if isinstance(self.ne, Mapping) else self.ne

    @classmethod
    def paper(cls, **others: Any) -> Budget:
        """The paper's rule at every GEMM by itself: MERE below 0.2, and more than 1.05 times as fast."""
        rule = {"min_sqnr_db": None, "max_mere": 0.2, "min_speedup": 1.05, "regions": False}
        return cls(**{**rule, **others})


def budget_of(given: object) -> Budget:
    """What is `given`, for None the default. Raises ValueError for another kind."""
    budget = Budget() if given is None else given
    if not isinstance(budget, Budget):
        raise ValueError(f"the budget is {budget!r}; it must be a loka.Budget, such as loka.Budget(ne=1e-4)")
    return budget


def _finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number of Python's own. A plan with another kind, such as numpy's float32, has no
    form in JSON.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max  # of an int with 400 digits math.isfinite raises


_ONE_SIDED = 1.644854  # standard errors above the value that the truth exceeds once in twenty


def upper_bound(effect: Estimate) -> float:
    """What a budget is charged for an effect: the value and 1.64 standard errors, which the truth exceeds once in
    twenty. The upper half of the 95 % interval is 1.96 standard errors. inf for an effect that is not known at all.
    """
    upper = effect.value + (effect.high - effect.value) * _ONE_SIDED / Z95
    return max(upper, 0.0) if math.isfinite(upper) else math.inf


def known_effect(effect: Estimate | None) -> Estimate | None:
    """`effect` where it has an upper end to charge a budget; None otherwise."""
    return effect if effect is not None and math.isfinite(upper_bound(effect)) else None


def total_effect(effects: Iterable[Estimate]) -> Estimate:
    """The sum of effects. Interval ends are added, not variances, because all sites are estimated on the same sampled
    rows.
    """
    several = list(effects)
    return Estimate(*(math.fsum(getattr(e, end) for e in several) for end in ("value", "low", "high")))
