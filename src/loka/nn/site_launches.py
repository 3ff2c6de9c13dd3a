"""A site's pass on CUDA as one recording: quantization, then its GEMMs, into memory of the caller's allocator.

Eagerly the host, not the GPU, is what a narrow layer waits for: a launch from Python takes it some 8 us, a GEMM of
torch's 20 to 60. A recorded pass allocates what outlives it and is one launch (kernels/triton/launch.py) where the
allocator hands out the same addresses again.
"""

from collections.abc import Callable
from functools import partial

import torch

from loka.core.numerics.reference import Quantized
from loka.core.problem import DTYPES
from loka.core.recipe import Cast
from loka.kernels.gemm.kernel import Into
from loka.kernels.gemm.run import ScaledGemm, count_run, into_of
from loka.kernels.quantize.quantizer import append_residuals, quantize_pair, quantize_pairs
from loka.kernels.quantize.side import Operand
from loka.kernels.triton.launch import Recording, allocated, call, launching_on, recorded
from loka.kernels.triton.pack import INTERPRETED

Kept = tuple[torch.Tensor, torch.Tensor]
"""A quantized tensor and its scale."""
Results = list[torch.Tensor | None]


def can_record(run: ScaledGemm) -> bool:
    """Whether a pass that ends with this GEMM, on CUDA, can be one recording."""
    return not INTERPRETED and into_of(run) is not None


def recorded_forward(
    key: object, run: ScaledGemm, x: Operand, weight: Operand, health: torch.Tensor, hot: torch.Tensor | None
) -> Results:
    """y [T, out]; x^T and its scale, weight^T and its scale as they are kept for backward, None where they are not.

    Args:
        key: of this problem and these sides; recordings are found by the object.
        x, weight: [T, in] and [out, in], with the copies that are wanted of each.
        hot: int64 [32], the columns of a hot recipe.
    """

    def make() -> Results:
        (low_x, kept_x), (low_weight, kept_weight) = quantize_pairs((x, weight), health=health)
        assert low_x is not None
        assert low_weight is not None
        append_residuals(low_x, x[0], hot)
        append_residuals(low_weight, weight[0], hot, second=True)
        kept = [part for copy in (kept_x, kept_weight) for part in ((copy.data, copy.scale) if copy else (None, None))]
        return [_multiplied(run, low_x, low_weight), *kept]

    return _recorded((key,), (x[0], weight[0], health, hot), make, (run,))


def recorded_backward(
    keys: tuple[object, object],
    runs: tuple[ScaledGemm | None, ScaledGemm | None],
    dy: Operand,
    weight: Kept,
    x: Kept,
    health: torch.Tensor,
) -> Results:
    """dx [T, in] and dW [out, in], each by its GEMM, None without one.

    Args:
        keys: one a GEMM, as in `recorded_forward`.
        dy: [T, out], with the copies that are wanted of it.
        weight, x: [in, out] and [in, T], as `recorded_forward` kept them.
    """

    def make() -> Results:
        low, transposed = quantize_pair(dy[0], row=dy[1], column=dy[2], health=health)
        return [
            _multiplied(run, copy, Quantized(*kept, run.casts[1])) if run and copy else None
            for run, copy, kept in zip(runs, (low, transposed), (weight, x), strict=True)
        ]

    return _recorded(keys, (dy[0], *weight, *x, health), make, tuple(run for run in runs if run))


def _recorded(
    keys: tuple[object, ...],
    given: tuple[torch.Tensor | None, ...],
    make: Callable[[], Results],
    runs: tuple[ScaledGemm, ...],
) -> Results:
    lying = tuple(None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in given)
    assert given[0] is not None
    with launching_on(given[0]):
        found: Results = recorded((*keys, lying), given, make, _slots, _tensors)
    for run in runs:
        count_run(run)
    return found


def _slots(results: Results, recording: Recording) -> list[int | None]:
    return [None if tensor is None else recording.slot_of(tensor) for tensor in results]


def _tensors(slots: list[int | None], tensors: list[torch.Tensor | None]) -> Results:
    return [None if slot is None else tensors[slot] for slot in slots]


def _multiplied(run: ScaledGemm, a: Quantized, b: Quantized) -> torch.Tensor:
    into, problem = into_of(run), run.problem
    assert into is not None
    out = allocated(torch.empty(problem.m, problem.n, dtype=DTYPES[problem.dtype], device=a.data.device))
    call(partial(_write, into, a.cast, b.cast), a.data, a.scale, b.data, b.scale, out)
    return out


def _write(
    into: Into,
    cast_a: Cast,
    cast_b: Cast,
    a: torch.Tensor,
    scale_a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    out: torch.Tensor,
) -> None:
    into(Quantized(a, scale_a, cast_a), Quantized(b, scale_b, cast_b), out)
