"""Z in eight bits, as forward keeps it for backward. Twin: `Rounded` in kernels/gemm/epilogue.py.

    byte = ceil(z / s) + 127           z ~ s (byte - 127.5)

Nothing is converted, for conversions run at a quarter of the rate of additions: 256 z / s - 1 added to
1.5 * 2^23 is an integer, whose second byte is a floor.
"""

import triton
import triton.language as tl

from loka.kernels.gemm.epilogue import ROUNDED_LARGEST, ROUNDED_PARTS, STEP_CARRY, STEP_EXPONENT, STEP_LEAST
from loka.kernels.triton.pack import INTERPRETED

_STEP_CARRY, _STEP_EXPONENT, _STEP_LEAST = (tl.constexpr(bits) for bits in (STEP_CARRY, STEP_EXPONENT, STEP_LEAST))
_LARGEST, _PARTS = tl.constexpr(ROUNDED_LARGEST), tl.constexpr(float(ROUNDED_PARTS))
_INTEGERS = tl.constexpr(1.5 * 2.0**23 + 128 * ROUNDED_PARTS - 1)
_COMPILED = tl.constexpr(not INTERPRETED)
# The second bytes of two registers in one.
_NARROW = tl.constexpr("{.reg .b32 both; prmt.b32 both, $1, $2, 0x0051; cvt.u16.u32 $0, both;}")


@triton.jit
def step_of(largest):
    """The step for rows whose largest magnitude is `largest` float32; NaN where that is not finite."""
    bits = largest.to(tl.int32, bitcast=True)
    power = tl.maximum(((bits + _STEP_CARRY) & 0x7F800000) - _STEP_EXPONENT, _STEP_LEAST)
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
