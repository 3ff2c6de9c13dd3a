import dataclasses
import itertools
import math
import re
from pathlib import Path

import pytest
from reports import H200, around, layer_report, measured, report

import loka
from loka.core.error import Estimate
from loka.core.exceptions import FileRefused, NoKernelFits, UnknownName
from loka.core.recipe import Gemm
from loka.core.records.report import Measurement
from loka.kernels.gemm.registry import candidate_named

FAST, EXACT = "torch_fast:rowwise_e4m3", "torch:rowwise_e4m3"


def decide(candidates, budget=None, **options):
    return loka.plan(report(candidates, **options), budget).decisions["fc/output"]


def test_the_fastest_within_the_budget_wins_and_the_rest_say_why():
    decision = decide(
        {
            FAST: measured(28, 70),
            EXACT: measured(28, 80),
            "torch:tensorwise_e4m3": measured(19, 60),
            "torch:blockwise_e4m3": measured(29, 99),
            "emulated:rowwise_e4m3": Measurement(unsupported="no such thing"),
        }
    )
    assert decision.candidate == FAST
    assert decision.runner_up == EXACT
    assert decision.speedup.value == pytest.approx(100 / 70)
    assert decision.rejected[EXACT].startswith("slower: 80")
    assert "below 25" in decision.rejected["torch:tensorwise_e4m3"]
    assert "speed-up" in decision.rejected["torch:blockwise_e4m3"]
    assert decision.rejected["emulated:rowwise_e4m3"] == "no such thing"


def test_differences_within_the_noise_go_by_name():
    for first, second in ((70.0, 70.5), (70.5, 70.0)):
        decision = decide({FAST: measured(28, first), EXACT: measured(28, second)})
        assert decision.candidate == EXACT, "'torch:' comes before 'torch_fast:'"
        assert "tied" in decision.reason


def test_times_of_another_clock_are_told_by_the_race():
    """1.25x in turns with hp, by a clock at which 80 us were 102."""
    slow = dataclasses.replace(measured(28.5, 80.0), microseconds=Estimate(102.0, 101.0, 103.0))
    plan = loka.plan(report({"torch:rowwise_e4m3": slow}))
    assert plan.decisions["fc/output"].microseconds.value == pytest.approx(80.0)
    assert "100 us in hp, 80 us by plan (1.25x)" in plan.summary()


def test_the_order_of_sites_decides_nothing():
    a, b = "torch:rowwise_e4m3", "torch:tensorwise_e4m3"
    alike, saved = measured(28.5, 60.0, noise=0.001), Estimate(20.0, 20.0, 20.0)
    two = {Gemm.GRAD_INPUT: {a: alike, b: alike}, Gemm.GRAD_WEIGHT: {a: alike, b: alike}}
    savings = {"grad_output": {"e4m3_row+e4m3_tensor": saved, "e4m3_tensor+e4m3_row": saved}}
    made = layer_report(two, savings=savings)
    turned = dataclasses.replace(made, sites=dict(reversed(made.sites.items())))
    assert dict(loka.plan(made).decisions) == dict(loka.plan(turned).decisions)


def test_bf16_stays_when_nothing_is_worth_having():
    decision = decide({FAST: measured(28, 96)})
    assert decision.candidate == "hp"
    assert "speed-up" in decision.reason
    assert decide({}).reason == "no candidate was measured"
    assert decide({FAST: measured(28, 95, noise=0.2)}).candidate == "hp", "a doubt stays in bf16"


def test_a_speedup_that_is_just_what_was_asked_is_enough():
    """On the lower end of its interval, here 1.25 without rounding."""
    exact = dataclasses.replace(measured(28, 64), speedup=Estimate(1.5, 1.25, 1.75))
    for asked, chosen in ((1.25, FAST), (math.nextafter(1.25, 2), "hp")):
        decision = decide({FAST: exact}, loka.Budget(min_speedup=asked))
        assert decision.candidate == chosen
    faster = {FAST: exact, EXACT: dataclasses.replace(exact, speedup=Estimate(2.5, 2.5, 2.5))}
    rejected = decide(faster, loka.Budget(min_speedup=1.25)).rejected[FAST]
    assert rejected.startswith("slower"), "not too slow"


@pytest.mark.parametrize(("high", "chosen"), [(0.2, FAST), (0.2001, "hp")])
def test_the_limit_on_mere_binds_the_upper_end(high, chosen):
    errors = {**measured(28, 50).errors, "mere": Estimate(0.15, 0.1, high)}
    decision = decide({FAST: dataclasses.replace(measured(28, 50), errors=errors)}, loka.Budget(max_mere=0.2))
    assert decision.candidate == chosen
    assert (chosen == FAST) or "is above 0.2" in decision.rejected[FAST]


@pytest.mark.parametrize(("low", "chosen"), [(25.0, FAST), (24.9, "hp")])
def test_the_limit_on_sqnr_binds_the_lower_end(low, chosen):
    errors = {**measured(28, 50).errors, "sqnr_db": Estimate(28.0, low, 31.0)}
    assert decide({FAST: dataclasses.replace(measured(28, 50), errors=errors)}).candidate == chosen


def test_nan_errors_are_never_admitted():
    bad = Measurement(
        errors={"sqnr_db": Estimate(math.nan, math.nan, math.nan), "mere": Estimate(math.nan, math.nan, math.nan)},
        microseconds=Estimate(1, 1, 1),
        speedup=Estimate(100, 100, 100),
    )
    assert decide({FAST: bad}).candidate == "hp"
    assert decide({FAST: bad}, loka.Budget(min_sqnr_db=None)).candidate == "hp"


def test_prediction_layers_and_kept_patterns_stay_in_hp():
    assert decide({FAST: measured(28, 50)}, out_features=1).candidate == "hp"
    free = loka.Budget(keep_prediction=False)
    assert decide({FAST: measured(28, 50)}, free, out_features=1).candidate == FAST
    for pattern in ("fc", "f*/output"):
        assert "kept" in decide({FAST: measured(28, 50)}, loka.Budget(keep=(pattern,))).reason
    with pytest.raises(UnknownName, match="fc/output"):
        decide({FAST: measured(28, 50)}, loka.Budget(keep=("nothing",)))


def test_without_times_the_smallest_error_wins_and_the_plan_says_so():
    made = loka.plan(report({FAST: measured(26), EXACT: measured(30)}, timed=False))
    assert made.decisions["fc/output"].candidate == EXACT
    assert "not timed" in made.decisions["fc/output"].reason
    assert "no speed is claimed" in str(made)
    tied = loka.plan(report({FAST: measured(28.1), EXACT: measured(28.0)}, timed=False)).decisions["fc/output"]
    assert (tied.candidate, tied.rejected[FAST]) == (EXACT, f"tied with {EXACT}, which comes first")


def test_force_bypasses_the_budget_but_not_legality():
    slow = report({FAST: measured(10, 500)})
    forced = loka.plan(slow, force={"fc/*": FAST})
    assert forced.decisions["fc/output"].candidate == FAST
    assert "forced" in forced.decisions["fc/output"].reason
    odd = dataclasses.replace(slow.sites["fc/output"].problem, target="sm_80")
    site = dataclasses.replace(slow.sites["fc/output"], problem=odd)
    with pytest.raises(NoKernelFits, match="sm_80 has no FP8") as caught:
        loka.plan(dataclasses.replace(slow, sites={"fc/output": site}), force={"*": FAST})
    assert "emulated:rowwise_e4m3" in str(caught.value)
    with pytest.raises(NoKernelFits, match="on the machine that was measured"):
        loka.plan(report({FAST: Measurement(unsupported="it crashed there")}), force={"*": FAST})
    with pytest.raises(UnknownName):
        loka.plan(slow, force={"fc/output": "torch:nonsense"})
    with pytest.raises(UnknownName, match="no site matches"):
        loka.plan(slow, force={"other": "hp"})
    with pytest.raises(UnknownName, match="'fc/output' never counts"):
        loka.plan(slow, force={"f*": "hp", "fc/output": FAST})
    assert loka.plan(slow, force={"fc/output": FAST, "*": "hp"}).decisions["fc/output"].candidate == FAST


def test_on_miss_can_raise_with_every_candidate():
    with pytest.raises(NoKernelFits) as caught:
        decide({FAST: measured(20, 50), EXACT: measured(28, 99)}, loka.Budget(on_miss="raise"))
    message = str(caught.value)
    assert "fc/output" in message
    assert FAST in message
    assert EXACT in message
    assert "lower min_sqnr_db" in message


def test_round_trip_and_table(tmp_path):
    made = loka.plan(report({FAST: measured(28, 70), EXACT: measured(28, 80)}), loka.Budget(keep_prediction=False))
    path = tmp_path / "plan.json"
    made.save(path)
    assert loka.Plan.load(path) == made
    printed = str(made)
    for part in ("fc/output", "4096x1024x1024", FAST, "1.43x", "NVIDIA H200", "1 of 1 sites in FP8"):
        assert part in printed
    path.write_text(path.read_text().replace('"torch_fast:rowwise_e4m3"', '"hp"', 1))
    with pytest.raises(FileRefused, match="edited or damaged") as caught:
        loka.Plan.load(path)
    assert "--force" in str(caught.value)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FileRefused, match="truncated"):
        loka.Plan.load(path)


def test_diff_names_what_changed():
    first = loka.plan(report({FAST: measured(28, 70), EXACT: measured(28, 80)}))
    second = loka.plan(report({EXACT: measured(28, 80)}), loka.Budget(min_speedup=1.1))
    difference = loka.diff(first, second)
    assert difference
    assert difference.sites == (("fc/output", FAST, EXACT, "fastest within the budget"),)
    assert any("min_speedup 1.05 -> 1.1" in line for line in difference.context)
    told = str(difference).splitlines()
    assert told[0] == difference.context[0]
    assert any(line.split()[:3] == ["fc/output", FAST, EXACT] for line in told)
    assert told[-1] == "1 sites differ, 0 are the same"
    assert not loka.diff(first, first)
    hot = dataclasses.replace(first, hot_columns={"fc": (1,)})
    for pair in ((hot, first), (first, hot)):
        assert "hot columns: those of fc differ" in loka.diff(*pair).context
    assert str(loka.diff(first, first)) == "0 sites differ, 1 are the same"
    other = dataclasses.replace(H200, torch="2.12.0")
    moved = loka.plan(report({FAST: measured(28, 70)}, machine=other))
    assert any("torch: 2.12.0 here, 2.11.0 there" in line for line in loka.diff(first, moved).context)


@pytest.mark.parametrize("target", ["python", "package"])
def test_candidates_that_are_no_more_are_rejected_with_the_reason(target):
    """A report of an earlier version has them, and stays good for planning."""
    candidates = {"removed:tensorwise_e4m3": measured(30, 40.0), "torch:rowwise_e4m3": measured(30, 60.0)}
    decision = loka.plan(layer_report({Gemm.OUTPUT: candidates}), target=target).decisions["fc/output"]
    assert decision.candidate == "torch:rowwise_e4m3"
    assert "no longer has it" in decision.rejected["removed:tensorwise_e4m3"]


def test_planning_for_a_package():
    """A plan for a package keeps to what runs without loka, and says what that costs."""
    assert candidate_named("torch:blockwise_e4m3").unpackaged
    assert candidate_named("torch_fast:rowwise_e4m3").unpackaged is None
    candidates = {
        "cublaslt:tensorwise_e4m3": measured(30, 40.0),
        "torch:rowwise_e4m3": measured(30, 60.0),
        "torch:blockwise_e4m3": measured(30, 50.0),
    }
    report = layer_report({Gemm.OUTPUT: candidates})
    assert loka.plan(report).decisions["fc/output"].candidate == "cublaslt:tensorwise_e4m3"
    plan = loka.plan(report, target="package")
    decision = plan.decisions["fc/output"]
    assert decision.candidate == "torch:rowwise_e4m3"
    assert "cannot go into a package" in decision.rejected["torch:blockwise_e4m3"]
    told = "\n".join(plan.notes)
    assert "fc/output would run cublaslt:tensorwise_e4m3 in Python, and runs torch:rowwise_e4m3" in told
    assert "`output` GEMMs of the package take 60 us, in Python they would take 40 us, and 100 us in hp" in told
    assert "training steps" not in told
    with pytest.raises(loka.LokaError, match="no target is called"):
        loka.plan(report, target="cpp")
    nothing = layer_report({Gemm.OUTPUT: {"cublaslt:tensorwise_e4m3": measured(30, 40.0)}})
    assert loka.plan(nothing, target="package").decisions["fc/output"].candidate == "hp"
    untimed = dataclasses.replace(nothing, sites={})
    assert "package take" not in "\n".join(loka.plan(untimed, target="package").notes)


def test_a_package_plan_of_training_steps_is_of_output_alone():
    """In a step `output` may be slower than hp for what it saves grad_weight; in a package it saves nothing."""
    slow, fast = {"torch:rowwise_e4m3": measured(30, 110.0)}, {"torch:rowwise_e4m3": measured(30, 60.0)}
    savings = {"input": {"e4m3_row+e4m3_row": around(40.0, 0.01)}}
    report = layer_report({Gemm.OUTPUT: slow, Gemm.GRAD_WEIGHT: fast}, savings=savings)
    assert loka.plan(report).decisions["fc/output"].candidate == "torch:rowwise_e4m3"
    plan = loka.plan(report, target="package")
    assert {name: decision.candidate for name, decision in plan.decisions.items()} == {"fc/output": "hp"}
    told = "\n".join(plan.notes)
    assert "`output` GEMMs of the package take 100 us, in Python they would take 100 us, and 100 us in hp" in told
    assert "`loka measure STATS --inference 1` measures what a package runs" in told
    assert "grad_weight" not in told


def test_a_package_plan_is_never_slower_than_hp_by_its_own_times():
    report = loka.Report.load(Path(__file__).parents[2] / "benchmarks/wukong_step/report.json.xz")

    def slower(plan):
        return [d for d in plan.decisions.values() if d.microseconds.value > d.hp_microseconds.value]

    assert any(decision.problem.gemm is Gemm.OUTPUT for decision in slower(loka.plan(report)))
    plan = loka.plan(report, target="package")
    assert {decision.problem.gemm for decision in plan.decisions.values()} == {Gemm.OUTPUT}
    assert not slower(plan)
    assert any(decision.candidate != "hp" for decision in plan.decisions.values())
    told = re.search(r"package take (\d+) us, in Python .* and (\d+) us in hp", "\n".join(plan.notes))
    assert 0 < int(told[1]) < int(told[2])


def test_without_times_the_runner_up_is_the_next_in_exactness():
    names = ("torch:rowwise_e4m3", "torch:rowwise_e4m3_pow2", "torch:tensorwise_e4m3")
    for errors in itertools.permutations((34.0, 31.0, 28.0)):
        found = {name: measured(error) for name, error in zip(names, errors, strict=True)}
        decision = loka.plan(report(found, timed=False)).decisions["fc/output"]
        ranked = sorted(found, key=lambda name: -found[name].errors["sqnr_db"].value)
        assert [decision.candidate, decision.runner_up] == ranked[:2]
        assert set(decision.rejected) == set(ranked[1:])
    alone = loka.plan(report({names[0]: measured(34.0)}, timed=False)).decisions["fc/output"]
    assert (alone.candidate, alone.runner_up) == (names[0], "hp")


@pytest.mark.parametrize("given", [{"budget": "paper"}, {"budget": 0}, {"force": {"*": None}}, {"force": ["*"]}])
def test_what_is_no_budget_and_what_forces_nothing_is_refused_by_name(given):
    with pytest.raises(ValueError, match=f"{next(iter(given))} is "):
        loka.plan(report({FAST: measured(28, 60)}), **given)


def test_a_plan_of_which_nothing_was_timed_states_no_speed():
    summary = loka.plan(report({FAST: measured(28, 60)}), force={"*": "fbgemm:rowwise_e4m3"}).summary()
    assert summary.endswith("None of what it runs was timed: no speed is claimed.")
