"""GEMMs of regions as torch's own op, where it is what would run, or by a faster algorithm of cuBLASLt.

    region_gemm(a, t, b, s)  ->  aten._scaled_mm(a, b^T, t, s^T)
                             ->  region_gemm(a, t, b, s) with "cublaslt@5" in the place of "torch"

The kernels `torch` and `torch_fast` are that op. Called from the graph it costs the host half of what it does
from an op in Python; `max-autotune` may put a kernel of Inductor's in its place, which adds up in its own
way. Where another algorithm of cuBLASLt is faster (kernels/gemm/algorithms.py), `region_gemm` runs that one, with the
same bits. What `region_gemm` does besides is done before: sides of joined layers are multiples of 16, so nothing is
padded, and a kernel that cannot run here stays `region_gemm`, which says so.
"""

import operator

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_and

from loka.compiler.emit import Emitter
from loka.compiler.gemms import KERNEL, TOKEN, region_gemm, region_problem
from loka.compiler.nodes import args_of, value_of
from loka.compiler.normed import normed_gemm
from loka.core.problem import Problem, dtype_name, target_of
from loka.core.recipe import Gemm
from loka.kernels.edge.op import edge
from loka.kernels.gemm.adapters.torch_scaled import TORCH, TORCH_FAST
from loka.kernels.gemm.algorithms import faster_than_torch
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.quantize.fp8_weights import fp8_weights

aten = torch.ops.aten

_KERNELS = {kernel.name: kernel for kernel in (TORCH, TORCH_FAST)}
_FIXED = (edge, fp8_weights, normed_gemm)  # what they give lies as they say; else Inductor chooses strides


def call_scaled_mm(emitter: Emitter, *, search: bool) -> None:
    """Replaces the GEMMs that torch's own op can run by that op. The last GEMM of forward and that of backward stay,
    because they hold the token that keeps the counting of runs alive. `search`: whether algorithms are timed, one of
    which stays too.
    """
    for node in list(emitter.graph.nodes):
        if node.target is not region_gemm or not _is_torchs(node):
            continue
        if search and (faster := _faster(node)):
            node.update_arg(KERNEL, faster)
        elif node.args[TOKEN] is None:
            with emitter.like(node):
                emitter.redirect(node, _scaled_mm(emitter, node))


def _faster(node: Node) -> str | None:
    a, a_scale, _, _, _, _, gemm, kernel, rows, columns, dtype = args_of(node)
    value = value_of(a)
    if value_of(a_scale).numel() > 1 or not all(isinstance(side, int) for side in (rows, value.shape[1])):
        return None
    problem = region_problem(gemm, rows, columns, value.shape[1], dtype, value.device)
    return faster_than_torch(kernel, problem, value.device)


def _is_torchs(node: Node) -> bool:
    a, a_scale, b, b_scale, _, _, gemm, kernel, *_ = args_of(node)
    if kernel not in _KERNELS or not all(map(_lies, (a, a_scale, b, b_scale))):
        return False
    (m, k), (n, deep), scale = value_of(a).shape, value_of(b).shape, value_of(a_scale)
    out = value_of(node)
    return (
        statically_known_true(sym_and(m == out.shape[0], n == out.shape[1], k == deep, m > 0, k % 16 == 0))
        and n % 16 == 0
        and (scale.numel() == 1 or statically_known_true(sym_and(scale.shape[0] == m, scale.numel() == m)))
        and _runs(kernel, Gemm(gemm), scale.numel() == 1, out, n)
    )


def _lies(node: Node) -> bool:
    """Whether a tensor is sure to lie in memory as the op needs it: its elements side by side, or only one element."""
    if node.target is aten.full.default:
        return True
    whole = value_of(node).dim() < 2 or value_of(node).stride(1) == 1
    return whole and (
        node.op == "placeholder" or (node.target is operator.getitem and args_of(node)[0].target in _FIXED)
    )


def _runs(kernel: str, gemm: Gemm, one: bool, out: torch.Tensor, n: int) -> bool:
    """Whether the kernel can run the problem here; its reasons do not depend on the number of rows."""
    candidate = candidate_named(f"{kernel}:{'tensorwise' if one else 'rowwise'}_e4m3")
    sides = {"m": 16, "n": n, "k": 16}
    target = target_of(out.device)
    return candidate.unsupported(Problem(gemm=gemm, **sides, dtype=dtype_name(out.dtype), target=target)) is None


def _scaled_mm(emitter: Emitter, node: Node) -> Node:
    a, a_scale, b, b_scale, *_, kernel, _, _, dtype = args_of(node)
    if value_of(a_scale).numel() == 1:  # by two indices, as Inductor's own kernels read them
        a_scale = emitter.call(aten.view.default, a_scale, [1, 1])
        b_scale = emitter.call(aten.view.default, _first(emitter, b_scale, 1), [1, 1])
    else:
        n = value_of(b).shape[0]
        b_scale = emitter.call(aten.view.default, _first(emitter, b_scale, n), [1, n])
    turned = emitter.call(aten.permute.default, b, [1, 0])
    fast = _KERNELS[kernel].fast
    return emitter.call(aten._scaled_mm.default, a, turned, a_scale, b_scale, None, None, dtype, fast)


def _first(emitter: Emitter, scale: Node, count: int) -> Node:
    """The first `count` of the equal scales of a weight."""
    if value_of(scale).shape[0] == count:
        return scale
    return emitter.call(aten.slice.Tensor, scale, 0, 0, count)
