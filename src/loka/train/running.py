"""Quality of predictions while training goes on: over all rows so far, over a window, and by segment.

    sums over rows: 1, loss, label, p = sigmoid(logit)       float64 on the device
    histogram of logits, by label                            int64, 4096 bins of 1/128 in [-16, 16]

NE, log loss and calibration follow from the sums; AUC from the histogram, where rows of one bin count as
ties: it differs from the exact one by at most half the share of pairs in one bin, and by far less where a bin is
narrow against what logits differ by. Beyond 2 % of such pairs it is not known (nan): logits that differ by less
than 0.1, as a young model's, or lie beyond 16. A window is the last 8 blocks of steps, of which the newest is
being filled.
Adding never waits for the device; reading does. Sums have one order, so a resumed run reads the same bits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from loka.core.numerics.label_rate import LabelRate
from loka.data.batch import ONE_TASK
from loka.train.metrics import Quality, normalized_entropy
from loka.train.segments import OTHER, Segments

_BLOCKS = 8
_BINS, _WIDEST = 4096, 16.0
_MOST_TIED = 0.02  # of normal logits, whose deviation is 0.11 then; AUC was off by 6e-4 at half of that


@dataclass(frozen=True, kw_only=True)
class Reading:
    """`segments` are by name, of all rows so far; AUC is not known by segment (nan)."""

    lifetime: Quality
    window: Quality
    segments: Mapping[str, Quality] = field(default_factory=dict)


class RunningQuality:
    """See the module's text. `rows` counts the rows so far, known to the host.

    Args:
        window: steps that the window covers at most: whole blocks of an eighth of it, rounded up to steps, of which
            the newest is being filled.
        segments: how rows are told apart; None for no segments.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, window: int = 1000, segments: Segments | None = None
    ) -> None:
        self.rows = 0
        self._steps = 0
        self._segments = segments
        self._block_steps = -(-window // _BLOCKS)
        self._count = window // self._block_steps
        kinds = 1 + (len(segments.names) + 1 if segments else 0)  # all, each, other
        self._sums = torch.zeros(kinds, 4, dtype=torch.float64, device=device)
        self._blocks = torch.zeros(self._count, 4, dtype=torch.float64, device=device)
        self._histogram = torch.zeros(2 * _BINS, dtype=torch.int64, device=device)
        self._histograms = torch.zeros(self._count, 2 * _BINS, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(
        self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, segments: torch.Tensor | None = None
    ) -> None:
        """One step's `losses`, `logits`, `labels` and `segments`, [B] each, on the device.

        Raises ValueError for another number of segments.
        """
        if self._segments is not None and segments is not None and len(segments) != len(labels):
            raise ValueError(
                f"segments.of gives {len(segments)} places in {self._segments.names} to {len(labels)} rows: give each "
                "row one, or -1"
            )
        block, filled = divmod(self._steps, self._block_steps)
        block %= self._count
        if not filled:
            self._blocks[block].zero_()
            self._histograms[block].zero_()
        logits = logits.detach()
        columns = torch.stack([losses.detach(), labels, logits], dim=1).double()
        columns[:, 2].sigmoid_()
        columns = torch.cat([torch.ones_like(columns[:, :1]), columns], dim=1)
        total = columns.sum(0)
        self._sums[0] += total
        self._blocks[block] += total
        if self._segments is not None and segments is not None:
            self._sums[1:] += _by_segment(columns, segments, len(self._segments.names))
        places = _places(logits, labels)
        ones = torch.ones_like(places)
        self._histogram.index_add_(0, places, ones)
        self._histograms[block].index_add_(0, places, ones)
        self.rows += len(labels)
        self._steps += 1

    def losses_and_clicks(self) -> tuple[float, float]:
        """Sums over all rows so far."""
        _, loss, click, _ = self._sums[0].tolist()
        return loss, click

    def read(self) -> Reading:
        by_kind = self._sums.tolist()
        names = (*self._segments.names, OTHER) if self._segments else ()
        return Reading(
            lifetime=_quality(by_kind[0], self._histogram),
            window=_quality(self._blocks.sum(0).tolist(), self._histograms.sum(0)),
            segments={name: _quality(sums, None) for name, sums in zip(names, by_kind[1:], strict=True)},
        )

    def state_dict(self) -> dict[str, Any]:
        """Shared, not copied."""
        tensors = {name: getattr(self, f"_{name}") for name in SUMS}
        return {**tensors, "rows": self.rows, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        window = ("blocks", "histograms")  # which fills anew where blocks were of other lengths, as they were before
        anew = self._blocks.shape != state["blocks"].shape
        for name in SUMS:
            if not (anew and name in window):
                getattr(self, f"_{name}").copy_(state[name])
        self.rows, self._steps = state["rows"], state["steps"]


class RunningTasks:
    """A `RunningQuality` for each task, by name: no number is of two of them."""

    def __init__(
        self,
        tasks: Sequence[str] = ONE_TASK,
        device: torch.device | str = "cpu",
        *,
        window: int = 1000,
        segments: Segments | None = None,
    ) -> None:
        self._tasks = {name: RunningQuality(device, window=window, segments=segments) for name in tasks}

    @property
    def rows(self) -> int:
        return next(iter(self._tasks.values())).rows

    def add(
        self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, segments: torch.Tensor | None = None
    ) -> None:
        """One step's `losses`, `logits` and `labels` [B], or [B, tasks] of several; `segments` [B]."""
        several = (part.reshape(len(part), -1).unbind(1) for part in (losses, logits, labels))
        for running, *columns in zip(self._tasks.values(), *several, strict=True):
            running.add(*columns, segments)

    def losses_and_clicks(self) -> dict[str, tuple[float, float]]:
        """Sums over all rows so far, by task."""
        return {name: running.losses_and_clicks() for name, running in self._tasks.items()}

    def read(self) -> dict[str, Reading]:
        return {name: running.read() for name, running in self._tasks.items()}

    def state_dict(self) -> dict[str, Any]:
        """Shared, not copied. Of one task as `RunningQuality` has it, as checkpoints always had."""
        if len(self._tasks) == 1:
            return next(iter(self._tasks.values())).state_dict()
        return {name: running.state_dict() for name, running in self._tasks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, running in self._tasks.items():
            running.load_state_dict(state if len(self._tasks) == 1 else state[name])


def label_rates(state: Mapping[str, Any]) -> LabelRate | tuple[LabelRate, ...]:
    """The labels counted in the state of a `RunningTasks`, of several tasks one for each."""
    if "sums" in state:
        return LabelRate(positives=round(float(state["sums"][0, 2])), rows=int(state["rows"]))
    rates = [label_rates(each) for each in state.values()]
    return tuple(rate for rate in rates if isinstance(rate, LabelRate))


SUMS = ("sums", "blocks", "histogram", "histograms")
"""Over rows: of several ranks, they add up."""


def _by_segment(columns: torch.Tensor, segments: torch.Tensor, count: int) -> torch.Tensor:
    """Sums [count + 1, 4] of `columns` [B, 4]: a product, because adding by index has no order on a GPU."""
    known = (segments >= 0) & (segments < count)
    places = torch.where(known, segments, count)
    member = places[None, :] == torch.arange(count + 1, device=places.device)[:, None]
    # A loss that is not finite would spoil all segments (0 * inf): it already shows in the sum over all rows.
    return member.double() @ torch.nan_to_num(columns, nan=0.0, posinf=0.0, neginf=0.0)


def _places(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    scaled = (torch.nan_to_num(logits.float()) + _WIDEST) * (_BINS / (2 * _WIDEST))
    return scaled.clamp(0, _BINS - 1).long() + _BINS * (labels > 0.5).long()


def _quality(sums: list[float], histogram: torch.Tensor | None) -> Quality:
    rows, loss, clicks, predicted = sums
    if not rows:
        return Quality(ne=math.nan, logloss=math.nan, auc=math.nan, calibration=math.nan, rows=0, base_rate=math.nan)
    return Quality(
        ne=normalized_entropy(loss / rows, clicks / rows),
        logloss=loss / rows,
        auc=math.nan if histogram is None else _auc(histogram),
        calibration=predicted / clicks if clicks else math.nan,
        rows=int(rows),
        base_rate=clicks / rows,
    )


def _auc(histogram: torch.Tensor) -> float:
    others, clicks = histogram.view(2, _BINS).cpu().double()
    pairs = float(others.sum() * clicks.sum())
    if not pairs:
        return math.nan
    if float((clicks * others).sum()) > _MOST_TIED * pairs:
        return math.nan
    below = others.cumsum(0) - others
    return float((clicks * (below + others / 2)).sum()) / pairs
