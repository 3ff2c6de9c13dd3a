"""Cells of regions are compiled ahead, on all cores, into the caches on disk that the process which times reads.

What no worker compiled, for whatever reason, is compiled when it is timed.
"""

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from loka.core.progress import Track
from loka.core.records.stats import LinearStats
from loka.core.signature import LinearShape
from loka.core.storage.codec import decode, encode
from loka.measurement.times.region_times import LAYERS, time_region

_FEWEST, _MOST = 4, 32  # processes: each imports torch first, and two on two cores took longer than none
_LEAST, _LONGEST = 8.0, 600.0  # seconds: importing torch takes half of the first; none is waited for longer
_CONTEXT = 1 << 30  # bytes of one on a GPU
_COMMAND = "from loka.measurement.times.region_ahead import work; work()"
Cell = tuple[LinearStats, LinearShape, list[str], bool]


def compile_regions_ahead(
    cells: Sequence[Cell], device: torch.device, deadline: float | None, track: Track, draws: Iterator[object]
) -> list[str]:
    """Compiles `cells` (a layer, its arms, whether in a chain) in half of the time left, the first ones first;
    tells of workers that died or never began.

    Takes from `draws` meanwhile, and from `track` each second. No worker is left afterwards.
    """
    now, count = time.monotonic(), _workers(cells, device)
    seconds = _LONGEST if deadline is None else min((deadline - now) / 2, _LONGEST)
    if not count or seconds < _LEAST:
        return []
    running = list[subprocess.Popen[bytes]]()
    with TemporaryDirectory() as folder:
        try:
            for first in range(count):
                with contextlib.suppress(OSError):
                    running.append(_worker(cells[first::count], device, Path(folder) / f"{first}.json"))
            for _ in track(_seconds(running, now + seconds, draws), "compiling regions, s at most", math.ceil(seconds)):
                pass
            lost = count - len(running) + sum(bool(process.poll()) for process in running)
        finally:
            for process in running:
                process.kill()
                process.wait()
                assert process.stdin is not None
                process.stdin.close()
    return [f"{lost} of {count} processes that compile regions ahead died"] if lost else []


def _seconds(running: Sequence[subprocess.Popen[bytes]], until: float, draws: Iterator[object]) -> Iterator[None]:
    while (now := time.monotonic()) < until and any(process.poll() is None for process in running):
        yield
        while time.monotonic() < min(now + 1, until) and any(process.poll() is None for process in running):
            next(draws, None)
            time.sleep(0.01)


def _workers(cells: Sequence[Cell], device: torch.device) -> int:
    from torch._inductor import config

    most = min(config.compile_threads or 1, len(cells), _MOST)
    if device.type == "cuda" and cells:  # half of the free memory: four copies of a tensor and of its gradient
        sides = [(layer.rows, shape.in_features, shape.out_features) for layer, shape, *_ in cells]
        largest = 16 * LAYERS * max(m * (k + n) + k * n for m, k, n in sides)
        most = min(most, torch.cuda.mem_get_info(device)[0] // 2 // (_CONTEXT + largest))
    return most if most >= _FEWEST and config.fx_graph_cache else 0


def _worker(cells: Sequence[Cell], device: torch.device, task: Path) -> subprocess.Popen[bytes]:
    bare = [(_bare(layer), shape, arms, chained) for layer, shape, arms, chained in cells]
    index = torch.cuda.current_device() if device.type == "cuda" else 0
    task.write_text(json.dumps([encode(bare), str(device), index, _compiler()]))
    if not sys.executable:
        raise OSError("the path of this Python is not known")
    # Not multiprocessing: a spawned worker would import the user's main module again.
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _COMMAND, str(task)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(place or os.getcwd() for place in sys.path)},
        stdin=subprocess.PIPE,  # nothing is written to it: it closes when this process ends, however that ends
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _bare(layer: LinearStats) -> LinearStats:
    operands = {name: replace(operand, tensors={}, numbers={}) for name, operand in layer.operands.items()}
    return replace(layer, operands=operands, effects={}, no_effect="", effects_by_part={})


def _compiler() -> list[Any]:
    from torch._inductor import config

    return [
        {name: value for name, value in config.save_config_portable().items() if _in_json(value)},
        [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        torch.backends.cuda.matmul.fp32_precision,
    ]


def _in_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def work() -> None:
    """What a worker runs. Which of a kernel's layouts is fastest is for who times: here others share the GPU."""
    from torch._inductor import config

    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    cells, on, index, (settings, (deterministic, warn_only), precision) = json.loads(Path(sys.argv[1]).read_text())
    for name, value in {**settings, "autotune_local_cache": False, "compile_threads": 1}.items():
        with contextlib.suppress(AttributeError):  # names of one torch that refer to another's
            setattr(config, name, value)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    if precision != "none":  # which Inductor's key tells from what "highest" sets
        torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
    device = torch.device(on)
    if device.type == "cuda":
        torch.cuda.set_device(index)
    for layer, shape, arms, chained in cells:
        layer, shape = decode(LinearStats, layer), decode(LinearShape, shape)
        with contextlib.suppress(Exception):  # who times it will see
            time_region(layer, shape, device=device, settings=None, arms=arms, chained=chained)
        torch._dynamo.reset()
