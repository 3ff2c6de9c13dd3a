import copy
import itertools

import joint
import pytest
import torch
from converted import JOINED, run
from joint import JointBackend
from sweeps import sweep
from torch import nn

from loka.compiler import lower, scaled_mm
from loka.compiler.gemms import KERNEL, region_gemm
from loka.compiler.joint_pass import RegionPass
from loka.compiler.packaged import PackagePass
from loka.core.exceptions import NoKernelFits
from loka.core.recipe import Gemm
from loka.graph.attach import attach
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs
from loka.nn.linears import signature
from loka.nn.site import sites_of

_SCALED_MM = torch.ops.aten._scaled_mm.default
LAYERS = 3

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has rowwise FP8 on the CPU from 2.13 on")


def _tower(kernel, *sides):
    torch.manual_seed(0)
    layers = [layer for a, b in itertools.pairwise(sides) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers)
    sites = signature(model).layers
    attach(model, sites, dict.fromkeys(sites, (JOINED.replace("emulated", kernel),) * 3), join=True)
    return model


BATCHES = tuple(itertools.product((1, 7, 64), (False, True)))  # rows, dynamic


@pytest.mark.parametrize(("rows", "dynamic"), sweep(BATCHES, [(7, True)]))
def test_the_bits_are_those_of_the_op_in_python(monkeypatch, rows, dynamic):
    model = _tower("torch", 64, 32, 48, 64)
    x = torch.randn(rows, 64)
    x[0, 0] = 1e30
    found = []
    for calls in (False, True):
        if not calls:
            monkeypatch.setattr(lower, "call_scaled_mm", lambda emitter, search: None)
        else:
            monkeypatch.undo()
        torch._dynamo.reset()
        each, backend = copy.deepcopy(model), JointBackend()
        found.append((*run(torch.compile(each, backend=backend, dynamic=dynamic), x), each))
        # The last of forward and of backward hold the token of what counts runs.
        assert backend.count(_SCALED_MM) == (3 * LAYERS - 2 if calls else 0)
        assert backend.count(region_gemm) == (2 if calls else 3 * LAYERS)
    (y, dx, one), (other_y, other_dx, other) = found
    assert torch.equal(y, other_y)
    assert torch.equal(dx[0], other_dx[0])
    for weight, same in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight.grad, same.grad)


def test_scales_have_two_indices():
    """Inductor's own kernels, which `max-autotune` tries, read them by two."""
    backend = JointBackend()
    run(torch.compile(_tower("torch", 64, 32, 48, 64), backend=backend), torch.randn(7, 64))
    calls = [node for graph in backend.graphs for node in graph.nodes if node.target is _SCALED_MM]
    assert {scale.meta["val"].dim() for node in calls for scale in node.args[2:4]} == {2}


def test_a_kernel_that_cannot_run_here_is_refused_wherever_it_stands():
    model = _tower("torch", 64, 32, 48, 64)
    sites_of(model)["2"].candidates = (JOINED.replace("emulated", "torch_fast"),) * 3
    with pytest.raises(NoKernelFits, match="fast accumulation is a mode of the GPU"):
        run(torch.compile(model, backend=JointBackend()), torch.randn(8, 64))


@pytest.mark.slow
def test_other_kernels_and_operands_of_the_compiler_stay():
    """Inductor may give what it computes itself strides that the op cannot read."""
    for kernel, autocast in (("emulated", True), ("torch", False)):
        torch._dynamo.reset()
        backend = JointBackend()
        run(torch.compile(_tower(kernel, 64, 32, 48, 64), backend=backend), torch.randn(32, 64), autocast=autocast)
        first = next(node for node in backend.graphs[0].nodes if node.target in (_SCALED_MM, region_gemm))
        assert first.target is region_gemm
        assert bool(backend.count(_SCALED_MM)) == (kernel == "torch")


def test_a_faster_algorithm_runs_in_its_place_with_the_same_bits(monkeypatch):
    """Stood in for by an algorithm that `torch` takes and does not have."""
    asked = []

    def faster(kernel, problem, device):
        asked.append((kernel, problem.gemm, problem.m, problem.n, problem.k))
        return f"{kernel}@5" if problem.n == 48 else None

    model = _tower("torch", 64, 32, 48, 64)
    site = sites_of(model)["0"]
    site.candidates = tuple(name.replace("rowwise_e4m3_pow2", "tensorwise_e4m3") for name in site.candidates)
    x, found = torch.randn(64, 64), []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(scaled_mm, "faster_than_torch", faster)
        torch._dynamo.reset()
        reset_kernel_runs()
        each, backend = copy.deepcopy(model), JointBackend()
        found.append((*run(torch.compile(each, backend=backend), x), *(p.grad for p in each.parameters())))
    assert {kernel for kernel, *_ in asked} == {"torch"}
    assert ("torch", Gemm.OUTPUT, 64, 48, 32) in asked
    (y, dx, *grads), (other_y, other_dx, *others) = found
    assert all(map(torch.equal, (y, dx[0], *grads), (other_y, other_dx[0], *others)))
    pinned = {name for name, _ in kernel_runs() if "@" in name}
    assert pinned == {"torch:tensorwise_e4m3@5"}
    kernels = [node.args[KERNEL] for graph in backend.graphs for node in graph.nodes if node.target is region_gemm]
    assert "torch@5" in kernels


def test_algorithms_are_timed_for_one_scale_and_a_known_number_of_rows_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(scaled_mm, "faster_than_torch", lambda *problem: asked.append(problem))
    model = _tower("torch", 64, 32, 48, 64)
    run(torch.compile(model, backend=JointBackend(), dynamic=True), torch.randn(7, 64))
    assert asked == []
    torch._dynamo.reset()
    run(torch.compile(model, backend=JointBackend()), torch.randn(64, 64))
    gemms = [problem.gemm for _, problem, _ in asked]
    assert gemms.count(Gemm.GRAD_WEIGHT) == LAYERS
    assert all(isinstance(side, int) for _, problem, _ in asked for side in (problem.m, problem.n, problem.k))


def test_a_package_asks_for_no_algorithm(monkeypatch):
    """They run from Python."""
    monkeypatch.setattr(scaled_mm, "faster_than_torch", lambda *problem: pytest.fail("it was asked"))
    model, backend = _tower("torch", 64, 32, 48, 64), JointBackend()
    before = RegionPass()
    monkeypatch.setattr(joint, "join_sites", lambda graph: PackagePass(before)(graph) or {})
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(64, 64))
    assert backend.count(_SCALED_MM) == LAYERS
    assert backend.count(region_gemm) == 0
