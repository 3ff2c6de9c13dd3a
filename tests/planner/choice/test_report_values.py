"""A report with values that no measurement gives is refused where it is read, by their place."""

from dataclasses import replace

import pytest
from ne_reports import model_report
from reports import measured

from loka.core.error import Estimate
from loka.core.exceptions import FileRefused
from loka.core.recipe import Gemm
from loka.core.records.report import HP, REGION, Report

ROW, TIMED = "torch:rowwise_e4m3", measured(28, 60)


def made(measurement=TIMED, **others):
    return model_report({"a": {Gemm.OUTPUT: {ROW: measurement}}}, **others)


def speed(*ends):
    return replace(TIMED, speedup=Estimate(*ends))


def renamed(site):
    return replace(made(), sites={site: made().sites["a/output"]})


def without_hp():
    site = made().sites["a/output"]
    return replace(made(), sites={site.name: replace(site, measurements={ROW: TIMED})})


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (made(speed(0.0, 0.0, 0.0)), "a/output: torch:rowwise_e4m3 has speed-up that cannot be"),
        (made(speed(-1.5, -2.0, -1.0)), "cannot be"),
        (made(speed(1.5, 1.9, 1.1)), "cannot be"),
        (made(speed(float("nan"), 1.0, 2.0)), "cannot be"),
        (made(replace(TIMED, microseconds=Estimate(float("inf"), 1.0, 2.0))), "has microseconds that cannot be"),
        (made(region_times={"a": {HP: TIMED, REGION: speed(0.0, 0.0, 0.0)}}), "a in a region: region has speed-up"),
        (made(alike={"a": {"b": 5.0}}), "a correlation that cannot be"),
        (renamed("a/grad_input"), "site a/grad_input is a/output"),
        (without_hp(), "a/output: hp was not measured"),
    ],
)
def test_values_that_cannot_be(report, why, tmp_path):
    report.save(tmp_path / "report.json")
    with pytest.raises(FileRefused, match=why):
        Report.load(tmp_path / "report.json")


def test_ends_of_few_rounds_can_be(tmp_path):
    few = made(speed(1.5, 0.0, float("inf")))
    few.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == few
