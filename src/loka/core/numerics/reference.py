"""Quantization and scaled GEMM in plain PyTorch: ground truth, and the CPU path.

    scale = max(amax, tiny * FMAX) / FMAX     per group; rounded up to 2^k where asked, FMAX 2^k < 2^128
    fp8   = round_to_nearest_even(clamp(hp / scale, -FMAX, FMAX))
    int8  = round_half_even(clamp(hp * (1 / scale), -127, 127))
    out   = (fp8_A * scale_A) @ (fp8_B * scale_B)^T     in float32
    out   = float32(int8_A @ int8_B^T) * scale_A * scale_B^T      the sum exact, as in int32; K <= 131072

`tiny` is float32's smallest normal number, so a zero group quantizes to exact zeros and the
scale stays a normal float32 whose reciprocal is finite: there is no absolute epsilon that
would flush small gradients (kernels that clamp amax at 1e-4 lose rows of std 1e-10).
Powers of two end where a value that rounds up would become infinite: e4m3 at 2^119, so that above 2.98e38
values saturate, at most 12.5 % short of themselves.
A NaN or infinity in a group makes the whole group NaN when dequantized: it always surfaces. In INT8, which
has no NaN, that is by the scale.
"""

from dataclasses import dataclass

import torch

from loka.core.recipe import Cast, Format, Granularity

TINY = torch.finfo(torch.float32).tiny
LARGEST_STEP = torch.finfo(torch.float32).max / 127 * (1 - 2.0**-23)  # of INT8


@dataclass(frozen=True)
class Quantized:
    """`data` [R, C] FP8 or INT8, row-major; `scale` float32 [groups of rows, groups of columns]."""

    data: torch.Tensor
    scale: torch.Tensor
    cast: Cast

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]


def quantize(
    hp: torch.Tensor, cast: Cast, *, padded: tuple[int, int] | None = None, scale: torch.Tensor | None = None
) -> Quantized:
    """Quantizes `hp` [R, C], any float dtype and strides, with current scales.

    `padded` are the sides of `Quantized.data`; the rest is filled with exact zeros. A `scale`
    given for a tensor cast, float32 [1], is used instead of the current one; what lies beyond
    it saturates, and NaN or infinity makes its element NaN (in INT8 the scale, and so the tensor).
    """
    rows, columns = padded or (hp.shape[0], hp.shape[1])
    values = hp.float()
    if (rows, columns) != tuple(hp.shape):
        values = torch.nn.functional.pad(values, (0, columns - hp.shape[1], 0, rows - hp.shape[0]))
    group_rows, group_columns = cast.granularity.group(rows, columns)
    if scale is None:
        scale = scale_of(_group_amax(values, group_rows, group_columns), cast)
    else:
        assert cast.granularity is Granularity.TENSOR, "one given scale is a tensor scale"
        scale = scale.reshape(1, 1)
        if cast.format.uniform:
            scale = scale.where(values.isfinite().all(), torch.nan)
        values = values.where(values.isfinite(), torch.nan)  # no scale of its own would show it
    fmax = cast.format.max
    wide = expand_scale(scale, cast, rows, columns)
    if cast.format.uniform:
        # By the inverse, which the kernels take once a row: a product is one instruction, a quotient ten.
        integers = (values * wide.reciprocal()).clamp(-fmax, fmax).round().nan_to_num(nan=0.0)
        return Quantized(integers.to(cast.format.dtype).contiguous(), scale, cast)
    # Clamp before the cast: torch <= 2.11 turns an e4m3 overflow into NaN, 2.12+ saturates.
    scaled = values / wide
    return Quantized(scaled.clamp(-fmax, fmax).to(cast.format.dtype).contiguous(), scale, cast)


def scale_of(amax: torch.Tensor, cast: Cast) -> torch.Tensor:
    """The dequantizing float32 scale of groups with this amax; NaN and inf pass through."""
    fmax = cast.format.max
    # By a tensor: on a GPU torch multiplies by the inverse of a number, an ulp away. FP8 has its own kernel.
    divisor = amax.new_full((), fmax, dtype=torch.float32) if cast.format.uniform else fmax
    scale = amax.float().clamp_min(TINY * fmax) / divisor
    if cast.format.uniform:  # 127 times it stays a float32
        scale = scale.where(~(scale > LARGEST_STEP) | scale.isinf(), LARGEST_STEP)
    if cast.power_of_two:
        mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        rounded = torch.ldexp(torch.ones_like(scale), exponent).clamp_max(cast.format.largest_power)
        scale = torch.where(torch.isfinite(scale), rounded, scale)
    return scale


def _group_amax(values: torch.Tensor, group_rows: int, group_columns: int) -> torch.Tensor:
    rows, columns = values.shape
    if values.numel() == 0:
        return values.new_zeros(max(-(-rows // group_rows), 1), max(-(-columns // group_columns), 1))
    magnitude = values.abs()
    if (group_rows, group_columns) == (rows, columns):
        return magnitude.amax().reshape(1, 1)
    if (group_rows, group_columns) == (1, columns):
        return magnitude.amax(dim=1, keepdim=True)
    high, wide = -(-rows // group_rows), -(-columns // group_columns)
    magnitude = torch.nn.functional.pad(magnitude, (0, wide * group_columns - columns, 0, high * group_rows - rows))
    return magnitude.view(high, group_rows, wide, group_columns).amax(dim=(1, 3))


def expand_scale(scale: torch.Tensor, cast: Cast, rows: int, columns: int) -> torch.Tensor:
    """`scale` broadcastable to [rows, columns]."""
    group_rows, group_columns = cast.granularity.group(rows, columns)
    if scale.shape[0] > 1 and group_rows > 1:
        scale = repeated(scale, 0, group_rows, rows)
    if scale.shape[1] > 1 and group_columns > 1:
        scale = repeated(scale, 1, group_columns, columns)
    return scale


def repeated(scale: torch.Tensor, dim: int, group: int, size: int) -> torch.Tensor:
    """Each entry `group` times along `dim`, `size` in all. A part of `repeat_interleave` is compiled wrong for a CPU
    (torch 2.13): its loops end before a last group that is not whole."""
    return scale.index_select(dim, torch.arange(size, device=scale.device) // group)


def dequantize(quantized: Quantized) -> torch.Tensor:
    """The float32 tensor that `quantized` stands for."""
    rows, columns = quantized.shape
    return quantized.data.float() * expand_scale(quantized.scale, quantized.cast, rows, columns)


def scaled_mm(a: Quantized, b: Quantized, *, dtype: torch.dtype) -> torch.Tensor:
    """out [M, N] = dequantize(a) [M, K] @ dequantize(b) [N, K]^T, accumulated in float32, of INT8 exactly.

    Raises ValueError where an INT8 operand meets FP8, or K is more than an int32 sum is sure to hold.
    """
    if a.cast.format.uniform or b.cast.format.uniform:
        return scale_sums(_exact_sums(a, b), a.scale, b.scale, dtype=dtype)
    return (dequantize(a) @ dequantize(b).t()).to(dtype)


def scale_sums(sums: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """out [M, N] of int32 `sums` [M, N], by scales of rows [M or 1, 1] and [N or 1, 1], in this order."""
    return sums.float().mul_(scale_a).mul_(scale_b.t()).to(dtype)


def too_long(k: int, format: Format) -> str | None:
    """Why a sum of `k` products of `format` is not sure to fit its accumulator, or None."""
    if format.max_terms is None or k <= format.max_terms:
        return None
    return f"K={k}: int32 is sure to hold a sum of {format.max_terms} products of INT8, no more"


def _exact_sums(a: Quantized, b: Quantized) -> torch.Tensor:
    """int8 @ int8^T in float64, which is exact far beyond int32 and has a fast GEMM on any device."""
    if a.cast.format is not b.cast.format:
        raise ValueError(f"an INT8 GEMM takes two INT8 operands, not {a.cast.name} and {b.cast.name}")
    if reason := too_long(a.shape[1], a.cast.format):
        raise ValueError(reason)
    return a.data.double() @ b.data.double().t()


def accumulation_bound(a: Quantized, b: Quantized, *, fast: bool, dtype: torch.dtype) -> torch.Tensor:
    """Elementwise bound [M, N] on |tensor core result in `dtype` - exact product|, on Hopper.

    An FP8 instruction adds 32 products and the running sum, all aligned to the largest of them, in
    a register with 13 fraction bits (DeepSeek-V3 report, 3.3.2: "about 14 bits"): each of the 33
    terms is cut off by less than 2^-13 of the largest. Cutting is one-sided, so on products of one
    sign the losses add up: an H200 loses 1 % at K = 608. With fast accumulation the running sum
    stays in that register for all of K; without it, it moves to float32 after every 128. float32
    sums add K 2^-24 of sum |a||b|, and the result is rounded once to `dtype` (half a step: 2^-8
    in bf16). INT8 sums are exact; what is left are the roundings to float32, by two scales and to `dtype`.
    """
    if a.cast.format.uniform:
        exact = dequantize(a).double() @ dequantize(b).double().t()
        return ((4 * 2.0**-24 + half_step(dtype)) * exact.abs()).float()
    full_a, full_b = dequantize(a), dequantize(b)
    sides = a.shape[0], b.shape[0]
    lost = full_a.new_zeros(sides)
    exact, running, absolute = lost.clone(), lost.clone(), lost.clone()
    for begin in range(0, a.shape[1], 32):
        if not fast and begin % 128 == 0:
            running = torch.zeros_like(running)
        part_a, part_b = full_a[:, begin : begin + 32], full_b[:, begin : begin + 32]
        products = part_a.abs() @ part_b.abs().t()  # at least the largest product
        lost = lost + 33 * 2.0**-13 * torch.maximum(running.abs() + lost, products)
        added = part_a @ part_b.t()
        running, exact, absolute = running + added, exact + added, absolute + products
    return lost + a.shape[1] * 2.0**-24 * absolute + half_step(dtype) * (exact.abs() + lost)


def half_step(dtype: torch.dtype) -> float:
    """The relative error of one rounding to `dtype`, doubled in bf16 and float16 for ties far from even."""
    return 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11 if dtype == torch.float16 else 2.0**-24
