"""Producers on the fastest path for the device: Triton on CUDA, else core/producer.py.

A producer makes a GEMM's operand: it does the norm and the activation that lie between two linear
layers and writes the result in FP8 as the GEMMs read it. Its functions, arguments and results are
those of core/producer.py.
"""

from __future__ import annotations

from typing import Any

import torch

from loka.core import producer as reference
from loka.core.chain import Epilogue, Norm
from loka.core.producer import Derived, Parameters, Rounded

WIDEST_NORM = 32768  # features of a norm that a program of forward holds at a time
WIDEST_BLOCK = 512  # features of a norm up to which backward reduces inside its tile


def unsupported(epilogue: Epilogue, features: int) -> str | None:
    """Why no producer does this, or None. The same on every device, so that a plan fits them all."""
    if epilogue.norm is Norm.BLOCK and WIDEST_BLOCK < epilogue.block < features:
        return f"norm blocks of {epilogue.block} features; {WIDEST_BLOCK} at most fit a tile"
    if epilogue.norm is not Norm.NONE and features > WIDEST_NORM:
        return f"a norm over {features} features; {WIDEST_NORM} at most"
    return None


def produce(z: torch.Tensor, epilogue: Epilogue, parameters: Parameters, **options: Any) -> torch.Tensor:
    """core/producer.produce."""
    if z.is_cuda:
        from loka.kernels.triton.producer import produce_fused

        return produce_fused(lying(z), epilogue, parameters, **options)
    return reference.produce(z, epilogue, parameters, **options)


def row_units(
    grad: torch.Tensor, largest: torch.Tensor, *, factors: tuple[torch.Tensor, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """core/producer.row_units."""
    if grad.is_cuda:
        from loka.kernels.triton.units import row_units_fused

        return row_units_fused(lying(grad), largest, factors=factors)
    return reference.row_units(grad, largest, factors=factors)


def derive(
    grad: torch.Tensor,
    z: torch.Tensor | Rounded | None,
    epilogue: Epilogue,
    parameters: Parameters,
    **options: Any,
) -> Derived:
    """core/producer.derive."""
    if grad.is_cuda:
        from loka.kernels.triton.producer import derive_fused

        z = lying(z) if isinstance(z, torch.Tensor) else z
        return derive_fused(lying(grad), z, epilogue, parameters, **options)
    return reference.derive(grad, z, epilogue, parameters, **options)


def lying(tensor: torch.Tensor) -> torch.Tensor:
    """With rows that lie in memory; any distance between them."""
    return tensor if tensor.stride(1) == 1 or tensor.shape[1] == 1 else tensor.contiguous()
