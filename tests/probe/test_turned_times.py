"""Layers over tokens: noticed by the probe, timed in both forms, planned where faster, and put in."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from timers import FakeTimer, install
from torch import nn

import loka
from loka.core.report import HP
from loka.nn.turned import TurnedLinear, turned_linears
from loka.probe import Settings, turned_times
from loka.probe.turned_times import TURNED, TokenMap, time_turned, turned_key

pytestmark = pytest.mark.usefixtures("forced_fusion")

SETTINGS = Settings(rows=32, min_draws=2, max_draws=2)


class Tokens(nn.Module):
    """A map over tokens, an MLP over what they hold, and a layer that reads both layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(6, 4)
        self.mixed = nn.Linear(16, 16)
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.over(x.transpose(1, 2)).transpose(1, 2)  # [B, 4, 16]
        x = x + self.mixed(x.contiguous()) + self.mixed(x.mT.contiguous().mT)
        return self.head(x.flatten(1)).squeeze(1)


@pytest.fixture
def stats() -> loka.Stats:
    torch.manual_seed(0)
    model = Tokens()
    with loka.Probe(model, every=1) as probe:
        for _ in range(2):
            model(torch.randn(8, 6, 16)).sum().backward()
    return probe.stats()


def test_the_probe_notices_how_inputs_lie(stats: loka.Stats, tmp_path: Path) -> None:
    assert {path: layer.turned for path, layer in stats.layers.items()} == {"over": 16, "mixed": 0, "head": 0}
    stats.save(tmp_path)
    assert loka.Stats.load(tmp_path).layers["over"].turned == 16
    plain = dataclasses.replace(
        stats, layers={path: dataclasses.replace(layer, turned=0) for path, layer in stats.layers.items()}
    )
    assert plain.digest() != stats.digest()


@pytest.mark.parametrize("how", ["view", "flatten", "transpose", "bmm"])
def test_an_output_that_is_viewed_stays_contiguous(how: str) -> None:
    """Of a transposed view, `view` would be an error."""

    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over, self.head = nn.Linear(6, 4), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.over(x.transpose(1, 2))  # [B, 16, 4]
            if how == "view":
                y = y.view(len(x), -1)
            elif how == "flatten":
                y = y.flatten(1)
            elif how == "bmm":
                y = torch.bmm(y, y.mT)[:, :, :4].reshape(len(x), -1)
            else:
                y = y.transpose(1, 2).flatten(1)
            return self.head(y).squeeze(1)

    model = Viewing()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        for _ in range(2):
            model(torch.randn(8, 6, 16)).sum().backward()
    assert probe.stats().layers["over"].turned == (16 if how in ("transpose", "bmm") else 0)


def test_a_kept_layer_stays_as_it_is(stats: loka.Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(stats, monkeypatch, 50.0)
    assert loka.plan(report, force={"*": HP}).turned
    assert not loka.plan(report, loka.Budget(keep=("over",)), force={"*": HP}).turned


def measured(stats: loka.Stats, monkeypatch: pytest.MonkeyPatch, microseconds: float) -> loka.Report:
    timer = install(monkeypatch, FakeTimer({TURNED: microseconds}))
    measure = sys.modules["loka.probe.measure"]
    monkeypatch.setattr(turned_times.TokenMap, "compile", lambda self, **options: None)
    monkeypatch.setattr(measure, "time_turned", time_turned)
    from loka.probe import chain_times

    monkeypatch.setattr(chain_times, "time_interleaved", timer)
    report = loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"], settings=SETTINGS)
    assert [HP, TURNED] in timer.races
    return report


def test_faster_is_planned_converted_and_reverted(
    stats: loka.Stats, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = measured(stats, monkeypatch, 50.0)
    assert set(report.turned_times) == {"over"}
    report.save(tmp_path / "report.json")
    assert loka.Report.load(tmp_path / "report.json").turned_times == report.turned_times
    plan = loka.plan(report, loka.Budget(chains="never"), force={"*": HP})
    assert plan.turned["over"].value == pytest.approx(2.0, rel=0.02)
    plan.save(tmp_path / "plan.json")
    plan = loka.Plan.load(tmp_path / "plan.json")
    assert "over: reads its transposed input as it lies, 2.0" in str(plan)
    torch.manual_seed(0)
    model, x = Tokens(), torch.randn(3, 6, 16)
    expected, keys = model(x), list(model.state_dict())
    loka.convert(model, plan)
    assert set(turned_linears(model)) == {"over"}
    assert list(model.state_dict()) == keys
    assert torch.allclose(model(x), expected, atol=1e-5)
    with pytest.raises(loka.LokaError, match="already runs a plan"):
        loka.convert(model, plan)
    loka.revert(model)
    assert type(model.over) is nn.Linear
    with pytest.raises(loka.LokaError, match="convert it first"):
        loka.revert(model)


def test_slower_equal_or_in_fp8_is_left(stats: loka.Stats, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not loka.plan(measured(stats, monkeypatch, 100.0), force={"*": HP}).turned
    assert not loka.plan(measured(stats, monkeypatch, 130.0), force={"*": HP}).turned
    report = measured(stats, monkeypatch, 50.0)
    forced = loka.plan(report, force={"over/output": "emulated:rowwise_e4m3", "*": HP})
    assert not forced.turned
    model = loka.convert(Tokens(), forced)
    assert not isinstance(model.over, TurnedLinear)


def test_what_races_is_the_layer_between_two_transpositions(stats: loka.Stats) -> None:
    layer, shape = stats.layers["over"], stats.model.layers["over"]
    own = TokenMap(shape, layer.turned)
    x = torch.randn(layer.rows // layer.turned, shape.in_features * layer.turned)
    tokens = x.view(-1, shape.in_features, layer.turned)
    expected = own.linear(tokens.mT).mT.flatten(1)
    assert torch.equal(own(x), expected)
    other = dataclasses.replace(layer, rows=2 * layer.rows)
    assert turned_key(layer, shape) != turned_key(other, shape)
    assert turned_key(layer, shape) == turned_key(dataclasses.replace(layer, order=9), shape)
