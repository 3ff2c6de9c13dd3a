"""Training with checkpoints that resume bit for bit, and quality with honest intervals."""

from loka.core.progress import untracked
from loka.train.checkpointing.checkpoint import Checkpoint, CheckpointNotSaved, load_newest, newest_step, save
from loka.train.config import TrainConfig
from loka.train.loop import TrainLog, TrainResult, evaluate, train
from loka.train.metrics import Quality, quality
from loka.train.optim import RowwiseAdagrad, build_optimizers
from loka.train.run import Callback, Run
from loka.train.running import Reading, RunningQuality
from loka.train.schedule import rate_factor, schedulers
from loka.train.segments import Segments
from loka.train.steps.graphed import GraphedStep, graphed

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointNotSaved",
    "GraphedStep",
    "Quality",
    "Reading",
    "RowwiseAdagrad",
    "Run",
    "RunningQuality",
    "Segments",
    "TrainConfig",
    "TrainLog",
    "TrainResult",
    "build_optimizers",
    "evaluate",
    "graphed",
    "load_newest",
    "newest_step",
    "quality",
    "rate_factor",
    "save",
    "schedulers",
    "train",
    "untracked",
]
