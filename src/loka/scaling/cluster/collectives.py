"""What a collective takes: a launch, alpha times its hops, and its bytes over the slower of two links.

For N ranks in n nodes of g, of a buffer of S bytes (what an all-gather makes, a reduce-scatter takes):

    inside     S (N - 1) / N     over the bandwidth of a GPU to its node
    between    S (n - 1) / n     over that of all g network cards of a node: rings use every card
    hops       a ring's N - 1, of which n - 1 are between nodes; at best log2 (trees, PAT)

So NCCL's own tuner counts (src/graph/tuning.cc, ncclTopoTuneModel). An all-reduce is both, one behind the
other; of its hops the tuner takes the fewer, ring's or tree's. An all-to-all has no ring that adds up on the
way: each GPU sends S (N - g) / N by its own card, and a message to each other one, at best all at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from loka.core.exceptions import LokaError
from loka.core.records.network import Network

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
End = Literal["low", "value", "high"]

HOPS = "hops of a collective"
_EVERY: Mapping[str, End] = {}


@dataclass(frozen=True)
class Wire:
    """One collective. `size`: S in bytes; `moved`: bytes that casts and codecs around it read and write, op
    by op: they are eager code."""

    op: Op
    size: float
    moved: float = 0.0


def check_ranks(ranks: int, network: Network) -> None:
    """Raises LokaError for a number of GPUs that fills no whole nodes, or below 2."""
    each = network.gpus_per_node
    if ranks < 2 or (ranks > each and ranks % each):
        raise LokaError(
            f"{ranks} GPUs in nodes of {each}",
            why=["a step needs two GPUs or more to exchange anything, and nodes are taken as whole"],
            way_out=f"2 to {each} GPUs, or a multiple of {each}",
        )


def picked_of(network: Network, ends: Mapping[str, End]) -> dict[str, float]:
    """Numbers of the network, each at the end that is given for its name, or at its value."""
    return {name: getattr(quantity, ends.get(name, "value")) for name, quantity in network.quantities.items()}


def wire_us(wire: Wire, ranks: int, network: Network, ends: Mapping[str, End] = _EVERY) -> float:
    """Microseconds. `ends`: at which end inputs lie, by name (`Network.quantities`, HOPS); "value" if absent.

    Never falls with size, alpha or hops, and never grows with bandwidth.
    """
    return picked_wire_us(
        wire, ranks, network.gpus_per_node, picked_of(network, ends), ends.get(HOPS, "value")
    )


def picked_wire_us(wire: Wire, ranks: int, per_node: int, picked: Mapping[str, float], hops: End) -> float:
    """The same of numbers that were picked."""
    nodes = max(ranks // per_node, 1)
    inner = ranks // nodes
    inside, between = _volumes(wire, ranks, nodes, inner)
    carried = max(inside / picked["bandwidth inside a node"], between / picked["bandwidth between nodes"])
    latency = _latency(
        wire.op, nodes, inner, (picked["alpha inside a node"], picked["alpha between nodes"]), hops
    )
    codecs = wire.moved / picked["memory bandwidth"]
    return picked["launch of a collective"] + latency + (carried + codecs) / 1e3


def _volumes(wire: Wire, ranks: int, nodes: int, inner: int) -> tuple[float, float]:
    """Bytes of a GPU over its link inside the node, and over its network card."""
    if wire.op == "all_to_all":
        return wire.size * (inner - 1) / ranks, wire.size * (ranks - inner) / ranks
    times = 2 if wire.op == "all_reduce" else 1
    return times * wire.size * (ranks - 1) / ranks, times * wire.size * (nodes - 1) / nodes / inner


def _latency(op: Op, nodes: int, inner: int, alphas: tuple[float, float], end: End) -> float:
    inside, between = alphas
    ring = (nodes * inner - nodes) * inside + (nodes - 1) * between
    tree = math.ceil(math.log2(inner)) * inside + math.ceil(math.log2(nodes)) * between
    chain = (inner - 1) * inside + math.ceil(math.log2(nodes)) * between  # NCCL's tree is a chain in a node
    if op == "all_to_all":
        direct = (inside if inner > 1 else 0.0) + (between if nodes > 1 else 0.0)
        return direct if end == "low" else ring
    if op == "all_reduce":
        return 2 * (tree if end == "low" else min(ring, chain))
    return tree if end == "low" else ring
