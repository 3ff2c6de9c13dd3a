"""The GEMMs of a region, from operands that come quantized: the op, and its nodes in a graph.

    output        y  = t (x / t) (W / s)^T s
    grad_input    dx = r (dy / r) (W^T / s)^T s
    grad_weight   dW = (dy / r)^T (r x / M) M

A scale of one element is that of a tensor; more are those of rows. Scales of rows, t and r, are powers of 2:
the code that reads a product multiplies it by them as well as the GEMM does, to the last bit.
"""

import functools
import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from loka.compiler.edges.aten_steps import SUMS, is_pointwise
from loka.compiler.edges.traffic import readers
from loka.compiler.emit import Emitter
from loka.compiler.joint_sites import JointSite
from loka.compiler.long_sums import kernel_in_region
from loka.compiler.nodes import BACKWARD, value_of
from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem, dtype_name, linear_problem, target_of
from loka.core.recipe import Gemm
from loka.kernels.custom_op import registered
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import ScaledGemm, fit, scaled_gemm

aten, prims = torch.ops.aten, torch.ops.prims

TOKEN, KERNEL = 4, 7  # indices of the argument that is not read, and of the name of the kernel
_STAND_IN = 99  # no result of an op has this index

# Terms of a sum. cuBLASLt on an H200 (docs/log.md, 2026-12-01): without scales of rows a GEMM by its fastest algorithm
# takes 3 to 32 % less with sums of up to 1,024 terms, 1 to 10 % less with 1,280 to 8,192 where a row of the result has
# up to 1,024 elements and there are up to 16,384 rows, and else 10 % less to 6 % more.
_SHORT, _NARROW, _ROWS = 1024, 1024, 16_384
# Tiles of 128 x 128, of which a GEMM with scales of rows always is made (torch 2.11); one without has smaller ones
# where these leave processors idle. On an H200 (2026-11-28, K of 1,024 to 5,120) it takes 0.4 to 0.8 of the time up to
# 64 tiles, and 0.8 to 1.03 up to 216; by its fastest algorithm (K to 8,192) 0.43 to 0.99 up to 432. Code that reads it
# in a concatenation takes longer, 4 us at 512 x 64 x 160, as it asks for the scales under masks.
_TILE, _FEW = 128, 432


def _region_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    token: torch.Tensor | None,
    site: str,
    gemm: str,
    kernel: str,
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """out [rows, columns] = a [rows.., K] @ b [columns.., K]^T, both float8 or int8, padded with zeros to 16.

    a_scale: float32 [1], or at least [rows] in any shape; b_scale: float32 of at least [columns], all one
    number where it stands for a tensor. `token` is not read: it keeps alive what counts runs. `kernel`: its name, with
    an algorithm of it or none, as "cublaslt@5".
    """
    if rows == 0:
        return a.new_empty(0, columns, dtype=dtype)
    recipe = operands_recipe(a, a_scale)
    run = _run_of(kernel, recipe, gemm, rows, columns, a.shape[1], dtype, a.device)
    cast = run.casts[0]
    a, b = fit(a, run.padded_a), fit(b, run.padded_b)
    if recipe == "tensorwise_e4m3":
        return run(Quantized(a, a_scale.view(1, 1), cast), Quantized(b, b_scale[:1].view(1, 1), cast))
    scale_a = a_scale.reshape(-1, 1)
    if scale_a.shape[0] != a.shape[0]:
        scale_a = torch.nn.functional.pad(scale_a, (0, 0, 0, a.shape[0] - scale_a.shape[0]), value=1.0)
    return run(Quantized(a, scale_a, cast), Quantized(b, b_scale[: b.shape[0]].view(-1, 1), cast))


@functools.lru_cache(maxsize=4096)  # a step asks each time, and asking takes the host longer than launching
def _run_of(
    kernel: str, recipe: str, gemm: str, rows: int, columns: int, terms: int, dtype: torch.dtype, device: torch.device
) -> ScaledGemm:
    name, at, algorithm = kernel.partition("@")
    return scaled_gemm(f"{name}:{recipe}{at}{algorithm}", region_problem(gemm, rows, columns, terms, dtype, device))


def region_problem(gemm: str, rows: int, columns: int, terms: int, dtype: torch.dtype, device: torch.device) -> Problem:
    """What `region_gemm` computes with these sides, of `terms` columns of a and of b."""
    return Problem(gemm=Gemm(gemm), m=rows, n=columns, k=terms, dtype=dtype_name(dtype), target=target_of(device))


def operands_recipe(a: torch.Tensor, a_scale: torch.Tensor) -> str:
    """The recipe that the quantized operands were made by, as the GEMM is to read their scales. INT8 always has scales
    of rows, also where a has a single one.
    """
    if not a.is_floating_point():
        return "int8_row"
    return "rowwise_e4m3" if a_scale.numel() > 1 else "tensorwise_e4m3"


def _region_gemm_fake(a: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty(rows, columns, dtype=dtype)


region_gemm = registered("loka::region_gemm", _region_gemm, _region_gemm_fake)


@dataclass(kw_only=True)
class Weight:
    """A weight in eight bits: row [N, K] as `output` reads it, column [K, N] where grad_input does, scales.

    `column` is None, too, where a weight comes in FP8 (nn/fp8_weight.py): backward makes it. In FP8 both
    scales are one, of at least [max(N, K)] equal numbers; an INT8 row has one for each row, [N].
    """

    row: Node
    row_scale: Node
    column: Node | None
    column_scale: Node


def _most(rows: int | torch.SymInt) -> int | None:
    """How many rows there are at most, of a package as many as it takes; None where nothing is known."""
    if isinstance(rows, int):
        return rows
    upper = rows.node.shape_env.bound_sympy(rows.node.expr).upper
    return int(upper) if upper.is_Integer else None


def kernel_of(site: JointSite, gemm: Gemm) -> str:
    return candidate_named(site.candidates[list(Gemm).index(gemm)]).kernel.name


class Gemms:
    """Emits the GEMMs of sites. `joined`: the ops of all sites whose operands edges make."""

    def __init__(self, emitter: Emitter, joined: set[Node]) -> None:
        self._emitter, self._joined = emitter, joined

    def call(self, site: JointSite, gemm: Gemm, a: Node, a_scale: Node | None, b: Node, b_scale: Node) -> Node:
        """Emits a b^T, multiplied by the scales of the rows of a; None stands for a scale of one."""
        emitter = self._emitter
        m: int | Node = emitter.side(site.rows)
        n, dtype = site.outputs, value_of(site.x).dtype
        if gemm is Gemm.GRAD_INPUT:
            n, dtype = site.inputs, value_of(site.grad_output).dtype
        elif gemm is Gemm.GRAD_WEIGHT:
            m, n, dtype = site.outputs, site.inputs, site.weight_dtype
        kernel = kernel_of(site, gemm)
        if gemm is Gemm.GRAD_WEIGHT and isinstance(site.rows, int):
            problem = linear_problem(
                gemm,
                rows=site.rows,
                in_features=site.inputs,
                out_features=site.outputs,
                dtype=dtype_name(dtype),
                target=target_of(value_of(site.x).device),
            )
            kernel = kernel_in_region(kernel, problem)
        a_scale = emitter.constant(1.0, value_of(site.x).device) if a_scale is None else a_scale
        return emitter.call(region_gemm, a, a_scale, b, b_scale, None, site.name, gemm.value, kernel, m, n, dtype)

    def scaled_by_readers(self, product: Node, summed: int) -> bool:
        """Whether all readers of a product [T, N] can multiply it by the scales of its rows, and whether that saves
        time.

        `summed`: how many terms each element is a sum of. A reader can do it where the compiler writes its code. A
        reader that needs the product in memory would have it written once more. A product in float16 without its scales
        may overflow.
        """
        found, (rows, columns) = readers(product), value_of(product).shape
        most = _most(rows)
        few = most is not None and -(-most // _TILE) * -(-columns // _TILE) <= _FEW
        narrow = most is not None and most <= _ROWS and columns <= _NARROW
        joins = any(user.target is aten.cat.default for user in found)
        return (
            bool(found)
            and (summed <= _SHORT or ((few or narrow) and not joins))
            and value_of(product).dtype != torch.float16
            and all(
                user in self._joined or is_pointwise(user) or user.target in (*SUMS, aten.cat.default) for user in found
            )
        )

    def scaled(self, product: Node, scale: Node) -> Node:
        """The product times the scales [T, 1] of its rows, inserted behind it in the graph."""
        with self._emitter.graph.inserting_after(product):
            times = self._emitter.call(aten.mul.Tensor, product, scale)
        with self._emitter.graph.inserting_after(times):
            return self._emitter.call(prims.convert_element_type.default, times, value_of(product).dtype)

    def scaled_by_placeholder(self, product: Node, backward: Node) -> Node:
        """Has all readers read the product times the scales of its rows, which come later. Returns the placeholder that
        stands for the scales until then.
        """
        emitter = self._emitter
        rows = value_of(product).shape[0]
        with emitter.graph.inserting_after(product):
            scale = emitter.graph.call_function(operator.getitem, (backward, _STAND_IN))
        scale.meta |= {"val": value_of(product).new_empty((rows, 1), dtype=torch.float32), BACKWARD: True}
        with emitter.like(backward):
            scaled = self.scaled(product, scale)
        (times,) = scaled.all_input_nodes
        emitter.redirect(product, scaled, besides=times)
        return scale
