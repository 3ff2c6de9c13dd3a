"""What FP8 sites carry from step to step outside of a `state_dict`: to save it, and to put it back.

Delayed scales with their histories, what was seen since they last moved, counters, and which scales come
from data. FP8 copies of weights are not among it: the next step makes them from the weights and the scales.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from loka.nn.chain import chain_states
from loka.nn.chain_state import ChainState
from loka.nn.site import sites_of

_BY_SLOT = ("history", "cursor", "scale", "seen", "counters")


def carried(model: nn.Module) -> dict[str, Any]:
    """As plain tensors, numbers and names. Tensors are shared with the model, not copied.

    To be taken between steps: what a forward keeps for its own backward is not in it.
    """
    return {
        "health": {name: site.health for name, site in sites_of(model).items()},
        "scales": [_of(state) for state in chain_states(model)],
    }


@torch.no_grad()
def restore_carried(model: nn.Module, content: Mapping[str, Any]) -> None:
    """Puts it into a model that was converted alike, after its weights were loaded.

    Raises ValueError where the FP8 sites are others; the first differences are named.
    """
    sites, states = sites_of(model), chain_states(model)
    here = [*sites, *(slot.name for state in states for slot in state.book.slots)]
    there = [*content["health"], *(name for saved in content["scales"] for name in saved["slots"])]
    if here != there or len(states) != len(content["scales"]):
        only = [name for name in there if name not in here] + [name for name in here if name not in there]
        raise ValueError(
            f"other FP8 sites run now than when it was saved: {', '.join(only[:5]) or 'in another order'}"
        )
    for name, site in sites.items():
        site.health.copy_(content["health"][name])
    for state, saved in zip(states, content["scales"], strict=True):
        _put(state, saved, list(range(len(state.book.slots))))
        state._trained, state._due = saved["trained"], saved["due"]
        state.bank._forgotten = saved["forgotten"]
        _put_runs(state, saved)


@torch.no_grad()
def carry_over(content: Mapping[str, Any], model: nn.Module) -> None:
    """What `content` (a copy, of before) knows of sites that run in `model` too; others start anew.

    For a model that is converted again with another plan in the middle of training.
    """
    for name, site in sites_of(model).items():
        if name in content["health"]:
            site.health.copy_(content["health"][name])
    for state in chain_states(model):
        for saved in content["scales"]:
            known = {name: place for place, name in enumerate(saved["slots"])}
            _put(state, saved, [known.get(slot.name) for slot in state.book.slots])
            state._trained |= saved["trained"]
            _put_runs(state, saved)


def _of(state: ChainState) -> dict[str, Any]:
    book = state.book
    return {
        "slots": [slot.name for slot in book.slots],
        "primed": [book.primed(place) for place in range(len(book.slots))],
        **{name: getattr(book.buffers, name) for name in _BY_SLOT},
        "calibrated": [state._calibrated[place] for place in range(len(book.slots))],
        "trained": state._trained,
        "due": state._due,
        "forgotten": state.bank._forgotten,
        "runs": dict(state.runs),
    }


def _put_runs(state: ChainState, saved: Mapping[str, Any]) -> None:
    """Checkpoints from before runs were counted have none."""
    for site, runs in saved.get("runs", {}).items():
        if site in state.runs:
            state.runs[site] = runs


def _put(state: ChainState, saved: Mapping[str, Any], sources: list[int | None]) -> None:
    """`sources`: for each slot of the book, its place in `saved`, or None to leave it as it is."""
    book = state.book
    places = [place for place, source in enumerate(sources) if source is not None]
    if not places:
        return
    taken = [source for source in sources if source is not None]
    for name in _BY_SLOT:
        buffer = getattr(book.buffers, name)
        rows = len(book.slots)  # a slot's elements lie together: 4 of `scale` and `seen`, 16 of `history`
        values = saved[name].to(buffer.device).reshape(len(saved["slots"]), -1)
        buffer.view(rows, -1)[places] = values[taken]
    calibrated = {place: saved["calibrated"][source] for place, source in zip(places, taken, strict=True)}
    state._calibrated = Counter({**state._calibrated, **calibrated})
    for place, source in zip(places, taken, strict=True):
        book._primed[place] = saved["primed"][source]
