"""DCN-V2's cross layers on the GPU: everything between the GEMMs, one pass each.

    produce    u, x_0, x -> x_0 (u + b) + x, in high precision and in FP8 twice      6 + 4 bytes an element
    derive     g, t', x_0 -> g + r t', and du' = g x_0 / r in FP8 twice              6 + 4
    gather     g and u of all layers, t' -> dx_0, dx                                 4 a layer + 2 + 2 or 4

Twin: core/cross.py. Legend: T rows, N features, r the units of rows, t' what a layer's last GEMM gives.
Produce and derive hold a tile as four tiles of every fourth row, so that four rows become one word of
the transposed copy (triton/pack.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from loka.core.cross import Crossed, CrossGrad
from loka.core.recipe import Format
from loka.kernels.triton.pack import (
    CVT,
    INTERPRETED,
    TRITON_TYPES,
    inverse_of_power,
    magnitude_bits,
    saturates,
    underflows,
    word,
)

_HIGH, _WIDE, _WARPS = 32, 128, 4  # a tile; 128 divides MLPerf's 3456 features, 256 does not
_GATHER_HIGH, _GATHER_WIDE, _GATHER_WARPS = 16, 128, 8  # eight elements a thread and no barrier
_MOST_LAYERS = 4  # whose g and u one launch of gather reads


@triton.jit
def _take(ptr, r, c, rows, features, stride, EVEN: tl.constexpr):
    """Some rows of a tile as float32; zeros outside. No masks where nothing lies outside: a mask that
    the compiler cannot follow makes it load and store single elements."""
    place = ptr + r[:, None] * stride + c[None, :]
    if EVEN:
        value = tl.load(place)
    else:
        value = tl.load(place, mask=(r < rows)[:, None] & (c < features)[None, :], other=0.0)
    return value.to(tl.float32)


@triton.jit
def _put(ptr, value, r, c, rows, width, EVEN: tl.constexpr):
    """Some rows of a tile into a contiguous [rows, width]."""
    place = ptr + r[:, None] * width + c[None, :]
    if EVEN:
        tl.store(place, value)
    else:
        tl.store(place, value, mask=(r < rows)[:, None] & (c < width)[None, :])


@triton.jit
def _put_row(ptr, scaled, r, c, rows, padded, OUT: tl.constexpr, EVEN: tl.constexpr):
    """Casts anew what the words hold too: a conversion more, but no bytes to pick out of words."""
    low = scaled.to(OUT).to(tl.uint8, bitcast=True)
    _put(ptr.to(tl.pointer_type(tl.uint8)), low, r, c, rows, padded, EVEN)


@triton.jit
def _put_words(ptr, low, w, c, padded, padded_rows, EVEN: tl.constexpr):
    """Four rows of the tile are one word of the transposed copy; `padded_rows` is a multiple of 16."""
    place = ptr.to(tl.pointer_type(tl.int32)) + c[None, :].to(tl.int64) * (padded_rows // 4) + w[:, None]
    if EVEN:
        tl.store(place, low)
    else:
        tl.store(place, low, mask=(w < padded_rows // 4)[:, None] & (c < padded)[None, :])


@triton.jit
def _finite(value):
    """Infinity would saturate and hide; times zero it becomes NaN, which the cast keeps. One instruction."""
    return value * 0.0 + value


@triton.jit
def _scaled(value, by, CLAMP: tl.constexpr, FMAX: tl.constexpr):
    """Ready for the cast, which saturates by itself on the hardware, but not in the interpreter."""
    value = value * by
    if CLAMP:
        value = tl.where(value > FMAX, FMAX, tl.where(value < -FMAX, -FMAX, value))
    return value


@triton.jit
def _note(
    value_0, value_1, value_2, value_3, by, seen_ptr, counts_ptr,
    FMAX: tl.constexpr, ZERO: tl.constexpr, SEEN: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """core/producer.note of one tile; what lies outside of it is zero."""
    if SEEN:
        bits = tl.maximum(
            tl.maximum(magnitude_bits(value_0), magnitude_bits(value_1)),
            tl.maximum(magnitude_bits(value_2), magnitude_bits(value_3)),
        )
        tl.atomic_max(seen_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")
    if COUNTS:
        over = saturates(value_0, by, FMAX) + saturates(value_1, by, FMAX)
        over += saturates(value_2, by, FMAX) + saturates(value_3, by, FMAX)
        under = underflows(value_0, by, ZERO) + underflows(value_1, by, ZERO)
        under += underflows(value_2, by, ZERO) + underflows(value_3, by, ZERO)
        lost = tl.sum(tl.sum(over, axis=1), axis=0)
        if lost > 0:
            tl.atomic_add(counts_ptr, lost.to(tl.int64), sem="relaxed")
        lost = tl.sum(tl.sum(under, axis=1), axis=0)
        if lost > 0:
            tl.atomic_add(counts_ptr + 1, lost.to(tl.int64), sem="relaxed")


@triton.jit
def _crossed(
    u_ptr, bias, x0_ptr, x_ptr, out_ptr, r, c, rows, features, u_stride, x0_stride, x_stride,
    OUT: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Some rows of x', stored in high precision."""
    outer = _take(u_ptr, r, c, rows, features, u_stride, EVEN)
    x0 = _take(x0_ptr, r, c, rows, features, x0_stride, EVEN)
    value = _take(x_ptr, r, c, rows, features, x_stride, EVEN)
    if BIAS:
        outer += bias
    value = x0 * outer + value
    _put(out_ptr, value.to(OUT), r, c, rows, features, EVEN)
    return value


@triton.jit
def _cross_produce(
    u_ptr,
    bias_ptr,
    x0_ptr,
    x_ptr,
    scale_ptr,
    seen_ptr,
    counts_ptr,
    out_ptr,
    row_ptr,
    turned_ptr,
    rows,
    features,
    padded,
    padded_rows,
    u_stride,
    x0_stride,
    x_stride,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    TURNED: tl.constexpr,
    FP8: tl.constexpr,
    FMAX: tl.constexpr,
    ZERO: tl.constexpr,
    CVT: tl.constexpr,
    SEEN: tl.constexpr,
    COUNTS: tl.constexpr,
    CLAMP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    w = tl.program_id(0).to(tl.int64) * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)  # a word is four rows
    r = 4 * w
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_ptr + c, mask=c < features, other=0.0).to(tl.float32)[None, :]
    value_0 = _crossed(
        u_ptr, bias, x0_ptr, x_ptr, out_ptr, r, c, rows, features,
        u_stride, x0_stride, x_stride, OUT, BIAS, EVEN,
    )  # fmt: skip
    value_1 = _crossed(
        u_ptr, bias, x0_ptr, x_ptr, out_ptr, r + 1, c, rows, features,
        u_stride, x0_stride, x_stride, OUT, BIAS, EVEN,
    )  # fmt: skip
    value_2 = _crossed(
        u_ptr, bias, x0_ptr, x_ptr, out_ptr, r + 2, c, rows, features,
        u_stride, x0_stride, x_stride, OUT, BIAS, EVEN,
    )  # fmt: skip
    value_3 = _crossed(
        u_ptr, bias, x0_ptr, x_ptr, out_ptr, r + 3, c, rows, features,
        u_stride, x0_stride, x_stride, OUT, BIAS, EVEN,
    )  # fmt: skip
    if LOW:
        by = inverse_of_power(tl.load(scale_ptr))
        _note(value_0, value_1, value_2, value_3, by, seen_ptr, counts_ptr, FMAX, ZERO, SEEN, COUNTS)
        value_0 = _scaled(_finite(value_0), by, CLAMP, FMAX)
        value_1 = _scaled(_finite(value_1), by, CLAMP, FMAX)
        value_2 = _scaled(_finite(value_2), by, CLAMP, FMAX)
        value_3 = _scaled(_finite(value_3), by, CLAMP, FMAX)
        _put_row(row_ptr, value_0, r, c, rows, padded, FP8, EVEN)
        _put_row(row_ptr, value_1, r + 1, c, rows, padded, FP8, EVEN)
        _put_row(row_ptr, value_2, r + 2, c, rows, padded, FP8, EVEN)
        _put_row(row_ptr, value_3, r + 3, c, rows, padded, FP8, EVEN)
        if TURNED:
            low = word(value_0, value_1, value_2, value_3, FP8, CVT)
            _put_words(turned_ptr, low, w, c, padded, padded_rows, EVEN)


@triton.jit
def _outer_grad(
    grad_ptr, inner_ptr, x0_ptr, units_ptr, hp_ptr, r, c, rows, features,
    grad_stride, inner_stride, x0_stride,
    HP: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Some rows of du' and their units; stores g where it is made here."""
    unit = tl.load(units_ptr + r, mask=r < rows, other=0.0)
    value = _take(grad_ptr, r, c, rows, features, grad_stride, EVEN) * inverse_of_power(unit)[:, None]
    if INNER:
        value += _take(inner_ptr, r, c, rows, features, inner_stride, EVEN)
        _put(hp_ptr, (value * unit[:, None]).to(HP), r, c, rows, features, EVEN)
    return value * _take(x0_ptr, r, c, rows, features, x0_stride, EVEN), unit


@triton.jit
def _cross_derive(
    grad_ptr,
    inner_ptr,
    x0_ptr,
    units_ptr,
    largest_ptr,
    scale_ptr,
    seen_ptr,
    counts_ptr,
    hp_ptr,
    row_ptr,
    turned_ptr,
    turned_scale_ptr,
    partial_ptr,
    rows,
    features,
    padded,
    padded_rows,
    grad_stride,
    inner_stride,
    x0_stride,
    HP: tl.constexpr,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    FP8: tl.constexpr,
    FMAX: tl.constexpr,
    ZERO: tl.constexpr,
    CVT: tl.constexpr,
    SEEN: tl.constexpr,
    COUNTS: tl.constexpr,
    CLAMP: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    w = tl.program_id(0).to(tl.int64) * (BLOCK_R // 4) + tl.arange(0, BLOCK_R // 4)  # a word is four rows
    r = 4 * w
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    du_0, unit_0 = _outer_grad(
        grad_ptr, inner_ptr, x0_ptr, units_ptr, hp_ptr, r, c, rows, features,
        grad_stride, inner_stride, x0_stride, HP, INNER, EVEN,
    )  # fmt: skip
    du_1, unit_1 = _outer_grad(
        grad_ptr, inner_ptr, x0_ptr, units_ptr, hp_ptr, r + 1, c, rows, features,
        grad_stride, inner_stride, x0_stride, HP, INNER, EVEN,
    )  # fmt: skip
    du_2, unit_2 = _outer_grad(
        grad_ptr, inner_ptr, x0_ptr, units_ptr, hp_ptr, r + 2, c, rows, features,
        grad_stride, inner_stride, x0_stride, HP, INNER, EVEN,
    )  # fmt: skip
    du_3, unit_3 = _outer_grad(
        grad_ptr, inner_ptr, x0_ptr, units_ptr, hp_ptr, r + 3, c, rows, features,
        grad_stride, inner_stride, x0_stride, HP, INNER, EVEN,
    )  # fmt: skip
    scale = tl.load(scale_ptr)
    by = inverse_of_power(scale)
    _note(du_0, du_1, du_2, du_3, by, seen_ptr, counts_ptr, FMAX, ZERO, SEEN, COUNTS)
    if BIAS:
        total = tl.sum(
            du_0 * unit_0[:, None] + du_1 * unit_1[:, None] + du_2 * unit_2[:, None] + du_3 * unit_3[:, None],
            axis=0,
        )
        place = partial_ptr + tl.program_id(0).to(tl.int64) * features + c
        tl.store(place, total, mask=c < features)
    du_0, du_1, du_2, du_3 = _finite(du_0), _finite(du_1), _finite(du_2), _finite(du_3)
    _put_row(row_ptr, _scaled(du_0, by, CLAMP, FMAX), r, c, rows, padded, FP8, EVEN)
    _put_row(row_ptr, _scaled(du_1, by, CLAMP, FMAX), r + 1, c, rows, padded, FP8, EVEN)
    _put_row(row_ptr, _scaled(du_2, by, CLAMP, FMAX), r + 2, c, rows, padded, FP8, EVEN)
    _put_row(row_ptr, _scaled(du_3, by, CLAMP, FMAX), r + 3, c, rows, padded, FP8, EVEN)
    top = tl.load(largest_ptr).to(tl.float32, bitcast=True)
    top = tl.where(top == 0.0, 1.0, top)
    down = inverse_of_power(top)  # a unit is `top` at most: the product cannot overflow
    low = word(
        _scaled(du_0, (unit_0 * down * by)[:, None], CLAMP, FMAX),
        _scaled(du_1, (unit_1 * down * by)[:, None], CLAMP, FMAX),
        _scaled(du_2, (unit_2 * down * by)[:, None], CLAMP, FMAX),
        _scaled(du_3, (unit_3 * down * by)[:, None], CLAMP, FMAX),
        FP8, CVT,
    )  # fmt: skip
    _put_words(turned_ptr, low, w, c, padded, padded_rows, EVEN)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(turned_scale_ptr, scale * top)


@triton.jit
def _gathered(
    total, grad, u_ptr, bias_ptr, r, c, rows, features, u_stride, BIAS: tl.constexpr, EVEN: tl.constexpr
):
    outer = _take(u_ptr, r, c, rows, features, u_stride, EVEN)
    if BIAS:
        outer += tl.load(bias_ptr + c, mask=c < features, other=0.0).to(tl.float32)[None, :]
    return total + grad * outer


@triton.jit
def _cross_gather(
    g0_ptr, g1_ptr, g2_ptr, g3_ptr, u0_ptr, u1_ptr, u2_ptr, u3_ptr, b0_ptr, b1_ptr, b2_ptr, b3_ptr,
    inner_ptr, units_ptr, onto_ptr, dx0_ptr, dx_ptr, rows, features,
    g0_stride, g1_stride, g2_stride, g3_stride, u0_stride, u1_stride, u2_stride, u3_stride, inner_stride,
    LAYERS: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr,
    ENTRY: tl.constexpr, JOINT: tl.constexpr, ONTO: tl.constexpr, OUT: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """ENTRY: layer 0 is the stack's first, and dx is made here. ONTO: adds to what other layers gave."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    grad = _take(g0_ptr, r, c, rows, features, g0_stride, EVEN)
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    if ONTO:
        total = _take(onto_ptr, r, c, rows, features, features, EVEN)
    if ENTRY:
        unit = tl.load(units_ptr + r, mask=r < rows, other=0.0)
        dx = grad + _take(inner_ptr, r, c, rows, features, inner_stride, EVEN) * unit[:, None]
        if JOINT:
            total += dx
        else:
            _put(dx_ptr, dx.to(OUT), r, c, rows, features, EVEN)
    total = _gathered(total, grad, u0_ptr, b0_ptr, r, c, rows, features, u0_stride, B0, EVEN)
    if LAYERS > 1:
        grad = _take(g1_ptr, r, c, rows, features, g1_stride, EVEN)
        total = _gathered(total, grad, u1_ptr, b1_ptr, r, c, rows, features, u1_stride, B1, EVEN)
    if LAYERS > 2:
        grad = _take(g2_ptr, r, c, rows, features, g2_stride, EVEN)
        total = _gathered(total, grad, u2_ptr, b2_ptr, r, c, rows, features, u2_stride, B2, EVEN)
    if LAYERS > 3:
        grad = _take(g3_ptr, r, c, rows, features, g3_stride, EVEN)
        total = _gathered(total, grad, u3_ptr, b3_ptr, r, c, rows, features, u3_stride, B3, EVEN)
    _put(dx0_ptr, total.to(OUT), r, c, rows, features, EVEN)


def cross_produce_fused(
    u: torch.Tensor,
    bias: torch.Tensor | None,
    x0: torch.Tensor,
    x: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    sides: tuple[int, int],
    turned: bool = False,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> Crossed:
    """Twin: core/cross.cross_produce. One launch."""
    rows, features = u.shape
    padded, padded_rows = sides
    low, turned = scale is not None, turned and scale is not None
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    row = _fp8(u, rows, padded) if low else None
    column = _fp8(u, *sides) if turned else None
    with _on(u):
        _cross_produce[(triton.cdiv(padded_rows if turned else rows, _HIGH), triton.cdiv(padded, _WIDE))](
            u,
            u if bias is None else bias,
            x0,
            x,
            *(u if t is None else t for t in (scale, seen, counts)),
            out,
            *(u if t is None else t for t in (row, column)),
            rows,
            features,
            padded,
            padded_rows,
            u.stride(0),
            x0.stride(0),
            x.stride(0),
            OUT=_TYPES[x.dtype],
            BIAS=bias is not None,
            LOW=low,
            TURNED=turned,
            SEEN=seen is not None,
            COUNTS=counts is not None,
            EVEN=rows % _HIGH == 0 and features % _WIDE == 0,
            BLOCK_R=_HIGH,
            BLOCK_C=_WIDE,
            num_warps=_WARPS,
            **_LOW,
        )
    return Crossed(hp=out, row=row, turned=column)


def cross_derive_fused(
    grad: torch.Tensor,
    inner: torch.Tensor | None,
    x0: torch.Tensor,
    *,
    units: torch.Tensor,
    largest: torch.Tensor,
    grad_scale: torch.Tensor,
    sides: tuple[int, int],
    bias: bool = False,
    seen: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> CrossGrad:
    """Twin: core/cross.cross_derive. One launch; one more for a bias."""
    rows, features = grad.shape
    padded, padded_rows = sides
    made = None if inner is None else torch.empty(rows, features, dtype=grad.dtype, device=grad.device)
    row, turned = _fp8(grad, rows, padded), _fp8(grad, *sides)
    turned_scale = torch.empty(1, 1, dtype=torch.float32, device=grad.device)
    tiles = triton.cdiv(padded_rows, _HIGH)
    partial = torch.empty(tiles, features, dtype=torch.float32, device=grad.device) if bias else None
    with _on(grad):
        _cross_derive[(tiles, triton.cdiv(padded, _WIDE))](
            grad,
            grad if inner is None else inner,
            x0,
            units,
            largest,
            grad_scale,
            *(grad if t is None else t for t in (seen, counts, made)),
            row,
            turned,
            turned_scale,
            turned_scale if partial is None else partial,
            rows,
            features,
            padded,
            padded_rows,
            grad.stride(0),
            0 if inner is None else inner.stride(0),
            x0.stride(0),
            HP=_TYPES[grad.dtype],
            INNER=inner is not None,
            BIAS=bias,
            SEEN=seen is not None,
            COUNTS=counts is not None,
            EVEN=rows % _HIGH == 0 and features % _WIDE == 0,
            BLOCK_R=_HIGH,
            BLOCK_C=_WIDE,
            num_warps=_WARPS,
            **_LOW,
        )
    return CrossGrad(
        grad=grad if made is None else made,
        row=row,
        turned=turned,
        turned_scale=turned_scale,
        bias=None if partial is None else partial.sum(0),
    )


def cross_gather_fused(
    grads: Sequence[torch.Tensor],
    outers: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    inner: torch.Tensor,
    *,
    units: torch.Tensor,
    joint: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Twin: core/cross.cross_gather. One launch for up to four layers, one more for four more."""
    rows, features = inner.shape

    def empty() -> torch.Tensor:
        return torch.empty(rows, features, dtype=grads[0].dtype, device=inner.device)

    dx = None if joint else empty()
    dx0: torch.Tensor | None = None
    with _on(inner):
        for begin in range(0, len(grads), _MOST_LAYERS):
            part = slice(begin, begin + _MOST_LAYERS)
            g, u, b = list(grads[part]), list(outers[part]), list(biases[part])
            layers = len(g)
            missing = _MOST_LAYERS - layers  # pointers that nothing is read from
            g, u, b = g + g[:1] * missing, u + u[:1] * missing, b + [None] * missing
            onto, dx0 = dx0, empty()
            _cross_gather[(triton.cdiv(rows, _GATHER_HIGH), triton.cdiv(features, _GATHER_WIDE))](
                *g,
                *u,
                *(inner if bias is None else bias for bias in b),
                inner,
                units,
                inner if onto is None else onto,
                dx0,
                inner if dx is None else dx,
                rows,
                features,
                *(t.stride(0) for t in (*g, *u, inner)),
                LAYERS=layers,
                **{f"B{place}": bias is not None for place, bias in enumerate(b)},
                ENTRY=begin == 0,
                JOINT=joint,
                ONTO=onto is not None,
                OUT=_TYPES[dx0.dtype],
                EVEN=rows % _GATHER_HIGH == 0 and features % _GATHER_WIDE == 0,
                BLOCK_R=_GATHER_HIGH,
                BLOCK_C=_GATHER_WIDE,
                num_warps=_GATHER_WARPS,
            )
    assert dx0 is not None, "a stack has a layer"
    return dx0, dx


_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_LOW = {
    "FP8": TRITON_TYPES[Format.E4M3.dtype],
    "FMAX": Format.E4M3.max,
    "ZERO": Format.E4M3.smallest_subnormal / 2,
    "CVT": "" if INTERPRETED else CVT[Format.E4M3.dtype],
    "CLAMP": INTERPRETED,
}


def _fp8(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=Format.E4M3.dtype, device=like.device)


def _on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the operand's."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else contextlib.nullcontext()
