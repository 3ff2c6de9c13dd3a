import copy
from dataclasses import replace

import pytest
import torch
from fp8_run import AUTO, CONFIG, tower
from small_run import RandomRows

from loka.core.budget import Budget
from loka.core.exceptions import DataRefused
from loka.core.numerics.effect import Effect
from loka.train import TrainConfig, train
from loka.train.automatic import auto as auto_module
from loka.train.automatic.as_it_is import batches_needed, learn
from loka.train.automatic.auto import NE_ALLOWED, Auto
from loka.train.length import Length, unused_batches

ROWS = RandomRows(16 * 30)


def test_learning_leaves_the_model_as_it_is():
    model = tower(0)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    stats = learn(model, ROWS, config=CONFIG, base_rate=0.3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    for layer in stats.layers.values():
        assert layer.calls == 30 * 16 // (16 + batches_needed(16))
        assert "grad_output" in layer.operands
        assert layer.effects
    with pytest.raises(DataRefused, match="fewer than two batches"):
        learn(model, RandomRows(10), config=CONFIG, base_rate=0.3)


@pytest.mark.parametrize(("step", "epochs", "left"), [(0, 1, 30), (9, 1, 21), (9, 3, 21), (30, 3, 0), (45, 3, 0)])
def test_unused_rows_are_those_of_the_first_epoch(step, epochs, left):
    config = TrainConfig(batch_size=16, epochs=epochs)
    found = list(unused_batches(ROWS, config, Length.of(ROWS, config), step=step))
    assert len(found) == left
    if left:
        wanted = next(iter(ROWS.batches(16, start=step)))
        assert torch.equal(found[0].label, wanted.label)


@pytest.fixture
def seen(monkeypatch):
    found = []
    plan = auto_module.measure
    monkeypatch.setattr(auto_module, "measure", lambda stats, **o: found.append(stats) or plan(stats, **o))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("step", ["eager", "compile"])
def test_auto_plans_by_fresh_rows(step, seen, tmp_path):
    said = []
    config = replace(CONFIG, step=step)
    train(tower(0), ROWS, config=config, callback=Auto(AUTO, folder=tmp_path, say=said.append))
    assert any("that training has not used" in line for line in said)
    effects = [effect for layer in seen[0].layers.values() for effect in layer.effects.values()]
    assert {effect.count for effect in effects} == {18 * 15}, "of a batch one row has to be left out"
    assert all(effect.log_variance > 0 for effect in effects), "training goes on, and H is counted"


@pytest.mark.slow
def test_auto_without_fresh_rows_says_so(seen):
    said = []
    rows = RandomRows(16 * 5)
    train(tower(0), rows, config=replace(CONFIG, epochs=6), callback=Auto(AUTO, say=said.append))
    assert any("no row is left that was not trained on" in line for line in said)


@pytest.mark.slow  # test_auto.py has one of labels that are all alike in every run
def test_auto_promises_nothing_on_labels_that_are_all_equal(seen):
    class Clickless(RandomRows):
        def batches(self, batch_size, *, start=0):
            for batch in super().batches(batch_size, start=start):
                yield replace(batch, label=torch.zeros_like(batch.label))

    auto = Auto(replace(AUTO, budget=None))
    train(tower(0), Clickless(16 * 30), config=CONFIG, callback=auto)
    assert not auto.plan.output_recipes, "no forward GEMM in FP8 without a promise"
    assert auto.plan.budget.ne == NE_ALLOWED


@pytest.mark.slow
def test_training_with_a_renewal_is_bitwise_training_without(monkeypatch):
    quiet = replace(AUTO, budget=Budget(keep=("*",)))
    with_it, without = tower(0), tower(0)
    train(with_it, ROWS, config=CONFIG, callback=Auto(quiet))
    train(without, ROWS, config=CONFIG)
    for a, b in zip(with_it.parameters(), without.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_effect_that_is_known_exactly_has_no_variance():
    assert Effect.of([2.0] * 9, [[0.1]] * 9).sampling_variance == 0
