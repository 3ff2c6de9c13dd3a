"""Cells of regions are compiled ahead, on all cores, into the caches on disk that the process which times reads.

What no worker compiled, for whatever reason, is compiled when it is timed.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import torch

from loka.core.records.stats import LinearStats
from loka.core.signature import LinearShape
from loka.core.storage.codec import decode, encode
from loka.measurement.times.compile_ahead import Track
from loka.measurement.times.region_times import LAYERS, time_region

_FEWEST, _MOST = 4, 32  # processes: each imports torch first, and two on two cores took longer than none
_CONTEXT = 1 << 30  # bytes of one on a GPU
_COMMAND = "from loka.measurement.times.region_ahead import work; work()"
Cell = tuple[LinearStats, LinearShape, list[str]]


def compile_regions_ahead(
    cells: Sequence[Cell], device: torch.device, deadline: float | None, track: Track, draws: Iterator[object]
) -> list[str]:
    """Compiles `cells` (a layer, its arms) in half of the time left, the first ones first; tells if workers died.

    Takes from `draws` meanwhile. No worker is left afterwards.
    """
    now, count, running = time.monotonic(), _workers(cells, device), list[subprocess.Popen[bytes]]()
    until = inf if deadline is None else (now + deadline) / 2
    try:
        for first in range(count):
            with contextlib.suppress(OSError):
                running.append(_worker(cells[first::count], device))
        for process in track(running, "compiling regions", len(running)):
            while process.poll() is None and time.monotonic() < until:
                next(draws, None)
                time.sleep(0.01)
        died = sum(bool(process.poll()) for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [f"{died} of {count} processes that compile regions ahead died"] if died else []


def _workers(cells: Sequence[Cell], device: torch.device) -> int:
    from torch._inductor import config

    most = min(config.compile_threads or 1, len(cells), _MOST)
    if device.type == "cuda" and cells:  # half of the free memory: four copies of a tensor and of its gradient
        sides = [(layer.rows, shape.in_features, shape.out_features) for layer, shape, _ in cells]
        largest = 16 * LAYERS * max(m * (k + n) + k * n for m, k, n in sides)
        most = min(most, torch.cuda.mem_get_info(device)[0] // 2 // (_CONTEXT + largest))
    return most if most >= _FEWEST and config.fx_graph_cache else 0


def _worker(cells: Sequence[Cell], device: torch.device) -> subprocess.Popen[bytes]:
    # Not multiprocessing: a spawned worker would import the user's main module again.
    process = subprocess.Popen(
        [sys.executable, "-c", _COMMAND],
        env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    bare = [(_bare(layer), shape, arms) for layer, shape, arms in cells]
    index = torch.cuda.current_device() if device.type == "cuda" else 0
    assert process.stdin is not None
    told = [encode(bare), str(device), index, torch.backends.cuda.matmul.fp32_precision]
    with contextlib.suppress(OSError), process.stdin:  # it died
        process.stdin.write(json.dumps(told).encode())
    return process


def _bare(layer: LinearStats) -> LinearStats:
    """Without what was learnt, of which a cell needs nothing."""
    operands = {name: replace(operand, tensors={}, numbers={}) for name, operand in layer.operands.items()}
    return replace(layer, operands=operands, effects={}, effects_by_part={})


def work() -> None:
    """What a worker runs. Which of a kernel's layouts is fastest is for who times: here others share the GPU."""
    import torch._inductor.config

    torch._inductor.config.autotune_local_cache = False
    told, on, index, precision = json.load(sys.stdin.buffer)
    device = torch.device(on)
    if precision != "none":  # which Inductor's key tells from what "highest" sets
        torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
    if device.type == "cuda":
        torch.cuda.set_device(index)
    for layer, shape, arms in told:
        layer, shape = decode(LinearStats, layer), decode(LinearShape, shape)
        with contextlib.suppress(Exception):  # who times it will see
            time_region(layer, shape, device=device, settings=None, arms=arms)
        torch._dynamo.reset()
