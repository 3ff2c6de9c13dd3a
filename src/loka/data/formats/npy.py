"""Criteo as npy triplets, as TorchRec and MLPerf write them: memory-mapped, nothing is loaded ahead.

    day_0_dense.npy    [N, D] float32, already transformed (TorchRec stores log(x + 3))
    day_0_sparse.npy   [N, F] int32; also day_0_sparse_contig_freq.npy, its name before MLPerf's renaming
    day_0_labels.npy   [N, 1] or [N]

Values are taken as they are: these files know no missing values. Ids are either contiguous already or raw
32-bit hashes, which are taken modulo the sizes of the tables, as TorchRec does.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from loka.core.exceptions import DataRefused
from loka.core.storage.untrusted import open_regular
from loka.data.block import MOST_IDS, Block
from loka.data.content import content_of, identity_of
from loka.data.files import COPY_AGAIN
from loka.data.order import Shuffle
from loka.data.reader import Groups, Reader
from loka.data.workers import in_order, processors

GROUP_ROWS = 8192
_SCAN_ROWS = 1 << 18


@dataclass(frozen=True)
class Triplet:
    """The three files of the same rows."""

    dense: Path
    sparse: Path
    labels: Path


def open_npy(
    files: str | Path | Sequence[Triplet],
    *,
    vocab_sizes: Sequence[int] | None = None,
    shuffle: Shuffle | None = None,
    first_row: int = 0,
    rows: int | None = None,
    workers: int | None = None,
    pin: bool = False,
) -> Reader:
    """A `Source` over npy triplets: those of a folder, days in the order of their numbers, or the given ones.

    Ids are taken modulo `vocab_sizes`; without them one pass finds the largest id of each column, and
    negative ids are refused.
    """
    triplets = npy_triplets(Path(files)) if isinstance(files, str | Path) else list(files)
    store = NpyStore(triplets, vocab_sizes=vocab_sizes)
    return Reader(store, shuffle=shuffle, first_row=first_row, rows=rows, workers=workers, pin=pin)


def npy_triplets(folder: Path) -> list[Triplet]:
    """The triplets of a folder by their `*_dense.npy`; numbers in names count as numbers.

    Raises:
        DataRefused: there are none, or one lacks its sparse ids or labels.
    """
    found = sorted(folder.glob("*_dense.npy"), key=lambda path: _natural(path.name))
    if not found:
        raise DataRefused(
            f"{folder}: no file called *_dense.npy", way_out="pass the triplets by name: Triplet(dense, ...)"
        )
    triplets = []
    for dense in found:
        stem = dense.name.removesuffix("_dense.npy")
        sparse = [folder / f"{stem}_{name}.npy" for name in ("sparse", "sparse_contig_freq")]
        labels = [folder / f"{stem}_{name}.npy" for name in ("labels", "label")]
        triplets.append(Triplet(dense, _existing(sparse), _existing(labels)))
    return triplets


class NpyStore:
    """The rows of npy triplets, for a `Reader`.

    Raises:
        DataRefused: a file is missing or truncated, or the shapes of a triplet do not fit.
    """

    def __init__(self, triplets: Sequence[Triplet], *, vocab_sizes: Sequence[int] | None = None) -> None:
        if not triplets:
            raise DataRefused("no files given", way_out="pass a folder, or a sequence of Triplet")
        self._triplets = list(triplets)
        self._arrays = [_mapped(triplet) for triplet in self._triplets]
        widths = {(dense.shape[1], sparse.shape[1]) for dense, sparse, _ in self._arrays}
        if len(widths) > 1:
            raise DataRefused(
                "the triplets differ in their numbers of features",
                why=[
                    f"{triplet.dense.name}: {dense.shape[1]} dense, {sparse.shape[1]} sparse"
                    for triplet, (dense, sparse, _) in zip(self._triplets, self._arrays, strict=True)
                ],
                way_out="give triplets of one data set, which have the same columns",
            )
        ((self.dense_features, sparse_features),) = widths
        self.history = None
        if vocab_sizes is not None and len(vocab_sizes) != sparse_features:
            raise DataRefused(
                f"{len(vocab_sizes)} vocab_sizes for {sparse_features} sparse columns",
                way_out="one size for each column",
            )
        if vocab_sizes is not None and any(n < 1 or n != int(n) for n in vocab_sizes):
            raise DataRefused(
                f"vocab_sizes are {[*vocab_sizes]}: ids are taken modulo them",
                way_out="a whole number from 1 on for each column",
            )
        self._modulo = vocab_sizes is not None
        self.vocab_sizes = tuple(int(n) for n in vocab_sizes) if vocab_sizes is not None else self._scanned()
        self._groups = Groups([len(dense) for dense, _, _ in self._arrays], GROUP_ROWS)
        self.group_rows = self._groups.rows_of

    @property
    def identity(self) -> str:
        paths = [path for t in self._triplets for path in (t.dense, t.sparse, t.labels)]
        files = [content_of(path) for path in paths]
        content = {"store": "NpyStore", "files": files, "sizes": self.vocab_sizes, "modulo": self._modulo}
        return identity_of(content)

    def account(self) -> dict[str, int]:
        """Nothing: values are taken as they are, or refused."""
        return {}

    def load(self, group: int, first: int, last: int) -> Block:
        index, inside = self._groups.locate(group)
        start = inside * GROUP_ROWS
        dense, sparse, label = (array[start + first : start + last] for array in self._arrays[index])
        triplet = self._triplets[index]
        label = label.reshape(-1)
        wrong = np.flatnonzero((label != 0) & (label != 1))
        if len(wrong):
            raise DataRefused(
                f"{triplet.labels}: labels must be 0 and 1",
                why=[f"row {start + first + wrong[0]} holds {label[wrong[0]]}"],
                way_out="map or filter the labels where the files are made",
            )
        with np.errstate(over="ignore"):
            held = dense.astype(np.float32)
        unfit = np.flatnonzero(~np.isfinite(held).all(axis=1))
        if len(unfit):
            raise DataRefused(
                f"{triplet.dense}: dense values must be finite in float32",
                why=[f"row {start + first + unfit[0]} holds {dense[unfit[0]].tolist()}"],
                way_out="replace them where the files are made, or convert the raw TSV (loka data convert)",
            )
        unsigned = sparse.dtype.kind == "u"  # with int64 numpy makes float64 of it, which lacks a hash's last bits
        ids = np.asarray(sparse)
        if self._modulo:
            ids = np.mod(ids, np.array(self.vocab_sizes, np.uint64 if unsigned else np.int64))
        ids = ids.astype(np.int64) if unsigned else ids
        return Block(
            dense=held, sparse=ids, label=label.astype(np.float32), counts=np.empty((last - first, 0), np.int32)
        )

    def _scanned(self) -> tuple[int, ...]:
        """The largest id of each column, plus one."""
        parts = [
            (index, start)
            for index, (_, sparse, _) in enumerate(self._arrays)
            for start in range(0, len(sparse), _SCAN_ROWS)
        ]
        workers = processors()
        found = in_order(partial(_range_of, self._arrays), parts, workers=workers, ahead=2 * workers)
        high = [0] * self._arrays[0][1].shape[1]
        for (index, _), (least, most) in zip(parts, found, strict=True):
            if least < 0:
                raise DataRefused(
                    f"{self._triplets[index].sparse}: ids are negative, such as {least}",
                    why=["raw hashes are not yet ids of tables"],
                    way_out="pass vocab_sizes: ids are then taken modulo the size of each table",
                )
            if max(most, default=0) > MOST_IDS:
                raise DataRefused(
                    f"{self._triplets[index].sparse}: ids go up to {max(most)}",
                    why=[f"a table has {MOST_IDS} rows at most"],
                    way_out="pass vocab_sizes: ids are then taken modulo the size of each table",
                )
            high = list(map(max, high, most))
        return tuple(most + 1 for most in high)


def _range_of(arrays: Sequence[tuple[np.ndarray, ...]], part: tuple[int, int]) -> tuple[int, list[int]]:
    ids = arrays[part[0]][1][part[1] : part[1] + _SCAN_ROWS]
    return int(ids.min(initial=0)), ids.max(axis=0).tolist()


def _mapped(triplet: Triplet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dense, sparse, labels = (_map(path) for path in (triplet.dense, triplet.sparse, triplet.labels))
    rows = len(dense) if dense.ndim else 0
    if dense.ndim != 2 or sparse.ndim != 2 or labels.size != rows or len(sparse) != rows or not rows:
        raise DataRefused(
            f"{triplet.dense}: the shapes of a triplet do not fit",
            why=[
                f"{path.name}: {array.shape}"
                for path, array in zip(
                    (triplet.dense, triplet.sparse, triplet.labels), (dense, sparse, labels), strict=True
                )
            ],
            way_out="dense [N, D], sparse [N, F] and labels [N] or [N, 1] of the same rows; rows of several "
            "tasks are converted from a table: loka data convert --schema",
        )
    if not np.issubdtype(sparse.dtype, np.integer):
        raise DataRefused(
            f"{triplet.sparse}: ids must be integers",
            why=[f"they are {sparse.dtype}"],
            way_out="save the ids with an integer dtype, such as int32",
        )
    for path, array in ((triplet.dense, dense), (triplet.labels, labels)):
        if array.dtype.kind not in "fiub":
            raise DataRefused(
                f"{path}: values must be real numbers",
                why=[f"they are {array.dtype}"],
                way_out="save the array with a floating-point or integer dtype",
            )
    return dense, sparse, labels


def _map(path: Path) -> np.ndarray:
    try:
        with open_regular(path):  # numpy would wait for the writer of a pipe
            pass
        found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return found
    except Exception as error:  # what numpy raises on a header that it did not write has no bounds
        raise DataRefused(f"{path}: not a readable npy file", why=[str(error)], way_out=COPY_AGAIN) from error


def _existing(candidates: list[Path]) -> Path:
    for path in candidates:
        if path.exists():
            return path
    names = " or ".join(path.name for path in candidates)
    packed = sorted(candidates[0].parent.glob(f"{candidates[0].stem}*.npz"))
    why = [f"{packed[0].name} holds several ids per column; models here take one"] if packed else []
    raise DataRefused(
        f"{candidates[0].parent}: there is no {names}",
        why=why,
        way_out="put the file there, or pass the triplets by name: Triplet(dense, ...)",
    )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
