import errno
import fcntl
import json
import os
import time

import pytest
from forked import SERVER

from loka.core.storage.alone import LOCK, InUse, alone_in, alone_with


def hold(folder, held):
    with alone_in(folder, "training"):
        held.send("held")
        time.sleep(60)


def test_another_process_is_refused_until_the_holder_is_gone(tmp_path):
    ours, theirs = SERVER.Pipe()
    holder = SERVER.Process(target=hold, args=(tmp_path, theirs))
    holder.start()
    try:
        assert ours.poll(60)
        assert ours.recv() == "held"
        with pytest.raises(InUse, match="another process is training in") as refused, entered(tmp_path):
            pass
        assert f"process {holder.pid} on " in refused.value.why[0]
        assert "choose another folder" in refused.value.way_out
    finally:
        holder.kill()
        holder.join()
    assert (tmp_path / LOCK).exists(), "killed, it could not remove it"
    with entered(tmp_path):
        pass


def entered(folder):
    return alone_in(folder, "training")


def test_nothing_is_left_and_the_folder_is_free_again(tmp_path):
    folder = tmp_path / "new" / "folder"
    for _ in range(2):
        with entered(folder):
            assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
            with pytest.raises(InUse), entered(folder):
                pass
        assert list(folder.iterdir()) == []


LEFT = [b"", b"junk", b'{"pid": "x"}', b'{"pid": 1, "host": "elsewhere"}', b"[" * 9000]


@pytest.mark.parametrize("left", LEFT)
def test_a_file_that_is_left_is_no_lock(tmp_path, left):
    (tmp_path / LOCK).write_bytes(left)
    with entered(tmp_path), pytest.raises(InUse), entered(tmp_path):
        pass
    handle = os.open(tmp_path / LOCK, os.O_CREAT | os.O_RDWR)
    os.write(handle, left)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(InUse), entered(tmp_path):
        pass
    os.close(handle)


def test_a_lock_on_a_name_that_is_gone_is_taken_again(tmp_path, monkeypatch):
    """Between the opening and the lock the holder removes the file: the lock would be on nothing."""
    flock = fcntl.flock
    calls = []

    def removed_first(handle, operation):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(handle)
        flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with entered(tmp_path):
        assert len(calls) == 2
        with pytest.raises(InUse), entered(tmp_path):
            pass


def test_without_locks_a_warning_says_so(tmp_path, monkeypatch):
    def none_here(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none_here)
    with pytest.warns(RuntimeWarning, match=r"has no locks \(No locks available\)"), entered(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def count_up(folder):
    done = 0
    while done < 40:
        try:
            with alone_in(folder / "locked", "counting"):
                count = int((folder / "count").read_text())
                time.sleep(0.0005)
                (folder / "count").write_text(str(count + 1))
                done += 1
        except InUse:
            time.sleep(0.0003)


def test_many_at_once_leave_one(tmp_path):
    """Each enters when it can; a counter that two changed at once would lose counts."""
    (tmp_path / "count").write_text("0")
    started = time.monotonic()
    workers = [SERVER.Process(target=count_up, args=(tmp_path,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "120", time.monotonic() - started


def test_files_of_one_folder_are_locked_each_by_itself(tmp_path):
    (tmp_path / ".one.json.a1b2.unfinished").touch()
    (tmp_path / ".two.json.a1b2.unfinished").touch()
    one = tmp_path / "one.json"
    with alone_in(tmp_path / "elsewhere", "training"), alone_with(one, "measuring into"):
        with alone_with(tmp_path / "two.json", "measuring into"):
            pass
        with pytest.raises(InUse, match="another process is measuring") as refused, alone_with(one, "measuring"):
            pass
        assert refused.value.way_out == "wait for it, stop it, or choose another file"
    with alone_with(one, "measuring into"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
