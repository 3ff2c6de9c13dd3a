import itertools

import numpy as np
import pytest
import torch
from click_files import gather
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep
from torch import nn

from loka.data import History, SyntheticClicks
from loka.data.generated.synthetic import BLOCK_ROWS
from loka.data.generated.teacher import CALIBRATION_ROWS

SMALL = (5, 2, 300)


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def normalized_entropy(logits, label):
    rate = label.double().mean()
    loss = nn.functional.binary_cross_entropy_with_logits(logits.double(), label.double())
    return float(loss / -(rate * rate.log() + (1 - rate) * (1 - rate).log()))


@settings(max_examples=15)
@given(batch_size=st.integers(1, 9000), start=st.integers(0, 12))
def test_rows_depend_on_neither_batch_size_nor_start(batch_size, start):
    source = SyntheticClicks(rows=10_000, seed=3, vocab_sizes=SMALL, dense_features=4)
    batches = list(itertools.islice(source.batches(batch_size, start=start), 4))
    whole = gather(SyntheticClicks(rows=10_000, seed=3, vocab_sizes=SMALL, dense_features=4), 10_000)
    first = min(start * batch_size, 10_000)
    assert len(batches) == min(4, -(-(10_000 - first) // batch_size))
    for number, batch in enumerate(batches):
        part = slice(first + number * batch_size, first + (number + 1) * batch_size)
        assert same([batch.dense, batch.sparse, batch.label], [rows[part] for rows in whole])


def test_shapes_types_and_ranges():
    source = SyntheticClicks(rows=2500, seed=0)
    batches = list(source.batches(1000))
    assert [len(batch) for batch in batches] == [1000, 1000, 500]
    dense, sparse, label = gather(source)
    assert dense.shape == (2500, 13)
    assert dense.dtype == torch.float32
    assert sparse.shape == (2500, 26)
    assert sparse.dtype == torch.int64
    assert label.shape == (2500,)
    assert set(label.tolist()) == {0.0, 1.0}
    assert torch.isfinite(dense).all()
    assert (sparse >= 0).all()
    assert (sparse < torch.tensor(source.vocab_sizes)).all()


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_shards_are_disjoint_and_cover_all_rows_once(shards):
    rows = 2 * BLOCK_ROWS + 77
    config = {"rows": rows, "seed": 5, "vocab_sizes": SMALL, "dense_features": 2, "first_row": 30}
    parts = [SyntheticClicks(**config, shard=shard, shards=shards) for shard in range(shards)]
    assert sum(part.rows for part in parts) == rows
    joined = [torch.cat(tensors) for tensors in zip(*(gather(part) for part in parts), strict=True)]
    assert same(joined, gather(SyntheticClicks(**config)))
    assert len({part.identity for part in parts}) == shards


def test_held_out_rows_continue_the_same_world():
    config = {"seed": 9, "vocab_sizes": SMALL, "dense_features": 3}
    both = gather(SyntheticClicks(rows=6000, **config))
    head = gather(SyntheticClicks(rows=5000, **config))
    tail = gather(SyntheticClicks(rows=1000, first_row=5000, **config))
    assert same(both, [torch.cat(pair) for pair in zip(head, tail, strict=True)])


@pytest.mark.parametrize("base_rate", sweep([0.03, 0.2, 0.5], [0.03]))
def test_base_rate_is_met_within_its_standard_error(base_rate):
    rows = 60_000
    source = SyntheticClicks(rows=rows, seed=11, base_rate=base_rate)
    probability = 1 / (1 + np.exp(-source.teacher_logits()))
    label = gather(source, 8192)[2].double().numpy()
    # Labels err around this sample's mean probability, and that around the calibration sample's.
    assert abs(label.mean() - probability.mean()) < 4 * np.sqrt((probability * (1 - probability)).mean() / rows)
    sampling = probability.std() * np.sqrt(1 / rows + 1 / CALIBRATION_ROWS)
    assert abs(probability.mean() - base_rate) < 4 * sampling


def test_ids_follow_the_zipf_law():
    size, rows = 50, 100_000
    source = SyntheticClicks(rows=rows, seed=2, vocab_sizes=(size,), dense_features=0)
    ids = gather(source, 50_000)[1][:, 0]
    weights = np.arange(1, size) ** -1.05
    expected = rows * weights / weights.sum()  # the first column has no missing values
    observed = np.bincount(ids.numpy(), minlength=size)
    assert observed[0] == 0
    chi2 = ((observed[1:] - expected) ** 2 / expected).sum()
    # 48 degrees of freedom: mean 48, variance 96; 5 deviations.
    assert chi2 < 48 + 5 * np.sqrt(96)


@pytest.mark.slow
def test_teacher_is_worth_learning_and_can_be_learned():
    train_rows = 100_000
    train = SyntheticClicks(rows=train_rows, seed=0)
    test = SyntheticClicks(rows=20_000, seed=0, first_row=train_rows)
    dense, sparse, label = gather(test, 20_000)
    best = normalized_entropy(torch.from_numpy(test.teacher_logits()), label)
    assert 0.6 < best < 0.85

    torch.manual_seed(0)
    offsets = torch.tensor([0, *itertools.accumulate(train.vocab_sizes)][:-1])
    weights = nn.Embedding(sum(train.vocab_sizes), 1, sparse=True)
    nn.init.zeros_(weights.weight)
    line = nn.Linear(13, 1)

    def logits(dense, sparse):
        return weights(sparse + offsets).sum((1, 2)) + line(dense)[:, 0]

    optimizers = [torch.optim.Adagrad(weights.parameters(), 0.05), torch.optim.Adam(line.parameters(), 0.01)]
    for batch in train.batches(1024):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(logits(batch.dense, batch.sparse), batch.label)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        learned = normalized_entropy(logits(dense, sparse), label)
    # Measured 0.85; a base-rate model has 1, and one linear model cannot reach the teacher.
    assert best < learned < 0.93


def test_account_covers_exactly_the_rows_handed_out():
    source = SyntheticClicks(rows=9000, seed=4, vocab_sizes=(9, 9), dense_features=3)
    assert source.account() == {"missing dense values": 0, "missing categories": 0}
    stream = source.batches(500)
    sparse = torch.cat([next(stream).sparse for _ in range(3)])
    partial = source.account()
    assert partial["missing categories"] == int((sparse == 0).sum()) > 0
    gather(source)
    repeated = SyntheticClicks(rows=9000, seed=4, vocab_sizes=(9, 9), dense_features=3)
    gather(repeated, 77)
    assert {key: count + partial[key] for key, count in repeated.account().items()} == source.account()


def test_identity_follows_every_argument():
    config = {"rows": 100, "seed": 1, "vocab_sizes": (5, 6), "dense_features": 2}
    changes = [
        *({"rows": 99}, {"seed": 2}, {"vocab_sizes": (6, 5)}, {"dense_features": 3}),
        *({"base_rate": 0.3}, {"alpha": 1.2}, {"first_row": 1}, {"shard": 1, "shards": 2}),
        *({"history": 4}, {"history": 5}),
    ]
    identities = {SyntheticClicks(**{**config, **change}).identity for change in [{}, *changes]}
    assert len(identities) == len(changes) + 1
    assert SyntheticClicks(**config).identity == SyntheticClicks(**config).identity


def test_a_history_is_padded_on_the_right_and_decides_labels():
    config = {"seed": 6, "vocab_sizes": (40, 20), "dense_features": 3, "base_rate": 0.25}
    source = SyntheticClicks(rows=30_000, history=10, **config)
    plain = SyntheticClicks(rows=30_000, **config)
    (batch,) = source.batches(30_000)
    (without,) = plain.batches(30_000)
    assert without.sequence is None
    assert torch.equal(batch.dense, without.dense)
    assert torch.equal(batch.sparse, without.sparse)
    there = torch.arange(10) < batch.lengths[:, None]
    assert torch.equal(batch.sequence > 0, there)
    assert batch.sequence.max() < 40
    assert 0.1 < (batch.lengths == 0).float().mean() < 0.4
    best = normalized_entropy(torch.from_numpy(source.teacher_logits()), batch.label)
    blind = normalized_entropy(torch.from_numpy(plain.teacher_logits()), batch.label)
    assert best < blind - 0.03
    probability = 1 / (1 + np.exp(-source.teacher_logits()))
    assert abs(probability.mean() - 0.25) < 4 * probability.std() * np.sqrt(1 / 30_000 + 1 / CALIBRATION_ROWS)


def test_rows_with_a_history_depend_on_neither_batch_size_nor_shard():
    config = {"rows": BLOCK_ROWS + 90, "seed": 5, "vocab_sizes": SMALL, "dense_features": 2, "history": 7}
    (whole,) = SyntheticClicks(**config).batches(10_000)
    parts = [batch for shard in range(2) for batch in SyntheticClicks(**config, shard=shard, shards=2).batches(999)]
    for name, tensor in whole.tensors().items():
        assert torch.equal(torch.cat([part.tensors()[name] for part in parts]), tensor), name
    assert SyntheticClicks(**config).history == History(length=7, vocab_size=SMALL[0])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rows": 0}, {"first_row": -1}, {"base_rate": 0.0}, {"base_rate": 1.0}),
        *({"vocab_sizes": ()}, {"vocab_sizes": (1, 5)}, {"shard": 2, "shards": 2}, {"history": -1}),
    ],
)
def test_senseless_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SyntheticClicks(**{"rows": 10, "seed": 0, **wrong})
