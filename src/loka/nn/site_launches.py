"""A site's pass on CUDA as one recording: quantization, then its GEMMs, into memory of the caller's allocator.

Eagerly the host, not the GPU, is what a narrow layer waits for: a launch from Python takes it some 8 us, a GEMM of
torch's 20 to 65. A recorded pass allocates what outlives it and is one launch (kernels/triton/launch.py) where the
allocator hands out the same addresses again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from loka.core.numerics.reference import Quantized
from loka.core.problem import DTYPES
from loka.core.recipe import Cast
from loka.kernels.gemm.kernel import Into
from loka.kernels.gemm.run import ScaledGemm, count_run, into_of

if TYPE_CHECKING:
    from loka.kernels.triton.launch import Recording  # Triton need not be installed

Results = list[torch.Tensor | None]
Multiply = Callable[[ScaledGemm, Quantized, Quantized], torch.Tensor]


def can_record(run: ScaledGemm, device: torch.device) -> bool:
    """Whether a pass that ends with this GEMM can be one recording: on CUDA, without Triton's interpreter."""
    if device.type != "cuda":  # where Triton need not be installed
        return False
    from loka.kernels.triton.pack import INTERPRETED

    return not INTERPRETED and into_of(run) is not None


def recorded_pass(
    keys: tuple[object, ...],
    given: tuple[torch.Tensor | None, ...],
    make: Callable[[Multiply], Results],
    runs: tuple[ScaledGemm, ...],
) -> Results:
    """`make` with GEMMs that can be made again, or its allocations and launches made again.

    Args:
        keys: of the problem and the sides; recordings are found by the objects.
        given: all tensors that `make` reads, the first of which lies on the device.
        make: quantizes, and multiplies by what it is given.
        runs: the GEMMs, which count in every pass.
    """
    from loka.kernels.triton.launch import launching_on, recorded

    lying = tuple(None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in given)
    assert given[0] is not None
    with launching_on(given[0]):
        found: Results = recorded((*keys, lying), given, lambda: make(_multiplied), _slots, _tensors)
    for run in runs:
        count_run(run)
    return found


def _slots(results: Results, recording: Recording) -> list[int | None]:
    return [None if tensor is None else recording.slot_of(tensor) for tensor in results]


def _tensors(slots: list[int | None], tensors: list[torch.Tensor | None]) -> Results:
    return [None if slot is None else tensors[slot] for slot in slots]


def _multiplied(run: ScaledGemm, a: Quantized, b: Quantized) -> torch.Tensor:
    """As `run`, uncounted, in a way that a recording can make again."""
    from loka.kernels.triton.launch import allocated, call

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
