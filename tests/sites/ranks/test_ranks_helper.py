"""The helper of these tests itself: whichever rank fails, however it does, is named with its reason, soon."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks


def raising(rank: int, folder: Path) -> dict[str, Any]:
    if rank == 1:
        raise ZeroDivisionError("rank 1 is out of luck")
    dist.all_reduce(torch.zeros(1))  # waits for it in vain
    return {}


def dying(rank: int, folder: Path) -> dict[str, Any]:
    if rank == 0:
        os._exit(7)
    time.sleep(600)
    return {}


def waiting(rank: int, folder: Path) -> dict[str, Any]:
    time.sleep(600 * rank)
    return {}


def answering(rank: int, folder: Path) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (raising, ["rank 1: Traceback", "in raising", "ZeroDivisionError: rank 1 is out of luck"]),
        (dying, ["rank 0: no answer; it ended or was stopped with exit code 7"]),
        (waiting, ["rank 0: no error", "rank 1: no answer"]),
    ],
)
def test_failures_are_told_and_nothing_hangs(job: Any, told: list[str], tmp_path: Path) -> None:
    on_ranks(answering, 2, tmp_path)  # the server of forks may take seconds to start
    begin = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        on_ranks(job, 2, tmp_path, seconds=2.5 if job is waiting else 60)
    assert all(part in str(caught.value) for part in told), str(caught.value)
    assert time.monotonic() - begin < 50
