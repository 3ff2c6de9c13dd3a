"""Which columns of a table are the label, the dense and the sparse features, and how its text is laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loka.core.exceptions import DataRefused
from loka.core.storage.untrusted import Limits, parse_json, read_bounded


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Column names in model order; they match a file's names exactly, else without regard to case.

    `label` is one column, or several: then each is a task of its own, named by its column, and batches have
    `label` [B, tasks].

    `separator` and `header` are hints for text files; None means what the suffix says: .csv has commas and a
    header line, .tsv and .txt have tabs, no header, and the columns in the order label, dense, sparse.

    `sequence` names a list column of categories, oldest first, of which the last `sequence_length` are used.
    """

    label: str | tuple[str, ...]
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    separator: str | None = None
    header: bool | None = None
    sequence: str | None = None
    sequence_length: int = 50

    def __post_init__(self) -> None:
        if not isinstance(self.label, str):
            object.__setattr__(self, "label", self.label[0] if len(self.label) == 1 else tuple(self.label))
        if not self.labels:
            raise DataRefused("the schema names no label column", way_out="name one, or one for each task")
        if not all(isinstance(name, str) for name in self.columns):
            raise DataRefused("the schema names a column by something else than text", way_out="write names as strings")
        single = self.separator is None or (isinstance(self.separator, str) and len(self.separator) == 1)
        if not single or (self.separator or ",") in '"\r\n' or not (self.separator or ",").isascii():
            raise DataRefused(
                f"the separator {self.separator!r} cannot be",
                way_out="one ASCII character that is neither a quote nor a line end",
            )
        if self.header not in (None, True, False) or type(self.sequence_length) is not int:
            raise DataRefused(
                f"header {self.header!r} and sequence_length {self.sequence_length!r} cannot be",
                way_out="true, false or left out; and a whole number",
            )
        folded = [name.casefold() for name in self.columns]
        twice = sorted({name for name in self.columns if folded.count(name.casefold()) > 1})
        if twice:
            raise DataRefused(
                f"the schema names a column twice (case does not count): {', '.join(twice)}",
                way_out="give each column one role",
            )
        if not self.dense and not self.sparse:
            raise DataRefused("the schema has no features", way_out="name dense or sparse columns")
        if self.sequence_length < 1:
            raise DataRefused(f"sequence_length is {self.sequence_length}", way_out="at least 1")

    @property
    def columns(self) -> tuple[str, ...]:
        """Labels, dense, sparse, sequence: the order of headerless files and of everything read."""
        return (*self.labels, *self.dense, *self.sparse, *self.sequences)

    @property
    def labels(self) -> tuple[str, ...]:
        """The label columns, which name the tasks."""
        return (self.label,) if isinstance(self.label, str) else self.label

    @property
    def sequences(self) -> tuple[str, ...]:
        """The sequence column, or nothing."""
        return () if self.sequence is None else (self.sequence,)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; what it does not use is left out, so that its digest stays when a use is added."""
        unused = {"sequence", "sequence_length"} if self.sequence is None else set()
        return {name: value for name, value in asdict(self).items() if name not in unused}

    def locate(self, present: Sequence[str], *, where: str) -> tuple[int, ...]:
        """The index in `present` of each of `columns`; `where` names the file in errors."""
        places = [_place(name, present) for name in self.columns]
        unclear = [name for name, found in zip(self.columns, places, strict=True) if len(found) > 1]
        missing = [name for name, found in zip(self.columns, places, strict=True) if not found]
        if missing or unclear:
            why = [f"missing: {', '.join(missing)}"] if missing else []
            why += [f"more than one column matches: {', '.join(unclear)}"] if unclear else []
            way_out = "pass its schema (--schema FILE; Schema(...) in Python), or rename its columns"
            if len(present) == 1 and len(missing) > 1 and all(name in present[0] for name in missing):
                way_out = 'say in the schema what stands between columns, such as "separator": ";"'
            elif len(missing) == len(self.columns) and any(map(_is_number, present)):
                way_out = 'say "header": false in the schema: the first line is a row'
            raise DataRefused(
                f"{where}: columns do not fit the schema", why=[*why, f"present: {', '.join(present)}"], way_out=way_out
            )
        return tuple(found[0] for found in places)

    @classmethod
    def from_json(cls, path: str | Path) -> Schema:
        """Read a schema file in either of two spellings.

        Ours: `{"label": "y", "dense": [...], "sparse": [...], "separator": ",", "header": true}`,
        for several tasks `"label": ["click", "buy"]`, and for a list column `"sequence": "history",
        "sequence_length": 50`.
        BARS / FuxiCTR: `{"label_col": {"name": "y"}, "feature_cols": [{"name": "a" or ["a", "b"],
        "type": "numeric" or "categorical", "active": true}, ...]}`; inactive features are left out, and
        "label_col" may be a list.
        """
        try:
            content = parse_json(read_bounded(Path(path), Limits()), Limits())
        except (OSError, ValueError, RecursionError) as error:
            raise DataRefused(
                f"{path}: not a readable schema file", why=[str(error)], way_out="give a file with one JSON object"
            ) from error
        try:
            return cls(**(_from_bars(content) if "feature_cols" in content else _from_ours(content)))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise DataRefused(
                f"{path}: not a schema",
                why=[f"{type(error).__name__}: {error}"],
                way_out="see Schema.from_json for the two accepted spellings",
            ) from error


CRITEO = Schema(
    label="label",
    dense=tuple(f"I{number}" for number in range(1, 14)),
    sparse=tuple(f"C{number}" for number in range(1, 27)),
)


def _is_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _place(name: str, present: Sequence[str]) -> list[int]:
    exact = [index for index, other in enumerate(present) if other == name]
    return exact or [index for index, other in enumerate(present) if other.casefold() == name.casefold()]


def _from_ours(content: Mapping[str, Any]) -> dict[str, Any]:
    fields = dict(content)
    for role in ("dense", "sparse"):
        fields[role] = _names(fields.get(role, []))
    return {**fields, "label": _names(fields["label"])}


def _from_bars(content: Mapping[str, Any]) -> dict[str, Any]:
    roles: dict[str, list[str]] = {"numeric": [], "categorical": []}
    for feature in content["feature_cols"]:
        if feature.get("active", True):
            if feature["type"] not in roles:
                raise ValueError(f"feature {feature['name']} has type {feature['type']!r}, known: {list(roles)}")
            roles[feature["type"]] += _names(feature["name"])
    labels = content["label_col"]
    return {
        "label": tuple(each["name"] for each in (labels if isinstance(labels, list) else [labels])),
        "dense": tuple(roles["numeric"]),
        "sparse": tuple(roles["categorical"]),
    }


def _names(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"column names must be strings: {names}")
    return tuple(names)
