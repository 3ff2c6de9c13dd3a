"""Values in 16 bits that others are compared with exactly: rounded in registers too.

Inductor leaves out a rounding to 16 bits that no memory makes, and the same value may be read rounded in one
kernel and be made anew in another. A maximum (its gradient looks for the elements that equal it) then equals
none, and is divided by their count. LoKA makes more of such values than torch's own GEMM, which writes its
bias: a bias, and scales of rows, are added and multiplied by the code behind a GEMM here.
"""

import operator

import torch
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from loka.compiler.edges.aten_steps import EXTREMES, exact, passes_on
from loka.compiler.edges.nodes import args_of, is_tensor, value_of
from loka.compiler.emit import Emitter

aten = torch.ops.aten

_IN_MEMORY = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten._scaled_mm.default, operator.getitem)
_MOVED = (
    aten.permute.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unbind.int,
)  # fmt: skip
_SIXTEEN = (torch.bfloat16, torch.float16)


def round_compared(emitter: Emitter) -> None:
    """Puts two casts between bits behind such values, which no compiler takes for nothing, and has them saved:
    made anew in backward, they would be made of statistics that were rounded since."""
    compared = [node for node in emitter.graph.nodes if node.op == "call_function" and exact(node)]
    for node in dict.fromkeys(_source(each) for one in compared for each in one.all_input_nodes):
        if not is_tensor(node) or value_of(node).dtype not in _SIXTEEN or _lies_in_memory(node):
            continue
        with emitter.like(node), emitter.graph.inserting_after(node):
            bits = emitter.call(aten.view.dtype, node, torch.int16)
        with emitter.like(node), emitter.graph.inserting_after(bits):
            rounded = emitter.call(aten.view.dtype, bits, value_of(node).dtype)
        emitter.redirect(node, rounded, besides=bits)
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def _source(node: Node) -> Node:
    """What it shows in other places, in the same dtype."""
    while node.op == "call_function" and node.args:
        read = args_of(node)[0]
        moved = node.target in _MOVED or (node.target is operator.getitem and read.target in _MOVED)
        if not moved and not (passes_on(node) and value_of(read).dtype == value_of(node).dtype):
            break
        node = read
    return node


def _lies_in_memory(node: Node) -> bool:
    """As a maximum of values that do is one of them."""
    if node.op != "call_function" or node.target in (*_IN_MEMORY, *EXTREMES):
        return True
    return "loka" in str(node.target)
