"""What whole steps say of a plan; times are given, as a CPU has none."""

import importlib
from dataclasses import replace

import pytest
import torch
from models import forced_plan
from torch import nn

import loka
from loka.core.error import Estimate
from loka.core.exceptions import LokaError, PlanMismatch
from loka.core.recipe import Gemm
from loka.core.timing import Race, Timing
from loka.nn.site import site_forwards
from loka.planner.convert import fp8_layers

module = importlib.import_module("loka.planner.confirm")
X = torch.randn(32, 24, generator=torch.Generator().manual_seed(0))
PROMISED = {"0": 1.1, "2": 1.4, "4": 1.2, "6": 1.3}


def net():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(24, 24), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(24, 24))


@pytest.fixture(scope="module")
def plan():
    model = net()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(X).sum().backward()
    made = forced_plan(probe.stats(), "emulated:rowwise_e4m3")
    decisions = {
        site: replace(d, speedup=Estimate(promised, 1.0, 2.0), hp_microseconds=Estimate(9.0, 8.0, 10.0))
        for site, d in made.decisions.items()
        for promised in [PROMISED[d.path] if d.problem.gemm is Gemm.OUTPUT else 1.05]
    }
    return replace(made, decisions=decisions)


def race_of(timings, failures):
    return Race(timings=timings, samples={}, failures=failures, winner="hp", rounds=21, ended="decided")


@pytest.fixture
def race(monkeypatch):
    """Sets the speed-ups of arms, in their order; None: it cannot be captured."""

    def given(*speedups):
        times = iter(speedups)

        def timed(functions, *, baseline, device, keep, max_rounds):
            for name in functions:
                functions[name]()
            speedup = next(times)
            if speedup is None:
                return race_of({}, {"plan": "no capture"})
            around = Estimate(speedup, speedup - 0.01, speedup + 0.01)
            timing = Timing(microseconds=Estimate(10.0, 9.0, 11.0), speedup=around, rounds=21)
            return race_of({"plan": timing}, {})

        monkeypatch.setattr(module, "time_interleaved", timed)
        monkeypatch.setattr(module, "_peak", lambda ready, device: 2 + bool(site_forwards(ready.model)))
        monkeypatch.setattr(module, "device_of", lambda model: torch.device("cuda"))
        monkeypatch.setattr(module, "still_usable", lambda: True)

    return given


def step(model):
    assert all(parameter.grad is None for parameter in model.parameters())
    model(X).sum().backward()


def confirmed(plan, model=None, **options):
    return loka.confirm(model or net(), plan, step, compile=lambda m: m, **options)


@pytest.mark.parametrize(
    ("speedups", "kept", "arms"),
    [
        pytest.param((1.3, 1.1), {"0", "2", "4", "6"}, 2, marks=pytest.mark.slow),
        pytest.param((0.9, 1.1, 1.05), {"2", "6"}, 3, marks=pytest.mark.slow),
        pytest.param((1.1, 1.11, 1.0), {"2", "6"}, 3, marks=pytest.mark.slow),
        ((1.11, 1.1, 1.0), {"2", "6"}, 3),  # a tie goes to fewer layers
        ((0.9, 0.95, 1.005), set(), 3),  # within its interval no gain
        pytest.param((None, 1.2, 1.0), {"2", "6"}, 3, marks=pytest.mark.slow),
        ((0.9, None, 1.2), {"2"}, 3),
    ],
)
def test_what_is_fastest_in_the_whole_model_stays(plan, race, speedups, kept, arms):
    race(*speedups)
    seen, model = [], net()
    model.kept = model(X)  # with a graph, which deepcopy alone does not copy
    found = confirmed(plan, model, on_arm=seen.append)
    assert fp8_layers(found.plan).keys() == kept
    assert list(found.arms) == seen
    assert len(seen) == arms
    assert [arm.layers for arm in seen[:2]] == [("2", "6", "4", "0"), ("2", "6")], "what promises most comes last out"
    assert not site_forwards(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    for decision in found.plan.decisions.values():
        if decision.path not in kept:
            assert decision.candidate == "hp"
            assert decision.microseconds == decision.hp_microseconds
            assert "not there in the whole model: 4 layers" in decision.reason
            assert decision.kl is None
    assert "raced in the whole model" in found.plan.notes[-1]
    assert [arm.memory for arm in found.arms] == [None if speedup is None else 1.5 for speedup in speedups]
    raced = len(speedups) - speedups.count(None)
    lines = [line.rstrip() for line in str(found).splitlines()]
    assert (
        found.plan.notes[-1].count("with 1.50 of the memory") == sum(line.endswith(" 1.50") for line in lines) == raced
    )
    assert str(found).endswith(f"{len(kept)} layers run by the plan that is left")
    if kept:
        assert set(site_forwards(loka.convert(net(), found.plan))) == kept


def test_a_layer_in_high_precision_keeps_no_means_and_no_hot_columns(plan):
    made = replace(plan, centres={"0": (0.0,), "2": (1.0,)}, hot_columns={"0": (3,), "2": (4,)})
    left = module.without(made, {"0"}, "for the test")
    assert (left.centres, left.hot_columns) == ({"2": (1.0,)}, {"2": (4,)})


def test_what_cannot_be_confirmed_is_refused(plan, race, monkeypatch):
    with pytest.raises(LokaError, match="the model is on cpu"):
        confirmed(plan)
    race(1.0)
    with pytest.raises(LokaError, match="runs by a plan already"):
        confirmed(plan, loka.convert(net(), plan))
    with pytest.raises(LokaError, match="nothing in eight bits"):
        confirmed(module.without(plan, fp8_layers(plan), "for the test"))
    with pytest.raises(PlanMismatch):
        confirmed(plan, nn.Linear(3, 3))

    hooked = net()
    hooked[0].register_forward_hook(lambda layer, given, answer: answer + hooked[2].bias)
    with pytest.raises(LokaError, match=r"(?s)reads the original's weights.*2\.bias"):
        confirmed(plan, hooked)

    def raises(*args, **options):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(module, "time_interleaved", raises)
    with pytest.raises(LokaError, match=r"(?s)high precision cannot be captured.*not permitted"):
        confirmed(plan)


@pytest.mark.gpu
def test_a_plan_that_slows_the_model_is_taken_back():
    """Layers this small lose in eight bits, whatever the plan says; those of 4096 sides gain."""
    for side, rows, wins in ((64, 256, False), (4096, 8192, True)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(3))).cuda()
        x = torch.randn(rows, side, device="cuda")

        def step(module, x=x):
            with torch.autocast("cuda", torch.bfloat16):
                y = module(x)
            y.float().square().mean().backward()

        with loka.Probe(model, every=1, effect_samples=0) as probe:
            step(model)
        candidate = "torch_fast:rowwise_e4m3"
        report = loka.measure(probe.stats(), candidates=[candidate], errors_only=True)
        plan = loka.plan(report, force={"*": candidate})
        found = loka.confirm(model, plan, step)
        assert bool(fp8_layers(found.plan)) is wins, str(found)
        if wins:  # both have gradients and narrow copies of weights, and activations are a byte in place of two
            assert 0.3 < found.arms[0].memory < 1.5
