from functools import partial

import pytest
import torch
import torch.distributed as dist
from graphed_cases import batches, module, plain, sgd, small, step_of
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from loka.core.recording import capture_stream, synced
from loka.train import TrainConfig, graphed
from loka.train.steps.blocks import compiled
from loka.train.steps.step import Step


@pytest.fixture(autouse=True)
def _alone():
    torch._dynamo.reset()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with torch._dynamo.config.patch(optimize_ddp=True):
        yield
    dist.destroy_process_group()


def test_buckets_cut_no_part(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 4096)
    layers = [nn.Linear(64, 64) for _ in range(4)]
    model = nn.Sequential(nn.Sequential(*layers), nn.Flatten())
    replica = DistributedDataParallel(compiled(model), bucket_cap_mb=0.02)
    replica(torch.randn(8, 64)).sum().backward()
    assert counter.frame_count == 1


def test_gradients_on_their_way_are_captured_only_where_asked_for(fake):
    """torch's notes: the 11 steps before a capture are DistributedDataParallel's own to settle in."""
    found = []
    for asked in (False, True):
        model = DistributedDataParallel(small())
        optimizer = sgd(model)
        record = fake(model, optimizer)
        step = graphed(step_of(model, optimizer), *batches(8)[0], model=model, optimizers=optimizer, collectives=asked)
        for batch in batches(*[8] * 14):
            step(*batch)
        if asked:
            assert (step.eager_steps.total(), step.replays, record.captures) == (11, 3, 1)
            module.release_collectives()
            assert not step.graphed, "NCCL's group is destroyed only without it"
        else:
            assert (step.eager_steps.total(), step.replays, record.captures) == (14, 0, 0)
            assert "DistributedDataParallel sends gradients" in str(step.reason)
        found.append([weight.detach() for weight in model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("own", ["", "no memory"])
def test_where_one_rank_cannot_capture_none_replays(fake, monkeypatch, own):
    model, twin, told = DistributedDataParallel(small()), small(), []
    optimizer = sgd(model)
    record = fake(model, optimizer)
    record.error = RuntimeError(own) if own else None
    monkeypatch.setattr(module, "ranks_of", lambda: 2)
    monkeypatch.setattr(module, "gather", lambda data, group: told.append(data) or [data, b"its own reason"])
    step = graphed(step_of(model, optimizer), *batches(8)[0], model=model, optimizers=optimizer, collectives=True)
    data = batches(*[8] * 14)
    for batch in data[:11]:
        step(*batch)
    with pytest.warns(RuntimeWarning, match="rank 1: its own reason"):
        step(*data[11])
    for batch in data[12:]:
        step(*batch)
    mine = "the step cannot be captured: RuntimeError: no memory" if own else ""
    assert told == [mine.encode()], "asked once"
    assert step.reason == "; ".join(filter(None, [mine and f"rank 0: {mine}", "rank 1: its own reason"]))
    assert step.replays == 0
    plain(twin, sgd(twin), data)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize(
    ("changes", "optimizers", "reason", "by_block"),
    [
        ({"capture_collectives": False}, ["dense"], "DistributedDataParallel sends gradients", True),
        ({"capture_collectives": False, "accumulate": 2}, ["dense"], "DistributedDataParallel sends gradients", False),
        ({}, ["dense"], "no step was run yet", False),
        ({}, ["dense", "sparse"], "its tables have sparse gradients", True),
        ({"gradients": "int8"}, ["dense"], "gradients in int8", True),
    ],
)
def test_a_step_of_the_loop_says_why_it_is_not_captured(monkeypatch, changes, optimizers, reason, by_block):
    asked = []
    monkeypatch.setattr("loka.train.steps.extent.has_graphs", lambda device: True)
    monkeypatch.setattr("loka.train.steps.step.compiled", lambda model, replayed: asked.append(replayed))
    config = TrainConfig(batch_size=8, step="graph", **{"capture_collectives": True, **changes})
    model = DistributedDataParallel(small())
    step = Step(model, {name: sgd(model) for name in optimizers}, config)
    assert str(step.reason).startswith(reason)
    assert asked == [by_block]
    assert str(step.reason).endswith("; what is compiled of them is CUDA graphs of its own") == by_block


@pytest.mark.gpu
def test_captured_gradients_train_as_sent_ones():
    device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for asked in (False, True):
        with synced(capture_stream(device)):
            model = DistributedDataParallel(small(device))
        optimizer = sgd(model)
        step = graphed(step_of(model, optimizer), *batches(8)[0], model=model, optimizers=optimizer, collectives=asked)
        for batch in batches(*[8] * 40, device=device):
            step(*batch)
        assert step.replays == (29 if asked else 0), step.reason
        found.append([weight.detach() for weight in model.parameters()])
    assert all(map(torch.equal, *found))
