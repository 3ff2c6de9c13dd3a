"""Regions in a file that runs without LoKA: each of its ops becomes what that op does.

loka::edge(leaves, ...)    on a GPU: memory, and the launch of a Triton kernel, which AOTInductor compiles into
                           the file; elsewhere the twin's aten ops
loka::region_gemm          aten._scaled_mm, or what emulates it
loka::note_sites           nothing: no one asks such a file what ran
"""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten

from loka.compiler.emit import VIEW, Emitter
from loka.compiler.gemms import TOKEN, operands_recipe, region_gemm
from loka.compiler.joint_pass import RegionPass
from loka.compiler.nodes import WRITTEN, args_of, is_tensor, value_of
from loka.compiler.normed import normed_gemm
from loka.core.exceptions import LokaError
from loka.core.numerics.reference import Quantized
from loka.core.recipe import RECIPES, Gemm
from loka.kernels.custom_op import implementation_of
from loka.kernels.gemm.aten import aten_gemm
from loka.kernels.triton.launch import traced_launches
from loka.nn.site_ops import site_forward

aten = torch.ops.aten

_STORED = torch.ops.prims.inductor_force_stride_order.default


class PackagePass(CustomGraphPass):
    """Joins sites after `before`, the pass that was configured already, and replaces the ops of LoKA."""

    def __init__(self, before: Any) -> None:
        self._regions = RegionPass(before.before if isinstance(before, RegionPass) else before, search=False)

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
            graph.erase_node(node)  # of torch.export: what it looks at would have to lie in memory
        for node in graph.find_nodes(op="get_attr"):  # the model's parameters and buffers are such here
            node.meta[WRITTEN] = True
        self._regions(graph)
        write_out(graph)

    def uuid(self) -> Any | None:
        theirs = self._regions.uuid()
        return None if theirs is None else ("package", theirs)


def write_out(graph: Graph) -> None:
    """Replaces each op of LoKA by what it does, in a graph without backward.

    Raises LokaError for a site in no region: what it launches can only run from Python.
    """
    apart = [str(args_of(node)[3]) for node in graph.nodes if node.target is site_forward]
    if apart:
        raise LokaError(
            "sites run by themselves where they are to be written into a file",
            why=apart,
            way_out="freeze with graphs=False",
        )
    for target in (region_gemm, normed_gemm):
        for node in graph.find_nodes(op="call_function", target=target):
            node.update_arg(TOKEN, None)
    emitter = Emitter(graph)
    graph.eliminate_dead_code()
    _store_constants(emitter)
    for node in list(graph.nodes):
        if getattr(node.target, "namespace", None) == "loka":
            for read in node.all_input_nodes:
                _store_before_view(emitter, node, read)
            _inline(emitter, node)
    graph.eliminate_dead_code()


def _store_constants(emitter: Emitter) -> None:
    """Has the scale of GEMMs whose rows are scaled by readers filled once: Inductor would fill one for each GEMM, which
    took 1 to 2 us of some 15. It has two elements, because Inductor writes no single ones on demand.
    """
    for node in emitter.graph.find_nodes(op="call_function", target=aten.full.default):
        if value_of(node).shape == (1,):
            with emitter.like(node):
                both = emitter.call(aten.full.default, [2], *args_of(node)[1:], **node.kwargs)
                one = emitter.call(aten.slice.Tensor, emitter.call(_STORED, both, [1]), 0, 0, 1)
            emitter.redirect(node, one)


def _store_before_view(emitter: Emitter, reader: Node, read: Node) -> None:
    """Has a value that `reader` reads in another shape, by a view or by itself, written in its own, once. Inductor
    would write it in the loops of the view: a norm over the last side of [B, n, d], read as [B, n d], is then computed
    by one kernel and applied by another, which took 1.6 ms instead of 0.3 in Wukong. And it would write it for each
    argument of a kernel that it is: 36 times, 0.54 ms for 0.05, a concatenation that three cross layers read.
    """
    shown, viewer = (args_of(read)[0], read) if read.target is VIEW else (read, reader)
    if shown.op in ("placeholder", "get_attr") or not is_tensor(shown) or not value_of(shown).is_contiguous():
        return
    value = value_of(shown)
    if (viewer is read or value.dim() > 2) and all(type(stride) is int for stride in value.stride()):
        stored = next((user for user in shown.users if user.target is _STORED), None)  # each would be a copy
        if stored is None:
            with emitter.graph.inserting_after(shown):
                stored = emitter.call(_STORED, shown, list(value.stride()))
        viewer.replace_input_with(shown, stored)


def _inline(emitter: Emitter, node: Node) -> None:
    flat, form = tree_flatten((args_of(node), dict(node.kwargs)))
    read = [each for each in flat if isinstance(each, Node)]
    function = _gemm if node.target is region_gemm else implementation_of(node.target)

    def called(*values: Any) -> Any:
        given = iter(values)
        args, kwargs = tree_unflatten([next(given) if isinstance(each, Node) else each for each in flat], form)
        return function(*args, **kwargs)

    values = [each.meta["val"] for each in read]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    with mode, traced_launches():
        pure = torch.func.functionalize(called, remove="mutations")
        traced = make_fx(pure, decomposition_table=select_decomp_table())(*values).graph
    known: dict[Node, Node] = dict(zip(traced.find_nodes(op="placeholder"), read, strict=True))
    with emitter.like(node):
        for each in traced.nodes:
            if each.op not in ("placeholder", "output"):
                known[each] = emitter.graph.node_copy(each, known.__getitem__)
    made: Any = map_arg(traced.output_node().args[0], known.__getitem__)
    if isinstance(made, Node):
        node.replace_all_uses_with(made)
        return
    for user in list(node.users):
        user.replace_all_uses_with(made[int(args_of(user)[1])])


def _gemm(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, *rest: Any) -> torch.Tensor:
    """What the op in gemms.py computes, for operands that are already padded."""
    *_, kernel, _, columns, dtype = rest
    recipe = operands_recipe(a, a_scale)
    casts = RECIPES[recipe].casts(Gemm.OUTPUT)
    assert casts is not None
    weight = b_scale.narrow(0, 0, 1 if recipe == "tensorwise_e4m3" else columns).view(-1, 1)
    return aten_gemm(kernel, Quantized(a, a_scale.view(-1, 1), casts[0]), Quantized(b, weight, casts[1]), dtype)
