import gzip
import json
import lzma
import os
import re
from pathlib import Path

import pytest
import torch
from durable import folder_flushed_after, full, watch_disk

from loka.core.exceptions import FileRefused, LokaError, NotWritten
from loka.core.storage import files
from loka.core.storage.alone import LOCK, InUse, alone_in, alone_with
from loka.core.storage.files import (
    read_record,
    read_tensors,
    require_writable,
    sha256_of_file,
    tensors_to_bytes,
    write_atomic,
    write_record,
    write_tensors,
)


def read(path):
    return read_record(path, kind="thing", version=1, way_out="make it again", parse=lambda c: c["value"])


@pytest.fixture
def record(tmp_path):
    path = tmp_path / "thing.json"
    write_record(path, kind="thing", version=1, content={"value": [1, 2.5, "x"]})
    return path


def test_round_trip(record):
    assert read(record) == [1, 2.5, "x"]


@pytest.mark.parametrize("length", [0, 1, 20, 60, -2])
def test_truncated(record, length):
    record.write_bytes(record.read_bytes()[:length])
    with pytest.raises(FileRefused, match=r"truncated|lacks the fields") as caught:
        read(record)
    assert "make it again" in str(caught.value)


@pytest.mark.parametrize("library", [gzip, lzma])
def test_compressed(record, library):
    packed = record.with_name(f"thing.json.{'gz' if library is gzip else 'xz'}")
    whole = library.compress(record.read_bytes())
    packed.write_bytes(whole)
    assert read(packed) == [1, 2.5, "x"]
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for data in (whole[: len(whole) // 2], bytes(damaged), whole + b"junk", record.read_bytes(), b""):
        packed.write_bytes(data)
        with pytest.raises(FileRefused, match="truncated") as caught:
            read(packed)
        assert "make it again" in str(caught.value)


@pytest.mark.parametrize(("suffix", "library"), [("gz", gzip), ("xz", lzma)])
def test_what_is_written_under_a_compressed_name_is_read_again(record, suffix, library):
    """`loka measure --out report.json.xz` left a file that was refused as truncated."""
    packed = record.with_name(f"thing.json.{suffix}")
    write_record(packed, kind="thing", version=1, content={"value": [1, 2.5, "x"]})
    assert read(packed) == [1, 2.5, "x"]
    assert library.decompress(packed.read_bytes()) == record.read_bytes()


def test_edited(record):
    record.write_text(record.read_text().replace("2.5", "2.6"))
    with pytest.raises(FileRefused, match="edited or damaged"):
        read(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "it is a other"),
        ({"version": 2}, "format version 2"),
        ({"version": True}, "format version True"),
        ({"version": 1.0}, "format version 1.0"),
        ({"content": 3}, "checksum"),
    ],
)
def test_of_another_kind(record, change, message):
    record.write_text(json.dumps({**json.loads(record.read_text()), **change}))
    with pytest.raises(FileRefused, match=message):
        read(record)


def test_content_that_does_not_parse(tmp_path):
    path = tmp_path / "thing.json"
    write_record(path, kind="thing", version=1, content={"wrong": 1})
    with pytest.raises(FileRefused, match="not that of a thing"):
        read(path)
    with pytest.raises(FileRefused, match="no such file"):
        read(tmp_path / "absent.json")
    with pytest.raises(FileRefused, match="cannot be read"):
        read(tmp_path)


def test_failed_write_leaves_the_old_file(record, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotWritten, match="No space") as caught:
        write_atomic(record, b"new")
    assert f"{record} is as it was before" in caught.value.why
    assert "free space" in caught.value.way_out
    with pytest.raises(NotWritten, match=r"there is no .*other\.json, nor a part of it"):
        write_atomic(record.with_name("other.json"), b"new")
    assert read(record) == [1, 2.5, "x"]
    assert list(record.parent.iterdir()) == [record]


def test_a_folder_that_cannot_be_made(tmp_path):
    """The error is an OSError too, for callers that know no other."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write") as caught:
        write_atomic(tmp_path / "file" / "thing.json", b"new")
    assert isinstance(caught.value, NotWritten)


def test_a_reader_sees_the_old_file_or_the_new_one(record):
    """One that opened the old file goes on reading it: the new one is another file under its name."""
    old = record.read_bytes()
    with record.open("rb") as file:
        write_atomic(record, b"new")
        assert file.read() == old
    assert record.read_bytes() == b"new"


def test_the_name_is_given_while_the_new_file_is_whole(record, monkeypatch):
    replace = os.replace
    seen = []

    def look(temporary, path):
        seen.append((Path(temporary).read_bytes(), read(path)))
        replace(temporary, path)

    monkeypatch.setattr(os, "replace", look)
    write_atomic(record, b"new")
    assert seen == [(b"new", [1, 2.5, "x"])]


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_it_returns(record, monkeypatch):
    seen = watch_disk(monkeypatch)
    write_atomic(record, b"new")
    assert [what for what, _ in seen] == ["flush", "rename", "flush"]
    assert Path(seen[0][1]).name.startswith(f".{record.name}.")
    assert folder_flushed_after(seen, record)


def test_what_a_killed_writer_left_is_removed(record, monkeypatch):
    """Such as report.json's: its folder is locked by who comes next (core/storage/alone.py)."""

    def killed(old, new):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    monkeypatch.setattr(files, "_forget", lambda temporary: None)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(record, b"new")
    (record.parent / ".others").touch()
    assert len(list(record.parent.iterdir())) == 3
    with alone_in(record.parent, "writing"):
        assert {path.name for path in record.parent.iterdir()} == {record.name, ".others", LOCK}


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o664)])
def test_files_are_readable_by_whom_the_umask_says(record, mask, mode):
    before = os.umask(mask)
    try:
        write_atomic(record, b"new")
    finally:
        os.umask(before)
    assert record.stat().st_mode & 0o777 == mode


def test_tensors_are_checked_against_the_record(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.arange(6).view(2, 3).t()})
    digest = sha256_of_file(path)
    assert torch.equal(read_tensors(path, sha256=digest, way_out="")["a"], torch.arange(6).view(2, 3).t())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileRefused, match="truncated or damaged"):
        read_tensors(path, sha256=digest, way_out="")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null"), Path.mkdir])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path, make):
    """`--out /dev/null`, by root, put a file in the place of the device, for every process of the machine."""
    path = tmp_path / "thing.json"
    make(path)
    before = path.stat().st_mode
    with pytest.raises(NotWritten, match=r"name another file") as caught:
        write_atomic(path, b"new")
    assert re.search("not a regular file|Is a directory", str(caught.value))
    assert path.stat().st_mode == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_link_stays_one_and_its_file_is_written(tmp_path):
    there = tmp_path / "runs" / "plan.json"
    write_atomic(there, b"old")
    link = tmp_path / "latest.json"
    link.symlink_to(Path("runs") / "plan.json")
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert there.read_bytes() == b"new"
    with alone_with(link, "writing"), pytest.raises(InUse), alone_with(there, "writing"):
        pass


def test_a_folder_that_takes_no_file_is_refused(tmp_path):
    require_writable(tmp_path / "new" / "runs")
    assert list((tmp_path / "new").rglob("*")) == [tmp_path / "new" / "runs"]
    (tmp_path / "file").write_text("kept")
    with pytest.raises(NotWritten, match="cannot write"):
        require_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_dtype_that_safetensors_does_not_know_is_told():
    """A server whose answers are of complex128 raised KeyError when it was saved."""
    tensors = {"x": torch.ones(2), "y": torch.ones(2, dtype=torch.complex128)}
    with pytest.raises(LokaError, match=r"safetensors stores no torch\.complex128\n  y\n"):
        tensors_to_bytes(tensors)
