"""Serving a stack of cross layers: two launches a layer, nothing but FP8 and x' between them.

    v8_l = cast(x8_l V8_l^T)     x_{l+1} = x_0 * (v8_l U8_l^T + b_l) + x_l, and x8_{l+1} with it

The last x is written in high precision, or where a chain alone reads it, in FP8 alone (nn/handover.py).

No backward comes, so u_l is in no one's memory and no maximum is noted: scales stay as they are
(kernels/gemm_cross.py). Against `cross_forward` two roundings to bfloat16 fewer, of u and of v.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loka.core.chain_recipe import ChainRecipe
from loka.core.cross import Crossed
from loka.core.cross_record import CrossStack
from loka.core.recipe import Gemm
from loka.core.report import site_name
from loka.kernels.gemm_cross import CAST_GEMM, FUSED_CROSS, gemm_cast, gemm_cross, unsupported
from loka.kernels.launches import note_launch
from loka.kernels.registry import candidate_named
from loka.kernels.run import note_run
from loka.nn.cross_stack import CrossState, quantized


@dataclass(frozen=True, kw_only=True)
class ServedLayer:
    """What runs in the place of a layer's output GEMMs, by the names that `kernel_runs` counts. `v` is
    None at full rank. `exact_u` and `exact_v`: sums move to float32 after every 128 of K."""

    u: str
    v: str | None
    exact_u: bool
    exact_v: bool


def served_layers(
    stack: CrossStack, recipe: ChainRecipe, kernels: Mapping[str, str], *, dtype: torch.dtype, target: str
) -> tuple[ServedLayer, ...] | None:
    """By layer; None where the stack is served as it is trained.

    A kernel that a plan names for a site was measured by itself, and here there is no GEMM by itself:
    of the name only the accumulation is kept, fast or exact. Emulation that was asked for stays.
    """
    inner = max(layer.shapes[layer.u].in_features for layer in stack.layers)
    if target == "cpu" or unsupported(dtype, target, inner) is not None:
        return None
    layers = []
    for layer in stack.layers:
        exact = {}
        for path in layer.shapes:
            kernel = candidate_named(kernels[site_name(path, Gemm.OUTPUT)]).kernel
            if kernel.name == "emulated":
                return None
            exact[path] = not kernel.fast
        made = recipe.gemm_recipe(Gemm.OUTPUT)
        layers.append(
            ServedLayer(
                u=f"{_named(FUSED_CROSS, exact[layer.u])}:{made}",
                v=None if layer.v is None else f"{_named(CAST_GEMM, exact[layer.v])}:{made}",
                exact_u=exact[layer.u],
                exact_v=layer.v is not None and exact[layer.v],
            )
        )
    return tuple(layers)


def _named(kernel: str, exact: bool) -> str:
    return f"{kernel}_exact" if exact else kernel


@torch.no_grad()
def cross_serve(
    x0: torch.Tensor,
    x: torch.Tensor,
    biases: Sequence[torch.Tensor | None],
    state: CrossState,
    served: Sequence[ServedLayer],
    *,
    scale_out: torch.Tensor | None = None,
) -> Crossed:
    """x_L from x_0 and the first x [T, N], bfloat16; T at least 1: `cross_forward` without `keep`.

    It is in `hp` [T, N], or with `scale_out` float32 [1], a power of two, in `row` [T, N16] under that scale.
    """
    row, _ = quantized(x, state.layers[0].x, keep=False)
    inputs = [layer.x.scale for layer in state.layers]
    inners = [layer.x.scale if layer.inner is None else layer.inner.scale for layer in state.layers]
    folded: Sequence[torch.Tensor] = inputs
    if any(how.v is not None for how in served):  # scales of x_l over those of v_l, of all layers at once
        note_launch("fold")
        folded = torch._foreach_div(inputs, inners)
    for place, (layer, how) in enumerate(zip(state.layers, served, strict=True)):
        a, scale = row, inners[place]
        if how.v is not None:
            assert layer.v is not None, "a low-rank layer has a V"
            note_launch("gemm")
            note_run(how.v, Gemm.OUTPUT)
            a = gemm_cast(row, layer.v.row, folded[place], layer.v.scale, fast=not how.exact_v)
        last = place + 1 == len(state.layers)
        following = scale_out if last else state.layers[place + 1].x.scale
        note_launch("gemm")
        note_run(how.u, Gemm.OUTPUT)
        crossed = gemm_cross(
            a,
            layer.u.row,
            scale,
            layer.u.scale,
            biases[place],
            x0,
            x,
            scale_out=following,
            keep=not last or scale_out is None,
            fast=not how.exact_u,
        )
        if not last:
            assert crossed.hp is not None, "it was to be kept"
            assert crossed.row is not None, "a scale was given"
            x, row = crossed.hp, crossed.row
    return crossed
