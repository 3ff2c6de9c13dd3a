from dataclasses import replace

import pytest
import torch
from fp8_run import AUTO, CONFIG, PROBED, digest, tower
from ranks import on_ranks
from small_run import RandomRows, stop_at
from sweeps import sweep
from torch.nn.parallel import DistributedDataParallel

from loka.core.error import Estimate
from loka.nn import sites_of
from loka.train import train
from loka.train.automatic import auto as module
from loka.train.automatic import pace
from loka.train.automatic.auto import Auto
from loka.train.automatic.pace import KEPT, Pace, gain, pace_on, worth_it

STEPS, VERDICT = 24, PROBED + 6
ROWS = RandomRows(16 * STEPS)


class Clock(Pace):
    now = 0.0

    def _now(self):
        return Mark(self.now)


class Mark(float):
    def synchronize(self):
        pass


class Scripted:
    """Milliseconds of a step, at each reading."""

    def __init__(self, *milliseconds):
        self.left, self.counted = list(milliseconds), []

    def step(self, *, counts):
        self.counted.append(counts)

    def read(self):
        found = self.left.pop(0)
        return found and Estimate(found, 0.99 * found, 1.01 * found)


_REPORTS, measure = [], module.measure


def measured_once(*args, out, **options):
    if not _REPORTS:
        _REPORTS.append(measure(*args, **options))
    return _REPORTS[0]


def on_a_gpu(monkeypatch, *milliseconds):
    scripted = Scripted(*milliseconds)
    monkeypatch.setattr(module, "measure", measured_once)
    monkeypatch.setattr(module, "renewed", lambda run, stats, looks, **options: stats)  # no look at fresh rows
    monkeypatch.setattr(module, "pace_on", lambda device: scripted)
    monkeypatch.setattr(module, "SETTLED", 2)
    monkeypatch.setattr(module, "KEPT", VERDICT - PROBED - 2)
    return scripted


def run(config=AUTO, *, model=None, folder=None, **others):
    model, said = model or tower(), []
    auto = Auto(config, folder=folder, say=said.append)
    if folder is not None:
        others["checkpoints"] = folder / "checkpoints"
    result = train(model, others.pop("rows", ROWS), callback=auto, **{"config": CONFIG, **others})
    return model, auto, result, said


def phases(auto):
    return [(event.phase, event.step) for event in auto.timeline.events]


@pytest.mark.parametrize("by_the_plan", sweep([10.5, 10.0, 9.9], [9.9]))
def test_a_plan_that_is_not_surely_faster_is_taken_back(by_the_plan, monkeypatch):
    scripted = on_a_gpu(monkeypatch, 10.0, by_the_plan)
    model, auto, result, said = run()
    assert phases(auto) == [("probe", 0), ("measure", PROBED), ("fp8", PROBED), ("bf16", VERDICT), ("end", STEPS)]
    assert not sites_of(model)
    assert result.plan is auto.plan is None
    assert f"step {VERDICT}: back in bf16: a step takes {by_the_plan:.3g} ms by the plan, 10 before" in said[-1]
    assert "back from the plan" in auto.timeline.events[3].note
    assert [place for place, counts in enumerate(scripted.counted) if not counts] == [0, 3, 6, 9]  # sampled


@pytest.mark.slow
def test_a_plan_that_is_faster_stays_and_so_does_one_that_may_be_slow(monkeypatch):
    on_a_gpu(monkeypatch, 10.0, 9.0)
    model, auto, _, said = run()
    assert (auto.phase, bool(sites_of(model))) == ("fp8", True)
    assert "1.111x [1.089, 1.134]" in said[-1]
    assert "1.111x" in auto.timeline.events[-1].note
    on_a_gpu(monkeypatch, 10.0, 30.0)
    model, auto, _, said = run(replace(AUTO, budget=replace(AUTO.budget, min_speedup=0.0)))
    assert (auto.phase, bool(sites_of(model))) == ("fp8", True)


@pytest.mark.slow
def test_of_too_few_steps_nothing_is_said_to_be_known(monkeypatch):
    for milliseconds in ((None, 9.0), (10.0, None)):
        on_a_gpu(monkeypatch, *milliseconds)
        _, auto, _, said = run()
        assert auto.phase == "fp8"
        assert "too few steps were timed" in said[-1]


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_its_verdict(monkeypatch, tmp_path):
    on_a_gpu(monkeypatch, 10.0)
    with pytest.raises(Killed):
        run(folder=tmp_path, on_step=stop_at(VERDICT - 2, Killed))
    on_a_gpu(monkeypatch, 11.0)  # of the plan; those of bf16 lie in the checkpoint
    model, auto, result, _ = run(folder=tmp_path)
    assert phases(auto)[-2:] == [("bf16", result.resumed_from + VERDICT - PROBED), ("end", STEPS)]
    assert not sites_of(model)
    monkeypatch.undo()
    on_a_gpu(monkeypatch, 10.0)
    with pytest.raises(Killed):
        run(folder=tmp_path / "cpu", on_step=stop_at(VERDICT - 2, Killed))
    monkeypatch.undo()  # and where nothing is timed it goes on without
    assert run(folder=tmp_path / "cpu")[1].phase == "fp8"


@pytest.mark.slow
def test_back_in_bf16_it_trains_as_bf16_does(monkeypatch, tmp_path):
    """From the verdict on: as a run that goes on from there without any plan."""
    on_a_gpu(monkeypatch, 10.0, 11.0)
    with pytest.raises(Killed):
        run(folder=tmp_path, on_step=stop_at(VERDICT + 1, Killed))
    on_a_gpu(monkeypatch)
    model, auto, result, _ = run(folder=tmp_path)
    assert (auto.phase, auto.plan, result.plan, result.resumed_from) == ("bf16", None, None, VERDICT)
    on_a_gpu(monkeypatch, 10.0, 11.0)
    assert digest(run()[0].state_dict()) == digest(model.state_dict())


@pytest.mark.slow
def test_steps_of_other_rows_are_not_compared(monkeypatch, tmp_path):
    """A run may go on with other ranks, each of which has other rows in a step."""
    on_a_gpu(monkeypatch, 10.0)
    with pytest.raises(Killed):
        run(folder=tmp_path, on_step=stop_at(VERDICT - 2, Killed))
    on_a_gpu(monkeypatch, 18.0)
    state, restore = {}, Auto.restore
    monkeypatch.setattr(
        Auto, "restore", lambda self, given: restore(self, state.update(given) or {**given, "ranks": 2})
    )
    _, auto, _, said = run(folder=tmp_path)
    assert (state["ranks"], auto.phase) == (1, "fp8")
    assert "too few steps were timed" in said[-1]


def ranks_that_disagree(rank, folder):
    with pytest.MonkeyPatch.context() as patch:
        on_a_gpu(patch, 10.0, 11.0 - 2 * rank)
        model, auto, _, _ = run(model=DistributedDataParallel(tower()), folder=folder, rows=RandomRows(16 * STEPS))
    return {"phases": phases(auto), "fp8": [*sites_of(model.module)]}


@pytest.mark.slow
def test_rank_0_decides_for_all(tmp_path):
    first, second = on_ranks(ranks_that_disagree, 2, tmp_path)
    assert first == second
    assert (list(first["phases"][3]), first["fp8"]) == (["bf16", VERDICT], [])


def test_steps_from_begin_to_begin(monkeypatch):
    monkeypatch.setattr(pace, "elapsed", lambda begin, end: 1e3 * (end - begin))
    clock = Clock(torch.device("cpu"))
    for step in range(4 * KEPT):
        clock.step(counts=(counts := step % 3 == 0))
        clock.now += 10.0 if counts else 30.0
    assert len(clock._steps) == KEPT
    found = clock.read()
    assert (found.value, found.low, found.high) == (10.0, 10.0, 10.0)
    assert clock.read() is None  # they are forgotten
    assert pace_on(torch.device("cpu")) is None


def test_steps_that_are_alike_for_a_while_count_once(monkeypatch):
    """Noise of 2 % that lasts: by 64 steps one by one, a plan that gains nothing surely gained in 19 % of runs."""
    monkeypatch.setattr(pace, "elapsed", lambda begin, end: 1e3 * (end - begin))
    generator, kept = torch.Generator().manual_seed(0), 0

    def of_a_run():
        noise, at, marks = 0.0, 0.0, []
        for draw in torch.randn(KEPT, generator=generator).tolist():
            noise = 0.9 * noise + (1 - 0.9**2) ** 0.5 * draw
            marks.append((Mark(at), Mark(at := at + 10 * (1 + 0.02 * noise))))
        clock = Clock(torch.device("cpu"))
        clock._steps.extend(marks)
        return clock.read()

    for _ in range(200):
        kept += worth_it(gain(of_a_run(), of_a_run()), 1.05)
    assert kept / 200 < 0.06  # 0.025 by the interval, were eights independent; they nearly are


def test_what_a_gain_may_be():
    found = gain(Estimate(10.0, 9.0, 11.0), Estimate(8.0, 7.5, 8.5))
    assert (found.value, found.low, found.high) == (1.25, 9.0 / 8.5, 11.0 / 7.5)
    assert worth_it(found, 1.05)
    assert worth_it(Estimate(0.95, 0.93, 0.97), 0.9)
    assert not worth_it(Estimate(1.008, 1.006, 1.01), 1.05)
    assert not worth_it(Estimate(1.02, 0.99, 1.05), 1.05)
