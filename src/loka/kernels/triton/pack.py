"""What Triton kernels that write FP8 share: magnitudes as bits, casts, four values in a word, tile
stores, powers.

    word = byte(v0) | byte(v1) << 8 | byte(v2) << 16 | byte(v3) << 24

v0..v3 belong to four consecutive rows: a transposed copy then stores whole words.
"""

import os

import torch
import triton
import triton.language as tl

from loka.core.assembler import keep_constants

keep_constants()  # before any kernel of ours is compiled

TRITON_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5, torch.int8: tl.int8}
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"  # as triton reads it, at import
_COMPILED = tl.constexpr(not INTERPRETED)
# Casts, written out for the hardware; the interpreter takes the plain paths.
# Four values to the bytes of a word; two to its lower half; two more on top of them.
_FOUR = (
    "{{.reg .b16 low, high; cvt.rn.satfinite.{0} low, $2, $1; "
    "cvt.rn.satfinite.{0} high, $4, $3; mov.b32 $0, {{low, high}};}}"
)
_LOW = "cvt.rn.satfinite.{0} $0, $2, $1;"
_HIGH = "{{.reg .b16 high; cvt.rn.satfinite.{0} high, $3, $2; mov.b32 $0, {{$1, high}};}}"
CVT = {torch.float8_e4m3fn: _FOUR.format("e4m3x2.f32"), torch.float8_e5m2: _FOUR.format("e5m2x2.f32")}
_LOW_E4M3, _HIGH_E4M3, _LOW_E5M2, _HIGH_E5M2 = (
    tl.constexpr(asm.format(kind)) for kind in ("e4m3x2.f32", "e5m2x2.f32") for asm in (_LOW, _HIGH)
)


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
    has two uses (tests/kernels/quantize/test_triton_quantize.py). Empty: Triton's casts, for its interpreter.
    """
    if CVT != "":
        packed = tl.inline_asm_elementwise(
            CVT, "=r,f,f,f,f", [value_0, value_1, value_2, value_3], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        packed = byte(value_0, OUT) | byte(value_1, OUT) << 8
        packed |= byte(value_2, OUT) << 16
        packed |= byte(value_3, OUT) << 24
    return packed


@triton.jit
def byte(value, OUT: tl.constexpr):
    """A value of OUT as the lowest byte of an int32: FP8 by Triton's own cast, for its interpreter."""
    if tl.int8 == OUT:
        found = integer(value) & 0xFF
    else:
        found = value.to(OUT).to(tl.uint8, bitcast=True).to(tl.int32)
    return found


@triton.jit
def integer(value):
    """The nearest integer of |value| <= 2^21 as int32, halves to even, 0 of NaN: the lowest bits of
    1.5 * 2^23 + value. A conversion runs at half the rate."""
    value = tl.where(value == value, value, 0.0)
    return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def half(value_0, value_1, OUT: tl.constexpr):
    """Two values of consecutive rows as the lower bytes of a word."""
    if _COMPILED:
        return tl.inline_asm_elementwise(
            _LOW_E4M3 if tl.float8e4nv == OUT else _LOW_E5M2,
            "=h,f,f", [value_0, value_1], dtype=tl.int16, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return byte(value_0, OUT) | byte(value_1, OUT) << 8


@triton.jit
def whole(low, value_2, value_3, OUT: tl.constexpr):
    """And the two rows below those of the `half` as its upper bytes."""
    if _COMPILED:
        return tl.inline_asm_elementwise(
            _HIGH_E4M3 if tl.float8e4nv == OUT else _HIGH_E5M2,
            "=r,h,f,f", [low, value_2, value_3], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return low | byte(value_2, OUT) << 16 | byte(value_3, OUT) << 24


@triton.jit
def store_row(out_ptr, packed, SHIFT: tl.constexpr, r, c, padded_rows, padded_columns):
    """One byte of every word into row r of a row-major copy."""
    written = (r < padded_rows)[:, None] & (c < padded_columns)[None, :]
    low = ((packed >> SHIFT) & 0xFF).to(tl.uint8)
    tl.store(out_ptr + r[:, None] * padded_columns + c[None, :], low, mask=written)


@triton.jit
def store_transposed(out_ptr, low, r, c, padded_rows, padded_columns):
    """A tile [r, c] into a transposed copy [c, r]; `low` and the sizes in bytes or in words alike."""
    written = (r < padded_columns)[:, None] & (c < padded_rows)[None, :]
    tl.store(out_ptr + c[None, :] * padded_columns + r[:, None], low, mask=written)


@triton.jit
def inverse_of_power(power):
    """1 / power for powers of two, exactly and without a division; 0 for 0, NaN for what is not finite."""
    bits = power.to(tl.int32, bitcast=True)
    turned = tl.where(bits == 0, 0, tl.where(bits >= 0x7F800000, 0x7FC00000, 0x7F000000 - bits))
    return turned.to(tl.float32, bitcast=True)
