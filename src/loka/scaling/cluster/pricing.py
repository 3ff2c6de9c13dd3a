"""A traced step with formats chosen: what the schedule runs, for any ends of the inputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loka.core.records.network import Network
from loka.scaling.cluster.collectives import HOPS, End, Wire, picked_of, picked_wire_us
from loka.scaling.cluster.compute import BY_PLAN, OTHER_RATE, Placed, Segment, gemm_us
from loka.scaling.cluster.engines import CopiedOut, EngineStep, Gathered, Moved, Reduced, Replicated
from loka.scaling.cluster.schedule import Blocking, Compute, Copied, Gather, Item, Join, Reduce, Replicate
from loka.scaling.cluster.tables import Exchange
from loka.scaling.cluster.wires import (
    gather_wire,
    held_elements,
    quantized_bytes,
    reduce_wires,
    replica_wire,
    scale_wire,
)

TIMES, GAINS, PRODUCTS = "bf16 GEMM times", "gain of eight bits", "other products"
BETWEEN = "elementwise by plan"
"""Inputs that are no number of a network."""

_ADAM = 28
"""Bytes that a fused Adam reads and writes for a float32 parameter: 4 each of it, its gradient and its two
moments, and all but the gradient back. Of a frozen parameter none."""


@dataclass(frozen=True)
class Formats:
    """`gather`: "bf16" or "fp8" of FSDP2, "-" of DDP. `gradients`: "bf16", "int8" or "e4m3"."""

    gather: str
    gradients: Any


@dataclass(frozen=True)
class _Traffic:
    """Bytes of eager code: of an optimizer, of quantizing shards."""

    size: float


@dataclass(frozen=True)
class _Sent:
    """`kind`: gather, gather_backward, reduce (`waits`), replicate or blocking. Every so many steps, of which
    each gets its share."""

    wire: Wire
    kind: str
    every: int = 1


class _Work:
    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._sums: dict[tuple[bool, str, str], float] = {}

    def gemms(self, planned: bool, time: str, gain: str) -> float:
        key = (planned, time, gain)
        if key not in self._sums:
            self._sums[key] = gemm_us(self.segment.gemms, planned=planned, time=time, gain=gain)
        return self._sums[key]


_Entry = Segment | _Traffic | _Sent | Copied | Join


class Priced:
    """A step whose formats are chosen, in the engine's order."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = [_Work(entry) if isinstance(entry, Segment) else entry for entry in entries]
        # A model's layers are alike, and so is what they send: each kind is priced once.
        self._kinds = list(dict.fromkeys(entry for entry in entries if isinstance(entry, _Sent)))
        places = {kind: place for place, kind in enumerate(self._kinds)}
        self._sent = [places[entry] for entry in entries if isinstance(entry, _Sent)]
        self._eight = any(gemm.gain.high != 1 for e in entries if isinstance(e, Segment) for gemm in e.gemms)

    @property
    def wires(self) -> list[Wire]:
        return [entry.wire for entry in self._entries if isinstance(entry, _Sent)]

    @property
    def sent_bytes(self) -> float:
        return sum(one.wire.size / one.every for one in self._entries if isinstance(one, _Sent))

    def gemm_us(self, *, planned: bool) -> float:
        return sum(e.gemms(planned, "value", "value") for e in self._entries if isinstance(e, _Work))

    def items(
        self, network: Network, ranks: int, *, rate: float, planned: bool, ends: Mapping[str, End], longer: float = 1.0
    ) -> Iterator[Item]:
        """What `schedule` runs. `rate`: FLOPs a microsecond of products that are no site. `ends`: of the
        network's quantities, HOPS, TIMES, GAINS, PRODUCTS and BETWEEN. `longer`: how many times as long all that
        computes takes."""
        picked = picked_of(network, ends)
        moved = picked["elementwise share"] / picked["memory bandwidth"] / 1e3
        if planned and self._eight:
            moved *= getattr(BY_PLAN, ends.get(BETWEEN, "value"))
        flops = getattr(OTHER_RATE, ends.get(PRODUCTS, "value")) / rate
        time, gain, hops = (ends.get(name, "value") for name in (TIMES, GAINS, HOPS))
        sent = [_item(one, picked_wire_us(one.wire, ranks, network, picked, hops), network) for one in self._kinds]
        following = iter(self._sent)
        for entry in self._entries:
            if isinstance(entry, _Work):
                other = entry.segment.moved * moved + entry.segment.flops * flops
                yield Compute((entry.gemms(planned, time, gain) + other) * longer)
            elif isinstance(entry, _Traffic):
                yield Compute(entry.size / picked["memory bandwidth"] / 1e3 * longer)
            elif isinstance(entry, _Sent):
                yield sent[next(following)]
            else:
                yield entry


def _item(sent: _Sent, us: float, network: Network) -> Item:
    kind = sent.kind
    if kind.startswith("gather"):
        return Gather(us, backward=kind == "gather_backward")
    if kind == "replicate":  # groups that are a node each have the cards for their replicas alone
        return Replicate(us, apart=sent.wire.stride == network.gpus_per_node)
    return Blocking(us / sent.every) if kind == "blocking" else Reduce(us, waits=kind == "reduce waits")


def step_of(
    step: EngineStep,
    placed: Placed,
    ranks: int,
    *,
    formats: Formats,
    in_fp8: frozenset[str],
    tables: Exchange | None = None,
    group: int = 0,
) -> Priced:
    """`step` on `ranks` GPUs, of which HSDP shards over each `group`. `in_fp8`: names of weights that FSDP2
    gathers in eight bits. Of `tables` the next ids travel behind compute, and compute waits for embeddings
    and for their gradients."""
    entries: list[_Entry] = []
    shard = group or ranks
    if tables is not None:
        entries += [_Traffic(tables.looked_up), *_exchanged(tables)]
    ids = [] if tables is None else [_Sent(tables.ids, "reduce")]
    gathered = [p for p in step.params if p.name in in_fp8]
    if gathered:
        entries.append(_Traffic(quantized_bytes(gathered, shard, in_fp8)))
        entries.append(_Sent(replace(scale_wire(len(gathered)), ranks=group), "blocking"))
    _add(entries, placed.segments[-1])
    for place, event in enumerate(step.events):
        if isinstance(event, Moved):
            _add(entries, Segment(moved=event.size))
        elif isinstance(event, Gathered):
            wire = replace(gather_wire(event.params, shard, in_fp8=in_fp8), ranks=group)
            entries.append(_Sent(wire, "gather_backward" if event.backward else "gather"))
        elif isinstance(event, CopiedOut):
            entries.append(Copied())
        elif isinstance(event, Reduced):
            kind = "reduce" if step.engine == "ddp" else "reduce waits"
            if step.engine == "ddp" and formats.gradients != "bf16":
                kind = "blocking"  # its hook calls collectives that the compute stream waits for
            wires = reduce_wires(step.engine, event.params, shard, gradients=formats.gradients, itemsize=event.itemsize)
            entries += [*ids, *(_Sent(replace(wire, ranks=group), kind) for wire in wires)]
            ids = []
        elif isinstance(event, Replicated):
            entries.append(_Sent(replica_wire(event.params, shard, ranks), "replicate"))
        else:
            _add(entries, placed.segments[place])
    if tables is not None:
        entries += [*_exchanged(tables, backward=True), _Traffic(tables.updated)]
        entries += [_Sent(wire, "blocking", tables.every) for wire in tables.sync]
    sharded = 1 if step.engine == "ddp" else shard
    return Priced((*entries, Join(), _Traffic(_ADAM * held_elements(step.trained, sharded))))


def _exchanged(tables: Exchange, *, backward: bool = False) -> list[_Entry]:
    summed = replace(tables.summed, op="all_gather") if backward else tables.summed
    return [_Sent(wire, "blocking") for wire in (tables.pooled, summed) if wire.size]


def _add(entries: list[_Entry], segment: Segment) -> None:
    """To what computes in front of it, if nothing is sent between."""
    last = entries[-1] if entries else None
    if not isinstance(last, Segment):
        entries.append(segment)
        return
    entries[-1] = Segment(
        gemms=(*last.gemms, *segment.gemms), flops=last.flops + segment.flops, moved=last.moved + segment.moved
    )
