"""Reads nodes of a graph."""

import operator
from collections.abc import Container
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

aten = torch.ops.aten

BACKWARD = "loka_backward"
"""In the meta of a node that is computed from gradients which come from outside."""

MADE = "loka_made"
"""In the meta of a number of rows that plain ops make for a site: programs read it, and do not compute it anew."""

CAST = "loka_cast"
"""In the meta of the first of the plain ops that quantize an input: the FP8 data and its scale, which they make."""

RELU = "loka_relu"
"""In the meta of a comparison with zero that asks where a ReLU let its input through."""

WRITTEN = "loka_written"
"""In the meta of a constant of the graph that goes into a file together with LoKA's ops, written out."""


_BY_INDUCTOR = ("aten", "prims", "quantized_decomposed")
"""Namespaces of ops for which Inductor writes kernels, and fuses them."""

CUTS = (
    aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
)  # fmt: skip
"""Ops whose results are pieces of a tensor, in its memory."""

_WRITTEN_BY_OTHERS = (
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten._scaled_mm.default, operator.getitem,
)  # fmt: skip


def args_of(node: Node) -> tuple[Any, ...]:
    """The arguments of a node, typed as anything: torch.fx says no more about them."""
    return node.args


def value_of(node: Node) -> torch.Tensor:
    """The fake tensor that stands for the result of a node."""
    value: torch.Tensor = node.meta["val"]
    return value


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def lies_in_memory(node: Node) -> bool:
    """Whether a value is in memory anyway: what comes from outside, or is written by a kernel that Inductor does not
    make.
    """
    target = node.target
    if node.op != "call_function" or target in _WRITTEN_BY_OTHERS:
        return True
    return isinstance(target, OpOverload) and target.namespace not in _BY_INDUCTOR


def is_alias(node: Node) -> bool:
    """Whether a node shows the memory of its first operand, as a view or as one of its results."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    if node.target is aten._unsafe_view.default:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in node.target._schema.returns)


def item_of(node: Node, target: object) -> Node | None:
    """The op of `target` with several results of which `node` is one; None for other nodes."""
    made = args_of(node)[0] if node.target is operator.getitem else None
    return made if isinstance(made, Node) and made.target is target else None


def above(*nodes: Node, within: Container[Node] | None = None) -> set[Node]:
    """All nodes that the given ones are computed from, directly or not; within `within`, where that is given."""
    found: set[Node] = set()
    waiting = [read for node in nodes for read in node.all_input_nodes]
    while waiting:
        current = waiting.pop()
        if current not in found and (within is None or current in within):
            found.add(current)
            waiting += current.all_input_nodes
    return found


def mark_backward(graph: Graph) -> None:
    """Marks the nodes that are computed from gradients which come from outside of the graph."""
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangent" in str(node.target)
        node.meta[BACKWARD] = tangent or any(in_backward(each) for each in node.all_input_nodes)


def in_backward(node: Node) -> bool:
    return bool(node.meta.get(BACKWARD, False))
