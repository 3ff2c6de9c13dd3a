"""The file of a run: a line of JSON a cell, the last one of a cell counts."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


def read(path: Path) -> dict[str, Record]:
    """The last record of each cell; a line that was cut off is left out."""
    found: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["cell"]] = record
    return found


def append(path: Path, record: dict[str, Any]) -> None:
    """One line, on disk before the next cell begins; behind a line that was cut off, on one of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(_plain(record), allow_nan=False).encode() + b"\n"
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def differences(record: Record, conditions: Mapping[str, Any]) -> list[str]:
    """Names of the conditions that `record` was not measured under. What an older record does not say is no difference,
    and neither is another driver: kernels come with libraries."""
    here = _plain(conditions)
    found = [name for name in here if name != "machine" and record.get(name, here[name]) != here[name]]
    there = record["machine"]
    return [name for name in here["machine"] if name != "driver" and there[name] != here["machine"][name]] + found


def _plain(value: Any) -> Any:
    """JSON; a number that is none, such as the error of a NaN, as its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value
