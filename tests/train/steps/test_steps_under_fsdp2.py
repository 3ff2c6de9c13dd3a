import contextlib
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphed_cases import Fake, module
from models import forced_plan
from ranks import on_ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import loka
from loka.data import SyntheticClicks
from loka.distributed import fp8_all_gather, shard_dense
from loka.nn.fsdp_units import _groups
from loka.train import TrainConfig
from loka.train.optim import build_optimizers
from loka.train.steps import extent
from loka.train.steps import step as step_module
from loka.train.steps.blocks import blocks_of
from loka.train.steps.forward import arguments
from loka.train.steps.step import Step
from loka.zoo import build

ROWS, STEPS = 16, 8
POW2 = "emulated:rowwise_e4m3_pow2"


def made():
    torch.manual_seed(0)
    rows = SyntheticClicks(rows=ROWS, seed=0)
    return build("dcnv2", dense_features=rows.dense_features, vocab_sizes=rows.vocab_sizes, size="small")


def units(model):
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def whole(model):
    for unit in units(model):
        unit.reshard()  # behind an evaluation
    tensors = (*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None))
    return [t.full_tensor() if isinstance(t, DTensor) else t.detach().to_dense() for t in tensors]


class Sharded(Fake):
    """A graph holds the gathers of its capture, and leaves FSDP2's own state as it finds it."""

    def __call__(self, *args):
        self.check()
        return super().__call__(*args)

    def replay(self):
        self.check()
        super().replay()

    def check(self):
        assert not any(group.is_unsharded for unit in units(self.model) for group in _groups(unit))


@dataclass(frozen=True)
class Job:
    plan: loka.Plan | None

    def __call__(self, rank, folder):
        plain, weights, step, captures = self.trained(False)
        assert "FSDP2 gathers weights" in step.reason
        assert captures == 0
        losses, captured, step, captures = self.trained(True)
        assert (step.reason, captures) == (None, 1)
        assert step._graphed.replays == STEPS - 3
        assert all(map(torch.equal, plain, losses))
        assert all(map(torch.equal, weights, captured))
        return {"moved": float((losses[-1] - losses[1]).norm())}

    def trained(self, captures):
        config = TrainConfig(batch_size=ROWS, step="graph", precision="fp32", capture_collectives=captures)
        model = made()
        if self.plan:
            loka.convert(model, self.plan)
        shard_dense(model, list(blocks_of(model)), device="cpu", gather_in=None)
        if self.plan:
            assert fp8_all_gather(model, self.plan).in_fp8
        optimizers = build_optimizers(model, config)
        # Adam takes no state that a graph may hold on a CPU.
        dense = [weight for group in optimizers["dense"].param_groups for weight in group["params"]]
        optimizers["dense"] = torch.optim.SGD(dense, lr=0.1, momentum=0.9)
        fake = Sharded(model, optimizers["dense"])
        with contextlib.ExitStack() as held:
            for where, what, instead in (
                (extent, "has_graphs", lambda device: True),
                (step_module, "compiled", lambda model, replayed: model),
                (module, "has_graphs", lambda device: True),
                (module, "record", fake),
            ):
                held.enter_context(mock.patch.object(where, what, instead))
            step = Step(model, optimizers, config)
            rows = SyntheticClicks(rows=ROWS * STEPS * 2, seed=0, shard=dist.get_rank(), shards=2)
            losses = []
            for batch in rows.batches(ROWS):
                losses.append(step(batch).losses.clone())
                with torch.no_grad():
                    losses.append(model(*arguments(batch)))
        return losses, whole(model), step, fake.captures


def planned():
    model = made()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(*arguments(next(iter(SyntheticClicks(rows=ROWS, seed=0).batches(ROWS))))).sum().backward()
    return forced_plan(probe.stats(), POW2)


@pytest.mark.slow
@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_captured_step_trains_as_one_that_is_not(in_fp8, tmp_path):
    """Tables stay beside the graph, their gradients averaged over ranks; gathers in FP8 are in it."""
    assert on_ranks(Job(planned() if in_fp8 else None), 2, tmp_path)[0]["moved"] > 0
