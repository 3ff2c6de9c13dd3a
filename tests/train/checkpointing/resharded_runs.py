"""A run of several ranks that is killed, and what as many or other ranks, or one process, make of it."""

import os
import signal
from dataclasses import dataclass, replace

import fp8_run
import torch
import torch.distributed as dist
from fp8_run import digest, tower
from models import forced_plan
from small_run import RandomRows
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import loka
from loka.data import Dealt
from loka.distributed import shard_dense
from loka.nn import fp8_runs, unwrap
from loka.train import TrainResult, train
from loka.train.checkpointing.resharding import tensors_of
from loka.train.run import Run
from loka.train.steps.blocks import blocks_of

POW2 = "emulated:rowwise_e4m3_pow2"
PARTS, STEPS, SAVED, EVERY = 4, 7, 4, 2
ROWS = PARTS * 16  # of a step
CONFIG = replace(fp8_run.CONFIG, checkpoint_every=EVERY, log_every=1, precision="fp32", average="ema", grad_clip=1.0)


def pow2_plan(make=tower):
    model = make()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        train(model, RandomRows(64), config=fp8_run.CONFIG)
    return forced_plan(probe.stats(), POW2, budget=loka.Budget(min_sqnr_db=None))


def world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def rows():
    """Six steps and a short one, of which four ranks cannot share all rows."""
    parts = [RandomRows(16 * (STEPS - 1) + 5, seed=part) for part in range(PARTS)]
    rank, ranks = world()
    return Dealt(parts, rank=rank, ranks=ranks)


def config_here(**changes):
    """With a batch size by which all ranks together take as many rows as ever."""
    return replace(CONFIG, batch_size=ROWS // world()[1], **changes)


def over_ranks(model, engine):
    if not dist.is_initialized():
        return model
    if engine == "ddp":
        return DistributedDataParallel(model)
    return shard_dense(model, list(blocks_of(model)), device="cpu", gather_in=None)


@dataclass
class Seen:
    """What a run that is resumed finds, before its first step, and what it ends with."""

    state: dict[str, str]
    result: TrainResult | None
    model: nn.Module


def run(folder, plan, engine, **others):
    """The state is of tensors as a whole, by name, as soon as it is restored."""
    gather = "fp8" if engine == "fsdp2" and plan and dist.is_initialized() else "hp"
    config = config_here(gather=gather)
    config = replace(config, **others.pop("config", {}))
    model = over_ranks(tower(), engine)
    seen = Seen({}, None, model)
    real = Run.restore

    def restore(self, *found):
        real(self, *found)
        seen.state = {
            name: digest(whole(tensor))
            for name, tensor in tensors_of(self.model, self.optimizers, self.average).items()
        }

    Run.restore = restore
    try:
        seen.result = train(model, rows(), config=config, plan=plan, checkpoints=folder, **others)
    finally:
        Run.restore = real
    return seen


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def ended(seen):
    """Of all ranks alike, and of this one alone."""
    inner = unwrap(seen.model)
    reading = seen.result.reading
    return {
        "weights": digest({name: whole(weight) for name, weight in inner.named_parameters()}),
        "own": digest(dict(inner.named_buffers())),
        "quality": [repr(reading.lifetime), repr(reading.window)],
        "rows": seen.result.rows,
        "runs": fp8_runs(inner),
        "random": digest(torch.get_rng_state()),
        "resumed": seen.result.resumed_from,
        "skipped": list(seen.result.skipped_checkpoints),
    }


def die_at(step, rank):
    def on_step(done):
        if done == step and world()[0] == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_step
