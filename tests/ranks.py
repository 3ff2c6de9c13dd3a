"""Several processes of one gloo group, each of which runs a job and answers."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import SERVER

Job = Callable[[int, Path], dict[str, Any]]


def on_ranks(job: Job, world: int, folder: Path) -> list[dict[str, Any]]:
    """What `job(rank, folder)` returned, by rank; asserts that it raised on none. `job` is pickled."""
    answers = SERVER.Queue()
    processes = [SERVER.Process(target=_work, args=(job, r, world, folder, answers)) for r in range(world)]
    for process in processes:
        process.start()
    try:
        found = dict(answers.get(timeout=120) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.kill()
    for rank in range(world):
        assert "error" not in found[rank], found[rank]["error"]
    return [found[rank] for rank in range(world)]


def _work(job: Job, rank: int, world: int, folder: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    try:
        answers.put((rank, job(rank, folder)))
    except BaseException:
        answers.put((rank, {"error": traceback.format_exc()}))
    finally:
        dist.destroy_process_group()
