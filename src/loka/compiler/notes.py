"""What runs in regions, noted where `health_of` and `loka.regions` look for it.

    loka::note_sites(healths, scales, places, shown, record) -> token

An op notes, once a graph runs, that its sites ran, and whether one of their scales was not finite: the
counters of nn/site.py. It is one launch for all sites. Nothing follows from them: the op is declared without
effects, and the token that it returns is handed to a GEMM, which does not read it, so that no compiler drops
the op. `record` names the graph's sites, which region each is in, and why others are in none; running the op
remembers it by the counters' address, so that a graph out of a compiler's cache tells as much as a new one.
"""

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from loka.kernels.custom_op import registered
from loka.kernels.quantize.side import run_index

_RECORDS: dict[int, tuple[StorageWeakRef, str]] = {}  # by the address of a site's counters, as long as they live
_LAUNCHES: Counter[tuple[str, bool]] = Counter()  # on GPUs, by the record of a graph and whether into a CUDA graph
_HERE = threading.local()


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside, sites that this thread runs or records are not counted, which saves one launch in a graph."""
    _HERE.uncounted = True
    try:
        yield
    finally:
        _HERE.uncounted = False


SCALES, FINITE = 1, 2
"""What an entry shows of the rows that enter a site: the scales of all; or whether they are finite alone."""

Watcher = Callable[[list[tuple[int, torch.Tensor, int]]], None]
"""Called with all that a graph shows: the address of a site's counters, a tensor of rows [T, N], and what it
shows. Their memory is the graph's, which may write to it after the call."""


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Inside, graphs that this thread runs or records show `watcher` the inputs of their sites."""
    _HERE.watcher = watcher
    try:
        yield
    finally:
        _HERE.watcher = None


def _note_sites(
    healths: list[torch.Tensor], scales: list[torch.Tensor], places: list[int], shown: list[int], record: str
) -> torch.Tensor:
    """Entry i: where `scales[i]` holds what is not finite, sets flag `places[i]` of `healths[i]` [3, 3].
    Each GEMM has one entry for its operand A, which counts its run too. `shown[i]`: what a watcher sees of
    it, 0 for nothing."""
    for health in dict.fromkeys(healths):  # a site's GEMMs share their counters
        _remember(health, record)
    if (watcher := getattr(_HERE, "watcher", None)) is not None:
        entries = zip(healths, scales, shown, strict=True)
        watcher([(health.data_ptr(), scale, what) for health, scale, what in entries if what])
    if getattr(_HERE, "uncounted", False):
        return scales[0].new_empty(1)
    if healths[0].is_cuda:
        _LAUNCHES[record, torch.cuda.is_current_stream_capturing()] += 1
        from loka.kernels.quantize.triton.notes import note_fused

        note_fused(healths, scales, places)
        return scales[0].new_empty(1)
    for health, scale, place in zip(healths, scales, places, strict=True):
        flat = health.data.view(-1)
        if (run := run_index(place)) >= 0:
            flat[run] += 1
        if not bool(scale.isfinite().all()):
            flat[place] = 1
    return scales[0].new_zeros(1)


def _note_sites_fake(scales: list[torch.Tensor]) -> torch.Tensor:
    return scales[0].new_empty(1)


note_sites = registered("loka::note_sites", _note_sites, _note_sites_fake)


def record_text(regions: Sequence[Sequence[str]], apart: dict[str, str]) -> str:
    return json.dumps({"regions": [list(region) for region in regions], "apart": apart})


def record_of(health: torch.Tensor) -> tuple[list[list[str]], dict[str, str]] | None:
    """The regions of the graph that last ran the site with these counters, and the reasons; None if no graph did."""
    counters, text = _RECORDS.get(health.data_ptr(), (None, ""))
    return None if counters is None or counters.expired() else _parsed(text)


def launches_of(health: torch.Tensor) -> tuple[int, int]:
    """How often graphs like the one that last ran the site with these counters were launched on a GPU: by the host, op
    after op, and into a CUDA graph."""
    _, text = _RECORDS.get(health.data_ptr(), (None, ""))
    return _LAUNCHES[text, False], _LAUNCHES[text, True]


def _remember(health: torch.Tensor, record: str) -> None:
    """Counters that are freed leave their address to others, as of a copy of the model that never ran."""
    counters, known = _RECORDS.get(health.data_ptr(), (None, ""))
    if counters is None or known != record or counters.expired():
        _RECORDS[health.data_ptr()] = StorageWeakRef(health.untyped_storage()), record


@functools.lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[list[list[str]], dict[str, str]]:
    content = json.loads(text)
    return content["regions"], content["apart"]
