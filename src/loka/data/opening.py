"""One way in for whatever a path holds: a prepared folder, a folder of npy triplets, or a table."""

from __future__ import annotations

from pathlib import Path

from loka.core.exceptions import DataRefused
from loka.data.batch import Source
from loka.data.npy import NpyStore, npy_triplets
from loka.data.order import Shuffle
from loka.data.reader import split
from loka.data.schema import CRITEO, Schema
from loka.data.shards import MANIFEST, ShardStore
from loka.data.table import open_table


def open_rows(
    path: str | Path,
    *,
    holdout: float = 0.2,
    schema: Schema = CRITEO,
    shuffle: Shuffle | None = None,
    workers: int | None = None,
    pin: bool = False,
) -> tuple[Source, Source]:
    """A training and a held-out source: the last `holdout` share of the rows is held out.

    `schema` is that of a table; `shuffle`, `workers` and `pin` are for folders (see `Reader`).

    Raises:
        DataRefused: there is nothing there that can be read, or a table was to be shuffled.
    """
    path = Path(path)
    if not path.is_dir():
        if shuffle is not None:
            raise DataRefused(
                f"{path}: a table is read in its own order",
                way_out="prepare it once: loka data convert, then pass the folder",
            )
        return open_table(path, schema=schema, holdout=holdout)
    if (path / MANIFEST).exists():
        store: ShardStore | NpyStore = ShardStore(path)
    elif any(path.glob("*_dense.npy")):
        store = NpyStore(npy_triplets(path))
    else:
        raise DataRefused(
            f"{path}: neither prepared clicks ({MANIFEST}) nor npy triplets (*_dense.npy)",
            way_out=f"prepare the files in it: loka data convert {path}/* --out FOLDER",
        )
    return split(store, holdout=holdout, shuffle=shuffle, workers=workers, pin=pin)
