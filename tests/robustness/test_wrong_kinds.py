"""What is of another kind than a stage asks for is told by name, where a missing attribute was."""

import re

import pytest
import torch
from models import stats_of
from torch import nn

import loka
from loka.core.exceptions import LokaError
from loka.core.records.drift import drift
from loka.planner.frontier import frontier
from loka.probe import merge_stats, renew_effects
from loka.train.automatic.joint_effect import joint_effect

X = torch.randn(4, 16)
CANDIDATES = ("emulated:rowwise_e4m3",)


@pytest.fixture(scope="module")
def stages():
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    stats = stats_of(model, torch.randn(64, 16))
    report = loka.measure(stats, device="cpu", candidates=CANDIDATES)
    return model, stats, report, loka.plan(report)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda m, s, r, p: loka.Probe(m.forward), "the model is of type method; it must be a Module"),
        (lambda m, s, r, p: loka.Probe(m, resume="stats"), "resume is 'stats'; it must be a"),
        (lambda m, s, r, p: loka.Probe(m, logits="click"), "logits is 'click'; it must be a function"),
        (lambda m, s, r, p: loka.Probe(m, filter="head"), "filter is 'head'; it must be a function"),
        (lambda m, s, r, p: renew_effects(m, "stats", [X]), "stats is 'stats'; it must be a Stats"),
        (lambda m, s, r, p: merge_stats(s), "several is of type Stats; it must be a Sequence"),
        (lambda m, s, r, p: merge_stats([s, "stats"]), "one of several is 'stats'; it must be a Stats"),
        (lambda m, s, r, p: joint_effect(m, r, [X]), "the plan is of type Report; it must be a Plan"),
        (lambda m, s, r, p: drift("plan.json", s), "the plan is 'plan.json'; it must be a Plan"),
        (lambda m, s, r, p: drift(p, "stats"), "after is 'stats'; it must be a Stats"),
        (lambda m, s, r, p: drift(p, s, before=r), "before is of type Report; it must be a "),
        (lambda m, s, r, p: frontier(r, count="24"), "count is '24'; it is a number of limits"),
        (lambda m, s, r, p: loka.measure(s, device="gpu"), "device=gpu is neither a CPU nor a GPU"),
        (lambda m, s, r, p: loka.measure(s, device="meta"), "device=meta is neither a CPU nor a GPU"),
        (lambda m, s, r, p: loka.measure("stats"), "stats is 'stats'; it must be a Stats"),
        (lambda m, s, r, p: loka.measure(s, device="cpu", candidates=CANDIDATES[0]), "must be a list of names"),
        (lambda m, s, r, p: loka.plan(s), "report is of type Stats; it must be a Report"),
        (lambda m, s, r, p: loka.plan("report.json", target="package"), "report is 'report.json'; it must be a Report"),
        (lambda m, s, r, p: loka.convert(m, "plan.json"), "the plan is 'plan.json'; it must be a Plan"),
        (lambda m, s, r, p: loka.convert(p, m), "the model is of type Plan; it must be a Module"),
        (lambda m, s, r, p: loka.diff(p, r), "the plan is of type Report; it must be a Plan"),
        (lambda m, s, r, p: loka.check_finite(None), "the model is None; it must be a Module"),
    ],
)
def test_another_kind_is_told(stages, call, told):
    with pytest.raises(LokaError) as caught:
        call(*stages)
    assert told in str(caught.value)
    assert caught.value.way_out


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rows": 1.5}, "rows is 1.5; it must be a whole number"),
        ({"effect_step": "64"}, "effect_step is '64'; it must be a whole number"),
        ({"full_covariance": None}, "full_covariance is None; it must be a whole number"),
        ({"full_covariance": -1}, "full_covariance is -1; it must be at least 0"),
        ({"seed": "a"}, "seed is 'a'; it must be a whole number"),
        ({"every": "auto", "overhead": "1 %"}, "overhead is '1 %'; a share"),
        ({"base_rate": ()}, "base_rate names no share of labels"),
    ],
)
def test_numbers_of_a_probe_that_cannot_be_are_told_before_training(stages, given, told):
    """Some ended the first sampled step, in the middle of the forward pass, with an error of Python's."""
    with pytest.raises(ValueError, match=re.escape(told)):
        loka.Probe(stages[0], **given)


@pytest.mark.parametrize("rate", [float("nan"), -1.0, True, "0"])
def test_a_final_rate_that_cannot_be_is_told(stages, rate):
    """-1 passed for an annealed model, and statistics with True or a text could be saved, but not be read."""
    with pytest.raises(ValueError, match=r"final_rate is .*; it is a share"):
        renew_effects(stages[0], stages[1], [X], final_rate=rate)


def test_a_frontier_takes_a_budget_alone(stages):
    with pytest.raises(ValueError, match=r"the budget is .*; it must be a"):
        frontier(stages[2], {"ne": 1})


def test_the_number_of_a_gpu_is_told_too(stages, monkeypatch):
    """0 was taken for none given, and measured on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LokaError, match="device=0"):
        loka.measure(stages[1], device=0)


def test_a_gpu_that_is_not_there_is_told(stages, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LokaError, match="device=cuda:0: torch sees no GPU here"):
        loka.measure(stages[1], device="cuda:0")
