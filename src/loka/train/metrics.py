"""Quality of click predictions, in double precision.

    logloss     = mean of log(1 + exp(-s)),  s = logit for a click, -logit otherwise
    ne          = logloss / entropy of the base rate       (He et al. 2014, section 3)
    auc         = P(click outranks no click), a tie counts half
    calibration = sum p / sum y

Everything is computed from logits: probabilities in float32 saturate near 1 and would
make ties and infinite losses that the model did not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from loka.core.exceptions import LokaError, NonFinite
from loka.core.numerics.label_rate import entropy

T = TypeVar("T")
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """The quality of `rows` predictions; nan where a measure does not exist because one class is absent."""

    ne: float
    logloss: float
    auc: float
    calibration: float
    rows: int
    base_rate: float


def quality(logits: npt.ArrayLike, labels: npt.ArrayLike) -> Quality:
    """Quality of `logits` [N] against `labels` [N] in {0, 1}.

    Raises:
        ValueError: shapes differ, no rows, or labels other than 0 and 1.
        NonFinite: a logit is nan or infinite.
    """
    x, clicked = checked(logits, labels)
    base_rate = float(clicked.mean())
    logloss = float(log_losses(x, clicked).mean())
    clicks = int(clicked.sum())
    return Quality(
        ne=normalized_entropy(logloss, base_rate),
        logloss=logloss,
        auc=Placements.of(x, clicked).auc,
        calibration=float(probabilities(x).sum()) / clicks if clicks else math.nan,
        rows=len(x),
        base_rate=base_rate,
    )


def quality_by_task(
    tasks: Sequence[str], logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]
) -> dict[str, Quality]:
    """The quality of each task by itself, of `logits` and `labels` [N], or [N, tasks] with several tasks."""
    both = zip(columns(logits), columns(labels), strict=True)
    return {name: quality(*each) for name, each in zip(tasks, both, strict=True)}


def columns(values: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
    """The values [N] of each task, from values [N] or [N, tasks]."""
    return [values] if values.ndim == 1 else list(values.T)


def only(by_task: Mapping[str, T], what: str) -> T:
    """The value of the only task. Raises LokaError where there are several tasks, because none stands
    for the others.
    """
    if len(by_task) > 1:
        raise LokaError(
            f"there is no one {what}: it is of {len(by_task)} tasks, {', '.join(by_task)}",
            way_out=f"read it by task: `.{what}_by_task[{next(iter(by_task))!r}]`",
        )
    return next(iter(by_task.values()))


def checked(logits: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Logits as float64 and labels as booleans, both [N]."""
    x, y = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if x.ndim != 1 or x.shape != y.shape or not len(x):
        raise ValueError(f"logits {x.shape} and labels {y.shape} have to be [N] with N at least 1")
    clicked = y == 1
    if not (clicked | (y == 0)).all():
        raise ValueError("labels have to be 0 or 1; NE and AUC are not defined for others here")
    bad = int((~np.isfinite(x)).sum())
    if bad:
        raise NonFinite(
            f"{bad} of {len(x)} logits are nan or infinite",
            why=[f"the first one is row {int(np.argmin(np.isfinite(x)))}"],
            way_out="look for NaN in that row's features, and in the weights; where the model runs by a plan, "
            "loka.check_finite(model) names the site that made it",
        )
    return x, clicked


def log_losses(logits: Floats, clicked: npt.NDArray[np.bool_]) -> Floats:
    """Loss per row [N]. Signing the logit first keeps tiny losses: softplus(x) - x would cancel."""
    return np.logaddexp(0.0, np.where(clicked, -logits, logits))


def divergences(z: Floats, other: Floats) -> Floats:
    """KL of each row [N] of predictions with logits `other` from those with `z`, in nats."""
    rarer = np.where(z > 0, -1.0, 1.0)  # of the rarer class: a probability near one would swallow its distance from it
    z, other = rarer * z, rarer * other
    p = probabilities(z)
    return np.maximum(p * (z - other) + np.logaddexp(0.0, other) - np.logaddexp(0.0, z), 0.0)


def probabilities(logits: Floats) -> Floats:
    return np.exp(-np.logaddexp(0.0, -logits))


def normalized_entropy(logloss: float, base_rate: float) -> float:
    if not 0 < base_rate < 1:
        return math.nan
    return logloss / entropy(base_rate)


@dataclass(frozen=True)
class Placements:
    """How each row fares against the rows of the other class: the AUC, and all that its variance needs.

    `clicks` [N1], in the order of the rows, hold twice the number of others that are lower, ties as one;
    `others` [N0] twice the number of clicks that are higher. All are integers, so that ties are exact and
    the AUC is up to one division.
    """

    clicks: Ints
    others: Ints

    @classmethod
    def of(cls, logits: Floats, clicked: npt.NDArray[np.bool_]) -> Placements:
        order = np.argsort(logits)
        ordered, hit = logits[order], clicked[order]
        edges = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        edges = np.concatenate(([0], edges, [len(order)]))  # of runs of tied rows
        clicks = np.concatenate(([0], np.cumsum(hit)))[edges]
        others = edges - clicks
        # Those before a run and those before its end are together twice those below it, ties as one.
        below = others[:-1] + others[1:]
        above = 2 * clicks[-1] - (clicks[:-1] + clicks[1:])
        sizes = np.diff(edges)
        placed = np.empty(len(order), np.int64)
        placed[order] = np.where(hit, np.repeat(below, sizes), np.repeat(above, sizes))
        return cls(placed[clicked], placed[~clicked])

    @property
    def auc(self) -> float:
        """nan when a class is absent."""
        pairs = len(self.clicks) * len(self.others)
        return int(self.clicks.sum()) / (2 * pairs) if pairs else math.nan
