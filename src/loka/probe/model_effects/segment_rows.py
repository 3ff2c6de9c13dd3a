"""Rows of each segment for a renewal of effects: a stratified sample of the batches that are read.

A segment of 2 % has 31 rows in a sample of 1536 of all, too few. So more of each are drawn beside
it, until each has enough. Within a segment every row of a batch is as likely as another, whichever of the two
draws it, so means over its rows need no weights; means over all rows go by the sample
of all rows alone (Cochran, Sampling Techniques, chapter 5).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from loka.core.exceptions import DataRefused
from loka.core.records.parts import part_name
from loka.core.records.row_segments import RowSegments, places_of
from loka.probe.model_effects.calls import Found

SEGMENT_ROWS = 512


@dataclass
class SegmentRows:
    """What each segment still lacks, and what was found of it.

    `wanted` rows of each are probed; `read` counts all that went by, `positives` [segments, T + 1] their
    positive labels and rows with labels.
    """

    segments: RowSegments
    wanted: int = SEGMENT_ROWS
    probed: list[int] = field(init=False)
    read: list[int] = field(init=False)
    positives: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.probed, self.read = ([0] * len(self.segments.names) for _ in range(2))

    @property
    def enough(self) -> bool:
        return all(count >= self.wanted for count in self.probed)

    def places(self, batch: Any) -> torch.Tensor:
        """int64 [B] on the CPU. Raises as `places_of`."""
        return places_of(self.segments, batch).cpu()

    def see(self, places: torch.Tensor, labels: torch.Tensor | None, tasks: tuple[str, ...]) -> None:
        """A batch goes by, with `labels` [B, T], or [B] of one task, in [0, 1]; else raises DataRefused."""
        for at in range(len(self.read)):
            self.read[at] += int((places == at).sum())
        if labels is None:
            return
        columns, names, tasks = torch.as_tensor(labels).to("cpu", torch.float64), self.segments.names, tasks or ("",)
        if columns.ndim == len(tasks) == 1:
            columns = columns[:, None]
        known = (places >= 0) & (places < len(names))
        shape, needed, wrong = list(columns.shape), [len(places), len(tasks)], ""
        if shape != needed:
            wrong = f"{shape}, not {needed}, for {', '.join(filter(None, (*tasks, *names)))}"
        elif len(strange := (known[:, None] & ~((columns >= 0) & (columns <= 1))).nonzero()):
            row, task = strange[0].tolist()
            wrong = f"{columns[row, task]:g} for {part_name(tasks[task], names[places[row]])}"
        if wrong:
            way_out = "let labels= give [rows, tasks] from 0 to 1, or None; segments.of takes out rows by -1"
            raise DataRefused(f"no H of segments: labels are {wrong}", way_out=way_out)
        if self.positives is None:
            self.positives = torch.zeros(len(self.read), len(tasks) + 1, dtype=torch.float64, device="cpu")
        self.positives.index_add_(0, places[known], functional.pad(columns[known], (0, 1), value=1.0))

    def choose(self, places: torch.Tensor, taken: torch.Tensor, seed: int) -> torch.Tensor:
        """Rows of the batch for what is lacking, beside those `taken`; none where nothing is, or is here."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(places), generator=generator, device="cpu")
        free = torch.ones(len(places), dtype=torch.bool, device="cpu")
        free[taken] = False
        parts = [
            order[(free & (places == at))[order]][: self.wanted - count]
            for at, count in enumerate(self.probed)
            if count < self.wanted
        ]
        chosen = torch.cat(parts) if parts else order[:0]
        return chosen[: len(places) - 1].sort().values  # never the whole batch (sensitivity.py)

    def note(self, places: torch.Tensor, found: Found) -> None:
        """These rows of the batch were probed."""
        for at in range(len(self.probed)):
            self.probed[at] += int((places[found.picks] == at).sum())
