"""The checkpoints of one run: what it goes on from, when it saves, and which step is saved."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from loka.core.exceptions import CheckpointRefused
from loka.train.checkpointing.checkpoint import Checkpoint, CheckpointNotSaved, holds_checkpoints, load_newest
from loka.train.checkpointing.rhythm import Rhythm


class Saves:
    """Checkpoints in `folder`; where it is None, the run goes on from none and saves none.

    `step` is the last one that is saved, 0 where none is; `failed` has a message for each save that was not written.
    """

    def __init__(self, folder: Path | None, rhythm: Rhythm, *, identity: Mapping[str, Any]) -> None:
        self.folder, self.step = folder, 0
        self.failed: list[str] = []
        self._rhythm, self._identity = rhythm, identity

    def newest(self, steps: int, *, resume: bool) -> Checkpoint | None:
        """The checkpoint that a run of so many steps goes on from. Raises CheckpointRefused for one of another run, and
        for any where it may not `resume`."""
        if self.folder is None:
            return None
        if resume:
            found = load_newest(self.folder, identity=self._identity, steps=steps)
            self.step = found.step if found else 0
            return found
        if holds_checkpoints(self.folder):
            raise CheckpointRefused(
                f"{self.folder} already holds checkpoints",
                why=["a new run would mix its steps with theirs"],
                way_out="choose another folder, delete this one, or pass resume=True",
            )
        return None

    def due(self, step: int, *, now: bool) -> bool:
        """Whether to save after `step`, which has just been completed: `now`, or by the rhythm. A collective, as
        `Rhythm.due`."""
        return self.folder is not None and (now or self._rhythm.due(step))

    def save(self, step: int, write: Callable[[Path], None], *, last: bool) -> None:
        """Has `write` save the state after `step` to the folder, unless that is saved. Where it cannot, this warns, or
        raises CheckpointNotSaved for the `last` state of a run."""
        if self.folder is None or step == self.step:
            return
        try:
            with self._rhythm.saving():
                write(self.folder)
        except CheckpointNotSaved as error:
            if last:
                raise
            self.failed.append(str(error))
            warnings.warn(f"{error}\nTraining goes on.", RuntimeWarning, stacklevel=3)
        else:
            self.step = step

    def __str__(self) -> str:
        if self.folder is None:
            return "no checkpoint of this run was saved: it has no folder for them"
        if not self.step:
            return f"no step was completed, and {self.folder} holds no checkpoint"
        return f"step {self.step} is saved in {self.folder}, and the same command goes on from there"
