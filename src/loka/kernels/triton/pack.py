"""What Triton kernels that write FP8 share: magnitudes as bits, four values in a word, tile stores, powers.

    word = byte(v0) | byte(v1) << 8 | byte(v2) << 16 | byte(v3) << 24

v0..v3 belong to four consecutive rows: a transposed copy then stores whole words.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

TRITON_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_PACK = (
    "{{.reg .b16 low, high; cvt.rn.satfinite.{0} low, $2, $1; "
    "cvt.rn.satfinite.{0} high, $4, $3; mov.b32 $0, {{low, high}};}}"
)
CVT = {
    torch.float8_e4m3fn: _PACK.format("e4m3x2.f32"),
    torch.float8_e5m2: _PACK.format("e5m2x2.f32"),
}
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # as triton reads it, at import


@triton.jit
def magnitude_bits(value):
    # Non-negative floats order like their bits, and NaN lies above infinity: an integer
    # maximum needs no NaN handling and never loses one.
    return tl.abs(value).to(tl.int32, bitcast=True)


@triton.jit
def word(value_0, value_1, value_2, value_3, OUT: tl.constexpr, CVT: tl.constexpr):
    """Four values of consecutive rows as bytes of one int32, the first lowest.

    CVT is the conversion written out for the hardware. Through Triton's own casts the bytes are
    single registers that get shifted and merged, and triton 3.6 merges wrong bytes where a cast
    has two uses (tests/kernels/test_triton_quantize.py). Empty: Triton's casts, for its interpreter.
    """
    if CVT != "":
        packed = tl.inline_asm_elementwise(
            CVT,
            "=r,f,f,f,f",
            [value_0, value_1, value_2, value_3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        packed = value_0.to(OUT).to(tl.uint8, bitcast=True).to(tl.int32)
        packed |= value_1.to(OUT).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        packed |= value_2.to(OUT).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        packed |= value_3.to(OUT).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    return packed


@triton.jit
def store_row(out_ptr, packed, SHIFT: tl.constexpr, r, c, padded_rows, padded_columns):
    """One byte of every word into row r of a row-major copy."""
    written = (r < padded_rows)[:, None] & (c < padded_columns)[None, :]
    low = ((packed >> SHIFT) & 0xFF).to(tl.uint8)
    tl.store(out_ptr + r[:, None] * padded_columns + c[None, :], low, mask=written)


@triton.jit
def store_turned(out_ptr, low, r, c, padded_rows, padded_columns):
    """A tile [r, c] into a transposed copy [c, r]; `low` and the sizes in bytes or in words alike."""
    written = (r < padded_columns)[:, None] & (c < padded_rows)[None, :]
    tl.store(out_ptr + c[None, :] * padded_columns + r[:, None], low, mask=written)


@triton.jit
def inverse_of_power(power):
    """1 / power for powers of two, exactly and without a division; 0 for 0, NaN for what is not finite."""
    bits = power.to(tl.int32, bitcast=True)
    turned = tl.where(bits == 0, 0, tl.where(bits >= 0x7F800000, 0x7FC00000, 0x7F000000 - bits))
    return turned.to(tl.float32, bitcast=True)


@triton.jit
def saturates(value, inverse, FMAX: tl.constexpr):
    return (tl.abs(value * inverse) > FMAX).to(tl.int32)


@triton.jit
def underflows(value, inverse, ZERO: tl.constexpr):
    scaled = tl.abs(value * inverse)
    return ((scaled > 0.0) & (scaled <= ZERO)).to(tl.int32)


@triton.jit
def power_above(bits, largest, margin, LIMIT: tl.constexpr):
    """The bits of the least power of two that times a format's `largest` is not below a magnitude, given
    as bits too, with `margin` octaves to spare. Twin: core/current.scale_for."""
    exponent = (bits >> 23) - (largest >> 23) + margin
    exponent += ((bits & 0x7FFFFF) > (largest & 0x7FFFFF)).to(tl.int32)
    return (tl.minimum(tl.maximum(exponent, -LIMIT), LIMIT) + 127) << 23
