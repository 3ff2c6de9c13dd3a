"""How scales must lie in memory for the libraries, and the one copy where they do not.

`Quantized.scale` is logical [groups of rows, groups of columns] with any strides. On a GPU the
quantizer stores what the libraries read (kernels/quantize/side.empty_scale), so these functions
return their argument; a scale from elsewhere is copied, which costs a launch.

A side of length 1 may carry any stride, and libraries compare strides exactly, so even a scale
that lies right may need its strides written anew; that is free. Copies start at 16 bytes: TMA and
cuBLASLt refuse other addresses.
"""

import torch

from loka.core.problem import round_up

_ALIGNMENT = 16  # bytes
_PADDING = 4  # floats, the same 16 bytes


def column_major(scale: torch.Tensor) -> torch.Tensor:
    """[R, C] with strides (1, R rounded up to 4): 1x128 scales of cuBLASLt and DeepGEMM.

    cuBLASLt wants stride R exactly; a kernel for it has R in multiples of 4.
    """
    return _laid_out(scale, (1, round_up(scale.shape[0], _PADDING)))


def row_major(scale: torch.Tensor) -> torch.Tensor:
    """[R, C] with strides (C, 1) exactly: 128x128 scales of DeepGEMM and CUTLASS."""
    return _laid_out(scale, (scale.shape[1], 1))


def padded_rows(scale: torch.Tensor) -> torch.Tensor:
    """[R, C rounded up to 4] row-major, padding unwritten: 128x128 scales of cuBLASLt and torch."""
    rows, columns = scale.shape
    wide = round_up(columns, _PADDING)
    laid_out = _laid_out(scale, (wide, 1))
    if laid_out.untyped_storage().nbytes() < 4 * (laid_out.storage_offset() + rows * wide):
        laid_out = scale.new_empty(rows, wide)
        laid_out[:, :columns].copy_(scale)
    return laid_out.as_strided((rows, wide), (wide, 1))


def vector(scale: torch.Tensor) -> torch.Tensor:
    """[R] contiguous, from row scales [R, 1] or a tensor scale [1, 1]."""
    return _laid_out(scale.reshape(-1), (1,))


def single(scale: torch.Tensor) -> torch.Tensor:
    """A tensor scale [1, 1] for libraries that ask for its address alone."""
    return scale if scale.data_ptr() % _ALIGNMENT == 0 else scale.clone()


def scalar(scale: torch.Tensor) -> torch.Tensor:
    """[] from a tensor scale [1, 1]."""
    return vector(scale).reshape(())


def _laid_out(scale: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    lies_right = all(
        size == 1 or have == wanted for size, have, wanted in zip(scale.shape, scale.stride(), strides, strict=True)
    )
    if lies_right and scale.data_ptr() % _ALIGNMENT == 0:
        return scale if scale.stride() == strides else scale.as_strided(scale.shape, strides)
    copy = torch.empty_strided(scale.shape, strides, dtype=scale.dtype, device=scale.device)
    return copy.copy_(scale)
