"""The values and copies of a program in plain PyTorch: ground truth for the generated kernels, and the CPU path.

    r_i  = 2^ceil(log2(max_j |G_ij| / 448)), at least 2^-60; NaN where the row is not finite
    row  = fp8(G_ij / r_i)        transposed = fp8(A_ij r'_i / M)^T,   M = max of the given tops

    step_i = max_j |G_ij| / 127, at least 2^-126, NaN likewise       integer = int8(G_ij (1 / step_i))

All scales of FP8 are powers of two, so that r_i moves from one operand of grad_weight to the other exactly:

    sum_i G_in A_ik = M sum_i (G_in / r_i) (A_ik r_i / M)
"""

from collections.abc import Callable

import torch

from loka.core.numerics.reference import quantize
from loka.core.problem import round_up
from loka.core.recipe import Cast, Format, Granularity
from loka.kernels.edge.program import CONCAT, GROUP, Kind, Program, Step

_INT8 = Cast(Format.INT8, Granularity.ROW)
E4M3_MAX = Format.E4M3.max
SCALE_CARRY = 0x1FFFFF  # carries mantissas above 1.75, which is that of 448, into the exponent
SCALE_EXPONENT = 8 << 23  # 448 = 1.75 * 2^8
SCALE_LEAST = 67 << 23  # 2^-60: products of two scales and their reciprocals stay normal numbers

_BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "le": torch.le, "lt": torch.lt, "ge": torch.ge, "gt": torch.gt, "eq": torch.eq,
    "ne": torch.ne, "and": torch.logical_and, "or": torch.logical_or,
}  # fmt: skip
_UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "exp": torch.exp, "log": torch.log, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "erf": torch.erf, "relu": torch.relu, "square": torch.square, "not": torch.logical_not,
    "copy": torch.clone, "hardswish": lambda x: torch.nn.functional.hardswish(x * 1.0),
    "normal_cdf": lambda x: torch.special.ndtr(x * 1.0),
}  # fmt: skip


def run_program(
    program: Program,
    leaves: list[torch.Tensor],
    rows: int,
    input_scale: torch.Tensor | None,
    gradient_scale: torch.Tensor | None,
    tops: torch.Tensor | None,
) -> list[torch.Tensor]:
    """`Program.outputs`, in order.

    Args:
        leaves: each of its kind's number of elements, any float dtype, or bool.
        rows: T.
        input_scale: float32 [T], [T, n] or [1], the scales that the operand of grad_weight which meets G has, of n
            numbers the largest; asks for their products with r in `tops`. None counts as 1.
        gradient_scale, tops: r' [T] and the tops [P] of the gradient that A will meet; where A is wanted.
    """
    values = evaluate(program, leaves, rows)
    found: list[torch.Tensor] = []
    columns, high = round_up(program.features, 16), round_up(rows, 16)
    if program.gradient is not None:
        gradient = _full(values[program.gradient], program, rows)
        r = row_scale(gradient)
        low = (gradient / r).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        if program.row:
            found.append(_padded(low, rows, columns))
        if program.column:
            found.append(_padded(low.t(), columns, high))
        found.append(r)
        if program.column:
            product = r.view(-1)
            if input_scale is not None:
                several = input_scale.numel() not in (1, rows)
                product = product * (input_scale.view(rows, -1).amax(dim=1) if several else input_scale.view(-1))
            found.append(_by_groups(product).amax(dim=1))
        if program.integers:
            integers, step = quantized_by_rows(gradient)
            found += [_padded(integers, rows, columns), step]
    if program.transposed is not None:
        assert gradient_scale is not None
        assert tops is not None
        top = tops.amax().view(1) if tops.numel() else tops.new_ones(1)
        value = _full(values[program.transposed], program, rows) * (gradient_scale.view(-1, 1) / top)
        low = value.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        found += [_padded(low.t(), columns, high), top]
    found += [_full(values[index], program, rows).sum(dim=0) for index in program.sums]
    for index, dtype in zip(program.values, program.value_dtypes, strict=True):
        kind = program.kinds[index]
        shape = value_shape(program, kind, rows)
        value = _full(values[index], program, rows) if kind is Kind.FULL else values[index].float()
        value = value.expand(rows, -1, -1) if value.dim() == 3 else value
        # A copy: a value may be a leaf, which no op may return, or lie as its leaves do.
        value = value.reshape(shape).to(getattr(torch, dtype), copy=True, memory_format=torch.contiguous_format)
        found.append(value)
    return found


def value_shape(program: Program, kind: Kind, rows: int) -> tuple[int, ...]:
    if kind is Kind.FULL:
        return rows, program.features
    return (rows, 1) if kind is Kind.COLUMN else (rows, program.features // program.block, 1)


def evaluate(program: Program, leaves: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """Every value of the program, float32 or bool, in a shape that broadcasts to [T, N / b, b]."""
    blocks = program.features // program.block
    shapes = {
        Kind.FULL: (rows, blocks, program.block),
        Kind.ROW: (1, blocks, program.block),
        Kind.COLUMN: (rows, 1, 1),
        Kind.BLOCK: (rows, blocks, 1),
        Kind.SCALAR: (1, 1, 1),
    }
    values = []
    for index, (leaf, kind) in enumerate(zip(leaves, program.leaves, strict=True)):
        shape = (rows, program.columns[index]) if kind is Kind.PART else shapes[kind]
        values.append(_widened(leaf).reshape(shape))
    for step in program.steps:
        values.append(_step(step, values, shapes[Kind.FULL]))
    return values


def quantized_by_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 [T, N] and its steps, float32 [T, 1], by the recipe int8_row. For a row that is not finite the step is NaN,
    and the integers mean nothing.
    """
    if values.shape[0] == 0:
        return values.to(torch.int8), values.new_ones(0, 1, dtype=torch.float32)
    made = quantize(values, _INT8)
    return made.data, made.scale.where(made.scale < torch.inf, torch.nan)


def row_scale(values: torch.Tensor) -> torch.Tensor:
    """float32 [T, 1] for values [T, N]; the scale of recipe rowwise_e4m3_pow2 where it is above 2^-60."""
    if values.shape[1] == 0 or values.shape[0] == 0:
        return values.new_ones(values.shape[0], 1, dtype=torch.float32)
    return scale_above(values.abs().amax(dim=1, keepdim=True).float())


def scale_above(amax: torch.Tensor) -> torch.Tensor:
    """The least power of two s with amax <= 448 s, at least 2^-60; NaN where amax is not finite."""
    bits = amax.contiguous().view(torch.int32)
    scale = (((bits + SCALE_CARRY) & 0x7F800000) - SCALE_EXPONENT).clamp_min(SCALE_LEAST)
    return torch.where(amax < torch.inf, scale.view(torch.float32), torch.nan)


def _step(step: Step, values: list[torch.Tensor], full: tuple[int, int, int]) -> torch.Tensor:
    device = values[0].device
    args = [values[a] if isinstance(a, int) else torch.full((), a, device=device) for a in step.args]
    if step.op == "where":
        return torch.where(args[0].bool(), args[1], args[2])
    if step.op == CONCAT:
        return torch.cat(args, dim=1).view(full)
    if step.op == "block_sum":
        return args[0].expand(full).sum(dim=2, keepdim=True)
    if step.op == "row_sum":
        return args[0].expand(full).sum(dim=(1, 2), keepdim=True)
    if step.op == "row_max":
        return args[0].expand(full).float().amax(dim=(1, 2), keepdim=True)
    if step.op in _BINARY:
        return _BINARY[step.op](*args)
    return _UNARY[step.op](*args)


def _widened(leaf: torch.Tensor) -> torch.Tensor:
    return leaf if leaf.dtype == torch.bool else leaf.float()


def _full(value: torch.Tensor, program: Program, rows: int) -> torch.Tensor:
    full = (rows, program.features // program.block, program.block)
    return value.float().expand(full).reshape(rows, program.features)


def _by_groups(values: torch.Tensor) -> torch.Tensor:
    """Reshapes values [T] to [P, GROUP]."""
    wide = values.new_zeros(-(-values.shape[0] // GROUP) * GROUP)
    wide[: values.shape[0]] = values
    return wide.view(-1, GROUP)


def _padded(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    whole = torch.zeros(rows, columns, dtype=torch.uint8, device=values.device)
    whole[: values.shape[0], : values.shape[1]] = values.view(torch.uint8)
    return whole.view(values.dtype)
