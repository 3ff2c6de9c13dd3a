"""The GEMMs of joined sites as nodes."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from loka.compiler.emit import Emitter
from loka.compiler.gemm_op import region_gemm
from loka.compiler.joint_sites import JointSite
from loka.core.recipe import Gemm
from loka.kernels.registry import candidate_named


@dataclass(kw_only=True)
class Weight:
    """A weight in FP8: row [N, K], column [K, N] where grad_input reads it, scale [max(N, K)]."""

    row: Node
    column: Node | None
    scale: Node


def emit_gemm(
    emitter: Emitter, site: JointSite, gemm: Gemm, a: Node, a_scale: Node, b: Node, b_scale: Node
) -> Node:
    m: int | Node = emitter.side(site.rows)
    n, dtype = site.outputs, site.x.meta["val"].dtype
    if gemm is Gemm.GRAD_INPUT:
        n, dtype = site.inputs, site.grad_output.meta["val"].dtype
    elif gemm is Gemm.GRAD_WEIGHT:
        m, n, dtype = site.outputs, site.inputs, site.weight_dtype
    kernel = candidate_named(site.candidates[list(Gemm).index(gemm)]).kernel.name
    return emitter.call(region_gemm, a, a_scale, b, b_scale, None, site.name, gemm.value, kernel, m, n, dtype)
