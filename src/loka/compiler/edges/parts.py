"""Edges read the parts of a concatenation where these lie, where nobody else needs it in memory.

A model concatenates embeddings with what it made of dense features, and cross layers read the result again and again.
Writing it takes a kernel of its own: 27 of 480 us for [8192, 3456] in bf16 on an H200, when such a model is served.
"""

import math
import operator

import torch
from torch._ops import OpOverload
from torch.fx import Node

from loka.compiler.edges.aten_steps import passes_on
from loka.compiler.emit import CONVERT, SIZE, Emitter, is_in_rows
from loka.compiler.nodes import CAST, CUTS, args_of, is_alias, is_tensor, lies_in_memory, value_of
from loka.core.problem import FLOATS
from loka.kernels.edge.op import edge
from loka.kernels.edge.program import Kind, Program, in_parts, program_of

aten = torch.ops.aten

_MOST = 8  # parts of a matrix, each of which a kernel asks for: where a tile has several, threads wait for each


def read_in_parts(emitter: Emitter) -> None:
    """Has edges read parts instead of each concatenation that only they and casts read, of parts that mostly lie in
    memory. Where they do not, the kernel that computes them writes them into the concatenation as well as anywhere
    else.
    """
    for node in emitter.graph.find_nodes(op="call_function", target=aten.cat.default):
        parts = _parts_of(node)
        if parts is None:
            continue
        wide = sum(parts.values())
        if 2 * sum(columns for part, columns in parts.items() if lies_in_memory(_source(part)[0])) < wide:
            continue
        for reader, leaves in (_readers_of(node, wide) or {}).items():
            with emitter.like(reader):
                found = reader if reader.target is edge else _cast_by_edge(emitter, reader, wide)
            for leaf in sorted(leaves, reverse=True):
                _split(found, leaf, parts)


def _parts_of(node: Node) -> dict[Node, int] | None:
    """The parts of a concatenation that joins features, and how many features each has; None of another one."""
    joined, dim = [_narrow(part) for part in args_of(node)[0]], (*args_of(node), 0)[1]
    if not 1 < len(set(joined)) == len(joined) <= _MOST:
        return None
    if any(_changes(part) or _is_piece(part) for part in joined):
        return None
    found = {}
    for part in joined:
        value = value_of(part)
        columns = math.prod(value.shape[dim:]) if value.dim() == value_of(node).dim() else 0
        if not isinstance(columns, int) or columns == 0 or value.dtype not in FLOATS or not is_in_rows(value, columns):
            return None
        found[part] = columns
    return found


def _readers_of(node: Node, features: int) -> dict[Node, set[int]] | None:
    """The edges that read a concatenation as a matrix of so many features, and as which leaves, and the first ops of
    casts that do; None where something else reads it.
    """
    found: dict[Node, set[int]] = {}
    waiting = [node]
    while waiting:
        shown = waiting.pop()
        for user in shown.users:
            if user.target is edge and all(shown is not given for given in args_of(user)[1:]):
                program = program_of(args_of(user)[-1])
                leaves = {index for index, leaf in enumerate(args_of(user)[0]) if leaf is shown}
                if program.features != features or any(program.leaves[index] is not Kind.FULL for index in leaves):
                    return None
                found.setdefault(user, set()).update(leaves)
            elif CAST in user.meta:
                if features % 16 or value_of(user).shape[1] != features:  # else an edge pads what it writes
                    return None
                found[user] = {0}
            elif _is_view(user):
                waiting.append(user)
            elif user.target is not SIZE:
                return None
    return found


def _cast_by_edge(emitter: Emitter, cast: Node, features: int) -> Node:
    """Replaces the ops of a cast by an edge."""
    (x, *_), (data, scale) = args_of(cast), cast.meta[CAST]
    program = Program(features=features, block=features, leaves=(Kind.FULL,), gradient=0, row=True)
    found = emitter.call(edge, [x], emitter.side(value_of(x).shape[0]), None, None, None, program.to_text())
    for old, index in ((data, 0), (scale, 1)):
        emitter.redirect(old, emitter.item(found, index))
    return found


def _split(reader: Node, leaf: int, parts: dict[Node, int]) -> None:
    """Has an edge read parts instead of one of its leaves."""
    leaves, *others, text = args_of(reader)
    program = in_parts(program_of(text), leaf, list(parts.values()))
    reader.args = ([*leaves[:leaf], *parts, *leaves[leaf + 1 :]], *others, program.to_text())


def _narrow(part: Node) -> Node:
    """What a part was cast from, where float32 has each number of it: autocast casts the parts of a concatenation to
    the widest dtype among them, and programs read any.
    """
    while part.target is CONVERT:
        source = args_of(part)[0]
        if value_of(source).dtype not in FLOATS or value_of(part).dtype != torch.float32:
            break
        part = source
    return part


def _changes(part: Node) -> bool:
    """Whether the graph writes into the memory of a part: backward, which reads it later, needs what was there."""
    while is_alias(part):
        part = args_of(part)[0]
    mutable = [user for user in part.users if isinstance(user.target, OpOverload) and user.target._schema.is_mutable]
    return any(args_of(user)[:1] == (part,) for user in mutable)


def _is_piece(part: Node) -> bool:
    """Whether a part is cut out of what the graph computes: kept for backward, it would keep all of that in memory."""
    source, cut = _source(part)
    return cut and source.op == "call_function"


def _source(node: Node) -> tuple[Node, bool]:
    """The node whose memory a node shows, and whether it shows a piece of it."""
    cut = False
    while True:
        if node.target is operator.getitem and args_of(node)[0].target in CUTS:
            node = args_of(node)[0]
        if node.target not in CUTS and not _is_view(node):
            return node, cut
        cut |= node.target in CUTS
        node = args_of(node)[0]


def _is_view(node: Node) -> bool:
    if not passes_on(node) or node.target in (aten.expand.default, aten.clone.default, aten.contiguous.default):
        return False
    return is_tensor(node) and value_of(args_of(node)[0]).dtype == value_of(node).dtype
