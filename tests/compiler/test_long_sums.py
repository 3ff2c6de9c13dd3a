"""Gradients of weights of narrow layers over long batches: which kernel a region runs, and that it adds up the same."""

import sys

import pytest
import torch
from converted import JOINED, run
from joint import JointBackend
from torch import nn

from loka.compiler import gemms, install, long_sums
from loka.compiler.joint_sites import IN_REGIONS
from loka.compiler.long_sums import SPLIT, kernel_in_region
from loka.core.problem import Problem
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision
from loka.graph.attach import attach
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs
from loka.nn.linears import signature

pytest.importorskip("triton", reason="loka_split is a kernel of Triton's")


def problem(m, n, k, *, gemm=Gemm.GRAD_WEIGHT, target="sm_90", dtype="float32"):
    return Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype, target=target)


@pytest.mark.parametrize(
    ("sides", "splits"),
    [
        ((512, 512, 65536), True),
        ((256, 512, 32768), True),
        ((256, 256, 131072), True),
        ((1024, 256, 81920), True),
        ((512, 512, 32752), False),  # too short to repay a call from Python
        ((256, 256, 32768), False),  # as fast
        ((128, 256, 131072), False),
        ((768, 768, 131072), False),
    ],
)
def test_few_tiles_of_long_sums_are_split(sides, splits):
    assert kernel_in_region("torch", problem(*sides)) == ("loka_split" if splits else "torch")


def test_other_kernels_gemms_and_devices_stay():
    sides = 512, 512, 65536
    assert kernel_in_region("torch_fast", problem(*sides)) == "torch_fast"
    assert kernel_in_region("torch", problem(*sides, gemm=Gemm.OUTPUT)) == "torch"
    assert kernel_in_region("torch", problem(*sides, target="cpu")) == "torch"
    assert kernel_in_region("torch", problem(*sides, target="sm_100")) == "torch"  # measured nowhere
    assert kernel_in_region("torch", problem(*sides, dtype="float64")) == "torch"  # which it cannot write


def test_what_may_run_in_a_region_is_checked_with_the_plan():
    """Whatever rows the plan was made for: those of a step decide."""
    convert = sys.modules["loka.planner.convert"]
    decided = {
        sides: Decision(path="a", problem=problem(*sides), candidate=IN_REGIONS[2], reason="")
        for sides in ((512, 512, 1024), (1024, 1024, 65536))
    }
    assert [convert._runs(one) for one in decided.values()] == [[IN_REGIONS[2], SPLIT], [IN_REGIONS[2]]]


def test_a_region_asks_for_the_rows_of_its_step(monkeypatch):
    asked = []
    monkeypatch.setattr(gemms, "kernel_in_region", lambda kernel, problem: asked.append(problem) or kernel)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 48))
    attach(model, signature(model).layers, dict.fromkeys(signature(model).layers, (JOINED,) * 3), join=True)
    run(torch.compile(model, backend=JointBackend()), torch.randn(7, 64))
    sides = [(each.gemm, each.m, each.n, each.k) for each in asked]
    assert sides == [(Gemm.GRAD_WEIGHT, 48, 32, 7), (Gemm.GRAD_WEIGHT, 32, 64, 7)]


@pytest.mark.gpu
def test_a_region_adds_up_by_it_what_torch_adds_up(monkeypatch):
    """Both promote to float32 after 128 terms; the order of what follows is another."""
    rows, found = 32768 + 16, []
    torch.manual_seed(0)
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    for kernel in ("loka_split", "torch"):
        if kernel == "torch":
            monkeypatch.setattr(long_sums, "_TILES", ())
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU()).to("cuda")
        attach(model, signature(model).layers, dict.fromkeys(signature(model).layers, IN_REGIONS), join=True)
        install()
        torch._dynamo.reset()
        reset_kernel_runs()
        with torch.autocast("cuda", torch.bfloat16), torch._inductor.config.patch(force_disable_caches=True):
            torch.compile(model)(x).float().square().mean().backward()
        assert kernel_runs().get((SPLIT, "grad_weight"), 0) == (2 if kernel == "loka_split" else 0)
        found.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
