"""DeepGEMM's kernels for Hopper: 1x128 against 128x128 scales ("1D2D"), and 1x128 twice ("1D1D").

`output` and `grad_input` run 1D2D, which writes bfloat16. `grad_weight` runs 1D1D, which adds to
a float32 matrix: one launch to zero it, and one more to cast where bfloat16 is asked for.

Kernels are compiled at first use, for N and K (grad_weight: M and N, because its K is the batch)
and a class of the other side, in tens of seconds, and kept in DG_JIT_CACHE_DIR. `precompile`
does that ahead, in parallel.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from loka.core.problem import DTYPES, Problem
from loka.core.recipe import RECIPES, Cast, Granularity, Recipe
from loka.core.reference import Quantized
from loka.core.timing import first_line
from loka.kernels.kernel import Kernel, Multiples
from loka.kernels.layouts import column_major, row_major
from loka.kernels.legality import misaligned, not_bfloat16, not_e4m3, not_hopper, undefined
from loka.kernels.libraries import why_missing
from loka.kernels.quantizer import empty_scale

_RECIPE = "blockwise_e4m3"
_MULTIPLES: Multiples = (1, 16, 128)

Progress = Callable[[Problem, str | None], None]
"""(problem, None or why it could not be compiled), once for each problem."""

_compiled: set[Problem] = set()


def _unsupported(problem: Problem, recipe: Recipe) -> str | None:
    _, n, k = _MULTIPLES
    return (
        undefined(problem, recipe)
        or not_hopper(problem.target)
        or not_e4m3(problem, recipe)
        or not_bfloat16(problem)
        or misaligned(problem, n=n, k=k)
    )


def _multiples(problem: Problem, recipe: Recipe) -> Multiples:
    return _MULTIPLES


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


def precompile(problems: Sequence[Problem], *, workers: int, progress: Progress | None = None) -> None:
    """Compiles the kernels of `problems` in `workers` processes, each once, on the current GPU.

    Problems compiled before by this function are skipped, and what another process left in
    DeepGEMM's cache only loads. Every worker holds a CUDA context and one problem's operands, and
    imports the main module anew: a script that calls this needs `if __name__ == "__main__":`.
    Nothing is raised: what does not compile goes to `progress`, and raises when it runs.
    """

    def tell(asked: Sequence[Problem], failure: str | None) -> None:
        if progress is not None:
            for problem in asked:
                progress(problem, failure)

    todo: dict[Problem, list[Problem]] = {}
    for problem in problems:
        padded, refused = problem.padded(_MULTIPLES), _refused(problem)
        if refused or padded in _compiled:
            tell([problem], refused)
        else:
            todo.setdefault(padded, []).append(problem)
    if not todo:
        return
    spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(max_workers=min(workers, len(todo)), mp_context=spawn) as pool:
        device = torch.cuda.current_device()
        futures = {pool.submit(_compile, padded, device): padded for padded in todo}
        for future in as_completed(futures):
            padded = futures[future]
            try:
                failure = future.result()
            except Exception as error:  # the worker died: the pool is broken for the others too
                failure = first_line(error)
            if failure is None:
                _compiled.add(padded)
            tell(todo[padded], failure)


def _refused(problem: Problem) -> str | None:
    return _unsupported(problem.padded(_MULTIPLES), RECIPES[_RECIPE])


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
    summary="DeepGEMM's JIT-compiled blockwise kernels",
    recipes=(_RECIPE,),
    unsupported=_unsupported,
    multiples=_multiples,
    run=_run,
    missing=functools.partial(why_missing, "deep_gemm"),
)
