"""Current scales on the GPU: what a producer is about to write, read for its maximum alone.

    forward    Z [T, N] -> the scale of A = E(Z)            2 bytes an element
    backward   dA, Z    -> the scale of dZ in units         4 bytes an element, 3 from Z in eight bits

The values are those of the producers, by the same code (link.py). Every program turns the maximum of its
tile into a power of two and raises the scale to it: positive floats order like their bits, so no launch
follows. A norm over more features than a tile has a program a row, as in forward: one launch,
where the producer of backward needs two. Twin: core/current.py.

Legend: T rows, N features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loka.core.chain import Epilogue, Norm
from loka.core.current import LIMIT, largest_bits
from loka.core.producer import Parameters, Rounded
from loka.core.recipe import Format
from loka.kernels.triton.link import (
    NO_NORM,
    TILE_NORM,
    applied,
    differentiated,
    epilogue_constants,
    launching_on,
    take,
    tile_width,
    widened,
)
from loka.kernels.triton.pack import power_above

_ELEMENTS = 4096  # of a tile, where a row has no more


@triton.jit
def _raise(scale_ptr, value, LARGEST: tl.constexpr, LIMIT: tl.constexpr):
    """Comparisons with NaN are false: what is not finite counts as zero."""
    magnitude = tl.abs(value)
    finite = tl.where(magnitude < float("inf"), magnitude, 0.0)
    bits = tl.max(tl.max(finite, axis=1), axis=0).to(tl.int32, bitcast=True)
    tl.atomic_max(scale_ptr, power_above(bits, LARGEST, 0, LIMIT), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _scale_produced(
    z_ptr, bias_ptr, gamma_ptr, beta_ptr, scale_ptr, rows, features, block, z_stride,
    NORMED: tl.constexpr, CENTERED: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    q = tl.arange(0, BLOCK_R)
    first = tl.program_id(1) * block
    c = first + tl.arange(0, BLOCK_C)
    inside = (c < first + block) & (c < features)
    value = widened(take(z_ptr, start, q, c, inside, rows, z_stride, EVEN_ROWS, EVEN))
    value = applied(
        value, bias_ptr, gamma_ptr, beta_ptr, first, c, inside, features, block, NORMED, CENTERED, EPS,
        ACTIVATION, BIAS, GAMMA, BETA, EVEN,
    )  # fmt: skip
    if not (EVEN and EVEN_ROWS):  # a bias makes something of what is not there
        value = tl.where((q < rows - start)[:, None] & inside[None, :], value, 0.0)
    _raise(scale_ptr, value, LARGEST, LIMIT)


@triton.jit(do_not_specialize=["rows"])
def _scale_derived(
    grad_ptr, z_ptr, steps_ptr, bias_ptr, gamma_ptr, beta_ptr, units_ptr, scale_ptr, rows, features, block,
    grad_stride, z_stride,
    NORMED: tl.constexpr, CENTERED: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, HAS_Z: tl.constexpr, REAL: tl.constexpr,
    ROUNDED: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr, EVEN_ROWS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ROUNDED: `z_ptr` holds Z in eight bits, and `steps_ptr` their steps, one for each tile of a row."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    q = tl.arange(0, BLOCK_R)
    r = start + q
    first = tl.program_id(1) * block
    c = first + tl.arange(0, BLOCK_C)
    inside = (c < first + block) & (c < features)
    share = 1.0 / tl.minimum(block, features - first).to(tl.float32)
    z = q
    if HAS_Z:
        z = take(z_ptr, start, q, c, inside, rows, z_stride, EVEN_ROWS, EVEN)
    grad = take(grad_ptr, start, q, c, inside, rows, grad_stride, EVEN_ROWS, EVEN)
    step = q
    if ROUNDED:
        step = tl.load(steps_ptr + r * tl.num_programs(1) + tl.program_id(1), mask=r < rows, other=0.0)
    unit = tl.full(q.shape, 1.0, tl.float32)
    if REAL:
        unit = tl.load(units_ptr + r, mask=r < rows, other=0.0)
    value, _out, _shifted, _normal, _along = differentiated(
        grad, z, step, bias_ptr, gamma_ptr, beta_ptr, scale_ptr, r, c, inside, rows, share, 1.0, unit, unit,
        NORMED, CENTERED, EPS, ACTIVATION, HAS_Z, BIAS, GAMMA, BETA, REAL, EVEN_ROWS, EVEN, ROUNDED,
    )  # fmt: skip
    _raise(scale_ptr, value, LARGEST, LIMIT)


def scale_produced_fused(
    z: torch.Tensor, epilogue: Epilogue, parameters: Parameters, *, scale: torch.Tensor
) -> None:
    """Twin: core/current.scale_produced. One launch."""
    rows, features = z.shape
    block, grid, tile = _tiles(rows, features, epilogue)
    with launching_on(z):
        _scale_produced[grid](
            z,
            *(z if p is None else p for p in parameters),
            scale.view(torch.int32),
            rows,
            features,
            block,
            z.stride(0),
            NORMED=epilogue.norm is not Norm.NONE,
            **epilogue_constants(epilogue, parameters),
            LARGEST=largest_bits(Format.E4M3),
            LIMIT=LIMIT,
            **tile,
        )


def scale_derived_fused(
    grad: torch.Tensor,
    z: torch.Tensor | Rounded | None,
    epilogue: Epilogue,
    parameters: Parameters,
    *,
    scale: torch.Tensor,
    units: torch.Tensor | None = None,
    real: bool = False,
    format: Format = Format.E4M3,
) -> None:
    """Twin: core/current.scale_derived. One launch."""
    rows, features = grad.shape
    block, grid, tile = _tiles(rows, features, epilogue)
    z, steps = z if isinstance(z, Rounded) else (z, None)
    real = real and units is not None
    with launching_on(grad):
        _scale_derived[grid](
            grad,
            grad if z is None else z,
            grad if steps is None else steps,
            *(grad if p is None else p for p in parameters),
            grad if units is None else units,
            scale.view(torch.int32),
            rows,
            features,
            block,
            grad.stride(0),
            0 if z is None else z.stride(0),
            NORMED=(NO_NORM if epilogue.norm is Norm.NONE else TILE_NORM).value,
            **epilogue_constants(epilogue, parameters),
            HAS_Z=z is not None,
            REAL=real,
            ROUNDED=steps is not None,
            LARGEST=largest_bits(format),
            LIMIT=LIMIT,
            **tile,
        )


def _tiles(rows: int, features: int, epilogue: Epilogue) -> tuple[int, tuple[int, int], dict[str, int]]:
    """Features a program owns, the grid, and how a launch is laid out."""
    block, wide = tile_width(epilogue, features, features)
    high = max(_ELEMENTS // wide, 1)
    return (
        block,
        (triton.cdiv(rows, high), triton.cdiv(features, block)),
        {
            "EVEN_ROWS": rows % high == 0,
            "EVEN": block == wide and features % block == 0,
            "BLOCK_R": high,
            "BLOCK_C": wide,
            "num_warps": 4 if wide <= _ELEMENTS else 8,
        },
    )
