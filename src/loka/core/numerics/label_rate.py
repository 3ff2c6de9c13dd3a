"""The share of positive labels, counted: H of it, and how sure H is.

    H = h(q),  h(q) = -q ln q - (1 - q) ln(1 - q),      Var(ln H) = (ln((1 - q) / q) / H)^2 q (1 - q) / n

to first order in the error of q = positives / n. Fewer than ten rows of one kind tell the rate to no better
than a third, and H of it likewise: then nothing that is relative to H can be promised.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loka.core.error import Z95

LEAST = 10
"""Positive rows, and negative ones, without which the rate counts as unknown."""


@dataclass(frozen=True, kw_only=True)
class LabelRate:
    """`positives` of `rows` labels, of one task."""

    positives: float
    rows: int

    def __post_init__(self) -> None:
        if not 0 <= self.positives <= self.rows:
            raise ValueError(f"{self.positives} positives of {self.rows} rows cannot be")

    def __str__(self) -> str:
        if not self.varies:
            return f"all {self.rows} labels read are {int(self.positives > 0)}"
        error = Z95 * math.sqrt(self.share * (1 - self.share) / self.rows)
        return f"{self.positives} of {self.rows} labels are positive: a share of {self.share:.3g} +- {error:.1g}"

    @property
    def share(self) -> float:
        return self.positives / self.rows if self.rows else math.nan

    @property
    def varies(self) -> bool:
        """Whether there are labels of both kinds; else H is 0, and NE is not defined."""
        return 0 < self.positives < self.rows

    @property
    def unsupported(self) -> str:
        """Why H of these labels is not known; "" where it is."""
        if not self.rows:
            return "no labels were read, so KL/H has no base rate: pass base_rate="
        rare = min(self.positives, self.rows - self.positives)
        if not rare:
            which = "positive" if self.positives else "negative"
            return f"all {self.rows} labels are {which}: H is 0, and nothing can be stated relative to it"
        if rare < LEAST:
            kind = "positive" if rare == self.positives else "negative"
            return (
                f"{rare:g} {kind} labels of {self.rows} do not tell the base rate (it takes {LEAST}): read "
                "more rows, or pass base_rate="
            )
        return ""

    @property
    def log_variance(self) -> float:
        """Of ln H, by the choice of rows; inf where the labels do not tell it."""
        q = self.share
        if not 0 < q < 1:
            return math.inf
        return (math.log((1 - q) / q) / entropy(q)) ** 2 * q * (1 - q) / self.rows


BaseRate = float | LabelRate | Sequence[float | LabelRate]
"""A share of positive labels that is known, or labels counted; one for all tasks, or one for each."""
Shares = float | Sequence[float]
"""Shares of positive labels that are known; one for all tasks, or one for each."""


@dataclass(frozen=True, kw_only=True)
class TaskRates:
    """`shares` of positive labels by task; `log_variance` of ln H, where H is summed over tasks;
    `unsupported` is why H is not known, "" where it is."""

    shares: tuple[float, ...]
    log_variance: float = 0.0
    unsupported: str = ""


def require_shares(base_rate: BaseRate | None) -> None:
    """Raises ValueError for what `task_rates` would refuse whatever the number of tasks, before anything runs."""
    if isinstance(base_rate, Sequence) and not len(base_rate):
        raise ValueError("base_rate names no share of labels; None is the mean prediction")
    if base_rate is not None:
        task_rates(base_rate, len(base_rate) if isinstance(base_rate, Sequence) else 1)


def task_rates(base_rate: BaseRate, tasks: int) -> TaskRates:
    """Of `tasks` tasks. One rate holds for all of them; of several each has its own, counted independently:

        Var(ln H) = sum_t H_t^2 Var(ln H_t) / (sum_t H_t)^2

    Raises:
        ValueError: another number of rates than tasks, or one that is no share.
    """
    if isinstance(base_rate, str):
        raise ValueError(f"base_rate is {base_rate!r}; a share of labels is a number")
    several = tuple(base_rate) if isinstance(base_rate, Sequence) else (base_rate,) * tasks
    if len(several) != tasks:
        raise ValueError(f"base_rate has {len(several)} shares, and the logits are of {tasks} tasks")
    shares = tuple(rate.share if isinstance(rate, LabelRate) else rate for rate in several)
    for place, rate in enumerate(several):
        if isinstance(rate, LabelRate) and rate.unsupported:
            which = f"task {place}: " if isinstance(base_rate, Sequence) and tasks > 1 else ""
            return TaskRates(shares=shares, unsupported=which + rate.unsupported)
        if not isinstance(rate, LabelRate) and not 0 < rate < 1:
            raise ValueError(f"base_rate is {rate}; a share of labels lies between 0 and 1")
    if not isinstance(base_rate, Sequence):
        return TaskRates(
            shares=shares, log_variance=base_rate.log_variance if isinstance(base_rate, LabelRate) else 0.0
        )
    known = [(rate.share, rate.log_variance) for rate in several if isinstance(rate, LabelRate)]
    total = math.fsum(entropy(share) for share in shares)
    return TaskRates(shares=shares, log_variance=math.fsum(entropy(q) ** 2 * v for q, v in known) / total**2)


def entropy(q: float) -> float:
    """h(q) in nats, of labels of which the share `q` is positive; 0 where all are alike, or `q` is NaN."""
    return -q * math.log(q) - (1 - q) * math.log1p(-q) if 0 < q < 1 else 0.0
