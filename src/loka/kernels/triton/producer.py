"""Producers on the GPU: norm, activation and cast to FP8, forward and backward, one pass each.

    forward    Z [T, N] -> A = E(Z) in FP8, row-major                           2 + 1 bytes an element
    backward   dA, Z    -> dZ in FP8 row-major and transposed, r A^T in FP8     4 + 3 bytes an element
    or         dA, Z8   -> the same, from Z in eight bits (rounded.py)          3 + 3 bytes an element

A^T, the operand of grad_weight, is written in backward, where Z is read anyway: it costs as many
bytes as writing it in forward, and nothing but Z, or Z8, is kept between the two. Twin: core/producer.py.

Legend: T rows, N features, b features that a norm reduces over, r the units of rows.
A tile holds whole norm blocks. Backward holds it as four tiles of every fourth row, so that four rows
become one word of the transposed copies (triton/pack.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loka.core.chain import Activation, Epilogue, Norm
from loka.core.producer import Derived, Parameters, Rounded
from loka.core.recipe import Format
from loka.kernels.producer import WIDEST_BLOCK
from loka.kernels.triton.link import (
    NO_NORM,
    PLAIN_WIDTH,
    SUMMED_NORM,
    TILE_NORM,
    activated,
    applied,
    differentiated,
    epilogue_constants,
    finite_or_nan,
    launching_on,
    take,
    tile_width,
    widened,
)
from loka.kernels.triton.pack import (
    INTERPRETED,
    TRITON_TYPES,
    inverse_of_power,
    magnitude_bits,
    saturates,
    underflows,
)
from loka.kernels.triton.rounded import from_byte, step_of, to_byte

# Casts, written out for the hardware; the interpreter takes the plain paths.
# Four columns to the bytes of a word; two rows to its lower half; two more rows on top of them.
_CAST_4 = (
    "{{.reg .b16 low, high; cvt.rn.satfinite.{0} low, $2, $1; "
    "cvt.rn.satfinite.{0} high, $4, $3; mov.b32 $0, {{low, high}};}}"
)
_CAST_LOW = "cvt.rn.satfinite.{0} $0, $2, $1;"
_CAST_HIGH = "{{.reg .b16 high; cvt.rn.satfinite.{0} high, $3, $2; mov.b32 $0, {{$1, high}};}}"
_FOUR_E4M3, _LOW_E4M3, _HIGH_E4M3, _FOUR_E5M2, _LOW_E5M2, _HIGH_E5M2 = (
    tl.constexpr(asm.format(kind))
    for kind in ("e4m3x2.f32", "e5m2x2.f32")
    for asm in (_CAST_4, _CAST_LOW, _CAST_HIGH)
)
_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def _count(over, under, counts_ptr):
    if over > 0:
        tl.atomic_add(counts_ptr, over.to(tl.int64), sem="relaxed")
    if under > 0:
        tl.atomic_add(counts_ptr + 1, under.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _produce(
    z_ptr, bias_ptr, gamma_ptr, beta_ptr, scale_ptr, seen_ptr, counts_ptr, out_ptr, rounded_ptr, steps_ptr,
    rows, features, block, padded, z_stride,
    NORMED: tl.constexpr, CENTERED: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, LOW: tl.constexpr, OUT: tl.constexpr,
    FMAX: tl.constexpr, ZERO: tl.constexpr, SEEN: tl.constexpr, COUNTS: tl.constexpr, CLAMP: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr, ROUNDED: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ROUNDED: writes Z in eight bits, too."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    r = start + tl.arange(0, BLOCK_R)
    first = tl.program_id(1) * block
    c = first + tl.arange(0, BLOCK_C)
    inside = (c < first + block) & (c < features)
    value = widened(take(z_ptr, start, tl.arange(0, BLOCK_R), c, inside, rows, z_stride, EVEN_ROWS, EVEN))
    if ROUNDED:
        step = step_of(tl.max(magnitude_bits(value), axis=1).to(tl.float32, bitcast=True))
        byte = to_byte(value, inverse_of_power(step)[:, None])
        place = rounded_ptr + r[:, None] * features + c[None, :]
        if EVEN and EVEN_ROWS:
            tl.store(place, byte)
        elif EVEN:
            tl.store(place, byte, mask=(r < rows)[:, None])
        else:
            tl.store(place, byte, mask=(r < rows)[:, None] & inside[None, :])
        tl.store(steps_ptr + r * tl.num_programs(1) + tl.program_id(1), step, mask=r < rows)
    value = applied(
        value, bias_ptr, gamma_ptr, beta_ptr, first, c, inside, features, block, NORMED, CENTERED, EPS,
        ACTIVATION, BIAS, GAMMA, BETA, EVEN,
    )  # fmt: skip
    if LOW:
        inverse = inverse_of_power(tl.load(scale_ptr))
        if not EVEN:
            value = tl.where(inside[None, :], value, 0.0)
        if SEEN or COUNTS:
            shown = tl.where((r < rows)[:, None], value, 0.0)
            if SEEN:
                tl.atomic_max(seen_ptr, tl.max(tl.max(magnitude_bits(shown), axis=1), axis=0), sem="relaxed")
            if COUNTS:
                over = tl.sum(tl.sum(saturates(shown, inverse, FMAX), axis=1), axis=0)
                under = tl.sum(tl.sum(underflows(shown, inverse, ZERO), axis=1), axis=0)
                _count(over, under, counts_ptr)
        if not NORMED:
            value = finite_or_nan(value)
        value = value * inverse
        if CLAMP:
            value = tl.where(value > FMAX, FMAX, tl.where(value < -FMAX, -FMAX, value))
        low = value.to(OUT).to(tl.uint8, bitcast=True)
        place = out_ptr.to(tl.pointer_type(tl.uint8)) + r[:, None] * padded + c[None, :]
        if EVEN and EVEN_ROWS:
            tl.store(place, low)
        elif EVEN:
            tl.store(place, low, mask=(r < rows)[:, None])
        else:
            kept = c < tl.where(first + block >= features, padded, first + block)
            tl.store(place, low, mask=(r < rows)[:, None] & kept[None, :])
    else:
        place = out_ptr + r[:, None] * padded + c[None, :]
        tl.store(place, value.to(OUT), mask=(r < rows)[:, None] & inside[None, :])


@triton.jit
def _pair(
    grad_0, grad_1, z_0, z_1, step_0, step_1, unit_0, unit_1, bias_ptr, gamma_ptr, beta_ptr, sums_ptr,
    row_ptr, hp_ptr, start, q, c, inside, kept, rows, features, padded, share, scale, by, shown, turn,
    NORMED: tl.constexpr, CENTERED: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_Z: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, UNITS: tl.constexpr,
    REAL: tl.constexpr, ROW: tl.constexpr, UNIT_IN_TURNED: tl.constexpr, HP: tl.constexpr,
    HP_TYPE: tl.constexpr, OUT: tl.constexpr, FMAX: tl.constexpr, ZERO: tl.constexpr, SEEN: tl.constexpr,
    COUNTS: tl.constexpr, CLAMP: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """Rows q and q + 1 of a tile: writes what is row-major, and returns what is to be turned, two values
    of float32 each, with the sums of both. So that half of a tile's elements are float32 at a time."""
    r = start + q
    grad_0, out_0, shifted_0, normal_0, along_0 = differentiated(
        grad_0, z_0, step_0, bias_ptr, gamma_ptr, beta_ptr, sums_ptr, start + q, c, inside, rows, share,
        by, unit_0 * shown, unit_0, NORMED, CENTERED, EPS, ACTIVATION, HAS_Z, BIAS, GAMMA, BETA,
        UNITS and REAL, EVEN_ROWS, EVEN, ROUNDED,
    )  # fmt: skip
    if ROW:
        _store_row(
            row_ptr, _low(grad_0, NORMED, CLAMP, FMAX), OUT, start, q, c, kept, rows, padded, EVEN_ROWS, EVEN
        )
    grad_1, out_1, shifted_1, normal_1, along_1 = differentiated(
        grad_1, z_1, step_1, bias_ptr, gamma_ptr, beta_ptr, sums_ptr, start + q + 1, c, inside, rows, share,
        by, unit_1 * shown, unit_1, NORMED, CENTERED, EPS, ACTIVATION, HAS_Z, BIAS, GAMMA, BETA,
        UNITS and REAL, EVEN_ROWS, EVEN, ROUNDED,
    )  # fmt: skip
    if ROW:
        _store_row(
            row_ptr, _low(grad_1, NORMED, CLAMP, FMAX), OUT, start + 1, q, c, kept, rows, padded,
            EVEN_ROWS, EVEN,
        )  # fmt: skip
    if HP:
        _store_hp(hp_ptr, grad_0 * (unit_0 * scale)[:, None], r, c, inside, rows, features, HP_TYPE)
        _store_hp(hp_ptr, grad_1 * (unit_1 * scale)[:, None], r + 1, c, inside, rows, features, HP_TYPE)
    highest = grad_0
    broken = along_0
    if SEEN:
        if NORMED == NO_NORM:
            highest = tl.maximum(magnitude_bits(grad_0), magnitude_bits(grad_1))
        else:  # may overlook a NaN, but its whole row is NaN, and so is `along`
            highest = tl.maximum(tl.abs(grad_0), tl.abs(grad_1))
            # Not `along - along == 0`: fused into a multiply-add that is the product's rounding error.
            finite = (tl.abs(along_0) < float("inf")) & (tl.abs(along_1) < float("inf"))
            broken = tl.where(finite, 0.0, float("nan"))
    over = grad_0
    under = grad_0
    if COUNTS:
        over = (saturates(grad_0, 1.0, FMAX) + saturates(grad_1, 1.0, FMAX)).to(tl.float32)
        under = (underflows(grad_0, 1.0, ZERO) + underflows(grad_1, 1.0, ZERO)).to(tl.float32)
    bias = grad_0
    if BIAS:
        bias = grad_0 * unit_0[:, None] + grad_1 * unit_1[:, None]
    gamma = grad_0
    beta = grad_0
    if GAMMA:
        gamma = shifted_0 * normal_0 * unit_0[:, None] + shifted_1 * normal_1 * unit_1[:, None]
    if BETA:
        beta = shifted_0 * unit_0[:, None] + shifted_1 * unit_1[:, None]
    if UNIT_IN_TURNED:
        grad_0 = grad_0 * (unit_0 * turn)[:, None]
        grad_1 = grad_1 * (unit_1 * turn)[:, None]
    return grad_0, grad_1, out_0, out_1, highest, broken, over, under, bias, gamma, beta


@triton.jit
def _row_sums(
    grad_ptr, z_ptr, steps_ptr, bias_ptr, gamma_ptr, beta_ptr, units_ptr, sums_ptr, rows, features,
    grad_stride, z_stride,
    CENTERED: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    GAMMA: tl.constexpr, BETA: tl.constexpr, UNITS: tl.constexpr, REAL: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """For norms wider than a tile: mean, 1 / std, and the two sums of backward, [4, T], a program a row."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    inside = c < features
    grad = tl.load(grad_ptr + r * grad_stride + c, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(z_ptr + r * z_stride + c, mask=inside, other=0.0)
    if ROUNDED:
        value = tl.where(inside, from_byte(value, tl.load(steps_ptr + r)), 0.0)
    value = value.to(tl.float32)
    if UNITS and REAL:
        unit = tl.load(units_ptr + r)
        grad = grad * inverse_of_power(unit)
    if BIAS:
        value += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    mean = 0.0
    if CENTERED:
        mean = tl.sum(value, axis=0) / features
        value = tl.where(inside, value - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(value * value, axis=0) / features + EPS)
    normal = value * inverse
    shifted = normal
    if GAMMA:
        gamma = tl.load(gamma_ptr + c, mask=inside, other=0.0).to(tl.float32)
        shifted = normal * gamma
    if BETA:
        shifted += tl.load(beta_ptr + c, mask=inside, other=0.0).to(tl.float32)
    _, slope = activated(shifted, ACTIVATION)
    grad = tl.where(inside, grad * slope, 0.0)
    if GAMMA:
        grad = grad * gamma
    tl.store(sums_ptr + r, mean)
    tl.store(sums_ptr + rows + r, inverse)
    tl.store(sums_ptr + 2 * rows + r, tl.sum(grad * normal, axis=0) / features)
    if CENTERED:
        tl.store(sums_ptr + 3 * rows + r, tl.sum(grad, axis=0) / features)
    else:
        tl.store(sums_ptr + 3 * rows + r, 0.0)


@triton.jit
def _low(value, NORMED: tl.constexpr, CLAMP: tl.constexpr, FMAX: tl.constexpr):
    """Ready for the cast. Behind a norm an infinity has become NaN by itself: infinity times zero."""
    if NORMED == NO_NORM:
        value = finite_or_nan(value)
    if CLAMP:  # the hardware's conversion saturates by itself, the interpreter's does not
        value = tl.where(value > FMAX, FMAX, tl.where(value < -FMAX, -FMAX, value))
    return value


@triton.jit
def _byte(value, OUT: tl.constexpr):
    return value.to(OUT).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def _half(value_0, value_1, OUT: tl.constexpr):
    """Two values of consecutive rows as the lower bytes of a word."""
    if _COMPILED:
        return tl.inline_asm_elementwise(
            _LOW_E4M3 if tl.float8e4nv == OUT else _LOW_E5M2,
            "=h,f,f", [value_0, value_1], dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _byte(value_0, OUT) | _byte(value_1, OUT) << 8


@triton.jit
def _whole(half, value_2, value_3, OUT: tl.constexpr):
    """And the two rows below them as its upper bytes."""
    if _COMPILED:
        return tl.inline_asm_elementwise(
            _HIGH_E4M3 if tl.float8e4nv == OUT else _HIGH_E5M2,
            "=r,h,f,f", [half, value_2, value_3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return half | _byte(value_2, OUT) << 16 | _byte(value_3, OUT) << 24


@triton.jit(do_not_specialize=["rows"])
def _derive(
    grad_ptr, z_ptr, steps_ptr, bias_ptr, gamma_ptr, beta_ptr, units_ptr, largest_ptr, sums_ptr,
    grad_scale_ptr, activation_scale_ptr, seen_ptr, counts_ptr, row_ptr, turned_ptr, activation_ptr, hp_ptr,
    scales_ptr, partial_ptr, rows, features, block, padded, padded_rows, grad_stride, z_stride,
    NORMED: tl.constexpr, CENTERED: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_Z: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, UNITS: tl.constexpr,
    REAL: tl.constexpr, ROW: tl.constexpr, TURNED: tl.constexpr, UNIT_IN_TURNED: tl.constexpr,
    ACTIVATED: tl.constexpr, HP: tl.constexpr, HP_TYPE: tl.constexpr, OUT: tl.constexpr, FMAX: tl.constexpr,
    ZERO: tl.constexpr, ACTIVATION_OUT: tl.constexpr, ACTIVATION_FMAX: tl.constexpr, SEEN: tl.constexpr,
    COUNTS: tl.constexpr, CLAMP: tl.constexpr, EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ROUNDED: `z_ptr` holds Z in eight bits, and `steps_ptr` their steps."""
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    v = tl.arange(0, BLOCK_R // 4)  # a word is four rows
    w = tl.program_id(0).to(tl.int64) * (BLOCK_R // 4) + v
    first = tl.program_id(1) * block
    c = first + tl.arange(0, BLOCK_C)
    inside = (c < first + block) & (c < features)
    kept = c < tl.where(first + block >= features, padded, first + block)
    share = 1.0 / tl.minimum(block, features - first).to(tl.float32)
    # All loads come first, as they lie: what is float32 waits for none, and no store holds one back.
    q = 4 * v
    z_0 = q
    z_1 = q
    z_2 = q
    z_3 = q
    if HAS_Z:
        z_0 = take(z_ptr, start, q, c, inside, rows, z_stride, EVEN_ROWS, EVEN)
        z_1 = take(z_ptr, start + 1, q, c, inside, rows, z_stride, EVEN_ROWS, EVEN)
        z_2 = take(z_ptr, start + 2, q, c, inside, rows, z_stride, EVEN_ROWS, EVEN)
        z_3 = take(z_ptr, start + 3, q, c, inside, rows, z_stride, EVEN_ROWS, EVEN)
    grad_0 = take(grad_ptr, start, q, c, inside, rows, grad_stride, EVEN_ROWS, EVEN)
    grad_1 = take(grad_ptr, start + 1, q, c, inside, rows, grad_stride, EVEN_ROWS, EVEN)
    grad_2 = take(grad_ptr, start + 2, q, c, inside, rows, grad_stride, EVEN_ROWS, EVEN)
    grad_3 = take(grad_ptr, start + 3, q, c, inside, rows, grad_stride, EVEN_ROWS, EVEN)
    step_0 = q
    step_1 = q
    step_2 = q
    step_3 = q
    if ROUNDED:
        r = start + q
        if NORMED == TILE_NORM:
            apart = tl.num_programs(1)  # a step for each block that is a tile
            place = steps_ptr + r * apart + tl.program_id(1)
        else:
            apart = 1  # and for a row
            place = steps_ptr + r
        step_0 = tl.load(place, mask=r < rows, other=0.0)
        step_1 = tl.load(place + apart, mask=r + 1 < rows, other=0.0)
        step_2 = tl.load(place + 2 * apart, mask=r + 2 < rows, other=0.0)
        step_3 = tl.load(place + 3 * apart, mask=r + 3 < rows, other=0.0)
    unit_0 = tl.full(q.shape, 1.0, tl.float32)
    unit_1 = unit_0
    unit_2 = unit_0
    unit_3 = unit_0
    top = 1.0
    if UNITS:
        r = start + q
        unit_0 = tl.load(units_ptr + r, mask=r < rows, other=0.0)
        unit_1 = tl.load(units_ptr + r + 1, mask=r + 1 < rows, other=0.0)
        unit_2 = tl.load(units_ptr + r + 2, mask=r + 2 < rows, other=0.0)
        unit_3 = tl.load(units_ptr + r + 3, mask=r + 3 < rows, other=0.0)
        top = tl.load(largest_ptr).to(tl.float32, bitcast=True)
        top = tl.where(top == 0.0, 1.0, top)
    scale = 1.0
    by = 1.0
    if ROW or TURNED:
        scale = tl.load(grad_scale_ptr)
        by = inverse_of_power(scale)
    shown = 1.0
    if ACTIVATED:
        activation_scale = tl.load(activation_scale_ptr) * top
        shown = inverse_of_power(activation_scale)
    turn = 1.0
    if UNIT_IN_TURNED:
        turn = inverse_of_power(top)
    value_0, value_1, out_0, out_1, highest_0, broken_0, over_0, under_0, bias_0, gamma_0, beta_0 = _pair(
        grad_0, grad_1, z_0, z_1, step_0, step_1, unit_0, unit_1, bias_ptr, gamma_ptr, beta_ptr, sums_ptr,
        row_ptr, hp_ptr, start, q, c, inside, kept, rows, features, padded, share, scale, by, shown, turn,
        NORMED, CENTERED, EPS, ACTIVATION, HAS_Z, BIAS, GAMMA, BETA, UNITS, REAL, ROW, UNIT_IN_TURNED, HP,
        HP_TYPE, OUT, FMAX, ZERO, SEEN, COUNTS, CLAMP, EVEN_ROWS, EVEN, ROUNDED,
    )  # fmt: skip
    if TURNED:
        low = _half(_low(value_0, NORMED, CLAMP, FMAX), _low(value_1, NORMED, CLAMP, FMAX), OUT)
    if ACTIVATED:
        low_out = _half(
            _low(out_0, NORMED, CLAMP, ACTIVATION_FMAX), _low(out_1, NORMED, CLAMP, ACTIVATION_FMAX),
            ACTIVATION_OUT,
        )  # fmt: skip
    value_2, value_3, out_2, out_3, highest_1, broken_1, over_1, under_1, bias_1, gamma_1, beta_1 = _pair(
        grad_2, grad_3, z_2, z_3, step_2, step_3, unit_2, unit_3, bias_ptr, gamma_ptr, beta_ptr, sums_ptr,
        row_ptr, hp_ptr, start + 2, q, c, inside, kept, rows, features, padded, share, scale, by, shown, turn,
        NORMED, CENTERED, EPS, ACTIVATION, HAS_Z, BIAS, GAMMA, BETA, UNITS, REAL, ROW, UNIT_IN_TURNED, HP,
        HP_TYPE, OUT, FMAX, ZERO, SEEN, COUNTS, CLAMP, EVEN_ROWS, EVEN, ROUNDED,
    )  # fmt: skip
    if TURNED:
        low = _whole(low, _low(value_2, NORMED, CLAMP, FMAX), _low(value_3, NORMED, CLAMP, FMAX), OUT)
        _store_words(turned_ptr, low, w, c, kept, padded_rows, EVEN_ROWS, EVEN)
    if ACTIVATED:
        low_out = _whole(
            low_out, _low(out_2, NORMED, CLAMP, ACTIVATION_FMAX), _low(out_3, NORMED, CLAMP, ACTIVATION_FMAX),
            ACTIVATION_OUT,
        )  # fmt: skip
        _store_words(activation_ptr, low_out, w, c, kept, padded_rows, EVEN_ROWS, EVEN)
    if ROW or TURNED:
        if SEEN:
            if NORMED == NO_NORM:
                bits = tl.max(tl.maximum(highest_0, highest_1), axis=1)
            else:
                bits = tl.max(tl.maximum(highest_0, highest_1).to(tl.int32, bitcast=True), axis=1)
                bits = tl.maximum(bits, magnitude_bits(broken_0 + broken_1))
            highest = tl.max(bits, axis=0).to(tl.float32, bitcast=True) * scale
            tl.atomic_max(seen_ptr, highest.to(tl.int32, bitcast=True), sem="relaxed")
        if COUNTS:
            over = tl.sum(tl.sum(over_0 + over_1, axis=1), axis=0).to(tl.int32)
            under = tl.sum(tl.sum(under_0 + under_1, axis=1), axis=0).to(tl.int32)
            _count(over, under, counts_ptr)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        if ROW or TURNED:
            tl.store(scales_ptr, scale * top)
        if ACTIVATED:
            tl.store(scales_ptr + 4, activation_scale)
    place = partial_ptr + tl.program_id(0).to(tl.int64) * 3 * features + c
    if BIAS:
        tl.store(place, tl.sum(bias_0 + bias_1, axis=0) * scale, mask=inside)
    if GAMMA:
        tl.store(place + features, tl.sum(gamma_0 + gamma_1, axis=0), mask=inside)
    if BETA:
        tl.store(place + 2 * features, tl.sum(beta_0 + beta_1, axis=0), mask=inside)


@triton.jit
def _store_row(
    row_ptr, value, OUT: tl.constexpr, start, q, c, kept, rows, padded,
    EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Casts anew what the words hold too: a conversion more, but no bytes to pick out of words."""
    if _COMPILED:
        byte = tl.inline_asm_elementwise(
            _FOUR_E4M3 if tl.float8e4nv == OUT else _FOUR_E5M2,
            "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        byte = value.to(OUT).to(tl.uint8, bitcast=True)
    place = row_ptr.to(tl.pointer_type(tl.uint8)) + start * padded + (q[:, None] * padded + c[None, :])
    live = q < rows - start
    if EVEN and EVEN_ROWS:
        tl.store(place, byte)
    elif EVEN:
        tl.store(place, byte, mask=live[:, None])
    else:
        tl.store(place, byte, mask=live[:, None] & kept[None, :])


@triton.jit
def _store_words(ptr, low, w, c, kept, padded_rows, EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Four rows of the tile are one word of the transposed copy; `padded_rows` is a multiple of 16."""
    place = ptr.to(tl.pointer_type(tl.int32)) + c[None, :].to(tl.int64) * (padded_rows // 4) + w[:, None]
    if EVEN and EVEN_ROWS:
        tl.store(place, low)
    elif EVEN:
        tl.store(place, low, mask=(w < padded_rows // 4)[:, None])
    else:
        tl.store(place, low, mask=(w < padded_rows // 4)[:, None] & kept[None, :])


@triton.jit
def _store_hp(hp_ptr, value, r, c, inside, rows, features, HP_TYPE: tl.constexpr):
    live = (r < rows)[:, None] & inside[None, :]
    tl.store(hp_ptr + r[:, None] * features + c[None, :], value.to(HP_TYPE), mask=live)


def produce_fused(
    z: torch.Tensor,
    epilogue: Epilogue,
    parameters: Parameters,
    *,
    scale: torch.Tensor | None,
    columns: int,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    into: Rounded | None = None,
) -> torch.Tensor:
    """Twin: core/producer.produce. One launch."""
    rows, features = z.shape
    block, wide = tile_width(epilogue, features, columns if scale is not None else features)
    width = columns if scale is not None else features
    dtype = Format.E4M3.dtype if scale is not None else z.dtype
    out = torch.empty(rows, width, dtype=dtype, device=z.device)
    high, warps = _PRODUCE_TILES.get(wide, (max(_PRODUCE_ELEMENTS // wide, 1), 4 if wide <= 4096 else 8))
    grid = (triton.cdiv(rows, high), triton.cdiv(features, block))
    with launching_on(z):
        _produce[grid](
            z,
            *(z if p is None else p for p in parameters),
            z if scale is None else scale,
            z if seen is None else seen,
            z if counts is None else counts,
            out,
            *((out, out) if into is None else into),
            rows,
            features,
            block,
            width,
            z.stride(0),
            NORMED=epilogue.norm is not Norm.NONE,
            **epilogue_constants(epilogue, parameters),
            LOW=scale is not None,
            OUT=_TYPES[dtype],
            FMAX=Format.E4M3.max,
            ZERO=Format.E4M3.smallest_subnormal / 2,
            SEEN=seen is not None,
            COUNTS=counts is not None,
            CLAMP=INTERPRETED,
            EVEN_ROWS=rows % high == 0,
            EVEN=block == wide and features % block == 0,
            ROUNDED=into is not None,
            BLOCK_R=high,
            BLOCK_C=wide,
            num_warps=warps,
        )
    return out


def derive_fused(
    grad: torch.Tensor,
    z: torch.Tensor | Rounded | None,
    epilogue: Epilogue,
    parameters: Parameters,
    *,
    sides: tuple[int, int],
    units: torch.Tensor | None = None,
    largest: torch.Tensor | None = None,
    real: bool = False,
    grad_scale: torch.Tensor | None = None,
    format: Format = Format.E4M3,
    row: bool = False,
    turned: bool = False,
    unit_in_turned: bool = False,
    activation_scale: torch.Tensor | None = None,
    hp: bool = False,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Derived:
    """Twin: core/producer.derive. One launch; two for a norm over more than 512 features; one more
    where the linear layer has a bias or the norm gamma or beta."""
    rows, features = grad.shape
    columns, padded_rows = sides
    low = grad_scale is not None
    constants = epilogue_constants(epilogue, parameters)
    normed = NO_NORM
    block, wide = tile_width(epilogue, features, columns)
    if epilogue.norm is not Norm.NONE:
        normed = TILE_NORM if block <= WIDEST_BLOCK else SUMMED_NORM
    with launching_on(grad):
        sums, steps = grad, None
        if isinstance(z, Rounded):
            assert normed != NO_NORM, "without a norm backward starts from Z"
            z, steps = z
        if normed == SUMMED_NORM:
            assert z is not None
            sums = torch.empty(4, rows, dtype=torch.float32, device=grad.device)
            assert block >= features, "blocks wider than a tile are refused (kernels/producer.unsupported)"
            _row_sums[(rows,)](
                grad,
                z,
                grad if steps is None else steps,
                *(grad if p is None else p for p in parameters),
                grad if units is None else units,
                sums,
                rows,
                features,
                grad.stride(0),
                z.stride(0),
                **constants,
                UNITS=units is not None,
                REAL=real,
                ROUNDED=steps is not None,
                BLOCK_C=max(triton.next_power_of_2(features), 16),
                num_warps=4 if features <= 4096 else 8,
            )
        if normed != TILE_NORM:
            block, wide = PLAIN_WIDTH, PLAIN_WIDTH
        high, warps = _DERIVE_TILES.get(wide, (max(_DERIVE_ELEMENTS // wide, 4), 8))
        # What needs no more values at a time than fit the registers of the denser launch.
        lean = warps == 8 and not (INTERPRETED or hp or any(p is not None for p in parameters))
        lean = lean and epilogue.activation is not Activation.GELU
        tiles = triton.cdiv(padded_rows if turned or activation_scale is not None else rows, high)

        def fp8(wanted: bool, *shape: int, kind: Format = format) -> torch.Tensor | None:
            return torch.empty(*shape, dtype=kind.dtype, device=grad.device) if wanted else None

        low_row = fp8(low and row, rows, columns)
        low_turned = fp8(low and turned, *sides)
        low_activation = fp8(activation_scale is not None, *sides, kind=Format.E4M3)
        real_grad = torch.empty(rows, features, dtype=grad.dtype, device=grad.device) if hp else None
        scales = torch.empty(8, dtype=torch.float32, device=grad.device)
        sums_wanted = any(p is not None for p in parameters)
        partial = (
            torch.empty(tiles, 3, features, dtype=torch.float32, device=grad.device)
            if sums_wanted
            else scales
        )
        _derive[(tiles, triton.cdiv(features, block))](
            grad,
            grad if z is None else z,
            grad if steps is None else steps,
            *(grad if p is None else p for p in parameters),
            *(grad if t is None else t for t in (units, largest)),
            sums,
            *(grad if t is None else t for t in (grad_scale, activation_scale, seen, counts)),
            *(grad if t is None else t for t in (low_row, low_turned, low_activation, real_grad)),
            scales,
            partial,
            rows,
            features,
            block,
            columns,
            padded_rows,
            grad.stride(0),
            0 if z is None else z.stride(0),
            NORMED=normed.value,
            **constants,
            HAS_Z=z is not None,
            UNITS=units is not None,
            REAL=real,
            ROW=low_row is not None,
            TURNED=low_turned is not None,
            UNIT_IN_TURNED=unit_in_turned,
            ACTIVATED=low_activation is not None,
            HP=hp,
            HP_TYPE=_TYPES[grad.dtype],
            OUT=TRITON_TYPES[format.dtype],
            FMAX=format.max,
            ZERO=format.smallest_subnormal / 2,
            ACTIVATION_OUT=tl.float8e4nv,
            ACTIVATION_FMAX=Format.E4M3.max,
            SEEN=seen is not None,
            COUNTS=counts is not None,
            CLAMP=INTERPRETED,
            EVEN_ROWS=rows % high == 0,
            EVEN=block == wide and features % block == 0,
            ROUNDED=steps is not None,
            BLOCK_R=high,
            BLOCK_C=wide,
            num_warps=warps,
            maxnreg=_DERIVE_REGISTERS if lean else None,
        )
    totals = partial.sum(0) if sums_wanted else None
    bias, gamma, beta = (None if p is None or totals is None else totals[i] for i, p in enumerate(parameters))
    turned_scale = None
    if low_turned is not None and grad_scale is not None:
        turned_scale = scales[:1].view(1, 1) if unit_in_turned else grad_scale.view(1, 1)
    return Derived(
        row=low_row,
        turned=low_turned,
        turned_scale=turned_scale,
        activation=low_activation,
        activation_scale=None if low_activation is None else scales[4:5].view(1, 1),
        hp=real_grad,
        bias=bias,
        gamma=gamma,
        beta=beta,
    )


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, **TRITON_TYPES}
_PRODUCE_ELEMENTS = 4096
_PRODUCE_TILES: dict[int, tuple[int, int]] = {256: (8, 4)}  # rows and warps by features of a tile
_DERIVE_ELEMENTS = 8192
_DERIVE_TILES: dict[int, tuple[int, int]] = {}
_DERIVE_REGISTERS: int | None = 80  # three programs of 256 threads share a multiprocessor
