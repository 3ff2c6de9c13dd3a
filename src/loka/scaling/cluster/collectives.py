"""What a collective takes: a launch, alpha times its hops, and its bytes over the slower of two links.

For N ranks in n nodes of g, of a buffer of S bytes (what an all-gather makes, a reduce-scatter takes):

    inside     S (N - 1) / N     over the bandwidth of a GPU to its node
    between    S (n - 1) / n     over that of all g network cards of a node: rings use every card
    hops       a ring's N - 1, of which n - 1 are between nodes; at best log2 (trees, PAT)

So NCCL's own tuner counts (src/graph/tuning.cc, ncclTopoTuneModel). An all-reduce is both, one behind the
other; of its hops the tuner takes the fewer, ring's or tree's. An all-to-all has no ring that adds up on the
way: each GPU sends S (N - g) / N by its own card, and a message to each other one, at best all at once.

A collective in a group counts the group's ranks and nodes, g of them in a node. All groups of a mesh run at
once, so a group has its own GPUs' cards and no others'.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from loka.core.exceptions import LokaError
from loka.core.records.network import SAME, Link, Network, Op

End = Literal["low", "value", "high"]

HOPS = "hops of a collective"
_EVERY: Mapping[str, End] = {}


@dataclass(frozen=True)
class Wire:
    """One collective. `size`: S in bytes; `moved`: bytes that casts and codecs around it read and write, op
    by op: they are eager code. `ranks` of its group, each `stride` behind the one before; 0: all ranks."""

    op: Op
    size: float
    moved: float = 0.0
    ranks: int = 0
    stride: int = 1


def check_ranks(ranks: int, network: Network) -> None:
    """Raises LokaError for a number of GPUs that fills no whole nodes, or below 2; and for several nodes
    where nothing is known of what is between them."""
    each = network.gpus_per_node
    if ranks > each and network.between is None:
        raise LokaError(
            f"{network.name} says nothing of links between nodes, and {ranks} GPUs need several nodes of {each}",
            way_out=f"at most {each}; or write the field between, or measure it: `loka scale calibrate` "
            "on two nodes, or with --base and a file that has it",
        )
    if ranks < 2 or (ranks > each and ranks % each):
        raise LokaError(
            f"{ranks} GPUs do not fill nodes of {each}",
            why=["a step needs two GPUs or more to exchange anything, and every node is taken to be full"],
            way_out=f"2 to {each} GPUs, or a multiple of {each}",
        )


def check_groups(
    groups: Sequence[int], gpus: Sequence[int], network: Network, *, option: str, replicas_first: bool = False
) -> None:
    """Raises LokaError for a group that some number of GPUs is no multiple of, that parts nodes unevenly, or
    that has no replicas on any of them. GPUs that follow one another are of a group, or of replicas."""
    each = network.gpus_per_node

    def fits(group: int, ranks: int) -> bool:
        side = ranks // group if replicas_first else group
        return ranks <= group or (ranks % group == 0 and 0 in (each % side, side % each))

    candidates = [group for group in range(2, max(gpus)) if all(fits(group, ranks) for ranks in gpus)]
    for group in groups:
        if group not in candidates:
            raise LokaError(
                f"{option} {group} on {', '.join(map(str, gpus))} GPUs in nodes of {each}",
                why=["there must be two equal groups or more, and their parts in nodes must be equal"],
                way_out=f"one of {', '.join(map(str, candidates))}" if candidates else "more GPUs",
            )


def spread(ranks: int, stride: int, each: int) -> tuple[int, int]:
    """Nodes of `each` GPUs that a group has ranks in, and its ranks in one of them."""
    inner = min(max(each // stride, 1), ranks)
    return ranks // inner, inner


def picked_of(network: Network, ends: Mapping[str, End]) -> dict[str, float]:
    """Numbers of the network, each at the end that is given for its name, or at its value."""
    return {name: getattr(quantity, ends.get(name, "value")) for name, quantity in network.quantities.items()}


def wire_us(wire: Wire, ranks: int, network: Network, ends: Mapping[str, End] = _EVERY) -> float:
    """Microseconds. `ends`: at which end inputs lie, by name (`Network.quantities`, HOPS); "value" if absent.

    Never falls with size, alpha or hops, and never grows with bandwidth.
    """
    return picked_wire_us(wire, ranks, network, picked_of(network, ends), ends.get(HOPS, "value"))


def picked_wire_us(wire: Wire, ranks: int, network: Network, picked: Mapping[str, float], hops: End) -> float:
    """The same of numbers that were picked."""
    nodes, inner = spread(wire.ranks or ranks, wire.stride, network.gpus_per_node)
    inside, between = volumes(wire.op, wire.size, nodes, inner)
    carried = carried_us(wire.op, inside, network.inside, picked["bandwidth inside a node"])
    own = network.link(nodes).own.get(wire.op, SAME)
    if nodes > 1:
        carried = max(carried, carried_us(wire.op, between, network.link(nodes), picked["bandwidth between nodes"]))
    alphas = (picked["alpha inside a node"], picked.get("alpha between nodes", 0.0))
    fixed = picked["launch of a collective"] + latency(wire.op, nodes, inner, alphas, hops)
    codecs = wire.moved / picked["memory bandwidth"]
    return fixed * own.latency + carried + codecs / 1e3


def carried_us(op: Op, moved: float, link: Link, gbps: float) -> float:
    """Of bytes over a link that has `gbps`; as measured, between sizes by a line, and beyond at their bandwidth."""
    own = link.own.get(op, SAME)
    if not own.carried:
        return moved / gbps / own.bandwidth / 1e3
    sizes, times = zip((0.0, 0.0), *own.carried, strict=True)
    beyond = max(moved / sizes[-1], 1.0)
    return float(np.interp(moved, sizes, times)) * beyond * link.bandwidth_gbps.value / gbps


def volumes(op: Op, size: float, nodes: int, inner: int) -> tuple[float, float]:
    """Bytes of a GPU over its link inside the node of `inner` ranks, and over its network card."""
    ranks = nodes * inner
    if op == "all_to_all":
        return size * (inner - 1) / ranks, size * (ranks - inner) / ranks
    times = 2 if op == "all_reduce" else 1
    inside = times * size * (ranks - 1) / ranks if inner > 1 else 0.0
    return inside, times * size * (nodes - 1) / nodes / inner


def latency(op: Op, nodes: int, inner: int, alphas: tuple[float, float], end: End = "value") -> float:
    """Microseconds of the hops; `alphas` inside a node and between nodes."""
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
