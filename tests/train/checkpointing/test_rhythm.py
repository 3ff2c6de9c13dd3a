"""How often a run saves, where saving takes long."""

import time

import pytest
import torch
from torch import nn

from loka.data import SyntheticClicks
from loka.train import CheckpointNotSaved, TrainConfig, train
from loka.train.checkpointing import checkpoint, rhythm
from loka.train.checkpointing.saves import Saves
from loka.train.run import Run
from loka.zoo import build

ROWS = SyntheticClicks(rows=8 * 40, seed=0, vocab_sizes=(5, 7))


def saves_of(monkeypatch, tmp_path, every, *, refused=0):
    saved, save = [], Run.save

    def slow(run, *given, **named):
        time.sleep(0.3)  # 19 times this is longer than the run
        saved.append(run.step)
        if len(saved) <= refused:
            raise CheckpointNotSaved("the disk is full")
        save(run, *given, **named)

    monkeypatch.setattr(rhythm, "EVERY", 4)
    monkeypatch.setattr(Run, "save", slow)
    torch.manual_seed(0)
    model: nn.Module = build("dlrm", dense_features=ROWS.dense_features, vocab_sizes=ROWS.vocab_sizes)
    train(model, ROWS, config=TrainConfig(batch_size=8, checkpoint_every=every), checkpoints=tmp_path)
    return saved


def test_saving_takes_a_twentieth_of_the_time_where_nobody_said(monkeypatch, tmp_path):
    assert saves_of(monkeypatch, tmp_path, None) == [4, 40], "the first, and the last step"


@pytest.mark.slow
def test_what_was_asked_for_is_kept(monkeypatch, tmp_path):
    assert saves_of(monkeypatch, tmp_path, 10) == [10, 20, 30, 40]


def test_a_save_that_fails_takes_its_time_too(monkeypatch, tmp_path):
    with pytest.warns(RuntimeWarning, match="the disk is full"):
        assert saves_of(monkeypatch, tmp_path, None, refused=1) == [4, 40]


def test_the_twentieth_counts_from_the_end_of_the_last_save(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(rhythm.time, "perf_counter", lambda: now[0])
    seldom = rhythm.Rhythm(None)
    now[0] = 100.0
    assert seldom.due(rhythm.EVERY)
    with seldom.saving():
        now[0] = 110.0
    for at, due in ((299.9, False), (300.0, True)):
        now[0] = at
        assert seldom.due(rhythm.EVERY) == due


def test_each_step_is_saved_once_and_one_that_failed_again(tmp_path):
    def fails(folder):
        raise CheckpointNotSaved("the disk is full")

    written, saves = [], Saves(tmp_path, rhythm.Rhythm(1), identity={})
    with pytest.warns(RuntimeWarning, match="the disk is full"):
        saves.save(3, fails, last=False)
    for _ in range(2):
        saves.save(3, written.append, last=False)
    assert (written, saves.step, saves.failed) == ([tmp_path], 3, ["the disk is full"])
    checkpoint.save(tmp_path, step=3, state={}, identity={})
    resumed = Saves(tmp_path, rhythm.Rhythm(1), identity={})
    assert resumed.newest(9, resume=True).step == resumed.step == 3
