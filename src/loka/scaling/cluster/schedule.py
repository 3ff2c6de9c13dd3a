"""When compute and collectives of a step run: streams, in the order in which the engine issued them.

    compute    one op behind the other
    wire       one collective behind the other; each starts when it was issued and what it waits for is there
    replicas   HSDP's all-reduces

What waits for what is torch's (FSDP2: `_fsdp_param_group.py` of torch 2.13; DDP: the reducer). The host is
taken to be ahead of the GPU.

    Gather    FSDP2. Forward: it may run from the copy-out of the gather before the last one on, so a unit is
              gathered while the one before it computes. Backward: from the last copy-out on, one unit ahead.
    Copied    FSDP2. Compute waits for the oldest gather that was not waited for.
    Reduce    behind the compute before it. `waits`: FSDP2's compute first waits for the reduction before it; DDP's
              buckets and ids of tables are waited for by the join alone.
    Replicate HSDP. Behind the reduction before it and all-reduces before that. `apart`: over links that no
              other collective of the step uses, and beside these, as it has a stream of its own.
    Blocking  compute waits for it, and it for compute and all-reduces of replicas.
    Join      compute waits for all of the wire, as the optimizer does.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    us: float


@dataclass(frozen=True)
class Gather:
    us: float
    backward: bool


@dataclass(frozen=True)
class Copied:
    pass


@dataclass(frozen=True)
class Reduce:
    us: float
    waits: bool


@dataclass(frozen=True)
class Replicate:
    us: float
    apart: bool


@dataclass(frozen=True)
class Blocking:
    us: float


@dataclass(frozen=True)
class Join:
    pass


Item = Compute | Gather | Copied | Reduce | Replicate | Blocking | Join


@dataclass(frozen=True)
class Timeline:
    """Microseconds. `exposed`: in which nothing computes, for it waits for the wire."""

    total: float
    compute: float
    wire: float

    @property
    def exposed(self) -> float:
        return self.total - self.compute


def schedule(items: Iterable[Item]) -> Timeline:
    """Runs the items in their order.

    Raises ValueError for a `Copied` without a `Gather` before it.
    """
    now = busy = wire = sent = reduced = replicated = 0.0
    copies: list[float] = []
    gathers: deque[float] = deque()
    for item in items:
        if isinstance(item, Compute):
            now += item.us
            busy += item.us
        elif isinstance(item, Gather):
            ahead = 1 if item.backward else 2
            ready = copies[-ahead] if len(copies) >= ahead else 0.0
            wire = max(wire, ready) + item.us
            sent += item.us
            gathers.append(wire)
        elif isinstance(item, Copied):
            if not gathers:
                raise ValueError("a copy-out of what was not gathered")
            now = max(now, gathers.popleft())
            copies.append(now)
        elif isinstance(item, Reduce):
            if item.waits:
                now = max(now, reduced)
            wire = max(wire, now) + item.us
            reduced = wire if item.waits else reduced
            sent += item.us
        elif isinstance(item, Replicate):
            replicated = max(replicated, reduced if item.apart else wire) + item.us
            wire = wire if item.apart else replicated
            sent += item.us
        elif isinstance(item, Blocking):
            now = wire = max(wire, now, replicated) + item.us
            sent += item.us
        else:
            now = max(now, wire, replicated)
    return Timeline(total=max(now, wire, replicated), compute=busy, wire=sent)
