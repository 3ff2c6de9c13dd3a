"""What is of another kind than a stage asks for is told by name, where a missing attribute was."""

import pytest
import torch
from models import stats_of
from torch import nn

import loka
from loka.core.exceptions import LokaError

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


def test_a_gpu_that_is_not_there_is_told(stages, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LokaError, match="device=cuda:0: torch sees no GPU here"):
        loka.measure(stages[1], device="cuda:0")
