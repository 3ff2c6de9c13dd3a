"""The rewriting of a joint graph: sites become casts, GEMMs and edges.

    forward    x -> x8, t            an edge: the code above x in one kernel (kernels/edge)
               W -> W8, W8^T, s      one op for all weights of the graph; one more for those in INT8
               y = gemm(x8, t, W8, s)
    backward   dy -> dy8, dy8^T, r   an edge
               dx = gemm(dy8, r, W8^T, s)
               dW = gemm(dy8^T, (r x)8^T, M)

Where no program can hold the code above x, its cast is plain aten, which the compiler fuses into that code.
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from loka.compiler.backward import lower_backward
from loka.compiler.edges.aten_steps import passes_on
from loka.compiler.edges.cones import cone_of, mark_masks
from loka.compiler.edges.matrix import Low, Matrix
from loka.compiler.edges.parts import read_in_parts
from loka.compiler.edges.writer import Writer
from loka.compiler.emit import COPY, Emitter, ordered, strides_of
from loka.compiler.gemms import Gemms, Weight
from loka.compiler.joint_sites import JointSite, sites_in
from loka.compiler.kept import keep_compared
from loka.compiler.layout.gradients import close_gaps
from loka.compiler.layout.strides import hold, settle
from loka.compiler.layout.tokens import keep_tokens
from loka.compiler.marks import connected, mark_runs
from loka.compiler.nodes import CAST, MADE, args_of, mark_backward, value_of
from loka.compiler.normed import Product, normed_input, normed_output
from loka.compiler.notes import record_text
from loka.compiler.scaled_mm import call_scaled_mm
from loka.core.recipe import Gemm
from loka.kernels.edge.twin import SCALE_CARRY, SCALE_EXPONENT, SCALE_LEAST
from loka.kernels.quantize.fp8_weights import fp8_weights
from loka.kernels.quantize.int8_weights import int8_weights
from loka.nn.fp8_weight import dequantized

aten, prims = torch.ops.aten, torch.ops.prims


def join_sites(graph: Graph, *, search: bool = True) -> dict[str, str]:
    """Joins the sites of a joint graph in place. Returns, by site name, why each other site runs by itself. `search`:
    whether to time cuBLASLt's algorithms; a package, which runs without Python, cannot call them.
    """
    sites, apart = sites_in(graph)
    if not sites:
        if apart:
            keep_compared(Emitter(graph))
            hold(graph)
        return apart
    mark_backward(graph)
    mark_masks(graph)
    sites = _of_one_input(sites)
    emitter = Emitter(graph)
    gemms = Gemms(emitter, {op for site in sites for op in (site.node, site.backward) if op is not None})
    weights = _quantize_weights(emitter, sites)
    first: dict[Node, Low] = {}  # by the input of a site, as the graph had it at first
    products: dict[Node, Product] = {}  # by the node of a site
    for site in sites:
        with emitter.like(site.node):
            if site.x not in first:
                # An edge before may have given it.
                now = replace(site, x=emitter.now(site.x))
                first[site.x] = _quantize_input(emitter, site.x, now, sites, products)
            own, weight = first[site.x], weights[site.node]
            later = own.by_rows and not site.integers and gemms.scaled_by_readers(site.y, site.inputs)
            scale = None if later else own.scale
            data = own.data
            if site.integers:
                assert own.integers is not None
                data, scale = own.integers
            assert data is not None
            node = gemms.call(site, Gemm.OUTPUT, data, scale, weight.row, weight.row_scale)
            y = gemms.scaled(node, own.scale) if later else node
            products[site.node] = Product(site=site, gemm=node, node=node, y=y, input=own, weight=weight)
            emitter.replace(site.y, y)
    joined = {site.node for site in sites}
    products = {site: normed_output(emitter, product, joined) for site, product in products.items()}
    low = {site.node: first[site.x] for site in sites}
    last_product = products[sites[-1].node].gemm
    # An input may have been given by an edge, or be the very output of another site: another node now.
    sites = [replace(s, x=emitter.now(s.x), y=products[s.node].node) for s in sites]
    regions = connected(sites)
    scales, last = lower_backward(emitter, gemms, sites, low, weights)
    mark_runs(emitter, sites, low, weights, scales, (last_product, last), record_text(regions, apart))
    keep_tokens(emitter)
    ordered(graph)
    settle(emitter)
    close_gaps(emitter)
    call_scaled_mm(emitter, search=search)
    keep_compared(emitter)
    graph.eliminate_dead_code()
    read_in_parts(emitter)
    graph.eliminate_dead_code()
    hold(graph)
    return apart


def _of_one_input(sites: list[JointSite]) -> list[JointSite]:
    """Has sites read one node, which is quantized once, where they read like views and casts of one value: autocast
    casts it for each, and a frozen site makes rows of it. What one checkpoint recomputes no other reads.
    """
    known: dict[tuple[Any, ...], Node] = {}

    def first_like(node: Node) -> Node:
        if not passes_on(node):
            return node
        value = value_of(node)
        checkpoint = node.meta.get("recompute"), node.meta.get("ac_graph_id")
        key = first_like(args_of(node)[0]), value.dtype, *checkpoint, *map(str, value.shape), *strides_of(value)
        return known.setdefault(key, node)

    for site in sites:
        site.node.replace_input_with(site.x, first_like(site.x))
    return [replace(site, x=args_of(site.node)[0]) for site in sites]


def _quantize_input(
    emitter: Emitter, x: Node, site: JointSite, sites: list[JointSite], products: dict[Node, Product]
) -> Low:
    """x [T, K] of a site, and of other sites that read it, in eight bits: from the epilogue of the GEMM before it, or
    from an edge, with a scale for each row. `x`: the node as it was found, where the site now reads what an edge
    wrote.
    """
    joined = {each.node for each in sites}  # each input of theirs has such an edge
    cone = cone_of(site.x, Matrix(rows=site.rows, features=site.inputs), {}, joined, forward=True)
    readers = [each for each in sites if each.x is x]
    integers = any(each.integers for each in readers)
    if not cone.inside and not integers:
        return _cast(emitter, site.x)
    writer = Writer(cone, {})
    row = any(not each.integers or each.wants_weight for each in readers)
    program = writer.program(gradient=writer.index_of(site.x), row=row, integers=integers)
    keep = any(each.backward is not None for each in readers)
    normed = normed_input(emitter, site.x, joined, writer, program, products.values(), keep=keep)
    if normed is not None:
        own, product = normed
        products[product.site.node] = product
        return own
    outputs = writer.run(emitter, program, site.rows)
    return Low(
        data=outputs.get("row"),
        scale=outputs["r"],
        finite=outputs["r"],
        integers=(outputs["integer"], outputs["step"]) if integers else None,
    )


def _cast(emitter: Emitter, x: Node) -> Low:
    """x [T, K] quantized to FP8 by plain aten ops, which Inductor fuses into what makes x."""
    values = emitter.call(prims.convert_element_type.default, x, torch.float32)
    device = x.meta["val"].device
    magnitude = emitter.call(aten.abs.default, values)
    largest = emitter.call(aten.amax.default, magnitude, [1], True)
    bits = emitter.call(aten.view.dtype, largest, torch.int32)  # as kernels/edge/twin.scale_above has them
    bits = emitter.call(aten.add.Tensor, bits, SCALE_CARRY)
    bits = emitter.call(aten.bitwise_and.Scalar, bits, 0x7F800000)
    bits = emitter.call(aten.sub.Tensor, bits, SCALE_EXPONENT)
    bits = emitter.call(aten.clamp_min.default, bits, SCALE_LEAST)
    power = emitter.call(aten.view.dtype, bits, torch.float32)
    inverse_bits = emitter.call(aten.add.Tensor, emitter.call(aten.neg.default, bits), 0x7F000000)
    inverse = emitter.call(aten.view.dtype, inverse_bits, torch.float32)
    finite = emitter.call(aten.lt.Scalar, largest, torch.inf)
    nan = emitter.call(aten.full.default, [], torch.nan, dtype=torch.float32, device=device)
    inverse = emitter.call(aten.where.self, finite, inverse, nan)
    scaled = emitter.call(aten.mul.Tensor, values, inverse)
    data = emitter.call(prims.convert_element_type.default, scaled, torch.float8_e4m3fn)
    if value_of(data).stride() != (value_of(data).shape[1], 1):  # a GEMM reads rows that are runs of memory
        data = emitter.call(COPY, data, memory_format=torch.contiguous_format)
    scale = emitter.call(aten.where.self, finite, power, nan)
    scale.meta[MADE] = True
    values.meta[CAST] = data, scale
    return Low(data=data, scale=scale, finite=scale)


def _quantize_weights(emitter: Emitter, sites: list[JointSite]) -> dict[Node, Weight]:
    """The quantized weights, by the node of a site. One op quantizes all weights that exist before the first site, and
    a second one those in INT8. A weight that comes in FP8 is taken as it is.
    """
    position = {node: index for index, node in enumerate(emitter.graph.nodes)}
    given = {s.node: _given(s.weight) for s in sites if s.weight.target is dequantized}
    sites = [s for s in sites if s.node not in given]
    if not sites:
        return given
    early = [s for s in sites if position[s.weight] < position[sites[0].node]]
    found = given
    for group in (early, *([s] for s in sites if s not in early)):
        if group:
            with emitter.like(group[0].node):
                fp8, int8 = _in_fp8(emitter, group), _in_int8(emitter, group)
            for site in group:
                own = int8[site.weight] if site.integers else fp8[site.weight]
                transposed = fp8.get(site.weight, own)
                found[site.node] = replace(own, column=transposed.column, column_scale=transposed.column_scale)
    return found


def _in_fp8(emitter: Emitter, sites: list[JointSite]) -> dict[Node, Weight]:
    """The FP8 copies, by weight, of the weights that some GEMM reads in FP8."""
    transposed: dict[Node, bool] = {}
    for site in sites:
        if site.wants_input or not site.integers:
            transposed[site.weight] = transposed.get(site.weight, False) or site.wants_input
    if not transposed:
        return {}
    op = emitter.call(fp8_weights, list(transposed), list(transposed.values()))
    found = {}
    for index, (weight, both) in enumerate(transposed.items()):
        row, scale = emitter.item(op, 3 * index), emitter.item(op, 3 * index + 2)
        column = emitter.item(op, 3 * index + 1) if both else None
        found[weight] = Weight(row=row, row_scale=scale, column=column, column_scale=scale)
    return found


def _in_int8(emitter: Emitter, sites: list[JointSite]) -> dict[Node, Weight]:
    weights = list(dict.fromkeys(site.weight for site in sites if site.integers))
    if not weights:
        return {}
    op = emitter.call(int8_weights, weights)
    found = {}
    for index, weight in enumerate(weights):
        row, scale = emitter.item(op, 2 * index), emitter.item(op, 2 * index + 1)
        found[weight] = Weight(row=row, row_scale=scale, column=None, column_scale=scale)
    return found


def _given(weight: Node) -> Weight:
    """The FP8 weight behind a node that dequantizes one. When all its sites are joined, nothing reads that node any
    more.
    """
    row, scale, _ = args_of(weight)
    return Weight(row=row, row_scale=scale, column=None, column_scale=scale)
