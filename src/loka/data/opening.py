"""One way in for whatever a path holds: a prepared folder, a folder of npy triplets, or a table."""

from pathlib import Path

from loka.core.exceptions import DataRefused, truncated
from loka.data.batch import Source, tasks_of
from loka.data.categories.vocabulary import read_vocabulary
from loka.data.conversion import VOCABULARY
from loka.data.formats.npy import NpyStore, npy_triplets
from loka.data.formats.shards import MANIFEST, ShardStore
from loka.data.formats.table import open_table, open_tables
from loka.data.order import Shuffle
from loka.data.reader import Reader, Store, split
from loka.data.schema import CRITEO, Schema

PREPARE_ONCE = "prepare it once: loka data convert, then pass the folder"


def open_rows(
    path: str | Path,
    *,
    holdout: float = 0.2,
    test: str | Path | None = None,
    schema: Schema | None = None,
    shuffle: Shuffle | None = None,
    workers: int | None = None,
    pin: bool = False,
) -> tuple[Source, Source]:
    """A training and a held-out source: the last `holdout` share of the rows is held out, or those of `test`.

    `schema` is that of tables, by default Criteo's; `shuffle`, `workers` and `pin` are for folders (see
    `Reader`). The categories of a `test` table get the ids of the training rows.

    Raises:
        DataRefused: there is nothing there that can be read, a table was to be shuffled or a folder to have
            a schema, or the two do not belong together.
    """
    path = Path(path)
    if test is not None and Path(test).is_dir() != path.is_dir():
        raise DataRefused(
            f"{path} and {test}: one is a table and the other a folder",
            why=["categories would not get the same ids"],
            way_out=f"prepare both: loka data convert, the second one with --vocabulary {path}",
        )
    if not path.is_dir():
        if shuffle is not None:
            raise DataRefused(f"{path}: a table is read in its own order", way_out=PREPARE_ONCE)
        if test is not None:
            return open_tables(path, test, schema=schema or CRITEO)
        return open_table(path, schema=schema or CRITEO, holdout=holdout)
    if schema is not None:
        raise DataRefused(f"{path}: a folder has its columns already", way_out="leave the schema out")
    store = _store(path)
    if test is None:
        return split(store, holdout=holdout, shuffle=shuffle, workers=workers, pin=pin)
    other = _store(Path(test))
    _require_alike(path, store, Path(test), other)
    return (Reader(store, shuffle=shuffle, workers=workers, pin=pin), Reader(other, workers=workers, pin=pin))


def _store(path: Path) -> ShardStore | NpyStore:
    if (path / MANIFEST).exists():
        return ShardStore(path)
    if any(path.glob("*_dense.npy")):
        return NpyStore(npy_triplets(path))
    raise DataRefused(
        f"{path}: neither prepared clicks ({MANIFEST}) nor npy triplets (*_dense.npy)",
        way_out=f"prepare the files in it: loka data convert {path}/* --out FOLDER",
    )


def _require_alike(path: Path, store: Store, test: Path, other: Store) -> None:
    """A model that is built for the one has to fit the other, and an id to be the same category in both."""
    parts: dict[str, tuple[object, object]] = {
        "format": (type(store).__name__, type(other).__name__),
        "dense features": (store.dense_features, other.dense_features),
        "sparse features": (len(store.vocab_sizes), len(other.vocab_sizes)),
        "labels": (tasks_of(store), tasks_of(other)),
        "history": (store.history, other.history),
    }
    parts |= {
        f"ids of sparse feature {number}": sizes
        for number, sizes in enumerate(zip(store.vocab_sizes, other.vocab_sizes, strict=False))
        if isinstance(store, ShardStore) or sizes[0] < sizes[1]  # npy triplets tell the largest id that they hold
    }
    why = [f"{what}: {there} and {here}" for what, (there, here) in parts.items() if there != here]
    if not why and isinstance(store, ShardStore):  # equal numbers of ids are no equal ids: --max-size makes them so
        assert isinstance(other, ShardStore)
        why = [f"columns: {', '.join(one.columns)}" for one in (store, other)] if store.columns != other.columns else []
        known = [read_vocabulary(folder / VOCABULARY).digest for folder in (path, test)]
        why += ["other categories have the same ids"] if known[0] != known[1] else []
    if why:
        raise DataRefused(
            f"{test} has other columns or ids than {path}",
            why=truncated(why, 5),
            way_out=f"prepare it with the ids of the training rows: loka data convert --vocabulary {path}",
        )
