"""What shape a node's value has relative to a matrix [rows, features]: a full matrix, a row, a column,
or a statistic.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from loka.kernels.edge.program import Kind

_READ = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool, torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Low:
    """A tensor in FP8: data float8 [T, K], scale float32 [T, 1] of its rows, or [1]. `finite`: a float32
    tensor that is not finite where the tensor is not. `integers`: data int8 and scale of it in INT8, where a
    GEMM reads that; `data` is None where none reads FP8. `scales`: of data from a norm's epilogue, what rows and blocks
    would be scaled by if they were alone [T, K / block], by which a weight's gradient weighs its rows.

    A row of zeros, or one far below a norm's eps, stays one, and its gradient is up to 1 / sqrt(eps) times as large
    behind each norm. Under the scale of all others its product would count as the largest, though it is next to
    nothing, and theirs would be rounded to zero.
    """

    data: Node | None
    scale: Node
    finite: Node
    integers: tuple[Node, Node] | None = None
    scales: Node | None = None

    @property
    def by_rows(self) -> bool:
        return self.scale.meta["val"].dim() == 2


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The matrix that gives the values of a program their shapes. `rows` may be symbolic."""

    rows: int | torch.SymInt
    features: int

    def kind(self, node: Node) -> Kind | None:
        """The kind of a node by the shape of its value; None where the shape does not belong to this matrix."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.dtype not in _READ:
            return None
        shape = tuple(val.shape)
        block = self.block_of(shape) if shape else 0
        # Rows alone: where features are a product of symbols, a guard knows their number, but not that of elements.
        if block and same(math.prod(shape[: -1 if block == self.features else -2]), self.rows):
            return Kind.FULL
        if all(same(side, 1) for side in shape):
            return Kind.SCALAR
        if same(shape[-1], self.features) and all(same(side, 1) for side in shape[:-1]):
            return Kind.ROW
        if same(shape[-1], 1):
            count = math.prod(shape)
            if same(count, self.rows):
                return Kind.COLUMN
            blocks = shape[-2] if len(shape) > 1 else 0
            divides = isinstance(blocks, int) and blocks > 1 and self.features % blocks == 0
            return Kind.BLOCK if divides and same(count, self.rows * blocks) else None
        return None

    def block_of(self, shape: Sequence[Any]) -> int:
        """How many features the last dimension of a full value holds: all of them, or one block; 0 where the dimension
        would mix rows.
        """
        last = shape[-1]
        if same(last, self.features):
            return self.features
        inside = isinstance(last, int) and last > 1 and self.features % last == 0 and len(shape) > 2
        return last if inside and same(shape[-2], self.features // last) else 0


def same(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


@dataclass
class Cone:
    """The nodes of a program above `root`, and the leaves that it reads."""

    matrix: Matrix
    low: Mapping[Node, Low]
    inside: set[Node] = field(default_factory=set)
    leaves: dict[Node, Kind] = field(default_factory=dict)
    low_leaves: dict[Node, Node] = field(default_factory=dict)  # comparisons -> FP8 data read instead
    # Inside, and read by others, who get them from the program.
    given: list[Node] = field(default_factory=list)

    @property
    def matrices(self) -> set[Node]:
        """The leaves that are full matrices, in FP8 or not."""
        return {n for n, kind in self.leaves.items() if kind is Kind.FULL} | set(self.low_leaves.values())
