"""Which of cuBLASLt's algorithms is the fastest for a GEMM of a region, by its time on the GPU.

torch takes the first that cuBLASLt's heuristic names. On an H200 another took 0.78 to 0.9 of its time for wide results
of sums of up to 1,024 terms (docs/log.md, 2026-12-01). Scales of rows leave it one algorithm, so there is no choice.
Only algorithms that give torch's own bits count, and cut no sums: which one runs changes a time, and no number.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from loka.core.exceptions import LokaError, first_line
from loka.core.numerics.reference import Quantized
from loka.core.problem import DTYPES, Problem
from loka.core.recipe import RECIPES
from loka.core.recording import may_capture_eagerly
from loka.core.storage.files import digest_of, write_atomic
from loka.core.timing import Race, time_interleaved
from loka.kernels.gemm.adapters import cublaslt_c as lt
from loka.kernels.gemm.adapters.cublaslt import CUBLASLT, CUBLASLT_FAST, uncut
from loka.kernels.gemm.adapters.torch_scaled import TORCH, TORCH_FAST
from loka.kernels.gemm.kernel import Kernel

log = logging.getLogger(__name__)

_RECIPE = RECIPES["tensorwise_e4m3"]
_PAYS = 1.01  # over torch, at the interval's low end
_TIE, _ROUNDS = 0.02, 30
_OTHERS = {TORCH.name: (TORCH, CUBLASLT), TORCH_FAST.name: (TORCH_FAST, CUBLASLT_FAST)}


def faster_than_torch(kernel: str, problem: Problem, device: torch.device) -> str | None:
    """The name with its algorithm, such as "cublaslt_fast@5", of what is faster than `kernel`, "torch" or "torch_fast",
    for operands in e4m3 of one scale each.

    None where nothing is, and where it cannot be timed: other threads may wait for the device (core/recording.py), or
    memory is short. Timing takes 0.06 to 0.4 s. What was found lies beside Inductor's caches, so that later processes
    make the same graphs, which those caches know.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    # A compiler calls this with its fake tensors on.
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cuda", enabled=False):
        try:
            return _searched(kernel, problem, device)
        except _NotTimed as reason:
            log.info("%s runs cuBLASLt's first algorithm: %s", problem, reason)
            return None


class _NotTimed(Exception):
    """Why no algorithm could be timed now."""


@functools.lru_cache(maxsize=4096)
def _searched(kernel: str, problem: Problem, device: torch.device) -> str | None:
    first, other = _OTHERS[kernel]
    if other.missing() or other.unsupported(problem, _RECIPE):
        return None
    with torch.cuda.device(device):
        file = _file_of(kernel, problem)
        if (known := _read(file, other.name)) is not None:
            return known or None
        if not may_capture_eagerly(0):
            raise _NotTimed("others are not timed while threads may wait for the device, see loka.nn.eager_graphs")
        try:
            found = _timed(first, other, problem, device)
        except (LokaError, RuntimeError) as error:  # memory is short, or the allocator allows no capture
            raise _NotTimed(f"timing others fails: {first_line(error)}") from error
    with contextlib.suppress(LokaError):  # the next process times it again
        write_atomic(file, (found or "").encode())
    return found


def _timed(first: Kernel, other: Kernel, problem: Problem, device: torch.device) -> str | None:
    alike = _with_torchs_bits(first, other, problem, device)
    if len(alike) == 1:
        return None
    race = time_interleaved(alike, baseline=first.name, device=device, tie=_TIE, max_rounds=_ROUNDS)
    return _choice(race, problem)


def _file_of(kernel: str, problem: Problem) -> Path:
    """The file that holds what was found for a problem on such a GPU, by these versions."""
    from torch._inductor.codecache import cache_dir  # a compiler calls this, and has loaded it

    found_by = torch.cuda.get_device_name(), torch.__version__, lt.version(), _PAYS, _TIE, _ROUNDS
    return Path(cache_dir()) / "loka_algorithms" / digest_of([kernel, repr(problem), *map(str, found_by)])


def _read(file: Path, kernel: str) -> str | None:
    """What a file says: a name with an algorithm, or nothing where none is faster. None for one that is not there, or
    damaged.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    name, _, number = text.partition("@")
    return text if not text or (name == kernel and number.isdecimal()) else None


def _choice(found: Race, problem: Problem) -> str | None:
    speedup = found.timings[found.winner].speedup
    if speedup.low < _PAYS:
        return None
    log.info("%s: %s is %.2f times as fast as cuBLASLt's first algorithm", problem, found.winner, speedup.value)
    return found.winner


def _with_torchs_bits(
    first: Kernel, other: Kernel, problem: Problem, device: torch.device
) -> dict[str, Callable[[], torch.Tensor]]:
    """`first` and those algorithms of `other` that give its bits, by name, on random normal operands.

    Their bits are compared on numbers of all magnitudes that e4m3 has: float32 holds most sums of normal ones without
    rounding, in any order.
    """
    dtype = DTYPES[problem.dtype]
    generator = torch.Generator(device).manual_seed(0)
    a, b = _operands(problem, _of_all_magnitudes, generator)
    expected, alike = first.run(a, b, dtype), []
    for algorithm in uncut(problem, _RECIPE, fast=other.fast):
        try:
            if torch.equal(other.run(a, b, dtype, algorithm=algorithm), expected):
                alike.append(algorithm)
        except (LokaError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            log.info("%s: %s@%d fails: %s", problem, other.name, algorithm, first_line(error))
    a, b = _operands(problem, _normal, generator)
    runs: dict[str, Callable[[], torch.Tensor]] = {first.name: functools.partial(first.run, a, b, dtype)}
    for algorithm in alike:
        runs[f"{other.name}@{algorithm}"] = functools.partial(other.run, a, b, dtype, algorithm=algorithm)
    return runs


def _operands(
    problem: Problem, draw: Callable[[int, int, torch.Generator], torch.Tensor], generator: torch.Generator
) -> tuple[Quantized, Quantized]:
    """A [M, K] and B [N, K] in e4m3, with scales of one."""
    casts = _RECIPE.casts(problem.gemm)
    assert casts is not None
    one = torch.ones(1, 1, device=generator.device)
    a, b = (draw(rows, problem.k, generator) for rows in (problem.m, problem.n))
    return Quantized(a, one, casts[0]), Quantized(b, one, casts[1])


def _normal(rows: int, terms: int, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(rows, terms, dtype=torch.bfloat16, device=generator.device, generator=generator)
    return values.to(torch.float8_e4m3fn)


def _of_all_magnitudes(rows: int, terms: int, generator: torch.Generator) -> torch.Tensor:
    """Every finite number of e4m3 as often."""
    codes = torch.randint(254, (rows, terms), dtype=torch.uint8, device=generator.device, generator=generator)
    return (codes + codes // 127).view(torch.float8_e4m3fn)  # 0x7F and 0xFF are NaN
