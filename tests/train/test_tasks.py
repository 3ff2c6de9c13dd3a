from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from small_run import IDS, RandomRows, stop_at
from torch import nn
from torch.nn import functional

from loka.core.exceptions import DataRefused, LokaError
from loka.core.numerics.label_rate import LabelRate
from loka.train import Segments, TrainConfig, evaluate, quality, train
from loka.train.automatic.auto import Auto, AutoConfig
from loka.train.labels import count_labels, require_both
from loka.train.metrics import quality_by_task
from loka.train.running import RunningQuality, RunningTasks, label_rates
from loka.train.steps.step import _backward
from loka.validation.arms import ArmSpec
from loka.validation.pair_bank import Bank, deposit
from loka.validation.record import Validation
from loka.validation.segments import by_value
from loka.validation.validate import validate

CONFIG = TrainConfig(batch_size=64, seed=3, lr=1e-2, checkpoint_every=5)
TASKS = ("click", "buy")


@dataclass(frozen=True)
class TwoLabels(RandomRows):
    """Of rows that are clicked a third is bought, where the second dense feature is high."""

    @property
    def tasks(self):
        return TASKS

    def batches(self, batch_size, *, start=0):
        for batch in super().batches(batch_size, start=start):
            bought = batch.label * (batch.dense[:, 1] > 0.4)
            yield replace(batch, label=torch.stack([batch.label, bought], dim=1))


class TwoLogits(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(IDS, 8, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, dense, sparse):
        return self.mlp(torch.cat([dense, self.table(sparse).flatten(1)], dim=1))


def fresh(seed=0):
    torch.manual_seed(seed)
    return TwoLogits()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_gradient_is_that_of_the_sum_of_the_losses(accumulate):
    batch = next(TwoLabels().batches(64))
    model = fresh().eval()
    found = {}
    for task in range(2):
        z = model(batch.dense, batch.sparse)[:, task]
        loss = functional.binary_cross_entropy_with_logits(z, batch.label[:, task])
        grads = torch.autograd.grad(loss, list(model.mlp.parameters()))
        found[task] = [grad.clone() for grad in grads]
    predicted = _backward(
        model,
        (batch.dense, batch.sparse),
        batch.label,
        TrainConfig(batch_size=64, precision="fp32", accumulate=accumulate),
    )
    assert predicted.losses.shape == predicted.logits.shape == (64, 2)
    for parameter, first, second in zip(model.mlp.parameters(), *found.values(), strict=True):
        torch.testing.assert_close(parameter.grad, first + second)
        assert not torch.allclose(first, second, rtol=0.1)  # or the sum would show nothing


def test_metrics_of_a_task_are_those_of_its_columns():
    torch.manual_seed(0)
    segments = Segments(("a", "b"), lambda batch: batch.sparse[:, 0], by="ab")
    running = RunningTasks(TASKS, window=8, segments=segments)
    alone = [RunningQuality(window=8, segments=segments) for _ in TASKS]
    for _ in range(20):
        logits, labels = torch.randn(30, 2), (torch.rand(30, 2) < torch.tensor([0.5, 0.1])).float()
        losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        kinds = torch.randint(3, (30,))
        running.add(losses, logits, labels, kinds)
        for task, each in enumerate(alone):
            each.add(losses[:, task], logits[:, task], labels[:, task], kinds)
    assert repr(running.read()) == repr(dict(zip(TASKS, [each.read() for each in alone], strict=True)))
    counted = label_rates(running.state_dict())
    assert counted == tuple(LabelRate(positives=each.losses_and_clicks()[1], rows=600) for each in alone)


def test_a_run_has_no_one_ne_and_says_where_each_is():
    lines = []
    result = train(fresh(), TwoLabels(512), config=CONFIG, on_log=lines.append)
    assert list(result.reading_by_task) == list(TASKS)
    click, buy = (result.reading_by_task[task].lifetime for task in TASKS)
    assert (click.base_rate, buy.base_rate) == tuple(
        labels.share for labels in count_labels(TwoLabels(512), batch_size=64).values()
    )
    for read in (lambda: result.train_ne, lambda: result.quality, lambda: lines[-1].ne, lambda: lines[-1].recent_ne):
        with pytest.raises(LokaError, match="2 tasks, click, buy") as refused:
            read()
        assert "_by_task['click']" in refused.value.way_out
    model = fresh()
    logits, labels = evaluate(model, TwoLabels(300), batch_size=64)
    assert logits.shape == labels.shape == (300, 2)
    found = quality_by_task(TASKS, logits, labels)
    assert found["buy"] == quality(logits[:, 1], labels[:, 1])
    assert found["buy"].ne != found["click"].ne


def test_an_interrupted_run_of_two_tasks_resumes_exactly(tmp_path):
    config = TrainConfig(batch_size=64, precision="fp32", checkpoint_every=4, log_every=5)
    expected = fresh()
    whole = train(expected, TwoLabels(), config=config)

    with pytest.raises(KeyboardInterrupt):
        train(fresh(), TwoLabels(), config=config, checkpoints=tmp_path, on_step=stop_at(7))
    model = fresh(seed=9)
    result = train(model, TwoLabels(), config=config, checkpoints=tmp_path)
    assert result.resumed_from == 7
    assert result.reading_by_task == whole.reading_by_task
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected.state_dict()[name]), name


@pytest.mark.parametrize(("model", "rows"), [(nn.Flatten(0), TwoLabels()), (TwoLogits(), RandomRows())])
def test_logits_that_do_not_fit_the_labels_are_refused(model, rows):
    class OneLogit(TwoLogits):
        def forward(self, dense, sparse):
            return super().forward(dense, sparse)[:, 0]

    wrong = OneLogit() if isinstance(rows, TwoLabels) else model
    with pytest.raises(LokaError, match="for each of 64 rows") as refused:
        train(wrong, rows, config=CONFIG)
    assert "tasks=" in refused.value.way_out


class _Never(TwoLabels):
    def batches(self, batch_size, *, start=0):
        for batch in super().batches(batch_size, start=start):
            label = torch.stack([batch.label[:, 0], torch.zeros(len(batch))], dim=1)
            yield replace(batch, label=label)


def test_equal_labels_of_one_task_are_named():
    require_both(TwoLabels(300), batch_size=64, what="the rows")
    with pytest.raises(DataRefused, match="the rows: buy: all 300 labels read are 0"):
        require_both(_Never(300), batch_size=64, what="the rows")


def spoilt(model):
    """Its second logit says the same of every row, and cannot unlearn that; the first is as it was."""
    last = model.mlp[3]

    def keep(module, args, output):
        return torch.stack([output[:, 0], output[:, 1].detach() * 0 + 2.0], dim=1)

    last.register_forward_hook(keep)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    out = tmp_path_factory.mktemp("tasks")
    arms = [
        ArmSpec(name="same", apply=lambda model: None, identity={"what": "nothing"}),
        ArmSpec(name="spoilt", apply=spoilt, identity={"what": "the second logit"}),
    ]
    halves = by_value("first dense is positive", lambda batch: (batch.dense[:, 0] > 0).int())
    for _ in range(2):  # the second time from what was kept
        found = validate(
            TwoLogits,
            TwoLabels(1280),
            TwoLabels(900, seed=8),
            arms,
            config=CONFIG,
            out=out,
            pairs=4,
            limit=30.0,
            divisions=[halves],
        )
    assert Validation.load(out / "validation.json") == found
    return found


def test_every_arm_has_a_verdict_for_each_task(judged):
    verdicts = {arm.title: arm.verdict for arm in judged.arms}
    assert verdicts["same, click"] == verdicts["same, buy"] == "pass"
    assert verdicts["spoilt, buy"] == "fail"
    assert judged.verdict == "fail"
    by_title = {arm.title: arm for arm in judged.arms}
    # The trunk learns from one task alone then, which is no harm to it of that size.
    assert by_title["spoilt, click"].average.ne_percent.value < 0.2 * by_title["spoilt, buy"].average.ne_percent.value
    assert {len(arm.segments) for arm in judged.arms} == {2}


def test_the_error_is_shared_by_tasks_and_segments(judged):
    for arm in judged.arms:
        assert arm.average.tail == pytest.approx(0.05 / 2)
        assert {segment.tail for segment in arm.segments} == {0.05 / 2 / 2}


def test_runs_curves_and_the_bank_are_by_task(judged):
    runs = [run for run in judged.runs if (run.arm, run.seed) == ("same", 3)]
    assert [run.task for run in runs] == list(TASKS)
    assert runs[0].quality.base_rate > 1.5 * runs[1].quality.base_rate
    bands = [judged.band("spoilt", task) for task in TASKS]
    assert all(len(band) > 5 for band in bands)
    assert bands[1][-1].difference.value > 5 * abs(bands[0][-1].difference.value)
    bank = deposit(Bank(), judged)
    assert sorted(arm.title for arm in bank.arms) == sorted(arm.title for arm in judged.arms)
    spoilt = {arm.task: np.mean(arm.values) for arm in bank.arms if arm.name == "spoilt"}
    assert spoilt["buy"] > 5 * abs(spoilt["click"])


def test_a_task_that_is_not_known_well_enough_keeps_auto_in_bf16(tmp_path):
    """32 rows of it cannot tell: no plan, no crash in the middle of a run, and a reason."""
    said = []
    auto = Auto(AutoConfig(every=1, most_steps=1, base_rate=(0.5, 0.2)), folder=tmp_path, say=said.append)
    result = train(fresh(), TwoLabels(64), config=TrainConfig(batch_size=32), callback=auto)
    assert auto.phase == "bf16"
    assert result.plan is None
    assert any("not known well enough" in line and "buy: " in line for line in said)
