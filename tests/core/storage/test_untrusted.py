import contextlib
import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
import time
import tracemalloc

import pytest
import torch

from loka.core.exceptions import FileRefused, UnknownName
from loka.core.storage.files import canonical, read_record, read_tensors, sha256_of_file, write_tensors
from loka.core.storage.untrusted import Limits, parse_json, read_bounded


def read(path, parse=dict, **others):
    return read_record(path, kind="thing", version=1, way_out="make it again", parse=parse, **others)


def refused(path, parse=dict, **others):
    with pytest.raises(FileRefused) as caught:
        read(path, parse, **others)
    assert "make it again" in str(caught.value)
    return str(caught.value)


def record_of(content):
    """A record whose checksum is right as far as Python can tell, where that is quick."""
    digest = ""
    if len(content) > 1 << 20:
        content, text = "0", content
        return record_of(content).replace('"content": 0', f'"content": {text}')
    with contextlib.suppress(ValueError, RecursionError):
        digest = hashlib.sha256(canonical(json.loads(content))).hexdigest()
    return f'{{"kind": "thing", "version": 1, "sha256": "{digest}", "content": {content}}}\n'


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"value": 1e999}', "1e999 is beyond the largest number"),
        ('{"value": -1e999}', "-1e999 is beyond"),
        ('{"value": ' + "7" * 400 + "}", "has 400 digits"),
        ('{"value": ' + "7" * 5000 + "}", "has 5000 digits"),
        ('{"value": Infinity}', "Infinity is not JSON"),
        ('{"value": ' + "[" * 5000 + "]" * 5000 + "}", "nested deeper"),
        ('{"value": 1, "value": 1}', "has a name twice"),
        ('{"value": [' + "[]," * 2_000_001 + "[]]}", "more than 2000000 values"),
    ],
)
def test_numbers_and_depths_of_no_record(tmp_path, content, why):
    path = tmp_path / "thing.json"
    path.write_text(record_of(content))
    assert why in refused(path)


def test_numbers_that_records_do_hold(tmp_path):
    content = {"big": 2**64 - 1, "least": -(2**63), "tiny": 5e-324, "most": 1.7976931348623157e308}
    path = tmp_path / "thing.json"
    path.write_text(record_of(json.dumps(content)))
    assert read(path) == content


def test_a_nesting_that_is_read_and_not_written_again(tmp_path):
    """The parser's limit and the writer's differ; the checksum is of what the writer makes."""
    path = tmp_path / "thing.json"
    for depth in range(100, 3000, 100):
        path.write_text(record_of("[" * depth + "]" * depth))
        with contextlib.suppress(FileRefused):
            read(path, list)


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    path = tmp_path / "thing.json.gz"
    path.write_bytes(gzip.compress(bytes(256 << 20), compresslevel=1))
    assert "more than 64 MiB" in refused(path)
    packed = tmp_path / "thing.json.xz"
    packed.write_bytes(lzma.compress(bytes((64 << 20) + 1), preset=0))
    assert "more than 64 MiB" in refused(packed)
    packed.write_bytes(lzma.compress(b"[1]", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 29}]))
    assert "not whole xz data" in refused(packed)  # a dictionary of 512 MiB
    plain = tmp_path / "thing.json"
    with plain.open("wb") as file:
        file.truncate(1 << 40)
    assert "more than 64 MiB" in refused(plain)


@pytest.mark.parametrize("name", ["thing.json", "thing.json.gz"])
def test_pipes_and_devices_are_refused_at_once(tmp_path, name):
    pipe = tmp_path / name
    os.mkfifo(pipe)
    assert "not a regular file" in refused(pipe)
    device = tmp_path / f"zero-{name}"
    device.symlink_to("/dev/zero")
    assert "not a regular file" in refused(device)
    for path in (pipe, device):
        with pytest.raises(OSError, match="not a regular file"):
            sha256_of_file(path)
        with pytest.raises(FileRefused, match="not a regular file"):
            read_tensors(path, sha256="", way_out="")


@pytest.mark.parametrize(
    "raised",
    [
        OverflowError("too large"),
        ZeroDivisionError(),
        AssertionError("no"),
        UnknownName("no recipe is called x"),
        RecursionError(),
        NotImplementedError("\n"),
    ],
)
def test_whatever_the_parser_raises_is_a_refusal(tmp_path, raised):
    def parse(content):
        raise raised

    path = tmp_path / "thing.json"
    path.write_text(record_of("{}"))
    assert type(raised).__name__ in refused(path, parse)


def test_safetensors_data_that_are_none(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.zeros(3)})
    for data in (b"", b"\xff" * 100, path.read_bytes()[:-1], (1 << 62).to_bytes(8, "little") + b"{}"):
        path.write_bytes(data)
        with pytest.raises(FileRefused, match="not safetensors data"):
            read_tensors(path, sha256=sha256_of_file(path), way_out="")


def test_limits_are_the_callers(tmp_path):
    path = tmp_path / "thing.json"
    path.write_text(record_of('{"value": [1, 2, 3]}'))
    assert "more than 5 values" in refused(path, limits=Limits(values=5))
    with pytest.raises(ValueError, match="more than 0 MiB"):
        read_bounded(path, Limits(bytes=10))
    assert parse_json(b"[1,2]", Limits(values=3)) == [1, 2]


WORST = """
import resource, sys
from pathlib import Path
from loka.core.exceptions import FileRefused
from loka.core.storage.files import read_record

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024

before = peak()
for path in map(Path, sys.argv[1:]):
    try:
        read_record(path, kind="thing", version=1, way_out="", parse=dict)
    except FileRefused:
        pass
print(peak() - before)
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """What costs most memory for each byte or for each value that is let in."""
    count = Limits().values - 10
    worst = {
        "lists": "[" + "[]," * (count // 2) + "[]]",
        "objects": "[" + "{}," * (count // 2) + "{}]",
        "keys": "{" + ",".join(f'"{n}":{n / 7}' for n in range(count)) + "}",
        "text": '["' + "é" * (30 << 20) + '"]',
    }
    paths = []
    for name, content in worst.items():
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(f'{{"kind": "thing", "version": 1, "sha256": "", "content": {content}}}\n')
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WORST, *map(str, paths)], capture_output=True, text=True)
    assert int(done.stdout) < 700, done.stderr  # 598 for the keys
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_small_file_takes_little_memory_whatever_the_limit(tmp_path, suffix):
    """A vocabulary may have 16 GiB, which `read` sets aside at once when it is asked for so many bytes."""
    path = tmp_path / f"thing.json{suffix}"
    path.write_bytes(gzip.compress(b"[1]" * 1000) if suffix else b"[1]" * 1000)
    tracemalloc.start()
    try:
        assert read_bounded(path, Limits(bytes=16 << 30)) == b"[1]" * 1000
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
