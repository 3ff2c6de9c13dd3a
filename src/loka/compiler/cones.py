"""Programs from a joint graph: the code above a value, down to what has to be read from memory.

A node is part of a program where a program can compute it and nothing speaks for reading it instead. It is
read, a leaf, where

* no step of a program computes it, or its shape or dtype is none of a program's;
* backward reads it, and forward made it from more than one matrix: reading it is cheaper than reading those,
  and backward keeps it instead of them;
* something else needs it in memory, and it takes more than one matrix to compute; but the value that a
  program is about is computed, and given to who else reads it. Nobody needs it in memory where all its
  readers can compute it anew from fewer bytes than it takes to write and read it (`_cheaper_anew`);
* backward reads it, and it is a statistic (a number a row or block) of forward: those are small and known.

An input of a joined site that is compared with zero is read in FP8: rounding keeps its sign, so ReLU needs
nothing else for backward. (Values below 2^-18 of a row's largest become zero, as in the GEMMs.)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from loka.compiler.aten_steps import is_pointwise, operands, passes_on
from loka.compiler.nodes import BACKWARD, above, args_of, value_of
from loka.kernels.edge.program import Kind

aten = torch.ops.aten
_READ = (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.bool
)  # fmt: skip
SUMS = (aten.sum.dim_IntList, aten.mean.dim)
_COMPARISONS = (aten.le.Scalar, aten.gt.Scalar)


@dataclass(frozen=True, kw_only=True)
class Low:
    """A tensor in FP8: data float8 [T, K], scale float32 [T, 1] of its rows."""

    data: Node
    scale: Node


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """What values of a program are shaped by. `rows` may be symbolic."""

    rows: int | torch.SymInt
    features: int

    def kind(self, node: Node) -> Kind | None:
        """By the shape of its value; None for what has no place beside this matrix."""
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor) or val.dtype not in _READ:
            return None
        shape = tuple(val.shape)
        if _same(math.prod(shape), self.rows * self.features) and shape and self.block_of(shape):
            return Kind.FULL
        if all(_same(side, 1) for side in shape):
            return Kind.SCALAR
        if _same(shape[-1], self.features) and all(_same(side, 1) for side in shape[:-1]):
            return Kind.ROW
        if _same(shape[-1], 1):
            count = math.prod(shape)
            if _same(count, self.rows):
                return Kind.COLUMN
            blocks = shape[-2] if len(shape) > 1 else 0
            divides = isinstance(blocks, int) and blocks > 1 and self.features % blocks == 0
            return Kind.BLOCK if divides and _same(count, self.rows * blocks) else None
        return None

    def block_of(self, shape: Sequence[Any]) -> int:
        """Features in the last dimension of a full value: all, or a block; 0 where rows would be mixed."""
        last = shape[-1]
        if _same(last, self.features):
            return self.features
        inside = isinstance(last, int) and last > 1 and self.features % last == 0 and len(shape) > 2
        return last if inside and _same(shape[-2], self.features // last) else 0


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


@dataclass
class Cone:
    """The nodes of a program above `root`, and its leaves."""

    matrix: Matrix
    low: Mapping[Node, Low]
    inside: set[Node] = field(default_factory=set)
    leaves: dict[Node, Kind] = field(default_factory=dict)
    low_leaves: dict[Node, Node] = field(default_factory=dict)  # comparisons -> FP8 data read instead
    # Inside, and read by others, who get them from the program.
    given: list[Node] = field(default_factory=list)

    @property
    def matrices(self) -> set[Node]:
        """Full leaves, FP8 ones included."""
        return {n for n, kind in self.leaves.items() if kind is Kind.FULL} | set(self.low_leaves.values())


def cone_of(
    root: Node, matrix: Matrix, low: Mapping[Node, Low], absorbed: set[Node], *, forward: bool = False
) -> Cone:
    """The program above `root`, which is one of `matrix`.

    `absorbed`: what reads values of it and will be given them by the program itself. `forward`: statistics
    are computed, and values that others read too are given to them (`Cone.given`).
    """
    cut: set[Node] = set()
    while True:
        cone = _grow(root, matrix, low, cut, forward=forward)
        if forward:
            cone.given = sorted(n for n in cone.inside if _is_given(n, cone, absorbed))
            first = above(*cone.leaves) if cone.given else set()
            more = {n for n in cone.given if n in first}  # a leaf is computed from it
            if not more:
                return cone
            cut.add(max(more))
            continue
        own = _as_it_is(root)
        more = {n for n in cone.inside if n not in own and _better_read(n, root, cone, absorbed)}
        if not more:
            cone.given = [n for n in own if n in cone.inside and _is_given(n, cone, absorbed)]
            return cone
        cut.add(max(more))  # the nearest to the root alone: what lies above it may leave the cone by that


def _as_it_is(root: Node) -> list[Node]:
    """The root, and what it is a view or a cast of."""
    found = [root]
    while passes_on(found[-1]):
        found.append(args_of(found[-1])[0])
    return found


def _grow(
    root: Node, matrix: Matrix, low: Mapping[Node, Low], cut: set[Node], *, forward: bool = False
) -> Cone:
    cone = Cone(matrix=matrix, low=low)
    blocks: set[int] = set()  # sizes; a program has blocks of one
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in cone.inside or node in cone.leaves:
            continue
        kind = matrix.kind(node)
        if kind is None:  # only a root, or an operand of what was checked below
            raise ValueError(f"{node} has no place in a program")
        if kind is Kind.BLOCK:
            blocks.add(matrix.features // int(node.meta["val"].shape[-2]))
        if node in cut or not _computable(node, matrix, forward):
            cone.leaves[node] = kind
            continue
        cone.inside.add(node)
        if node.target in _COMPARISONS and (data := _in_low(node, low)) is not None:
            cone.low_leaves[node] = data
            continue
        waiting += [a for a in computed_from(node) if isinstance(a, Node)]
    if len(blocks) > 1 or not cone.matrices:  # nothing of what it would read is as large as what it makes
        return Cone(matrix=matrix, low=low, leaves={root: Kind.FULL})
    return cone


def computed_from(node: Node) -> list[Node | float]:
    """What a node inside of a cone is computed from."""
    if node.target in SUMS:
        return [args_of(node)[0]]
    if (made := variance_of(node)) is not None:
        return [args_of(made)[0]]
    return operands(node)


def variance_of(node: Node) -> Node | None:
    """The var_mean that this is a result of: 0 the variance, 1 the mean; None where it is no such thing."""
    made = args_of(node)[0] if node.target is operator.getitem else None
    return made if isinstance(made, Node) and made.target is aten.var_mean.correction else None


def _computable(node: Node, matrix: Matrix, forward: bool) -> bool:
    if in_backward(node) is False and not forward and matrix.kind(node) in (Kind.COLUMN, Kind.BLOCK):
        return False  # a statistic of forward
    if node.target in SUMS:
        return reduction_of(node, matrix) is not None
    if (made := variance_of(node)) is not None:
        options: dict[str, Any] = dict(made.kwargs)
        inner, dims = args_of(made)[:2]
        biased = options.get("correction", 1) == 0 and options.get("keepdim") is True
        return biased and _along(inner, dims, matrix) is not None
    if not is_pointwise(node):
        return False
    read = [a for a in operands(node) if isinstance(a, Node)]
    if any("rand" in str(a.target) for a in read):
        return False  # a mask is read as one byte, not as the random numbers that it was made of
    kinds = [matrix.kind(a) for a in read]
    if None in kinds or not read:
        return not read
    if any(value_of(a).device != value_of(node).device for a in read):
        return False  # a number on the CPU; kernels read the GPU's memory alone
    if passes_on(node):
        # A view must keep every value in its row and column.
        return kinds[0] is matrix.kind(node) or node.target is aten.expand.default
    return True


def mark_backward(graph: Graph) -> None:
    """Notes which nodes are computed from gradients that come from outside."""
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangent" in str(node.target)
        node.meta[BACKWARD] = tangent or any(in_backward(each) for each in node.all_input_nodes)


def in_backward(node: Node) -> bool:
    return bool(node.meta.get(BACKWARD, False))


def reduction_of(node: Node, matrix: Matrix) -> tuple[str, int] | None:
    """("row_sum" or "block_sum", how many features it sums over) for a sum along rows, or None."""
    keepdim = bool(args_of(node)[2]) if len(args_of(node)) > 2 else False
    return _along(args_of(node)[0], args_of(node)[1], matrix) if keepdim else None


def _along(inner: object, dims: Any, matrix: Matrix) -> tuple[str, int] | None:
    """The step that reduces a full value over its last dimension, and over how many features."""
    if not isinstance(inner, Node) or matrix.kind(inner) is not Kind.FULL:
        return None
    shape = inner.meta["val"].shape
    if dims is None or [d % len(shape) for d in dims] != [len(shape) - 1]:
        return None
    block = matrix.block_of(shape)
    return ("row_sum" if block == matrix.features else "block_sum", block)


def variance_along(made: Node, matrix: Matrix) -> tuple[str, int]:
    """As `reduction_of`, for a var_mean inside of a cone."""
    found = _along(args_of(made)[0], args_of(made)[1], matrix)
    assert found is not None
    return found


def column_sum(node: Node, matrix: Matrix) -> Node | None:
    """What a sum over all rows sums, or None."""
    if node.target is not aten.sum.dim_IntList:
        return None
    inner = args_of(node)[0]
    if not isinstance(inner, Node) or matrix.kind(inner) is not Kind.FULL:
        return None
    shape = inner.meta["val"].shape
    dims = sorted(d % len(shape) for d in args_of(node)[1] or range(len(shape)))
    if dims == list(range(len(shape) - 1)) and _same(shape[-1], matrix.features):
        return inner
    return None


def _in_low(comparison: Node, low: Mapping[Node, Low]) -> Node | None:
    """The FP8 data of the joined input that is compared with zero here, or None."""
    if args_of(comparison)[1] != 0:
        return None
    node = args_of(comparison)[0]
    while isinstance(node, Node):
        if node in low:
            return low[node].data
        if not passes_on(node):
            return None
        node = args_of(node)[0]
    return None


def _is_given(node: Node, cone: Cone, absorbed: set[Node]) -> bool:
    """Whether others read it who do better to get it than to compute it again."""
    if node.meta["val"].dtype == torch.bool:
        return False
    if all(user in cone.inside or user in absorbed for user in node.users):
        return False
    kind = cone.matrix.kind(node)
    if kind is not Kind.FULL:
        return kind in (Kind.COLUMN, Kind.BLOCK)
    needed = _matrices_above(node, cone)
    if len(needed) <= 1:
        return False
    others = {user for user in readers(node) if user not in cone.inside and user not in absorbed}
    return not _cheaper_anew(node, {user: needed - _beside(user, node) for user in others}, others)


def _better_read(node: Node, root: Node, cone: Cone, absorbed: set[Node]) -> bool:
    if cone.matrix.kind(node) is not Kind.FULL or node.meta["val"].dtype == torch.bool:
        return False
    if passes_on(node):
        return False  # its operand is asked
    needed = _matrices_above(node, cone)
    if len(needed) <= 1:
        return False
    if not in_backward(node):
        return True
    others = {user for user in readers(node) if user not in cone.inside and user not in absorbed}
    return bool(others) and not _cheaper_anew(
        node, {node: needed - _matrices_above(root, cone, node)}, others
    )


def _cheaper_anew(node: Node, more: Mapping[Node, set[Node]], others: set[Node]) -> bool:
    """Whether each of `more` does better to read its further matrices and to compute `node` from them.

    Else `node` is written once, and read by each. `others` read it besides: they can do the same where they
    are pointwise code of the same half of the graph; what forward keeps for backward has to be written.
    """
    if any(not is_pointwise(user) or in_backward(user) != in_backward(node) for user in others):
        return False
    anew = sum(_bytes(matrix) for further in more.values() for matrix in further)
    return anew < (1 + len(more)) * _bytes(node)


def _bytes(node: Node) -> int:
    return value_of(node).dtype.itemsize  # full values have one number of elements


def _beside(user: Node, node: Node) -> set[Node]:
    """What code above the other operands of `user` reads."""
    found: set[Node] = set()
    waiting, seen = [user], {node}
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if is_pointwise(current):
            waiting += [a for a in operands(current) if isinstance(a, Node)]
        else:
            found.add(current)
    return found


def readers(node: Node) -> set[Node]:
    """Who reads its values, by whatever views."""
    found: set[Node] = set()
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if passes_on(user):
            waiting += list(user.users)
        else:
            found.add(user)
    return found


def _matrices_above(node: Node, cone: Cone, without: Node | None = None) -> set[Node]:
    """The matrices that `node` is computed from, but for those of the value `without` alone."""
    found: set[Node] = set()
    waiting, seen = [node], {without}
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in cone.low_leaves:
            found.add(cone.low_leaves[current])
        elif current in cone.leaves:
            if cone.leaves[current] is Kind.FULL:
                found.add(current)
        else:
            waiting += [a for a in computed_from(current) if isinstance(a, Node)]
    return found


def extended(cone: Cone, value: Node, *, tied: bool) -> Cone | None:
    """The cone with the code above `value`, or None where that reads other matrices.

    `tied`: it must share a value with the cone, not matrices alone.
    """
    if cone.matrix.kind(value) is not Kind.FULL:
        return None
    other = _grow(value, cone.matrix, cone.low, set(cone.leaves))
    if not other.matrices <= cone.matrices or not other.matrices:
        return None
    if tied and not other.inside & cone.inside and not set(other.leaves) & set(cone.leaves):
        return None
    return Cone(
        matrix=cone.matrix,
        low=cone.low,
        inside=cone.inside | other.inside,
        leaves={**cone.leaves, **other.leaves},
        low_leaves={**cone.low_leaves, **other.low_leaves},
        given=cone.given,
    )
