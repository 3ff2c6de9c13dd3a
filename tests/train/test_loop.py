from dataclasses import replace

import numpy as np
import pytest
import torch
from small_run import RandomRows, small_model
from torch import nn

from loka.core.exceptions import DataRefused, NonFinite
from loka.train import TrainConfig, evaluate, quality, train

CONFIG = TrainConfig(batch_size=64, precision="fp32", log_every=4)


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 1)
        self.seen = []

    def forward(self, dense, sparse):
        logits = self.fc(dense).squeeze(1)
        self.seen.append(logits.detach().float())
        return logits


def labels(rows, passes=1):
    return torch.cat([batch.label for _ in range(passes) for batch in RandomRows(rows).batches(64)])


def test_reported_ne_is_of_predictions_before_the_update():
    model, logs = Probe(), []
    result = train(model, RandomRows(), config=CONFIG, on_log=logs.append)
    predicted = torch.cat(model.seen)
    whole = quality(predicted, labels(1000)).ne
    # Losses are summed in float64 but each is float32: 6e-8 relative.
    assert result.train_ne == pytest.approx(whole, rel=1e-6)
    assert result.rows == 1000
    assert [log.step for log in logs] == [4, 8, 12, 16]
    assert logs[1].ne == pytest.approx(quality(predicted[:512], labels(1000)[:512]).ne, rel=1e-6)
    assert logs[1].recent_ne == pytest.approx(quality(predicted[256:512], labels(1000)[256:512]).ne, rel=1e-6)


def test_training_learns():
    config = replace(CONFIG, epochs=3, lr=0.01)
    model = small_model()
    train(model, RandomRows(3000), config=config)
    held_out = RandomRows(2000, seed=8)
    assert quality(*evaluate(model, held_out, batch_size=512)).ne < 0.9
    assert quality(*evaluate(small_model(), held_out, batch_size=512)).ne > 1.0


def test_two_runs_are_equal_and_the_seed_matters():
    def weights(seed):
        model = small_model()
        train(model, RandomRows(), config=replace(CONFIG, seed=seed))
        return model.mlp[0].weight

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))  # dropout


def test_first_update_is_adam_on_the_mean_loss_with_warmup():
    model = Probe()
    start = model.fc.weight.detach().clone()
    train(model, RandomRows(), config=replace(CONFIG, max_rows=64, warmup=0.0, lr=0.01))
    # Adam's first step is lr * sign(gradient), whatever the scale of the loss.
    moved = (model.fc.weight.detach() - start).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-3, atol=0)

    model = Probe()
    start = model.fc.weight.detach().clone()
    rates = []

    def note(step):
        rates.append((model.fc.weight.detach() - start).abs().max().item())

    train(model, RandomRows(640), config=replace(CONFIG, warmup=0.5, lr=0.01), on_step=note)
    assert rates[0] == pytest.approx(0.01 / 5, rel=1e-3)  # 10 steps, 5 of them warm-up


@pytest.mark.parametrize(
    ("rows", "epochs", "max_rows", "expected"),
    [
        (1000, 1, None, [64] * 15 + [40]),
        (128, 2, None, [64] * 4),
        (100, 3, None, [64, 36] * 3),
        (100, 2, 150, [64, 36, 50]),
        (100, 2, 200, [64, 36] * 2),
        (100, 1, 70, [64, 6]),
        (100, 1, 64, [64]),
        (100, 1, 10, [10]),
    ],
)
def test_rows_and_steps(rows, epochs, max_rows, expected):
    model = Probe()
    config = replace(CONFIG, epochs=epochs, max_rows=max_rows)
    result = train(model, RandomRows(rows), config=config)
    assert [len(logits) for logits in model.seen] == expected
    assert (result.steps, result.rows) == (len(expected), sum(expected))


def test_bf16_autocasts_the_model_but_not_weights_or_loss():
    dtypes = []
    model = small_model()
    model.mlp[0].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    train(model, RandomRows(128), config=replace(CONFIG, precision="bf16"))
    assert set(dtypes) == {torch.bfloat16}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    logits, _ = evaluate(model, RandomRows(128), batch_size=64, precision="bf16")
    assert logits.dtype == np.float32
    assert set(dtypes) == {torch.bfloat16}


def test_grad_clip_bounds_the_dense_gradients():
    norms = []
    model = small_model()

    def note(step):
        norms.append(torch.cat([w.grad.flatten() for w in model.mlp.parameters()]).norm().item())

    train(model, RandomRows(320), config=replace(CONFIG, grad_clip=1e-3), on_step=note)
    assert max(norms) == pytest.approx(1e-3, rel=1e-3)


def poison(model, at):
    def on_step(step):
        if step == at:
            with torch.no_grad():
                model.mlp[0].weight[0, 0] = torch.nan

    return on_step


def test_a_nan_loss_raises_at_the_next_log_line_and_is_not_saved(tmp_path):
    model = small_model()
    config = replace(CONFIG, checkpoint_every=4)
    with pytest.raises(NonFinite, match="between steps 4 and 8"):
        train(model, RandomRows(), config=config, checkpoints=tmp_path, on_step=poison(model, 5))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_a_nan_in_a_row_is_looked_for_there():
    """A model without a plan has no site that a NaN check could find."""

    class Missing(RandomRows):
        def batches(self, batch_size, *, start=0):
            for batch in super().batches(batch_size, start=start):
                batch.dense[5, 0] = torch.nan
                yield batch

    with pytest.raises(NonFinite, match="look for NaN in the rows' features"):
        train(Probe(), Missing(), config=CONFIG)
    with pytest.raises(NonFinite, match=r"(?s)row 5.*look for NaN in that row's features"):
        quality(*evaluate(Probe(), Missing(), batch_size=64))


def test_a_nan_is_not_saved_between_log_lines(tmp_path):
    model = small_model()
    config = replace(CONFIG, checkpoint_every=3, log_every=100)
    with pytest.raises(NonFinite):
        train(model, RandomRows(), config=config, checkpoints=tmp_path, on_step=poison(model, 4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_check_runs_before_the_loss_is_judged():
    model = small_model()

    def check(checked):
        assert checked is model
        if model.mlp[0].weight.isnan().any():
            raise NonFinite("mlp.0 / output")

    with pytest.raises(NonFinite, match=r"mlp\.0 / output"):
        train(model, RandomRows(), config=CONFIG, on_step=poison(model, 1), check=check)


def test_a_source_that_breaks_its_promise_is_refused():
    class Short(RandomRows):
        def batches(self, batch_size, *, start=0):
            for index, batch in enumerate(super().batches(batch_size, start=start), start):
                if index < 3:
                    yield batch

        def account(self):
            return {"short line": 808}

    with pytest.raises(DataRefused, match="short line"):
        train(Probe(), Short(), config=CONFIG)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda label: 2 * label - 1, "labels lie between -1 and 1, not between 0 and 1"),
        (lambda label: label + 1, "labels lie between 1 and 2,"),
        (lambda label: label.where(label > 0, torch.nan), "labels lie between nan and nan,"),
        (torch.Tensor.long, "label is torch.int64; it has to be torch.float32"),
        (torch.Tensor.bool, "label is torch.bool;"),
        (lambda label: label[:, None], "label is [64, 1]; of label it has to be [64]"),
        (lambda label: torch.stack([label, label], 1), "label is [64, 2]; of label it has to be [64]"),
    ],
)
def test_labels_that_are_no_clicks_are_refused_before_a_step(change, told):
    """Those of -1 and 1 trained to a negative base rate, and of the others torch told in its own words."""

    class Other(RandomRows):
        def batches(self, batch_size, *, start=0):
            for batch in super().batches(batch_size, start=start):
                yield replace(batch, label=change(batch.label))

    model = Probe()
    with pytest.raises(DataRefused) as refused:
        train(model, Other(), config=CONFIG)
    assert told in str(refused.value)
    assert not model.seen


def test_labels_may_be_shares_of_a_click():
    class Soft(RandomRows):
        def batches(self, batch_size, *, start=0):
            for batch in super().batches(batch_size, start=start):
                yield replace(batch, label=0.1 + 0.8 * batch.label)

    soft = 0.1 + 0.8 * labels(1000).double()
    model = Probe()
    found = train(model, Soft(), config=CONFIG).quality
    losses = nn.functional.binary_cross_entropy_with_logits(torch.cat(model.seen).double(), soft)
    rate = soft.mean()
    assert found.base_rate == pytest.approx(rate.item(), rel=1e-6)
    assert found.ne == pytest.approx((losses / -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))).item())


def test_progress_is_injected():
    calls = []

    def track(batches, description, total):
        calls.append((description, total))
        return batches

    model = small_model()
    train(model, RandomRows(), config=CONFIG, track=track)
    evaluate(model, RandomRows(100), batch_size=30, track=track)
    assert calls == [("train", 16), ("evaluate", 4)]


def test_evaluate_keeps_order_and_mode():
    model = small_model()
    model.mlp[2].eval()
    logits, label = evaluate(model, RandomRows(1000), batch_size=300)
    again, _ = evaluate(model, RandomRows(1000), batch_size=300)
    assert np.array_equal(logits, again)  # no dropout
    expected = np.concatenate([batch.label.numpy() for batch in RandomRows(1000).batches(300)])
    assert np.array_equal(label, expected)
    assert model.training
    assert not model.mlp[2].training


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 0}, {"precision": "fp16"}, {"warmup": 2.0}, {"max_rows": 0}, {"grad_clip": np.inf}, {"lr": -1},
     {"step": "fast"}, {"accumulate": 0}, {"accumulate": 65}, {"window": 0}],
)  # fmt: skip
def test_config_refuses(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TrainConfig(**{"batch_size": 64, **wrong})


@pytest.mark.parametrize("given", [[], None, torch.utils.data.DataLoader([1])])
def test_what_is_no_source_of_rows_is_refused_with_what_it_lacks(given):
    for call in (lambda: train(Probe(), given, config=CONFIG), lambda: evaluate(Probe(), given, batch_size=8)):
        with pytest.raises(DataRefused, match=r"no source of rows: it has no rows, identity, batches"):
            call()
