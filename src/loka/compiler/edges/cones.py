"""Programs from a joint graph: the code above a value, down to what has to be read from memory.

A node is part of a program where a program can compute it and nothing speaks for reading it instead. It is
read, a leaf, where

* no step of a program computes it, or its shape or dtype is none of a program's;
* backward reads it, and forward made it from more than one matrix: reading it is cheaper than reading those,
  and backward keeps it instead of them;
* something else needs it in memory, and it takes more than one matrix to compute; but the value that a
  program is about is computed, and given to who else reads it. Nobody needs it in memory where all its
  readers can compute it anew from fewer bytes than it takes to write and read it (`traffic`);
* backward reads it, and it is a statistic (a number a row or block) of forward: those are small and known.

ReLU's result, where it is the input of a joined site, is compared with zero in FP8: rounding keeps its sign, so
ReLU needs nothing else for backward. (Values below 2^-18 of a row's largest become zero, as in the GEMMs.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from loka.compiler.edges.aten_steps import (
    SUMS,
    computed_from,
    exact,
    is_pointwise,
    made_by,
    operands,
    passes_on,
    variance_of,
)
from loka.compiler.edges.matrix import Cone, Low, Matrix, same
from loka.compiler.edges.traffic import better_read, is_given
from loka.compiler.nodes import MADE, RELU, WRITTEN, above, args_of, in_backward, value_of
from loka.kernels.edge.program import Kind

aten = torch.ops.aten
COMPARISONS = (aten.le.Scalar, aten.gt.Scalar)


def cone_of(root: Node, matrix: Matrix, low: Mapping[Node, Low], absorbed: set[Node], *, forward: bool = False) -> Cone:
    """The program above `root`, which has the shape of `matrix`.

    `absorbed`: nodes that read values of the program and will get them from it. With `forward` statistics are computed
    rather than read, and values that other nodes read too are handed to them (`Cone.given`).
    """
    cut: set[Node] = set()
    while True:
        cone = _grow(root, matrix, low, cut, forward=forward)
        assert cone is not None  # it may read any matrix
        if forward:
            for node in sorted(cone.inside):
                if is_given(node, cone, absorbed, cone.given):
                    cone.given.append(node)
            first = above(*cone.leaves) if cone.given else set()
            more = {n for n in cone.given if n in first}  # a leaf is computed from it
            if not more:
                return cone
            cut.add(max(more))
            continue
        own = _as_it_is(root)
        more = {n for n in cone.inside if n not in own and better_read(n, root, cone, absorbed)}
        if not more:
            cone.given = [n for n in own if n in cone.inside and is_given(n, cone, absorbed)]
            return cone
        cut.add(max(more))  # the nearest to the root alone: what lies above it may leave the cone by that


def _as_it_is(root: Node) -> list[Node]:
    """The root, and the nodes that it is a view or a cast of."""
    found = [root]
    while passes_on(found[-1]):
        found.append(args_of(found[-1])[0])
    return found


def _grow(
    root: Node,
    matrix: Matrix,
    low: Mapping[Node, Low],
    cut: set[Node],
    *,
    forward: bool = False,
    read: set[Node] | None = None,
) -> Cone | None:
    """The code above `root` down to the nodes of `cut` and to what no program computes. None as soon as it reads
    another matrix than those of `read`: above a node of a deep model all its layers may lie.
    """
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
            if read is not None and kind is Kind.FULL and node not in read:
                return None
            cone.leaves[node] = kind
            continue
        cone.inside.add(node)
        if node.target in COMPARISONS and (data := _in_low(node, low)) is not None:
            if read is not None and data not in read:
                return None
            cone.low_leaves[node] = data
            continue
        waiting += [a for a in computed_from(node) if isinstance(a, Node)]
    if len(blocks) > 1 or not cone.matrices:  # nothing of what it would read is as large as what it makes
        return Cone(matrix=matrix, low=low, leaves={root: Kind.FULL})
    return cone


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
    if not is_pointwise(node) or exact(node) or node.meta.get(MADE):
        return False
    read = [a for a in operands(node) if isinstance(a, Node)]
    if any("rand" in str(a.target) for a in read):
        return False  # a mask is read as one byte, not as the random numbers that it was made of
    if any(a.op == "get_attr" and not a.meta.get(WRITTEN) for a in read):
        return False  # a constant of the graph is a real tensor, which ops of ours do not take among fake ones
    kinds = [matrix.kind(a) for a in read]
    if None in kinds or not read:
        return not read
    if any(value_of(a).device != value_of(node).device for a in read):
        return False  # a number on the CPU; kernels read the GPU's memory alone
    if passes_on(node) and node.target is not aten.expand.default:
        return kinds[0] is matrix.kind(node)  # a view must keep every value in its row and column
    statistics = [a for a, kind in zip(read, kinds, strict=True) if kind in (Kind.COLUMN, Kind.BLOCK)]
    return all(_along_features(value_of(a).shape, value_of(node).shape) for a in statistics)


def _along_features(read: Sequence[Any], made: Sequence[Any]) -> bool:
    """Whether broadcasting repeats a number a row or block along features alone. A number a block for all rows
    has the shape of a number a row, where there are as many rows as blocks."""
    wide = [1] * (len(made) - len(read)) + list(read)
    kept = next((index for index in reversed(range(len(wide))) if not same(wide[index], 1)), -1) + 1
    return all(map(same, wide[:kept], made))


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
    """What a sum over all rows adds up, or None for another node."""
    if node.target is not aten.sum.dim_IntList:
        return None
    inner = args_of(node)[0]
    if not isinstance(inner, Node) or matrix.kind(inner) is not Kind.FULL:
        return None
    shape = inner.meta["val"].shape
    dims = sorted(d % len(shape) for d in args_of(node)[1] or range(len(shape)))
    if dims == list(range(len(shape) - 1)) and same(shape[-1], matrix.features):
        return inner
    return None


def mark_masks(graph: Graph) -> None:
    """Marks the masks of ReLU's backward, while nodes still stand for what the model computes. Those of leaky ReLU, ELU
    or a threshold choose between two gradients: numbers that e4m3 takes for zero would get the wrong one.
    """
    for node in graph.nodes:
        if node.target in COMPARISONS and args_of(node)[1] == 0:
            node.meta[RELU] = made_by(args_of(node)[0]).target is aten.relu.default


def _in_low(comparison: Node, low: Mapping[Node, Low]) -> Node | None:
    """The FP8 data of the joined input that is compared with zero here; None if there is no such input.

    A mask that forward reads is not ReLU's own: what it let through has a gradient, however small the input is.
    """
    if not comparison.meta.get(RELU) or not all(map(in_backward, comparison.users)):
        return None
    node = args_of(comparison)[0]
    while isinstance(node, Node):
        if node in low:
            return low[node].data
        if not passes_on(node) or node.target is aten.expand.default:  # which has other rows
            return None
        node = args_of(node)[0]
    return None


def extended(cone: Cone, value: Node, *, tied: bool) -> Cone | None:
    """The cone together with the code above `value`, or None where that code reads other matrices than the cone does.

    `tied`: the two must share a computed value, not only a matrix that both read.
    """
    if cone.matrix.kind(value) is not Kind.FULL:
        return None
    other = _grow(value, cone.matrix, cone.low, set(cone.leaves), read=cone.matrices)
    if other is None or not other.matrices <= cone.matrices or not other.matrices:
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
