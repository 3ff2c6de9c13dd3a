"""Delayed scales of a whole model and FP8 copies of its weights: a launch each, whatever the model.

    e = ceil(log2(max(history) * 2^margin / largest)),  clamped to [-100, 100]      scale = 2^e
    row = fp8(clamp(W / scale)),  turned = row^T

These are the functions under nn/scale_book.py and nn/weight_bank.py: Triton on CUDA, and here the
twin in plain PyTorch, which is bit-equal to it. All scales are powers of two, found from the bits
of float32 numbers, so no rounding is involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loka.core.current import LIMIT, scale_for
from loka.core.recipe import Cast, Format, Granularity
from loka.core.reference import quantize
from loka.kernels.launches import note_launch

if TYPE_CHECKING:
    from loka.kernels.triton.bank import Table

_INFINITY = 0x7F800000
_E4M3 = Cast(Format.E4M3, Granularity.TENSOR)


@dataclass(frozen=True)
class Scales:
    """The buffers of a scale book with S slots, on one device. Slot i of `scale` and `seen` is at 4 i.

    history float32 [S, length], a ring of maxima whose next place is cursor int32 [S];
    scale float32 [4 S]; seen int32 [4 S], the bits of max |value|; counters int64 [S, 2], elements
    saturated and underflowed; rules int32 [S, 2], the bits of `largest` and the margin; units
    int32 [4 U], set to zero with `seen`.
    """

    history: torch.Tensor
    cursor: torch.Tensor
    scale: torch.Tensor
    seen: torch.Tensor
    counters: torch.Tensor
    rules: torch.Tensor
    units: torch.Tensor

    def to(self, device: torch.device) -> Scales:
        return Scales(**{name: buffer.to(device) for name, buffer in vars(self).items()})


@dataclass(frozen=True)
class Entry:
    """A weight [N, K], its FP8 copies row [N16, K16] and turned [K16, N16], and its slot."""

    weight: torch.Tensor
    row: torch.Tensor
    turned: torch.Tensor
    slot: int


@dataclass(frozen=True)
class Batch:
    """Weights of one dtype, which one launch quantizes; `table` is what its programs read."""

    entries: tuple[Entry, ...]
    table: Table | None


def update_scales(scales: Scales) -> None:
    """Every slot's next scale from what was seen; then `seen` and `units` are zero. One launch.

    A slot that saw nothing but zeros, or NaN or infinity, keeps its history and its scale.
    """
    note_launch("book")
    if _on_triton(scales.history):
        from loka.kernels.triton.bank import update_scales_fused

        update_scales_fused(scales, LIMIT)
        return
    bits = scales.seen[::4]
    taken = _usable(bits)
    length = scales.history.shape[1]
    here = torch.arange(length, dtype=torch.int32, device=bits.device) == scales.cursor[:, None]
    pushed = torch.where(taken[:, None] & here, bits.view(torch.float32)[:, None], scales.history)
    scales.history.copy_(pushed)
    scales.cursor.copy_(torch.where(taken, (scales.cursor + 1) % length, scales.cursor))
    following = scale_for(pushed.amax(dim=1), *scales.rules.unbind(1))
    scales.scale[::4].copy_(torch.where(taken, following, scales.scale[::4]))
    scales.seen.zero_()
    scales.units.zero_()


def prime_scale(scales: Scales, slot: int, amax: torch.Tensor) -> None:
    """Fills a slot's history with `amax`, one element of any float dtype; sets the scale for it.

    Nothing changes where amax is zero or not finite. A few small launches, no synchronization.
    """
    amax = amax.detach().to(scales.history.device, torch.float32).reshape(1)
    taken = _usable(amax.view(torch.int32))
    history, scale = scales.history[slot], scales.scale[4 * slot : 4 * slot + 1]
    following = scale_for(amax, *scales.rules[slot])
    history.copy_(torch.where(taken, amax, history))
    scale.copy_(torch.where(taken, following, scale))
    scales.seen[4 * slot].zero_()


def _usable(bits: torch.Tensor) -> torch.Tensor:
    return (bits > 0) & (bits < _INFINITY)


def batches(entries: Sequence[Entry]) -> tuple[Batch, ...]:
    """`entries` by dtype, with their tables. On CUDA this copies from the host: it synchronizes."""
    by_dtype: dict[torch.dtype, list[Entry]] = {}
    for entry in entries:
        by_dtype.setdefault(entry.weight.dtype, []).append(entry)
    if not entries or not _on_triton(entries[0].weight):
        return tuple(Batch(tuple(group), None) for group in by_dtype.values())
    from loka.kernels.triton.bank import build_table

    return tuple(Batch(tuple(group), build_table(group)) for group in by_dtype.values())


def quantize_bank(batch: Batch, scales: Scales, *, counting: bool = False) -> None:
    """Writes row and turned of every weight in the batch with its slot's scale as it is. One launch.

    Values beyond the scale saturate, NaN and infinity become NaN, padding is zero. `seen` of the
    slot is raised to max |W|. With `counting`, `counters` grow by the elements that saturated, and
    by those that were not zero and are now.
    """
    note_launch("bank")
    if batch.table is not None:
        from loka.kernels.triton.bank import quantize_bank_fused

        quantize_bank_fused(batch.table, scales, counting=counting)
        return
    for entry in batch.entries:
        _quantize_entry(entry, scales, counting)


def _quantize_entry(entry: Entry, scales: Scales, counting: bool) -> None:
    place, weight = 4 * entry.slot, entry.weight.detach()
    scale, seen = scales.scale[place : place + 1], scales.seen[place : place + 1]
    padded = (entry.row.shape[0], entry.row.shape[1])
    data = quantize(weight, _E4M3, padded=padded, scale=scale).data.view(torch.uint8)
    entry.row.view(torch.uint8).copy_(data)
    entry.turned.view(torch.uint8).copy_(data.t())
    seen.copy_(torch.maximum(seen, weight.abs().amax().float().view(1).view(torch.int32)))
    if not counting:
        return
    magnitude = (weight.float() / scale).abs()
    saturated = (magnitude > Format.E4M3.max) & weight.isfinite()
    # Half of the smallest subnormal is a tie, and zero is even.
    underflowed = (magnitude <= Format.E4M3.smallest_subnormal / 2) & (weight != 0)
    scales.counters[entry.slot] += torch.stack((saturated.sum(), underflowed.sum()))


def _on_triton(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda
