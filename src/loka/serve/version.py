"""One version of the weights of a frozen model."""

from dataclasses import dataclass, field

from torch import nn

from loka.serve.replays import Replays
from loka.serve.watch.monitor import Monitor
from loka.serve.watch.shadow import Tally


@dataclass(frozen=True)
class Version:
    """`module` answers, and nothing writes to it; where there are graphs of it, these do. `precise`: the same
    weights in high precision, where requests are shadowed."""

    number: int
    module: nn.Module
    precise: nn.Module | None
    monitor: Monitor
    tally: Tally = field(default_factory=Tally)
    replays: Replays | None = None
