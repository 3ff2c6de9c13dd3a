import json
import sys
import types

import pytest
import torch
from models import stats_of
from planted import registered
from timers import kernel
from torch import nn

import loka
from loka.core.exceptions import FileRefused, LokaError, UnknownName
from loka.core.numerics.reference import scaled_mm
from loka.core.recipe import Gemm
from loka.core.storage.alone import InUse
from loka.kernels.gemm.registry import all_candidates
from loka.measurement import Settings

QUICK = Settings(max_draws=4)


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 0}, {"min_draws": 1}, {"max_draws": 3}, {"interval_db": float("inf")}, {"max_rounds": 0}, {"tie": -0.01}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


@pytest.mark.slow
def test_every_candidate_at_every_site(stats):
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


@pytest.mark.slow
def test_gradients_in_e5m2_are_measured_as_worse(stats):
    report = loka.measure(stats, device="cpu", settings=QUICK)
    for name in ("3/grad_input", "3/grad_weight"):
        found = report.sites[name].measurements
        gap = (
            found["emulated:tensorwise_e4m3"].errors["sqnr_db"].value
            - found["emulated:tensorwise_e5m2"].errors["sqnr_db"].value
        )
        assert 2.5 < gap < 6, "one mantissa bit on one of two operands: 10 log10(5 / 2) = 4 dB"


@pytest.mark.slow
def test_each_gemm_has_the_errors_that_tell_of_it(stats, tmp_path):
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


@pytest.mark.slow
def test_drawing_goes_on_until_shrinkage_is_known(stats):
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


def test_the_learnt_operands_give_the_error_of_the_real_ones():
    """Gaussian data: drawn from the statistics or taken from the batch, SQNR agrees."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False))
    mixing = torch.randn(64, 64)
    x = torch.randn(4096, 64) @ mixing + 1
    report = loka.measure(stats_of(model, x, torch.sum, rows=4096), device="cpu", candidates=["emulated:rowwise_e4m3"])
    from loka.core.error import sqnr_db
    from loka.core.recipe import Gemm
    from loka.kernels.gemm.run import run_gemm

    weight = model[0].weight.detach()
    out = run_gemm("emulated:rowwise_e4m3", x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32)
    predicted = report.sites["0/output"].measurements["emulated:rowwise_e4m3"].errors["sqnr_db"].value
    assert predicted == pytest.approx(sqnr_db(out, x @ weight.t()), abs=0.5)


def test_interrupted_measuring_goes_on(stats, tmp_path):
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


@pytest.mark.slow
def test_one_measurement_at_a_time_writes_a_report(stats, tmp_path):
    out = tmp_path / "report.json"
    refused = []

    def meanwhile(items, description, total):
        for index, item in enumerate(items):
            if index == 1:
                with pytest.raises(InUse, match=r"another process is measuring into .*report\.json") as error:
                    loka.measure(stats, device="cpu", settings=QUICK, out=out)
                refused.append(error.value)
                loka.measure(stats, device="cpu", settings=QUICK, out=tmp_path / "another.json")
            yield item

    whole = loka.measure(stats, device="cpu", settings=QUICK, out=out, track=meanwhile)
    assert len(refused) == 1
    assert whole == loka.Report.load(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another.json", "report.json"]


def test_unknown_candidates_and_damaged_reports(stats, tmp_path):
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


def test_a_table_folds_what_cannot_run(stats):
    report = loka.measure(stats, device="cpu", settings=QUICK)
    lines = [line for line in str(report).splitlines() if line.startswith("3/output")]
    measurements = report.sites["3/output"].measurements
    unsupported = [name for name, m in measurements.items() if m.unsupported]
    assert len(unsupported) > 3
    assert len(lines) == len(measurements) - len(unsupported) + 1
    assert f"({len(unsupported)} more)" in lines[-1]
    assert "fast accumulation is a mode of the GPU's tensor cores (x" in lines[-1]


def test_reports_of_the_old_format_are_refused_with_the_way_out(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"kind": "loka-report", "version": 1, "sha256": "", "content": {}}))
    with pytest.raises(FileRefused, match="format version 1") as caught:
        loka.Report.load(path)
    assert "loka measure STATS" in str(caught.value)


def test_a_candidate_that_raises_becomes_unsupported(stats):
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
    failed = [name for name, site in report.sites.items() if site.measurements["buggy:rowwise_e4m3"].unsupported]
    assert failed == ["3/grad_input"]
    reason = report.sites["3/grad_input"].measurements["buggy:rowwise_e4m3"].unsupported
    assert reason == "RuntimeError: TMA descriptor"
    alone = loka.measure(stats, device="cpu", settings=QUICK, candidates=["emulated:rowwise_e4m3"])
    for name, site in alone.sites.items():
        for candidate, measured in site.measurements.items():
            assert report.sites[name].measurements[candidate] == measured
    assert report.complete


def test_a_candidate_that_fails_its_self_check_is_unsupported(stats, monkeypatch):
    asked = []

    def self_check(name, *, gemm, device):
        asked.append(name)
        return "off by 3 bounds at 64x32x48" if gemm is Gemm.GRAD_INPUT else None

    monkeypatch.setitem(sys.modules, "loka.kernels.gemm.self_check", types.SimpleNamespace(self_check=self_check))
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


@pytest.mark.slow
def test_operands_are_drawn_in_float32_whatever_the_default(stats):
    expected = loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"], settings=QUICK)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"], settings=QUICK)
    finally:
        torch.set_default_dtype(before)
    assert found.sites == expected.sites


def test_times_and_rows_that_cannot_be_are_refused_before_anything_runs(stats):
    for limit in (float("nan"), -1.0):
        with pytest.raises(LokaError, match=f"time_limit is {limit}"):
            loka.measure(stats, device="cpu", time_limit=limit)
    with pytest.raises(LokaError, match="no GEMM takes more than 2147483647"):
        stats.for_inference(batch=1e300)
    for batch in (None, "2"):
        with pytest.raises(LokaError, match=f"batch is {batch!r}; it must be a Real"):
            stats.for_inference(batch=batch)


@pytest.mark.parametrize("moved", [False, True])
def test_weights_of_zeros_say_nothing_of_others(moved):
    """Quantized without an error, a layer that starts at zero, as LoRA's B does, was told to have inf dB of SQNR and to
    cost no KL/H, and was the first that any budget gave eight bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 1))
    nn.init.zeros_(model[2].weight)
    x = torch.randn(64, 16)
    with loka.Probe(model, every=1) as probe:
        for _ in range(2):
            model(x).sigmoid().sum().backward()
            if moved:
                model[2].weight.data.normal_(std=0.1)
    report = loka.measure(probe.stats(), device="cpu", candidates=["emulated:rowwise_e4m3"], settings=QUICK)
    told = {name: reason for name, reason in report.skipped.items() if "weight that was probed was zero" in reason}
    assert set(told) == (set() if moved else {"2/output", "2/grad_input", "2/grad_weight"})
    assert ("2/output" in report.sites) == moved
    notes = loka.plan(report, loka.Budget(ne=1e-3)).notes
    assert any("2/output stays in hp: every weight" in note for note in notes) != moved
