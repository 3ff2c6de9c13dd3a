"""Values that others are compared with exactly are written to memory once, and read from there.

Inductor drops a rounding to 16 bits that no memory needs, and computes a value a second time in another kernel, from
operands that memory has rounded since; it does so with float32 values too. A maximum then equals none of the elements
that it is the maximum of, and its gradient, which looks for these elements, is divided by their count. With torch alone
this happens behind norms and activations. With LoKA it would also happen behind layers with a bias: torch's GEMM writes
the sum with the bias to memory, and here code behind the GEMM adds the bias.
"""

import operator

import torch
from torch.fx import Node

from loka.compiler.edges.aten_steps import EXTREMES, exact, passes_on
from loka.compiler.emit import Emitter
from loka.compiler.nodes import CUTS, args_of, is_tensor, lies_in_memory, value_of
from loka.kernels.custom_op import registered

aten = torch.ops.aten

_MOVED = (aten.permute.default, *CUTS)
_SIGNS = (aten.abs.default, aten.neg.default)  # a norm's gradient makes |x| anew


def _kept(x: torch.Tensor) -> torch.Tensor:
    """A copy of the value, which no compiler can compute a second time from something else."""
    return x.clone()


kept = registered("loka::kept", _kept, lambda x: torch.empty_like(x))


def keep_compared(emitter: Emitter) -> None:
    """Inserts the op behind each such value. It costs one copy of each."""
    compared = [node for node in emitter.graph.nodes if node.op == "call_function" and exact(node)]
    for node in dict.fromkeys(_source(each) for one in compared for each in one.all_input_nodes):
        if not is_tensor(node) or not value_of(node).is_floating_point() or _is_exact_in_memory(node):
            continue
        with emitter.like(node), emitter.graph.inserting_after(node):
            copy = emitter.call(kept, node)
        emitter.redirect(node, copy, besides=copy)


def _source(node: Node) -> Node:
    """The node whose values `node` shows in other places or under other signs, in the same dtype."""
    while node.op == "call_function" and node.args:
        read = args_of(node)[0]
        moved = node.target in (*_MOVED, *_SIGNS) or (node.target is operator.getitem and read.target in _MOVED)
        if not moved and not (passes_on(node) and value_of(read).dtype == value_of(node).dtype):
            break
        node = read
    return node


def _is_exact_in_memory(node: Node) -> bool:
    """Whether the value is in memory as it is; a maximum of such values is one of them."""
    return node.target in EXTREMES or lies_in_memory(node)
