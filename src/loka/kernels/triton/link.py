"""What lies behind a linear layer, on tiles that lie in registers: norm and activation, forward and backward.

    A = E(Z),  E = activation(norm(Z + bias) * gamma + beta)        dZ = E'(Z) dA

Shared by the producers (producer.py) and by the passes that take a scale from what they are about to
write (current.py), so that both see the same values.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

from loka.core.chain import Activation, Epilogue, Norm
from loka.core.producer import Parameters, block_of
from loka.kernels.triton.pack import INTERPRETED, inverse_of_power
from loka.kernels.triton.rounded import from_byte

PLAIN_WIDTH = 256  # features of a tile where nothing is reduced

_ACTIVATION = {activation: index for index, activation in enumerate(Activation)}  # NONE, HARD_SWISH, RELU ..
_HARD_SWISH, _RELU, _SWISH, _GELU = (
    tl.constexpr(_ACTIVATION[a])
    for a in (Activation.HARD_SWISH, Activation.RELU, Activation.SWISH, Activation.GELU)
)
NO_NORM, TILE_NORM, SUMMED_NORM = (tl.constexpr(i) for i in range(3))
_COMPILED = tl.constexpr(not INTERPRETED)

# What the compiler spells longer, written out for the hardware; the interpreter takes the plain paths.
# Two bfloat16 of one register to float32, an instruction each.
_WIDEN = tl.constexpr(
    "{.reg .b32 low, high; shl.b32 low, $2, 16; and.b32 high, $2, 0xffff0000; "
    "mov.b32 $0, low; mov.b32 $1, high;}"
)
# The gate by a saturating FMA, and then the slope in its place: of a NaN (ltu is true) a NaN.
_GATE = tl.constexpr(
    "{.reg .pred within; .reg .f32 size, slope, out; "
    "fma.rn.sat.f32 slope, $2, $3, 0f3F000000; mul.f32 out, $2, slope; "
    "abs.f32 size, $2; setp.ltu.f32 within, size, $5; "
    "@within fma.rn.f32 slope, $2, $4, 0f3F000000; mov.f32 $0, out; mov.f32 $1, slope;}"
)


@triton.jit
def _hard_swish(y, sixth, third, limit):
    """y * clamp(y / 6 + 1/2, 0, 1) and its slope. Or of f y, f > 0, with f in `sixth` and `third` and
    1 / f in `limit`: then the first lacks f."""
    if _COMPILED:
        out, slope = tl.inline_asm_elementwise(
            _GATE, "=f,=f,f,f,f,f", [y, sixth, third, limit], dtype=(tl.float32, tl.float32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        gate = tl.minimum(tl.maximum(y * sixth + 0.5, 0.0), 1.0)
        out = y * gate
        slope = tl.where(tl.abs(y) >= limit, gate, y * third + 0.5)
    return out, slope


@triton.jit
def activated(y, ACTIVATION: tl.constexpr):
    """act(y) and act'(y). Comparisons with NaN are false and let it through."""
    if ACTIVATION == _HARD_SWISH:
        out, slope = _hard_swish(y, 1.0 / 6.0, 1.0 / 3.0, 3.0)
    elif ACTIVATION == _RELU:
        out = tl.where(y <= 0.0, 0.0, y)
        slope = tl.where(y <= 0.0, 0.0, 1.0)
    elif ACTIVATION == _SWISH:
        gate = 1.0 / (1.0 + tl.exp(-y))
        out = y * gate
        slope = gate * (1.0 + y * (1.0 - gate))
    elif ACTIVATION == _GELU:
        gate = 0.5 * (1.0 + tl.erf(y * 0.7071067811865476))
        out = y * gate
        slope = gate + y * 0.3989422804014327 * tl.exp(-0.5 * y * y)
    else:
        out = y
        slope = tl.zeros_like(y) + 1.0
    return out, slope


@triton.jit
def finite_or_nan(value):
    """Infinity would saturate and hide; it becomes NaN, which the cast keeps."""
    return tl.where(tl.abs(value) < float("inf"), value, float("nan"))


@triton.jit
def take(ptr, start, q, c, inside, rows, stride, EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr):
    """Rows start + q as they lie, by 32-bit offsets within the tile. Without masks where nothing lies
    outside: a mask that the compiler cannot follow makes it load and store single elements."""
    place = ptr + start * stride + (q[:, None] * stride + c[None, :])
    live = q < rows - start
    if EVEN and EVEN_ROWS:
        value = tl.load(place)
    elif EVEN:
        value = tl.load(place, mask=live[:, None], other=0.0)
    else:
        value = tl.load(place, mask=live[:, None] & inside[None, :], other=0.0)
    return value


@triton.jit
def widened(value):
    """To float32."""
    if _COMPILED and value.dtype == tl.bfloat16:
        value = tl.inline_asm_elementwise(_WIDEN, "=f,=f,r", [value], dtype=tl.float32, is_pure=True, pack=2)
    return value.to(tl.float32)


@triton.jit
def vector(ptr, c, inside, EVEN: tl.constexpr):
    """Of a parameter, as [1, C] float32."""
    value = tl.load(ptr + c) if EVEN else tl.load(ptr + c, mask=inside, other=0.0)
    return value.to(tl.float32)[None, :]


@triton.jit
def applied(
    value, bias_ptr, gamma_ptr, beta_ptr, first, c, inside, features, block,
    NORMED: tl.constexpr, CENTERED: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """E(value) for a tile of whole norm blocks, the columns c from `first` on."""
    if BIAS:
        value += vector(bias_ptr, c, inside, EVEN)
    if NORMED:
        size = tl.minimum(block, features - first).to(tl.float32)
        if CENTERED:
            value = value - (tl.sum(tl.where(inside[None, :], value, 0.0), axis=1) / size)[:, None]
        if not EVEN:
            value = tl.where(inside[None, :], value, 0.0)
        square = tl.sum(value * value, axis=1) / size
        value = value * tl.rsqrt(square + EPS)[:, None]
    if GAMMA:
        value *= vector(gamma_ptr, c, inside, EVEN)
    if BETA:
        value += vector(beta_ptr, c, inside, EVEN)
    out, _ = activated(value, ACTIVATION)
    return out


@triton.jit
def differentiated(
    grad, z, step, bias_ptr, gamma_ptr, beta_ptr, sums_ptr, r, c, inside, rows, share, by, shown, unit,
    NORMED: tl.constexpr, CENTERED: tl.constexpr, EPS: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_Z: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, REAL: tl.constexpr,
    EVEN_ROWS: tl.constexpr, EVEN: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Some rows of a tile: dZ in units times `by`, A times `shown` [rows], what gamma and beta get of each
    element, and [rows] something that is not finite where the norm made a row so."""
    grad = widened(grad)
    if REAL:
        grad = grad * inverse_of_power(unit)[:, None]
    out = grad
    normal = grad
    shifted = grad
    along = unit
    # Up to ReLU an activation is homogeneous in the norm's row factor, or can be told of it: it goes into
    # other factors of rows and is no multiplication of every element.
    LAZY: tl.constexpr = NORMED != NO_NORM and not GAMMA and not BETA and ACTIVATION <= _RELU
    if HAS_Z:
        if ROUNDED:
            normal = from_byte(z, step[:, None])
            if not EVEN:
                normal = tl.where(inside[None, :], normal, 0.0)
        else:
            normal = widened(z)
        if BIAS:
            normal += vector(bias_ptr, c, inside, EVEN)
            if not EVEN:
                normal = tl.where(inside[None, :], normal, 0.0)
        if NORMED == TILE_NORM:
            if CENTERED:
                mean = tl.sum(normal, axis=1) * share
                normal = normal - mean[:, None]
                if not EVEN:
                    normal = tl.where(inside[None, :], normal, 0.0)
            square = tl.sum(normal * normal, axis=1) * share + EPS
            inverse = tl.rsqrt(square)
            std = square * inverse
        if NORMED == SUMMED_NORM:
            mean = tl.load(sums_ptr + r, mask=r < rows, other=0.0)
            inverse = tl.load(sums_ptr + rows + r, mask=r < rows, other=0.0)
            normal = normal - mean[:, None]
            std = 1.0 / inverse
        if LAZY:
            if ACTIVATION == _HARD_SWISH:
                sixth, third, limit = inverse * (1.0 / 6.0), inverse * (1.0 / 3.0), 3.0 * std
                out, slope = _hard_swish(normal, sixth[:, None], third[:, None], limit[:, None])
            else:
                out, slope = activated(normal, ACTIVATION)
            shown = shown * inverse
        else:
            if NORMED != NO_NORM:
                normal = normal * inverse[:, None]
            value = normal
            if GAMMA:
                value = value * vector(gamma_ptr, c, inside, EVEN)
            if BETA:
                value += vector(beta_ptr, c, inside, EVEN)
            out, slope = activated(value, ACTIVATION)
        if NORMED == NO_NORM:  # before the factor: an infinity times zero would do, but not times one
            out = finite_or_nan(out)
        out = out * shown[:, None]
        shifted = grad * slope
        grad = shifted
        if GAMMA:
            grad = grad * vector(gamma_ptr, c, inside, EVEN)
        if NORMED == NO_NORM:
            grad = grad * by
        else:
            # `by` is a power of two: it goes into the factors of rows and changes no bit.
            factor = inverse * by
            if NORMED == TILE_NORM:
                along = tl.sum(grad * normal, axis=1) * share
                if LAZY:
                    along = along * inverse
                if CENTERED:
                    centre = tl.sum(grad, axis=1) * share
            else:
                along = tl.load(sums_ptr + 2 * rows + r, mask=r < rows, other=0.0)
                centre = tl.load(sums_ptr + 3 * rows + r, mask=r < rows, other=0.0)
            along = along * factor
            if LAZY:
                along = along * inverse
            back = normal * along[:, None]
            if CENTERED:
                back = back + (centre * factor)[:, None]
            grad = grad * factor[:, None] - back
        if not EVEN:
            grad = tl.where(inside[None, :], grad, 0.0)
            out = tl.where(inside[None, :], out, 0.0)
        if not EVEN_ROWS:  # a bias makes something of rows that are not there, and so does 0 / 0
            grad = tl.where((r < rows)[:, None], grad, 0.0)
            out = tl.where((r < rows)[:, None], out, 0.0)
            along = tl.where(r < rows, along, 0.0)
    else:
        grad = grad * by
    return grad, out, shifted, normal, along


def tile_width(epilogue: Epilogue, features: int, padded: int) -> tuple[int, int]:
    """Features a program owns, and the power of two that holds them and the padding after the last."""
    if epilogue.norm is Norm.NONE:
        return PLAIN_WIDTH, PLAIN_WIDTH
    block = block_of(epilogue, features)
    blocks = triton.cdiv(features, block)
    beyond = max(padded - (blocks - 1) * block, block)
    return block, max(triton.next_power_of_2(beyond), 16)


def epilogue_constants(epilogue: Epilogue, parameters: Parameters) -> dict[str, object]:
    return {
        "CENTERED": epilogue.norm is Norm.LAYER,
        "EPS": epilogue.eps,
        "ACTIVATION": _ACTIVATION[epilogue.activation],
        "BIAS": parameters.bias is not None,
        "GAMMA": parameters.gamma is not None,
        "BETA": parameters.beta is not None,
    }


def launching_on(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the operand's."""
    return torch.cuda.device_of(tensor) if tensor.is_cuda else contextlib.nullcontext()
