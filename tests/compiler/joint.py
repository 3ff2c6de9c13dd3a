"""torch.compile without code generation: the joint graph as Inductor sees it, joined, and run op by op.

It takes a second where Inductor takes ten, and runs the same graphs. Tests of Inductor itself are few.
"""

import operator

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Interpreter
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from loka.compiler.lower import join_sites

aten = torch.ops.aten
LOW = (torch.bfloat16, torch.float16)
FROM_MEMORY = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.view.dtype, aten.copy_.default}


class JointBackend:
    """A backend for torch.compile that keeps what it compiled, and the reasons of sites that were left."""

    def __init__(self, *, fused=False):
        """`fused`: values in 16 bits as kernels of Inductor have them, see `Fused`."""
        self.fused = fused
        self.graphs = []
        self.apart = {}

    def __call__(self, module, inputs):
        return aot_autograd(
            fw_compiler=self._keep,
            bw_compiler=self._keep,
            inference_compiler=self._joined,
            partition_fn=self._partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,  # as Inductor has it: buffers are updated in the graph
        )(module, inputs)

    def _partition(self, joint, inputs, **options):
        self.apart |= join_sites(joint.graph)
        joint.graph.lint()
        joint.recompile()
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def _joined(self, module, inputs):
        self.apart |= join_sites(module.graph)
        module.graph.lint()
        module.recompile()
        return self._keep(module, inputs)

    def _keep(self, module, inputs):
        self.graphs.append(module.graph)
        return make_boxed_func(Fused(module).run if self.fused else module.forward)

    def count(self, op):
        return sum(node.target is op for graph in self.graphs for node in graph.nodes)


class Fused(Interpreter):
    """What a graph makes in 16 bits stays float32 until something reads it from memory: GEMMs, LoKA's ops,
    casts between bits, the other half of the graph."""

    def run_node(self, n):
        if n.op == "output":
            return map_arg(n.args[0], self._in_memory)
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        if n.target in FROM_MEMORY or getattr(n.target, "namespace", "aten") == "loka":
            return n.target(*map_arg(n.args, self._in_memory), **map_arg(n.kwargs, self._in_memory))
        args, kwargs = map_arg((n.args, n.kwargs), self.env.get)
        return n.target(*tree_map(_wide, args), **tree_map(_wide, kwargs))

    def _in_memory(self, node):
        value, expected = self.env[node], node.meta.get("val")
        return value.to(expected.dtype) if isinstance(value, torch.Tensor) else value


def _wide(value):
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in LOW else value
    return torch.float32 if isinstance(value, torch.dtype) and value in LOW else value
