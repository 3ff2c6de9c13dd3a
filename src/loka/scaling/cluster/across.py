"""Does it still pay at a thousand GPUs? A traced step, priced by plan and in bf16, at each number of GPUs.

step    the engine's own order of GEMMs and collectives (engines.py), bytes by format (wires.py)
price   GEMM times (compute.py), alpha and bandwidth (collectives.py), then two streams (schedule.py)
ends    of a ratio: each input alone shows which of its ends lowers it; then all lie there at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from loka.core.error import Estimate
from loka.core.exceptions import LokaError, PlanMismatch
from loka.core.records.across import Across, AcrossRow, Parts, Swing
from loka.core.records.network import Network, Quantity
from loka.core.records.plan import Plan
from loka.core.records.scale import Scale
from loka.nn.linears import signature
from loka.nn.unwrap import unwrap
from loka.scaling.cluster.collectives import HOPS, End, check_ranks
from loka.scaling.cluster.compute import (
    OTHER_RATE,
    GemmTime,
    Placed,
    forecast_times,
    layers_in_fp8,
    mean_rate,
    placed,
    planned_times,
)
from loka.scaling.cluster.engines import ENGINES, EngineStep, traced_step
from loka.scaling.cluster.memory import CAPACITY, ORIGIN, held
from loka.scaling.cluster.pricing import GAINS, PRODUCTS, TIMES, Formats, step_of
from loka.scaling.cluster.schedule import Timeline, schedule
from loka.scaling.cluster.tables import Exchange, QComm, Tables, exchange
from loka.scaling.cluster.wires import check_traced
from loka.scaling.inputs import fake_batch, fake_mode, fake_model, mode_of, rows_of
from loka.scaling.scale import Kernels, scale

GPUS = (8, 64, 256, 1024)

_FORMATS = {
    "ddp": (Formats("-", "bf16"), Formats("-", "int8")),
    "fsdp2": tuple(Formats(gather, grads) for gather in ("bf16", "fp8") for grads in ("bf16", "int8")),
}
_Ends = Mapping[str, End]


def scale_across(
    model: nn.Module,
    batch: Any,
    *,
    network: Network,
    gpus: Sequence[int] | None = None,
    plan: Plan | None = None,
    gpu: str = "h200",
    batch_size: int | None = None,
    kernels: Kernels = "all",
    units: Sequence[str] = (),
    tables: Sequence[tuple[int, int]] = (),
    ids: float | None = None,
    qcomm: QComm = "bf16",
) -> Across:
    """What eight bits would give a training step of `model` on many GPUs, under DDP and FSDP2.

        print(scale_across(model, batch, network=Network.load("h200-ib.json"), batch_size=8192))

    The model is left as it is. Adam is taken to update what a GPU holds of the parameters; tables are in
    neither engine, and neither are their lookups' exchange.

    Args:
        batch: what the model is called with on one GPU; `batch_size`, `gpu`, `kernels`: as `loka.scale`.
        gpus: numbers of GPUs, each of which fills a node in part or several nodes; None: `default_gpus`.
        plan: measured at this batch size; without it, times are those of `loka.scale`.
        units: patterns of paths that FSDP2 shards each for itself.
        ids: that a sample looks up in each table, in the mean; None: tables are left out.
        tables: rows and widths, in place of the model's own; `qcomm`: how their embeddings travel.

    Raises:
        LokaError: no number of GPUs or one that fills no nodes, a model that does not run without numbers,
            more than 5 % of its FLOPs at shapes that nobody measured near, an untimed plan.
        PlanMismatch: the plan is of another model, or of other shapes.
        UnknownName, NotConverted: as `loka.scale`.
    """
    gpus = default_gpus(network) if gpus is None else gpus
    for ranks in gpus:
        check_ranks(ranks, network)
    if not gpus:
        raise LokaError("no number of GPUs was asked for", way_out="such as 8, 64, 256")
    if plan is not None:
        lines = signature(unwrap(model), like=plan.model).differences(plan.model)
        if lines:
            raise PlanMismatch("the plan is of another model", why=lines[:8], way_out="plan this model")
    found = scale(model, batch, gpu=gpu, batch_size=batch_size, kernels=kernels)
    times = forecast_times(found) if plan is None else planned_times(found, plan)
    steps = _steps(model, batch, found.batch_size, units)
    held_by: Tables | None = None
    if ids is not None or tables:
        held_by = Tables(
            shapes=tuple(tables) or steps[0].tables, ids=1.0 if ids is None else ids, qcomm=qcomm
        )
    exchanges = {n: exchange(held_by, n, found.batch_size) if held_by else None for n in gpus}
    told: dict[str, Placed] = {step.engine: placed(step, times) for step in steps}
    device = found.machine.device if plan is None else plan.machine.device
    fp8 = frozenset(f"{layer.path}.weight" for layer in layers_in_fp8(found, plan))
    inputs = _inputs(network)
    rate, rows = mean_rate(times), []
    for ranks in dict.fromkeys(gpus):
        for step in steps:
            made = _Steps(step, told[step.engine], rate, ranks, network, fp8, exchanges[ranks])
            rows += [_row(made, formats, inputs) for formats in _FORMATS[step.engine]]
    return Across(
        model=found.model,
        batch_size=found.batch_size,
        gpu=gpu.lower() if plan is None else plan.machine.device,
        network=network.name,
        times=_origins(times, plan),
        rows=tuple(rows),
        assumptions={name: quantity for name, quantity in inputs.items() if quantity is not None},
        units=steps[-1].units,
        memory={
            f"{n} {step.engine}": held(step, n, fp8, one.held if one else 0.0)
            for n, one in exchanges.items()
            for step in steps
        },
        capacity=CAPACITY.get(device, 0.0),
        notes=(*_notes(found, steps, told, plan, len(fp8), network), *_of_tables(held_by, steps[0].tables)),
    )


def default_gpus(network: Network) -> tuple[int, ...]:
    """`GPUS`, or powers of two in a node where nothing is known of others."""
    if network.between is not None:
        return GPUS
    return tuple(1 << step for step in range(1, network.gpus_per_node.bit_length()))


def _steps(model: nn.Module, batch: Any, rows: int, units: Sequence[str]) -> list[EngineStep]:
    mode = mode_of(model) or fake_mode()
    inner = fake_model(unwrap(model), mode)
    given = fake_batch(batch, mode, rows=rows) if rows_of(batch) is not None else batch
    steps = [traced_step(inner, given, mode=mode, engine=engine, units=units) for engine in ENGINES]
    for step in steps:
        check_traced(step)
    return steps


def _inputs(network: Network) -> dict[str, Quantity | None]:
    """Everything that has two ends, by name; None where the ends are GEMM times' own."""
    return {
        TIMES: None,
        GAINS: None,
        **network.quantities,
        HOPS: Quantity(
            value=2,
            low=1,
            high=2,
            origin="assumed",
            comment="two ways to count. 2: as NCCL's tuner does, a ring's for gathers, the fewer of ring "
            "and tree for all-reduce, and one to each rank for all-to-all; 1: log2 of the ranks, for "
            "all-to-all one",
        ),
        PRODUCTS: Quantity(
            value=OTHER_RATE.value,
            low=OTHER_RATE.low,
            high=OTHER_RATE.high,
            origin="assumed",
            comment="time of products that are no site, over that of as many FLOPs of sites; a guess",
        ),
    }


class _Steps:
    """Step times of one engine on a number of GPUs; each is worked out once."""

    def __init__(
        self,
        step: EngineStep,
        place: Placed,
        rate: float,
        ranks: int,
        network: Network,
        fp8: frozenset[str],
        tables: Exchange | None,
    ) -> None:
        self.engine, self.ranks = step.engine, ranks
        self._rate, self._network = rate, network
        self._priced = {
            formats: step_of(
                step,
                place,
                ranks,
                formats=formats,
                in_fp8=fp8 if formats.gather == "fp8" else frozenset(),
                tables=tables,
            )
            for formats in _FORMATS[step.engine]
        }
        self._known: dict[tuple[Any, ...], float] = {}

    def us(self, formats: Formats, ends: _Ends, *, planned: bool) -> float:
        """Microseconds of the step with inputs at the ends that are given."""
        key = (formats, planned, tuple(sorted(ends.items())))
        if key not in self._known:
            self._known[key] = self._line(formats, ends, planned=planned).total
        return self._known[key]

    def parts(self, formats: Formats, *, planned: bool) -> Parts:
        line, priced = self._line(formats, {}, planned=planned), self._priced[formats]
        gemms = priced.gemm_us(planned=planned)
        return Parts(
            gemms=gemms,
            other=line.compute - gemms,
            exposed=line.exposed,
            wire=line.wire,
            sent=sum(wire.size for wire in priced.wires),
        )

    def _line(self, formats: Formats, ends: _Ends, *, planned: bool) -> Timeline:
        priced = self._priced[formats]
        return schedule(priced.items(self._network, self.ranks, rate=self._rate, planned=planned, ends=ends))


def _row(steps: _Steps, formats: Formats, inputs: Mapping[str, Any]) -> AcrossRow:
    plain = _FORMATS[steps.engine][0]

    def bf16(ends: _Ends) -> float:
        return steps.us(plain, ends, planned=False)

    def planned(ends: _Ends) -> float:
        return steps.us(formats, ends, planned=True)

    speedup, swings = _ratio(lambda ends: bf16(ends) / planned(ends), inputs)
    gain = Estimate(1.0, 1.0, 1.0)
    if formats != plain:
        gain, _ = _ratio(lambda ends: steps.us(plain, ends, planned=True) / planned(ends), inputs)
    return AcrossRow(
        gpus=steps.ranks,
        engine=steps.engine,
        gather=formats.gather,
        gradients=formats.gradients,
        bf16=_time(bf16, inputs),
        planned=_time(planned, inputs),
        speedup=speedup,
        format_gain=gain,
        bf16_parts=steps.parts(plain, planned=False),
        parts=steps.parts(formats, planned=True),
        swings=swings,
    )


_FASTER = {"bandwidth inside a node", "bandwidth between nodes", "memory bandwidth", GAINS}
_ROUNDS = 2  # over all inputs, from each start
_TRIED: tuple[End, ...] = ("low", "high")


def _all_at(fast: bool, inputs: Iterable[str]) -> dict[str, End]:
    """Every input at the end at which a step is fast, or slow."""
    return {name: "high" if (name in _FASTER) is fast else "low" for name in inputs}


def _time(value: Callable[[_Ends], float], inputs: Iterable[str]) -> Estimate:
    """A step time. No start of the schedule falls when something takes longer, so its ends are those of all
    inputs at their fast and at their slow ends."""
    return Estimate(value({}), value(_all_at(True, inputs)), value(_all_at(False, inputs)))


def _ratio(value: Callable[[_Ends], float], inputs: Iterable[str]) -> tuple[Estimate, dict[str, Swing]]:
    """A ratio of step times, which an input may move either way, and the more the less another hides it: its
    ends are searched for, one input after the other moved to its best end. Where a fast wire makes way for
    GEMMs and a slow one hides them, that stops short of the best, so it begins in the middle and at both
    ends of all."""
    swings = {name: Swing(low=value({name: "low"}), high=value({name: "high"})) for name in inputs}
    order = sorted(swings, key=lambda name: -swings[name].size)
    starts: tuple[dict[str, End], ...] = ({}, _all_at(True, inputs), _all_at(False, inputs))
    low = min(-_highest(lambda ends: -value(ends), order, start) for start in starts)
    high = max(_highest(value, order, start) for start in starts)
    return Estimate(value({}), low, high), swings


def _highest(value: Callable[[_Ends], float], order: Sequence[str], start: dict[str, End]) -> float:
    ends, best = start, value(start)
    for _ in range(_ROUNDS):
        before = best
        for name in order:
            for end in _TRIED:
                found = value({**ends, name: end})
                if found > best:
                    best, ends = found, {**ends, name: end}
        if best == before:
            break
    return best


def _origins(times: Sequence[GemmTime], plan: Plan | None) -> str:
    if plan is not None:
        return f"measured by the plan on {plan.machine}"
    total = sum(time.flops for time in times) or 1.0
    shares = {
        origin: sum(time.flops for time in times if time.origin == origin) / total
        for origin in ("measured", "interpolated", "unknown")
    }
    told = [f"{100 * share:.3g} % {origin}" for origin, share in shares.items() if share]
    return f"LoKA's stored ones; of the sites' FLOPs {', '.join(told)}"


def _of_tables(tables: Tables | None, left_out: Sequence[tuple[int, int]]) -> list[str]:
    if tables is not None:
        return [
            f"tables: {len(tables.shapes)} of {sum(r * w for r, w in tables.shapes)} elements, "
            f"{tables.ids:g} ids a sample in each, embeddings in {tables.qcomm}; assumed: they lie "
            "table-wise, the largest first to the GPU with the fewest bytes (TorchRec's planner was not "
            "asked), rows are read and written at the memory bandwidth, and ids travel behind compute"
        ]
    elements = sum(rows * width for rows, width in left_out)
    told = (
        f"not in it: tables of {elements} elements, the exchange of their lookups and their optimizer (--ids)"
    )
    return [told] if left_out else []


def _measured_notes(network: Network, device: str) -> list[str]:
    how = network.measured
    if how is None:
        return []
    notes = [
        f"links: {how.ranks} ranks over {how.backend} on {how.machine}; told worst of sizes held out: "
        f"{how.worst.worst}, {how.worst.op}"
    ]
    if how.machine.device != device:
        notes.append(f"links were measured on {how.machine.device}, and GEMMs on {device}")
    return notes


def _notes(
    found: Scale,
    steps: Sequence[EngineStep],
    told: Mapping[str, Placed],
    plan: Plan | None,
    fp8: int,
    network: Network,
) -> tuple[str, ...]:
    step, first = steps[0], told[steps[0].engine]
    units = steps[-1].units
    notes = [
        *found.notes,
        *([f"network: {network.comment}"] if network.comment else []),
        *_measured_notes(network, found.machine.device if plan is None else plan.machine.device),
        f"FSDP2 shards {len(units)} units and the root: {', '.join(units[:6])}"
        f"{', ...' if len(units) > 6 else ''}",
        f"FP8 gather: {fp8} weights"
        + (
            ", as if every site that gains ran by rowwise_e4m3_pow2"
            if plan is None
            else ", by the plan's recipes"
        ),
        "assumed: 28 bytes move for each parameter that a GPU holds, as in a fused Adam in float32",
        ORIGIN,
        "int8 gradients under DDP: LoKA's hook waits for its collectives, so nothing of them is hidden",
    ]
    if step.buffers:
        notes.append(f"not in it: DDP's broadcast of {step.buffers} bytes of buffers before each forward")
    if first.missing:
        notes.append(f"not in it: {100 * first.missing:.2g} % of the sites' FLOPs, of unknown time")
    for engine, where in told.items():
        if where.unseen:
            notes.append(
                f"{engine}: {100 * where.unseen:.2g} % of the sites' FLOPs ran by products of other shapes; "
                "their time stands in front of the step, where nothing hides behind it"
            )
    return (
        *notes,
        "not in it: input pipeline, launches of an eager step, stragglers, traffic of other jobs, compute "
        "slowed by the collectives beside it, 2D sharding",
    )
