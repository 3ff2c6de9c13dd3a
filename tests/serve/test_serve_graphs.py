"""Servers that answer by CUDA graphs of compiled code; a CPU has a stand-in for capture and for Inductor.

`Replayed` keeps a capture's contract: recording computes nothing, and a replay computes with the tensors
that were there then and writes to those that the recording returned. Compiled graphs are LoKA's joined ones,
run op by op.
"""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from joint import JointBackend
from models import stats_of
from served import POW2, ROW, converted, plan_for, plan_of
from sweeps import sweep
from torch import nn
from torch._dynamo.utils import counters

from loka.compiler.gemms import region_gemm
from loka.core.exceptions import ServeRefused, WrongResults
from loka.kernels.quantize.int8_weights import int8_weights
from loka.serve import freeze, graphs, load
from loka.serve.rows import leaves, mapped
from loka.serve.sites import frozen_gemm, frozen_sites

BUCKETS = (2, 16)


class Wide(nn.Module):
    """x [B, 16] -> logits [B]: two sites that a region joins, one of odd sides, one logit layer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self.odd, self.logit = nn.Linear(32, 24), nn.Linear(24, 1)

    def forward(self, x):
        x = nn.functional.silu(self.norm(self.first(x)))
        x = torch.relu(self.odd(torch.relu(self.second(x))))
        return self.logit(x).squeeze(1).float()


PLAN = {"first": POW2, "second": POW2, "odd": ROW}


def wide(seed=0):
    torch.manual_seed(seed)
    return Wide().eval()


def inputs(count, seed=0):
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


bind, plan_rows = graphs.bind, graphs._plan_for
bound = []
planned = []


class Replayed:
    def __init__(self, function):
        self.function, self.trees, self.planned = function, bound[-1], planned[-1]
        self.output = mapped(function(), lambda leaf: torch.full_like(leaf, torch.nan))

    def replay(self):
        bind(*self.trees)
        plan_rows(*self.planned)
        for kept, made in zip(leaves(self.output), leaves(self.function()), strict=True):
            kept.copy_(made)


def recorded(function, device, stream, pool):
    made = Replayed(function)
    return made, made.output


@pytest.fixture
def backend(monkeypatch):
    """Of what a server compiles; the device is said to have graphs."""
    torch._dynamo.reset()
    made, compile_ = JointBackend(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compile_(model, **{"backend": made} | options))
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", made)
    monkeypatch.setattr(graphs, "record", recorded)
    monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
    monkeypatch.setattr(graphs, "bind", lambda *trees: (bound.append(trees), bind(*trees)))
    monkeypatch.setattr(graphs, "_plan_for", lambda *of: (planned.append(of), plan_rows(*of)))
    yield made
    torch._dynamo.reset()


def frozen(model, **options):
    return freeze(
        model,
        plan_for(model, PLAN),
        calibration=[inputs(40, seed) for seed in range(3)],
        autocast=torch.bfloat16,
        buckets=BUCKETS,
        **options,
    )


def compiled_answer(model, x):
    """Of the converted model under torch.compile, as a user would run it."""
    program = torch.compile(converted(model, plan_for(model, PLAN)), dynamic=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return program(x)


@pytest.mark.parametrize("count", sweep([1, 2, 5, 16], always=[5]))
def test_it_answers_as_the_compiled_model_does(backend, count):
    """Bit for bit, padded rows included, though its weights were quantized before; sites are joined."""
    model = wide()
    server = frozen(model)
    assert server.graphs
    answer = server(inputs(count))
    bucket = 2 if count <= 2 else 16
    assert answer.buckets == (bucket,)
    assert backend.count(region_gemm) == 2 * len(BUCKETS)
    assert backend.count(frozen_gemm) == len(BUCKETS)  # of odd sides: by itself
    assert set(backend.apart) == set()
    assert list(server.apart()) == ["odd"]
    assert "is none of rowwise_e4m3_pow2, int8_row, by which regions quantize" in server.apart()["odd"]
    assert "2 CUDA graphs of compiled code: 2 of 3 sites are in regions" in str(server)
    padded = torch.cat([inputs(count), inputs(count)[-1:].expand(bucket - count, 16)])
    assert torch.equal(answer.output, compiled_answer(model, padded)[:count])


def test_int8_is_joined_from_what_is_kept(backend, monkeypatch, tmp_path):
    """Bit for bit, by graphs and eagerly; a folder holds what is kept, and refresh compiles nothing."""
    monkeypatch.setattr(sys.modules[__name__], "PLAN", dict.fromkeys(PLAN, "emulated:int8_row"))
    model = wide()
    server = frozen(model)
    answer = server(inputs(16)).output
    assert backend.count(region_gemm) == 2 * len(BUCKETS)
    assert not backend.count(int8_weights)
    assert server.apart() == {"odd": "out_features = 24 is no multiple of 16"}
    assert torch.equal(answer, compiled_answer(model, inputs(16)))
    assert {site.weight.low.data.dtype for site in frozen_sites(server.current.module).values()} == {torch.int8}
    server.save(tmp_path)
    for graphs_wanted in (True, False):
        loaded = load(tmp_path, wide(seed=3), graphs=graphs_wanted)
        assert torch.allclose(loaded(inputs(16)).output, answer, rtol=1e-2, atol=1e-3)
    assert torch.equal(load(tmp_path, wide(seed=3))(inputs(16)).output, answer)
    count = len(backend.graphs)
    server.refresh(wide(seed=1).state_dict())
    assert len(backend.graphs) == count
    assert torch.equal(server(inputs(16)).output, compiled_answer(wide(seed=1), inputs(16)))


def test_overlong_and_empty_requests(backend):
    server = frozen(wide())
    whole = server(inputs(37))
    assert whole.buckets == (16, 16, 16)
    for first in range(0, 37, 16):
        assert torch.equal(server(inputs(37)[first : first + 16]).output, whole.output[first : first + 16])
    assert server(inputs(0)).output.shape == (0,)
    bad = inputs(5)
    bad[3, 3] = torch.nan
    answer = server(bad)
    assert answer.nonfinite_rows == 1
    others = [0, 1, 2, 4]
    assert torch.equal(answer.output[others], server(inputs(5)).output[others])


def test_new_weights_are_captured_and_not_compiled(backend):
    model, newer = wide(), wide(seed=1)
    server = frozen(model)
    before, count = server(inputs(9)).output, len(backend.graphs)
    running = server.current
    assert server.refresh(newer.state_dict()) == 2
    assert len(backend.graphs) == count
    after = server(inputs(16)).output
    assert torch.equal(after, compiled_answer(newer, inputs(16)))
    assert running.replays is not None  # a request that began before goes on with its own
    assert torch.equal(running.replays([inputs(9)], 16), before)
    assert server.rollback() == 1
    assert torch.equal(server(inputs(9)).output, before)


def test_refresh_refuses_and_goes_on(backend):
    server = frozen(wide())
    before = server(inputs(3)).output
    bad = wide(seed=1).state_dict() | {"second.weight": torch.full((32, 64), torch.nan)}
    with pytest.raises(ServeRefused, match="holds NaN"):
        server.refresh(bad)
    assert server.version == 1
    assert torch.equal(server(inputs(3)).output, before)
    assert server.refresh(wide(seed=1).state_dict()) == 2


def test_a_folder_keeps_one_scale_for_a_weight_and_loads_with_graphs_or_without(backend, tmp_path):
    model = wide()
    server = frozen(model)
    server.save(tmp_path)
    assert {name: site.even for name, site in server.card.sites.items()} == {
        "first": True,
        "second": True,
        "odd": False,
    }
    torch._dynamo.reset(), counters.clear()
    loaded = load(tmp_path, wide(seed=3))
    assert loaded.graphs
    assert counters["stats"]["unique_graphs"] == 0, "Dynamo, which takes longer, traces nothing"
    assert torch.equal(loaded(inputs(7)).output, server(inputs(7)).output)
    plain = load(tmp_path, wide(seed=3), graphs=False)
    assert not plain.graphs
    assert torch.equal(plain(inputs(7)).output, server._run(server.current.module, [inputs(7)]))
    for name, site in frozen_sites(loaded.current.module).items():
        site_before = frozen_sites(server.current.module)[name]
        assert torch.equal(site.weight.low.scale, site_before.weight.low.scale)


def test_shadowed_requests_are_compared_with_high_precision(backend):
    server = frozen(wide(), shadow=1.0)
    server(inputs(5))
    found = server.shadow()
    assert (found.requests, found.rows) == (1, 5)
    assert 0 < found.max_abs < 0.1


def test_compiled_code_that_computes_something_else_is_refused(backend, monkeypatch):
    class Off(Replayed):
        def replay(self):
            super().replay()
            for leaf in leaves(self.output):
                leaf.mul_(1.2)

    def off(function, *where):
        made = Off(function)
        return made, made.output

    monkeypatch.setattr(graphs, "record", off)
    with pytest.raises(WrongResults, match=r"(?s)for 2 rows.*dB.*graphs=False"):
        frozen(wide())


def test_what_cannot_be_captured_is_refused(backend, monkeypatch):
    def fails(function, *where):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs, "record", fails)
    with pytest.raises(ServeRefused, match=r"(?s)recorded for 2 rows.*not permitted.*graphs=False"):
        frozen(wide())


def test_where_graphs_cannot_be():
    assert not frozen(wide()).graphs  # on a CPU, where nobody asked
    with pytest.raises(ServeRefused, match="need a CUDA device"):
        frozen(wide(), graphs=True)


def test_a_forward_that_writes_to_itself_has_none(backend):
    class Counting(Wide):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    torch.manual_seed(0)
    model = Counting().eval()
    assert not frozen(model).graphs
    with pytest.raises(ServeRefused, match=r"(?s)would not do.*calls"):
        frozen(model, graphs=True)
    assert copy.deepcopy(model).calls == model.calls


@pytest.mark.slow
def test_programs_of_plans_by_rows(backend):
    """A bucket whose plan has a site in high precision is compiled so, for new weights as well."""
    model = wide()
    plans = {2: plan_for(model, {"odd": ROW}), 16: plan_for(model, PLAN)}
    options = {"autocast": torch.bfloat16, "buckets": BUCKETS}
    server = freeze(model, plans, calibration=[inputs(40, seed) for seed in range(3)], **options)
    assert [sum(node.target is region_gemm for node in graph.nodes) for graph in backend.graphs] == [0, 2]
    assert backend.count(frozen_gemm) == 2
    assert torch.equal(server(inputs(16)).output, compiled_answer(model, inputs(16)))
    compiled = len(backend.graphs)
    server.refresh(wide(seed=1).state_dict())
    assert len(backend.graphs) == compiled
    with torch.no_grad():
        exact = wide(seed=1)(inputs(2))
    # `odd` alone is in eight bits: an error of 2^-4 a term, 24 terms of either sign.
    assert torch.allclose(server(inputs(2)).output, exact, atol=0.02)


class Raw(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.pair = (nn.Parameter(torch.randn(16, 64) * 0.2), nn.Parameter(torch.randn(2, 64, 32) * 0.2))

    def forward(self, x):
        x = torch.relu(x @ self.w)
        return (torch.relu(x @ self.pair[0]) - torch.relu(x @ self.pair[1])).sum(dim=1).float()


@pytest.mark.slow
def test_new_weights_of_raw_parameters_are_taken(backend):
    """A compiled site finds its weight by its parameter, which is another one in each version."""
    torch.manual_seed(0)
    model, newer = Raw().eval(), Raw().eval()
    layers = stats_of(model, inputs(32), torch.sum, effect_samples=0).model
    plan = plan_of(layers, dict.fromkeys(layers.layers, POW2))
    server = freeze(model, plan, calibration=[inputs(40)], autocast=torch.bfloat16, buckets=BUCKETS)
    assert len(server.card.sites) == 3
    compiled = len(backend.graphs)
    server.refresh(newer.state_dict())
    assert len(backend.graphs) == compiled
    program = torch.compile(converted(newer, plan), dynamic=False)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(server(inputs(16)).output, program(inputs(16)))
    assert server.apart() == {}


@pytest.mark.slow
def test_what_forward_makes_once_is_no_hindrance(backend):
    """A model that keeps a constant from its first call on is recorded, and keeps it to itself."""

    class Lazy(Wide):
        mask = None

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.ones(16, device=x.device)
            return super().forward(x * self.mask)

    torch.manual_seed(0)
    model = Lazy().eval()
    server = frozen(model)
    assert server.graphs
    assert model.mask is None
    assert server.refresh(wide(seed=1).state_dict()) == 2
    assert torch.equal(server(inputs(16)).output, compiled_answer(wide(seed=1), inputs(16)))


def test_a_full_collection_is_not_left_to_a_request(backend, monkeypatch):
    """Compiling leaves millions of young objects: the collection that is due then took 0.2 to 0.3 s of a request."""
    full = []
    monkeypatch.setattr("loka.serve.server.gc", SimpleNamespace(collect=lambda: full.append(True)))
    frozen(wide())
    assert full == [True]
