"""Regions in packages: LoKA's ops are written out, as aten on a CPU, as Triton kernels for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from served import plan_for
from test_serve_graphs import POW2, backend, frozen, inputs, wide  # noqa: F401
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from loka.compiler import packaged
from loka.compiler.emit import Emitter
from loka.core.error import sqnr_db
from loka.core.exceptions import ServeRefused
from loka.core.recording import record
from loka.core.timing import warm_up
from loka.nn import BlockNorm
from loka.serve import freeze


@pytest.mark.slow
def test_regions_go_into_the_file(backend, monkeypatch, tmp_path):  # noqa: F811
    """Of a server with graphs: what its compiled code answers but for the last bits of sums, by aten alone."""
    server, other = frozen(wide()), frozen(wide(1))
    requests = [inputs(count) for count in (1, 5, 16)]
    expected = [server(request).output for request in requests]
    monkeypatch.undo()  # the real Inductor
    torch._dynamo.reset()
    found = server.package(tmp_path / "ranker.pt2", batch=(1, 64))
    assert found.joined == 2
    assert "2 sites in regions" in str(found)
    loaded = torch._inductor.aoti_load_package(str(found.path))
    for request, answer in zip(requests, expected, strict=True):
        # The stand-in for Inductor rounds to bfloat16 between ops, and a package does where it stores.
        assert sqnr_db(loaded(request), answer) > server.card.answers[0].least_db
    held = torch.load(other.package_weights(found.path, tmp_path / "other.pt").path, weights_only=True)
    loaded.load_constants(held, check_full_update=True)
    assert sqnr_db(loaded(requests[2]), expected[2]) < 10
    assert sqnr_db(loaded(requests[2]), other.current.module(requests[2])) > other.card.answers[0].least_db


class Residual(nn.Module):
    """x [B, 16] -> [B]: between sites biases, an affine norm, a gate, a residual, and what is no parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.gate, self.third, self.last = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 32)
        self.register_buffer("mask", torch.arange(64) % 3 > 0)
        self.factor = nn.Parameter(torch.full((64,), 0.7))

    def forward(self, x):
        x = self.norm(self.first(x))
        x = x + torch.where(self.mask, torch.sigmoid(self.gate(x)) * self.second(x), 0.0) * self.factor
        x = nn.functional.gelu(self.third(x)) * torch.tensor([0.5, 2.0] * 16, device=x.device)
        return self.last(x).sum(1).float()


def read_and_computed(graph):
    """Of each region's kernel: its program, and which leaves lie in memory before the graph runs."""
    edges = graph.find_nodes(op="call_function", target=torch.ops.loka.edge.default)
    return [(edge.args[-1], [leaf.op != "call_function" for leaf in edge.args[0]]) for edge in edges]


def test_kernels_of_the_file_are_those_of_the_server(backend, monkeypatch, tmp_path):  # noqa: F811
    """AOTInductor has parameters as constants of its graph: they were left to kernels of its own, without a word."""
    model = Residual().eval()
    plan = plan_for(model, dict.fromkeys(("first", "second", "gate", "third", "last"), POW2))
    options = {"autocast": torch.bfloat16, "buckets": (16,)}
    server = freeze(model, plan, calibration=[inputs(40, seed) for seed in range(3)], **options)
    assert server.apart() == {}
    (expected,) = map(read_and_computed, backend.graphs)
    assert len(expected) == 4  # sites that read one value, here `gate` and `second`, have it quantized once
    monkeypatch.undo()  # the real Inductor
    torch._dynamo.reset()
    found = []

    def stopped(graph):
        found.extend(read_and_computed(graph))
        raise RuntimeError("seen")

    monkeypatch.setattr(packaged, "write_out", stopped)
    with pytest.raises(ServeRefused, match="seen"):
        server.package(tmp_path / "ranker.pt2", batch=(1, 16))
    assert found == expected


SCRIPT = Path(__file__).with_name("written_for_a_gpu.py")


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="of a build with CUDA, run_decompositions keeps rms_norm in one op, which AOTInductor takes apart",
)
def test_for_a_gpu_they_are_triton_kernels():
    """Written without one: each edge, and the GEMM with a norm behind it, is one launch for any number of rows,
    and no op of LoKA's is left."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split()) == ["_gemm", "edge_rows", "edge_rows"]


class Normed(nn.Module):
    """x [B, 64] -> logits [B]: a norm that its GEMM takes, and one that it does not; a norm over tokens that is
    read as one row."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 512)
        self.norm, self.layer_norm, self.tokens = BlockNorm(256), nn.LayerNorm(256), nn.LayerNorm(64)
        self.last, self.logit = nn.Linear(512, 64), nn.Linear(64, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.silu(self.layer_norm(self.second(x)))
        x = self.tokens(self.third(x).view(-1, 64, 8).transpose(1, 2)).flatten(1)
        return self.logit(torch.relu(self.last(x))).squeeze(1).float()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_on_a_gpu(graphs, tmp_path):
    """Loaded here, called with any rows, and recorded: with graphs, bits of the server's for most rows."""
    torch.manual_seed(0)
    model = Normed().cuda().eval()
    sites = dict.fromkeys(("first", "second", "third", "last"), POW2.replace("emulated", "torch_fast"))
    rows = [torch.randn(count, 64).cuda() for count in (1, 37, 300, 512)]
    server = freeze(
        model, plan_for(model, sites), calibration=rows[2:], autocast=torch.bfloat16, buckets=(512,), graphs=graphs
    )
    found = server.package(tmp_path / "ranker.pt2", batch=(1, 512))
    assert found.joined == (4 if graphs else 0)
    loaded = torch._inductor.aoti_load_package(str(found.path), run_single_threaded=True)
    for request in rows:
        assert sqnr_db(loaded(request), server(request).output) > server.card.answers[0].least_db
    if graphs:
        assert bool((loaded(rows[3]) == server(rows[3]).output).float().mean() > 0.5)
    stream = torch.cuda.Stream()
    warm_up(lambda: loaded(rows[3]), stream)
    recording, output = record(lambda: loaded(rows[3]), torch.device("cuda"), stream)
    recording.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, loaded(rows[3]))
    torch.manual_seed(1)
    server.refresh(Normed().state_dict())
    assert sqnr_db(output, server(rows[3]).output) < server.card.answers[0].least_db
    weights = server.package_weights(found.path, tmp_path / "second.pt")
    held = torch.load(weights.path, weights_only=True, map_location="cuda")
    loaded.load_constants(held, check_full_update=True)
    for request in rows:
        assert sqnr_db(loaded(request), server(request).output) > server.card.answers[0].least_db


def test_constants_of_kernels_have_one_value_each():
    """A kernel is written into a file with what it calls, where a name stands for one value."""
    triton = pytest.importorskip("triton")
    from loka.kernels.edge.triton.device import DEVICE_FUNCTIONS
    from loka.kernels.gemm.triton.gemm import _gemm

    for start in (list(DEVICE_FUNCTIONS), [_gemm]):
        known, waiting, seen = {}, list(start), set()
        while waiting:
            function = waiting.pop()
            plain = getattr(function, "fn", function)
            if plain in seen:
                continue
            seen.add(plain)
            for name in plain.__code__.co_names:
                value = plain.__globals__.get(name)
                if isinstance(value, triton.language.constexpr):
                    assert known.setdefault(name, value.value) == value.value, name
                elif hasattr(value, "fn"):
                    assert known.setdefault(name, value) is value, name
                    waiting.append(value)
        assert len(seen) > 5


def test_a_scale_of_one_element_is_stored_and_other_constants_are_not():
    def read(x):
        scale = torch.full((1,), 2.0, dtype=torch.float64)
        return x * scale, scale - x, x + torch.full((), 3.0), x - torch.full((3,), 4.0)

    x = torch.randn(3)
    module = make_fx(read, tracing_mode="fake")(x)
    packaged._store_constants(Emitter(module.graph))
    module.graph.eliminate_dead_code()
    module.recompile()
    constants = module.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)
    assert [list(constant.args[0]) for constant in constants] == [[2], [], [3]]
    assert [user.target for user in constants[0].users] == [torch.ops.prims.inductor_force_stride_order.default]
    assert all(map(torch.equal, module(x), read(x)))


class Crossed(nn.Module):
    """x [B, 16] -> [B]: a concatenation of tokens that all cross layers read, flat."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(64, 32, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))

    def forward(self, x):
        first = torch.cat([torch.relu(x).unsqueeze(1), x.view(-1, 1, 16).expand(-1, 3, 16)], dim=1).flatten(1)
        y = first
        for down, up in zip(self.down, self.up, strict=True):
            y = first * up(down(y)) + y
        return y.sum(1).float()


def test_what_kernels_read_in_another_shape_is_written_once(backend, monkeypatch, tmp_path):  # noqa: F811
    """It was written once for each argument of a kernel that its view is, which took a package twice the time."""
    model = Crossed().eval()
    plan = plan_for(model, dict.fromkeys(("down.0", "up.0", "down.1", "up.1"), POW2))
    server = freeze(model, plan, calibration=[inputs(40)], autocast=torch.bfloat16, buckets=(16,))
    assert server.apart() == {}
    monkeypatch.undo()  # the real Inductor
    torch._dynamo.reset()
    found, real = [], packaged.write_out

    def stopped(graph):
        (cat,) = graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
        edges = [user for user in cat.users if user.target is torch.ops.loka.edge.default]
        real(graph)
        stored = [user for user in cat.users if user.target is torch.ops.prims.inductor_force_stride_order.default]
        found.append((len(edges), len(stored), len(stored[0].users) >= len(edges)))
        raise RuntimeError("seen")

    monkeypatch.setattr(packaged, "write_out", stopped)
    with pytest.raises(ServeRefused, match="seen"):
        server.package(tmp_path / "ranker.pt2", batch=(1, 16))
    assert found == [(2, 1, True)]
