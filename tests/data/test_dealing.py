from dataclasses import dataclass

import numpy as np
import pytest
import torch

from loka.core.exceptions import DataRefused
from loka.data import Batch, Dealt, Shuffle, SyntheticClicks, npy_triplets, open_npy


@dataclass(frozen=True)
class Counted:
    first: int
    rows: int
    epoch: int = 0
    dense_features: int = 1
    vocab_sizes: tuple[int, ...] = (2,)

    @property
    def identity(self):
        return f"{self.first} {self.rows}"

    def at_epoch(self, epoch):
        return Counted(self.first, self.rows, epoch)

    def batches(self, batch_size, *, start=0):
        for at in range(start * batch_size, self.rows, batch_size):
            count = min(batch_size, self.rows - at)
            dense = torch.arange(self.first + at, self.first + at + count)[:, None] + 1000.0 * self.epoch
            yield Batch(dense=dense, sparse=torch.zeros(count, 1).long(), label=torch.zeros(count))

    def account(self):
        return {"odd": 1}


def parts(count, rows):
    return [Counted(100 * part, rows) for part in range(count)]


def steps_of(source, batch_size, start=0):
    return [batch.dense[:, 0].int().tolist() for batch in source.batches(batch_size, start=start)]


def dealt(count, rows, ranks):
    return [Dealt(parts(count, rows), rank=rank, ranks=ranks) for rank in range(ranks)]


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("rows", [24, 29, 30])
def test_a_step_has_the_same_rows_on_any_number_of_ranks(ranks, rows, start):
    """Four parts of six rows a step; the short one at the end loses fewer rows than ranks."""
    alone = steps_of(*dealt(4, rows, 1), 24, start)
    shared = dealt(4, rows, ranks)
    by_rank = [steps_of(source, 24 // ranks, start) for source in shared]
    together = [[row for part in step for row in part] for step in zip(*by_rank, strict=True)]
    for step, (found, wanted) in enumerate(zip(together, alone, strict=True)):
        last = start + step == rows // 6
        assert len(wanted) - len(found) in (range(ranks) if last else [0])
        assert set(found) <= set(wanted)
        assert len(set(found)) == len(found)
    assert {source.rows for source in shared} == {4 * rows // ranks}
    assert all(sum(map(len, rank)) == 4 * rows // ranks - start * 24 // ranks for rank in by_rank)
    left = shared[0].account()["rows left out of each epoch, which ranks cannot share"]
    assert left == 4 * rows % ranks


def test_no_step_is_empty():
    """Of 11 rows four ranks take eight; the mean of a loss over none of the last three is NaN."""
    assert [[len(rows) for rows in steps_of(source, 2)] for source in dealt(1, 11, 4)] == [[2]] * 4


def test_as_many_ranks_as_parts_read_their_own():
    for rank, source in enumerate(dealt(4, 9, 4)):
        assert steps_of(source, 9) == [list(range(100 * rank, 100 * rank + 9))]
        assert source.account()["odd"] == 1


def test_the_identity_is_that_of_all_parts():
    assert len({source.identity for ranks in (1, 3, 4) for source in dealt(4, 9, ranks)}) == 1
    assert dealt(4, 9, 1)[0].identity != dealt(4, 10, 1)[0].identity


def test_each_epoch_has_its_order():
    assert steps_of(dealt(2, 4, 1)[0].at_epoch(3), 4) == [[3000, 3001, 3100, 3101], [3002, 3003, 3102, 3103]]


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(DataRefused, match="3 ranks of 6 rows take 18 in a step, which 4 parts"):
        dealt(4, 9, 3)[0].batches(6)
    with pytest.raises(DataRefused, match=r"2 parts of \[4, 5\] rows"):
        Dealt([Counted(0, 4), Counted(9, 5)], rank=0, ranks=1)
    with pytest.raises(DataRefused, match="4 rows are fewer than 5 ranks"):
        Dealt(parts(4, 1), rank=0, ranks=5)
    with pytest.raises(ValueError, match="rank=2 of ranks=2"):
        Dealt(parts(4, 1), rank=2, ranks=2)


def test_parts_of_a_reader_are_what_ranks_read(tmp_path):
    np.save(tmp_path / "day_0_dense.npy", np.arange(50, dtype=np.float32)[:, None])
    np.save(tmp_path / "day_0_sparse.npy", np.zeros((50, 1), np.int32))
    np.save(tmp_path / "day_0_labels.npy", np.zeros((50, 1), np.int32))
    whole = open_npy(npy_triplets(tmp_path), shuffle=Shuffle(seed=1, window_rows=10))
    own = [
        open_npy(npy_triplets(tmp_path), shuffle=Shuffle(seed=1, window_rows=10, rank=rank, world=4))
        for rank in range(4)
    ]
    made = whole.parts(4)
    assert [part.identity for part in made] == [one.identity for one in own]
    assert [part.account() == whole.account() for part in made[1:]] == [False] * 3
    read = [row for rank in range(3) for step in steps_of(Dealt(made, rank=rank, ranks=3), 4) for row in step]
    assert len(read) == len(set(read)) == 48
    assert set(steps_of(Dealt(made, rank=0, ranks=3), 4)[0]) <= {
        row for one in own for row in steps_of(Dealt([one], rank=0, ranks=1), 3)[0]
    }


def test_generated_rows():
    shards = [SyntheticClicks(rows=40, seed=3, shard=part, shards=4) for part in range(4)]
    alone = next(iter(Dealt(shards, rank=0, ranks=1).batches(20)))
    second = next(iter(Dealt(shards, rank=1, ranks=2).batches(10)))
    assert torch.equal(alone.sparse[10:], second.sparse)
