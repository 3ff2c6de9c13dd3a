import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from loka.core.exceptions import DataRefused
from loka.data import Batch, History, Reader, Shuffle, at_epoch
from loka.data.block import Block
from loka.data.reader import split
from loka.data.workers import processors

GROUPS = np.array([7, 7, 3, 7, 7, 7, 1, 7, 7, 2])
ROWS = int(GROUPS.sum())


class Rows:
    """A store whose row r is all r; slow and fast groups alternate."""

    def __init__(self, *, broken=None, history=False):
        self.group_rows, self.dense_features, self.vocab_sizes, self.identity = (GROUPS, 2, (ROWS, ROWS), "rows")
        self.history = History(length=3, vocab_size=ROWS) if history else None
        self.broken, self.loads = broken, []

    def account(self):
        return {"made up": 3}

    def load(self, group, first, last):
        if group == self.broken:
            raise DataRefused("part-7.parquet: row group 4 cannot be read")
        self.loads.append(group)
        time.sleep(0.002 * (group % 3))
        rows = np.arange(first, last) + int(GROUPS[:group].sum())
        block = Block(
            dense=np.repeat(rows[:, None], 2, axis=1).astype(np.float32),
            sparse=np.stack([rows, ROWS - 1 - rows], axis=1).astype(np.int32),
            label=(rows % 2).astype(np.float32),
            counts=np.empty((len(rows), 0), np.int32),
        )
        if self.history is None:
            return block
        return replace(block, sequence=np.repeat(rows[:, None], 3, axis=1), lengths=rows % 4)


def numbers(batches):
    rows = torch.cat([batch.sparse[:, 0] for batch in batches])
    assert rows.dtype == torch.int64
    for batch in batches:
        torch.testing.assert_close(batch.dense, batch.sparse[:, :1].float().expand(-1, 2), rtol=0, atol=0)
        assert torch.equal(batch.sparse.sum(1), torch.full((len(batch),), ROWS - 1))
        assert torch.equal(batch.label, (batch.sparse[:, 0] % 2).float())
    return rows.tolist()


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("loka-data")]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("batch_size", [1, 4, 10, 30, 100])
def test_rows_depend_on_neither_threads_nor_start_nor_batch_size(seed, batch_size):
    shuffle = Shuffle(seed=seed, window_rows=20)
    whole = numbers(list(Reader(Rows(), shuffle=shuffle, workers=1).batches(ROWS)))
    assert sorted(whole) == list(range(ROWS))
    assert (whole == list(range(ROWS))) == (seed is None)
    for workers in (1, 2, 5):
        reader = Reader(Rows(), shuffle=shuffle, workers=workers)
        batches = list(reader.batches(batch_size))
        assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
        assert numbers(batches) == whole
        start = len(batches) // 2
        assert numbers([*batches[:start], *reader.batches(batch_size, start=start)]) == whole
        assert list(reader.batches(batch_size, start=len(batches))) == []


def test_resuming_reads_no_window_twice():
    store = Rows()
    reader = Reader(store, shuffle=Shuffle(seed=1, window_rows=14), workers=1)
    list(reader.batches(5))
    everything = list(store.loads)
    store.loads.clear()
    list(reader.batches(5, start=8))  # row 40 of 55
    skipped = everything[: -len(store.loads)]
    assert [*skipped, *store.loads] == everything
    # All but the window that holds row 40, which has less than 14 + 7 rows.
    assert 40 - 21 < sum(GROUPS[group] for group in skipped) <= 40


def test_ranks_are_disjoint_with_equal_batches_in_every_epoch():
    seen = []
    for epoch in range(3):
        readers = [
            Reader(Rows(), shuffle=Shuffle(seed=2, rank=rank, world=4, window_rows=10)).at_epoch(epoch)
            for rank in range(4)
        ]
        read = [list(reader.batches(4)) for reader in readers]
        assert {tuple(len(batch) for batch in batches) for batches in read} == {(4, 4, 4, 1)}
        assert {reader.rows for reader in readers} == {13}
        rows = [number for batches in read for number in numbers(batches)]
        assert len(set(rows)) == 52
        seen.append(tuple(rows))
        assert readers[0].account() == {"made up": 3, "rows left out of each epoch, ranks get equally many": ROWS - 52}
    assert len(set(seen)) == 3


@pytest.mark.parametrize("world", [1, 3, 4, 7])
@pytest.mark.parametrize("first_row", [0, 5, 11])
def test_rows_that_no_rank_reads_are_in_the_account(world, first_row):
    readers = [Reader(Rows(), shuffle=Shuffle(rank=r, world=world), first_row=first_row) for r in range(world)]
    (left_out,) = {reader.account()["rows left out of each epoch, ranks get equally many"] for reader in readers}
    assert sum(reader.rows for reader in readers) + left_out == ROWS - first_row
    assert 0 <= left_out < world


def test_an_epoch_is_no_other_source_but_another_order():
    reader = Reader(Rows(), shuffle=Shuffle(seed=0))
    later = at_epoch(reader, 3)
    assert later.identity == reader.identity
    assert numbers(list(later.batches(9))) != numbers(list(reader.batches(9)))
    assert at_epoch(reader, 0).identity != Reader(Rows(), shuffle=Shuffle(seed=1)).identity
    assert reader.identity != Reader(Rows(), shuffle=Shuffle(seed=0), rows=20).identity


def test_a_row_range_is_read_and_no_other_row():
    reader = Reader(Rows(), shuffle=Shuffle(seed=3, window_rows=12), first_row=11, rows=30)
    assert reader.rows == 30
    assert sorted(numbers(list(reader.batches(8)))) == list(range(11, 41))
    for wrong in ({"first_row": -1}, {"rows": 0}, {"first_row": 50, "rows": 6}):
        with pytest.raises(DataRefused, match="there are 55 rows"):
            Reader(Rows(), **wrong)
    with pytest.raises(ValueError, match="workers"):
        Reader(Rows(), workers=0)


@pytest.mark.parametrize("holdout", [0.2, 0.5])
def test_the_held_out_rows_are_the_last_in_their_order(holdout):
    train, held_out = split(Rows(), holdout=holdout, shuffle=Shuffle(seed=4, window_rows=20))
    rows = numbers(list(train.batches(9)))
    last = numbers(list(held_out.batches(9)))
    assert len(last) == round(ROWS * holdout)
    assert sorted(rows) + last == list(range(ROWS))
    assert rows != sorted(rows)
    assert "made up" in train.account()
    assert "made up" not in held_out.account()  # counted once


@pytest.mark.parametrize("holdout", [0.0, 1.0, -0.1, 1.1, float("nan")])
def test_neither_part_of_a_split_is_empty(holdout):
    with pytest.raises(ValueError, match="holdout"):
        split(Rows(), holdout=holdout)


def test_a_history_travels_with_its_row():
    reader = Reader(Rows(history=True), shuffle=Shuffle(seed=0, window_rows=9))
    for batch in reader.batches(6):
        assert batch.sequence.dtype == batch.lengths.dtype == torch.int64
        assert torch.equal(batch.sequence, batch.sparse[:, :1].expand(-1, 3))
        assert torch.equal(batch.lengths, batch.sparse[:, 0] % 4)


def test_the_error_of_a_thread_surfaces_and_ends_the_others():
    reader = Reader(Rows(broken=4), workers=3)
    with pytest.raises(DataRefused, match=r"part-7\.parquet: row group 4"):
        list(reader.batches(5))
    assert threads() == []


def test_leaving_early_ends_the_threads():
    batches = Reader(Rows(), shuffle=Shuffle(seed=0, window_rows=5), workers=4).batches(3)
    next(batches)
    assert threads()
    with pytest.raises(KeyboardInterrupt):
        batches.throw(KeyboardInterrupt())
    assert threads() == []
    for _ in Reader(Rows(), workers=2).batches(3):
        break
    assert threads() == []


def test_batches_do_not_share_memory():
    first, second = list(Reader(Rows()).batches(5))[:2]
    kept = second.sparse.clone()
    first.sparse.fill_(-1)
    assert torch.equal(second.sparse, kept)


def test_ranks_of_one_machine_share_its_processors(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(16)))
    assert processors() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")
    assert processors() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert processors() == 1


@pytest.mark.gpu
def test_pinned_batches_reach_the_gpu():
    reader = Reader(Rows(), shuffle=Shuffle(seed=0, window_rows=20), pin=True)
    batches = list(reader.batches(8))
    assert all(tensor.is_pinned() for batch in batches for tensor in batch.tensors().values())
    assert numbers([batch.to("cuda").to("cpu") for batch in batches]) == numbers(batches)


@pytest.mark.gpu
def test_what_comes_back_from_a_gpu_has_arrived():
    """A copy that is not waited for would be read before the kernels in its way are done."""
    late = torch.ones(4096, 4096, device="cuda")
    for _ in range(20):
        late = late @ torch.eye(4096, device="cuda")
    batch = Batch(dense=late, sparse=late.long(), label=late[:, 0].clone())
    there = batch.to("cpu")
    assert bool((there.dense == 1).all() and (there.sparse == 1).all() and (there.label == 1).all())


def test_only_copies_to_a_device_are_not_waited_for(monkeypatch):
    waited, to = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, d, non_blocking: waited.append(not non_blocking) or to(x, d))
    batch = next(iter(Reader(Rows()).batches(3)))
    batch.to("cpu")
    batch.to("meta")
    assert waited == [True] * 3 + [False] * 3
