"""Record files: whole or refused, never half; and nothing in them can execute."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
import torch

from loka.core.exceptions import FileRefused
from loka.core.files import (
    read_record,
    read_tensors,
    sha256_of_file,
    write_atomic,
    write_record,
    write_tensors,
)


def read(path: Path) -> object:
    return read_record(path, kind="thing", version=1, way_out="make it again", parse=lambda c: c["value"])


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "thing.json"
    write_record(path, kind="thing", version=1, content={"value": [1, 2.5, "x"]})
    return path


def test_round_trip(record: Path) -> None:
    assert read(record) == [1, 2.5, "x"]


@pytest.mark.parametrize("length", [0, 1, 20, 60, -2])
def test_truncated(record: Path, length: int) -> None:
    record.write_bytes(record.read_bytes()[:length])
    with pytest.raises(FileRefused, match=r"truncated|lacks the fields") as caught:
        read(record)
    assert "make it again" in str(caught.value)


def test_compressed(record: Path) -> None:
    packed = record.with_name("thing.json.gz")
    whole = gzip.compress(record.read_bytes())
    packed.write_bytes(whole)
    assert read(packed) == [1, 2.5, "x"]
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for data in (whole[: len(whole) // 2], bytes(damaged), record.read_bytes(), b""):
        packed.write_bytes(data)
        with pytest.raises(FileRefused, match="truncated") as caught:
            read(packed)
        assert "make it again" in str(caught.value)


def test_edited(record: Path) -> None:
    record.write_text(record.read_text().replace("2.5", "2.6"))
    with pytest.raises(FileRefused, match="edited or damaged"):
        read(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "it is a other"),
        ({"version": 2}, "format version 2"),
        ({"content": 3}, "checksum"),
    ],
)
def test_of_another_kind(record: Path, change: dict[str, object], message: str) -> None:
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    with pytest.raises(FileRefused, match=message):
        read(record)


def test_content_that_does_not_parse(tmp_path: Path) -> None:
    path = tmp_path / "thing.json"
    write_record(path, kind="thing", version=1, content={"wrong": 1})
    with pytest.raises(FileRefused, match="not that of a thing"):
        read(path)
    with pytest.raises(FileRefused, match="no such file"):
        read(tmp_path / "absent.json")
    with pytest.raises(FileRefused, match="cannot be read"):
        read(tmp_path)


def test_failed_write_leaves_the_old_file(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(record, b"new")
    assert read(record) == [1, 2.5, "x"]
    assert list(record.parent.iterdir()) == [record]


def test_tensors_are_checked_against_the_record(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.arange(6).view(2, 3).t()})
    digest = sha256_of_file(path)
    assert torch.equal(read_tensors(path, sha256=digest, way_out="")["a"], torch.arange(6).view(2, 3).t())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileRefused, match="truncated or damaged"):
        read_tensors(path, sha256=digest, way_out="")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"kind": NaN}', '{"kind": "thing", "version": 1, "sha256": "", "content": NaN}']
)
def test_json_that_no_record_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "thing.json"
    path.write_text(text)
    with pytest.raises(FileRefused):
        read(path)
