"""The links of a cluster: a JSON file that a team writes, or `loka scale calibrate` after measuring.

    time of a hop = alpha + bytes / bandwidth

Each number has its two ends, says whether it was measured or is assumed, and where it is from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from loka.core.device import Fingerprint
from loka.core.storage.codec import decode, encode, record, sparse
from loka.core.storage.files import read_json, write_atomic
from loka.core.table import format_table

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
OPS: tuple[Op, ...] = get_args(Op)

_WAY_OUT = "write it as docs/scale.md shows; examples/h200-ib.json is one that is read"


def _ordered(quantity: Quantity) -> None:
    if not (0 < quantity.low <= quantity.value <= quantity.high and math.isfinite(quantity.high)):
        raise ValueError(f"0 < low <= value <= high is needed, not {quantity.low}, {quantity.value}, {quantity.high}")
    if not quantity.comment.strip():
        raise ValueError("comment is empty: say where the number is from")


@record(check=_ordered)
@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A positive number with the ends between which it is taken to lie, and where it is from."""

    value: float
    low: float
    high: float
    origin: Literal["measured", "assumed"]
    comment: str

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}] {self.origin}: {self.comment}"


def _positive(own: Own) -> None:
    if not (0 < own.latency < math.inf and 0 < own.bandwidth < math.inf):
        raise ValueError(f"shares are above 0, not {own.latency}, {own.bandwidth}")
    sizes, times = ([point[side] for point in own.carried] for side in (0, 1))
    if sizes != sorted({*sizes}) or times != sorted(times) or (sizes and not (sizes[0] > 0 <= times[0])):
        raise ValueError("carried: bytes rise from above 0, and microseconds do not fall")
    if sizes and not 0 < times[-1] < math.inf:
        raise ValueError("carried: the most bytes take no time")


@record(check=_positive)
@dataclass(frozen=True, kw_only=True)
class Own:
    """Of one collective, over what the link says: `latency` of launch and hops, `bandwidth`; or, where it was measured,
    what bytes of a GPU over its link take in microseconds, (bytes, us), instead of bytes over a bandwidth."""

    latency: float
    bandwidth: float
    carried: tuple[tuple[float, float], ...] = sparse(default=())


SAME = Own(latency=1.0, bandwidth=1.0)


def _collectives(link: Link) -> None:
    if strange := link.own.keys() - set(OPS):
        raise ValueError(f"own is of {', '.join(sorted(strange))}; collectives are {', '.join(OPS)}")


@record(check=_collectives)
@dataclass(frozen=True, kw_only=True)
class Link:
    """Of one GPU, in one direction. `alpha_us`: of one hop of a collective; `own`: by collective, where they
    differ."""

    alpha_us: Quantity
    bandwidth_gbps: Quantity
    own: Mapping[str, Own] = sparse(default_factory=dict)


@record(row=True)
@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A collective on `ranks` GPUs: what it takes besides bytes, GB/s that a GPU's link reached (no more than the least
    of it, where the link inside holds the collective up), and the largest relative `error` of what is told of a size
    held out, which is `at` bytes."""

    op: str
    ranks: int
    fixed_us: float
    gbps: float
    error: float
    at: int

    @property
    def worst(self) -> str:
        return f"{100 * self.error:.1f} % at {self.at >> 10} KB"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How the links were measured. Every second one of `sizes`, in bytes, was held out."""

    machine: Fingerprint
    backend: str
    ranks: int
    nodes: int
    sizes: tuple[int, ...]
    collectives: tuple[Fitted, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> Fitted:
        return max(self.collectives, key=lambda one: one.error)

    def __str__(self) -> str:
        header = ("collective", "ranks", "fixed us", "GB/s", "worst of sizes held out")
        rows = [
            (one.op, str(one.ranks), f"{one.fixed_us:.1f}", f"{one.gbps:.4g}", one.worst) for one in self.collectives
        ]
        lines = [
            f"{self.ranks} ranks on {self.nodes} node(s) over {self.backend}, {self.machine}",
            format_table(header, rows),
            f"Largest relative error at sizes that were not fitted: {self.worst.worst}, {self.worst.op}.",
        ]
        return "\n".join((*lines, *(f"note: {note}" for note in self.notes)))


def _whole_nodes(network: Network) -> None:
    if network.gpus_per_node < 1:
        raise ValueError(f"gpus_per_node is {network.gpus_per_node}")
    if network.elementwise_share.high > 1:
        raise ValueError("elementwise_share is a share: high is at most 1")


@record(check=_whole_nodes)
@dataclass(frozen=True, kw_only=True)
class Network:
    """A cluster of equal nodes.

    Attributes:
        inside: the link of a GPU to the others of its node, GB/s (1e9 bytes).
        between: the link of a GPU to other nodes: its share of the node's network cards; None where nothing
            is known of it.
        launch_us: what a collective takes besides its hops and bytes.
        memory_gbps: what code between GEMMs reads and writes in a GPU's memory, GB/s.
        elementwise_share: of the bytes that it would move op by op, those that it moves; 1 is eager code.
        measured: how, of a network that `loka scale calibrate` wrote.
    """

    name: str
    gpus_per_node: int
    inside: Link
    between: Link | None
    launch_us: Quantity
    memory_gbps: Quantity
    elementwise_share: Quantity
    comment: str = ""
    measured: Calibration | None = sparse(None)

    def link(self, nodes: int) -> Link:
        """Over which a collective of so many nodes goes last."""
        return self.between if nodes > 1 and self.between is not None else self.inside

    @property
    def quantities(self) -> dict[str, Quantity]:
        """Every assumption of it, by name."""
        between = {}
        if self.between is not None:
            between["alpha between nodes"] = self.between.alpha_us
            between["bandwidth between nodes"] = self.between.bandwidth_gbps
        return {
            "alpha inside a node": self.inside.alpha_us,
            "bandwidth inside a node": self.inside.bandwidth_gbps,
            **between,
            "launch of a collective": self.launch_us,
            "memory bandwidth": self.memory_gbps,
            "elementwise share": self.elementwise_share,
        }

    def save(self, path: Path | str) -> None:
        """For `load`. Raises NotWritten."""
        write_atomic(Path(path), json.dumps(encode(self), indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def load(cls, path: Path | str) -> Network:
        """Raises FileRefused, which names the field, for a file that cannot be a network."""

        return read_json(Path(path), "a network", way_out=_WAY_OUT, parse=partial(decode, cls))
