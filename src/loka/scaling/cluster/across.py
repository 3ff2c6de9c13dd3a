"""Does it still pay at a thousand GPUs? A traced step, priced by plan and in bf16, at each number of GPUs.

step    the engine's own order of GEMMs and collectives (engines.py), bytes by format (wires.py)
price   GEMM times (compute.py), alpha and bandwidth (collectives.py), then streams (schedule.py)
ends    of a ratio: each input alone shows which of its ends lowers it; then all lie there at once
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from loka.core.error import Estimate, exactly
from loka.core.exceptions import LokaError, PlanMismatch, UnknownName, truncated
from loka.core.records.across import Across, AcrossRow, Swing
from loka.core.records.network import Network, Quantity
from loka.core.records.plan import Plan
from loka.core.signature import AS_PROBED
from loka.nn.linears import signature
from loka.nn.unwrap import unwrap
from loka.scaling.cluster.alpha_beta import quantity_of
from loka.scaling.cluster.collectives import HOPS, End, check_groups, check_ranks
from loka.scaling.cluster.compute import (
    BY_PLAN,
    OTHER_RATE,
    Placed,
    cast_weights,
    forecast_times,
    layers_in_fp8,
    mean_rate,
    placed,
    planned_times,
)
from loka.scaling.cluster.engines import ENGINES, Engine, EngineStep, traced_step
from loka.scaling.cluster.fitting import AGAIN, MEASURED, Fit, MeasuredStep, Steps, by_engine
from loka.scaling.cluster.memory import CAPACITY, held
from loka.scaling.cluster.notes import notes_of, of_tables, origins
from loka.scaling.cluster.placement import Placer
from loka.scaling.cluster.pricing import BETWEEN, GAINS, PRODUCTS, TIMES, Formats, step_of
from loka.scaling.cluster.tables import Exchange, QComm, Tables, exchange
from loka.scaling.cluster.wires import check_traced
from loka.scaling.inputs import fake_batch, fake_mode, fake_model, mode_of, rows_of
from loka.scaling.scale import Kernels, scale

GPUS = (8, 64, 256, 1024)

_Ends = Mapping[str, End]
_SHARDED = tuple(Formats(gather, grads) for gather in ("bf16", "fp8") for grads in ("bf16", "int8"))
_FORMATS = {"ddp": (Formats("-", "bf16"), Formats("-", "int8")), "fsdp2": _SHARDED, "hsdp": _SHARDED}


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
    engines: Sequence[Engine] = (),
    groups: Sequence[int] = (),
    units: Sequence[str] = (),
    tables: Sequence[tuple[int, int]] = (),
    ids: float | None = None,
    qcomm: QComm = "bf16",
    tables_by: Placer = "size",
    table_group: int = 0,
    sync_every: int = 0,
    measured: Sequence[MeasuredStep] = (),
) -> Across:
    """What eight bits would give a training step of `model` on many GPUs, under DDP, FSDP2 and HSDP.

        print(scale_across(model, batch, network=Network.load("h200-ib.json"), batch_size=8192))

    The model is left as it is. Adam is taken to update what a GPU holds of trained parameters; tables are in
    neither engine, and neither are their lookups' exchange.

    Args:
        batch: what the model is called with on one GPU; `batch_size`, `gpu`, `kernels`: as `loka.scale`.
        gpus: numbers of GPUs, each of which fills a node in part or several nodes; None: `default_gpus`.
        plan: measured at this batch size; without it, times are those of `loka.scale`.
        engines: of ddp, fsdp2, hsdp; empty: the first two, and hsdp where there are groups.
        groups: numbers of GPUs over which HSDP shards; empty: those of a node.
        units: patterns of paths that FSDP2 and HSDP shard each for itself.
        ids: that a sample looks up in each table, in the mean; None: tables are left out.
        tables: rows and widths, in place of the model's own; `qcomm`: how their embeddings travel.
        tables_by: size, rows, or torchrec, whose planner is asked where they lie.
        table_group: GPUs that share them, as under DMPCollection, 0: all; whose replicas of them are made
            equal every `sync_every` steps.
        measured: a step of an engine on few GPUs, which all that computes is fitted to (fitting.py).

    Raises:
        LokaError: no number of GPUs or one that fills no nodes, groups that do not fit, a model that does not
            run without numbers, more than 5 % of its FLOPs at shapes nobody measured near, an untimed plan, a
            measured step of no engine that is told, or shorter than its collectives.
        PlanMismatch: the plan is of another model, or of other shapes.
        UnknownName, NotConverted: as `loka.scale`. MissingLibrary: TorchRec, where its planner is asked.
    """
    gpus = default_gpus(network) if gpus is None else gpus
    _check_gpus(gpus, network)
    engines, groups = _engines(engines, groups, gpus, network)
    if ids is None and not tables and (tables_by != "size" or table_group or sync_every or qcomm != "bf16"):
        raise LokaError("options of tables were given, and no tables", way_out="give --ids, or --table too")
    if table_group:
        check_groups([table_group], gpus, network, option="--table-group", replicas_first=True)
    _check_plan(plan, model)
    found = scale(model, batch, gpu=gpu, batch_size=batch_size, kernels=kernels)
    times = forecast_times(found) if plan is None else planned_times(found, plan)
    steps = _steps(model, batch, found.batch_size, engines, units)
    device = found.machine.device if plan is None else plan.machine.device
    capacity = CAPACITY.get(device, 0.0)
    asked: Tables | None = None
    if ids is not None or tables:
        shapes = tuple(tables) or steps[0].tables
        asked = Tables(
            shapes=shapes,
            ids=1.0 if ids is None else ids,
            qcomm=qcomm,
            by=tables_by,
            group=table_group,
            every=sync_every,
        )
    exchanges = _exchanges(asked, {*gpus, *(one.gpus for one in measured)}, found.batch_size, network, capacity)
    fp8 = frozenset(f"{layer.path}.weight" for layer in layers_in_fp8(found, plan))
    fp8 &= {param.name for param in steps[0].params}  # a plain parameter is gathered in its own dtype
    pricer = _Pricer(
        network=network,
        rate=mean_rate(times),
        on_gpu={step.engine: placed(step, times) for step in steps},
        in_fp8=fp8,
        exchanges=exchanges,
    )
    arms = [_Arm(step, group) for step in steps for group in (groups if step.engine == "hsdp" else (0,))]
    fits = _fits(arms, pricer, measured)
    inputs = _inputs(network) | _again(measured)
    copied = cast_weights(found, plan)
    rows, memory = [], {}
    for ranks in dict.fromkeys(gpus):
        for arm in arms:
            if arm.group >= ranks:
                continue
            made = pricer.steps(arm, ranks, _FORMATS[arm.step.engine], fits.get(arm.name))
            rows += [_row(made, formats, inputs) for formats in made.priced]
            of_tables_held = exchanges[ranks].held if ranks in exchanges else 0.0
            memory[f"{ranks} {arm.name}"] = held(arm.step, arm.group or ranks, copied, of_tables_held)
    return Across(
        model=found.model,
        batch_size=found.batch_size,
        gpu=gpu.lower() if plan is None else plan.machine.device,
        network=network.name,
        times=origins(times, plan, kernels),
        rows=tuple(rows),
        assumptions={name: quantity for name, quantity in inputs.items() if quantity is not None},
        units=max((step.units for step in steps), key=len),
        memory=memory,
        capacity=capacity,
        notes=(
            *(fit.note for fit in fits.values()),
            *notes_of(found, steps, pricer.on_gpu, plan, len(fp8), network),
            *of_tables(asked, exchanges, steps[0].tables),
        ),
    )


@dataclass(frozen=True)
class _Arm:
    """An engine's traced step, which HSDP shards over `group` GPUs; 0: it has no groups."""

    step: EngineStep
    group: int

    @property
    def name(self) -> str:
        return f"hsdp/{self.group}" if self.group else self.step.engine


@dataclass(frozen=True, kw_only=True)
class _Pricer:
    """What prices of a step share, whatever the number of GPUs.

    Attributes:
        rate: FLOPs a microsecond of the sites in bf16 (`mean_rate`), by which other products are priced.
        on_gpu: by engine, the times of what its step computes on one GPU.
        in_fp8: names of the weights that FP8 gathers send in eight bits.
        exchanges: by number of GPUs, what tables send; empty where they are left out.
    """

    network: Network
    rate: float
    on_gpu: Mapping[str, Placed]
    in_fp8: frozenset[str]
    exchanges: Mapping[int, Exchange]

    def steps(self, arm: _Arm, ranks: int, formats: Sequence[Formats], fit: Fit | None = None) -> Steps:
        """The arm's step on `ranks` GPUs, priced by format; `fit` to a step that was measured."""
        priced = {
            one: step_of(
                arm.step,
                self.on_gpu[arm.step.engine],
                ranks,
                formats=one,
                in_fp8=self.in_fp8 if one.gather == "fp8" else frozenset(),
                tables=self.exchanges.get(ranks),
                group=arm.group,
            )
            for one in formats
        }
        return Steps(arm.name, ranks, self.rate, self.network, priced, fit)


def _fits(arms: Sequence[_Arm], pricer: _Pricer, measured: Sequence[MeasuredStep]) -> dict[str, Fit]:
    """By name, the arms of which a step was `measured`, fitted to it. Raises LokaError as `scale_across`."""
    known, fits = by_engine(measured, {arm.name: arm.group for arm in arms}, pricer.network), {}
    for arm in arms:
        if arm.name in known:
            plain = _plain(arm.step.engine)
            few = pricer.steps(arm, known[arm.name].gpus, [plain])
            fits[arm.name] = Fit(few, plain, known[arm.name]).checked()
    return fits


def _exchanges(
    tables: Tables | None, gpus: Collection[int], rows: int, network: Network, capacity: float
) -> dict[int, Exchange]:
    """By number of GPUs, where the tables lie and what they send for `rows` on each; empty where there are none.

    `capacity`: bytes of a GPU's memory, 0 where that is not known.
    """
    if tables is None:
        return {}
    return {n: exchange(tables, n, rows, network, capacity) for n in sorted(gpus, reverse=True)}


def _check_gpus(gpus: Sequence[int], network: Network) -> None:
    for ranks in gpus:
        check_ranks(ranks, network)
    if not gpus:
        raise LokaError("no number of GPUs was asked for", way_out="give some, such as 8, 64, 256")


def _check_plan(plan: Plan | None, model: nn.Module) -> None:
    if plan is None:
        return
    lines = signature(unwrap(model), like=plan.model).differences(plan.model)
    if lines:
        raise PlanMismatch("the plan is of another model", why=truncated(lines, 8), way_out=AS_PROBED)


def default_gpus(network: Network) -> tuple[int, ...]:
    """`GPUS`, or powers of two in a node where nothing is known of others."""
    if network.between is not None:
        return GPUS
    return tuple(1 << step for step in range(1, network.gpus_per_node.bit_length()))


def _engines(
    engines: Sequence[Engine], groups: Sequence[int], gpus: Sequence[int], network: Network
) -> tuple[Sequence[Engine], Sequence[int]]:
    chosen = tuple(dict.fromkeys(engines)) or ENGINES[: 3 if groups else 2]
    if not set(chosen) <= set(ENGINES) or (groups and "hsdp" not in chosen):
        raise UnknownName(
            f"engines {', '.join(chosen)}{' with groups' if groups else ''} cannot be forecast",
            way_out=f"engines out of {', '.join(ENGINES)}; groups are for hsdp alone",
        )
    if "hsdp" in chosen:
        groups = tuple(dict.fromkeys(groups)) or (network.gpus_per_node,)
        check_groups(groups, gpus, network, option="--group")
    return chosen, groups


def _steps(
    model: nn.Module, batch: Any, rows: int, engines: Sequence[Engine], units: Sequence[str]
) -> list[EngineStep]:
    mode = mode_of(model) or fake_mode()
    inner = fake_model(unwrap(model), mode)
    given = fake_batch(batch, mode, rows=rows) if rows_of(batch) is not None else batch
    steps = [traced_step(inner, given, mode=mode, engine=engine, units=units) for engine in engines]
    for step in steps:
        check_traced(step)
    return steps


def _plain(engine: str) -> Formats:
    return Formats("-" if engine == "ddp" else "bf16", "bf16")


def _row(steps: Steps, formats: Formats, inputs: Mapping[str, Any]) -> AcrossRow:
    plain = _plain(steps.engine)

    def bf16(ends: _Ends) -> float:
        return steps.us(plain, ends, planned=False)

    def planned(ends: _Ends) -> float:
        return steps.us(formats, ends, planned=True)

    speedup, swings = _ratio(lambda ends: bf16(ends) / planned(ends), inputs)
    gain = exactly(1.0)
    if formats != plain:
        gain, _ = _ratio(lambda ends: steps.us(plain, ends, planned=True) / planned(ends), inputs)
    return AcrossRow(
        gpus=steps.ranks,
        engine=steps.engine,
        gather=formats.gather,
        gradients=formats.gradients,
        bf16=_time(bf16, inputs, fitted=steps.fit is not None),
        planned=_time(planned, inputs, fitted=steps.fit is not None),
        speedup=speedup,
        format_gain=gain,
        bf16_parts=steps.parts(plain, planned=False),
        parts=steps.parts(formats, planned=True),
        swings=swings,
    )


def _inputs(network: Network) -> dict[str, Quantity | None]:
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
        PRODUCTS: quantity_of(
            OTHER_RATE, "time of products that are no site, over that of as many FLOPs of sites; a guess", "assumed"
        ),
        BETWEEN: quantity_of(
            BY_PLAN, "bytes between GEMMs by plan, over bf16's: regions spare casts and copies; a guess", "assumed"
        ),
    }


def _again(measured: Sequence[MeasuredStep]) -> dict[str, Quantity | None]:
    """By plan alone where some step was measured by plan."""
    times = {False: [one.bf16 for one in measured], True: [one.planned for one in measured if one.planned is not None]}
    comment = "of the step that was measured: another time, on other GPUs of the kind; a guess"
    return {MEASURED[planned]: quantity_of(AGAIN, comment, "assumed") for planned, of in times.items() if of}


_FASTER = {"bandwidth inside a node", "bandwidth between nodes", "memory bandwidth", GAINS}
_ROUNDS = 2  # over all inputs, from each start
_TRIED: tuple[End, ...] = ("low", "high")


def _all_at(fast: bool, inputs: Mapping[str, Any]) -> dict[str, End]:
    return {name: "high" if (name in _FASTER) is fast else "low" for name in inputs}


def _time(value: Callable[[_Ends], float], inputs: Mapping[str, Any], *, fitted: bool) -> Estimate:
    """A step time. No start of the schedule falls when something takes longer, so its ends are those of all
    inputs at their fast and at their slow ends; but where a slower wire means that less was computed in a step that
    was measured."""
    if fitted:
        return _ratio(value, inputs)[0]
    return Estimate(value({}), value(_all_at(True, inputs)), value(_all_at(False, inputs)))


def _ratio(value: Callable[[_Ends], float], inputs: Mapping[str, Any]) -> tuple[Estimate, dict[str, Swing]]:
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
