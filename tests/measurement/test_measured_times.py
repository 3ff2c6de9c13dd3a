import shutil
import sys
from dataclasses import replace

import pytest
import torch
from models import stats_of
from planted import registered
from timers import FakeTimer, install, kernel
from torch import nn

import loka
from loka.core.device import fingerprint
from loka.core.numerics.reference import scaled_mm
from loka.core.storage.files import PACKAGE, canonical, digest_of_sources
from loka.measurement import Settings
from loka.measurement.cache import _SOURCES, TimesCache
from loka.measurement.errors import draw_errors
from loka.measurement.times import site_times
from loka.measurement.times.layer_times import Timer, cell_key
from loka.measurement.times.region_times import unfit

QUICK = Settings(max_draws=4)


ROWWISE, TENSORWISE, MANY = "emulated:rowwise_e4m3", "emulated:tensorwise_e4m3", "many:rowwise_e4m3"


@pytest.fixture
def twins():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    return stats_of(model, torch.randn(24, 32, requires_grad=True))


def timed(stats, **options):
    return loka.measure(stats, device="cpu", **{"settings": QUICK, "candidates": [ROWWISE, TENSORWISE], **options})


def noted(calls, function):
    def call(*args, **options):
        calls.append(args)
        return function(*args, **options)

    return call


class Copied:
    def __init__(self, name, copied):
        self.clone = lambda: copied.append(name)


def races_of_sites(timer):
    return sum("hp" in names for names in timer.races)


def test_timed_reports(twins, monkeypatch, tmp_path):
    timer = install(monkeypatch, FakeTimer({"hp": 90.0, ROWWISE: 60.0, TENSORWISE: 300.0}))
    out = tmp_path / "report.json"
    report = timed(twins, out=out)
    assert report.timed
    assert report.complete
    assert report.notes == ()
    found = report.sites["2/grad_input"].measurements
    assert found[ROWWISE].speedup.value == pytest.approx(1.5, rel=0.01)
    assert found[ROWWISE].rounds == 9
    assert found[ROWWISE].errors
    assert set(report.quantize_once_savings) == {"0", "2", "4"}
    assert set(report.quantize_once_savings["4"]) == {"input", "weight", "grad_output"}
    assert report.quantize_once_savings["4"]["weight"]["e4m3_row+e4m3_tensor"].value == pytest.approx(100.0, rel=0.01)
    assert races_of_sites(timer) == 6, "three GEMMs of two shapes: the twins share their times"
    assert report.sites["0/output"].measurements[ROWWISE].speedup == (
        report.sites["2/output"].measurements[ROWWISE].speedup
    )
    assert loka.Report.load(out) == report
    printed = str(report)
    rows = [line.split()[2] for line in printed.splitlines() if line.startswith("2/output")]
    assert rows == ["hp", ROWWISE, TENSORWISE], "the fastest first"
    assert "one pass for both copies saves at most, at 4: input e4m3_" in printed
    made = loka.plan(report, loka.Budget(keep_prediction=False))
    assert made.decisions["2/output"].candidate == ROWWISE


def test_the_pinned_name_stands_in_the_report(twins, monkeypatch, tmp_path):
    install(monkeypatch, FakeTimer({f"{MANY}@1": 50.0}))
    with registered(kernel("many", algorithms=3)):
        report = timed(twins, candidates=[MANY, ROWWISE], out=tmp_path / "report.json", cache=tmp_path)
        for site in report.sites.values():
            assert list(site.measurements) == ["hp", f"{MANY}@1", ROWWISE]
            assert site.measurements[f"{MANY}@1"].errors == site.measurements[ROWWISE].errors
        assert timed(twins, candidates=[MANY, ROWWISE], cache=tmp_path).sites == report.sites
        assert loka.plan(report).decisions["0/output"].candidate == f"{MANY}@1"


def test_what_cannot_be_timed_is_unsupported(twins, monkeypatch):
    timer = install(monkeypatch, FakeTimer())

    def run(a, b, dtype, *, algorithm=0):
        if timer.racing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return scaled_mm(a, b, dtype=dtype)

    with registered(kernel("late", run)):
        report = timed(twins, candidates=["late:rowwise_e4m3", ROWWISE])
    for site in report.sites.values():
        measured = site.measurements["late:rowwise_e4m3"]
        assert "cannot be timed: RuntimeError: operation not permitted" in measured.unsupported
        assert site.measurements[ROWWISE].microseconds
    assert report.complete


def test_a_second_measurement_finds_its_times_in_the_cache(twins, monkeypatch, tmp_path):
    timer = install(monkeypatch, FakeTimer())
    first = timed(twins, cache=tmp_path)
    count = len(timer.races)
    assert len(list(tmp_path.iterdir())) == 6 + 2 + 4, "sites, savings, regions and chains of two shapes"
    assert timed(twins, cache=tmp_path).sites == first.sites
    assert timed(twins, cache=tmp_path).quantize_once_savings == first.quantize_once_savings
    assert len(timer.races) == count
    timed(twins, cache=tmp_path, candidates=[ROWWISE])
    assert len(timer.races) > count, "other candidates are another race"
    count = len(timer.races)
    timed(twins, cache=tmp_path, settings=Settings(max_draws=4, max_rounds=15))
    assert len(timer.races) == count + 6 + 6, "so are other settings: 6 sites, 3 tensors of 2 shapes"
    monkeypatch.setattr("loka.measurement.times.layer_times.sources_digest", lambda: "edited")
    count = len(timer.races)
    timed(twins, cache=tmp_path)
    assert len(timer.races) == count + 6 + 6, "an edited kernel is timed again"


@pytest.mark.parametrize("file", ["measurement/times/hp_call.py", "nn/site.py", "core/recording.py"])
def test_times_are_kept_by_all_code_that_is_timed(file, tmp_path):
    package = tmp_path / "loka"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.xz", "*.csv", "__pycache__"))
    before = digest_of_sources(*_SOURCES, package=package)
    with (package / file).open("a") as edited:
        edited.write("# edited\n")
    assert digest_of_sources(*_SOURCES, package=package) != before


def test_layers_whose_times_differ_share_no_key(twins):
    cpu, layer, shape = torch.device("cpu"), twins.layers["0"], twins.model.layers["0"]
    timer = Timer(machine=fingerprint(cpu), device=cpu, settings=QUICK, candidates=(ROWWISE,), cache=TimesCache(None))
    others = ({"dtype": "float16"}, {"weight_dtype": "bfloat16"}, {"kept_weight": True}, {"rows": 25})
    keys = {canonical(cell_key(replace(layer, **other), shape, timer, (), chained=False)) for other in ({}, *others)}
    assert len(keys) == 1 + len(others)


def test_damaged_times_are_measured_again_and_said_so(twins, monkeypatch, tmp_path):
    timer = install(monkeypatch, FakeTimer())
    first = timed(twins, cache=tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    count = len(timer.races)
    second = timed(twins, cache=tmp_path)
    assert len(timer.races) == 2 * count
    assert second.sites == first.sites
    assert second.complete
    assert len(second.notes) == 12
    assert "timed again" in second.notes[0]
    assert timed(twins, cache=tmp_path).notes == ()


class Stopwatch:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_time_is_up_while_timing(twins, monkeypatch, tmp_path):
    """A layer is timed before the next one is measured. The rest is noted; later it goes on from there."""
    clock, timer, out = Stopwatch(monkeypatch), install(monkeypatch, FakeTimer()), tmp_path / "report.json"

    def one_minute(names):
        if len(timer.races) == 1:
            clock.now += 60.0

    timer.before = one_minute
    part = timed(twins, out=out, time_limit=30.0)
    assert not part.complete
    assert list(part.sites) == ["0/output", "0/grad_input", "0/grad_weight"]
    assert all(m.errors for site in part.sites.values() for m in site.measurements.values())
    times = [name for name, site in part.sites.items() if site.measurements["hp"].microseconds]
    assert times == ["0/output", "0/grad_input"]
    assert "time limit of 30 s" in part.notes[0]
    assert part.notes[1] == "not timed: 0/grad_weight"
    assert part.notes[2] == "shared quantization not timed: 0, 2, 4"
    assert part.notes[3] == "not timed in a region: 0, 2, 4"
    assert part.notes[4].startswith("not measured: 2/output, 2/grad_input, 2/grad_weight, 4/output")
    assert "note: not timed: 0/grad_weight" in str(part)
    assert loka.Report.load(out) == part
    drawn = []
    monkeypatch.setattr(sys.modules["loka.measurement.measure"], "draw_errors", noted(drawn, draw_errors))
    whole = timed(twins, out=out)
    assert whole.complete
    assert whole.notes == ()
    assert len(drawn) == 2, "of the two other layers: errors are not drawn again"
    for name in times:
        assert whole.sites[name] == part.sites[name]
    assert races_of_sites(timer) == 6 + 2, "twins share within one run: two of layer 2 race by themselves"


def test_a_race_cut_short_is_run_again(twins, monkeypatch, tmp_path):
    clock, timer, out = Stopwatch(monkeypatch), install(monkeypatch, FakeTimer()), tmp_path / "report.json"
    options = {"settings": Settings(max_draws=4, tie=1e-9), "out": out, "cache": tmp_path / "cache"}

    def late(names):
        clock.now += 60.0

    timer.before = late
    with registered(kernel("many", algorithms=2)):
        options["candidates"] = [ROWWISE, MANY]
        part = timed(twins, time_limit=30.0, **options)
        site = part.sites["0/output"]
        assert site.unfinished == "timing cut short"
        assert site.measurements[ROWWISE].rounds == 9
        assert "timing cut short: 0/output" in part.notes
        assert not (tmp_path / "cache").exists(), "half a race is not kept"
        pinned = [name for name in site.measurements if name.startswith(MANY)]
        timer.true[f"{MANY}@{1 - int(pinned[0][-1])}"] = 10.0
        whole = timed(twins, **options)
    assert whole.complete
    found = whole.sites["0/output"].measurements
    assert found["hp"].rounds == 60
    assert [name for name in found if name.startswith(MANY)] != pinned, "its algorithms were searched again"
    assert len(found) == len(site.measurements)


def test_time_is_up_while_drawing(twins, monkeypatch, tmp_path):
    clock, out = Stopwatch(monkeypatch), tmp_path / "report.json"

    def slow(items, description, total):
        for item in items:
            yield item
            clock.now += 20.0

    part = timed(twins, out=out, time_limit=30.0, track=slow)
    assert {site.path for site in part.sites.values()} == {"0", "2"}
    assert part.notes[1] == "not measured: 4/output, 4/grad_input, 4/grad_weight"
    assert not part.complete
    whole = timed(twins, out=out)
    assert whole.complete
    assert whole.sites == timed(twins).sites


def test_one_of_a_stack_is_timed_with_the_copy_into_it(monkeypatch, tmp_path):
    """Fails where it is timed as a layer of its own, which shares the cache: Kunlun's plan was slower than bf16."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.alone, self.stack = nn.Linear(32, 32, bias=False), nn.Parameter(torch.randn(2, 32, 32) * 0.1)

        def forward(self, x):
            return torch.bmm(torch.stack([self.alone(x)] * 2), self.stack)

    copied = []
    install(monkeypatch, FakeTimer())
    monkeypatch.setattr(site_times, "run_gemm", lambda name, *_, **__: Copied(name, copied))
    model = Model()
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(24, 32, requires_grad=True)).square().mean().backward()
    report = timed(probe.stats(), candidates=[ROWWISE], cache=tmp_path)
    assert {site.path for site in report.sites.values()} == {"alone", "stack[0]", "stack[1]"}
    why = {path: unfit(layer, report.model.layers[path]) for path, layer in probe.stats().layers.items()}
    assert [path for path, reason in why.items() if reason] == ["stack[0]", "stack[1]"], "in no region"
    assert copied == [ROWWISE] * 3, "of its three GEMMs; the second's times are the first's"


def test_interrupted_timing_goes_on(twins, monkeypatch, tmp_path):
    timer, out = install(monkeypatch, FakeTimer()), tmp_path / "report.json"

    def stop(names):
        if races_of_sites(timer) == 4:
            raise KeyboardInterrupt

    timer.before = stop
    with pytest.raises(KeyboardInterrupt):
        timed(twins, out=out)
    part = loka.Report.load(out)
    assert not part.complete
    assert [path for path in ("0", "2", "4") if not part.sites[f"{path}/grad_weight"].unfinished] == ["0", "2"]
    assert "0" in part.quantize_once_savings
    timer.before = lambda names: None
    whole = timed(twins, out=out)
    assert whole.complete
    assert races_of_sites(timer) == 4 + 3, "at most one layer is timed twice"


def test_a_site_too_big_for_the_gpu_is_left_out_and_tried_again(twins, monkeypatch, tmp_path):
    timer, out = install(monkeypatch, FakeTimer()), tmp_path / "report.json"

    raced = []

    def full(names):
        raced.append(names)
        if len(raced) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    timer.before = full
    part = timed(twins, out=out)
    assert part.sites["0/output"].unfinished == "not timed: the GPU has too little memory"
    assert part.sites["0/output"].measurements[ROWWISE].errors
    assert part.sites["4/output"].measurements[ROWWISE].microseconds
    assert not part.complete
    assert timed(twins, out=out).complete


@pytest.mark.gpu
def test_times_on_a_gpu(stats, tmp_path):
    quick = Settings(max_draws=4, max_rounds=15, search_rounds=9, quantize_once_rounds=9)
    report = loka.measure(stats, device="cuda", settings=quick, cache=tmp_path)
    assert report.timed
    assert report.complete, report.notes
    for site in report.sites.values():
        hp = site.measurements["hp"]
        assert hp.microseconds.value > 0
        assert hp.speedup.value == pytest.approx(1.0)
        assert not any(name.startswith("emulated") for name in site.measurements)
        for measured in site.measurements.values():
            assert measured.unsupported or 9 <= measured.rounds <= 15
    assert set(report.quantize_once_savings) == set(stats.layers)
    assert {"weight", "input", "grad_output"} == set(report.quantize_once_savings["3"])
    again = loka.measure(stats, device="cuda", settings=quick, cache=tmp_path)

    def times(found):
        return {(name, each): m.microseconds for name, s in found.sites.items() for each, m in s.measurements.items()}

    assert times(again) == times(report), "every time came from the cache"  # errors of two calls may differ in a bit


def test_a_folder_where_the_entry_belongs_is_told(tmp_path):
    cache = TimesCache(tmp_path)
    cache.put({"a": 1}, {})
    (entry,) = tmp_path.glob("*.json")
    entry.unlink()
    entry.mkdir()
    cache.put({"a": 1}, {})
    assert not cache.notes[-1].endswith("None")
