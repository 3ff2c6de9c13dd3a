"""Parts that are compiled one by one stay one graph each in DistributedDataParallel, whatever its buckets."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from loka.train.steps.step_time import compiled


@pytest.fixture(autouse=True)
def _alone():
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
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
