"""The backward of joined sites: an edge below each output, and the two GEMMs behind it.

The second operand of grad_weight, (r x)8^T, is written by the edge below the site that made x, because that edge reads
what x is computed from anyway. Where there is no such edge, a kernel of its own writes it.
"""

from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from loka.compiler.edges.aten_steps import made_by
from loka.compiler.edges.cones import column_sum, cone_of, extended
from loka.compiler.edges.matrix import Cone, Low, Matrix
from loka.compiler.edges.traffic import readers
from loka.compiler.edges.writer import Writer, written
from loka.compiler.emit import Emitter
from loka.compiler.gemms import Gemms, Weight
from loka.compiler.joint_sites import JointSite
from loka.compiler.marks import makers_of
from loka.compiler.nodes import above, args_of, item_of, value_of
from loka.core.recipe import Gemm
from loka.kernels.edge.op import edge as edge_op
from loka.kernels.edge.program import Kind, Program, Step
from loka.nn.fp8_weight import transposed

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(kw_only=True)
class Edge:
    """The kernel below a site's output in backward."""

    site: JointSite
    root: Node
    cone: Cone
    sums: dict[Node, Node]  # sums over all rows, and what they sum
    outputs: dict[str, Node] = field(default_factory=dict)
    transposes: JointSite | None = None  # whose (r x)^T it writes
    recomputed: bool = False  # from what the cone reads, instead of from its FP8 data


def lower_backward(
    emitter: Emitter, gemms: Gemms, sites: list[JointSite], low: dict[Node, Low], weights: dict[Node, Weight]
) -> tuple[dict[Node, Node], Node | None]:
    """Lowers the backward ops of the sites. Returns r by the node of its site, and the last GEMM, or None without one.

    `low`: the quantized inputs, and `weights`: the quantized weights, both by the node of a site.
    """
    trained = [site for site in sites if site.backward is not None]
    waiting = _scaled_by_readers(gemms, trained)
    # Backward does not read what a GEMM's epilogue wrote: the bytes of Z, which it reads anyway, have the signs too.
    found = {site.x: low[site.node] for site in trained}
    compared = {x: own for x, own in found.items() if own.by_rows and own.data is not None}
    edges = _edges(emitter.graph, trained, compared)
    for site in trained:
        host = _host(site, edges) if site.wants_weight else None
        if host is not None:
            host.transposes = site
    texts = {node: _write(mine, low) for node, mine in edges.items()}
    last: Node | None = None
    for site in reversed(trained):
        backward, mine = site.backward, edges[site.node]
        assert backward is not None
        results = {int(args_of(user)[1]): user for user in backward.users}
        with emitter.like(backward):
            own = low[site.node]
            _emit_edge(emitter, mine, texts[site.node], edges, own.scale if own.scales is None else own.scales)
            weight = weights[site.node]
            if site.wants_input and 0 in results:
                row, r = mine.outputs["row"], mine.outputs["r"]
                scale = r if site.node not in waiting else None
                column = weight.column
                if column is None:
                    column = emitter.call(transposed, weight.row, r)
                last = gemms.call(site, Gemm.GRAD_INPUT, row, scale, column, weight.column_scale)
                emitter.replace(results[0], last)
                if site.node in waiting:
                    emitter.replace(waiting[site.node], r)
    for site in reversed(trained):
        backward, mine = site.backward, edges[site.node]
        assert backward is not None
        results = {int(args_of(user)[1]): user for user in backward.users}
        if not site.wants_weight or 1 not in results:
            continue
        with emitter.like(backward):
            host = next((e for e in edges.values() if e.transposes is site), None)
            other = host.outputs if host is not None else _transpose(emitter, site, mine, low[site.node])
            column = mine.outputs["column"]
            last = gemms.call(site, Gemm.GRAD_WEIGHT, column, None, other["transposed"], other["top"])
            emitter.replace(results[1], last)
    return {node: edge.outputs["r"] for node, edge in edges.items()}, last


def _scaled_by_readers(gemms: Gemms, trained: list[JointSite]) -> dict[Node, Node]:
    """Lets the readers of a gradient multiply it by the scales of its rows, where they can.

    Returns, by the node of a site, the placeholder for these scales. It stands there until an edge makes them.
    """
    found: dict[Node, Node] = {}
    for site in trained:
        backward = site.backward
        assert backward is not None
        dx = next((user for user in backward.users if args_of(user)[1] == 0), None)
        if site.wants_input and dx is not None and gemms.scaled_by_readers(dx, site.outputs):
            found[site.node] = gemms.scaled_by_placeholder(dx, backward)
    return found


def _edges(graph: Graph, trained: list[JointSite], low: dict[Node, Low]) -> dict[Node, Edge]:
    # A sum that a gradient is computed from, as BatchNorm's, cannot come out of the edge of that gradient.
    before = above(*(site.grad_output for site in trained))
    sums = [n for n in graph.nodes if n.target is aten.sum.dim_IntList and n not in before]
    taken: set[Node] = set()
    found: dict[Node, Edge] = {}
    for site in reversed(trained):  # a gradient reads more matrices the further it has come
        matrix = Matrix(rows=site.rows, features=site.outputs)
        free = [total for total in sums if total not in taken]
        mine = {total: inner for total in free if (inner := column_sum(total, matrix)) is not None}
        assert site.backward is not None
        cone = cone_of(site.grad_output, matrix, low, _only_summed(set(mine)) | {site.backward})
        kept: dict[Node, Node] = {}
        for total, inner in mine.items():
            wider = extended(cone, inner, tied=True)
            if wider is None:
                continue
            read = {*wider.leaves, *above(*wider.leaves)}
            if read & {site.backward, total, *kept, *cone.given}:
                continue  # the edge would read what is computed from what it gives
            cone = wider
            kept[total] = inner
        taken |= set(kept)
        found[site.node] = Edge(site=site, root=site.grad_output, cone=cone, sums=kept)
    return found


def _only_summed(sums: set[Node]) -> set[Node]:
    """The sums over rows, and those nodes whose values are read by these sums alone."""
    found = set(sums)
    waiting = [s.args[0] for s in sums]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node in found or node.op != "call_function":
            continue
        if readers(node) <= found:
            found.add(node)
            waiting += list(node.all_input_nodes)
    return found


def _host(site: JointSite, edges: dict[Node, Edge]) -> Edge | None:
    """The edge that can write (r x)^T of `site`: that of the latest of the sites which made x; None without one."""
    matrix = Matrix(rows=site.rows, features=site.inputs)
    # x may come out of a forward edge that reads later sites too; backward runs the edges of those first.
    earlier = (edge for edge in edges.values() if edge.site.node < site.node)
    by_y = {edge.site.y: edge for edge in earlier if edge.transposes is None}
    before = above(site.grad_output)
    for maker in makers_of(site.x, set(by_y)):
        edge = by_y[maker]
        if edge.site.outputs != site.inputs or edge.cone.matrix != matrix:
            continue
        if edge.site.backward in before or before & {*edge.sums, *edge.cone.given}:
            continue  # r of this site comes after that edge
        wider = extended(edge.cone, site.x, tied=False)
        if wider is not None and not _rounded_since(wider, site.x):
            edge.cone, edge.recomputed = wider, True
        return edge
    return None


def _rounded_since(cone: Cone, x: Node) -> bool:
    """Whether x would be computed of a matrix less its rows' means, where one edge made both and memory has rounded the
    matrix alone since. In rows that are nearly constant a norm makes x of that rounding, far above the x that forward
    had and whose scales bound it: so where rows of zeros go through softplus and LayerNorm.
    """
    differences = {n for n in (x, *above(x, within=cone.inside)) if n.target is aten.sub.Tensor}
    means = {made_by(read) for node in differences for read in node.all_input_nodes}
    leaves = [(made_by(leaf), kind) for leaf, kind in cone.leaves.items()]
    of_rows = {item_of(n, edge_op) for n, kind in leaves if kind in (Kind.COLUMN, Kind.BLOCK) and n in means}
    rounded = {item_of(n, edge_op) for n, kind in leaves if kind is Kind.FULL and value_of(n).dtype.itemsize == 2}
    return bool(of_rows & rounded - {None})


def _write(mine: Edge, low: dict[Node, Low]) -> tuple[Writer, Program]:
    """Writes the program of an edge. Its nodes must still be as they were when its cone was found."""
    site, transposes = mine.site, mine.transposes
    writer = Writer(mine.cone, {} if transposes is None or mine.recomputed else _kinds(low[transposes.node]))
    gradient = writer.index_of(mine.root)
    transposed = None
    if transposes is not None:
        transposed = writer.index_of(transposes.x) if mine.recomputed else _scaled(writer, low[transposes.node])
    return writer, writer.program(
        gradient=gradient,
        row=site.wants_input,
        column=site.wants_weight,
        transposed=transposed,
        sums=tuple(writer.index_of(inner) for inner in mine.sums.values()),
    )


def _emit_edge(
    emitter: Emitter, mine: Edge, text: tuple[Writer, Program], edges: dict[Node, Edge], scale: Node
) -> None:
    """`scale`: of the input of its site, or of each row of it, also one for each block."""
    site, transposes, (writer, program) = mine.site, mine.transposes, text
    theirs = edges[transposes.node].outputs if transposes is not None else {}
    mine.outputs = writer.run(emitter, program, site.rows, scale, theirs.get("r"), theirs.get("tops"))
    for index, total in enumerate(mine.sums):
        emitter.replace(total, emitter.as_like(mine.outputs[f"sum{index}"], total))


def _transpose(emitter: Emitter, site: JointSite, mine: Edge, own: Low) -> dict[str, Node]:
    """(r x)8^T of a site, written by a kernel of its own."""
    writer = written(Matrix(rows=site.rows, features=site.inputs), _kinds(own))
    program = writer.program(transposed=_scaled(writer, own))
    return writer.run(emitter, program, site.rows, gradient_scale=mine.outputs["r"], tops=mine.outputs["tops"])


def _kinds(low: Low) -> dict[Node, Kind]:
    assert low.data is not None
    return {low.data: Kind.FULL, low.scale: Kind.COLUMN if low.by_rows else Kind.SCALAR}


def _scaled(writer: Writer, low: Low) -> int:
    assert low.data is not None
    return writer.push(Step("mul", (writer.index_of(low.data), writer.index_of(low.scale))))
