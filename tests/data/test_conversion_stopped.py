import json
import os
import shutil
import signal
import threading

import pytest
from click_files import assert_same, gather, write_tsv
from conversions import ALL, HASHED, ROWS, contents, criteo_parquet
from durable import flushed_before, folder_flushed_after, watch_disk
from forked import SERVER
from sweeps import sweep

from loka.core.exceptions import DataRefused, FileRefused
from loka.core.storage.alone import InUse
from loka.core.storage.files import write_record
from loka.data import Frequency, TableClicks, conversion, convert, hashed_vocabulary, open_shards
from loka.data.conversion import ConversionStopped
from loka.data.formats.shard_writer import ShardWriter

pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.fixture
def converted(tmp_path, path):
    folder = tmp_path / "out"
    convert(path, folder, vocabulary=HASHED)
    return folder


def killed(path, folder):
    conversion.LEAST_SHARD, conversion.GROUP_ROWS = 8_000, 16
    finished = [0]
    finish, flush = ShardWriter.finish, ShardWriter._flush

    def counted(self):
        finished[0] += 1
        return finish(self)

    def die(self, rows):
        flush(self, rows)
        if finished[0] == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    ShardWriter.finish, ShardWriter._flush = counted, die
    convert(path, folder, vocabulary=Frequency(min_count=2), workers=1)


def test_a_killed_conversion_goes_on_and_keeps_what_was_finished(tmp_path, path):
    folder = tmp_path / "out"
    died = SERVER.Process(target=killed, args=(path, folder))
    died.start()
    died.join()
    assert died.exitcode == -signal.SIGKILL
    assert list(folder.glob(".unfinished-*"))
    with pytest.raises(DataRefused, match=r"not complete\n  3 of .* pieces"):
        open_shards(folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*")}
    steps = []

    def track(items, description, total):
        steps.append((description, total))
        return items

    manifest = convert(path, folder, vocabulary=Frequency(min_count=2), workers=2, track=track)
    assert steps == [("convert", manifest.pieces - 3)]  # and no second look for a vocabulary
    for name, changed in before.items():
        assert (folder / name).stat().st_mtime_ns == changed
    convert(path, tmp_path / "whole", vocabulary=Frequency(min_count=2))
    assert contents(folder) == contents(tmp_path / "whole")


def test_damaged_shards_are_named_and_redone(path, converted):
    whole = contents(converted)
    shard = converted / "shard-00002.parquet"
    data = whole[shard.name]

    for changed in (data[: len(data) // 2], data[:-1], data + b"\0"):
        shard.write_bytes(changed)
        told = r"shard-00002\.parquet: the shard was truncated or overwritten(.|\n)*Way out: run the conversion"
        with pytest.raises(DataRefused, match=told):
            open_shards(converted)
        convert(path, converted, vocabulary=HASHED)
        assert contents(converted) == whole

    shard.unlink()
    with pytest.raises(DataRefused, match=r"shard-00002\.parquet: the shard is missing"):
        open_shards(converted)
    convert(path, converted, vocabulary=HASHED)
    assert contents(converted) == whole

    flipped = bytearray(data)
    flipped[len(data) // 3] ^= 0x40  # in a page: the size is right, the checksum is not
    shard.write_bytes(flipped)
    with pytest.raises(DataRefused, match=r"shard-00002\.parquet: row group \d+ cannot be read(.|\n)*delete"):
        gather(open_shards(converted))

    (converted / "manifest.json").write_text("{")
    with pytest.raises(FileRefused, match=r"manifest\.json"):
        open_shards(converted)
    with pytest.raises(FileRefused, match=r"delete .* and convert again"):
        convert(path, converted, vocabulary=HASHED)


@pytest.mark.slow
def test_a_folder_converted_again_is_read_anew(tmp_path):
    folder = tmp_path / "out"
    for rows in (ROWS, ROWS[::-1]):
        path = write_tsv(tmp_path / "t.tsv", rows)
        convert(path, folder, vocabulary=HASHED)
        assert_same(gather(open_shards(folder)), gather(TableClicks(path, vocabulary=HASHED)))
        shutil.rmtree(folder)


def test_a_damaged_input_is_named(tmp_path):
    path = criteo_parquet(tmp_path / "t.parquet")
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 3] = bytes(len(data) // 3 - 4)
    path.write_bytes(data)
    with pytest.raises(DataRefused, match=r"t\.parquet: the parquet file is damaged"):
        convert(path, tmp_path / "out", vocabulary=HASHED)


@pytest.mark.slow
def test_another_conversion_is_not_mixed_in(tmp_path, path, converted):
    with pytest.raises(DataRefused, match=r"holds another conversion\n  vocabulary: .*99.* there, .*98.* now"):
        convert(path, converted, vocabulary=hashed_vocabulary(98))
    other = write_tsv(tmp_path / "u.tsv", ROWS[:10])
    with pytest.raises(DataRefused, match=r"files: .*t\.tsv.*u\.tsv"):
        convert(other, converted, vocabulary=HASHED)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "rows.parquet").write_bytes(b"")
    with pytest.raises(DataRefused, match="holds parquet files and no manifest"):
        convert(path, foreign, vocabulary=HASHED)


def test_two_conversions_into_one_folder_at_a_time_are_refused(tmp_path, path):
    def track(items, description, total):
        with pytest.raises(InUse, match="another process is converting"):
            convert(path, tmp_path / "out", vocabulary=HASHED)
        return items

    convert(path, tmp_path / "out", vocabulary=HASHED, track=track)


def test_a_shard_is_on_the_disk_before_its_name(tmp_path, monkeypatch, path):
    folder = tmp_path / "out"
    seen = watch_disk(monkeypatch)
    convert(path, folder, vocabulary=HASHED, workers=1)
    for shard in folder.glob("shard-*"):
        assert flushed_before(seen, shard, f"/.unfinished-{shard.name}")
        assert folder_flushed_after(seen, shard)


@pytest.mark.parametrize(
    "name", sweep(["../outside.parquet", "/etc/passwd", "a/b.parquet", "..", "", 7, None], ["/etc/passwd", 7])
)
def test_a_manifest_names_files_of_its_folder_only(tmp_path, name, converted):
    shutil.copy(converted / "shard-00001.parquet", tmp_path / "outside.parquet")
    content = json.loads((converted / "manifest.json").read_text())["content"]
    content["shards"]["1"]["file"] = name
    write_record(converted / "manifest.json", kind="manifest of prepared clicks", version=1, content=content)
    with pytest.raises(FileRefused, match=r"shard 1 .* is no file of the folder|shards\.1\.file has to be a text"):
        open_shards(converted)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 10**15},
        pytest.param({"rows": -1}, marks=pytest.mark.slow),
        pytest.param({"rows": 1e3}, marks=pytest.mark.slow),
        {"counts": []},
        pytest.param({"bytes": "1"}, marks=pytest.mark.slow),
        pytest.param({"rows": 10**19}, marks=pytest.mark.slow),
    ],
)
def test_a_manifest_of_impossible_numbers_is_refused(change, converted):
    """10^15 rows are 10^11 groups, an array of a terabyte, before any file is looked at."""
    whole = json.loads((converted / "manifest.json").read_text())["content"]
    content = {**whole, "shards": {**whole["shards"], "1": {**whole["shards"]["1"], **change}}}
    for wrong in (content, {**whole, "group_rows": 0}, {**whole, "vocab_sizes": [0] * 26}):
        write_record(converted / "manifest.json", kind="manifest of prepared clicks", version=1, content=wrong)
        with pytest.raises(FileRefused, match="not that of a manifest"):
            open_shards(converted)


def test_a_pipe_in_the_place_of_a_shard_is_refused(converted):
    (converted / "shard-00001.parquet").unlink()
    os.mkfifo(converted / "shard-00001.parquet")
    with pytest.raises(DataRefused, match=r"shard-00001\.parquet: the shard was truncated"):
        open_shards(converted)


def test_a_full_disk_keeps_what_was_converted(tmp_path, monkeypatch, path):
    folder = tmp_path / "out"
    with monkeypatch.context() as context:
        calls = iter([True] * 5)

        def full(name):
            if not next(calls, False):
                raise OSError(28, "No space left on device")

        context.setattr("loka.data.formats.shard_writer.sync_folder", full)
        with pytest.raises(ConversionStopped, match=r"No space left(.|\n)*goes on where this one stopped"):
            convert(path, folder, vocabulary=HASHED, workers=1)
    kept = {path: path.stat().st_mtime_ns for path in sorted(folder.glob("shard-*"))[:5]}
    convert(path, folder, vocabulary=HASHED)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert_same(gather(open_shards(folder)), gather(TableClicks(path, vocabulary=HASHED)))


def test_an_interrupt_ends_the_threads_and_keeps_the_shards(tmp_path, path):
    folder = tmp_path / "out"

    def track(items, description, total):
        for count, item in enumerate(items):
            if count == 3:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        convert(path, folder, vocabulary=HASHED, workers=2, track=track)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loka-data")]
    assert not list(folder.glob(".unfinished-*"))
    convert(path, folder, vocabulary=HASHED)
    assert open_shards(folder).rows == ALL
