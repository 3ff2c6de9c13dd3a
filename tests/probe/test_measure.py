from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import odd_mlp, train_steps
from torch import nn

import loka
from loka.core.exceptions import FileRefused, UnknownName
from loka.probe import Settings

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
    assert site.measurements["hp"].errors["sqnr_db"].value > 45
    for name in ("emulated:rowwise_e4m3", "torch:tensorwise_e4m3", "emulated:blockwise_e4m3"):
        errors = site.measurements[name].errors
        assert 20 < errors["sqnr_db"].value < 50
        assert errors["sqnr_db"].low <= errors["sqnr_db"].value <= errors["sqnr_db"].high
        assert errors["mere"].value > 0
        assert site.measurements[name].microseconds is None
    assert "no blockwise kernel" in site.measurements["torch:blockwise_e4m3"].unsupported
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
    from loka.kernels.run import run_gemm

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
    assert set(part.sites) == {"0/output", "0/grad_weight"}
    whole = loka.measure(stats, device="cpu", settings=QUICK, out=out, track=record)
    assert whole.complete
    assert whole.sites["0/output"] == part.sites["0/output"]
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


@pytest.mark.gpu
def test_times_on_a_gpu(stats: loka.Stats) -> None:
    report = loka.measure(stats, device="cuda", settings=Settings(max_draws=4, max_rounds=9))
    assert report.timed
    for site in report.sites.values():
        hp = site.measurements["hp"]
        assert hp.microseconds.value > 0
        assert hp.speedup.value == pytest.approx(1.0)
        assert not any(name.startswith("emulated") for name in site.measurements)
