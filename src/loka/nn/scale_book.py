"""The scale book: the delayed scales of a whole model in one place, updated by one launch.

    scale = 2^ceil(log2(max(history) * 2^margin / largest))

A slot belongs to one tensor that is quantized every step. Kernels quantize with `scale(i)` as it
is and raise `seen(i)` to the maximum they met; once a step `update` turns what was seen into the
next scales. A maximum counts for 16 steps. Nothing here synchronizes, except where it says so, and
addresses stay, so that all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loka.kernels.book import Scales, prime_scale, update_scales
from loka.kernels.launches import note_launch

HISTORY = 16  # steps for which a maximum counts; divides what a warp holds
_MOST_OCTAVES = 24


@dataclass(frozen=True, kw_only=True)
class Slot:
    """`largest` is the format's largest value (448 for e4m3); `margin` octaves are left unused below it."""

    name: str
    largest: float = 448.0
    margin: int = 0


class ScaleBook:
    """Scales of `slots` and a second region of `units` maxima, which `update` only sets to zero.

    Every view that a method returns stays valid until `to` moves the book to another device.

    Raises ValueError for a name given twice, a `largest` below 1 or not finite, a margin beyond 24.
    """

    def __init__(self, slots: Sequence[Slot], device: torch.device | str, *, units: int = 0) -> None:
        self.slots = tuple(slots)
        _check(self.slots)
        size = len(self.slots)

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        largest = torch.tensor([slot.largest for slot in self.slots], dtype=torch.float32)
        margin = torch.tensor([slot.margin for slot in self.slots], dtype=torch.int32)
        with torch.inference_mode(mode=False):  # else they could not be written outside of it
            self.buffers = Scales(
                history=zeros(size, HISTORY, dtype=torch.float32),
                cursor=zeros(size, dtype=torch.int32),
                scale=torch.ones(4 * size, dtype=torch.float32, device=device),
                seen=zeros(4 * size, dtype=torch.int32),
                counters=zeros(size, 2, dtype=torch.int64),
                rules=torch.stack((largest.view(torch.int32), margin), dim=1).to(device),
                units=zeros(4 * units, dtype=torch.int32),
            )
        self._primed = [False] * size
        self.counting = False  # a tenth of a producer's time (benchmarks/fused)
        self.moves = 0  # how often all scales moved; what was quantized before used other ones

    @property
    def device(self) -> torch.device:
        return self.buffers.history.device

    def scale(self, slot: int, kept: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [1], aligned to 16 bytes; dequantizes: hp = fp8 * scale. 1 before anything was seen.

        As it is, or as it was when `keep` returned `kept`, or as it is in what `blank` returned.
        """
        return (self.buffers.scale if kept is None else kept)[4 * slot : 4 * slot + 1]

    def keep(self) -> torch.Tensor:
        """All scales as they are now, in a copy: for tensors that outlive the next update. One launch."""
        note_launch("keep")
        return self.buffers.scale.clone()

    def blank(self) -> torch.Tensor:
        """Zeros in place of all scales, for those that come from the tensor at hand. One launch."""
        note_launch("scale")
        return torch.zeros_like(self.buffers.scale)

    def seen(self, slot: int) -> torch.Tensor:
        """int32 [1]: the bits of max |value| as float32 since the last update; raise it by atomic max."""
        return self.buffers.seen[4 * slot : 4 * slot + 1]

    def counted(self, slot: int) -> torch.Tensor | None:
        """`counts`, where this book is asked to count; else None: kernels then have less to do."""
        return self.counts(slot) if self.counting else None

    def counts(self, slot: int) -> torch.Tensor:
        """int64 [2]: elements that saturated, and that were not zero and became it, ever since."""
        return self.buffers.counters[slot]

    def unit(self, unit: int) -> torch.Tensor:
        """int32 [1]: a maximum that no slot follows from; zero after every update."""
        return self.buffers.units[4 * unit : 4 * unit + 1]

    @torch.no_grad()
    def update(self) -> None:
        """The next scales of all slots, and nothing seen: one launch.

        A slot that saw only zeros, or NaN or infinity, keeps its scale and its history: neither
        an empty step nor a bad one may spoil the steps after it.
        """
        update_scales(self.buffers)
        self.moves += 1

    @torch.no_grad()
    def prime(self, slot: int, amax: torch.Tensor) -> None:
        """As if max |value| = `amax` [] had been seen at every step so far; no synchronization.

        Zero or not finite, it leaves the slot as it was. The slot counts as primed either way:
        the host does not know the value.
        """
        prime_scale(self.buffers, slot, amax)
        self._primed[slot] = True

    def primed(self, slot: int) -> bool:
        """Whether `prime` was called; known to the host."""
        return self._primed[slot]

    def snapshot(self) -> dict[str, dict[str, float]]:
        """{name: {scale, amax, saturated, underflowed}}, amax the largest of the history. Synchronizes."""
        scales = self.buffers.scale[::4].tolist()
        maxima = self.buffers.history.amax(dim=1).tolist()
        counters = self.buffers.counters.tolist()
        return {
            slot.name: {"scale": scale, "amax": amax, "saturated": counts[0], "underflowed": counts[1]}
            for slot, scale, amax, counts in zip(self.slots, scales, maxima, counters, strict=True)
        }

    def to(self, device: torch.device | str) -> ScaleBook:
        """Moves this book, in place. Views and CUDA graphs made before hold the old buffers."""
        self.buffers = self.buffers.to(torch.device(device))
        return self


def _check(slots: Sequence[Slot]) -> None:
    names = [slot.name for slot in slots]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"slots of a scale book need distinct names; given twice: {', '.join(twice)}")
    for slot in slots:
        if not 1.0 <= slot.largest < math.inf:
            raise ValueError(f"slot {slot.name}: largest = {slot.largest} is no format's; e4m3 has 448")
        if abs(slot.margin) > _MOST_OCTAVES:
            raise ValueError(f"slot {slot.name}: a margin of {slot.margin} octaves leaves no format any room")
