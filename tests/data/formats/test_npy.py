import numpy as np
import pytest
import torch
from click_files import gather

from loka.core.exceptions import DataRefused
from loka.data import Shuffle, Triplet, npy_triplets, open_npy, open_rows


def write_day(folder, day, rows, *, low=0, high=50, flat=False):
    rng = np.random.default_rng(day)
    np.save(folder / f"day_{day}_dense.npy", rng.random((rows, 13)).astype(np.float32) + day)
    np.save(folder / f"day_{day}_sparse.npy", rng.integers(low, high, (rows, 26)).astype(np.int32))
    labels = rng.integers(0, 2, (rows, 1)).astype(np.int32)
    np.save(folder / f"day_{day}_labels.npy", labels.reshape(-1) if flat else labels)


@pytest.fixture
def days(tmp_path, monkeypatch):
    monkeypatch.setattr("loka.data.formats.npy.GROUP_ROWS", 16)
    monkeypatch.setattr("loka.data.formats.npy._SCAN_ROWS", 20)
    write_day(tmp_path, 10, 40)
    write_day(tmp_path, 2, 55, flat=True)
    return tmp_path


def stacked(folder, name):
    return np.concatenate([np.load(folder / f"day_{day}_{name}.npy").reshape(n, -1) for day, n in ((2, 55), (10, 40))])


def test_rows_come_as_they_are_day_2_before_day_10(days):
    source = open_npy(days)
    dense, sparse, label = gather(source)
    assert source.rows == 95
    np.testing.assert_array_equal(dense, stacked(days, "dense"))
    np.testing.assert_array_equal(sparse, stacked(days, "sparse"))
    np.testing.assert_array_equal(label[:, None], stacked(days, "labels"))
    assert (dense.dtype, sparse.dtype, label.dtype) == (torch.float32, torch.int64, torch.float32)
    assert source.vocab_sizes == tuple(stacked(days, "sparse").max(axis=0) + 1)
    assert source.dense_features == 13


def test_shuffling_and_ranks_are_those_of_every_reader(days):
    whole = gather(open_npy(days))[0][:, 0].tolist()
    parts = [
        gather(open_npy(days, shuffle=Shuffle(seed=1, rank=rank, world=2, window_rows=40)))[0][:, 0].tolist()
        for rank in range(2)
    ]
    assert [len(part) for part in parts] == [47, 47]
    assert len(set(parts[0] + parts[1])) == 94
    assert set(parts[0] + parts[1]) <= set(whole)
    assert parts[0] != whole[:47]


def test_raw_hashes_are_taken_modulo_the_tables(days):
    write_day(days, 2, 55, low=-(2**31), high=2**31 - 1)
    with pytest.raises(DataRefused, match=r"day_2_sparse\.npy: ids are negative, such as -(.|\n)*vocab_sizes"):
        open_npy(days)
    sizes = [7 + column for column in range(26)]
    source = open_npy(days, vocab_sizes=sizes)
    sparse = gather(source)[1].numpy()
    assert source.vocab_sizes == tuple(sizes)
    raw = stacked(days, "sparse").astype(object)  # Python's integers: a remainder that cannot overflow
    np.testing.assert_array_equal(sparse, (raw % np.array(sizes, object)).astype(np.int64))
    assert source.identity != open_npy(days, vocab_sizes=[9] * 26).identity


def test_raw_hashes_of_64_bits_keep_their_last_ones(days):
    """uint64 modulo int64 is float64 in numpy, which has 53 bits."""
    raw = np.random.default_rng(0).integers(0, 2**64 - 1, (55, 26), np.uint64)
    np.save(days / "day_2_sparse.npy", raw)
    sparse = gather(open_npy(days, vocab_sizes=[1000] * 26))[1].numpy()
    np.testing.assert_array_equal(sparse[:55], (raw.astype(object) % 1000).astype(np.int64))


@pytest.mark.parametrize("size", [0, -5, 10.7])
def test_a_table_of_no_size_is_refused(days, size):
    with pytest.raises(DataRefused, match=rf"vocab_sizes are \[{size}, 9.*ids are taken modulo them"):
        open_npy(days, vocab_sizes=[size] + [9] * 25)


def test_what_float32_does_not_hold_is_refused(days):
    np.save(days / "day_2_dense.npy", np.full((55, 13), 1e300))
    with pytest.raises(DataRefused, match=r"finite in float32\n  row 0 holds \[1e\+300"):
        gather(open_npy(days))


def test_names_before_the_renaming_are_found_too(days):
    (days / "day_2_sparse.npy").rename(days / "day_2_sparse_contig_freq.npy")
    (days / "day_2_labels.npy").rename(days / "day_2_label.npy")
    assert [t.sparse.name for t in npy_triplets(days)] == ["day_2_sparse_contig_freq.npy", "day_10_sparse.npy"]
    chosen = [Triplet(days / "day_10_dense.npy", days / "day_10_sparse.npy", days / "day_10_labels.npy")]
    assert open_npy(chosen).rows == 40


def test_what_does_not_fit_is_refused_by_name(days, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataRefused, match=r"no file called \*_dense"):
        open_npy(empty)
    with pytest.raises(DataRefused, match="25 vocab_sizes for 26"):
        open_npy(days, vocab_sizes=[5] * 25)
    labels = np.load(days / "day_10_labels.npy")
    labels[21] = 2
    np.save(days / "day_10_labels.npy", labels)
    with pytest.raises(DataRefused, match=r"day_10_labels\.npy: labels must be 0 and 1\n  row 21 holds 2"):
        gather(open_npy(days))
    dense = np.load(days / "day_2_dense.npy")
    dense[3, 4] = np.nan
    np.save(days / "day_2_dense.npy", dense)
    with pytest.raises(
        DataRefused, match=r"day_2_dense\.npy: dense values must be finite in float32\n  row 3 holds .*nan"
    ):
        gather(open_npy(days))
    np.save(days / "day_10_labels.npy", labels[:-1])
    with pytest.raises(DataRefused, match=r"shapes of a triplet(.|\n)*day_10_labels\.npy: \(39, 1\)"):
        open_npy(days)
    path = days / "day_10_dense.npy"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataRefused, match=r"day_10_dense\.npy: not a readable npy file"):
        open_npy(days)
    (days / "day_2_sparse.npy").unlink()
    (days / "day_2_sparse_multi_hot.npz").write_bytes(b"")
    with pytest.raises(DataRefused, match=r"no day_2_sparse\.npy or .*\n  day_2_sparse_multi_hot\.npz holds several"):
        open_npy(days)


def test_a_path_says_what_it_holds(days, tmp_path):
    train, held_out = open_rows(days, holdout=0.2)
    assert (train.rows, held_out.rows) == (76, 19)
    np.testing.assert_array_equal(gather(held_out)[0], stacked(days, "dense")[76:])
    np.testing.assert_array_equal(gather(train)[0], stacked(days, "dense")[:76])
    shuffled = open_rows(days, holdout=0.2, shuffle=Shuffle(seed=0))
    assert gather(shuffled[0])[0][:, 0].tolist() != stacked(days, "dense")[:76, 0].tolist()
    np.testing.assert_array_equal(gather(shuffled[1])[0], stacked(days, "dense")[76:])
    few, many = tmp_path / "few", tmp_path / "many"
    for other, high in ((few, 40), (many, 90)):  # of the largest ids that they hold
        other.mkdir()
        write_day(other, 3, 30, high=high)
    assert open_rows(days, test=few)[1].rows == 30
    with pytest.raises(DataRefused, match=r"ids of sparse feature 0: 50 and \d\d"):
        open_rows(days, test=many)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataRefused, match=r"neither prepared clicks(.|\n)*loka data convert"):
        open_rows(empty)
    with pytest.raises(ValueError, match="holdout=1"):
        open_rows(days, holdout=1.0)
