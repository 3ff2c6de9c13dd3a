import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fp8_run import AUTO, digest, make_plan, tower
from fp8_run import CONFIG as FP8_CONFIG
from hypothesis import example, given
from hypothesis import strategies as st
from small_run import IDS, RandomRows, small_model, stop_at
from torch import nn

from loka.core.exceptions import CheckpointRefused, LokaError
from loka.nn import fp8_runs, sites_of
from loka.train import TrainConfig, evaluate, load_newest, train
from loka.train.automatic.auto import Auto
from loka.train.average import as_averaged, averaged_weights, due
from loka.train.run import Run

CONFIG = TrainConfig(batch_size=64, precision="fp32", checkpoint_every=3, average="tail", average_share=0.3)
ROWS = RandomRows(64 * 20)
HELD_OUT = RandomRows(320, seed=9)


def recorded(config):
    model, kept = small_model(), []

    def keep(step):
        kept.append({name: weight.detach().clone() for name, weight in model.named_parameters()})

    return kept, train(model, ROWS, config=config, on_step=keep).average


def test_the_tail_is_the_mean_of_the_last_steps():
    kept, average = recorded(CONFIG)
    assert int(average.n_averaged) == 6  # 0.3 of 20 steps
    for name, mean in zip(kept[0], average.module.parameters(), strict=True):
        expected = torch.stack([weights[name].double() for weights in kept[-6:]]).mean(0)
        # A running mean in float32: a rounding of 6e-8 for each of the six.
        torch.testing.assert_close(mean.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_an_ema_forgets_with_its_time_constant():
    kept, average = recorded(replace(CONFIG, average="ema"))
    assert int(average.n_averaged) == 20
    for name, mean in zip(kept[0], average.module.parameters(), strict=True):
        expected = kept[0][name].double()
        for weights in kept[1:]:
            expected = expected + (weights[name].double() - expected) / 6
        torch.testing.assert_close(mean.detach().double(), expected, rtol=1e-6, atol=1e-6)
    long = averaged_weights(small_model(), replace(CONFIG, average="ema"), steps=100_000)
    (mean,) = means = [torch.zeros(1)]
    long.multi_avg_fn(means, [torch.ones(1)], 1)
    assert mean.item() == pytest.approx(1 / 100)


@example(steps=300, share=0.17)
@given(steps=st.integers(1, 5000), share=st.floats(0.001, 1))
def test_the_mean_covers_its_share_and_costs_few_passes(steps, share):
    config = replace(CONFIG, average_share=share)
    found = [done for done in range(1, steps + 1) if due(done, steps, config)]
    span = max(math.ceil(steps * share * (1 - 1e-12)), 1)  # 300 * 0.17 is a little more than 51 in float64
    assert found[-1] == steps
    assert found[0] > steps - span
    assert 1 <= len(found) < 200
    assert span - (steps - found[0]) <= max(span // 100, 1)  # nothing of the share is left out but a gap


@pytest.mark.parametrize("kind", ["tail", "ema"])
@pytest.mark.parametrize("stop", [5, 17])
def test_a_killed_run_ends_with_the_same_mean(tmp_path, kind, stop):
    config = replace(CONFIG, average=kind)

    _, straight = recorded(config)
    with pytest.raises(MemoryError):
        train(small_model(), ROWS, config=config, checkpoints=tmp_path, on_step=stop_at(stop, MemoryError))
    result = train(small_model(seed=9), ROWS, config=config, checkpoints=str(tmp_path))
    assert result.resumed_from == stop - stop % 3
    assert digest(dict(result.average.state_dict())) == digest(dict(straight.state_dict()))
    again = train(small_model(seed=9), ROWS, config=config, checkpoints=tmp_path)  # nothing is left to do
    assert digest(dict(again.average.state_dict())) == digest(dict(straight.state_dict()))


@pytest.mark.parametrize("kept", [{"average": None}, {"average": {"n_averaged": 3}}, {}])
def test_a_state_without_the_mean_is_refused(tmp_path, kept):
    Run(small_model(), CONFIG, steps=20).save(tmp_path, beside={}, identity={})
    found = load_newest(tmp_path)
    del found.state["average"]
    with pytest.raises(CheckpointRefused, match="does not fit this model"):
        Run(small_model(), CONFIG, steps=20).restore(replace(found, state={**found.state, **kept}))


def test_training_is_the_same_with_and_without():
    models = [small_model(), small_model()]
    for model, kind in zip(models, ("none", "tail"), strict=True):
        train(model, ROWS, config=replace(CONFIG, average=kind))
    assert digest(models[0].state_dict()) == digest(models[1].state_dict())


def test_it_is_judged_inside_the_model_which_is_put_back():
    model = small_model()
    average = train(model, ROWS, config=CONFIG).average
    before, mean = digest(model.state_dict()), digest(dict(average.state_dict()))
    plain, _ = evaluate(model, HELD_OUT, batch_size=64)
    twin = small_model(seed=3)
    twin.load_state_dict(model.state_dict())
    twin.largest.copy_(model.largest)
    with torch.no_grad():
        for weight, value in zip(twin.parameters(), average.module.parameters(), strict=True):
            weight.copy_(value)
    expected, _ = evaluate(twin, HELD_OUT, batch_size=64)
    with as_averaged(model, average, config=CONFIG):
        found, _ = evaluate(model, HELD_OUT, batch_size=64)
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, plain)
    assert digest(model.state_dict()) == before
    assert digest(dict(average.state_dict())) == mean
    with pytest.raises(ZeroDivisionError), as_averaged(model, average, config=CONFIG):
        raise ZeroDivisionError
    assert digest(model.state_dict()) == before


def test_a_model_in_fp8_is_judged_in_fp8_and_keeps_its_counts():
    config = replace(FP8_CONFIG, average="tail", average_share=0.5)
    rows, model = RandomRows(16 * 20), tower()
    average = train(model, rows, config=config, plan=make_plan()).average
    assert sites_of(model)
    plain = evaluate(model, HELD_OUT, batch_size=16)[0]
    runs = fp8_runs(model)
    with as_averaged(model, average, config=config):
        mean, _ = evaluate(model, HELD_OUT, batch_size=16)
        assert sum(fp8_runs(model).values()) > sum(runs.values())
    assert np.abs(mean - plain).max() > 1e-4
    assert fp8_runs(model) == runs
    assert np.array_equal(evaluate(model, HELD_OUT, batch_size=16)[0], plain)


@pytest.mark.slow
def test_the_mean_goes_through_auto_and_its_conversion_to_the_bit(tmp_path):
    """From bf16 to FP8 in one run, killed on either side of the turn; the mean is judged in FP8."""
    rows, config = RandomRows(16 * 30), replace(FP8_CONFIG, average="tail", average_share=0.8)

    def trained(folder, stop=0, seed=0):
        model = tower(seed)
        end = stop_at(stop, MemoryError)
        return model, train(model, rows, config=config, callback=Auto(AUTO), checkpoints=folder, on_step=end)

    straight, expected = trained(None)
    for stop in (8, 22):
        with pytest.raises(MemoryError):
            trained(tmp_path, stop)
    model, found = trained(tmp_path, seed=1)
    assert found.resumed_from == 21
    assert found.plan is not None
    assert digest(dict(found.average.state_dict())) == digest(dict(expected.average.state_dict()))
    with as_averaged(model, found.average, config=config), as_averaged(straight, expected.average, config=config):
        logits = [evaluate(m, HELD_OUT, batch_size=16, precision="bf16")[0] for m in (model, straight)]
    assert np.array_equal(*logits)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(IDS, 4, sparse=True)
        self.first, self.norm, self.last = nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, dense, sparse):
        x = torch.cat([dense, self.table(sparse).flatten(1)], dim=1)
        return self.last(self.norm(self.first(x)).relu()).squeeze(1)


def test_batch_norm_gets_the_statistics_of_the_mean():
    torch.manual_seed(0)
    model, config = Normed(), replace(CONFIG, lr=0.1, schedule="constant")
    average = train(model, ROWS, config=config).average
    before = digest(model.state_dict())
    with pytest.raises(LokaError, match="BatchNorm's statistics"), as_averaged(model, average, config=config):
        pass
    model.norm.eval()  # a mode of one layer's own stays
    with as_averaged(model, average, rows=ROWS, config=config):
        seen = torch.cat(
            [model.first(torch.cat([b.dense, model.table(b.sparse).flatten(1)], 1)) for b in ROWS.batches(64)]
        )
        # update_bn takes the mean over batches of equal size: the mean over rows, up to rounding.
        torch.testing.assert_close(model.norm.running_mean, seen.mean(0), rtol=1e-4, atol=1e-5)
        assert (model.training, model.norm.training) == (True, False)
    assert digest(model.state_dict()) == before


def test_a_mean_in_few_bits_is_refused():
    with pytest.raises(LokaError, match=r"rounded away: table\.weight, mlp\.0\.weight"):
        averaged_weights(small_model().bfloat16(), CONFIG, 20)
    assert averaged_weights(small_model().bfloat16(), replace(CONFIG, average="none"), 20) is None


def test_an_empty_mean_is_refused():
    model = small_model()
    empty = averaged_weights(model, CONFIG, 20)
    with pytest.raises(LokaError, match="nothing was averaged"), as_averaged(model, empty, config=CONFIG):
        pass
