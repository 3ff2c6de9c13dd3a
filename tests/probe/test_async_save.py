import contextlib
import os
import random
import shutil
import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from durable import full
from forked import SERVER
from models import stats_of
from torch import nn

import loka
from loka.core.exceptions import FileRefused, LokaError
from loka.core.records.stats import Stats
from loka.core.storage.alone import InUse
from loka.probe import async_save as saving
from loka.probe.async_save import Copied, Saver, own_folder, to_host


@pytest.fixture(scope="module")
def stats():
    net = nn.Linear(5, 1)
    return stats_of(net, torch.randn(6, 5), torch.sum)


@pytest.fixture
def saver(tmp_path):
    saver = Saver(tmp_path / "stats")
    yield saver
    saver.close()


class Event:
    passed = False
    waited = False

    def query(self):
        return self.passed

    def synchronize(self):
        self.waited = self.passed = True


class Slow:
    def __init__(self, stats):
        self.stats, self.begun, self.go = stats, threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.go.wait(30)
        return self.stats


def at(stats, steps):
    return replace(stats, steps=steps)


def test_a_save_is_on_the_disk_after_a_flush(saver, stats):
    saver.offer(lambda: stats, Copied())
    saver.flush()
    assert Stats.load(saver.folder).digest() == stats.digest()


def test_training_does_not_wait_and_the_newest_wins(saver, stats):
    slow, made = Slow(at(stats, 1)), []
    saver.offer(slow, Copied())
    assert slow.begun.wait(30)
    for steps in (2, 3, 4):  # none of them waits for the first

        def make(steps=steps):
            made.append(steps)
            return at(stats, steps)

        saver.offer(make, Copied())
    assert made == []
    slow.go.set()
    saver.flush()
    assert made == [4]
    assert Stats.load(saver.folder).steps == 4


def test_a_copy_is_written_when_a_later_step_finds_it_there(saver, stats):
    event = Event()
    saver.offer(lambda: stats, Copied((event,)))
    saver.poll()
    assert not list(saver.folder.glob("[!.]*"))
    event.passed = True
    saver.poll()
    saver.flush()
    assert not event.waited
    assert Stats.load(saver.folder).digest() == stats.digest()


def test_the_end_waits_for_the_copy(saver, stats):
    event = Event()
    saver.offer(lambda: stats, Copied((event,)))
    saver.flush()
    assert event.waited
    assert Stats.load(saver.folder).steps == stats.steps


def test_a_full_disk_is_told_at_the_next_step_and_once(saver, stats, monkeypatch):
    saver.offer(lambda: stats, Copied())
    saver.flush()
    with monkeypatch.context() as patched:
        patched.setattr("loka.core.storage.files.os.fsync", full)
        saver.offer(lambda: at(stats, 9), Copied())
        idle = time.monotonic() + 30
        while saver._writing or saver._waiting:
            assert time.monotonic() < idle
            time.sleep(0.001)
        with pytest.raises(LokaError, match="No space left on device") as told:
            saver.poll()
    assert str(saver.folder) in str(told.value)
    assert "Way out: make room" in str(told.value)
    assert Stats.load(saver.folder).digest() == stats.digest()  # the one before is whole
    saver.poll()  # told once
    saver.offer(lambda: at(stats, 10), Copied())  # and there is room again
    saver.flush()
    assert Stats.load(saver.folder).steps == 10
    assert len(list(saver.folder.glob("[!.]*"))) == 2


def test_one_probe_saves_in_a_folder_at_a_time(tmp_path):
    """Two wrote one staged file, and what one of them had learnt was lost without a word."""
    model, x = nn.Linear(5, 1), torch.randn(6, 5)
    with loka.Probe(model, every=1, save_to=tmp_path) as probe:
        other = loka.Probe(nn.Linear(5, 1), every=1, save_to=tmp_path)
        with pytest.raises(InUse, match="saving statistics in") as refused, other:
            pass
        assert "which is this one" in refused.value.why[0]
        assert "another folder" in refused.value.way_out
        assert not other._root_hooks
        model(x).sum().backward()
    assert Stats.load(tmp_path).digest() == probe.stats().digest()
    with other:  # once it is free; what is there stays until a step was sampled
        pass
    assert Stats.load(tmp_path).steps == 1
    assert not list(tmp_path.glob(".*"))


def test_a_folder_is_free_where_the_last_copy_failed(tmp_path, monkeypatch):
    """Memory that is full at the end held the folder for as long as anyone held the error."""
    model, x = nn.Linear(5, 1), torch.randn(6, 5)
    probe = loka.Probe(model, every=1, save_to=tmp_path).__enter__()
    model(x).sum().backward()
    monkeypatch.setattr(probe, "_copy", lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError) as held:
        probe.__exit__(None, None, None)
    assert held.tb
    with loka.Probe(model, every=1, save_to=tmp_path):
        model(x).sum().backward()
    assert Stats.load(tmp_path).steps == 1


def test_the_end_tells_of_a_failure_and_ends_the_thread(tmp_path, stats):
    blocked = tmp_path / "file"
    saver = Saver(blocked)
    shutil.rmtree(blocked)
    blocked.write_text("not a folder")
    saver.offer(lambda: stats, Copied())
    with pytest.raises(LokaError, match="were not saved to"):
        saver.close()
    assert not saver._thread.is_alive()


@pytest.mark.parametrize("aside", [True, False])
def test_what_a_killed_process_left_is_removed(aside, saver, stats):
    for name in (
        ".stats.json.a1b2.unfinished",
        ".tensors.staged.safetensors.c3.unfinished",
        "tensors-00ff.safetensors",
    ):
        (saver.folder / name).write_text("half")
    (saver.folder / "notes.txt").write_text("of the user")
    if aside:
        saver.offer(lambda: stats, Copied())
        saver.flush()
    else:
        stats.save(saver.folder)
    saver.close()
    left = sorted(path.name for path in saver.folder.iterdir())
    assert left[0] == "notes.txt"
    assert left[1] == "stats.json"
    assert len(left) == 3


def test_copies_are_copies():
    @dataclass
    class Box:
        inside: dict[str, Any]
        name: str

    box = Box({"a": torch.arange(3), "b": (torch.ones(2), [torch.zeros(1)]), "c": None}, "box")
    copy, copied = to_host(box)
    assert copied.done()
    box.inside["a"][0] = 7
    box.inside["b"][0].zero_()
    box.inside["b"][1][0].fill_(5)
    assert copy.inside["a"].tolist() == [0, 1, 2]
    assert copy.inside["b"][0].tolist() == [1, 1]
    assert copy.inside["b"][1][0].tolist() == [0]
    assert (copy.inside["c"], copy.name) == (None, "box")


@pytest.mark.gpu
def test_copies_from_a_gpu_wait_for_nothing():
    held = torch.ones(1 << 20, device="cuda")
    to_host({"held": held})[1].wait()  # pinning memory takes a while, where torch has none left
    torch.cuda._sleep(2_000_000_000)  # about 1 s
    held.add_(1)
    copy, copied = to_host({"held": held})
    assert not copied.done()
    held.add_(1)  # after the copy, on the same stream
    copied.wait()
    assert copy["held"].is_pinned()
    assert (copy["held"] == 2).all()


def test_ranks_have_folders_of_their_own(tmp_path, monkeypatch):
    assert own_folder(tmp_path) == tmp_path
    monkeypatch.setattr(saving, "ranks_of", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert own_folder(tmp_path) == tmp_path / "rank-3"


# Killed at any moment. The model's weights and rows are functions of the step, as a training run that goes
# on from its checkpoint has them; what a probe learns then depends on its record and nothing else.

SAVE_EVERY = 4


def learn(folder, *, until, resume, reached=None):
    """Goes on from the record, if there is one. `reached` is told each step that begins."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 1))
    start = [parameter.detach().clone() for parameter in net.parameters()]
    record = Stats.load(folder) if resume and (folder / "stats.json").exists() else None
    probe = loka.Probe(
        net, every=2, rows=8, depth_rows=4, rank=4, full_covariance=10, effect_samples=40, effect_step=8,
        save_to=folder, save_every=SAVE_EVERY, resume=record, seed=3,
    )  # fmt: skip
    with probe:
        for step in range(record.steps if record else 0, until):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for parameter, first in zip(net.parameters(), start, strict=True):
                    parameter.copy_(first + 0.01 * torch.randn(first.shape, generator=generator))
            if reached is not None:
                _let_it_write(folder, step)
                reached.value = step
            net.zero_grad()
            nn.functional.softplus(net(torch.randn(16, 6, generator=generator))).mean().backward()
    return probe.stats()


def _let_it_write(folder, step):
    """Steps here take less than a save, so that on a busy machine the record would fall behind by any number
    of them. As steps of a real model, they wait: one that is never written ends in the parent's patience."""
    while step >= 2 * SAVE_EVERY:
        with contextlib.suppress(FileRefused):
            if Stats.load(folder).steps > step - 2 * SAVE_EVERY:
                return
        time.sleep(0.001)


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path, kills):
    """Each kill is some steps and a part of a step or of a save after the start. Every time the
    folder holds a whole record, at most an interval old, or two where a save was under way; the last
    process ends with the bits of a run that nobody touched."""
    folder = tmp_path / "stats"
    moments = random.Random(0)
    at = 0
    for _ in range(kills):
        reached = SERVER.Value("i", -1)
        child = SERVER.Process(
            target=learn, args=(folder,), kwargs={"until": 1 << 30, "resume": True, "reached": reached}
        )
        child.start()
        wanted, patience = at + moments.randint(1, 3 * SAVE_EVERY), time.monotonic() + 60
        while reached.value < wanted:
            assert child.is_alive()
            assert time.monotonic() < patience
            time.sleep(0.0005)
        time.sleep(moments.uniform(0, 0.02))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        if (folder / "stats.json").exists():
            record = Stats.load(folder)  # raises where it is not whole
            assert reached.value - 2 * SAVE_EVERY <= record.steps <= reached.value + 1
            at = record.steps
        else:
            assert reached.value < 2 * SAVE_EVERY
    assert at >= SAVE_EVERY
    until = at + 3
    assert learn(folder, until=until, resume=True).digest() == Stats.load(folder).digest()
    untouched = learn(tmp_path / "untouched", until=until, resume=False)
    assert Stats.load(folder).digest() == untouched.digest()
