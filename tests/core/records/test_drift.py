import math
from dataclasses import replace

import pytest
import torch
from sweeps import sweep

from loka.core.budget import Budget, upper_bound
from loka.core.device import fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import DataRefused, PlanMismatch
from loka.core.numerics.effect import Effect
from loka.core.numerics.hot_columns import LEFT
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.drift import Limits, drift, drift_guard, effects_of
from loka.core.records.plan import Decision, Plan
from loka.core.records.stats import Distribution, LinearStats, Stats
from loka.core.signature import LinearShape, ModelSignature

SIGNATURE = ModelSignature(
    name="Net", layers={path: LinearShape(in_features=8, out_features=8, bias=False) for path in ("a", "b")}
)
RECIPE = "rowwise_e4m3"


def operand(amax, mean=1.0, variance=3.0):
    tensors = {
        "amax": torch.tensor([0.95 * amax, amax]),
        "mean": torch.full((8,), mean),
        "square": torch.full((8,), 10 * variance),
    }
    return Distribution(kind="gaussian", tensors=tensors, numbers={"count": 10})


def effect(value, *, samples=400, spread=0.9):
    """An effect of `value` in NE at a base rate of a half: its terms lie `spread` above and below it."""
    term = value * math.log(2)
    terms = [term * (1 + spread), term * (1 - spread)] * (samples // 2)
    return Effect.of(terms, [[0.5]] * samples)


def window(amax=4.0, ne=1e-5, **others):
    def layer(order, amax, ne):
        weight = Distribution(kind="matrix_normal", tensors={"mean": torch.full((8, 8), 0.5)})
        return LinearStats(
            rows=64,
            calls=1,
            order=order,
            dtype="bfloat16",
            weight_dtype="float32",
            needs_input_grad=True,
            needs_weight_grad=True,
            operands={"input": operand(amax, **others), "weight": weight, "grad_output": operand(amax)},
            effects={RECIPE: effect(ne)} if ne is not None else {},
        )

    layers = {"a": layer(0, amax, ne), "b": layer(1, 4.0, 1e-5)}
    return Stats(model=SIGNATURE, steps=1, sampled_steps=1, layers=layers)


def plan_of(candidates, *, budget=None, ne=None):
    decisions = {}
    for path in SIGNATURE.layers:
        for gemm in Gemm:
            problem = linear_problem(gemm, rows=64, in_features=8, out_features=8, dtype="bfloat16", target="cpu")
            low = candidates.get(f"{path}/{gemm}", "hp")
            known = Estimate(ne, ne, ne) if ne is not None and gemm is Gemm.OUTPUT and low != "hp" else None
            decision = Decision(path=path, problem=problem, candidate=low, reason="", kl=known)
            decisions[decision.site] = decision
    return Plan(
        model=SIGNATURE, machine=fingerprint("cpu"), budget=budget or Budget(), timed=False, decisions=decisions
    )


BOTH = plan_of({"a/output": f"emulated:{RECIPE}", "b/output": f"emulated:{RECIPE}"})


def test_shifts_are_in_octaves():
    """amax 4 -> 12 is log2 3; rms sqrt(1 + 3) -> sqrt(4 + 12), an octave."""
    found = drift(BOTH, window(amax=12.0, mean=2.0, variance=12.0), before=window())
    shift = found.layers["a"].shifts["input"]
    assert shift.amax == pytest.approx(math.log2(3))
    assert shift.rms == pytest.approx(1.0)
    assert found.layers["a"].shifts["weight"].rms == 0.0
    assert found.layers["b"].shifts["grad_output"].amax == 0.0
    assert "+1.58 (+1.00)" in str(found)


def test_nothing_moved_nothing_closes():
    found = drift(BOTH, window(), before=window())
    assert not found.unsafe
    assert found.layers["a"].growth == pytest.approx(1.0)
    assert "CLOSE" not in str(found)


@pytest.mark.parametrize(("amax", "closes"), [(7.9, False), (8.1, True), (0.1, False)])
def test_an_amax_that_rose_more_than_an_octave_closes(amax, closes):
    found = drift(BOTH, window(amax=amax), before=window(amax=4.0))
    assert found.unsafe == ({"a"} if closes else set())
    if closes:
        assert "amax of input rose by 1.0 octaves" in str(found)


def with_amaxes(stats, amaxes):
    learnt = dict(stats.layers["a"].operands)
    learnt["input"] = replace(learnt["input"], tensors={**learnt["input"].tensors, "amax": amaxes})
    return replace(stats, layers={**stats.layers, "a": replace(stats.layers["a"], operands=learnt)})


def test_the_largest_of_more_batches_is_no_drift():
    """Batches of one heavy tail, 2 of them before and 16 after: one in five is four times as large."""
    many = torch.tensor([4.0, 4.0, 16.0, 4.0, 4.0] * 3 + [3.9])
    assert not drift(BOTH, with_amaxes(window(), many), before=window()).unsafe
    many[:9] = 16.0  # and none where they rose in most of them, though not in the last
    assert drift(BOTH, with_amaxes(window(), many), before=window()).unsafe == {"a"}


@pytest.mark.parametrize("sigma", sweep([0.5, 1.5, 2.5], [2.5]))
def test_heavy_tails_close_nothing_by_chance(sigma):
    """Of 100 windows of 8 batches in which nothing moved at most 4 may: with probability 0.02 each, as simulated for
    the heaviest (docs/log.md), 5 or more have 5 %. Eight times as large, nearly all do."""
    generator = torch.Generator().manual_seed(0)

    def batches(factor=1.0):
        return factor * (sigma * torch.randn(8, 256 * 8, generator=generator)).exp()

    pairs = [(batches(), batches(), batches(8.0)) for _ in range(100)]
    found = [[drift(BOTH, with_amaxes(window(), x), before=with_amaxes(window(), b)) for x in xs] for b, *xs in pairs]
    assert sum(bool(same.unsafe) for same, _ in found) <= 4
    assert sum(bool(moved.unsafe) for _, moved in found) >= 95


def test_rows_that_no_statistic_has_are_unknown():
    after = window()
    learnt = dict(after.layers["a"].operands)
    learnt["input"] = replace(learnt["input"], numbers={"count": 10, "nonfinite_rows": 6})
    after = replace(after, layers={**after.layers, "a": replace(after.layers["a"], operands=learnt)})
    found = drift(BOTH, after, before=window())
    assert found.unknown == ("a",)
    assert "unknown: a: 6 of 16 rows of input hold NaN or infinity: no statistic has them" in str(found)


def test_one_batch_differs_as_those_of_the_other_window_do():
    generator = torch.Generator().manual_seed(0)

    def batches(count):
        return (1.5 * torch.randn(count, 2048, generator=generator)).exp()

    pairs = [(with_amaxes(window(), batches(1)), with_amaxes(window(), batches(24))) for _ in range(60)]
    assert sum(bool(drift(BOTH, now, before=then).unsafe) for now, then in pairs) <= 4  # at most 0.025 each


def test_a_burst_of_all_gradients_hides_no_rise():
    """In one batch of 16 all are 256 times as large, which rms shows alone; one layer's are 8 times in each."""

    def with_gradients(factor, burst):
        layers = {}
        for path, layer in window().layers.items():
            amax = torch.full((16,), 4.0) * (factor if path == "a" else 1.0)
            amax[0] *= burst
            gradient = operand(4.0, variance=3.0 * (1 + burst**2 / 16))
            gradient = replace(gradient, tensors={**gradient.tensors, "amax": amax})
            layers[path] = replace(layer, operands={**layer.operands, "grad_output": gradient})
        return replace(window(), layers=layers)

    backward = plan_of({"a/grad_input": f"emulated:{RECIPE}"})
    found = drift(backward, with_gradients(8.0, 256.0), before=with_gradients(1.0, 1.0))
    assert found.unsafe == {"a"}


def test_batches_of_zeros_have_no_largest_number():
    zeros = with_amaxes(window(), torch.zeros(3))
    assert drift(BOTH, zeros, before=window()).layers["a"].shifts["input"].amax is None
    some = drift(BOTH, with_amaxes(window(), torch.tensor([0.0, 32.0])), before=window())
    assert some.unsafe == {"a"}


def test_a_loss_of_another_scale_is_no_drift_and_hides_none():
    """Gradients 2^16 times as large, as GradScaler makes them; then one layer's 2^3 times as large as the others'."""

    def scaled(stats, factors):
        layers = {}
        for (path, layer), factor in zip(stats.layers.items(), factors, strict=True):
            gradient = operand(4.0 * factor, mean=factor, variance=3.0 * factor**2)
            layers[path] = replace(layer, operands={**layer.operands, "grad_output": gradient})
        return replace(stats, layers=layers)

    backward = plan_of({"a/grad_input": f"emulated:{RECIPE}", "b/grad_input": f"emulated:{RECIPE}"})
    assert not drift(backward, scaled(window(), (2.0**16, 2.0**16)), before=window()).unsafe
    hidden = drift(backward, scaled(window(), (2.0**-3, 2.0**-6)), before=window())
    assert hidden.unsafe == {"a"}
    assert "rose by 3.0 octaves more than all others (-6.0)" in str(hidden)


def test_what_moved_under_means_and_columns_of_the_plan_is_charged():
    """A window tells effects by its own means and columns. These means are 1 of variance 3: off by a third of it; of
    eight columns one has half the error, and the plan takes another."""
    low, after = plan_of({"a/output": f"emulated:{RECIPE}"}, budget=Budget(ne=1.2e-5)), window()
    assert not drift(low, after).over_budget
    off = drift(replace(low, centres={"a": (0.0,) * 8}), after)
    assert off.layers["a"].after.value == pytest.approx(1e-5 * 4 / 3)
    assert off.over_budget
    assert not off.unsafe, "a third is within what closes it"
    heat = torch.ones(8, 1)
    heat[3] = 7.0
    after.layers["a"].operands["input"].tensors["effect_columns"] = heat
    assert drift(replace(low, hot_columns={"a": (3,)}), after).total.value == pytest.approx(1e-5)
    left = (14 - (1 - LEFT)) / (14 - (1 - LEFT) * 7)
    assert drift(replace(low, hot_columns={"a": (2,)}), after).total.value == pytest.approx(1e-5 * left)


def test_the_guard_opens_after_as_many_windows_as_it_is_told():
    windows = [drift(BOTH, window(amax=16.0), before=window()), drift(BOTH, window(), before=window())]
    assert drift_guard(windows) == {"a"}
    assert drift_guard(windows, limits=Limits(reopen_after=1)) == frozenset()


def test_only_operands_that_run_in_fp8_count():
    """grad_output rises too, but only `output` is in FP8; then only grad_weight is."""
    found = drift(BOTH, window(amax=16.0), before=window())
    assert not any("grad_output" in reason for reason in found.layers["a"].unsafe)
    backward = plan_of({"a/grad_weight": f"emulated:{RECIPE}"})
    reasons = drift(backward, window(amax=16.0), before=window()).layers["a"].unsafe
    assert [reason.split()[2] for reason in reasons] == ["input", "grad_output"]
    assert not drift(plan_of({}), window(amax=16.0), before=window()).unsafe


@pytest.mark.parametrize(("ne", "closes"), [(1.9e-5, False), (3e-5, True), (5e-6, False)])
def test_an_effect_that_doubled_closes_its_layer(ne, closes):
    """b / 2S = 2e-5 / 4: effects of 1e-5 are not small."""
    plan = plan_of({"a/output": f"emulated:{RECIPE}", "b/output": f"emulated:{RECIPE}"}, budget=Budget(ne=2e-5))
    found = drift(plan, window(ne=ne), before=window())
    assert found.unsafe == ({"a"} if closes else set())
    assert found.over_budget is (ne > 5e-6)
    assert found.total.value == pytest.approx(ne + 1e-5)


def test_a_small_effect_may_double_and_an_unsure_one_is_not_believed():
    """Half a budget of 1e-4 over two sites is 2.5e-5 a site: 1e-6 -> 5e-6 is nothing to close for."""
    assert not drift(BOTH, window(ne=5e-6), before=window(ne=1e-6)).unsafe
    noisy = window(ne=3e-5)
    layer = replace(noisy.layers["a"], effects={RECIPE: effect(3e-5, samples=4, spread=1.0)})
    strict = plan_of({"a/output": f"emulated:{RECIPE}"}, budget=Budget(ne=1e-6))
    unsure = replace(noisy, layers={**noisy.layers, "a": layer})
    assert drift(strict, noisy, before=window()).unsafe == {"a"}
    assert not drift(strict, unsure, before=window()).unsafe


def test_without_the_earlier_window_the_plan_tells_the_effects():
    plan = plan_of({"a/output": f"emulated:{RECIPE}"}, budget=Budget(ne=2e-5), ne=1e-5)
    found = drift(plan, window(ne=4e-5))
    assert found.layers["a"].shifts == {}
    assert found.layers["a"].growth == pytest.approx(4.0)
    assert found.unsafe == {"a"}
    unknown = drift(plan, window(ne=None))
    assert unknown.layers["a"].growth is None
    assert not unknown.unsafe


def test_the_valve_closes_at_once_and_opens_after_three_safe_windows():
    def of(amax):
        return drift(BOTH, window(amax=amax), before=window())

    safe, unsafe = of(4.0), of(16.0)
    assert drift_guard([safe, safe]) == frozenset()
    assert drift_guard([safe, unsafe]) == {"a"}
    assert drift_guard([unsafe, safe, safe]) == {"a"}
    assert drift_guard([unsafe, safe, safe, safe]) == frozenset()
    assert drift_guard([unsafe, safe, safe, unsafe, safe]) == {"a"}


def test_other_models_are_refused_and_unknown_effects_left_out():
    other = replace(window(), model=ModelSignature(name="Other", layers={}))
    with pytest.raises(PlanMismatch, match="`after`"):
        drift(BOTH, other)
    with pytest.raises(PlanMismatch, match="`before`"):
        drift(BOTH, window(), before=other)
    nothing = Effect.of([1e-5] * 4, [[0.0]] * 4)
    blind = window()
    blind = replace(blind, layers={"a": replace(blind.layers["a"], effects={RECIPE: nothing})})
    assert effects_of(blind) == {"a": {}}


def without(stats, path, *, effects_alone):
    layers = dict(stats.layers)
    if effects_alone:
        layers[path] = replace(layers[path], effects={}, no_effect="no logits")
        return replace(stats, layers=layers)
    del layers[path]
    return replace(stats, layers=layers, skipped={path: "never called"})


@pytest.mark.parametrize("effects_alone", [True, False])
def test_what_a_window_does_not_tell_is_unknown_and_charged_as_planned(effects_alone):
    """Of 1e-5 a site two are above 1.5e-5; that one of them is not seen makes the plan no cheaper."""
    tight = replace(BOTH, budget=Budget(ne=1.5e-5))
    blind = without(window(), "a", effects_alone=effects_alone)
    found = drift(tight, blind, before=window())
    assert found.unknown == ("a",)
    assert found.total.value == pytest.approx(2e-5)
    assert found.over_budget
    assert f"unknown: a: {'this window has no' if effects_alone else 'not seen in'}" in str(found)
    assert ("no logits" if effects_alone else "never called") in str(found)
    planned = plan_of({"a/output": f"emulated:{RECIPE}"}, budget=Budget(ne=1e-6), ne=1e-5)
    assert drift(planned, blind).over_budget
    assert drift(BOTH, window(), before=window()).unknown == ()
    assert drift(plan_of({}), blind).unknown == (), "in hp there is nothing to know"
    gradient = drift(plan_of({"a/grad_weight": f"emulated:{RECIPE}"}), blind)
    assert gradient.unknown == (() if effects_alone else ("a",)), "FP8 gradients have no effect to know"


def test_an_effect_of_earlier_steps_is_no_news():
    stale = window()
    stale = replace(stale, layers={**stale.layers, "a": replace(stale.layers["a"], no_effect="no logits")})
    assert drift(BOTH, stale, before=window()).unknown == ("a",)


def test_windows_without_samples_are_refused():
    empty = replace(window(), sampled_steps=0)
    with pytest.raises(DataRefused, match="`after`"):
        drift(BOTH, empty)
    with pytest.raises(DataRefused, match="`before`"):
        drift(BOTH, window(), before=empty)


def test_windows_that_say_nothing_open_no_valve():
    closed = drift(BOTH, window(amax=16.0), before=window())
    blind = drift(BOTH, without(window(), "a", effects_alone=False), before=window())
    assert drift_guard([closed, blind, blind, blind]) == {"a"}
    ranges = without(window(), "a", effects_alone=True)
    never = drift(BOTH, ranges, before=ranges)  # its effect was never known: ranges have to do
    assert drift_guard([closed, never, never, never]) == frozenset()


@pytest.mark.parametrize("numbers", [{}, {"count": 0}])
def test_a_scatter_of_no_rows_has_no_rms(numbers):
    blind = window()
    uncounted = replace(blind.layers["a"].operands["input"], numbers=numbers)
    layer = replace(blind.layers["a"], operands={**blind.layers["a"].operands, "input": uncounted})
    shift = drift(BOTH, replace(blind, layers={**blind.layers, "a": layer}), before=blind).layers["a"].shifts
    assert (shift["input"].amax, shift["input"].rms) == (0.0, None)


def test_layers_that_are_alike_cost_more_than_their_sum():
    """Two of 1e-5 each that change the same: 4e-5 together, as the planner holds a plan to."""
    plan = replace(BOTH, budget=Budget(ne=3e-5))
    later = replace(window(), alike={"a": {"b": 1.0}})
    apart, found = drift(plan, window()), drift(plan, later)
    assert not apart.over_budget
    assert apart.together == 0
    assert found.over_budget
    assert found.together == pytest.approx(4 * upper_bound(effect(1e-5).kl()))
    assert "at most by the correlations of its layers: ABOVE the budget" in str(found)
    assert drift(plan, window(), before=later).over_budget  # where the later window knows none
    apart_now = replace(window(), alike={"a": {"b": 0.1}})
    assert drift(plan, apart_now, before=later).together == pytest.approx(2.2 * upper_bound(effect(1e-5).kl()))
