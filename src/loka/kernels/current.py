"""Passes that take a scale from the tensor at hand: Triton on CUDA, else core/current.py."""

from __future__ import annotations

from typing import Any

import torch

from loka.core import current as reference
from loka.core.chain import Epilogue
from loka.core.producer import Parameters, Rounded
from loka.kernels.launches import note_launch
from loka.kernels.producer import lying


def scale_produced(
    z: torch.Tensor, epilogue: Epilogue, parameters: Parameters, *, scale: torch.Tensor
) -> None:
    """core/current.scale_produced. One launch."""
    note_launch("scale")
    if z.is_cuda:
        from loka.kernels.triton.current import scale_produced_fused

        scale_produced_fused(lying(z), epilogue, parameters, scale=scale)
        return
    reference.scale_produced(z, epilogue, parameters, scale=scale)


def scale_derived(
    grad: torch.Tensor,
    z: torch.Tensor | Rounded | None,
    epilogue: Epilogue,
    parameters: Parameters,
    **options: Any,
) -> None:
    """core/current.scale_derived. One launch."""
    note_launch("scale")
    if grad.is_cuda:
        from loka.kernels.triton.current import scale_derived_fused

        z = lying(z) if isinstance(z, torch.Tensor) else z
        scale_derived_fused(lying(grad), z, epilogue, parameters, **options)
        return
    reference.scale_derived(grad, z, epilogue, parameters, **options)
