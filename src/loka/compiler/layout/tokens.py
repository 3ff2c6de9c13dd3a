"""GEMMs over the middle side of [B, n, d], as batched GEMMs of what lies there.

A layer over tokens, as Wukong's or an MLP-Mixer's, is a linear layer on X^T. The compiler copies X into rows
for it, once for each direction, and readers of its result take them across; without gradients it copies nothing,
and readers still do:

    mm(rows of X^T, W^T)              -> bmm(W, X), transposed         [B d, n] [n, m]
    addmm(b, rows of X^T, W^T)        -> b is added behind it
    bmm(X^T, W^T for each of B)       -> the same, where readers take it across
    mm((rows of dY^T)^T, rows of X^T) -> sum over B of bmm(dY, X^T)    [m, B d] [B d, n]

cuBLAS takes either operand of a batched GEMM transposed, and one W for all of the batch, so that nothing is
copied; layers of one X become one GEMM. Products and sums are those of before, in another order; a bias is added
to what was rounded to the model's precision, and of a weight's gradient each row of the batch is rounded so before
the rows are added in float32. What is an FP8 site by plan stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from loka.compiler.edges.matrix import same
from loka.compiler.emit import Emitter
from loka.compiler.layout.strides import is_looked_at
from loka.compiler.nodes import args_of, in_backward, is_tensor, value_of
from loka.core.problem import FLOATS
from loka.graph.gemm_calls import lies_across

aten, prims = torch.ops.aten, torch.ops.prims

_GEMMS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_CONVERT = prims.convert_element_type.default
_COLUMNS = 32  # d, below which GEMMs of a row of the batch each leave most of their tiles empty
_ALIGNED = 8  # elements: cuBLAS' fast kernels ask for rows of 16 bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class _Product:
    """x^T w + bias for each of a batch, by `x` [B, n, d] and `w` [n, m]; what reads it goes through `views` [B, d, m].

    Where it does not gain it changes nothing, and may lie as the others of its x do.
    """

    node: Node
    x: Node
    w: Node
    bias: Node | None  # [m]
    views: list[Node]
    gains: bool


def keep_tokens(emitter: Emitter) -> None:
    """Rewrites the graph's GEMMs over tokens in place, but for those whose result is looked at as memory."""
    found = [n for n in emitter.graph.nodes if n.target in _GEMMS and value_of(n).dtype in FLOATS]
    as_they_lie: dict[tuple[Node, torch.dtype], Node] = {}
    products: list[_Product] = []
    for node in found:
        product = _product(emitter, node, as_they_lie)
        if product is not None:
            products.append(product)
        elif node.target is aten.mm.default:
            _weight_gradient(emitter, node, as_they_lie)
    stacks: dict[tuple[Node, bool], list[_Product]] = {}
    for product in products:
        key = product.x if _is_given(product.w) else product.node
        stacks.setdefault((key, in_backward(product.node)), []).append(product)
    for stack in stacks.values():
        if any(product.gains for product in stack):
            _multiply(emitter, stack)


def _product(emitter: Emitter, node: Node, as_they_lie: dict[tuple[Node, torch.dtype], Node]) -> _Product | None:
    """The product of a GEMM of forward, or of one for dx: where it would copy X into rows, or copy its result across,
    or may lie either way.
    """
    found = _operands(node)
    if found is None or value_of(found[0]).shape[1] < _COLUMNS:
        return None
    x, w, bias = found
    views = _views(node, (value_of(x).shape[1], value_of(w).shape[1]))
    if not views:
        return None
    if any(is_looked_at(each) for view in views for each in _passed(view)):
        return None
    across = [user for view in views for user in _readers(view)]
    # A GEMM reads either way; what else reads the transpose would take it across.
    taken = all(map(_is_transpose, across)) and any(
        reader.target is not aten.bmm.default and not _is_transpose(reader) for user in across for reader in user.users
    )
    copied = node.target is not aten.bmm.default and lies_across(value_of(x))
    free = node.target is aten.bmm.default and all(_is_transpose(u) or u.target is aten.bmm.default for u in across)
    if not (copied or taken or free):
        return None
    with emitter.like(node):
        x = _as_it_lies(emitter, x, as_they_lie)
        return _Product(node=node, x=x, w=w, bias=bias, views=views, gains=copied or taken)


def _operands(node: Node) -> tuple[Node, Node, Node | None] | None:
    """x as [B, d, n], w as [n, m], and the bias [m] that is added; None where the GEMM is none over tokens."""
    bias = None
    if node.target is aten.bmm.default:
        left, every = (_unchanged(each) for each in args_of(node))
        right = args_of(every)[0] if every.target is aten.expand.default else every
        known = all(isinstance(side, int) for each in (left, every) for side in value_of(each).shape[1:])
        whole = known and _same(value_of(right).shape, value_of(every).shape[1:])  # not spread over n or m besides
        x = left if whole and lies_across(value_of(left)) else None
    else:
        left, right = args_of(node)[-2:]
        x = _uncollapsed(left)
        if node.target is aten.addmm.default:
            bias = args_of(node)[0]
            x = x if not node.kwargs and value_of(bias).dim() == 1 else None
    return None if x is None else (x, right, bias)


def _views(node: Node, sides: tuple[Any, ...]) -> list[Node]:
    """The views of a product as [B, *sides] through which all its readers read it; empty where some do not."""
    if node.target is aten.bmm.default and not any(_is_view(user, sides) for user in node.users):
        return [node]
    found = list(node.users)
    return found if all(_is_view(view, sides) for view in found) else []


def _unchanged(node: Node) -> Node:
    """The node above views and expansions that left its shape as it was."""
    while node.target in (*_VIEWS, aten.expand.default):
        source = args_of(node)[0]
        if not _same(value_of(source).shape, value_of(node).shape):
            break
        node = source
    return node


def _multiply(emitter: Emitter, products: list[_Product]) -> None:
    """y [B, m, d] = w^T [m, n] @ x [B, n, d], with the rows of all weights below each other."""
    x = emitter.now(products[0].x)
    with emitter.like(products[0].node):
        weights = [emitter.call(aten.permute.default, product.w, [1, 0]) for product in products]
        w = weights[0] if len(weights) == 1 else emitter.call(aten.cat.default, weights, 0)
        if value_of(w).shape[1] % _ALIGNED:
            column = emitter.call(aten.permute.default, w, [1, 0])
            column = emitter.call(aten.clone.default, column, memory_format=torch.contiguous_format)
            w = emitter.call(aten.permute.default, column, [1, 0])
        batch = emitter.side(value_of(x).shape[0])
        every = emitter.call(aten.expand.default, w, [batch, *value_of(w).shape])
        y = emitter.call(aten.bmm.default, every, x)
        first = 0
        for product, weight in zip(products, weights, strict=True):
            last = first + value_of(weight).shape[0]
            part = y if len(products) == 1 else emitter.call(aten.slice.Tensor, y, 1, first, last)
            if product.bias is not None:
                part = _plus(emitter, part, product.bias)
            _give(emitter, product, part)
            first = last


def _give(emitter: Emitter, product: _Product, y: Node) -> None:
    """Puts `y` [B, m, d] in the place of the product: as it lies for some readers, transposed for those that read it
    so.
    """
    back = emitter.call(aten.permute.default, y, [0, 2, 1])
    lying = dict.fromkeys(product.views, y)
    for view in product.views:
        for user in _readers(view):
            if _is_transpose(user):
                emitter.replace(user, _lying(emitter, args_of(user)[0], lying))
        emitter.replace(view, back)


def _lying(emitter: Emitter, node: Node, lying: dict[Node, Node]) -> Node:
    """The cast, or the sum with a bias, of what lies there; `lying` holds the nodes that were made so far."""
    if node not in lying:
        if node.target is _CONVERT:
            source, dtype = args_of(node)
            lying[node] = emitter.call(_CONVERT, _lying(emitter, source, lying), dtype)
        else:
            source, bias = _sum_with_bias(node)
            lying[node] = _plus(emitter, _lying(emitter, source, lying), bias)
    return lying[node]


def _plus(emitter: Emitter, y: Node, bias: Node) -> Node:
    """y [B, m, d] + bias [m]."""
    return emitter.call(aten.add.Tensor, y, emitter.call(aten.unsqueeze.default, bias, 1))


def _weight_gradient(emitter: Emitter, node: Node, as_they_lie: dict[tuple[Node, torch.dtype], Node]) -> None:
    """dw [m, n] = rows of g [B d, m]^T @ rows of x [B d, n]."""
    left, right = args_of(node)
    if left.target is not aten.permute.default or list(args_of(left)[1]) != [1, 0]:
        return
    g, x = _uncollapsed(args_of(left)[0]), _uncollapsed(right)
    if g is None or x is None or not (lies_across(value_of(g)) or lies_across(value_of(x))):
        return
    (m, n), d = value_of(node).shape, value_of(x).shape[1]
    # Products of all rows are written and read again: that has to be little beside what they are made of.
    if value_of(g).shape[1] != d or d < _COLUMNS or 4 * m * n > d * (m + n):
        return
    with emitter.like(node):
        g, x = _as_it_lies(emitter, g, as_they_lie), _as_it_lies(emitter, x, as_they_lie)
        upright = n % _ALIGNED == 0 or m % _ALIGNED != 0
        a, b = (g, x) if upright else (x, g)
        each = emitter.call(aten.bmm.default, a, emitter.call(aten.permute.default, b, [0, 2, 1]))
        total = emitter.call(aten.sum.dim_IntList, each, [0], dtype=torch.float32)
        if value_of(node).dtype != torch.float32:
            total = emitter.call(_CONVERT, total, value_of(node).dtype)
        if not upright:
            total = emitter.call(aten.permute.default, total, [1, 0])
    emitter.replace(node, total)


def _is_given(w: Node) -> bool:
    """Whether a node is computed from one input or one constant of the graph alone, and so can be computed at the
    start.
    """
    while len(w.all_input_nodes) == 1:
        (w,) = w.all_input_nodes
    return w.op == "get_attr" or (w.op == "placeholder" and "tangent" not in str(w.target))


def _uncollapsed(rows: Any) -> Node | None:
    """[B, d, n] of which the rows [B d, n] were copied; None where the rows are no such copy."""
    if not isinstance(rows, Node) or rows.target not in _VIEWS:
        return None
    whole = args_of(rows)[0]
    while whole.target is aten.clone.default:
        whole = args_of(whole)[0]
    if not is_tensor(whole) or value_of(whole).dim() != 3:
        return None
    sides = value_of(whole).shape[1:]
    if not all(isinstance(side, int) for side in sides) or not _same(sides[1:], value_of(rows).shape[1:]):
        return None
    return whole


def _passed(node: Node) -> list[Node]:
    """A value together with its casts and its sums with a bias."""
    found = [node]
    for user in node.users:
        if user.target is _CONVERT or _sum_with_bias(user)[0] is node:
            found += _passed(user)
    return found


def _readers(node: Node) -> list[Node]:
    """The other nodes that read one of these."""
    passed = _passed(node)
    return [user for each in passed for user in each.users if user not in passed]


def _sum_with_bias(node: Node) -> tuple[Any, Any]:
    """The operands [B, d, m] and [m] of a node that adds a bias in the dtype of the first; else None, twice."""
    operands = args_of(node)
    tensors = [each for each in operands if isinstance(each, Node) and is_tensor(each)]
    if node.target is not aten.add.Tensor or node.kwargs or len(tensors) != 2:
        return None, None
    whole, bias = sorted(tensors, key=lambda each: -value_of(each).dim())
    sides = value_of(whole).dim(), value_of(bias).dim()
    return (whole, bias) if sides == (3, 1) and value_of(node).dtype == value_of(whole).dtype else (None, None)


def _is_view(node: Node, sides: tuple[Any, ...]) -> bool:
    """Whether a node is a view of the rows as [B, *sides]; B follows from the other sides."""
    return node.target in _VIEWS and _same(value_of(node).shape[1:], sides)


def _same(sides: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether all sides are known to be equal, without a question that only data could answer."""
    return len(sides) == len(others) and all(map(same, sides, others))


def _is_transpose(node: Node) -> bool:
    return node.target is aten.permute.default and list(args_of(node)[1]) == [0, 2, 1]


def _as_it_lies(emitter: Emitter, whole: Node, as_they_lie: dict[tuple[Node, torch.dtype], Node]) -> Node:
    """[B, n, d] of [B, d, n]: one node that all readers share. A tensor that was cast when it was transposed is cast as
    it lies.
    """
    if _is_transpose(whole):
        return emitter.now(args_of(whole)[0])
    cast = whole.target is _CONVERT and _is_transpose(args_of(whole)[0])
    source = emitter.now(args_of(args_of(whole)[0])[0] if cast else whole)
    key = source, value_of(whole).dtype
    if key not in as_they_lie:
        if cast:
            as_they_lie[key] = emitter.call(_CONVERT, source, key[1])
        else:
            as_they_lie[key] = emitter.call(aten.permute.default, source, [0, 2, 1])
    return as_they_lie[key]
