"""What DCN-V2's cross layers need between GEMMs, on the fastest path for the device.

Triton on CUDA, else core/cross.py. Functions, arguments and results are those of core/cross.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loka.core import cross as reference
from loka.core.cross import Crossed, CrossGrad


def cross_produce(
    u: torch.Tensor, bias: torch.Tensor | None, x0: torch.Tensor, x: torch.Tensor, **options: Any
) -> Crossed:
    """core/cross.cross_produce."""
    if u.is_cuda:
        from loka.kernels.triton.cross import cross_produce_fused

        return cross_produce_fused(_lying(u), bias, _lying(x0), _lying(x), **options)
    return reference.cross_produce(u, bias, x0, x, **options)


def cross_derive(
    grad: torch.Tensor, inner: torch.Tensor | None, x0: torch.Tensor, **options: Any
) -> CrossGrad:
    """core/cross.cross_derive."""
    if grad.is_cuda:
        from loka.kernels.triton.cross import cross_derive_fused

        return cross_derive_fused(
            _lying(grad), None if inner is None else _lying(inner), _lying(x0), **options
        )
    return reference.cross_derive(grad, inner, x0, **options)


def cross_gather(
    grads: Sequence[torch.Tensor],
    outers: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    inner: torch.Tensor,
    *,
    units: torch.Tensor,
    joint: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """core/cross.cross_gather."""
    if inner.is_cuda:
        from loka.kernels.triton.cross import cross_gather_fused

        return cross_gather_fused(
            [_lying(grad) for grad in grads],
            [_lying(outer) for outer in outers],
            biases,
            _lying(inner),
            units=units,
            joint=joint,
        )
    return reference.cross_gather(grads, outers, biases, inner, units=units, joint=joint)


def _lying(tensor: torch.Tensor) -> torch.Tensor:
    """With rows that lie in memory; any distance between them."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()
