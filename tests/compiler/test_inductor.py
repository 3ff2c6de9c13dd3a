import copy
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from converted import converted, error, fp8_sites, gradients, plan_for, run
from joint import JointBackend
from small_models import made
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import codecache, config
from torch._inductor.custom_graph_pass import CustomGraphPass

import loka
from loka.compiler import install, joint_pass, notes
from loka.compiler.joint_pass import RegionPass
from loka.core.recording import record
from loka.nn.site import sites_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _configured(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    before = config.joint_custom_pre_pass
    yield
    config.joint_custom_pre_pass = before


class Counting(CustomGraphPass):
    def __init__(self):
        self.graphs = 0

    def __call__(self, graph):
        self.graphs += 1

    def uuid(self):
        return "counting"


@pytest.mark.slow  # test_a_second_process trains by Inductor in every run of the tests
def test_a_training_step_by_inductor():
    plain = made("gated")
    x = torch.randn(64, 64)
    plan = plan_for(plain, x)
    eager, joined = (converted(plain, plan) for _ in range(2))
    expected, by_site = run(plain, x), run(eager, x)
    found = run(torch.compile(joined, fullgraph=True), x)
    assert error(found[0], expected[0]) <= 1.3 * error(by_site[0], expected[0])
    exact, one_by_one, together = (gradients(m) for m in (plain, eager, joined))
    for name, truth in exact.items():
        assert error(together[name], truth) <= 1.3 * error(one_by_one[name], truth) + 0.005
    listed = loka.regions(joined)
    assert listed.complete
    assert [set(region) for region in listed.applied] == [{"gate", "up", "down"}]
    counts = loka.health_of(joined)
    assert all(counts[f"{site}/{gemm}"]["runs"] == 1 for site in fp8_sites(plan) for gemm in ("output", "grad_weight"))


def test_steps_that_the_host_launches_are_told(monkeypatch):
    model = made("relu")
    joined = converted(model, plan_for(model, torch.randn(64, 64)))
    run(torch.compile(joined, backend=JointBackend()), torch.randn(64, 64))
    assert "the host launched" not in str(loka.regions(joined))
    _, text = notes._RECORDS[next(iter(sites_of(joined).values())).health.data_ptr()]
    for launches, captures, told in ((21, 0, True), (20, 0, False), (40, 1, False), (41, 1, True)):
        monkeypatch.setattr(notes, "_LAUNCHES", Counter({(text, False): launches, (text, True): captures}))
        listed = loka.regions(joined)
        assert (listed.launched, listed.captured) == (launches, captures)
        assert (f"the host launched graphs {launches} times" in str(listed)) is told


@pytest.mark.gpu
def test_launches_are_counted_and_replays_are_not():
    device = torch.device("cuda", 0)
    model, x = made("relu").to(device), torch.randn(64, 64, device=device)
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(x).sum().backward()
    candidate = "torch_fast:rowwise_e4m3_pow2"
    report = loka.measure(probe.stats(), candidates=[candidate], errors_only=True)
    loka.convert(model, loka.plan(report, force={"*": candidate}))
    step, stream = torch.compile(model), torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(5):
            step(x).sum().backward()
    listed = loka.regions(model)
    assert listed.applied
    assert (listed.launched, listed.captured) == (10, 0), "forward and backward"
    recording, _ = record(lambda: step(x).sum().backward(), device, stream)
    for _ in range(3):
        recording.replay()
    listed = loka.regions(model)
    assert (listed.launched, listed.captured) == (10, 2)


@pytest.mark.slow
def test_a_users_pass_stays_and_comes_first():
    own = Counting()
    config.joint_custom_pre_pass = own
    model = made("relu")
    x = torch.randn(64, 64)
    loka.convert(model, plan_for(model, x))
    ours = config.joint_custom_pre_pass
    assert isinstance(ours, RegionPass)
    assert ours.uuid()[0] == "counting"
    run(torch.compile(model), x)
    assert own.graphs == 1
    assert loka.regions(model).complete
    install()
    assert config.joint_custom_pre_pass is ours


def test_a_function_as_a_pass_is_run_and_nothing_is_cached():
    seen = []
    config.joint_custom_pre_pass = seen.append
    install()
    ours = config.joint_custom_pre_pass
    assert isinstance(ours, RegionPass)
    assert ours.uuid() is None
    ours(torch.fx.Graph())
    assert len(seen) == 1


@pytest.mark.parametrize("file", ["compiler/lower.py", "compiler/edges/cones.py", "kernels/edge/twin.py"])
def test_what_the_pass_is_made_of_decides_its_uuid(file, tmp_path):
    """Else a compiler's cache gives graphs that an earlier version of this code wrote."""
    package = Path(joint_pass.__file__).parents[1]
    for room in ("compiler", "kernels"):
        shutil.copytree(package / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    before = joint_pass._digest(tmp_path)
    assert before == joint_pass._digest()
    with (tmp_path / file).open("a") as code:
        code.write("\n")
    joint_pass._digest.cache_clear()
    assert joint_pass._digest(tmp_path) != before


def test_the_version_of_cublaslt_decides_the_uuid(monkeypatch):
    """Graphs name algorithms by their numbers."""
    found = set()
    monkeypatch.setattr(joint_pass.cublaslt_c, "why_missing", lambda: None)
    for version in (130000, 130100):
        monkeypatch.setattr(joint_pass.cublaslt_c, "version", lambda version=version: version)
        joint_pass._digest.cache_clear()
        found.add(RegionPass().uuid())
    joint_pass._digest.cache_clear()
    assert len(found) == 2


def test_switched_off_every_site_runs_by_itself():
    model = made("relu")
    x = torch.randn(64, 64)
    plan = plan_for(model, x)
    loka.convert(model, plan, regions=False)
    run(torch.compile(model, backend=JointBackend()), x)
    listed = loka.regions(model)
    assert not listed.applied
    assert set(listed.apart) == fp8_sites(plan)
    assert all("switched off" in reason for reason in listed.apart.values())
    assert all(count["runs"] for count in loka.health_of(model).values())


def test_a_graph_from_the_cache_is_joined_and_says_so():
    plain = made("relu")
    x = torch.randn(64, 64)
    plan = plan_for(plain, x)
    first, second = (converted(plain, plan) for _ in range(2))
    found = run(torch.compile(first), x)
    torch._dynamo.reset()
    counters.clear()
    again = run(torch.compile(second), x)
    assert sum(n for name, n in counters["inductor"].items() if name == "fxgraph_cache_hit") or counters[
        "aot_autograd"
    ].get("autograd_cache_hit")
    assert torch.equal(found[0], again[0])
    assert all(torch.equal(gradients(first)[n], g) for n, g in gradients(second).items())
    assert loka.regions(second).complete
    assert loka.regions(second).applied == loka.regions(first).applied


_SECOND = """
import copy, sys, torch, loka
sys.path[:0] = [{tests!r}, {here!r}]
from converted import plan_for, run
from joint import JointBackend
from small_models import made
from torch._dynamo.utils import counters
model = made("relu")
x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
loka.convert(model, plan_for(model, x))
y, _ = run(torch.compile(model), x)
assert loka.regions(model).complete, str(loka.regions(model))
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"].get("autograd_cache_hit", 0)
print(int(hits > 0), y.double().sum().item())
"""


@pytest.mark.slow  # the same process finds a graph in the cache in every run of the tests
def test_a_second_process(tmp_path):
    here, shared = Path(__file__).parent, tmp_path / "shared"
    shared.mkdir()
    Path(codecache._HEADER_DIR).mkdir(parents=True, exist_ok=True)
    (shared / "precompiled_headers").symlink_to(codecache._HEADER_DIR)  # they take longer than the graph
    script = _SECOND.format(tests=str(here.parent), here=str(here))
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(shared), "PYTHONPATH": str(ROOT / "src")}
    told = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split())
    assert told[1][0] == "1"
    assert told[0][1] == told[1][1]


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        torch._dynamo.graph_break()
        return self.third(x)


def test_a_graph_break_makes_smaller_regions_and_is_named():
    model = Broken()
    x = torch.randn(64, 64)
    plan = plan_for(model, x)
    loka.convert(model, plan)
    before = loka.regions(model)
    assert set(before.apart) == {"first", "second", "third"}
    assert all("has not run" in reason for reason in before.apart.values())
    run(model, x)
    assert all("eagerly" in reason for reason in loka.regions(model).apart.values())
    counters.clear()
    run(torch.compile(model), x)
    listed = loka.regions(model)
    assert [set(region) for region in listed.applied] == [{"first", "second"}, {"third"}]
    assert listed.complete
    assert "graph_break()" in listed.breaks[0]
    assert f"graph break: {listed.breaks[0]}" in str(listed)


@pytest.mark.slow
def test_sites_that_do_not_fit_are_told_with_their_reason():
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    whole = nn.Sequential(nn.Identity(), model)
    x = torch.randn(64, 13)
    loka.convert(model, plan_for(model, x))
    run(torch.compile(whole), x)
    assert loka.regions(model).applied == (("2",),)
    assert loka.regions(model).apart == {
        "0": "in_features = 13 is no multiple of 16",
        "4": "out_features = 1 is no multiple of 16",
    }
    assert set(loka.regions(whole).apart) == {"1.0", "1.4"}
    assert all("multiple of 16" in reason for reason in loka.regions(whole).apart.values())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2)
def test_dynamo_does_not_give_up_on_many_blocks_of_a_class():
    """Sites have names, so that each block has a program of its own; Dynamo keeps eight of a frame, and two here."""
    deep, x = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(32, 32)
    loka.convert(deep, plan_for(deep, x))
    backend = JointBackend()
    for block in deep:
        block.compile(backend=backend, fullgraph=True)
    run(deep, x)
    with torch.no_grad():
        deep(x)
    assert loka.regions(deep).complete
    assert len(loka.regions(deep).applied) == len(deep)


@pytest.mark.slow
def test_parts_compiled_by_themselves_and_within_each_other():
    outer = nn.Sequential(made("relu"), nn.ReLU(), made("relu_narrow"))
    x = torch.randn(64, 64)
    plan = plan_for(outer, x)
    plain = copy.deepcopy(outer)
    loka.convert(outer, plan)
    outer[0].compile()
    found = run(torch.compile(outer), x)
    assert error(found[0], run(plain, x)[0]) < 0.2
    assert loka.regions(outer).complete
    assert len(loka.regions(outer).planned) == len(fp8_sites(plan))
