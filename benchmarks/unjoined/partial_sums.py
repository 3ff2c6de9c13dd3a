"""Sums of many GEMMs are added up by three products at a time.

The gradient of an input that many layers read, such as experts, is the sum of as many GEMMs. In bf16 each adds to what
those before it have written (`addmm`). torch's FP8 GEMM cannot, and Inductor adds all products in one kernel, until
which they lie there at once: by Inductor's own estimate eight experts had 1.4 times the memory of bf16's backward.
It would fuse kernels of its own that add some of them, too, so ours do it. A partial sum is as many bytes as a product,
written and read once more.
"""

import math

import torch
from torch.fx import Node

from loka.compiler.edges.aten_steps import passes_on
from loka.compiler.edges.cones import cone_of
from loka.compiler.edges.matrix import Matrix
from loka.compiler.edges.traffic import readers
from loka.compiler.edges.writer import Writer
from loka.compiler.emit import Emitter
from loka.compiler.gemms import region_gemm
from loka.compiler.nodes import args_of, in_backward, is_tensor, value_of
from loka.kernels.edge.program import VALUE_DTYPES, Kind
from loka.core.problem import dtype_name

aten = torch.ops.aten

_AT_ONCE = 3  # products that lie there beside a partial sum
_FEW = _AT_ONCE + 1  # need no partial sum to lie there


def add_in_parts(emitter: Emitter) -> None:
    """Emits edges that add up every third product of such sums of backward."""
    sums = [node for node in emitter.graph.nodes if _is_sum(node)]
    above = {node: _only_sum_that_reads(node) for node in sums}
    whole: dict[Node, int] = {}  # products of the sum that a sum is a part of
    for node in reversed(sums):
        reader = above[node]
        whole[node] = whole[reader] if reader in whole else _products(node, above)
    waiting: dict[Node, int] = {}  # products in no partial sum yet
    for node in sums:
        parts = _terms(node)
        waiting[node] = sum(waiting.get(each, 0) if _is_sum(each) else _is_product(each) for each in parts)
        inner = above[node] is not None
        if inner and whole[node] > _FEW and waiting[node] >= _AT_ONCE and _add_up(emitter, node):
            waiting[node] = 0


def _add_up(emitter: Emitter, node: Node) -> bool:
    """Emits an edge that computes a sum; False where none can."""
    value = value_of(node)
    matrix = Matrix(rows=math.prod(value.shape[:-1]), features=value.shape[-1])
    if type(matrix.features) is not int or matrix.kind(node) is not Kind.FULL:
        return False
    cone = cone_of(node, matrix, {}, set())
    if node not in cone.inside or dtype_name(value.dtype) not in VALUE_DTYPES:
        return False
    cone.given = [node]
    with emitter.like(node):
        writer = Writer(cone, {})
        writer.run(emitter, writer.program(), matrix.rows)
    return True


def _is_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and in_backward(node) and is_tensor(node)


def _only_sum_that_reads(node: Node) -> Node | None:
    """The sum that a sum is a part of, where nothing else reads it."""
    (reader, *others) = (*readers(node), None)
    return reader if reader is not None and others == [None] and _is_sum(reader) else None


def _terms(node: Node) -> list[Node]:
    """What a sum adds, behind views and casts."""
    found = []
    for each in node.all_input_nodes:
        while passes_on(each):
            each = args_of(each)[0]
        found.append(each)
    return found


def _products(node: Node, above: dict[Node, Node | None]) -> int:
    return sum(_products(each, above) if above.get(each) is node else _is_product(each) for each in _terms(node))


def _is_product(node: Node) -> bool:
    """Whether a term is a GEMM of a region, times the scales of its rows or not."""
    while passes_on(node) or node.target is aten.mul.Tensor:
        node = args_of(node)[0]
        if not isinstance(node, Node):
            return False
    return node.target is region_gemm
