"""What a training run is told. Two runs with equal values and data give equal weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

Precision = Literal["bf16", "tf32", "fp32"]
StepMode = Literal["eager", "compile", "graph"]

# They change how a run is watched or stored, not its weights, so a resumed run may change them.
_WITHOUT_EFFECT = frozenset({"checkpoint_every", "keep_checkpoints", "log_every"})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One pass in the source's order; defaults follow the Criteo recipe of Wukong (2403.02545).

    Attributes:
        batch_size: rows of a step. A shorter last batch is a step too, its gradients the sum over its rows
            divided by `batch_size`: each row counts alike, and `grad_clip` holds for that sum.
        max_rows: stop after this many rows, counted over all epochs; the last batch is cut.
        lr: dense learning rate, Adam.
        sparse_lr: learning rate of tables with sparse gradients, row-wise AdaGrad.
        warmup: fraction of the steps over which both rates rise linearly.
        precision: bf16 autocasts the model; tf32 lets a GPU multiply float32 matrices in TF32 (on a CPU it is
            fp32). Weights and loss are float32 in all cases.
        checkpoint_every: steps between checkpoints; the last step always writes one.
        grad_clip: largest norm of the dense gradients together; tables are not clipped.
        accumulate: parts that a batch goes through the model in, one update for all: memory of a part only.
        step: how a step runs: "eager", with its blocks compiled, or compiled and captured in a CUDA graph.
            What cannot be runs eagerly, and `TrainResult.step_reason` says why.
        window: steps that the window metrics cover.
    """

    batch_size: int
    epochs: int = 1
    max_rows: int | None = None
    lr: float = 1e-3
    sparse_lr: float = 0.1
    warmup: float = 0.1
    seed: int = 0
    precision: Precision = "bf16"
    grad_clip: float | None = None
    device: str = "cpu"
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    log_every: int = 100
    accumulate: int = 1
    step: StepMode = "eager"
    window: int = 1000

    def __post_init__(self) -> None:
        counts = ("batch_size", "epochs", "checkpoint_every", "keep_checkpoints", "log_every", "accumulate")
        for name in (*counts, "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be at least 1")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows is {self.max_rows}; use None to train on every row")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup is {self.warmup}; it is a fraction of the steps, between 0 and 1")
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision is {self.precision!r}; choose one of {get_args(Precision)}")
        if self.step not in get_args(StepMode):
            raise ValueError(f"step is {self.step!r}; choose one of {get_args(StepMode)}")
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate is {self.accumulate}, more parts than the {self.batch_size} rows of a batch"
            )
        if self.grad_clip is not None and not self.grad_clip > 0:
            raise ValueError(f"grad_clip is {self.grad_clip}; use None to leave gradients as they are")

    def identity(self) -> dict[str, Any]:
        """The fields that decide the final weights; of the device only its type."""
        kept = {name: value for name, value in asdict(self).items() if name not in _WITHOUT_EFFECT}
        return {**kept, "device": torch.device(self.device).type}
