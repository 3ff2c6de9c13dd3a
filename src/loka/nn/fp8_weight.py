"""A weight [N, K] that arrives in FP8: a site takes its bytes as they are and quantizes nothing.

    W = row * scale,   row e4m3 [N, K],  scale a power of two

FSDP2 hands one over where `loka.distributed.fp8_all_gather` has the weight gathered in eight bits. It stands
for a tensor of the model's dtype, so that shapes, dtypes and gradients are what the module expects, but no
such numbers are in memory. A GEMM reads the row copy for `output`, and for `grad_input` its transpose, made
in backward and dropped there: keeping both layouts would cost the memory of a bf16 weight. What else reads it
raises: the numbers are rounded, and nothing but a site is planned for that.

Under torch.compile it is taken apart into `row` and `scale`, and a site reads `loka::dequantized` of them,
which is exact. Regions (compiler/lower.py) put the FP8 copies in its place; where none is applied the site
quantizes anew by powers of two, which gives the same values.
"""

from __future__ import annotations

from typing import Any

import torch

from loka.core.exceptions import LokaError
from loka.core.numerics.reference import Quantized
from loka.core.problem import round_up
from loka.core.recipe import Cast, Format, Granularity
from loka.core.records.report import HP
from loka.kernels.custom_op import registered
from loka.kernels.gemm.run import fit
from loka.kernels.quantize.side import Side

FP8 = torch.float8_e4m3fn
CAST = Cast(Format.E4M3, Granularity.ROW, power_of_two=True)
"""What a site's recipe has to ask of a weight: one scale for all rows serves it as a scale of each."""

_WORD = 4  # rows that the kernel of a transpose takes at once
_SIDES = 128  # no kernel pads a side to a multiple of more


def scale_length(rows: int, columns: int) -> int:
    """Elements of `Fp8Weight.scale`: enough for either side, padded as a kernel may want it."""
    return round_up(max(rows, columns), _SIDES)


class Fp8Weight(torch.Tensor):
    """row float8_e4m3fn [N, K], contiguous; scale float32 [scale_length(N, K)], one value all over.

    Raises LokaError where an operation reads it that is no site's.
    """

    row: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, row: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> Fp8Weight:
        return torch.Tensor._make_wrapper_subclass(cls, row.shape, dtype=dtype, device=row.device)

    def __init__(self, row: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.row, self.scale = row, scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fp8Weight({list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["row", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Fp8Weight:
        return Fp8Weight(inner["row"], inner["scale"], dtype)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = args[0] if args else None
        if func in _SAME and isinstance(own, cls) and _is_whole(func, own, args):
            return cls(own.row, own.scale, own.dtype)
        if func in _SHAPE_ONLY and isinstance(own, cls):
            like = torch.empty(0, dtype=own.dtype, device=own.device).expand(own.shape[0], 0)
            return func(like.new_empty(own.shape), *args[1:], **(kwargs or {}))
        # Where something watches ops, such as a counter of FLOPs, a site's passes go through them.
        backward = func is torch.ops.loka.site_backward.default and args[_GRAD_INPUT] != HP
        if backward or func is torch.ops.loka.site.default:
            return func(*(_dequantized(a) if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        raise LokaError(
            f"{func} reads a weight [{', '.join(map(str, _shape(args)))}] that was gathered in FP8",
            why=["its numbers are rounded, and only the site that is planned in FP8 may take them so"],
            way_out="leave the parameter out: fp8_all_gather(model, plan, filter=lambda name: ...)",
        )

    def quantized(self, side: Side, health: torch.Tensor | None) -> Quantized:
        """[N, K] in the padded sides of a kernel, as `output` reads it; flags `health` where it is not
        finite."""
        return _flagged(self._operand(fit(self.row, side.padded), side.cast), side, health)

    def transposed(self, side: Side, health: torch.Tensor | None) -> Quantized:
        """[K, N] in the padded sides of a kernel, as `grad_input` reads it; a copy."""
        padded = fit(self.row, (side.padded[1], side.padded[0]))
        return _flagged(self._operand(bytes_transposed(padded), side.cast), side, health)

    def _operand(self, data: torch.Tensor, cast: Cast) -> Quantized:
        assert cast == CAST, "fp8_all_gather takes no site of another cast"
        return Quantized(data, self.scale[: data.shape[0]].view(-1, 1), cast)


_GRAD_INPUT = 7  # of loka::site_backward, the name of its candidate
_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default, _aten.as_strided.default)
_SHAPE_ONLY = (_aten.zeros_like.default, _aten.empty_like.default, _aten.new_empty.default, _aten.new_zeros.default)


def _is_whole(func: Any, own: Fp8Weight, args: Any) -> bool:
    """FSDP2 hands the weight on as a strided view of itself."""
    if func is not _aten.as_strided.default:
        return True
    return (tuple(args[1]), tuple(args[2])) == (tuple(own.shape), own.stride()) and not any(args[3:])


def _shape(args: Any) -> list[int]:
    leaves = torch.utils._pytree.tree_leaves(args)
    return next((list(leaf.shape) for leaf in leaves if isinstance(leaf, Fp8Weight)), [])


def _flagged(operand: Quantized, side: Side, health: torch.Tensor | None) -> Quantized:
    if health is not None and side.flag >= 0:
        health.view(-1)[side.flag].logical_or_(~torch.isfinite(operand.scale[0, 0]))
    return operand


def bytes_transposed(row: torch.Tensor) -> torch.Tensor:
    """[K, N] of [N, K], contiguous."""
    if row.is_cuda and row.is_contiguous() and row.numel() and row.shape[0] % _WORD == 0:
        from loka.kernels.edge.triton.transpose import transpose_fused

        return transpose_fused(row)
    return row.view(torch.uint8).t().contiguous().view(row.dtype)


def _dequantized(weight: Fp8Weight) -> torch.Tensor:
    return dequantized(weight.row, weight.scale, weight.dtype)


def _values(row: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """row * scale [N, K] in `dtype`: of FP8, under one scale, exact in float32 and bfloat16; of INT8, under
    scales [N] of its rows (loka.serve keeps such weights), as near as `dtype` has it."""
    return (row.float() * (scale[0] if row.is_floating_point() else scale.view(-1, 1))).to(dtype)


def _values_fake(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(row.shape, dtype=dtype, device=row.device)


def _transposed(row: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """row^T [K, N], contiguous. `after` is not read: a gradient there keeps the copy out of forward."""
    return bytes_transposed(row)


def _transposed_fake(row: torch.Tensor) -> torch.Tensor:
    return torch.empty(row.shape[1], row.shape[0], dtype=row.dtype, device=row.device)


dequantized = registered("loka::dequantized", _values, _values_fake)
transposed = registered("loka::transposed", _transposed, _transposed_fake)
