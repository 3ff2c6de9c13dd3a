import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reports import layer_report, measured

import loka
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.report import HP, REGION
from loka.planner.choice.layer_choice import Option, allowed_choices, best_of, combine, earns, region_choice

ROW, TENSOR = "torch:rowwise_e4m3", "torch:tensorwise_e4m3"
SHARED_ROW = "e4m3_row+e4m3_row"
OUT, GIN, GWT = Gemm.OUTPUT, Gemm.GRAD_INPUT, Gemm.GRAD_WEIGHT


def exactly(value):
    return Estimate(value, value, value)


def unsure(value, spread):
    return Estimate(value, value / (1 + spread), value * (1 + spread))


def test_a_loser_by_itself_wins_beside_its_neighbours():
    """grad_weight takes 104 us of its own, and 22 less where grad_output is read once: 82, 1.22x."""
    sites = {GIN: {ROW: measured(28, 70, noise=0.001)}, GWT: {ROW: measured(28, 104, noise=0.001)}}
    alone = loka.plan(layer_report(sites))
    assert alone.decisions["fc/grad_weight"].candidate == "hp"
    assert "speed-up" in alone.decisions["fc/grad_weight"].reason
    savings = {"grad_output": {SHARED_ROW: exactly(22.0)}}
    together = loka.plan(layer_report(sites, savings=savings))
    decision = together.decisions["fc/grad_weight"]
    assert decision.candidate == ROW
    assert "shares the quantization of grad_output with grad_input (22.0 us saved)" in decision.reason
    assert decision.saved_us == 22.0
    assert together.decisions["fc/grad_input"].saved_us == 0.0
    assert "200 us in hp, 152 us by plan (1.32x)" in together.summary()


def test_what_is_shared_decides_between_candidates():
    """Rows win each GEMM by 2 us; one tensor scale for both copies of grad_output saves 10."""
    site = {ROW: measured(28, 70, noise=0.001), TENSOR: measured(28, 72, noise=0.001)}
    savings = {"grad_output": {SHARED_ROW: exactly(1.0), "e4m3_tensor+e4m3_tensor": exactly(10.0)}}
    plan = loka.plan(layer_report({GIN: site, GWT: site}, savings=savings))
    assert {d.candidate for d in plan.decisions.values()} == {TENSOR}
    assert plan.decisions["fc/grad_input"].rejected[ROW].startswith("slower")


def test_a_gemm_that_does_not_earn_its_place_is_left_in_hp():
    """With grad_input at 70, grad_weight at 98 gains 2 %: less than the 5 % asked."""
    sites = {GIN: {ROW: measured(28, 70)}, GWT: {ROW: measured(28, 98, noise=0.001)}}
    plan = loka.plan(layer_report(sites))
    assert plan.decisions["fc/grad_input"].candidate == ROW
    assert plan.decisions["fc/grad_weight"].candidate == "hp"


def test_forced_neighbours_count():
    """grad_input forced to FP8 although slow: grad_weight still profits from its pass."""
    sites = {GIN: {ROW: measured(28, 130)}, GWT: {ROW: measured(28, 104, noise=0.001)}}
    report = layer_report(sites, savings={"grad_output": {SHARED_ROW: exactly(30.0)}})
    plan = loka.plan(report, force={"fc/grad_input": ROW})
    assert plan.decisions["fc/grad_weight"].candidate == ROW
    assert loka.plan(report, force={"fc/grad_input": "hp"}).decisions["fc/grad_weight"].candidate == "hp"


def test_a_site_without_times_in_a_timed_report_stays_in_hp():
    report = layer_report({OUT: {ROW: measured(28, 70)}, GIN: {ROW: measured(28)}}, notes=("time was up",))
    plan = loka.plan(report)
    assert plan.decisions["fc/output"].candidate == ROW
    assert plan.decisions["fc/grad_input"].candidate == "hp"
    assert "not timed" in plan.decisions["fc/grad_input"].rejected[ROW]
    assert "note: time was up" in str(plan)


def test_a_long_neighbour_makes_no_ties():
    """1.4 % at a GEMM of 70 us is a difference, however long the layer's other GEMMs take."""
    sites = {
        GIN: {"fbgemm:rowwise_e4m3": measured(28, 70, noise=0.001), "deep_gemm:blockwise_e4m3": measured(28, 71)},
        GWT: {ROW: measured(28, 90, noise=0.001)},
    }
    assert loka.plan(layer_report(sites)).decisions["fc/grad_input"].candidate == "fbgemm:rowwise_e4m3"


def test_a_tie_with_an_unsure_candidate_loses_nothing():
    """fbgemm comes first by name and is within 1 %, but its interval reaches below the limit."""
    unsure = dataclasses.replace(measured(28, 90.5), speedup=Estimate(100 / 90.5, 0.98, 1.2))
    sure = dataclasses.replace(measured(28, 90.0), speedup=Estimate(100 / 90, 1.105, 1.115))
    for candidates in ({ROW: sure}, {ROW: sure, "fbgemm:rowwise_e4m3": unsure}):
        decision = loka.plan(layer_report({OUT: candidates})).decisions["fc/output"]
        assert decision.candidate == ROW
    assert "below 1.05" in decision.rejected["fbgemm:rowwise_e4m3"]


def test_a_forced_name_means_the_algorithm_that_was_measured():
    report = layer_report({OUT: {"cublaslt:rowwise_e4m3@3": measured(28, 50)}, GIN: {ROW: measured(28, 50)}})
    plan = loka.plan(report, force={"fc/output": "cublaslt:rowwise_e4m3"})
    assert plan.decisions["fc/output"].candidate == "cublaslt:rowwise_e4m3@3"
    assert "200 us in hp, 100 us by plan (2.00x)." in plan.summary()
    unmeasured = loka.plan(report, force={"fc/output": "fbgemm:rowwise_e4m3"})
    assert "100 us in hp, 50 us by plan (2.00x). 1 sites were not timed." in unmeasured.summary()


def test_patterns_may_name_any_site_of_the_model():
    report = layer_report({OUT: {ROW: measured(28, 50)}})
    plan = loka.plan(report, loka.Budget(keep=("fc/grad_weight",)), force={"fc/grad_input": "hp"})
    assert plan.decisions["fc/output"].candidate == ROW


def test_what_surely_earns_its_place_is_not_lost_to_a_slower_one_that_is_surer_yet():
    """The fastest is in doubt; the next is within its interval surely fast enough, and not the surest."""
    doubt = dataclasses.replace(measured(28, 50), speedup=Estimate(2.0, 0.9, 2.2))
    enough = dataclasses.replace(measured(28, 60), speedup=Estimate(100 / 60, 1.2, 1.7))
    surest = measured(28, 80, noise=0.001)
    names = ["fbgemm:rowwise_e4m3", ROW, "torch_fast:rowwise_e4m3"]
    decision = loka.plan(layer_report({OUT: dict(zip(names, (doubt, enough, surest), strict=True))})).decisions
    assert decision["fc/output"].candidate == ROW
    assert decision["fc/output"].rejected["torch_fast:rowwise_e4m3"].startswith("slower: 80 ")


times = st.floats(10, 300)
spread = st.sampled_from([0.0, 0.05, 0.5, 1.0])
casts = st.sampled_from(["e4m3_row", "e4m3_tensor"])


@st.composite
def layers(draw):
    options = {}
    for gemm in Gemm:
        high = Option(name="hp", time=exactly(draw(times)), casts=None)
        low = [
            Option(name=f"k{i}", time=unsure(draw(times), draw(spread)), casts=(draw(casts), draw(casts)))
            for i in range(draw(st.integers(0, 4)))
        ]
        options[gemm] = {option.name: option for option in (high, *low)}
    pairs = ["+".join(pair) for pair in itertools.product(["e4m3_row", "e4m3_tensor"], repeat=2)]
    savings = {
        tensor: {pair: exactly(draw(st.floats(0, 9))) for pair in pairs}
        for tensor in ("input", "weight", "grad_output")
    }
    return options, savings


def choose(options, savings, **how):
    return best_of(allowed_choices(options, savings, **how))


@given(layers(), st.sampled_from([0.0, 1.0, 1.05]))
def test_no_allowed_choice_is_faster(layer, min_speedup):
    """Against brute force over all options: within the tie band twice (casts first, then choices)."""
    options, savings = layer
    found = choose(options, savings, min_speedup=min_speedup)
    best = min(
        choice.microseconds
        for names in itertools.product(*(each.values() for each in options.values()))
        if all(
            earns(choice, gemm, options[gemm]["hp"], min_speedup)
            for choice in [combine(dict(zip(options, names, strict=True)), savings)]
            for gemm in options
        )
        for choice in [combine(dict(zip(options, names, strict=True)), savings)]
    )
    spent = sum(option.time.value for option in found.options.values())
    assert found.microseconds <= best * 1.01 + 0.01 * spent + 1e-9
    assert found == choose(options, savings, min_speedup=min_speedup)


def test_never_slower_than_hp():
    options = {OUT: {"hp": Option(name="hp", time=exactly(100), casts=None)}}
    assert choose(options, {}, min_speedup=1.05).options[OUT].name == "hp"
    slow = Option(name="k", time=exactly(100.1), casts=("e4m3_row", "e4m3_row"))
    options[OUT]["k"] = slow
    assert choose(options, {}, min_speedup=1.0).options[OUT].name == "hp"
    assert pytest.approx(100.1) == choose({OUT: {"k": slow}}, {}, min_speedup=1.0, fixed={OUT}).microseconds


def test_a_region_is_a_choice_only_where_it_and_hp_were_timed():
    hp = {gemm: Option(name=HP, time=exactly(100.0), casts=None) for gemm in Gemm}
    timed, untimed = measured(28, 60.0), measured(28)
    made = region_choice(hp, {REGION: timed, HP: measured(55, 100.0)})
    assert made.region == timed.speedup
    lacking = [{}, {HP: timed}, {REGION: timed}, {REGION: untimed, HP: timed}, {REGION: timed, HP: untimed}]
    lacking.append({REGION: dataclasses.replace(timed, speedup=None), HP: timed})
    assert [region_choice(hp, times) for times in lacking] == [None] * len(lacking)
