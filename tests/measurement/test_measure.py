from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from models import odd_mlp, train_steps
from torch import nn

import loka
from loka.core.exceptions import FileRefused, UnknownName
from loka.core.numerics.reference import scaled_mm
from loka.core.recipe import Gemm
from loka.kernels.gemm.registry import all_candidates
from loka.measurement import Settings
from loka.measurement.errors import draw_errors

sys.path.insert(0, str(Path(__file__).parent))
from timers import FakeTimer, install, kernel, registered

QUICK = Settings(max_draws=4)


@pytest.fixture(scope="module")
def stats() -> loka.Stats:
    torch.manual_seed(0)
    model = odd_mlp()
    with loka.Probe(model, every=2) as probe:
        train_steps(model, 6)
    return probe.stats()


def test_every_candidate_at_every_site(stats: loka.Stats) -> None:
    report = loka.measure(stats, device="cpu", settings=QUICK)
    assert list(report.sites) == [
        "0/output",
        "0/grad_weight",
        "3/output",
        "3/grad_input",
        "3/grad_weight",
        "5/output",
        "5/grad_input",
        "5/grad_weight",
    ]
    assert "never runs" in report.skipped["0/grad_input"]
    site = report.sites["3/output"]
    assert (site.problem.m, site.problem.n, site.problem.k) == (40, 1000, 479)
    assert site.problem.dtype == "bfloat16"
    assert report.sites["3/grad_weight"].problem.dtype == "float32", "that of the weight"
    assert site.measurements["hp"].errors["sqnr_db"].value > 45
    for name in ("emulated:rowwise_e4m3", "torch:tensorwise_e4m3", "emulated:blockwise_e4m3"):
        errors = site.measurements[name].errors
        assert 20 < errors["sqnr_db"].value < 50
        assert errors["sqnr_db"].low <= errors["sqnr_db"].value <= errors["sqnr_db"].high
        assert errors["mere"].value > 0
        assert site.measurements[name].microseconds is None
    assert "no blockwise kernel" in site.measurements["torch:blockwise_e4m3"].unsupported
    slow = {candidate.name for candidate in all_candidates() if candidate.on_request}
    assert slow
    assert not any(slow & set(found.measurements) for found in report.sites.values()), "nobody asked"
    assert not report.timed
    assert "Not timed" in str(report)


def test_gradients_in_e5m2_are_measured_as_worse(stats: loka.Stats) -> None:
    report = loka.measure(stats, device="cpu", settings=QUICK)
    for name in ("3/grad_input", "3/grad_weight"):
        found = report.sites[name].measurements
        gap = (
            found["emulated:tensorwise_e4m3"].errors["sqnr_db"].value
            - found["emulated:tensorwise_e5m2"].errors["sqnr_db"].value
        )
        assert 2.5 < gap < 6, "one mantissa bit on one of two operands: 10 log10(5 / 2) = 4 dB"


def test_each_gemm_has_the_errors_that_tell_of_it(stats: loka.Stats, tmp_path: Path) -> None:
    report = loka.measure(stats, device="cpu", settings=QUICK)
    ways, rows = {"angle", "shrink", "bias", "variance"}, {"row_db", "row_p99_db"}
    wanted = {Gemm.OUTPUT: rows, Gemm.GRAD_INPUT: rows | ways, Gemm.GRAD_WEIGHT: ways}
    for site in report.sites.values():
        for name, measured in site.measurements.items():
            errors = measured.errors
            if measured.unsupported is None:
                assert errors.keys() - {"ne"} == {"sqnr_db", "mere"} | wanted[site.problem.gemm]
                assert all(e.low <= e.value <= e.high for e in errors.values()), (site.name, name)
    # Of all error energy, what is along the gradient, what across it stays, and what averages out.
    errors = report.sites["3/grad_input"].measurements["emulated:tensorwise_e5m2"].errors
    energy = errors["shrink"].value ** 2 + errors["bias"].value + errors["variance"].value
    assert energy == pytest.approx(10 ** (-errors["sqnr_db"].value / 10), rel=0.02)
    assert energy == pytest.approx(errors["angle"].value ** 2, rel=0.02)
    assert "shrink_%" in str(report)
    report.save(tmp_path / "report.json")
    assert loka.Report.load(tmp_path / "report.json") == report


def test_drawing_goes_on_until_shrinkage_is_known(stats: loka.Stats) -> None:
    """The narrowest gradients, of the layer with one output, need more than the four draws that SQNR asks."""
    layer = {"candidates": ["emulated:tensorwise_e5m2"], "device": "cpu"}
    rough = Settings(interval_db=9.0, interval_share=1.0)
    fine = Settings(interval_db=9.0, interval_share=0.01, max_draws=64)
    widths = []
    for settings in (rough, fine):
        report = loka.measure(stats, settings=settings, **layer)
        found = report.sites["5/grad_weight"].measurements["emulated:tensorwise_e5m2"].errors["shrink"]
        widths.append(found.high - found.low)
    assert widths[1] <= 2 * 0.01 < widths[0], widths


def test_the_learnt_operands_give_the_error_of_the_real_ones() -> None:
    """Gaussian data: drawn from the statistics or taken from the batch, SQNR agrees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    mixing = torch.randn(64, 64)
    x = torch.randn(4096, 64) @ mixing + 1
    with loka.Probe(model, every=1, rows=4096) as probe:
        model(x).sum().backward()
    report = loka.measure(probe.stats(), device="cpu", candidates=["emulated:rowwise_e4m3"])
    from loka.core.error import sqnr_db
    from loka.core.recipe import Gemm
    from loka.kernels.gemm.run import run_gemm

    weight = model[0].weight.detach()
    out = run_gemm("emulated:rowwise_e4m3", x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32)
    predicted = report.sites["0/output"].measurements["emulated:rowwise_e4m3"].errors["sqnr_db"].value
    assert predicted == pytest.approx(sqnr_db(out, x @ weight.t()), abs=0.5)


def test_interrupted_measuring_goes_on(stats: loka.Stats, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    seen = []

    def stop_at_second(items, description, total):
        for index, item in enumerate(items):
            if index == 1:
                raise KeyboardInterrupt
            yield item

    def record(items, description, total):
        for item in items:
            seen.append(item[0])
            yield item

    with pytest.raises(KeyboardInterrupt):
        loka.measure(stats, device="cpu", settings=QUICK, out=out, track=stop_at_second)
    part = loka.Report.load(out)
    assert not part.complete
    assert "incomplete" in str(part)
    assert set(part.sites) == {"3/output", "3/grad_input", "3/grad_weight"}, "the largest layer first"
    whole = loka.measure(stats, device="cpu", settings=QUICK, out=out, track=record)
    assert whole.complete
    assert whole.sites["3/output"] == part.sites["3/output"]
    assert whole == loka.Report.load(out)
    assert whole.sites == loka.measure(stats, device="cpu", settings=QUICK).sites


def test_unknown_candidates_and_damaged_reports(stats: loka.Stats, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="torch:rowwise_e4m3"):
        loka.measure(stats, device="cpu", candidates=["torch:rowwise"])
    path = tmp_path / "report.json"
    loka.measure(stats, device="cpu", settings=QUICK, candidates=["emulated:rowwise_e4m3"], out=path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(FileRefused, match="measure again"):
        loka.Report.load(path)
    damaged = path.read_bytes()
    with pytest.raises(FileRefused, match="will not overwrite"):
        loka.measure(stats, device="cpu", settings=QUICK, out=path)
    assert path.read_bytes() == damaged


def test_a_table_folds_what_cannot_run(stats: loka.Stats) -> None:
    report = loka.measure(stats, device="cpu", settings=QUICK)
    lines = [line for line in str(report).splitlines() if line.startswith("3/output")]
    measurements = report.sites["3/output"].measurements
    unsupported = [name for name, m in measurements.items() if m.unsupported]
    assert len(unsupported) > 3
    assert len(lines) == len(measurements) - len(unsupported) + 1
    assert f"({len(unsupported)} more)" in lines[-1]
    assert "fast accumulation is a mode of the GPU's tensor cores (x" in lines[-1]


def test_reports_of_the_old_format_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"kind": "loka-report", "version": 1, "sha256": "", "content": {}}))
    with pytest.raises(FileRefused, match="format version 1") as caught:
        loka.Report.load(path)
    assert "loka measure STATS" in str(caught.value)


def test_a_candidate_that_raises_becomes_unsupported(stats: loka.Stats) -> None:
    """From the second draw on, at one GEMM; every other number is as without it."""
    calls = []

    def run(a, b, dtype, *, algorithm=0):
        calls.append(a.shape)
        if len(calls) == 2:
            raise RuntimeError("TMA descriptor\nbacktrace")
        return scaled_mm(a, b, dtype=dtype)

    with registered(kernel("buggy", run)):
        report = loka.measure(
            stats, device="cpu", settings=QUICK, candidates=["buggy:rowwise_e4m3", "emulated:rowwise_e4m3"]
        )
    failed = [
        name for name, site in report.sites.items() if site.measurements["buggy:rowwise_e4m3"].unsupported
    ]
    assert failed == ["3/grad_input"]
    reason = report.sites["3/grad_input"].measurements["buggy:rowwise_e4m3"].unsupported
    assert reason == "RuntimeError: TMA descriptor"
    alone = loka.measure(stats, device="cpu", settings=QUICK, candidates=["emulated:rowwise_e4m3"])
    for name, site in alone.sites.items():
        for candidate, measured in site.measurements.items():
            assert report.sites[name].measurements[candidate] == measured
    assert report.complete


def test_a_candidate_that_fails_its_self_check_is_unsupported(
    stats: loka.Stats, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def self_check(name: str, *, gemm: Gemm, device: torch.device) -> str | None:
        asked.append(name)
        return "off by 3 bounds at 64x32x48" if gemm is Gemm.GRAD_INPUT else None

    monkeypatch.setitem(
        sys.modules, "loka.kernels.gemm.self_check", types.SimpleNamespace(self_check=self_check)
    )
    report = loka.measure(
        stats,
        device="cpu",
        settings=QUICK,
        candidates=["torch:tensorwise_e4m3", "torch:blockwise_e4m3", "emulated:tensorwise_e4m3"],
    )
    found = report.sites["3/grad_input"].measurements
    assert found["torch:tensorwise_e4m3"].unsupported == "self-check: off by 3 bounds at 64x32x48"
    assert not found["emulated:tensorwise_e4m3"].unsupported
    assert report.sites["3/output"].measurements["torch:tensorwise_e4m3"].errors
    assert set(asked) == {"torch:tensorwise_e4m3"}, "neither emulation nor what cannot run anyway"


# From here on a fake timer stands in for the GPU's: what is timed, kept and continued.

ROWWISE, TENSORWISE, MANY = "emulated:rowwise_e4m3", "emulated:tensorwise_e4m3", "many:rowwise_e4m3"


@pytest.fixture
def twins() -> loka.Stats:
    """Two layers of one shape and a third of another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(24, 32, requires_grad=True)).square().mean().backward()
    return probe.stats()


def timed(stats: loka.Stats, **options) -> loka.Report:
    return loka.measure(
        stats, device="cpu", **{"settings": QUICK, "candidates": [ROWWISE, TENSORWISE], **options}
    )


def noted(calls: list[object], function):
    def call(*args, **options):
        calls.append(args)
        return function(*args, **options)

    return call


def races_of_sites(timer: FakeTimer) -> int:
    return sum("hp" in names for names in timer.races)


def test_timed_reports(twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert set(report.sharing) == {"0", "2", "4"}
    assert set(report.sharing["4"]) == {"input", "weight", "grad_output"}
    assert report.sharing["4"]["weight"]["e4m3_row+e4m3_tensor"].value == pytest.approx(100.0, rel=0.01)
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


def test_the_pinned_name_stands_in_the_report(
    twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, FakeTimer({f"{MANY}@1": 50.0}))
    with registered(kernel("many", algorithms=3)):
        report = timed(twins, candidates=[MANY, ROWWISE], out=tmp_path / "report.json", cache=tmp_path)
        for site in report.sites.values():
            assert list(site.measurements) == ["hp", f"{MANY}@1", ROWWISE]
            assert site.measurements[f"{MANY}@1"].errors == site.measurements[ROWWISE].errors
        assert timed(twins, candidates=[MANY, ROWWISE], cache=tmp_path).sites == report.sites
        assert loka.plan(report).decisions["0/output"].candidate == f"{MANY}@1"


def test_what_cannot_be_timed_is_unsupported(twins: loka.Stats, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_second_measurement_finds_its_times_in_the_cache(
    twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timer = install(monkeypatch, FakeTimer())
    first = timed(twins, cache=tmp_path)
    count = len(timer.races)
    assert len(list(tmp_path.iterdir())) == 6 + 2 + 2, "sites, sharing and regions of two shapes"
    assert timed(twins, cache=tmp_path).sites == first.sites
    assert timed(twins, cache=tmp_path).sharing == first.sharing
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


def test_damaged_times_are_measured_again_and_said_so(
    twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timer = install(monkeypatch, FakeTimer())
    first = timed(twins, cache=tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:100])
    count = len(timer.races)
    second = timed(twins, cache=tmp_path)
    assert len(timer.races) == 2 * count
    assert second.sites == first.sites
    assert second.complete
    assert len(second.notes) == 10
    assert "timed again" in second.notes[0]
    assert timed(twins, cache=tmp_path).notes == ()


class Stopwatch:
    """A clock for deadlines that stands still until it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_time_is_up_while_timing(twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A layer is timed before the next one is measured. The rest is noted; later it goes on from there."""
    clock, timer, out = Stopwatch(monkeypatch), install(monkeypatch, FakeTimer()), tmp_path / "report.json"

    def one_minute(names: list[str]) -> None:
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


def test_a_race_cut_short_is_run_again(
    twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, timer, out = Stopwatch(monkeypatch), install(monkeypatch, FakeTimer()), tmp_path / "report.json"
    options = {"settings": Settings(max_draws=4, tie=1e-9), "out": out, "cache": tmp_path / "cache"}

    def late(names: list[str]) -> None:
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


def test_time_is_up_while_drawing(twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_interrupted_timing_goes_on(
    twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timer, out = install(monkeypatch, FakeTimer()), tmp_path / "report.json"

    def stop(names: list[str]) -> None:
        if races_of_sites(timer) == 4:
            raise KeyboardInterrupt

    timer.before = stop
    with pytest.raises(KeyboardInterrupt):
        timed(twins, out=out)
    part = loka.Report.load(out)
    assert not part.complete
    assert [path for path in ("0", "2", "4") if not part.sites[f"{path}/grad_weight"].unfinished] == [
        "0",
        "2",
    ]
    assert "0" in part.sharing
    timer.before = lambda names: None
    whole = timed(twins, out=out)
    assert whole.complete
    assert races_of_sites(timer) == 4 + 3, "at most one layer is timed twice"


def test_a_site_too_big_for_the_gpu_is_left_out_and_tried_again(
    twins: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timer, out = install(monkeypatch, FakeTimer()), tmp_path / "report.json"

    raced = []

    def full(names: list[str]) -> None:
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
def test_times_on_a_gpu(stats: loka.Stats, tmp_path: Path) -> None:
    quick = Settings(max_draws=4, max_rounds=15, search_rounds=9, sharing_rounds=9)
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
    assert set(report.sharing) == set(stats.layers)
    assert {"weight", "input", "grad_output"} == set(report.sharing["3"])
    again = loka.measure(stats, device="cuda", settings=quick, cache=tmp_path)
    assert again.sites == report.sites, "every time came from the cache"
