import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.planner.choice.knapsack import Way, hull, pareto, spend, steps


def way(name, time, effect):
    return Way(name=name, time=time, effect=effect)


@st.composite
def instances(draw):
    items = {}
    for index in range(draw(st.integers(1, 5))):
        name = f"l{index}"
        others = [
            way(f"k{i}", draw(st.floats(1, 100)), draw(st.floats(1e-7, 1e-4))) for i in range(draw(st.integers(0, 3)))
        ]
        items[name] = [way("hp", draw(st.floats(1, 100)), 0.0), *others]
    return items, draw(st.floats(0, 3e-4))


def brute(items, limit):
    return min(
        math.fsum(w.time for w in ways)
        for ways in itertools.product(*items.values())
        if math.fsum(w.effect for w in ways) <= limit * (1 + 1e-9)  # as `spend` rounds
    )


def total(taken):
    return math.fsum(w.time for w in taken.values()), math.fsum(w.effect for w in taken.values())


@given(instances())
def test_within_the_limit_and_within_one_step_of_the_optimum(instance):
    """The relaxed optimum lies below brute force's, and the walk stops less than one step above it."""
    items, limit = instance
    time, effect = total(spend(items, limit))
    assert effect <= limit * (1 + 1e-9)
    granularity = 0.0
    for ways in items.values():
        vertices = hull(pareto(ways))
        falls = [a.time - b.time for a, b in itertools.pairwise(vertices)]
        granularity = max([granularity, *falls])
    best = brute(items, limit)
    assert best <= time + 1e-9
    assert time <= best + granularity + 1e-9


@given(instances())
def test_exact_for_what_the_walk_itself_spends(instance):
    """At the effect of any vertex of the walk, no other choice is faster: the Lagrangian's promise."""
    items, _ = instance
    fronts = {name: pareto(ways) for name, ways in items.items()}
    taken = {name: front[0] for name, front in fronts.items()}
    for step in steps(fronts):
        taken = {**taken, step.item: step.way}
        time, effect = total(taken)
        assert time <= brute(items, effect) + 1e-9
        assert total(spend(items, effect))[0] == pytest.approx(time)


@given(instances())
def test_a_larger_budget_is_never_refused_and_zero_buys_nothing(instance):
    items, _ = instance
    assert {w.name for w in spend(items, 0.0).values()} == {"hp"}
    fastest = {name: min(w.time for w in ways) for name, ways in items.items()}
    assert {name: w.time for name, w in spend(items, 1.0).items()} == fastest


def test_the_hull_is_what_some_price_chooses():
    """From x on, z saves 45 us for 9e-5, and y only 5 for 2e-5: at no price is y taken."""
    front = [way("hp", 100, 0), way("x", 50, 1e-5), way("y", 45, 3e-5), way("z", 5, 1e-4)]
    assert [w.name for w in hull(front)] == ["hp", "x", "z"]
    assert [step.way.name for step in steps({"a": front})] == ["x", "z"]


def test_the_repair_uses_what_is_left():
    """b saves most per effect and is taken; a does not fit beside it, but c does, although it is worst."""
    items = {
        "a": [way("hp", 100, 0), way("x", 48, 8e-5)],
        "b": [way("hp", 100, 0), way("x", 50, 5e-5)],
        "c": [way("hp", 10, 0), way("x", 5, 4e-5)],
    }
    taken = spend(items, 1e-4)
    assert {name: w.name for name, w in taken.items()} == {"a": "hp", "b": "x", "c": "x"}


def test_the_repair_counts_what_an_upgrade_gives_back():
    """x spends 6e-5 already, so that going on to y, at 8e-5, takes 2e-5 of the 4e-5 that are left, not 8e-5.
    y lies above the convex hull, from x to z, which is too dear: only the repair comes to it."""
    times = {"hp": (100, 0.0), "x": (40, 6e-5), "y": (39, 8e-5), "z": (20, 1.2e-4)}
    items = {"a": [way(name, time, effect) for name, (time, effect) in times.items()]}
    assert spend(items, 1e-4)["a"].name == "y"


def test_a_large_step_takes_the_place_of_small_ones():
    """b saves 10 us for 1e-6, a 60 for 1e-5: the first by price, the second by what is saved."""
    items = {"a": [way("hp", 100, 0), way("x", 40, 1e-5)], "b": [way("hp", 100, 0), way("x", 90, 1e-6)]}
    assert {name: w.name for name, w in spend(items, 1e-5).items()} == {"a": "x", "b": "hp"}
    assert {name: w.name for name, w in spend(items, 1.1e-5).items()} == {"a": "x", "b": "x"}


def test_equal_ways_go_by_name_whatever_their_order():
    ways = [way("hp", 100, 0), way("y", 50, 1e-5), way("x", 50, 1e-5)]
    for order in itertools.permutations(ways):
        assert spend({"a": order}, 1e-4)["a"].name == "x"
    twins = {name: [way("hp", 100, 0), way("x", 50, 1e-5)] for name in ("b", "a")}
    assert {name: w.name for name, w in spend(twins, 1e-5).items()} == {"a": "x", "b": "hp"}


def test_an_unknown_effect_is_never_bought_and_a_forced_one_never_refused():
    ways = [way("hp", 100, 0), way("x", 1, math.inf), way("y", 1, math.nan)]
    for order in itertools.permutations(ways):
        assert spend({"a": order}, 1.0)["a"].name == "hp"
    assert spend({"a": [way("forced", 10, 1e-3)]}, 1e-5)["a"].name == "forced"
    with pytest.raises(ValueError, match="no way to run a"):
        spend({"a": []}, 1.0)
