"""The GEMM of a site with gradients: eagerly without the dispatcher, elsewhere by the ops of site_ops.py.

Eager calls on plain tensors run the body of the op directly, because a registered op costs the host more than the
launches inside it (docs/log.md, 2026-11-22). Where something traces or watches ops, calls go through the op.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from loka.core.compiling import traced_here
from loka.core.exceptions import NotConverted
from loka.core.records.report import HP
from loka.nn.fp8_weight import Fp8Weight
from loka.nn.site_ops import Candidates, backward_parts, forward_parts, site_backward, site_forward, transformed

_PLAIN = (torch.Tensor, torch.nn.Parameter, Fp8Weight)


def _direct(*tensors: torch.Tensor) -> bool:
    """Whether nothing watches or traces ops: plain tensors, no dispatch mode, no compiler."""
    return (
        not traced_here()
        and all(type(tensor) in _PLAIN for tensor in tensors)
        and not torch._C._len_torch_dispatch_stack()
    )


class SiteGemms(torch.autograd.Function):
    """y [T, out] = x [T, in] @ weight [out, in]^T, each of the three GEMMs by its candidate.

    What a backward GEMM in FP8 needs of x and weight is saved quantized where `output` is in
    FP8 too; otherwise x and weight are saved as they are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        health: torch.Tensor,
        site: str,
        candidates: Candidates,
        keep: tuple[bool, bool],
        join: bool,
        hot: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`keep`: whether gradients of the weight and of x are wanted, so that x and the weight matter."""
        output, grad_input, grad_weight = candidates
        ctx.weight_dtype = weight.dtype
        if output == grad_input == HP and traced_here():
            weight = weight.to(x.dtype)  # in the graph: once for both GEMMs, and fused
        share_x = keep[0] and output != HP and grad_weight != HP
        # FSDP2 frees a gathered weight and gathers it anew for backward, which a copy of it would defeat.
        gathered = isinstance(weight, Fp8Weight) and not traced_here()
        share_weight = keep[1] and output != HP and grad_input != HP and not gathered
        if _direct(x, weight):
            with torch._C.DisableTorchFunction():  # a mode around may know the weight, and take this for its own
                y, kept_x, x_scale, kept_weight, weight_scale = forward_parts(
                    x, weight, health, candidates, (share_x, share_weight), hot
                )
        else:
            y, kept_x, x_scale, kept_weight, weight_scale = site_forward(
                x, weight, health, site, *candidates, share_x, share_weight, join, hot
            )
        # An empty part stands for what no wanted gradient needs: a frozen layer keeps no input alive.
        saved_x = kept_x if share_x else x if keep[0] else x_scale
        saved_weight = kept_weight if share_weight else weight if keep[1] else weight_scale
        ctx.save_for_backward(saved_x, x_scale, saved_weight, weight_scale)
        ctx.health = health
        ctx.site = site
        ctx.candidates = candidates
        ctx.features = x.shape[1]
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        _, grad_input, grad_weight = ctx.candidates
        want_x, want_weight = ctx.needs_input_grad[:2]
        _refuse_transforms(ctx.site, grad_output)
        exact = (not want_x or grad_input == HP) and (not want_weight or grad_weight == HP)
        if torch.is_grad_enabled() and not exact and not traced_here():  # create_graph=True
            raise NotConverted(
                f"{ctx.site}: no second derivative, as of a gradient penalty, goes through gradients in FP8",
                why=["casts, and what forward keeps of the operands, have no graph: its terms would be lost"],
                way_out="force grad_input and grad_weight to hp, or loka.revert(model)",
            )
        if _direct(grad_output) or (exact and torch.is_grad_enabled() and not traced_here()):
            names, want = (grad_input, grad_weight), (want_x, want_weight)
            x, x_scale, weight, scale = saved
            dx, dw = backward_parts(
                grad_output, x, x_scale, weight, scale, ctx.health, names, want, ctx.features, ctx.weight_dtype
            )
        else:
            dx, dw = site_backward(
                grad_output,
                *saved,
                ctx.health,
                ctx.site,
                grad_input,
                grad_weight,
                want_x,
                want_weight,
                ctx.features,
                ctx.weight_dtype,
            )
        return dx if want_x else None, dw if want_weight else None, None, None, None, None, None, None


def _refuse_transforms(site: str, rows: torch.Tensor) -> None:
    """Refuses torch.func, forward-mode AD and torch.jit.trace. In compiled code the op does so (nn/site_ops.py): Dynamo
    would take the answer for a constant.
    """
    if traced_here():
        return
    if torch._C._is_tracing():
        raise NotConverted(
            f"{site}: torch.jit.trace records no FP8 sites, and neither does an export to ONNX by way of it",
            why=["it records operations of torch, and not what Python launches between them"],
            way_out="torch.export.export, loka.serve.freeze, or loka.revert(model) first",
        )
    batched = torch._C._functorch.is_legacy_batchedtensor(rows)  # by `is_grads_batched`
    if batched or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise transformed(site)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    health: torch.Tensor,
    site: str,
    candidates: Candidates,
    join: bool = False,
    hot: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [T, out] = x [T, in] @ weight [out, in]^T of a site, with gradients where they are wanted.

    `join`: a compiler may join it with other sites (loka/compiler). `hot` int64 [32]: as in `Site`.
    """
    _refuse_transforms(site, x)
    grad = torch.is_grad_enabled()
    keep = (grad and weight.requires_grad, grad and x.requires_grad)
    if keep[0] or keep[1]:
        return SiteGemms.apply(x, weight, health, site, candidates, keep, join, hot)
    if _direct(x, weight):
        with torch._C.DisableTorchFunction():
            return forward_parts(x, weight, health, candidates, (False, False), hot)[0]
    return site_forward(x, weight, health, site, *candidates, False, False, join, hot)[0]
