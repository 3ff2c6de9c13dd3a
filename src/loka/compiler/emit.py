"""New nodes of a joint graph, with the fake values that later stages of the compiler read."""

import heapq
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv

from loka.compiler.nodes import BACKWARD, in_backward

SIZE = torch.ops.aten.sym_size.int
VIEW = torch.ops.aten.view.default
CONVERT = torch.ops.prims.convert_element_type.default
COPY = torch.ops.aten.clone.default

# What marks a node as to be recomputed, and as forward or backward.
_INHERITED = ("recompute", "ac_graph_id", "partitioner_tag", "stack_trace", "custom", BACKWARD)


class Emitter:
    """Appends nodes to a graph. `ordered` puts them into a valid order afterwards."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._like: Node | None = None
        self._replaced: dict[Node, Node] = {}
        self._constants: dict[tuple[float, torch.device], Node] = {}
        self._copies: dict[Node, Node] = {}
        self.lying: dict[Node, Any] = {}  # what has other strides than the fake value that it stands for

    @contextmanager
    def like(self, node: Node) -> Iterator[None]:
        """Inside this context new nodes are inserted before `node`, and count as the same part of the graph (forward or
        backward).
        """
        before, self._like = self._like, node
        try:
            with self.graph.inserting_before(node):
                yield
        finally:
            self._like = before

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = fake_of(target, args, kwargs)
        if self._like is not None:
            node.meta.update({k: self._like.meta[k] for k in _INHERITED if k in self._like.meta})
        return node

    def replace(self, old: Node, new: Node) -> None:
        """From now on `new` stands for `old` in the whole graph."""
        self.redirect(old, new)
        self._replaced[old] = new
        before = self.lying.get(old, old.meta["val"])
        if strides_of(new.meta["val"]) != strides_of(before):
            self.lying[new] = before

    def redirect(self, old: Node, new: Node, besides: Node | None = None) -> None:
        """Readers of `old` read `new` from now on, except those in `besides` and those that ask for its size."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not besides and user.target is not SIZE)

    def now(self, node: Node) -> Node:
        """The node that stands today for one of the original graph."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def side(self, size: int | torch.SymInt) -> int | Node:
        """A size as an argument of a node. A symbolic size is computed from sizes of the graph's inputs: any other node
        might come to depend on the node that asks for the size. A size that depends on data is read off the first
        node that has it.
        """
        if isinstance(size, int):
            return size
        found = self._made(size.node.expr)
        found = self._sized(size.node.expr, self.graph.nodes) if found is None else found
        assert found is not None, f"no node has the size {size}"
        return found

    def _made(self, size: Any) -> int | Node | None:
        """The size computed from sizes of inputs and from integers, by sums, products and floor divisions; None where
        that is impossible.
        """
        if size.is_Integer:
            return int(size)
        found = self._sized(size, self.graph.find_nodes(op="placeholder"))
        if found is None and isinstance(size, FloorDiv):
            base, divisor = map(self._made, size.args)
            return None if base is None or divisor is None else self.call(operator.floordiv, base, divisor)
        if found is not None or not (size.is_Add or size.is_Mul or size.is_Pow):
            return found
        base, power = size.as_base_exp()
        terms = [self._made(each) for each in ([base] * int(power) if size.is_Pow else size.args)]
        whole = next(iter(terms), None)
        for term in terms[1:]:
            if whole is None or term is None:
                return None
            whole = self.call(operator.add if size.is_Add else operator.mul, whole, term)
        return whole

    def _sized(self, size: Any, nodes: Iterable[Node]) -> Node | None:
        """The first node that is this size, or has it as a side. Nodes of backward do not count, since forward may not
        wait for them.
        """
        for node in nodes:
            if in_backward(node):
                continue
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt) and val.node.expr == size:
                return node
            if isinstance(val, torch.Tensor) and node.target is not operator.getitem:
                for index, other in enumerate(val.shape):
                    if isinstance(other, torch.SymInt) and other.node.expr == size:
                        with self.graph.inserting_after(node):
                            return self.call(SIZE, node, index)
        return None

    def as_like(self, node: Node, like: Node) -> Node:
        """The node in the shape and the dtype of another one, which has as many elements."""
        value = like.meta["val"]
        found = self.call(VIEW, node, [self.side(size) for size in value.shape])
        return found if found.meta["val"].dtype == value.dtype else self.call(CONVERT, found, value.dtype)

    def item(self, node: Node, index: int) -> Node:
        return self.call(operator.getitem, node, index)

    def in_rows(self, node: Node, features: int) -> Node:
        """`node` with its memory in rows of the given length: itself, or one copy that all readers share.

        Inductor can fuse a clone into the kernel that makes a transposed tensor. It cannot see a copy that an op makes
        inside.
        """
        if is_in_rows(node.meta["val"], features):
            return node
        if node not in self._copies:
            with self.like(node):
                self._copies[node] = self.call(COPY, node, memory_format=torch.contiguous_format)
        return self._copies[node]

    def constant(self, value: float, device: torch.device) -> Node:
        """A float32 [1] with this value, one node for each value: Inductor launches a fill for each
        node that ops read.
        """
        found = self._constants.get((value, device))
        if found is None:
            found = self.call(torch.ops.aten.full.default, [1], value, dtype=torch.float32, device=device)
            self._constants[value, device] = found
        return found


def is_in_rows(value: torch.Tensor, features: int) -> bool:
    """Whether the memory of a value is rows of the given length."""
    try:
        return features == 1 or bool(statically_known_true(value.view(-1, features).stride(1) == 1))
    except (RuntimeError, ValueError):  # no view has these strides
        return False


def strides_of(value: Any) -> list[tuple[Any, ...]]:
    """The strides of each tensor in a fake value, in a form that can be compared."""
    return [tuple(map(str, leaf.stride())) for leaf in _tensors(value)]


def fake_of(target: Any, args: Any, kwargs: Any) -> Any:
    """What an op returns, as fake values, for the fake values of its arguments."""
    values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    if target is operator.getitem:
        return values[0][0][values[0][1]]
    mode = next((t.fake_mode for t in _tensors(values) if isinstance(t, FakeTensor)), None)
    if mode is None:
        return target(*values[0], **values[1])
    with mode:
        return target(*values[0], **values[1])


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def ordered(graph: Graph) -> None:
    """Moves every node behind the nodes that it reads, and changes the order no further."""
    waiting = {node: len(node.all_input_nodes) for node in graph.nodes}
    position = {node: number for number, node in enumerate(graph.nodes)}
    ready = [(position[node], node) for node, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (position[user], user))
    assert len(order) == len(position), "a joined graph has a circle"
    last = order[0]
    for node in order[1:]:
        last.append(node)
        last = node
