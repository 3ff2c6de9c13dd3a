"""A thread that reads ahead: the same batches, errors that arrive, no thread left."""

import itertools
import os
import signal
import threading
import time

import pytest
import torch

from loka.data import SyntheticClicks
from loka.data.batch import Batch
from loka.train import TrainConfig, loop, train
from loka.train.ahead import Ahead, ahead_of
from loka.train.run import Callback
from loka.zoo import build


def batch(number):
    rows = torch.full((2, 1), float(number))
    return Batch(dense=rows, sparse=rows.long(), label=rows[:, 0])


def clone(one):
    return Batch(**{name: tensor.clone() for name, tensor in one.tensors().items()})


def numbers(batches):
    return [int(one.label[0]) for one in batches]


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("loka-data")]


@pytest.mark.parametrize("copied", [None, clone])
def test_each_batch_comes_once_in_order_and_also_to_a_pipeline(copied):
    ahead = Ahead(map(batch, range(7)), copied=copied)
    assert numbers([next(ahead)]) == [0]
    early = ahead.early(torch.device("cpu"))
    assert numbers(itertools.islice(early, 2)) == [1, 2]
    assert numbers([next(ahead)]) == [1]
    assert numbers(itertools.islice(ahead.early(torch.device("cpu")), 2)) == [2, 3], "what was taken comes first"
    assert numbers(ahead) == [2, 3, 4, 5, 6]
    assert not readers()


def test_two_batches_are_read_ahead_and_no_more():
    read = []

    def some():
        for number in range(9):
            read.append((number, threading.current_thread().name))
            yield batch(number)

    ahead = Ahead(some(), copied=clone)
    assert numbers([next(ahead)]) == [0]
    deadline = time.monotonic() + 10
    while len(read) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert [number for number, _ in read] == [0, 1, 2]
    assert all(name.startswith("loka-data") for _, name in read)
    ahead.close()
    assert not readers()
    assert len(read) == 3


def test_an_error_of_the_source_comes_behind_the_batches_before_it():
    def broken():
        yield batch(0)
        raise OSError("the disk is gone")

    ahead = Ahead(broken(), copied=clone)
    assert numbers([next(ahead)]) == [0]
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert not readers()


def test_the_source_is_read_by_one_at_a_time():
    inside = []

    def watched(count):
        for number in range(count):
            inside.append(1)
            time.sleep(0.002)
            assert sum(inside) == 1, "two threads read"
            inside.pop()
            yield batch(number)

    ahead = Ahead(watched(20), copied=clone)
    assert numbers([next(ahead)]) == [0]
    assert numbers(ahead.beside(watched(10))) == list(range(10))
    assert numbers(ahead) == list(range(1, 20))


def test_a_source_may_fill_the_same_memory_again():
    def one_buffer():
        buffer = batch(0)
        for number in range(5):
            buffer.label.fill_(number)
            yield buffer

    ahead = Ahead(one_buffer(), copied=clone)
    first = next(ahead)
    time.sleep(0.05)
    assert numbers(list(ahead.beside(one_buffer()))) == [0, 1, 2, 3, 4]
    assert numbers([first, *ahead]) == [0, 1, 2, 3, 4]


def test_for_a_gpu_a_thread_reads_on_its_device(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.append((index, threading.current_thread().name)))
    monkeypatch.setattr(Batch, "pinned", clone)
    assert numbers(ahead_of(map(batch, range(4)), torch.device("cuda", 3))) == [0, 1, 2, 3]
    ((index, name),) = seen
    assert index == 3
    assert name.startswith("loka-data")


@pytest.mark.gpu
def test_pinned_batches_are_copies():
    held = batch(3)
    for one in (held, held.pinned(), held.to("cuda")):
        copy = one.pinned()
        assert numbers([copy]) == [3]
        for mine, other in zip(one.tensors().values(), copy.tensors().values(), strict=True):
            assert mine.data_ptr() != other.data_ptr()
            assert other.is_cuda or other.is_pinned()


class Slow(SyntheticClicks):
    """Its fifth batch takes two seconds to read."""

    def batches(self, batch_size, *, start=0):
        for number, one in enumerate(super().batches(batch_size, start=start)):
            time.sleep(2.0 if number == 4 else 0.0)
            yield one


def test_an_interrupt_while_the_source_is_waited_for_hides_no_error(monkeypatch):
    monkeypatch.setattr(loop, "ahead_of", lambda batches, device: Ahead(batches, copied=clone))
    rows, stopped = Slow(rows=8 * 10, seed=0, vocab_sizes=(5, 7)), []
    callback = Callback()
    callback.stop = lambda run, error: stopped.append(error)

    def broken(step):
        if step == 3:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()
            raise ValueError("the step's own error")

    model = build("dlrm", dense_features=rows.dense_features, vocab_sizes=rows.vocab_sizes)
    with pytest.raises(ValueError, match="the step's own error") as raised:
        train(model, rows, config=TrainConfig(batch_size=8), callback=callback, on_step=broken)
    assert stopped == [raised.value]
    for thread in readers():
        thread.join(10)
