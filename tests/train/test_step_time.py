"""Timing a model's step, with a stand-in for the race: what runs, what is kept, what fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from loka.cli.app import app
from loka.core.error import Estimate
from loka.core.files import read_record
from loka.core.timing import Race, Timing
from loka.data import SyntheticClicks
from loka.train import step_time
from loka.train.step_time import Arm, StepTime, compiled, time_steps
from loka.zoo import build

CPU = torch.device("cpu")
ONE = Estimate(1.0, 1.0, 1.0)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Runs every function of a race once and says that all take a microsecond."""
    found: list[dict[str, float]] = []

    def race(functions: Mapping[str, Callable[[], torch.Tensor]], **options: object) -> Race:
        found.append({name: float(function().detach()) for name, function in functions.items()})
        timing = Timing(microseconds=ONE, speedup=ONE, rounds=9)
        timings = dict.fromkeys(functions, timing)
        return Race(timings=timings, samples={}, winner="", rounds=9, ended="decided")

    monkeypatch.setattr(step_time, "time_interleaved", race)
    monkeypatch.setattr(step_time, "has_graphs", lambda device: True)
    return found


def wukong() -> nn.Module:
    torch.manual_seed(0)
    source = SyntheticClicks(rows=64, seed=0)
    return build("wukong", dense_features=source.dense_features, vocab_sizes=source.vocab_sizes)


def test_a_step_is_that_of_training_but_for_the_tables(losses: list[dict[str, float]]) -> None:
    batch = next(iter(SyntheticClicks(rows=64, seed=0).batches(32)))
    built: list[nn.Module] = []

    def make() -> nn.Module:
        built.append(wukong())
        return built[-1]

    time_steps(Arm(name="bf16", build=make), {}, batch, device=CPU, compile_blocks=False)
    plain = wukong()
    with torch.autocast("cpu", torch.bfloat16):
        logits = plain(batch.dense, batch.sparse)
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.label)
    loss.backward()
    assert losses == [{"bf16": float(loss.detach()), "again": float(loss.detach())}]
    expected = dict(plain.named_parameters())
    for name, parameter in built[0].named_parameters():
        if "table" in name:
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, expected[name].grad), name


def test_an_arm_that_fails_is_a_result_and_the_others_go_on(losses: list[dict[str, float]]) -> None:
    batch = next(iter(SyntheticClicks(rows=64, seed=0).batches(8)))

    def broken() -> nn.Module:
        raise RuntimeError("no such kernel\nand more")

    told: list[StepTime] = []
    arms = {
        "broken": Arm(name="broken", build=broken),
        "other": Arm(name="other", build=wukong, count=lambda model: 7),
    }
    base = Arm(name="bf16", build=wukong)
    found = time_steps(base, arms, batch, device=CPU, compile_blocks=False, on_result=told.append)
    assert list(found) == ["bf16", "broken", "other"]
    assert [result.name for result in told] == ["bf16", "broken", "other"]
    assert found["broken"].failure == "RuntimeError: no such kernel"
    assert found["other"].low_precision == 7
    assert list(losses[-1]) == ["bf16", "other"], "each arm races against the baseline alone"


def test_off_a_gpu_it_says_so() -> None:
    batch = next(iter(SyntheticClicks(rows=8, seed=0).batches(8)))
    with pytest.raises(ValueError, match="CUDA graphs"):
        time_steps(Arm(name="bf16", build=wukong), {}, batch, device=CPU)


def test_blocks_are_compiled_and_tables_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(self))
    model = compiled(wukong())
    assert {id(module) for module in asked} == {id(m) for m in (*model.layers, model.top)}
    asked.clear()
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    encoder = compiled(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    assert {id(module) for module in asked} == {id(module) for module in encoder.layers}


def test_bench_step_from_the_command_line(losses: list[dict[str, float]], tmp_path: Path) -> None:
    """On a CPU with the check lifted: probe, measure, plan, every arm; torchao is not installed here."""
    command = ["bench", "step", "--model", "wukong", "--batch-size", "32", "--device", "cpu", "--eager"]
    command += ["--candidate", "emulated:rowwise_e4m3", "--candidate", "torch:tensorwise_e4m3"]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0
    path = tmp_path / "step.json"
    arms = read_record(path, kind="loka-bench-step", version=1, way_out="", parse=lambda c: c["arms"])
    assert next(iter(arms)) == "bf16"
    assert arms["dispatch (plan)"]["low_precision"] > 0
    assert arms["dispatch (plan)"]["failure"] is None
    assert "MissingLibrary" in arms["torchao rowwise"]["failure"]
    assert "torchao rowwise, its filter" in (tmp_path / "step.txt").read_text()
    assert (tmp_path / "plan.json").exists()


def test_bench_step_refuses_an_unknown_arm(tmp_path: Path, losses: list[dict[str, float]]) -> None:
    command = ["bench", "step", "--model", "wukong", "--device", "cpu", "--batch-size", "32"]
    done = CliRunner().invoke(app, [*command, "--arm", "magic", "--out", str(tmp_path)])
    assert "no arm is called magic" in str(done.exception)
    assert "dispatch (plan)" in str(done.exception)
