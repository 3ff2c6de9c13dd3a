"""The strides of nodes that follow a rewritten node, whose numbers are the same as before in another layout.

Nodes that only compute take the new layout over. Nodes that look at memory get the layout that was there before:
outputs of forward, whose views AOTAutograd and the caller take by their strides, custom ops, and ops that read a tensor
as another one.
"""

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from loka.compiler.emit import COPY, VIEW, Emitter, fake_of, strides_of
from loka.compiler.nodes import in_backward, is_alias, is_tensor, value_of

aten = torch.ops.aten

_BY_MEMORY = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
    aten.view.dtype,
    aten.view_as_complex.default,
    aten.sym_stride.int,
    aten.sym_storage_offset.default,
)
_OWN = ("aten", "prims", "loka")  # namespaces, of whose ops all but these take any strides


def settle(emitter: Emitter) -> None:
    """Computes the fake values anew, in order, behind nodes whose strides have changed. Where something looks at
    memory, a copy in the old layout is put before it. A view that the new strides do not allow reads a copy.
    """
    changed: set[Node] = set()
    for node in list(emitter.graph.nodes):
        before = emitter.lying.get(node, node.meta.get("val"))
        if node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
            if not _is_fixed(node):
                node.meta["val"] = _anew(emitter, node)
        elif node not in emitter.lying:
            continue
        if strides_of(node.meta["val"]) == strides_of(before):
            continue
        back = _as_before(emitter, node, before) if is_looked_at(node) else None
        if back is None:
            changed.add(node)
        elif strides_of(back.meta["val"]) != strides_of(before):  # what was there lay with gaps
            changed.add(back)


def hold(graph: Graph) -> None:
    """Has Inductor lay what LoKA's ops read as its fake value lies.

    For ops that a pass puts into a graph it lays tensors as it likes, a clone too, unless their nodes say what eager
    code would have given them. An op would copy what does not suit it, and no kernel of Inductor's could write that
    copy in its own place.
    """
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "loka":
            node.meta["eager_input_vals"] = map_arg((node.args, node.kwargs), value_of)


def is_looked_at(node: Node) -> bool:
    """Whether something reads the memory of a node, or of its views, by strides."""
    for user in node.users:
        if user.op == "output":
            if not in_backward(node):
                return True
        elif _reads_memory(user) or (is_alias(user) and is_looked_at(user)):
            return True
    return False


def _reads_memory(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or _is_fixed(node):  # Python's operators are of sizes and of tuples
        return _is_fixed(node)
    return target in _BY_MEMORY or target.namespace not in _OWN


def _is_fixed(node: Node) -> bool:
    """Whether the fake value of a node must not be computed a second time. That holds for graphs inside of the graph,
    and for sizes that only data tells, which would get new symbols.
    """
    return isinstance(node.target, HigherOrderOperator) or bool(node.meta.get("unbacked_bindings"))


def _anew(emitter: Emitter, node: Node) -> Any:
    try:
        return fake_of(node.target, node.args, node.kwargs)
    except (RuntimeError, ValueError):
        if node.target is not VIEW:
            raise
    with emitter.like(node):
        copy = emitter.call(COPY, node.args[0], memory_format=torch.contiguous_format)
    node.update_arg(0, copy)
    return fake_of(node.target, node.args, node.kwargs)


def _as_before(emitter: Emitter, node: Node, before: Any) -> Node | None:
    """Has all readers read `node` in the layout of the fake tensor `before`, which is dense and without overlap. None
    where its strides are not known.
    """
    strides = [_hint(stride) for stride in before.stride()] if isinstance(before, torch.Tensor) else []
    if not is_tensor(node) or value_of(node).dim() != len(strides) or None in strides:
        return None
    order = sorted(range(len(strides)), key=lambda side: strides[side], reverse=True)
    with emitter.like(node):
        across = _behind(emitter, node, aten.permute.default, node, order)
        copy = _behind(emitter, across, COPY, across, memory_format=torch.contiguous_format)
        back = _behind(emitter, copy, aten.permute.default, copy, [order.index(side) for side in range(len(order))])
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not across)
    return back


def _behind(emitter: Emitter, place: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    with emitter.graph.inserting_after(place):
        return emitter.call(target, *args, **kwargs)


def _hint(stride: int | torch.SymInt) -> Any:
    return stride if isinstance(stride, int) else stride.node.hint
