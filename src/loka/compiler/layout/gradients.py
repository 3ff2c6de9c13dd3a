"""Gradients of inputs that are cut out of a larger matrix, as those of embeddings are that a model concatenates.

Autograd keeps the gradient of a leaf without gaps. One that lies with gaps it copies, by a kernel of its own (65 us for
[8192, 26, 128] in bf16 on an H200). Inductor's kernel that makes the matrix can as well write each piece by itself.
"""

import operator

import torch
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch.fx import Node

from loka.compiler.emit import COPY, Emitter
from loka.compiler.nodes import BACKWARD, CUTS, args_of, in_backward, is_tensor, value_of

aten, prims = torch.ops.aten, torch.ops.prims

_VIEWS = (aten.view.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)


def close_gaps(emitter: Emitter) -> None:
    """Has gradients that are cut out of what one kernel computes leave the graph as tensors without gaps."""
    output = emitter.graph.output_node()
    for node in output.all_input_nodes:
        if in_backward(node) and is_tensor(node) and _is_cut(node) and not is_contiguous_or_false(value_of(node)):
            with emitter.graph.inserting_before(output):
                copy = emitter.call(COPY, node, memory_format=torch.contiguous_format)
            copy.meta[BACKWARD] = True
            output.replace_input_with(node, copy)


def _is_cut(node: Node) -> bool:
    """Whether a node is a piece of what a pointwise op computes."""
    cut = False
    while node.target in (*CUTS, *_VIEWS, operator.getitem):
        cut |= node.target in CUTS
        node = args_of(node)[0]
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return cut and (torch.Tag.pointwise in tags or node.target is prims.convert_element_type.default)
