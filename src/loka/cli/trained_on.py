"""Which rows a run trained on, and whether the rows at hand are others.

Ids of another vocabulary name other rows of the tables, and would be answered without an error. So `loka serve freeze`
records the rows beside the server as `trained_on.json`, with the sha256 of the server's card: a server that Python
saves into that folder later may be of another run, and the record then does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from loka.cli.inputs import Data
from loka.core.exceptions import LokaError
from loka.core.storage.codec import record, sparse
from loka.core.storage.files import sha256_of_file
from loka.core.storage.record_file import RecordFile
from loka.serve.saving import CARD
from loka.train.checkpointing.checkpoint import Checkpoint, identity_in

OTHER_ROWS = (
    "its run trained on other rows than these: ids have to be of its vocabulary (loka data convert --vocabulary)"
)
TRAINED_ON = "trained_on.json"


def _check(rows: RunRows) -> None:
    if rows.parts < 1:
        raise ValueError(f"{rows.parts} parts")


@record(check=_check)
@dataclass(frozen=True, kw_only=True)
class RunRows(
    RecordFile,
    kind="loka-serve-trained-on",
    version=1,
    way_out="freeze again by `loka serve freeze`, or delete this file: other rows are then not noticed",
):
    """`identity` of the `Source` that a run trained on, in `parts` that its ranks shared; `card`: sha256 of the card
    that they are kept beside."""

    identity: str
    parts: int = 1
    card: str = sparse("")

    def keep(self, folder: Path) -> None:
        """Saves this record beside the server in `folder`. Raises NotWritten where the disk refuses."""
        replace(self, card=sha256_of_file(folder / CARD)).save(folder / TRAINED_ON)


def rows_of_run(found: Checkpoint) -> RunRows | None:
    """The rows that a run trained on; None where its checkpoints do not say."""
    source = (identity_in(found.path.parent) or {}).get("source")
    if not isinstance(source, Mapping) or "identity" not in source:
        return None
    return RunRows(identity=source["identity"], parts=source.get("parts", 1))


def rows_of_server(folder: Path) -> RunRows | None:
    """The rows of the run whose checkpoint was frozen into `folder`; None where they are not known, as for a server
    that Python saved. Raises FileRefused for a damaged file."""
    if not (folder / TRAINED_ON).exists():
        return None
    kept = RunRows.load(folder / TRAINED_ON)
    return kept if kept.card == sha256_of_file(folder / CARD) else None


def are_others(rows: RunRows | None, opened: Data, opening: Callable[..., Data]) -> bool:
    """Whether `opened.train` is not known to be what the run trained on. `opening(parts=n)` gives it in so many parts,
    as the ranks of a run read them."""
    if rows is None:
        return True
    try:
        mine = opened if rows.parts == 1 else opening(parts=rows.parts)
    except LokaError:  # a table, or too few rows: not to be had in so many parts
        return True
    return rows.identity != mine.train.identity
