import dataclasses

from ne_reports import costing, effect, in_regions
from test_regions import BY_GEMM, FAST, OUT, SLOW, cell, layer, names

import loka
from loka.core.records.report import HP, REGION, REGION_INT8, Measurement

INT8 = "loka_int8:int8_row"


def with_int8(report, region_us, *, kl=(0.0, 0.0)):
    """And its output in INT8, in a region that takes so long; what KL/H FP8 and INT8 cost."""
    times = report.region_times["fc"]
    in_int8 = cell(region_us)[REGION]
    (site,) = [s for s in report.sites.values() if s.problem.gemm is OUT]
    measurements = dict(site.measurements)
    measurements[FAST] = measurements[SLOW] = costing(90.0, effect(kl[0]), sqnr=28.5)
    measurements[INT8] = costing(95.0, effect(kl[1]), sqnr=38.0)
    report = dataclasses.replace(
        report,
        sites={**report.sites, site.name: dataclasses.replace(site, measurements=measurements)},
        region_times={"fc": {**times, REGION_INT8: in_int8}},
    )
    return in_regions(report, effect(kl[0]))


def test_integers_in_a_region_win_by_time_by_a_tie_and_by_what_they_cost():
    made = layer(cell(165.0))
    faster, tied, slower = (with_int8(made, us) for us in (160.0, 165.2, 175.0))
    assert names(loka.plan(faster)) == names(loka.plan(tied)) == {**BY_GEMM, OUT: INT8}
    assert names(loka.plan(slower)) == BY_GEMM
    rejected = loka.plan(slower).decisions["fc/output"].rejected
    assert rejected[REGION_INT8].startswith("speed-up in a region 1.886")
    assert "165 [163.3, 166.7] us" not in loka.plan(faster).decisions["fc/output"].reason
    assert loka.plan(faster).decisions["fc/output"].sqnr_db.value == 38.0


def test_a_package_has_regions_and_no_kernel_of_integers():
    served = with_int8(layer(cell(165.0), gemms=(OUT,)), 160.0)
    assert names(loka.plan(served)) == {OUT: INT8}
    assert names(loka.plan(served, target="package")) == {OUT: BY_GEMM[OUT]}
    of_steps = loka.plan(with_int8(layer(cell(165.0)), 160.0), target="package")
    assert names(of_steps) == {OUT: SLOW}, "the region was timed with its gradients"
    assert "with its gradients" in of_steps.decisions["fc/output"].rejected[REGION]


def test_a_budget_of_kl_takes_integers_where_fp8_costs_too_much():
    slower = with_int8(layer(cell(165.0)), 175.0, kl=(1e-4, 1e-5))
    assert names(loka.plan(slower, loka.Budget(ne=2e-4))) == BY_GEMM
    assert names(loka.plan(slower, loka.Budget(ne=5e-5))) == {**BY_GEMM, OUT: INT8}
    assert names(loka.plan(slower, loka.Budget(ne=5e-6)))[OUT] == HP


def test_why_integers_cannot_is_told():
    made = layer(cell(165.0))
    times = {**made.region_times["fc"], REGION_INT8: Measurement(unsupported="is built for sm_90")}
    plan = loka.plan(dataclasses.replace(made, region_times={"fc": times}))
    assert names(plan) == BY_GEMM
    without = with_int8(made, 160.0)
    output = dataclasses.replace(without.sites["fc/output"], measurements=made.sites["fc/output"].measurements)
    unmeasured = dataclasses.replace(without, sites={**without.sites, "fc/output": output})
    assert names(loka.plan(unmeasured)) == BY_GEMM
