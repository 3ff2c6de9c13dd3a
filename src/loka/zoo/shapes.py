"""The GEMM shapes of published recommendation models, and files of the same columns.

`lrm_gemm_shapes.csv` has a row a place in a model: `kind` linear (rows [M, K] times a weight
[N, K]), bmm (one product a sample, no weight) or grouped (a weight a token). `source` and
`note` say where each comes from and what was inferred; a row without a source has that of the row above.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from loka.core.exceptions import DataRefused, UnknownName, truncated

KINDS = ("linear", "bmm", "grouped")
_NUMBERS = {"batch": 1, "M": None, "K": None, "N": None, "count": 1}  # None: must be there
_COLUMNS = ("model", "site", "kind", *(name for name, default in _NUMBERS.items() if default is None))


@dataclass(frozen=True, kw_only=True)
class GemmShape:
    """`batch` products [m, k] x [k, n], `count` times in the model; a linear layer has batch 1."""

    model: str
    site: str
    kind: str
    batch: int
    m: int
    k: int
    n: int
    count: int

    def __str__(self) -> str:
        return f"{self.model}: {self.site}"


def lrm_gemm_shapes() -> tuple[GemmShape, ...]:
    """The suite that comes with LoKA."""
    return read_shapes(Path(__file__).parent / "lrm_gemm_shapes.csv")


def read_shapes(path: Path | str) -> tuple[GemmShape, ...]:
    """Shapes of a CSV file with columns model, site, kind, M, K, N and optionally batch and count.

    Raises DataRefused for missing columns, unknown kinds and numbers that are no sizes, with the line.
    """
    path = Path(path)
    way_out = f"columns {', '.join(_COLUMNS)}; optional: batch, count; others are ignored"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataRefused(f"cannot read {path}", why=[str(error)], way_out=way_out) from error
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise DataRefused(f"{path} has no column {', '.join(missing)}", way_out=way_out)
    shapes, wrong = [], []
    for row in reader:
        found = _shape(row)
        if isinstance(found, GemmShape):
            shapes.append(found)
        else:
            wrong.append(f"line {reader.line_num}: {found}")
    if wrong:
        raise DataRefused(f"{path} has rows that are no GEMM", why=truncated(wrong, 10), way_out=way_out)
    if not shapes:
        raise DataRefused(f"{path} has no rows", way_out=way_out)
    return tuple(shapes)


def _shape(row: Mapping[str | None, Any]) -> GemmShape | str:
    """The shape, or why the row is none."""
    if None in row:
        return f"fields without a column: {', '.join(row[None])}"
    kind = (row["kind"] or "").strip()
    if kind not in KINDS:
        return f"kind {kind!r} is none of {', '.join(KINDS)}"
    sizes = {}
    for name, default in _NUMBERS.items():
        text = (row.get(name) or "").strip()
        if not text and default is not None:
            sizes[name] = default
            continue
        if not (text.isascii() and text.isdecimal()) or int(text) < 1:
            return f"{name} is {text!r}, not a number of 1 or more"
        sizes[name] = int(text)
    if kind == "linear" and sizes["batch"] != 1:
        return f"a linear layer has batch 1, not {sizes['batch']}; all its rows are M"
    return GemmShape(
        model=(row["model"] or "").strip(),
        site=(row["site"] or "").strip(),
        kind=kind,
        batch=sizes["batch"],
        m=sizes["M"],
        k=sizes["K"],
        n=sizes["N"],
        count=sizes["count"],
    )


def of_models(shapes: Iterable[GemmShape], patterns: Sequence[str]) -> tuple[GemmShape, ...]:
    """The shapes of models that match any of `patterns` (fnmatch, case ignored); all without patterns.

    Raises UnknownName for a pattern that matches no model.
    """
    shapes = tuple(shapes)
    models = dict.fromkeys(shape.model for shape in shapes)
    chosen = set()
    for pattern in patterns:
        found = {model for model in models if fnmatchcase(model.lower(), pattern.lower())}
        if not found:
            raise UnknownName(f"no model matches {pattern!r}", way_out=f"one of {', '.join(models)}")
        chosen |= found
    return tuple(shape for shape in shapes if not patterns or shape.model in chosen)
