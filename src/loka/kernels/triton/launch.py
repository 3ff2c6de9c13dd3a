"""Launching a Triton kernel again without working out its specialization.

Triton binds and inspects every argument at every launch, which costs the host more than many of our kernels
take. What it compiles for depends on dtypes, on the alignment of addresses and on integers, so a launch whose
are all the same as before runs what was compiled then.
"""

from __future__ import annotations

from typing import Any

import torch

from loka.kernels.triton.pack import INTERPRETED

_ALIGNMENT = 16  # bytes; triton tells addresses apart by it
_KNOWN: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
_MOST = 8192  # launches remembered; a ragged batch makes many


def cdiv(a: int, b: int) -> int:
    """triton.cdiv is a constexpr function, which costs the host 6 us."""
    return -(-a // b)


def launch(
    kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], constants: dict[str, Any], num_warps: int = 4
) -> None:
    """`kernel[grid](*args, **constants, num_warps=...)`; `args` are tensors and integers, in order."""
    if INTERPRETED:
        kernel[grid](*args, **constants, num_warps=num_warps)
        return
    key = (
        kernel,
        args[0].device.index,
        num_warps,
        *[(a.dtype, a.data_ptr() % _ALIGNMENT) if isinstance(a, torch.Tensor) else a for a in args],
        *constants.values(),
    )
    known = _KNOWN.get(key)
    if known is None:
        compiled = kernel[grid](*args, **constants, num_warps=num_warps)
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = (compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :]))
        return
    compiled, values = known
    compiled[(*grid, 1)](*args, *values)
