import itertools
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from graphed_cases import batches, graph_of, small, step_of
from hypothesis import given
from hypothesis import strategies as st
from small_run import RandomRows, small_model, stop_at
from sweeps import sweep
from torch import nn

from loka.core.exceptions import CheckpointRefused
from loka.core.storage.files import sha256_of_file, write_record
from loka.train import TrainConfig, build_optimizers, rate_factor, schedulers, train
from loka.train.schedule import describe, warmup_steps

CONFIG = TrainConfig(batch_size=64, precision="fp32", checkpoint_every=3, log_every=1)
ROWS = RandomRows(64 * 20)
DECAYING = ("cosine", "linear", "wsd")


def factors(steps, **fields):
    config = replace(CONFIG, **fields)
    return [rate_factor(step, steps, config) for step in range(steps)]


def test_warmup_is_linear_and_ends_at_one():
    found = factors(100, schedule="constant")
    assert found[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert set(found[9:]) == {1.0}
    assert set(factors(100, schedule="constant", warmup=0.0)) == {1.0}


def test_shapes_are_those_of_their_formulas():
    cosine, linear, wsd = (factors(100, schedule=name) for name in DECAYING)
    # 10 steps of warm-up, whose last is the peak; 90 more, of which the hundred-and-first would be the end.
    assert cosine[9 + 30] == pytest.approx((1 + math.cos(math.pi * 30 / 91)) / 2)
    assert linear[9 + 30] == pytest.approx(1 - 30 / 91)
    assert set(wsd[9:80]) == {1.0}
    assert wsd[80:] == pytest.approx([1 - k / 21 for k in range(1, 21)])
    early = factors(100, schedule="wsd", warmup=0.5, decay=0.9)  # nothing falls before the peak
    assert early[50:] == pytest.approx([1 - k / 51 for k in range(1, 51)])


@given(
    steps=st.integers(1, 400),
    schedule=st.sampled_from([*DECAYING, "constant"]),
    warmup=st.floats(0, 1),
    decay=st.floats(0.01, 1),
    final_rate=st.floats(0, 1),
)
def test_every_schedule_rises_to_the_peak_and_falls_to_its_end(steps, schedule, warmup, decay, final_rate):
    config = replace(CONFIG, schedule=schedule, warmup=warmup, decay=decay, final_rate=final_rate)
    found = [rate_factor(step, steps, config) for step in range(steps)]
    peak = max(warmup_steps(steps, config) - 1, 0)
    assert found[peak] == 1.0
    assert all(a < b for a, b in itertools.pairwise(found[: peak + 1]))
    slack = 1e-12  # of sums in double precision
    assert all(b <= a + slack for a, b in itertools.pairwise(found[peak:]))
    assert min(found[peak:]) >= (1.0 if schedule == "constant" else final_rate) - slack
    # What follows the last step, which no step is spent on: the end itself.
    end = rate_factor(steps, steps, config)
    assert end == pytest.approx(1.0 if schedule == "constant" or peak == steps else final_rate, abs=1e-12)


def test_shares_of_steps_are_not_rounded_up_by_the_last_bit():
    """100 * 0.07 is 7.000000000000001."""
    config = replace(CONFIG, schedule="wsd", warmup=0.07, decay=0.14)
    assert warmup_steps(100, config) == 7
    assert warmup_steps(100, replace(config, warmup=1e-9)) == 1, "no share is rounded to nothing"
    assert "the last 14 of 100 steps" in describe(config, 100)


def test_dense_weights_and_tables_follow_it_together():
    model, config = small_model(), replace(CONFIG, lr=0.5, sparse_lr=0.25, schedule="linear", warmup=0.0)
    optimizers = build_optimizers(model, config)
    rates = schedulers(optimizers, config, 4)
    seen = []
    for _ in range(4):
        seen.append([optimizers[name].param_groups[0]["lr"] for name in ("dense", "sparse")])
        for name, optimizer in optimizers.items():
            optimizer.step()
            rates[name].step()
    assert seen == [[0.5, 0.25], [0.375, 0.1875], [0.25, 0.125], [0.125, 0.0625]]


def test_a_run_decays_by_default_and_logs_the_rate_of_each_step():
    lines = []
    result = train(small_model(), ROWS, config=replace(CONFIG, lr=0.01), on_log=lines.append)
    assert [line.rate for line in lines] == pytest.approx([0.01 * f for f in factors(20)])
    assert result.final_rate == factors(20)[-1] < 0.01
    level = train(small_model(), ROWS, config=replace(CONFIG, schedule="constant"))
    assert level.final_rate == 1.0


def test_the_rate_of_a_step_is_the_one_it_moves_by():
    """Adam's first update is lr times the sign of the gradient, and here every gradient is the first's."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, dense, sparse):
            return self.weight.expand(len(dense)) * 1e-6 - 20.0  # a slope of 1e-6 at every weight

    model, moved = One(), [0.0]
    train(
        model,
        ROWS,
        config=replace(CONFIG, lr=0.01, schedule="linear"),
        on_step=lambda step: moved.append(float(model.weight.detach())),
    )
    steps = [abs(b - a) for a, b in itertools.pairwise(moved)]
    ratio = [step / steps[1] for step in steps]
    expected = factors(20, schedule="linear")
    # Clicks vary from batch to batch, and Adam's two means with them: by a few percent.
    assert ratio == pytest.approx([f / expected[1] for f in expected], rel=0.1)


def test_without_a_number_of_steps_the_rate_stays_and_a_warning_says_so():
    optimizers = build_optimizers(small_model(), CONFIG)
    with pytest.warns(RuntimeWarning, match="number of steps is not known"):
        rates = schedulers(optimizers, CONFIG, None)
    for _ in range(5):
        optimizers["dense"].step()
        rates["dense"].step()
    assert optimizers["dense"].param_groups[0]["lr"] == CONFIG.lr


@pytest.mark.parametrize("schedule", [*DECAYING, "constant"])
@pytest.mark.parametrize("stop", sweep([1, 7, 19], [7]))
def test_a_killed_run_ends_with_the_same_bits(tmp_path, schedule, stop):
    config = replace(CONFIG, schedule=schedule)

    straight, rates = small_model(), []
    train(straight, ROWS, config=config, on_log=lambda line: rates.append(line.rate))
    with pytest.raises(MemoryError):
        train(small_model(), ROWS, config=config, checkpoints=tmp_path, on_step=stop_at(stop, MemoryError))
    resumed, again = small_model(seed=9), []
    found = train(resumed, ROWS, config=config, checkpoints=tmp_path, on_log=lambda line: again.append(line.rate))
    done = found.resumed_from or 0
    assert done == stop - stop % 3
    assert again == rates[done:]
    if done:  # else it began anew from other weights
        for (name, weight), other in zip(straight.named_parameters(), resumed.parameters(), strict=True):
            assert torch.equal(weight, other), name


def test_a_captured_step_follows_it_without_a_second_capture(fake):
    """A float rate would be frozen by the capture; the schedule writes to the tensor that the graph reads."""
    config = replace(CONFIG, lr=0.1, schedule="cosine", warmup=0.3)
    data = batches(*[8] * 12)
    models = {}
    for captured in (False, True):
        model = small()
        rate = torch.tensor(config.lr)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, foreach=False)
        rates = schedulers({"dense": optimizer}, config, len(data))["dense"]
        recorder = fake(model, optimizer)
        step = graph_of(model, optimizer, data) if captured else step_of(model, optimizer)
        seen = []
        for batch in data:
            seen.append(float(rate))
            step(*batch)
            rates.step()
        assert seen == pytest.approx([0.1 * rate_factor(k, 12, config) for k in range(12)], rel=1e-6)
        assert optimizer.param_groups[0]["lr"] is rate
        assert isinstance(rates.base_lrs[0], float)  # a tensor would be read back from the device at each step
        models[captured] = model
    assert (recorder.captures, step.replays) == (1, 10)
    for plain, replayed in zip(models[False].parameters(), models[True].parameters(), strict=True):
        assert torch.equal(plain, replayed)


@pytest.mark.gpu
def test_on_a_gpu_a_captured_run_decays_and_resumes(tmp_path):
    """Adam with a rate on the device, replayed: the weights are those of the eager run."""
    from test_training_step import of_zoo

    found = {}
    for mode in ("eager", "graph"):
        config = replace(CONFIG, device="cuda", step=mode, lr=0.01)
        model = of_zoo("cuda")
        result = train(model, ROWS, config=config)
        assert result.step_reason is None
        found[mode] = torch.cat([w.detach().flatten() for w in model.parameters()])
    # Adam moves a weight by the rate whatever the size of its gradient: rounding decides single ones.
    assert ((found["graph"] - found["eager"]).abs() < 1e-4).double().mean() > 0.99
    with pytest.raises(KeyboardInterrupt):
        train(of_zoo("cuda"), ROWS, config=config, checkpoints=tmp_path, on_step=stop_at(13))
    resumed = of_zoo("cuda")
    train(resumed, ROWS, config=config, checkpoints=tmp_path)
    assert torch.equal(torch.cat([w.detach().flatten() for w in resumed.parameters()]), found["graph"])


def aged(folder, into):
    """Checkpoints as they were written before there were schedules."""
    shutil.copytree(folder, into)
    for file in into.glob("step-*/manifest.json"):
        record = json.loads(file.read_text())
        for name in ("schedule", "decay", "final_rate", "average", "average_share"):
            del record["content"]["identity"]["config"][name]
        write_record(file, kind=record["kind"], version=record["version"], content=record["content"])
        state = torch.load(file.parent / "state.pt", weights_only=True)
        assert state.pop("average") is None
        for optimizer in state["optimizers"].values():
            for group in optimizer["param_groups"]:
                del group["initial_lr"]
        torch.save(state, file.parent / "state.pt")
        content = {**record["content"], "sha256": sha256_of_file(file.parent / "state.pt")}
        write_record(file, kind=record["kind"], version=record["version"], content=content)


def test_a_checkpoint_from_before_schedules_goes_on_at_a_constant_rate(tmp_path):
    level = replace(CONFIG, schedule="constant")

    straight = small_model()
    train(straight, ROWS, config=level)
    with pytest.raises(KeyboardInterrupt):
        train(small_model(), ROWS, config=level, checkpoints=tmp_path / "now", on_step=stop_at(7))
    aged(tmp_path / "now", tmp_path / "old")
    with pytest.raises(CheckpointRefused) as refused:
        train(small_model(), ROWS, config=CONFIG, checkpoints=tmp_path / "old")
    assert "config.schedule: 'constant' in the checkpoint, 'cosine' now" in str(refused.value)
    assert "use the values of that run to resume it" in str(refused.value)
    resumed = small_model(seed=9)
    assert train(resumed, ROWS, config=level, checkpoints=tmp_path / "old").resumed_from == 7
    for weight, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_what_the_rates_do_is_said_in_a_line():
    assert describe(CONFIG, 100) == "rates rise over 10 steps, then fall along a cosine to 0 over 90"
    wsd = replace(CONFIG, schedule="wsd", warmup=0.0, final_rate=0.1)
    assert describe(wsd, 100).endswith("fall linearly to 0.1 of the peak over the last 20 of 100 steps")
    assert "not annealed" in describe(replace(CONFIG, schedule="constant"), 100)


@pytest.mark.parametrize(
    "wrong", [{"schedule": "step"}, {"final_rate": 1.5}, {"decay": 0.0}, {"average": "swa"}, {"average_share": 0.0}]
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(CONFIG, **wrong)
