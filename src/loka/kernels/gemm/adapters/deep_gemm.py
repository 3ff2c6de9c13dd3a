"""DeepGEMM's kernels for Hopper: 1x128 against 128x128 scales ("1D2D"), and 1x128 twice ("1D1D").

`output` and `grad_input` run 1D2D, which writes bfloat16. `grad_weight` runs 1D1D, which adds to
a float32 matrix: one launch to zero it, and one more to cast where bfloat16 is asked for.

Kernels are compiled at first use, for N and K (grad_weight: M and N, because its K is the batch)
and a class of the other side, in tens of seconds, and kept in DG_JIT_CACHE_DIR. `precompile`
does that ahead, in parallel.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import torch

from loka.core.exceptions import first_line
from loka.core.numerics.reference import Quantized
from loka.core.problem import DTYPES, Problem
from loka.core.recipe import RECIPES, Cast, Gemm, Granularity, Recipe
from loka.kernels.gemm.kernel import Kernel, Multiples
from loka.kernels.gemm.layouts import column_major, row_major
from loka.kernels.gemm.legality import misaligned, not_bfloat16, not_e4m3, not_hopper
from loka.kernels.gemm.libraries import why_missing
from loka.kernels.quantize.side import empty_scale

_RECIPE = "blockwise_e4m3"
_DONE = "loka: done"  # marks an answer among what the compiler prints

_compiled: set[Problem] = set()


def _unsupported(problem: Problem, recipe: Recipe) -> str | None:
    m, n, k = _multiples(problem, recipe)
    return (
        not_hopper(problem.target)
        or not_e4m3(problem, recipe)
        or not_bfloat16(problem)
        or misaligned(problem, m=m, n=n, k=k)
    )


def _multiples(problem: Problem, recipe: Recipe) -> Multiples:
    # For M up to 32 the library picks a tile of so many rows, which its 1D1D kernel refuses to compile.
    return (64, 16, 128) if problem.gemm is Gemm.GRAD_WEIGHT else (1, 16, 128)


def _run(a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0) -> torch.Tensor:
    from deep_gemm import fp8_gemm_nt

    sides = a.shape[0], b.shape[0]
    one_dimensional = b.cast.granularity is Granularity.GROUP_1X128
    with torch.cuda.device_of(a.data):
        operand_a = a.data, column_major(a.scale)
        if one_dimensional:
            operand_b = b.data, column_major(b.scale)
            out = torch.zeros(sides, dtype=torch.float32, device=a.data.device)
            fp8_gemm_nt(operand_a, operand_b, out, c=out, recipe=(1, 1, 128), compiled_dims="mn")
        else:
            operand_b = b.data, row_major(b.scale)
            out = torch.empty(sides, dtype=torch.bfloat16, device=a.data.device)
            # The default of compiled_dims here is to compile no side (sgl-project/sglang#36273).
            fp8_gemm_nt(operand_a, operand_b, out, recipe=(1, 128, 128), compiled_dims="nk")
    return out.to(dtype)


def precompile(problems: Sequence[Problem], on_done: Callable[[], None] = lambda: None) -> None:
    """Compiles the kernels of `problems`, each once, in as many processes as there are cores.

    `on_done` is called once for each problem. Problems compiled before by this function are
    skipped; what another process left in DeepGEMM's cache only loads. Every process holds a CUDA
    context and one problem's operands. Nothing is raised: what does not compile raises when it runs.
    """
    todo: dict[Problem, int] = {}
    for problem in problems:
        padded = _padded(problem)
        if padded in _compiled or _unsupported(padded, RECIPES[_RECIPE]):
            on_done()
        else:
            todo[padded] = todo.get(padded, 0) + 1
    # The largest first: they take longest, and shares dealt in turn come out even.
    order = sorted(todo, key=lambda problem: problem.flops, reverse=True)
    workers = max(min(os.cpu_count() or 1, len(order)), 1)
    shares = [share for share in (order[first::workers] for first in range(workers)) if share]
    # Not multiprocessing: a spawned worker would import the user's main module again.
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    running = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from loka.kernels.gemm.adapters import deep_gemm; deep_gemm.compile_share({device})",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in shares
    ]
    try:
        for process, share in zip(running, shares, strict=True):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died; its problems compile when they run
                process.stdin.write(json.dumps([problem.__dict__ for problem in share]))
                process.stdin.close()
        for process, share in zip(running, shares, strict=True):
            assert process.stdout is not None
            for problem in share:
                answer = next((line for line in process.stdout if line.startswith(_DONE)), "it died")
                if answer.strip() == _DONE:
                    _compiled.add(problem)
                for _ in range(todo[problem]):
                    on_done()
            process.wait()
    finally:
        for process in running:
            process.kill()


def compile_share(device: int) -> None:
    """What a process of `precompile` runs: problems as JSON on stdin, a line for each on stdout."""
    content = json.load(sys.stdin)
    for entry in content:
        failure = _compile(Problem(**{**entry, "gemm": Gemm(entry["gemm"])}), device)
        print(f"{_DONE} {failure or ''}".strip(), flush=True)


def _padded(problem: Problem) -> Problem:
    return problem.padded(_multiples(problem, RECIPES[_RECIPE]))


def _compile(problem: Problem, device: int) -> str | None:
    """Runs `problem` once on ones: DeepGEMM has no way to compile without launching."""
    casts = RECIPES[_RECIPE].casts(problem.gemm)
    assert casts is not None
    try:
        with torch.cuda.device(device):
            a, b = _ones(casts[0], (problem.m, problem.k)), _ones(casts[1], (problem.n, problem.k))
            _run(a, b, DTYPES[problem.dtype])
            torch.cuda.synchronize()
    except Exception as error:
        return first_line(error)
    return None


def _ones(cast: Cast, sides: tuple[int, int]) -> Quantized:
    scale = empty_scale(cast, sides, torch.device("cuda")).fill_(1.0)
    return Quantized(torch.ones(sides, device="cuda").to(cast.format.dtype), scale, cast)


DEEP_GEMM = Kernel(
    name="deep_gemm",
    library="deep_gemm",
    recipes=(_RECIPE,),
    unsupported=_unsupported,
    multiples=_multiples,
    run=_run,
    missing=functools.partial(why_missing, "deep_gemm"),
    precompile=precompile,
)
