"""Sites whose code behind them is their GEMM's own epilogue: one kernel writes the next site's FP8 input.

    y = gemm(a8, W8);  x = activation(BlockNorm(y));  x8 = cast(x)       becomes

    x8, 1 / rms, z8, steps, scales = normed_gemm(a8, W8)

x8 has one scale, known from the norm's bound, in the place of scales of rows: they differ for elements near
e4m3's smallest numbers alone. Where no site reads x, as behind a tower's last layer, the kernel writes x itself, in
16 bits. Backward reads y as (z8 - 127.5) steps, a byte an element (epilogue.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from loka.compiler.edges.aten_steps import SUMS, is_pointwise
from loka.compiler.edges.cones import COMPARISONS, cone_of
from loka.compiler.edges.epilogues import matched
from loka.compiler.edges.matrix import Low, Matrix, same
from loka.compiler.edges.traffic import readers
from loka.compiler.edges.writer import Writer
from loka.compiler.emit import SIZE, Emitter
from loka.compiler.gemms import Weight, kernel_of
from loka.compiler.joint_sites import JointSite
from loka.compiler.nodes import args_of, in_backward, value_of
from loka.core.problem import target_of
from loka.core.recipe import Gemm
from loka.kernels.custom_op import registered
from loka.kernels.edge.program import Kind, Program
from loka.kernels.gemm.epilogue import ROUNDED_MIDDLE, Activation, Epilogue
from loka.kernels.gemm.normed_gemm import gemm_normed, unsupported

aten, prims = torch.ops.aten, torch.ops.prims

# A tile is a norm's block wide, and a GEMM and an edge by themselves have smaller ones. 64 tiles won with
# 512 terms (6.5 against 7.1 us on an H200), and take longer in proportion to the terms.
_MANY, _LONG = 100, 1024
_SHORT_FLOATS = (torch.bfloat16, torch.float16)


def _normed_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token: torch.Tensor | None,
    site: str,
    kernel: str,
    block: int,
    eps: float,
    activation: str,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [rows, N] in `dtype`, 1 / rms [rows, N / block], and where `keep` z8 [rows, N], steps and scales
    [rows, N / block], else empty. a_scale: float32 [1], or [rows] in any shape; b_scale: float32, all one number.
    `token` is not read, as that of loka::region_gemm."""
    epilogue = Epilogue(block=block, eps=eps, activation=Activation(activation), dtype=dtype)
    result = gemm_normed(
        a, b, a_scale.reshape(-1), b_scale.reshape(-1).narrow(0, 0, 1), epilogue, keep=keep, fast=kernel != "torch"
    )
    if result.z is None:
        return result.data, result.inverse_rms, *_nothing(a)
    return result.data, result.inverse_rms, *result.z


def _normed_gemm_fake(
    a: torch.Tensor, b: torch.Tensor, block: int, dtype: torch.dtype, keep: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = a.shape[0], b.shape[0]
    data = a.new_empty(rows, columns, dtype=dtype)
    inverse = a.new_empty(rows, columns // block, dtype=torch.float32)
    if not keep:
        return data, inverse, *_nothing(a)
    steps, scales = (torch.empty_like(inverse) for _ in range(2))
    return data, inverse, torch.empty_like(data, dtype=torch.uint8), steps, scales


def _nothing(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    steps, scales = (like.new_empty(0, dtype=torch.float32) for _ in range(2))
    return like.new_empty(0, dtype=torch.uint8), steps, scales


normed_gemm = registered("loka::normed_gemm", _normed_gemm, _normed_gemm_fake)


@dataclass(frozen=True, kw_only=True)
class Product:
    """The output of a site in a graph, and the GEMM that made it. `node` is that GEMM, or what stands for its output;
    readers read `y`, which may be `node` times the scales of its rows.
    """

    site: JointSite
    gemm: Node
    node: Node
    y: Node
    input: Low
    weight: Weight


def normed_input(
    emitter: Emitter,
    x: Node,
    joined: set[Node],
    writer: Writer,
    program: Program,
    products: Iterable[Product],
    *,
    keep: bool,
) -> tuple[Low, Product] | None:
    """x of sites out of the epilogue of the GEMM before them, together with that GEMM's product as backward reads it.
    None where the program is no epilogue, or where another node reads in forward what would no longer be in memory.
    `joined`: nodes of sites, which get x as it is quantized for these. `keep`: whether one of them has a backward.
    """
    fitting = _fitting(writer, program, products)
    if fitting is None:
        return None
    product, epilogue = fitting
    inside = writer.cone.inside | {product.node}
    if not _do_without(_readers(inside), x, joined):
        return None
    data, inverse, scales, product = _emitted(emitter, product, epilogue, writer, keep=keep)
    scale = emitter.constant(epilogue.scale, value_of(data).device)
    return Low(data=data, scale=scale, finite=inverse, scales=scales if keep else None), product


def normed_output(emitter: Emitter, product: Product, joined: set[Node]) -> Product:
    """The product as backward reads it: where all that forward does with it is to normalize and to activate it, its
    GEMM's epilogue does that, and writes what others read. Else the product as it is.
    """
    if product.node is not product.gemm or value_of(product.y).dtype not in _SHORT_FLOATS:
        return product
    matrix = Matrix(rows=product.site.rows, features=product.site.outputs)
    for x in reversed(_below(product, matrix)):
        cone = cone_of(x, matrix, {}, joined, forward=True)
        if product.node not in cone.leaves:
            continue
        writer = Writer(cone, {})
        fitting = _fitting(writer, writer.program(gradient=writer.index_of(x), row=True), [product])
        if fitting is None or not _do_without(_readers(cone.inside - {x} | {product.node}) - {x}, x, joined):
            continue
        epilogue, keep = replace(fitting[1], dtype=value_of(x).dtype), product.site.backward is not None
        data, _, _, product = _emitted(emitter, product, epilogue, writer, keep=keep)
        with emitter.like(x):
            data = emitter.as_like(data, x)
        compared = _compared(x, joined) if keep else []
        emitter.replace(x, data)
        for node in compared:  # the bytes, which backward reads anyway, have the signs too
            node.replace_input_with(args_of(node)[0], x)
        return replace(product, node=data)  # what others read is made of this
    return product


def _compared(x: Node, joined: set[Node]) -> list[Node]:
    """The nodes that compare x as it is with zero for backward alone, as ReLU's gradient does."""
    found = [user for user in readers(x) if user.target in COMPARISONS and args_of(user)[1] == 0]
    return [user for user in found if _alike(args_of(user)[0], x) and _do_without({user}, x, joined)]


def _alike(node: Node, other: Node) -> bool:
    value, known = value_of(node), value_of(other)
    alike = value.dtype == known.dtype and value.dim() == known.dim()
    return alike and all(map(same, value.shape, known.shape))


def _below(product: Product, matrix: Matrix) -> list[Node]:
    """The matrices in 16 bits that code of forward makes of a product and of no other matrix, in the graph's order: in
    a deep model all that follows lies behind a sum with another one.
    """
    found, waiting = {product.y}, [product.y]
    while waiting:
        for user in waiting.pop().users:
            if user in found or in_backward(user) or not (is_pointwise(user) or user.target in SUMS):
                continue
            if all(each in found for each in user.all_input_nodes if matrix.kind(each) is Kind.FULL):
                found.add(user)
                waiting.append(user)
    found -= {product.y}
    return sorted(n for n in found if value_of(n).dtype in _SHORT_FLOATS and matrix.kind(n) is Kind.FULL)


def _fitting(writer: Writer, program: Program, products: Iterable[Product]) -> tuple[Product, Epilogue] | None:
    """The product whose GEMM can run the program in its epilogue, and that epilogue; or None."""
    found = matched(program)
    if found is None:
        return None
    product = next((p for p in products if p.node is writer.leaves[found.product]), None)
    if (
        product is None
        or product.site.integers
        or (found.row_scale is not None and writer.leaves[found.row_scale] is not product.input.scale)
        or _misfit(product, found.epilogue) is not None
    ):
        return None
    return product, found.epilogue


def _readers(inside: set[Node]) -> set[Node]:
    return {user for node in inside for user in node.users} - inside


def _do_without(readers: set[Node], x: Node, joined: set[Node]) -> bool:
    """Whether every reader can do without the product in memory: a site that reads x, backward, code for backward
    alone, or a question for a size.

    The one output node of a graph reads forward's outputs too. An op that writes to a tensor from outside has no
    reader.
    """
    waiting, seen = list(readers), set(readers)
    while waiting:
        user = waiting.pop()
        if user in joined:
            if args_of(user)[0] is not x:
                return False
        elif user.op == "output" or user.is_impure():
            return False
        elif user.target is not SIZE and not in_backward(user):
            waiting += user.users.keys() - seen
            seen |= user.users.keys()
    return True


def _misfit(product: Product, epilogue: Epilogue) -> str | None:
    value, site = value_of(product.node), product.site
    tiles = -(-site.rows // 64) * -(-site.outputs // 256) if isinstance(site.rows, int) else _MANY
    if site.backward is None and tiles < _MANY and site.inputs >= _LONG:
        return f"{tiles} tiles leave processors idle for sums of {site.inputs} terms"
    return unsupported(epilogue, columns=site.outputs, inner=site.inputs, target=target_of(value.device))


def _emitted(
    emitter: Emitter, product: Product, epilogue: Epilogue, writer: Writer, *, keep: bool
) -> tuple[Node, Node, Node, Product]:
    """What the epilogue writes, 1 / rms, scales, and the product as backward reads it."""
    site, given, weight = product.site, product.input, product.weight
    with emitter.like(product.node):
        op = emitter.call(
            normed_gemm, given.data, given.scale, weight.row, weight.row_scale, None, site.name,
            kernel_of(site, Gemm.OUTPUT), epilogue.block, epilogue.eps, epilogue.activation.value, epilogue.dtype, keep,
        )  # fmt: skip
        data, inverse, values, steps, scales = (emitter.item(op, index) for index in range(5))
        for statistic in writer.cone.given:
            emitter.replace(statistic, emitter.as_like(inverse, statistic))
        if not keep:
            return data, inverse, scales, replace(product, gemm=op)
        y = _restored(emitter, values, steps, like=product.y)
    emitter.replace(product.y, y)
    return data, inverse, scales, replace(product, gemm=op, node=y, y=y)


def _restored(emitter: Emitter, values: Node, steps: Node, *, like: Node) -> Node:
    """y [T, N] in its own dtype, computed from its bytes."""
    rows, columns = (emitter.side(each) for each in value_of(like).shape)
    blocks = value_of(steps).shape[1]
    wide = emitter.call(prims.convert_element_type.default, values, torch.float32)
    centred = emitter.call(aten.sub.Tensor, wide, ROUNDED_MIDDLE)
    apart = emitter.call(aten.view.default, centred, [rows, blocks, value_of(like).shape[1] // blocks])
    each = emitter.call(aten.view.default, steps, [rows, blocks, 1])
    product = emitter.call(aten.mul.Tensor, apart, each)
    whole = emitter.call(aten.view.default, product, [rows, columns])
    return emitter.call(prims.convert_element_type.default, whole, value_of(like).dtype)
