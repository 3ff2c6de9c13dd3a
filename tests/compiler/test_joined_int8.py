import copy

import pytest
import torch
from converted import INT8, JOINED, assert_as_good, converted, error, fp8_sites, gradients, plan_for, run
from joint import JointBackend
from small_models import MODELS, made
from sweeps import sweep
from torch import nn

import loka
from loka.compiler.gemms import region_gemm
from loka.compiler.joint_sites import ARMS, unjoined
from loka.core.records.report import REGION_INT8
from loka.kernels.edge.op import edge
from loka.kernels.edge.program import program_of
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs
from loka.kernels.quantize.fp8_weights import fp8_weights
from loka.kernels.quantize.int8_weights import int8_weights
from loka.nn.site import health_of
from loka.nn.site_ops import site_backward, site_forward

OUTPUT = {"*/output": INT8}


@pytest.mark.parametrize("name", sweep(MODELS, ("layer_norm_silu",)))
def test_joined_is_as_good_as_site_by_site(name):
    """And its forward better than that of FP8, by far."""
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    plain = made(name)
    plan = plan_for(plain, x, force=OUTPUT)
    eager, joined, fp8 = (copy.deepcopy(plain) for _ in range(3))
    loka.convert(eager, plan)
    loka.convert(joined, plan)
    loka.convert(fp8, plan_for(plain, x))
    backend = JointBackend()
    expected, by_site = run(plain, x), run(eager, x)
    reset_kernel_runs()
    found = run(torch.compile(joined, backend=backend, fullgraph=True), x)
    sites = len(fp8_sites(plan))
    assert kernel_runs()[INT8, "output"] == sites
    assert not backend.apart
    assert backend.count(site_forward) == backend.count(site_backward) == 0
    assert backend.count(region_gemm) == 3 * sites
    in_fp8 = run(torch.compile(fp8, backend=JointBackend(), fullgraph=True), x)
    assert error(found[0], expected[0]) < 0.5 * error(in_fp8[0], expected[0])
    assert_as_good(joined, eager, plain, found, by_site, expected)


def test_backward_reads_no_integers():
    """INT8 rounds half a step, a 254th of a row's largest, to zero; FP8, whose zeros are ReLU's mask, a
    2^18th of it. So forward makes both copies of an input, and backward is what it is without INT8."""
    plain = made("relu")
    x = torch.randn(64, 64)
    joined = converted(plain, plan_for(plain, x, force=OUTPUT))
    backend = JointBackend()
    run(torch.compile(joined, backend=backend), x)
    nodes = [node for graph in backend.graphs for node in graph.nodes if node.target is edge]
    programs = [(node, program_of(str(node.args[5]))) for node in nodes]
    both = [program for _, program in programs if program.integers]
    assert len(both) == 3
    assert all(program.row for program in both)
    leaves = [leaf.meta["val"] for node, _ in programs for leaf in node.args[0]]
    assert any(leaf.dtype == torch.float8_e4m3fn for leaf in leaves)
    assert not any(leaf.dtype == torch.int8 for leaf in leaves)
    kept = [n for n in backend.graphs[1].nodes if n.op == "placeholder"]
    assert not any(n.meta["val"].dtype == torch.int8 for n in kept)


class _Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 48), nn.Linear(64, 48)

    def forward(self, x):
        z = torch.relu(x)
        return self.first(z) * torch.sigmoid(self.second(z))


def test_one_input_in_two_formats():
    torch.manual_seed(0)
    plain = _Shared()
    x = torch.randn(40, 64)
    plan = plan_for(plain, x, force={"first/output": INT8})
    eager, joined = (converted(plain, plan) for _ in range(2))
    backend = JointBackend()
    found, expected = run(torch.compile(joined, backend=backend), x), run(eager, x)
    assert not backend.apart
    assert backend.count(int8_weights) == backend.count(fp8_weights) == 1
    assert error(found[0], expected[0]) < 0.03
    ours, theirs = gradients(joined), gradients(eager)
    assert all(error(ours[n], theirs[n]) < 0.06 for n in theirs)


def test_inference_makes_no_fp8_copies_and_ragged_batches_share_a_graph():
    plain = made("relu").eval()
    plan = plan_for(plain, torch.randn(64, 64), force=OUTPUT)
    eager, joined = (converted(plain, plan).eval() for _ in range(2))
    backend = JointBackend()
    step = torch.compile(joined, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (48, 33, 100):
            x = torch.randn(rows, 64)
            assert error(step(x), eager(x)) < 1e-3
        assert backend.count(fp8_weights) == 0
        assert len(backend.graphs) == 1
        x = torch.randn(1, 64)  # whose input has one scale, while its weights have many
        assert error(torch.compile(joined, backend=JointBackend())(x), eager(x)) < 1e-3


@pytest.mark.slow
def test_what_is_not_finite_shows_and_stays_in_its_row():
    plain = made("relu")
    plan = plan_for(plain, torch.randn(64, 64), force=OUTPUT)
    joined = converted(plain, plan)
    x = torch.randn(32, 64)
    x[3, 4] = torch.nan
    y, _ = run(torch.compile(joined, backend=JointBackend()), x)
    assert y.isnan().any(dim=1).tolist() == [row == 3 for row in range(32)]
    health = health_of(joined)
    outputs = [seen for name, seen in health.items() if name.endswith("/output")]
    assert outputs
    assert all(seen["runs"] == 1 for seen in outputs)
    assert any(seen["bad_a"] for seen in outputs)
    with torch.no_grad():
        next(p for p in joined.parameters() if p.dim() == 2)[0, 0] = torch.inf
    y, _ = run(torch.compile(joined, backend=JointBackend()), torch.randn(32, 64))
    assert y.isnan().any()
    assert any(seen["bad_b"] for name, seen in health_of(joined).items() if name.endswith("/output"))


def test_which_candidates_can_be_joined():
    assert [unjoined(name) for name in ARMS[REGION_INT8]] == [None] * 3
    assert unjoined(INT8) is unjoined(JOINED) is None
    assert "emulated:int8_row_centred is none of rowwise_e4m3_pow2, int8_row" in str(
        unjoined("emulated:int8_row_centred")
    )
