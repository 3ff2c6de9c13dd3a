"""Training with checkpoints that resume bit for bit, and quality with honest intervals."""

from loka.train.checkpoint import Checkpoint, CheckpointNotSaved, load_newest, newest_step, save
from loka.train.config import TrainConfig
from loka.train.graphed import GraphedStep, graphed
from loka.train.loop import TrainLog, TrainResult, evaluate, train, untracked
from loka.train.metrics import Quality, quality
from loka.train.optim import RowwiseAdagrad, build_optimizers
from loka.train.paired import AcrossPairs, PairedDifference, across_pairs, paired_difference, verdict
from loka.train.run import Companion, Run
from loka.train.running import Reading, RunningQuality
from loka.train.schedule import rate_factor, schedulers
from loka.train.segments import Segments

__all__ = [
    "AcrossPairs",
    "Checkpoint",
    "CheckpointNotSaved",
    "Companion",
    "GraphedStep",
    "PairedDifference",
    "Quality",
    "Reading",
    "RowwiseAdagrad",
    "Run",
    "RunningQuality",
    "Segments",
    "TrainConfig",
    "TrainLog",
    "TrainResult",
    "across_pairs",
    "build_optimizers",
    "evaluate",
    "graphed",
    "load_newest",
    "newest_step",
    "paired_difference",
    "quality",
    "rate_factor",
    "save",
    "schedulers",
    "train",
    "untracked",
    "verdict",
]
