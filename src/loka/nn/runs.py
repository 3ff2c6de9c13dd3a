"""How often the FP8 GEMMs of a model ran, by site: of converted layers, chains and cross layers.

Converted layers count on the device, in the launches that quantize (`health_of`). Chains and cross layers
have no such launch to spare, and count on the host where they call a GEMM. The replay of a CUDA graph
calls nothing: whoever replays one has to count what it holds (`calls_in_a_graph`), as the trainer does.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from torch import nn

from loka.nn.chain import chain_states
from loka.nn.chain_state import ChainState
from loka.nn.site import health_of


def fp8_runs(model: nn.Module) -> dict[str, int]:
    """By FP8 site, 0 where it never ran. Reading it synchronizes.

    In a chain or a stack of cross layers, replays of CUDA graphs that LoKA did not capture are missing.
    """
    found = {site: int(counts["runs"]) for site, counts in health_of(model).items()}
    for state in chain_states(model):
        found.update(state.runs)
    return found


class GraphCalls:
    """The GEMMs of chains and cross layers in one CUDA graph. `note_replay` counts them."""

    def __init__(self) -> None:
        self._calls: list[tuple[ChainState, Counter[str]]] = []

    def note_replay(self) -> None:
        for state, calls in self._calls:
            state.runs.update(calls)


@contextlib.contextmanager
def calls_in_a_graph(model: nn.Module) -> Iterator[GraphCalls]:
    """Around a capture: what it calls does not run, and is counted with every replay instead."""
    found = GraphCalls()
    before = [(state, state.runs.copy()) for state in chain_states(model)]
    try:
        yield found
    finally:
        for state, runs in before:
            found._calls.append((state, state.runs - runs))
            state.runs = runs
