"""What a training run is told. Two runs with equal values and data give equal weights."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch

from loka.core.exceptions import require_least

Precision = Literal["bf16", "tf32", "fp32"]
StepMode = Literal["eager", "compile", "graph"]
Schedule = Literal["cosine", "linear", "wsd", "constant"]
AverageKind = Literal["none", "ema", "tail"]
Gather = Literal["hp", "fp8", "auto"]
Gradients = Literal["hp", "bf16", "int8", "e4m3", "auto"]

NAMED = {
    "precision": Precision,
    "step": StepMode,
    "schedule": Schedule,
    "average": AverageKind,
    "gather": Gather,
    "gradients": Gradients,
}
"""The fields that take one of a few names."""

# What runs did that were recorded before these fields were there (2026-11-22).
_BEFORE = {
    "schedule": "constant",
    "decay": 0.2,
    "final_rate": 0.0,
    "average": "none",
    "average_share": 0.1,
    "gather": "hp",
    "gradients": "hp",
    "deterministic": False,  # of 2026-11-24
}

# They change how a run is watched or stored, not its weights, so a resumed run may change them.
_WITHOUT_EFFECT = frozenset({"capture_collectives", "checkpoint_every", "keep_checkpoints", "log_every", "pipeline"})


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
        schedule: how both rates go on from there (train/schedule.py): down along a cosine or a line, level
            and then down ("wsd"), or level. Differences of 0.02 % between two models can be seen only where
            the rate has decayed, so it does by default.
        decay: of "wsd", fraction of the steps over which the rates fall at the end.
        final_rate: what the rates fall to, as a fraction of the peak.
        average: a mean of the weights as a second read-out (train/average.py): exponential ("ema"), of the
            end of the run ("tail"), or none. It costs the memory of the weights once more.
        average_share: fraction of the steps that the mean covers; the time constant of "ema".
        precision: bf16 autocasts the model; tf32 lets a GPU multiply float32 matrices in TF32 (on a CPU it is
            fp32). Weights and loss are float32 in all cases.
        checkpoint_every: steps between checkpoints; the last step always writes one. None: 200, or as many more
            as it takes for saving to be at most a twentieth of the time.
        grad_clip: largest norm of the dense gradients together; tables are not clipped.
        accumulate: parts that a batch goes through the model in, one update for all: memory of a part only.
        step: how a step runs: "eager", with its blocks compiled, or compiled and captured in a CUDA graph,
            or one a block. What cannot be runs eagerly, and `TrainResult.step_reason` says why.
        capture_collectives: whether the graph may hold the collectives of DistributedDataParallel or FSDP2. Off:
            no run of hours has proven it, and the command line does not offer it.
        window: steps that the window metrics cover, at most: whole blocks of an eighth, rounded up to steps.
        gather: how FSDP2 gathers the weights of FP8 sites: "hp" as all others, "fp8" where they can be
            (loka.distributed.fp8_all_gather), "auto" where that is faster by measured times (choose_gather).
        gradients: how ranks send dense gradients: "hp" as torch does, by a codec in both shots
            (loka.distributed.send_gradients), or "auto" by one that passes a gate (choose_gradients).
        deterministic: torch.use_deterministic_algorithms, for a compiled run that has to end on the same bits when
            it is resumed: Inductor tunes no reduction by its times then.
        pipeline: whether TorchRec's tables exchange the ids of batches ahead (train/steps/pipelined.py) where
            they can; no weight differs by it.
    """

    batch_size: int
    epochs: int = 1
    max_rows: int | None = None
    lr: float = 1e-3
    sparse_lr: float = 0.1
    warmup: float = 0.1
    schedule: Schedule = "cosine"
    decay: float = 0.2
    final_rate: float = 0.0
    average: AverageKind = "none"
    average_share: float = 0.1
    seed: int = 0
    precision: Precision = "bf16"
    grad_clip: float | None = None
    device: str = "cpu"
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    log_every: int = 100
    accumulate: int = 1
    step: StepMode = "eager"
    capture_collectives: bool = False
    window: int = 1000
    gather: Gather = "hp"
    gradients: Gradients = "hp"
    deterministic: bool = False
    pipeline: bool = True

    def __post_init__(self) -> None:
        counts = ("batch_size", "epochs", "checkpoint_every", "keep_checkpoints", "log_every", "accumulate")
        require_least(self, dict.fromkeys((*counts, "window"), 1))
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"max_rows is {self.max_rows}; use None to train on every row")
        for name, whole in (("warmup", "steps"), ("final_rate", "peak")):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a fraction of the {whole}, between 0 and 1")
        for name in ("decay", "average_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it is a fraction of the steps, above 0 and at most 1"
                )
        for name, known in NAMED.items():
            if getattr(self, name) not in get_args(known):
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {get_args(known)}")
        if self.accumulate > self.batch_size:
            raise ValueError(f"accumulate is {self.accumulate}, more parts than the {self.batch_size} rows of a batch")
        for name in ("lr", "sparse_lr"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it is a number of 0 or more")
        if self.grad_clip is not None and not 0 < self.grad_clip < math.inf:
            raise ValueError(f"grad_clip is {self.grad_clip}; use None to leave gradients as they are")

    def part_rows(self, rows: int) -> int:
        """Of each part but the last that a batch of so many goes through in."""
        return -(-rows // self.accumulate)

    def identity(self, *, ranks: int = 1) -> dict[str, Any]:
        """The fields that decide the final weights; of the device only its type, and rows of all ranks."""
        kept = {name: value for name, value in asdict(self).items() if name not in _WITHOUT_EFFECT}
        kept["batch_size"] *= ranks
        kept["max_rows"] = None if self.max_rows is None else self.max_rows * ranks
        return {**kept, "device": torch.device(self.device).type}


def as_recorded(identity: Any, now: Mapping[str, Any]) -> Any:
    """A written identity with what those from before schedules did not say, of the fields that `now` has.

    What is no identity, in a file that LoKA did not write, is as it is, and differs from every one.
    """
    if not isinstance(identity, dict):
        return identity
    return {**{name: value for name, value in _BEFORE.items() if name in now}, **identity}
