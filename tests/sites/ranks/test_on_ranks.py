import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks


def raising(rank, folder):
    if rank == 1:
        raise ZeroDivisionError("rank 1 is out of luck")
    dist.all_reduce(torch.zeros(1))  # waits for it in vain
    return {}


def dying(rank, folder):
    if rank == 0:
        print("these are its last words", file=sys.stderr, flush=True)
        os._exit(7)
    time.sleep(600)
    return {}


def crashing(rank, folder):
    if rank == 1:
        os.abort()
    time.sleep(600)
    return {}


def waiting(rank, folder):
    time.sleep(600 * rank)
    return {}


def connected(rank, folder):
    return {"connected": sorted(path.name for path in folder.iterdir())}


class Changed:
    """Arrives as the job `connected`, at a rank where connecting is another `function` of rank and folder."""

    def __init__(self, function, folder):
        self.made_by = function, folder

    def __reduce__(self):
        return _changed, self.made_by


def _changed(function, folder):
    connect = dist.init_process_group

    def other(*args, rank, **settings):
        connect(*args, rank=rank, **settings)
        function(rank, folder)

    dist.init_process_group = other
    return connected


def slowly(rank, folder):
    time.sleep(0.5 * rank)
    (folder / f"rank {rank}").touch()


def unable(rank, folder):
    if rank == 1:
        raise ConnectionError("rank 1 reaches nobody")


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (raising, ["rank 1: Traceback", "in raising", "ZeroDivisionError: rank 1 is out of luck"]),
        (dying, ["rank 0: no answer; it ended or was stopped with exit code 7\nthese are its last words"]),
        (crashing, ["rank 1: no answer", "exit code -6\nFatal Python error: Aborted", "in crashing"]),
        (waiting, ["rank 0: no error", "rank 1: no answer"]),
        (Changed(unable, Path()), ["rank 1: Traceback", "ConnectionError: rank 1 reaches nobody"]),
    ],
)
def test_failures_are_told_and_nothing_hangs(job, told, tmp_path):
    on_ranks(connected, 2, tmp_path)  # the server of forks may take seconds to start
    begin = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        on_ranks(job, 2, tmp_path, seconds=2.5 if job is waiting else 60)
    assert all(part in str(caught.value) for part in told), str(caught.value)
    assert time.monotonic() - begin < 50


def test_a_job_begins_when_all_are_connected(tmp_path):
    """Or a short one would leave while others still shake hands, and they would fail."""
    everybody = {"connected": ["rank 0", "rank 1"]}
    assert on_ranks(Changed(slowly, tmp_path), 2, tmp_path) == [everybody] * 2
