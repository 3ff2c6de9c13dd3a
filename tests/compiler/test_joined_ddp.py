import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from converted import error, gradients, plan_for, run
from joint import JointBackend
from ranks import on_ranks
from small_models import made
from sweeps import sweep
from torch.nn.parallel import DistributedDataParallel

import loka
from loka.compiler.gemms import region_gemm
from loka.core.records.plan import Plan


def halves():
    first, second = torch.randn(128, 64, generator=torch.Generator().manual_seed(2)).chunk(2)
    return first, second


@dataclass(frozen=True)
class Job:
    plan: Plan
    order: str

    def __call__(self, rank, folder):
        expected = loka.convert(made("relu"), self.plan)
        for rows in halves():
            run(expected, rows)
        model = made("relu")
        if self.order == "convert first":
            loka.convert(model, self.plan)
        dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # so that graphs are split
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
        if self.order == "wrap first":
            loka.convert(wrapped, self.plan)
        backend = JointBackend()
        run(torch.compile(wrapped, backend=backend), halves()[rank])
        truth = gradients(expected)
        errors = [error(2 * found, truth[name]) for name, found in gradients(model).items()]
        listed = loka.regions(wrapped)
        return {"away": max(errors), "gemms": backend.count(region_gemm), "apart": dict(listed.apart)}


@pytest.mark.parametrize("order", sweep(("convert first", "wrap first"), ("wrap first",)))
def test_two_ranks_train_what_one_process_does(tmp_path, order):
    plan = plan_for(copy.deepcopy(made("relu")), torch.randn(64, 64))
    for found in on_ranks(Job(plan, order), 2, tmp_path, seconds=200):
        assert not found["apart"]
        assert found["gemms"] == 9
        assert found["away"] < 0.25  # two roundings of the same rows, by sites and joined
