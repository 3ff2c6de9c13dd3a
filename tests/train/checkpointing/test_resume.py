import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import small_run
import torch
from small_run import RandomRows, small_model, stop_at
from torch import nn

from loka.core.exceptions import CheckpointRefused, NotWritten
from loka.core.storage.alone import InUse
from loka.train import TrainConfig, train
from loka.train.checkpointing.identity import layout
from loka.train.interrupt import Terminated
from loka.train.segments import Segments

CONFIG = TrainConfig(batch_size=64, epochs=2, precision="fp32", checkpoint_every=4, log_every=5)


def same(a, b, name="state"):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), name
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), name
        for key in a:
            same(a[key], b[key], f"{name}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), name
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            same(left, right, f"{name}[{index}]")
    else:
        assert a == b, name


def weights(model):
    return {**model.state_dict(), "largest": model.largest}


def straight_run(config):
    model = small_model()
    result = train(model, RandomRows(), config=config)
    return model, result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_interrupt_saves_the_completed_step_and_resumes_exactly(tmp_path, precision):
    config = replace(CONFIG, precision=precision, max_rows=1777)
    expected, whole = straight_run(config)

    with pytest.raises(KeyboardInterrupt):
        train(small_model(), RandomRows(), config=config, checkpoints=tmp_path, on_step=stop_at(7))
    model = small_model(seed=99)  # nothing of the fresh weights may survive
    result = train(model, RandomRows(), config=config, checkpoints=tmp_path)
    assert result.resumed_from == 7
    same(weights(model), weights(expected))
    assert (result.train_ne, result.rows, result.steps) == (whole.train_ne, 1777, whole.steps)


@pytest.mark.parametrize(
    ("number", "usual"), [(signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)]
)
def test_a_signal_in_the_middle_of_a_step_waits_for_its_end(tmp_path, number, usual):
    expected, _ = straight_run(CONFIG)
    model = small_model()
    calls = []

    def press(*_):
        calls.append(None)
        if len(calls) == 6:
            signal.raise_signal(number)

    handle = model.mlp.register_forward_hook(press)
    previous = signal.signal(number, usual)
    try:
        with pytest.raises(Terminated if number == signal.SIGTERM else KeyboardInterrupt) as stopped:
            train(model, RandomRows(), config=CONFIG, checkpoints=tmp_path)
        assert f"step 6 is saved in {tmp_path}" in str(stopped.value)
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, previous)
        handle.remove()
    model = small_model(seed=99)
    assert train(model, RandomRows(), config=CONFIG, checkpoints=tmp_path).resumed_from == 6
    same(weights(model), weights(expected))


def test_an_interrupt_inside_a_step_saves_nothing(tmp_path):
    calls = []

    def interrupted(*_):
        calls.append(None)
        if len(calls) == 3:  # the random state has moved on from the end of step 2
            raise KeyboardInterrupt

    model = small_model()
    model.mlp.register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(model, RandomRows(), config=CONFIG, checkpoints=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_not_trained_again(tmp_path):
    model = small_model()
    first = train(model, RandomRows(), config=CONFIG, checkpoints=tmp_path)
    again = small_model(seed=99)
    second = train(again, RandomRows(), config=CONFIG, checkpoints=tmp_path)
    assert second.resumed_from == second.steps == first.steps
    assert second.train_ne == first.train_ne
    same(weights(again), weights(model))


def test_a_buffer_made_on_first_use_comes_back(tmp_path):
    class Lazy(small_run.SmallModel):
        def forward(self, dense, sparse):
            if "scale" not in self._buffers:
                self.register_buffer("scale", dense.detach().abs().max(), persistent=False)
            return super().forward(dense / self.scale, sparse)

    def build():
        torch.manual_seed(0)
        return Lazy()

    expected = build()
    train(expected, RandomRows(), config=CONFIG)
    with pytest.raises(KeyboardInterrupt):
        train(build(), RandomRows(), config=CONFIG, checkpoints=tmp_path, on_step=stop_at(3))
    model = build()
    train(model, RandomRows(), config=CONFIG, checkpoints=tmp_path)
    assert torch.equal(model.scale, expected.scale)
    same(weights(model), weights(expected))


def test_a_damaged_newest_checkpoint_is_skipped_with_a_message(tmp_path):
    expected, _ = straight_run(CONFIG)
    train(small_model(), RandomRows(), config=CONFIG, checkpoints=tmp_path)
    newest, older = sorted(tmp_path.iterdir())[::-1]
    (newest / "state.pt").write_bytes(b"")
    model = small_model()
    result = train(model, RandomRows(), config=CONFIG, checkpoints=tmp_path)
    assert result.resumed_from == int(older.name[5:])
    assert newest.name in result.skipped_checkpoints[0]
    same(weights(model), weights(expected))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": replace(CONFIG, lr=0.5)}, "config.lr: 0.001 in the checkpoint, 0.5 now"),
        ({"source": RandomRows(seed=8)}, "source.identity: 'random-1000-7'"),
        ({"identity_extra": {"plan": "b"}}, "extra.plan: 'a' in the checkpoint, 'b' now"),
        ({"segments": Segments(("a",), lambda rows: rows.label.long(), by="")}, "segments: None in the checkpoint"),
    ],
)
def test_another_run_is_refused(tmp_path, changes, named):
    usual = {"source": RandomRows(), "config": CONFIG, "identity_extra": {"plan": "a"}}
    train(small_model(), **usual, checkpoints=tmp_path)
    with pytest.raises(CheckpointRefused) as error:
        train(small_model(), **{**usual, **changes}, checkpoints=tmp_path)
    assert named in str(error.value)


def test_a_run_with_another_weight_frozen_is_refused(tmp_path):
    """Its optimizer held as many weights, and one took the moments of the other."""
    first, second = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(2))
    first[0].requires_grad_(False), second[1].requires_grad_(False)
    assert layout(first)["layout"] != layout(second)["layout"]


def test_logging_and_saving_more_often_is_the_same_run(tmp_path):
    train(small_model(), RandomRows(), config=CONFIG, checkpoints=tmp_path)
    watched = replace(CONFIG, log_every=1, checkpoint_every=1)
    assert train(small_model(), RandomRows(), config=watched, checkpoints=tmp_path).resumed_from


def test_a_new_run_does_not_mix_with_an_old_one(tmp_path):
    train(small_model(), RandomRows(), config=CONFIG, checkpoints=tmp_path)
    with pytest.raises(CheckpointRefused, match="already holds checkpoints"):
        train(small_model(), RandomRows(), config=CONFIG, checkpoints=tmp_path, resume=False)


def test_a_second_run_in_the_folder_is_refused_and_touches_nothing(tmp_path):
    refused = []

    def again(step):
        if step == 5:
            unfinished = tmp_path / ".unfinished-step-00000008"
            unfinished.mkdir()
            with pytest.raises(InUse, match="another process is training in") as error:
                train(small_model(), RandomRows(), config=CONFIG, checkpoints=tmp_path)
            assert unfinished.exists()
            refused.append(error.value)

    train(small_model(), RandomRows(), config=CONFIG, checkpoints=tmp_path, on_step=again)
    assert f"process {os.getpid()} on " in refused[0].why[0]
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())


def test_a_folder_that_takes_no_file_is_told_before_the_first_step(tmp_path, monkeypatch):
    """The first to say so was a checkpoint: a warning at each of them, and an error behind the last step."""

    def refuse(path, data):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    model = small_model()
    before = {name: value.clone() for name, value in weights(model).items()}
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "write_bytes", refuse)
        with pytest.raises(NotWritten, match="Read-only file system"):
            train(model, RandomRows(), config=CONFIG, checkpoints=tmp_path / "a")
    same(weights(model), before)
    train(model, RandomRows(), config=CONFIG, checkpoints=tmp_path / "a")
    with monkeypatch.context() as read_only:
        read_only.setattr(Path, "write_bytes", refuse)
        assert train(small_model(), RandomRows(), config=CONFIG, checkpoints=tmp_path / "a").resumed_from, "read alone"
