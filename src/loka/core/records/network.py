"""The links of a cluster, as a team writes them down: a JSON file, read and never written by LoKA.

    time of a hop = alpha + bytes / bandwidth

Each number has its two ends, says whether it was measured or is assumed, and where it is from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loka.core.exceptions import FileRefused
from loka.core.storage.codec import decode, record
from loka.core.storage.untrusted import Limits, parse_json, read_bounded

_WAY_OUT = "write it as docs/scale.md shows; examples/h200-ib.json is one that is read"


def _ordered(quantity: Quantity) -> None:
    if not (0 < quantity.low <= quantity.value <= quantity.high and math.isfinite(quantity.high)):
        raise ValueError(
            f"0 < low <= value <= high is needed, not {quantity.low}, {quantity.value}, {quantity.high}"
        )
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


@dataclass(frozen=True, kw_only=True)
class Link:
    """Of one GPU, in one direction. `alpha_us`: of one hop of a collective."""

    alpha_us: Quantity
    bandwidth_gbps: Quantity


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
        between: the link of a GPU to other nodes: its share of the node's network cards.
        launch_us: what a collective takes besides its hops and bytes.
        memory_gbps: what code between GEMMs reads and writes in a GPU's memory, GB/s.
        elementwise_share: of the bytes that it would move op by op, those that it moves; 1 is eager code.
    """

    name: str
    gpus_per_node: int
    inside: Link
    between: Link
    launch_us: Quantity
    memory_gbps: Quantity
    elementwise_share: Quantity
    comment: str = ""

    @property
    def quantities(self) -> dict[str, Quantity]:
        """Every assumption of it, by name."""
        return {
            "alpha inside a node": self.inside.alpha_us,
            "bandwidth inside a node": self.inside.bandwidth_gbps,
            "alpha between nodes": self.between.alpha_us,
            "bandwidth between nodes": self.between.bandwidth_gbps,
            "launch of a collective": self.launch_us,
            "memory bandwidth": self.memory_gbps,
            "elementwise share": self.elementwise_share,
        }

    @classmethod
    def load(cls, path: Path | str) -> Network:
        """Raises FileRefused, which names the field, for a file that cannot be a network."""

        def refuse(why: object) -> FileRefused:
            return FileRefused(f"cannot use {path} as a network", why=[str(why)], way_out=_WAY_OUT)

        try:
            content: Any = parse_json(read_bounded(Path(path), Limits()), Limits())
            return decode(cls, content)
        except FileNotFoundError:
            raise refuse("there is no such file") from None
        except OSError as error:
            raise refuse(error.strerror or error) from error
        except (ValueError, EOFError, RecursionError) as error:
            raise refuse(error) from error
