"""Z in eight bits, as forward keeps it for backward. Twin: core/epilogue.Rounded.

    byte = ceil(z / s) + 127           z ~ s (byte - 127.5)

Neither way converts anything, for conversions run at a quarter of the rate of additions. 256 z / s - 1 added
to 1.5 * 2^23 is an integer, whose second byte is a floor. And 2^23 + 256 byte + 128 is a float32 whose bytes
are put together; less 2^23 + 2^15 it is 256 times what was meant.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loka.kernels.gemm.epilogue import ROUNDED_LARGEST, ROUNDED_PARTS, STEP_CARRY, STEP_EXPONENT, STEP_LEAST
from loka.kernels.triton.pack import INTERPRETED

_CARRY, _EXPONENT, _LEAST = (tl.constexpr(bits) for bits in (STEP_CARRY, STEP_EXPONENT, STEP_LEAST))
_LARGEST, _PARTS = tl.constexpr(ROUNDED_LARGEST), tl.constexpr(float(ROUNDED_PARTS))
_INTEGERS = tl.constexpr(1.5 * 2.0**23 + 128 * ROUNDED_PARTS - 1)
_BASE = tl.constexpr(2.0**23 + 128.0)
_MIDDLE = tl.constexpr(2.0**23 + 128.0 * ROUNDED_PARTS)
_COMPILED = tl.constexpr(not INTERPRETED)
# Four bytes of one register, each between those of 0x4B000080, which is _BASE.
_WIDEN = tl.constexpr(
    "prmt.b32 $0, $4, 0x4B000080, 0x7504; prmt.b32 $1, $4, 0x4B000080, 0x7514; "
    "prmt.b32 $2, $4, 0x4B000080, 0x7524; prmt.b32 $3, $4, 0x4B000080, 0x7534;"
)
# The second bytes of two registers in one.
_NARROW = tl.constexpr("{.reg .b32 both; prmt.b32 both, $1, $2, 0x0051; cvt.u16.u32 $0, both;}")


@triton.jit
def step_of(largest):
    """The step for rows whose largest magnitude is `largest` float32; NaN where that is not finite."""
    bits = largest.to(tl.int32, bitcast=True)
    power = tl.maximum(((bits + _CARRY) & 0x7F800000) - _EXPONENT, _LEAST)
    step = tl.where(bits == 0, 0, power).to(tl.float32, bitcast=True)
    return tl.where(largest < _LARGEST, step, float("nan"))


@triton.jit
def to_byte(value, inverse):
    """Of values whose step is 1 / `inverse`. What is not finite becomes any byte; its step is NaN."""
    parts = value * (inverse * _PARTS) + _INTEGERS
    if _COMPILED:
        byte = tl.inline_asm_elementwise(_NARROW, "=h,f,f", [parts], dtype=tl.uint8, is_pure=True, pack=2)
    else:
        byte = (parts.to(tl.int32, bitcast=True) >> 8).to(tl.uint8)
    return byte


@triton.jit
def from_byte(byte, step):
    """Exact where the step is a power of two: both products and their difference are."""
    if _COMPILED:
        wide = tl.inline_asm_elementwise(
            _WIDEN, "=f,=f,=f,=f,r", [byte], dtype=tl.float32, is_pure=True, pack=4
        )
    else:
        wide = byte.to(tl.float32) * _PARTS + _BASE
    part = step * (1.0 / _PARTS)
    return wide * part - _MIDDLE * part
