import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.core.records.coverage import Coverage, Uncovered

FLOPS = st.floats(1, 1e12)


def rest(flops, *, parameter=True, where="head"):
    return Uncovered(where=where, op="aten.bmm", flops=flops, parameter=parameter, reason="no linear layer")


def shares(line):
    return [float(share) for share in re.findall(r"([\d.]+) %", line)]


@given(FLOPS, FLOPS, FLOPS, FLOPS)
def test_sites_and_the_rest_make_the_step(a, b, c, d):
    coverage = Coverage(
        sites={"fc": {"output": a, "grad_weight": b}}, uncovered=(rest(c), rest(d, parameter=False, where=""))
    )
    assert coverage.total == pytest.approx(a + b + c + d)
    assert coverage.seen == pytest.approx((a + b) / (a + b + c))  # activations by each other count nowhere
    lines = coverage.lines()
    assert [shares(line)[0] for line in lines] == pytest.approx(
        [100 * part / coverage.total for part in (a + b, *sorted((c, d), reverse=True))], abs=0.06
    )


@given(FLOPS, FLOPS, FLOPS)
def test_a_plan_parts_the_sites(low, kept, open_):
    coverage = Coverage(sites={"a": {"output": low, "grad_weight": kept}, "b": {"output": open_}})
    (line,) = coverage.planned_lines({("a", "output"): True, ("a", "grad_weight"): False})
    parts = [100 * part / coverage.total for part in (low, low, kept, open_)]
    assert shares(line) == pytest.approx(parts, abs=0.06)
    assert "run in FP8 (output " in line


def test_a_gemm_of_several_sites_has_one_share():
    coverage = Coverage(sites={"a": {"output": 1.0}, "b": {"output": 2.0}}, uncovered=(rest(1.0),))
    first, second = coverage.planned_lines({("a", "output"): True, ("b", "output"): True})
    assert "(output 75.0 %)" in first
    assert second == "25.0 % are no site: head, aten.bmm: no linear layer"


def test_a_model_without_matmuls_lacks_nothing():
    assert (Coverage().seen, Coverage().total) == (1.0, 0)
    assert Coverage().lines() == ["0.0 % of the step's matmul FLOPs are sites"]
    assert Coverage(uncovered=(rest(1.0, parameter=False),)).seen == 1.0
    assert Coverage(uncovered=(rest(1.0, where=""),)).lines()[1].startswith("100.0 % are no site: the model,")
