"""Counters and flags of sites, one launch for all (compiler/notes.py); programs look through parts."""

import functools
import itertools
from typing import Any

import torch
import triton
import triton.language as tl

from loka.kernels.quantize.side import run_index
from loka.kernels.triton.launch import cdiv, launch, launching_on, recorded
from loka.kernels.triton.pack import INTERPRETED, magnitude_bits
from loka.kernels.triton.source import compiled

_MOST = 64  # entries a launch
_BLOCK = 8192


@triton.jit
def _note(scale, count, health, flag, run, BLOCK: tl.constexpr):
    """Sets a flag of a site's counters where a scale is not finite; `run` is the place of a count, or -1."""
    part = tl.program_id(1)
    place = part * BLOCK + tl.arange(0, BLOCK)
    scale_ptr, health_ptr = scale.to(tl.pointer_type(tl.float32)), health.to(tl.pointer_type(tl.int64))
    numbers = tl.load(scale_ptr + place, mask=place < count, other=0.0)
    if tl.max(magnitude_bits(numbers), axis=0) >= 0x7F800000:
        tl.store(health_ptr + flag, tl.full((), 1, tl.int64))
    if (part == 0) & (run >= 0):
        tl.atomic_add(health_ptr + run, tl.full((), 1, tl.int64), sem="relaxed")


def note_fused(healths: list[torch.Tensor], scales: list[torch.Tensor], places: list[int]) -> None:
    for begin in range(0, len(places), _MOST):
        part = slice(begin, begin + _MOST)
        _note_part(healths[part], scales[part], tuple(places[part]))


def _note_part(healths: list[torch.Tensor], scales: list[torch.Tensor], flags: tuple[int, ...]) -> None:
    counts = tuple(scale.numel() for scale in scales)

    def launched() -> None:
        args = zip(scales, counts, healths, strict=True)
        grid = len(flags), max(cdiv(count, _BLOCK) for count in counts)
        launch(_kernel(flags), grid, tuple(itertools.chain.from_iterable(args)), {}, num_warps=8)

    with launching_on(healths[0]):
        if INTERPRETED:
            launched()
        else:
            recorded(("notes", flags, counts), (*scales, *healths), launched, _nothing, _nothing)


def _nothing(*_: object) -> None:
    """What such a launch returns."""


@functools.lru_cache(maxsize=256)
def _kernel(flags: tuple[int, ...]) -> Any:
    """Programs choose their entry's addresses as numbers: branches would be as many copies of the code."""
    entries = range(len(flags))
    arguments = ", ".join(f"s{i}, n{i}, h{i}" for i in entries)
    counts = ", ".join(f'"n{i}"' for i in entries)
    lines = [f"@triton.jit(do_not_specialize=[{counts}])", f"def notes({arguments}):"]
    lines += ["    entry = tl.program_id(0)"]
    for i, flag in enumerate(flags):
        found = {"scale": f"s{i}.to(tl.int64)", "count": f"n{i}", "health": f"h{i}.to(tl.int64)"}
        found |= {"flag": str(flag), "run": str(run_index(flag))}
        for name, text in found.items():
            lines.append(f"    {name} = " + (f"tl.where(entry == {i}, {text}, {name})" if i else text))
    lines += [f"    _note(scale, count, health, flag, run, {_BLOCK})"]
    names = {"triton": triton, "tl": tl, "_note": _note}
    return compiled("\n".join(lines) + "\n", "notes", names)
