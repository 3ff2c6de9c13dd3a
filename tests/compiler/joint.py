"""torch.compile without code generation: the joint graph as Inductor sees it, joined, and run op by op.

It takes a second where Inductor takes ten, and runs the same graphs. Tests of Inductor itself are few.
"""

from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from loka.compiler.lower import join_sites


class JointBackend:
    """A backend for torch.compile that keeps what it compiled, and the reasons of sites that were left."""

    def __init__(self):
        self.graphs = []
        self.apart = {}

    def __call__(self, module, inputs):
        return aot_autograd(
            fw_compiler=self._keep,
            bw_compiler=self._keep,
            inference_compiler=self._joined,
            partition_fn=self._partition,
            decompositions=select_decomp_table(),
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
        return make_boxed_func(module.forward)

    def count(self, op):
        return sum(node.target is op for graph in self.graphs for node in graph.nodes)
