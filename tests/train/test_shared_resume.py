"""A run with layers that share their input resumes bit for bit, and its checkpoint holds the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fp8_run import CANDIDATES, CONFIG, digest
from small_run import IDS, RandomRows
from torch import nn

import loka
from loka.core.exceptions import CheckpointRefused
from loka.nn import health_of, shared_runs
from loka.probe import Settings
from loka.train import load_newest, train
from loka.train.state import plan_in

ROWS = RandomRows(16 * 6)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(IDS, 8, sparse=True)
        self.gate, self.up = nn.Linear(20, 32, bias=False), nn.Linear(20, 32)
        self.logit = nn.Linear(32, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = torch.cat([dense, self.table(sparse).flatten(1)], dim=1)
        return self.logit(torch.sigmoid(self.gate(x)) * self.up(x)).squeeze(1)


def gated(seed: int = 0) -> Gated:
    torch.manual_seed(seed)
    return Gated()


def test_resuming(tmp_path: Path) -> None:
    model = gated()
    with loka.Probe(model, every=1) as probe:
        batch = next(RandomRows(32).batches(32))
        model(batch.dense, batch.sparse).square().mean().backward()
    settings = Settings(rows=32, max_draws=4)
    report = loka.measure(probe.stats(), device="cpu", candidates=CANDIDATES[:1], settings=settings)
    plan = loka.plan(report, loka.Budget(chains="always"))
    assert list(plan.shared) == ["gate+up"]

    def stop(step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    straight, resumed = gated(), gated(seed=1)
    train(straight, ROWS, config=CONFIG, plan=plan)
    assert shared_runs(straight)["gate+up"].alone == 0
    with pytest.raises(KeyboardInterrupt):
        train(gated(), ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path, on_step=stop)
    assert plan_in(load_newest(tmp_path).state) == plan
    assert train(resumed, ROWS, config=CONFIG, plan=plan, checkpoints=tmp_path).resumed_from == 4
    assert digest(resumed.state_dict()) == digest(straight.state_dict())
    assert health_of(resumed) == health_of(straight)
    with pytest.raises(CheckpointRefused):  # grad_input is rounded otherwise
        train(gated(), ROWS, config=CONFIG, plan=replace(plan, shared={}), checkpoints=tmp_path)
