"""The valve closes what FP8 no longer represents, nothing else, and is resumed with the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_run import CONFIG, digest, make_plan, tower
from small_run import RandomRows

from loka.core.plan import Plan
from loka.core.report import HP
from loka.data.batch import Batch
from loka.nn import chain_snapshot, sites_of
from loka.nn.chain import running_chains
from loka.train import Run, load_newest, train
from loka.train.state import plan_in
from loka.train.valve import Valve, ValveConfig, without

pytestmark = pytest.mark.usefixtures("forced_fusion")

VALVE = ValveConfig(every=10, watch=3)
STEPS = 40


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan()


@dataclass(frozen=True)
class Moving(RandomRows):
    """Rows whose dense features change from a step on."""

    rows: int = 16 * STEPS
    move: Callable[[torch.Tensor, int], torch.Tensor] = lambda dense, step: dense

    def batches(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        for step, batch in enumerate(super().batches(batch_size, start=start), start):
            yield replace(batch, dense=self.move(batch.dense, step))


def jumping(dense: torch.Tensor, step: int) -> torch.Tensor:
    """16 times as large at each of the steps 27, 28, 29: more than the octave that delayed scales leave."""
    return dense * 16.0 ** max(0, min(step, 29) - 26)


def spreading(dense: torch.Tensor, step: int) -> torch.Tensor:
    """From step 15 on three of four dense columns are 2^-20 of the others: e4m3 has 18 octaves."""
    return dense if step < 15 else dense * torch.tensor([1.0, 2**-20, 2**-20, 2**-20])


def trained(plan: Plan, move: Any, *, valve: Valve | None = None, **others: Any) -> Any:
    model = tower(seed=others.pop("seed", 0))
    valve = valve or Valve(VALVE)
    result = train(model, Moving(move=move), config=CONFIG, plan=plan, companion=valve, **others)
    return model, valve, result


@pytest.mark.parametrize(
    ("move", "closed", "step", "why"),
    [
        (jumping, "mlp.0", 30, "of its elements saturate"),
        (spreading, "mlp.0", 20, "15% of its elements become zero, 0% before"),
    ],
)
def test_what_drifts_is_closed_and_the_rest_goes_on(plan: Plan, move, closed, step, why) -> None:
    model, valve, result = trained(plan, move)
    assert list(valve.closed) == [closed]
    assert valve.closed[closed].startswith(f"step {step}: mlp.0/input: ")
    assert why in valve.closed[closed]
    assert list(running_chains(model)) == list(result.plan.chains) == ["mlp.4"]
    assert list(sites_of(model)) == ["side"]
    decided = [d for d in result.plan.decisions.values() if d.path == "mlp.0"]
    assert [d.candidate for d in decided] == [HP] * 3
    assert "closed by the valve" in decided[0].reason


def test_what_is_not_closed_keeps_its_scales(plan: Plan) -> None:
    """The chain that stays has, a step after, the history that it would have had with no valve at all
    but for what the other chain's rounding changes: one more maximum, not sixteen equal ones."""
    seen: dict[int, Any] = {}

    class Watching(Valve):
        def after(self, run: Run) -> None:
            before = chain_snapshot(run.model)
            super().after(run)
            seen[run.step] = before, chain_snapshot(run.model)

    trained(plan, jumping, valve=Watching(VALVE))
    before, after = seen[30]
    assert set(before) - set(after) == {"mlp.0/input", "mlp.0/grad_output", "mlp.0/weight"}
    assert {name: before[name] for name in after} == after


def test_a_steady_run_is_left_alone(plan: Plan) -> None:
    quiet = tower()
    train(quiet, Moving(), config=CONFIG, plan=plan)
    model, valve, result = trained(plan, lambda dense, step: dense)
    assert not valve.closed
    assert digest(model.state_dict()) == digest(quiet.state_dict())
    assert result.plan.to_json() == plan.to_json()


def test_outside_of_what_it_watches_nothing_is_counted(plan: Plan) -> None:
    model, _, _ = trained(plan, lambda dense, step: jumping(dense, step - 10 * (step > 29) - 5))
    counts = chain_snapshot(model)
    assert all(slot["saturated"] == 0 for name, slot in counts.items() if name.endswith("input"))


@pytest.mark.parametrize("stop", [28, 30, 33])
def test_a_valve_resumes_with_its_run(tmp_path: Path, plan: Plan, stop: int) -> None:
    """In the middle of counting, as it closes, and after, by the plan that is left."""

    def on_step(step: int) -> None:
        if step == stop:
            raise KeyboardInterrupt

    straight, whole, _ = trained(plan, jumping)
    with pytest.raises(KeyboardInterrupt):
        trained(plan, jumping, checkpoints=tmp_path, on_step=on_step)
    saved = load_newest(tmp_path).state
    left = plan_in(saved)
    assert plan_in(saved, "given_plan").to_json() == plan.to_json()
    assert list(left.chains) == (["mlp.0", "mlp.4"] if stop < 30 else ["mlp.4"])
    model, valve, result = trained(plan, jumping, checkpoints=tmp_path, seed=1)
    assert result.resumed_from == stop
    assert valve.closed == whole.closed
    assert digest(model.state_dict()) == digest(straight.state_dict())
    assert chain_snapshot(model) == chain_snapshot(straight)


def test_what_drifts_on_any_rank_is_closed_on_all(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def together(work: Callable[[], Any], say: Callable[[Any], str] = str) -> tuple[Any, list[str]]:
        found = work()
        other = json.dumps({"mlp.4": "of rank 0"}) if isinstance(found, dict) else ""
        return found, [other, say(found)]

    monkeypatch.setattr("loka.train.valve.together", together)
    model, valve, _ = trained(plan, jumping)
    assert list(valve.closed) == ["mlp.4", "mlp.0"], "the other's at its first look, this one's at its third"
    assert not running_chains(model)


def test_without_nothing_is_the_plan(plan: Plan) -> None:
    assert without(plan, {}).to_json() == plan.to_json()


@pytest.mark.parametrize("wrong", [{"watch": 0}, {"watch": 301}, {"saturated": 2.0}, {"underflowed": -0.1}])
def test_config_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ValveConfig(**wrong)
