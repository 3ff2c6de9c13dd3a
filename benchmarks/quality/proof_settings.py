"""What all tasks of the proof share: sizes, rows on the device of a process, folders."""

import json
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import proof_runs
import torch

from loka.train.config import TrainConfig

PROBE_SEED = 1000
FRESH = 24  # batches behind the held-out rows, for effects


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of all tasks."""

    out: str
    device: str
    rows: int
    held_out: int
    batch_size: int
    lr: float
    history: int

    @property
    def generated(self) -> int:
        return self.rows + self.held_out + FRESH * self.batch_size

    def config(self, seed: int) -> TrainConfig:
        return TrainConfig(batch_size=self.batch_size, lr=self.lr, seed=seed, device=self.device, step="graph")

    def folder(self, model: str) -> Path:
        return Path(self.out) / model


_ROWS: proof_runs.Rows | None = None


def start(settings: Settings) -> None:
    """Of a process: the rows go to the device once."""
    global _ROWS
    torch.set_num_threads(1)
    if settings.device == "cuda":  # workers in turn over the GPUs of $GPUS; nothing has touched CUDA yet
        gpus = os.environ.get("GPUS", "0").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[(multiprocessing.current_process()._identity[0] - 1) % len(gpus)]
    _ROWS = proof_runs.load(Path(settings.out) / "rows", settings.device)


def parts(settings: Settings) -> tuple[proof_runs.Rows, proof_runs.Rows, proof_runs.Rows]:
    """To train on, to judge on, and fresh ones for effects."""
    assert _ROWS is not None
    train = _ROWS.part(0, settings.rows)
    held_out = _ROWS.part(settings.rows, settings.held_out)
    return train, held_out, _ROWS.part(settings.rows + settings.held_out, FRESH * settings.batch_size)


def write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, default=float))
