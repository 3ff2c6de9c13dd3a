"""Gradients of weights of narrow layers over long batches: which kernel a region runs, and that it adds up the same."""

import sys

import pytest
import torch
from converted import JOINED, run
from joint import JointBackend
from torch import nn

from loka.compiler import gemms, install, long_sums
from loka.compiler.joint_sites import IN_REGIONS
from loka.compiler.long_sums import LONG_SUMS, kernel_in_region
from loka.core.problem import Problem
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision
from loka.graph.attach import attach
from loka.kernels.gemm.adapters import cublaslt_c
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs
from loka.nn.linears import signature


@pytest.fixture
def there(monkeypatch):
    """A cuBLASLt, of which nothing is called."""
    cublaslt_c.why_missing.cache_clear()
    monkeypatch.setattr(cublaslt_c, "_functions", dict)
    yield
    cublaslt_c.why_missing.cache_clear()


def problem(m, n, k, *, gemm=Gemm.GRAD_WEIGHT, target="sm_90", dtype="float32"):
    return Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype, target=target)


@pytest.mark.parametrize(
    ("sides", "splits"),
    [
        ((512, 512, 65536), True),
        ((256, 512, 32768), True),
        ((256, 256, 131072), True),
        ((1024, 256, 81920), True),
        ((256, 256, 16384), True),
        ((1024, 1024, 32768), True),
        ((512, 512, 16368), False),  # too short to repay a call from Python
        ((768, 768, 32752), False),
        ((128, 256, 131072), False),
        ((1024, 1152, 131072), False),  # not timed
        ((128, 8320, 131072), False),
        ((128, 8192, 32768), True),
        ((128, 384, 131072), False),
        ((128, 2048, 16384), True),
        ((128, 2176, 16384), False),
        ((128, 2176, 32768), True),
    ],
)
def test_few_tiles_of_long_sums_are_split(sides, splits, there):
    assert kernel_in_region("torch", problem(*sides)) == ("cublaslt" if splits else "torch")


def test_without_cublaslt_torch_adds_up():
    if candidate_named(LONG_SUMS).kernel.missing():
        assert kernel_in_region("torch", problem(512, 512, 65536)) == "torch"


def test_other_kernels_gemms_and_devices_stay(there):
    sides = 512, 512, 65536
    assert kernel_in_region("torch_fast", problem(*sides)) == "torch_fast"
    assert kernel_in_region("torch", problem(*sides, gemm=Gemm.OUTPUT)) == "torch"
    assert kernel_in_region("torch", problem(*sides, target="cpu")) == "torch"
    assert kernel_in_region("torch", problem(*sides, target="sm_100")) == "torch"  # measured nowhere
    assert kernel_in_region("torch", problem(*sides, dtype="float64")) == "torch"  # which it cannot write


def test_what_may_run_in_a_region_is_checked_with_the_plan(there):
    """Whatever rows the plan was made for: those of a step decide."""
    convert = sys.modules["loka.planner.convert"]
    decided = {
        sides: Decision(path="a", problem=problem(*sides), candidate=IN_REGIONS[2], reason="")
        for sides in ((512, 512, 1024), (1024, 2048, 65536))
    }
    assert [convert._runs(one) for one in decided.values()] == [[IN_REGIONS[2], LONG_SUMS], [IN_REGIONS[2]]]


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
    for kernel in ("cublaslt", "torch"):
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
        assert kernel_runs().get((LONG_SUMS, "grad_weight"), 0) == (2 if kernel == "cublaslt" else 0)
        found.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
