"""Device functions that generated kernels call (rows.py, tall.py)."""

import triton
import triton.language as tl

from loka.kernels.edge.program import GROUP
from loka.kernels.edge.twin import SCALE_CARRY, SCALE_EXPONENT, SCALE_LEAST
from loka.kernels.quantize.triton.cast_kernels import scale_of
from loka.kernels.triton.pack import INTERPRETED, integer, inverse_of_power, magnitude_bits

_CARRY, _EXPONENT, _LEAST = (tl.constexpr(b) for b in (SCALE_CARRY, SCALE_EXPONENT, SCALE_LEAST))
_TINY = tl.constexpr(2.0**-126)
_COMPILED = tl.constexpr(not INTERPRETED)
_GROUP = tl.constexpr(GROUP)
# Casts and conversions, written out for the hardware; the interpreter takes the plain paths. Four columns to
# the bytes of a word; two rows to its lower half; two more rows on top of them; two bfloat16 to float32.
_FOUR = tl.constexpr(
    "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high};}"
)
_LOW = tl.constexpr("cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;")
_HIGH = tl.constexpr("{.reg .b16 high; cvt.rn.satfinite.e4m3x2.f32 high, $3, $2; mov.b32 $0, {$1, high};}")
_WIDEN = tl.constexpr(
    "{.reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xffff0000; mov.b32 $0, low; mov.b32 $1, high;}"
)
_INTEGERS = tl.constexpr(
    "{.reg .b32 a, b, c, d; add.rn.f32 a, $1, 0f4B400000; add.rn.f32 b, $2, 0f4B400000; "
    "add.rn.f32 c, $3, 0f4B400000; add.rn.f32 d, $4, 0f4B400000; prmt.b32 a, a, b, 0x0040; "
    "prmt.b32 c, c, d, 0x0040; prmt.b32 $0, a, c, 0x5410;}"
)
_FOUR_ROWS = tl.constexpr(
    "{.reg .b32 a, b, c, d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; "
    "prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362; "
    "prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; "
    "prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632;}"
)
_ABOVE = tl.constexpr(" ".join(f"prmt.b32 ${byte}, $4, 0x47000000, 0x75{byte}4;" for byte in range(4)))
_HELD = tl.constexpr("fma.rn.sat.f32 $0, $1, 0f3E2AAAAB, 0f3F000000;")
_EXP2, _INVERSE = tl.constexpr("ex2.approx.ftz.f32 $0, $1;"), tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def widened(value):
    """To float32. Triton spells bfloat16 longer."""
    if _COMPILED and value.dtype == tl.bfloat16:
        value = tl.inline_asm_elementwise(_WIDEN, "=f,=f,r", [value], dtype=tl.float32, is_pure=True, pack=2)
    return value.to(tl.float32)


@triton.jit
def e4m3_number(byte):
    if _COMPILED:
        number = byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        size = byte.to(tl.int32) & 0x7F
        number = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
        number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, number)
        number = tl.where(size == 0x7F, float("nan"), number)
        number = tl.where(byte.to(tl.int32) > 0x7F, -number, number)
    return number


@triton.jit
def e5m2_number(byte):
    """The upper byte of a float16."""
    return (byte.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def byte_number(byte, LESS: tl.constexpr):
    """0 to 255, less a number that 2^15 + byte has room for, by no conversion, which runs at a quarter of the rate:
    bits 8 to 15 of 2^15 + byte."""
    if _COMPILED:
        above = tl.inline_asm_elementwise(_ABOVE, "=f,=f,=f,=f,r", [byte], dtype=tl.float32, is_pure=True, pack=4)
    else:
        above = (byte.to(tl.int32) << 8 | 0x47000000).to(tl.float32, bitcast=True)
    return above - (32768.0 + LESS)


@triton.jit
def maximum_of(a, b):
    """NaN where either is, as PyTorch has it."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum_of(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu_of(x):
    return maximum_of(x, 0.0)


@triton.jit
def exp2_of(x):
    """What is no normal number counts as zero: the hardware's own way is a third of the instructions."""
    if _COMPILED:
        power = tl.inline_asm_elementwise(_EXP2, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def exp_of(x):
    return exp2_of(x * 1.4426950408889634)


@triton.jit
def inverse_of(x):
    """1 / x; numbers that are not normal count as zeros."""
    if _COMPILED:
        inverse = tl.inline_asm_elementwise(_INVERSE, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit
def sigmoid_of(x):
    return inverse_of(1.0 + exp2_of(x * -1.4426950408889634))


@triton.jit
def tanh_of(x):
    """By the exponential where that loses no digits, else by Cephes' polynomial."""
    size = tl.abs(x)
    far = 1.0 - 2.0 * inverse_of(1.0 + exp2_of(size * 2.8853900817779268))
    square = x * x
    near = -5.70498872745e-3 * square + 2.06390887954e-2
    near = near * square - 5.37397155531e-2
    near = near * square + 1.33314422036e-1
    near = near * square - 3.33332819422e-1
    near = near * square * x + x
    return tl.where(size < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def erf_of(x):
    """x P(x^2) / Q(x^2), as Eigen has it: half the instructions of the usual polynomials for two ranges."""
    x = minimum_of(maximum_of(x, -4.0), 4.0)
    square = x * x
    above = -2.72614225801306e-10 * square + 2.77068142495902e-08
    above = above * square - 2.10102402082508e-06
    above = above * square - 5.69250639462346e-05
    above = above * square - 7.34990630326855e-04
    above = above * square - 2.95459980854025e-03
    above = above * square - 1.60960333262415e-02
    below = -1.45660718464996e-05 * square - 2.13374055278905e-04
    below = below * square - 1.68282697438203e-03
    below = below * square - 7.37332916720468e-03
    below = below * square - 1.42647390514189e-02
    return x * above * inverse_of(below)


@triton.jit
def hardswish_of(x):
    """x times x / 6 + 1/2 held between 0 and 1, which the hardware does in the same operation. It holds NaN at 0, but
    x is NaN then."""
    if _COMPILED:
        held = tl.inline_asm_elementwise(_HELD, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        held = minimum_of(maximum_of(x * 0.16666666666666666 + 0.5, 0.0), 1.0)
    return x * held


@triton.jit
def normal_cdf_of(x):
    """The normal distribution, to 3e-7 (Abramowitz and Stegun 7.1.26, in float32). Of x^2 it has the exponential that
    its density has, so that a gradient of GELU computes one for both."""
    t = inverse_of(1.0 + 0.23164188827 * tl.abs(x))
    tail = 0.5307027145 * t - 0.7265760135
    tail = tail * t + 0.7107068705
    tail = tail * t - 0.142248368
    tail = tail * t + 0.127414796
    tail = tail * t * exp_of(x * x * -0.5)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def top_of(tops_ptr, count):
    """The maximum of `count` non-negative numbers, NaN if one is; 1 of none. Whole tiles go without a mask, in wide
    loads: every program of a grid reads all of them."""
    at = tl.arange(0, 1024)
    most = tl.zeros([1024], tl.int32)
    whole = count // 1024 * 1024
    for first in range(0, whole, 1024):
        most = tl.maximum(most, magnitude_bits(tl.load(tops_ptr + first + at)))
    most = tl.maximum(most, magnitude_bits(tl.load(tops_ptr + whole + at, mask=whole + at < count, other=0.0)))
    return tl.where(count > 0, tl.max(most, axis=0).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def scale_above(bits):
    """edge/twin.scale_above, of the bits of magnitudes, and its inverse."""
    scale = tl.maximum(((bits + _CARRY) & 0x7F800000) - _EXPONENT, _LEAST)
    finite = bits < 0x7F800000
    inverse = tl.where(finite, 0x7F000000 - scale, 0x7FC00000)
    return tl.where(finite, scale, 0x7FC00000).to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def step_above(bits):
    """edge/twin.quantized_by_rows' steps, of the bits of magnitudes."""
    return tl.where(bits < 0x7F800000, scale_of(bits, 127.0, _TINY, False), float("nan"))


@triton.jit
def as_integers(value):
    """Every value as a byte of INT8, the lowest of 1.5 * 2^23 + value: by a row's own step none is beyond
    127.5. Of NaN any byte, under a step that is NaN."""
    if _COMPILED:
        byte = tl.inline_asm_elementwise(
            _INTEGERS, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        byte = integer(value).to(tl.uint8)
    return byte


@triton.jit
def _byte(value):
    """The hardware's conversion in integers, to the last bit: the interpreter's own truncates."""
    size = tl.minimum(tl.abs(value), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    low = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    integer = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
    low = tl.where(size < 0.015625, integer, low)
    low = tl.where(value != value, 0x7F, low)
    return low | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def as_bytes(value):
    """Every value as a byte of FP8. Casts anew what words of the transposed copy hold too: a conversion more,
    but no bytes to pick out of words."""
    if _COMPILED:
        byte = tl.inline_asm_elementwise(
            _FOUR, "=r,f,f,f,f", [value], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        byte = _byte(value).to(tl.uint8)
    return byte


@triton.jit
def half(value_0, value_1):
    """Two values of consecutive rows as the lower bytes of a word."""
    if _COMPILED:
        low = tl.inline_asm_elementwise(_LOW, "=h,f,f", [value_0, value_1], dtype=tl.int16, is_pure=True, pack=1)
    else:
        low = _byte(value_0) | _byte(value_1) << 8
    return low


@triton.jit
def whole(low, value_2, value_3):
    """And the two rows below them as its upper bytes."""
    if _COMPILED:
        word = tl.inline_asm_elementwise(
            _HIGH, "=r,h,f,f", [low, value_2, value_3], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = low | _byte(value_2) << 16 | _byte(value_3) << 24
    return word


@triton.jit
def four_rows(row_0, row_1, row_2, row_3):
    """Bytes of four rows as words, one for each column, the first row lowest."""
    if _COMPILED:
        word = tl.inline_asm_elementwise(
            _FOUR_ROWS, "=r,=r,=r,=r,r,r,r,r", [row_0, row_1, row_2, row_3], dtype=tl.int32, is_pure=True, pack=4
        )
    else:
        word = row_0.to(tl.int32) | row_1.to(tl.int32) << 8 | row_2.to(tl.int32) << 16 | row_3.to(tl.int32) << 24
    return word


@triton.jit
def _added(a, b, c, d):
    return a + c, b + d


@triton.jit
def sums_of(a, b, AXIS: tl.constexpr):
    """Of two tiles at once. The interpreter takes any reduction but its own element by element."""
    if _COMPILED:
        sum_a, sum_b = tl.reduce((a, b), AXIS, _added)
    else:
        sum_a, sum_b = tl.sum(a, axis=AXIS), tl.sum(b, axis=AXIS)
    return sum_a, sum_b


@triton.jit
def row_max_of(value, axis: tl.constexpr):
    """NaN where one is, which the hardware's maxima would pass over."""
    most = tl.max(value, axis=axis)
    return tl.where(tl.max((value != value).to(tl.int32), axis=axis) != 0, float("nan"), most)


@triton.jit
def narrowed(value, DTYPE: tl.constexpr):
    """From float32, to the nearest even: the interpreter truncates."""
    if _COMPILED or tl.bfloat16 != DTYPE:
        narrow = value.to(DTYPE)
    else:
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(value != value, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        narrow = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return narrow


@triton.jit
def transposed(
    from_ptr, to_ptr, start, first, rows, padded_rows,
    COLUMNS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """HIGH rows from `start` on of a matrix of bytes, WIDE of its COLUMNS from `first` on, into its transpose of
    `padded_rows` columns. Rows from `rows` on count as zeros."""
    w = tl.arange(0, HIGH // 4)
    c = first + tl.arange(0, WIDE)
    kept = (c < COLUMNS)[None, :]
    left = (rows - start).to(tl.int32) - 4 * w
    at = from_ptr + start * COLUMNS + (w[:, None] * (4 * COLUMNS) + c[None, :])
    row_0 = tl.load(at, mask=(left > 0)[:, None] & kept, other=0)
    row_1 = tl.load(at + COLUMNS, mask=(left > 1)[:, None] & kept, other=0)
    row_2 = tl.load(at + 2 * COLUMNS, mask=(left > 2)[:, None] & kept, other=0)
    row_3 = tl.load(at + 3 * COLUMNS, mask=(left > 3)[:, None] & kept, other=0)
    along, high = padded_rows // 4, start // 4
    to = to_ptr + high + (c[None, :].to(tl.int64) * along + w[:, None])
    tl.store(to, four_rows(row_0, row_1, row_2, row_3), mask=(high + w < along)[:, None] & kept)


@triton.jit
def numbers_of(scale_ptr, row, rows, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Each row's COUNT numbers, and zeros up to WIDE, a power of two."""
    b = tl.arange(0, WIDE)
    there = (row < rows)[:, None] & (b < COUNT)[None, :]
    return tl.load(scale_ptr + (row[:, None] * COUNT + b[None, :]), mask=there, other=0.0)


@triton.jit
def largest_of(numbers):
    """Of each row's the largest, NaN if one is."""
    return tl.max(magnitude_bits(numbers), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def store_tops(r_ptr, scale_ptr, tops_ptr, group, rows, SCALES: tl.constexpr, WIDE: tl.constexpr):
    """The maximum of r times the input's scale over the rows of a group. SCALES: RowLaunch.scales."""
    row = group.to(tl.int64) * _GROUP + tl.arange(0, _GROUP)
    product = tl.load(r_ptr + row, mask=row < rows, other=0.0)
    if SCALES == 0:
        product *= tl.load(scale_ptr)
    elif SCALES is not None:
        product *= largest_of(numbers_of(scale_ptr, row, rows, SCALES, WIDE))
    most = tl.max(tl.where(row < rows, magnitude_bits(product), 0), axis=0)
    tl.store(tops_ptr + group, most.to(tl.float32, bitcast=True))


@triton.jit
def finish_sums(part_ptr, sum_ptr, first, parts, FEATURES: tl.constexpr, WIDE: tl.constexpr):
    """Sums over the first side of `parts` [parts, FEATURES], of WIDE columns from `first` on."""
    c = first + tl.arange(0, WIDE)
    p = tl.arange(0, 512)
    total = tl.zeros([512, WIDE], tl.float32)
    for begin in range(0, parts, 512):
        at = part_ptr + (begin + p)[:, None] * FEATURES + c[None, :]
        total += tl.load(at, mask=(begin + p < parts)[:, None] & (c < FEATURES)[None, :], other=0.0)
    tl.store(sum_ptr + c, tl.sum(total, axis=0), mask=c < FEATURES)


DEVICE_FUNCTIONS = (
    widened, e4m3_number, e5m2_number, byte_number, maximum_of, minimum_of, relu_of, exp_of,
    inverse_of, sigmoid_of, tanh_of, erf_of, hardswish_of, normal_cdf_of, top_of, scale_above, step_above,
    as_bytes, as_integers, half, whole, four_rows, sums_of, row_max_of, narrowed, transposed, numbers_of,
    largest_of, store_tops, finish_sums, magnitude_bits, inverse_of_power,
)  # fmt: skip
NAMES = {"triton": triton, "tl": tl, **{function.__name__: function for function in DEVICE_FUNCTIONS}}
"""What a generated kernel's text refers to."""
