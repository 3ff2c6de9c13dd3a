"""Sums of many matrices in backward, such as the gradient of DCNv2's x0, in one pass over all of them.

    dx0 = g_3 (u_3 + b_3) + g_2 (u_2 + b_2) + g_1 (u_1 + b_1) + g_0

The compiler begins such a sum as soon as its first terms are there, so that they need not be kept, and writes
and reads it again with every few terms more. A program of values alone reads each matrix once, at the end.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from loka.compiler.edges.cones import cone_of
from loka.compiler.edges.matrix import Matrix
from loka.compiler.edges.nodes import in_backward, mark_backward
from loka.compiler.edges.writer import Writer
from loka.compiler.emit import Emitter
from loka.compiler.joint_sites import JointSite
from loka.kernels.edge.program import Kind

aten = torch.ops.aten

_MANY = 6  # matrices: the compiler reads about so many in one kernel


def write_long_sums(emitter: Emitter, sites: Iterable[JointSite]) -> None:
    """Replaces each sum that reads at least six matrices, as large as an input of a site, by an edge."""
    mark_backward(emitter.graph)
    sides = {(str(site.rows), site.inputs): Matrix(rows=site.rows, features=site.inputs) for site in sites}
    for matrix in sides.values():
        done: set[Node] = set()
        for node in reversed(list(emitter.graph.nodes)):
            if node in done or not in_backward(node) or node.target is not aten.add.Tensor:
                continue
            if matrix.kind(node) is not Kind.FULL:
                continue
            cone = cone_of(node, matrix, {}, set())
            done |= cone.inside
            if len(cone.matrices) >= _MANY:
                cone.given = [node]
                writer = Writer(cone, {})
                with emitter.like(node):
                    writer.run(emitter, writer.program(), matrix.rows)
