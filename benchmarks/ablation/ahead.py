"""What step times compile, compiled beforehand in processes side by side, into the caches on disk.

    python benchmarks/ablation/ablation.py ARGUMENTS --compile-only MODS PART

with the arguments of the ablation that is to follow, and as PART one of

    bf16, naive       a step of that combination
    chains, tokens    every chain, or every layer over tokens, by default kernels
    sites             all that measuring runs, as far as --measure-seconds goes

All but the first two keep what they probe, which the ablation finds: of these one at a time for each MODS.
These processes share the GPU, so what they time is thrown away, and they are to end before anything else is
timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from loka.core.stats import Stats
from loka.probe import measure
from loka.probe.chain_times import chain_key, time_chain
from loka.probe.settings import COARSE
from loka.probe.turned_times import time_turned, turned_key

_ONCE = replace(COARSE, min_draws=2, max_draws=2, max_rounds=1, search_rounds=1, sharing_rounds=1)


def rehearse_sites(
    stats: Stats,
    *,
    device: torch.device,
    candidates: Sequence[str] | None,
    recipes: tuple[str, ...],
    limit: float | None,
) -> None:
    """All that measuring runs, in its order, as far as `limit` seconds go."""
    settings = replace(_ONCE, chain_recipes=recipes)
    measure(stats, device=device, candidates=candidates, settings=settings, time_limit=limit)


def rehearse_chains(stats: Stats, *, device: torch.device, recipes: tuple[str, ...]) -> None:
    """Every chain, once of each shape."""
    settings = replace(_ONCE, chain_recipes=recipes)
    done: set[str] = set()
    for chain in stats.chains:
        if chain.lone or not all(path in stats.layers for path in chain.linears):
            continue
        layers = {path: stats.layers[path] for path in chain.linears}
        if (key := chain_key(chain, layers, {})) not in done:
            time_chain(chain, layers, {}, device=device, settings=settings)
            done.add(key)


def rehearse_tokens(stats: Stats, *, device: torch.device) -> None:
    """Every layer over tokens in both forms, once of each shape."""
    done: set[str] = set()
    for path, layer in stats.layers.items():
        shape = stats.model.layers[path]
        if layer.turned and (key := turned_key(layer, shape)) not in done:
            time_turned(layer, shape, device=device, settings=_ONCE)
            done.add(key)
