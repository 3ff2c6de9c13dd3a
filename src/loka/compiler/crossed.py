"""Cross layers of a graph without gradients, in their GEMM's own epilogue: one kernel writes the next FP8 input.

    y = gemm(v8, W8);  x = p (y + b) + r;  x8, u = cast(x)       becomes

    u = row_bound(v8, ...)                                       scales from a bound (kernels/gemm/cross.py)
    x, x8 = crossed_gemm(v8, W8, b, p, r, u)

of p and r that regions have quantized by rows, as x_0 and x_l of DCNv2 are. x is written where others read it. Sums
of many terms run at the speed of the tensor cores, which cuBLASLt's kernels reach and this one does not: there the
GEMM and the code behind it stay two kernels. In training y is needed again, so that nothing is won.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.fx import Node

from loka.compiler.edges.matrix import Low, same
from loka.compiler.emit import SIZE, VIEW, Emitter
from loka.compiler.gemms import kernel_of
from loka.compiler.joint_sites import JointSite
from loka.compiler.nodes import args_of, value_of
from loka.compiler.normed import Product
from loka.core.problem import target_of
from loka.core.recipe import Gemm
from loka.kernels.custom_op import registered
from loka.kernels.gemm.crossed_gemm import gemm_crossed, row_bound, unsupported
from loka.kernels.launches import note_launch

aten = torch.ops.aten

_LONG = 1024  # terms of a sum


def _bound(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    longest: torch.Tensor,
    bias: torch.Tensor | None,
    p_scale: torch.Tensor,
    r_scale: torch.Tensor | None,
) -> torch.Tensor:
    """u float32 [T, 1]."""
    return row_bound(a, a_scale, longest, bias, p_scale, r_scale)


def _bound_fake(a: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], 1, dtype=torch.float32)


bound_of_rows = registered("loka::row_bound", _bound, _bound_fake)


def _crossed_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None,
    p: torch.Tensor,
    r: torch.Tensor | None,
    scale: torch.Tensor,
    site: str,
    kernel: str,
    itself: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x bfloat16 [T, N], empty unless `keep`, and x8 [T, N]. `itself`: p is what is added, in the place of r."""
    note_launch("gemm")
    p = p.contiguous()
    r = p if itself else None if r is None else r.contiguous()
    made = gemm_crossed(a, b, a_scale, b_scale, bias, p, r, scale, keep=keep, fast=kernel != "torch")
    return p.new_empty(0) if made.x is None else made.x, made.data


def _crossed_gemm_fake(a: torch.Tensor, p: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = p.new_empty(tuple(p.shape)) if keep else p.new_empty(0)
    return x, a.new_empty(tuple(p.shape))


crossed_gemm = registered("loka::crossed_gemm", _crossed_gemm, _crossed_gemm_fake)


class _Cross(NamedTuple):
    """x = p (y + bias) + r; `inside`: the nodes from y to x, which is among them."""

    y: Node
    bias: Node | None
    p: Node
    r: Node | None
    inside: set[Node]


def crossed_input(
    emitter: Emitter, site: JointSite, joined: set[Node], quantized: Mapping[Node, Low], products: Iterable[Product]
) -> tuple[Low, Product] | None:
    """x of `site` out of the epilogue of the GEMM before it, and that product; None where it is no cross layer, or one
    that is better two kernels. `joined`: the nodes of sites; `quantized`: inputs of those so far, as they were
    found."""
    if site.backward is not None or value_of(site.x).dtype != torch.bfloat16:
        return None
    low = {_shown(emitter.now(x)): own for x, own in quantized.items() if own.by_rows and own.data is not None}
    by_y = {product.y: product for product in products}
    found = _cross(_shown(site.x), set(by_y), low.keys())
    if found is None:
        return None
    product = by_y[found.y]
    if product.site.backward is not None or product.site.integers or product.weight.longest is None:
        return None
    given = product.input
    if not given.by_rows or given.data is None or _misfit(product.site, value_of(found.p)) is not None:
        return None
    if any(user not in found.inside and user.target is not SIZE for user in _users(found.y)):
        return None  # who needs y reads it
    return _emitted(emitter, site, joined, found, product, low)


def _misfit(site: JointSite, p: torch.Tensor) -> str | None:
    if site.inputs > _LONG:
        return f"sums of {site.inputs} terms are cuBLASLt's"
    return unsupported(columns=site.outputs, inner=site.inputs, target=target_of(p.device))


def _emitted(
    emitter: Emitter, site: JointSite, joined: set[Node], found: _Cross, product: Product, low: Mapping[Node, Low]
) -> tuple[Low, Product]:
    x, given, weight = _shown(site.x), product.input, product.weight
    itself = found.r is found.p
    keep = any(user.target is not SIZE and not (user in joined and args_of(user)[0] is site.x) for user in _users(x))
    with emitter.like(site.node):
        r_scale = None if found.r is None else low[found.r].scale
        scale = emitter.call(
            bound_of_rows, given.data, given.scale, weight.longest, found.bias, low[found.p].scale, r_scale
        )
        op = emitter.call(
            crossed_gemm, given.data, given.scale, weight.row, weight.row_scale, found.bias, found.p,
            None if itself else found.r, scale, product.site.name, kernel_of(product.site, Gemm.OUTPUT), itself, keep,
        )  # fmt: skip
        values, data = emitter.item(op, 0), emitter.item(op, 1)
    if keep:
        emitter.replace(x, values)
    return Low(data=data, scale=scale, finite=scale, bounded=True), replace(product, node=op, y=op)


def _cross(x: Node, outputs: Collection[Node], low: Collection[Node]) -> _Cross | None:
    """x as a cross layer of matrices of its own shape and dtype, the y of it among `outputs`, p and r among `low`."""
    for product, r in (*_pairs(x, aten.add.Tensor), (x, None)):
        for p, factor in _pairs(product, aten.mul.Tensor):
            for y, bias in (*_pairs(factor, aten.add.Tensor), (factor, None)):
                inside = {x, product, factor} - {y}
                if (
                    y in outputs
                    and p in low
                    and (r is None or r in low)
                    and (bias is None or _is_bias(bias, x))
                    and all(_like(each, x) for each in (y, p, product, factor, x if r is None else r))
                    and all(_alone(node, inside) for node in inside - {x})
                ):
                    return _Cross(y, bias, p, r, inside)
    return None


def _is_bias(bias: Node, x: Node) -> bool:
    """Of the width of x and its dtype, side by side in memory."""
    value, full = value_of(bias), value_of(x)
    return (
        value.dim() == 1 and same(value.shape[0], full.shape[1]) and value.dtype == full.dtype and value.is_contiguous()
    )


def _pairs(node: Node, target: object) -> list[tuple[Node, Node]]:
    """The two operands of a sum or a product of two tensors, in both orders."""
    if node.target is not target or node.kwargs:
        return []
    one, other = args_of(node)
    if not (isinstance(one, Node) and isinstance(other, Node)):
        return []
    return [(_shown(one), _shown(other)), (_shown(other), _shown(one))]


def _alone(node: Node, inside: set[Node]) -> bool:
    return all(user in inside or user.target is SIZE for user in _users(node))


def _users(node: Node) -> list[Node]:
    """Who reads it, by views of its own shape too."""
    found = []
    for user in node.users:
        found += _users(user) if _shown(user) is not user else [user]
    return found


def _shown(node: Node) -> Node:
    """What a view of the same shape shows."""
    while node.target is VIEW and _same_shape(value_of(node), value_of(args_of(node)[0])):
        node = args_of(node)[0]
    return node


def _like(node: Node, x: Node) -> bool:
    one, other = value_of(node), value_of(x)
    return one.dtype == other.dtype and one.dim() == 2 and _same_shape(one, other)


def _same_shape(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dim() == other.dim() and all(map(same, one.shape, other.shape))
