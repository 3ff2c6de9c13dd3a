import copy
import itertools

import pytest
import torch
from converted import JOINED, run
from joint import JointBackend
from sweeps import sweep
from torch import nn

from loka.compiler import lower
from loka.compiler.gemms import region_gemm
from loka.core.exceptions import NoKernelFits
from loka.graph.attach import attach
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
