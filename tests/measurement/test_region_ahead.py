import sys
import time

import pytest
import torch
from models import stats_of
from timers import FakeTimer, install
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config

import loka
from loka.core.records.report import REGION
from loka.measurement.times import layer_times, region_ahead, region_times

ARMS = {REGION: ("emulated:rowwise_e4m3_pow2",) * 3}
PATCH = f"from loka.measurement.times import region_times; region_times.ARMS = {ARMS}; "
MEASURE = sys.modules["loka.measurement.measure"]


@pytest.fixture
def measured(monkeypatch):
    """Measures by workers that run `command`; four layers have two cells."""
    ahead, time_region = MEASURE.compile_regions_ahead, layer_times.time_region
    install(monkeypatch, timer := FakeTimer())
    monkeypatch.setattr(MEASURE, "compile_regions_ahead", ahead)
    monkeypatch.setattr(region_times, "time_interleaved", timer)
    monkeypatch.setattr(region_times, "ARMS", ARMS)
    monkeypatch.setattr(region_ahead, "_FEWEST", 2)
    monkeypatch.setattr(region_ahead, "_LEAST", 0.1)
    model = nn.Sequential(*(nn.Linear(*sides) for sides in ((32, 32), (32, 32), (32, 64), (64, 13))))
    stats = stats_of(model, torch.randn(24, 32, requires_grad=True), effect_samples=0)

    def measure(command, *, regions=False, **options):
        monkeypatch.setattr(region_ahead, "_COMMAND", command)
        if regions:
            monkeypatch.setattr(layer_times, "time_region", time_region)
        settings = {"compile_threads": 2, "fx_graph_cache": True, "epilogue_fusion": False}  # as nobody else has it
        with config.patch({**settings, "aot_inductor.metadata": {"AOTI_DEVICE_KEY": "cpu"}}):
            return loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"], **options)

    return measure


@pytest.mark.slow  # two processes that import torch and compile
def test_what_workers_compiled_is_found(measured, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    report = measured(PATCH + region_ahead._COMMAND, regions=True)
    assert [path for path, times in report.region_times.items() if times[REGION].speedup] == ["2", "0", "1"]
    assert counters["inductor"]["fxgraph_cache_hit"] == 16, (
        "forward and backward of two arms of two cells, alone and chained"
    )
    assert not counters["inductor"]["fxgraph_cache_miss"]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 8


def test_workers_that_die_are_a_note_and_what_is_timed_needs_none(measured, tmp_path):
    report = measured("1 / 0", cache=tmp_path)
    assert report.complete
    assert report.notes == ("2 of 2 processes that compile regions ahead died",)
    assert not measured("1 / 0", cache=tmp_path).notes


def test_without_a_path_of_python_nothing_begins(measured, monkeypatch):
    monkeypatch.setattr(sys, "executable", None)
    assert measured("").notes == ("2 of 2 processes that compile regions ahead died",)


def test_the_time_limit_and_an_interrupt_end_workers(measured, monkeypatch):
    running, worker, seconds = [], region_ahead._worker, []
    monkeypatch.setattr(region_ahead, "_worker", lambda *given: running.append(worker(*given)) or running[-1])

    def track(items, description, total):
        for item in items:
            seconds.append(description)
            yield item

    hang = "import time; time.sleep(1000)"
    measured(hang, time_limit=3.0, track=track)
    assert seconds.count("compiling regions, s at most") == 2, "who watches is asked each second"
    monkeypatch.setattr(MEASURE, "_draw", lambda *job: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        measured(hang)
    assert [process.returncode for process in running] == [-9] * 4


@pytest.mark.slow  # a process that imports torch
def test_a_worker_ends_with_the_process_that_began_it(monkeypatch, tmp_path):
    asleep = "region_ahead.decode = lambda *given: time.sleep(1000); region_ahead.work()"
    monkeypatch.setattr(
        region_ahead, "_COMMAND", f"import time; from loka.measurement.times import region_ahead; {asleep}"
    )
    with loka.Probe(model := nn.Sequential(nn.Linear(16, 16)), every=1) as probe:
        model(torch.randn(4, 16)).sum().backward()
    stats = probe.stats()
    cell = (stats.layers["0"], stats.model.layers["0"], [REGION], False)
    process = region_ahead._worker([cell], torch.device("cpu"), tmp_path / "told.json")
    time.sleep(1)
    process.stdin.close()  # as the system does for a process that was killed
    assert process.wait(timeout=60) == 1
