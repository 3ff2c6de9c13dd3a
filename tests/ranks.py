"""Several processes of one gloo group, each of which runs a job and answers."""

import faulthandler
import gc
import os
import queue
import shutil
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from forked import SERVER

_GRACE = 5.0  # seconds that the others have to say how they fail, after one did
_SAID = 4000  # characters of what a rank without an answer wrote last


def on_ranks(job, world, folder, *, seconds=120):
    """What `job(rank, folder)` returned, by rank. `job` is pickled, and so is what it returns: no tensors.

    Asserts that no rank raised, ended without an answer, or took longer than `seconds`; it says of every rank
    which of these it was, with its traceback, or the last of its stderr, and leaves no process behind.
    """
    answers = SERVER.Queue()
    # Each call's own: a rank that is early would meet the ranks of the call before at their file.
    meeting = Path(tempfile.mkdtemp()) / "meeting"
    rest = (world, folder, meeting, answers)
    processes = [SERVER.Process(target=_work, args=(job, rank, *rest)) for rank in range(world)]
    for process in processes:
        process.start()
    found = {}
    end = time.monotonic() + seconds
    try:
        while len(found) < world and time.monotonic() < end:
            alive = all(p.is_alive() for r, p in enumerate(processes) if r not in found)
            try:
                rank, answer = answers.get(timeout=0.2)
            except queue.Empty:
                if not alive:  # it was killed, and the others wait for it in vain
                    break
                continue
            found[rank] = answer
            if "error" in answer:
                end = min(end, time.monotonic() + _GRACE)
    finally:
        whole = len(found) == world
        for process in processes:
            process.join(timeout=30 if whole else 0)
            if process.is_alive():
                process.kill()
                process.join()
        failed = {
            f"rank {rank}": _failure(found.get(rank), process.exitcode, _stderr(meeting, rank))
            for rank, process in enumerate(processes)
        }
        shutil.rmtree(meeting.parent, ignore_errors=True)
    assert not any(failed.values()), "\n".join(f"{rank}: {told or 'no error'}" for rank, told in failed.items())
    return [found[rank] for rank in range(world)]


def _stderr(meeting, rank):
    return meeting.with_name(f"stderr of rank {rank}")


def _failure(answer, code, stderr):
    """Empty for a rank that did its job."""
    if answer is None:
        said = stderr.read_text(errors="replace").strip()[-_SAID:] if stderr.exists() else ""
        return f"no answer; it ended or was stopped with exit code {code}" + (f"\n{said}" if said else "")
    return answer.get("error", "")


def _work(job, rank, world, folder, meeting, answers):
    with _stderr(meeting, rank).open("w") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable(2)
    gc.freeze()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        # A rank may be connected before the other end knows it: one that leaves then, as after a short job,
        # makes the other fail with "connectFullMesh failed: Connection closed by peer".
        dist.barrier()
        answers.put((rank, job(rank, folder)))
    except BaseException:
        answers.put((rank, {"error": traceback.format_exc()}))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
