"""What step times compile, compiled beforehand in processes side by side, into the caches on disk.

    python benchmarks/ablation/ablation.py ARGUMENTS --compile-only MODS PART

with the arguments of the ablation that is to follow, and as PART one of

    bf16, naive       a step of that combination
    sites             all that measuring runs, as far as --measure-seconds goes

The last keeps what it probes, which the ablation finds: one at a time for each MODS.
These processes share the GPU, so what they time is thrown away, and they are to end before anything else is
timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from loka.core.records.stats import Stats
from loka.measurement import measure
from loka.measurement.settings import COARSE

_ONCE = replace(COARSE, min_draws=2, max_draws=2, max_rounds=1, search_rounds=1, quantize_once_rounds=1)


def rehearse_sites(
    stats: Stats, *, device: torch.device, candidates: Sequence[str] | None, limit: float | None
) -> None:
    """All that measuring runs, in its order, as far as `limit` seconds go."""
    measure(stats, device=device, candidates=candidates, settings=_ONCE, time_limit=limit)
