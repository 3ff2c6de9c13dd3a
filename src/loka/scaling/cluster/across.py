"""Does it still pay at a thousand GPUs? A traced step, priced by plan and in bf16, at each number of GPUs.

step    the engine's own order of GEMMs and collectives (engines.py), bytes by format (wires.py)
price   GEMM times (compute.py), alpha and bandwidth (collectives.py), then streams (schedule.py)
ends    of a ratio: each input alone shows which of its ends lowers it; then all lie there at once (ends.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from loka.core.error import Estimate
from loka.core.exceptions import LokaError, PlanMismatch, UnknownName
from loka.core.records.across import Across, AcrossRow, Parts
from loka.core.records.network import Network
from loka.core.records.plan import Plan
from loka.nn.linears import signature
from loka.nn.unwrap import unwrap
from loka.scaling.cluster.collectives import check_groups, check_ranks
from loka.scaling.cluster.compute import (
    Placed,
    forecast_times,
    layers_in_fp8,
    mean_rate,
    placed,
    planned_times,
)
from loka.scaling.cluster.ends import Ends, inputs_of, ratio_between, time_between
from loka.scaling.cluster.engines import ENGINES, Engine, EngineStep, traced_step
from loka.scaling.cluster.memory import CAPACITY, held
from loka.scaling.cluster.notes import notes_of, of_tables, origins
from loka.scaling.cluster.placement import Placer
from loka.scaling.cluster.pricing import Formats, step_of
from loka.scaling.cluster.schedule import Timeline, schedule
from loka.scaling.cluster.tables import Exchange, QComm, Tables, exchange
from loka.scaling.cluster.wires import check_traced
from loka.scaling.inputs import fake_batch, fake_mode, fake_model, mode_of, rows_of
from loka.scaling.scale import Kernels, scale

GPUS = (8, 64, 256, 1024)

_SHARDED = tuple(Formats(gather, grads) for gather in ("bf16", "fp8") for grads in ("bf16", "int8"))
_FORMATS = {
    "ddp": (Formats("-", "bf16"), Formats("-", "int8")),
    "fsdp2": _SHARDED,
    "hsdp": _SHARDED,
}


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
) -> Across:
    """What eight bits would give a training step of `model` on many GPUs, under DDP, FSDP2 and HSDP.

        print(scale_across(model, batch, network=Network.load("h200-ib.json"), batch_size=8192))

    The model is left as it is. Adam is taken to update what a GPU holds of the parameters; tables are in
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
        tables_by: size, or torchrec, whose planner is asked where they lie.
        table_group: GPUs that share them, as under DMPCollection, 0: all; whose replicas of them are made
            equal every `sync_every` steps.

    Raises:
        LokaError: no number of GPUs or one that fills no nodes, groups that do not fit, a model that does not
            run without numbers, more than 5 % of its FLOPs at shapes nobody measured near, an untimed plan.
        PlanMismatch: the plan is of another model, or of other shapes.
        UnknownName, NotConverted: as `loka.scale`. MissingLibrary: TorchRec, where its planner is asked.
    """
    gpus = default_gpus(network) if gpus is None else gpus
    for ranks in gpus:
        check_ranks(ranks, network)
    if not gpus:
        raise LokaError("no number of GPUs was asked for", way_out="such as 8, 64, 256")
    engines, groups = _engines(engines, groups, gpus, network)
    if ids is None and not tables and (tables_by != "size" or table_group or sync_every):
        raise LokaError("tables are to be placed, and left out", way_out="--ids, or --table too")
    if table_group:
        check_groups([table_group], gpus, network, option="--table-group", replicas_first=True)
    if plan is not None:
        lines = signature(unwrap(model), like=plan.model).differences(plan.model)
        if lines:
            raise PlanMismatch("the plan is of another model", why=lines[:8], way_out="plan this model")
    found = scale(model, batch, gpu=gpu, batch_size=batch_size, kernels=kernels)
    times = forecast_times(found) if plan is None else planned_times(found, plan)
    steps = _steps(model, batch, found.batch_size, engines, units)
    held_by: Tables | None = None
    device = found.machine.device if plan is None else plan.machine.device
    capacity = CAPACITY.get(device, 0.0)
    if ids is not None or tables:
        held_by = Tables(
            shapes=tuple(tables) or steps[0].tables,
            ids=1.0 if ids is None else ids,
            qcomm=qcomm,
            by=tables_by,
            group=table_group,
            every=sync_every,
        )
    exchanges = {
        n: exchange(held_by, n, found.batch_size, network, capacity) if held_by else None for n in gpus
    }
    told: dict[str, Placed] = {step.engine: placed(step, times) for step in steps}
    fp8 = frozenset(f"{layer.path}.weight" for layer in layers_in_fp8(found, plan))
    inputs = inputs_of(network)
    rate, rows = mean_rate(times), []
    memory = {}
    for ranks in dict.fromkeys(gpus):
        for step, group in _meshes(steps, groups, ranks):
            name = f"hsdp/{group}" if group else step.engine
            made = _Steps(name, step, told[step.engine], rate, ranks, group, network, fp8, exchanges[ranks])
            rows += [_row(made, formats, inputs) for formats in _FORMATS[step.engine]]
            one = exchanges[ranks]
            memory[f"{ranks} {name}"] = held(step, group or ranks, fp8, one.held if one else 0.0)
    return Across(
        model=found.model,
        batch_size=found.batch_size,
        gpu=gpu.lower() if plan is None else plan.machine.device,
        network=network.name,
        times=origins(times, plan),
        rows=tuple(rows),
        assumptions={name: quantity for name, quantity in inputs.items() if quantity is not None},
        units=steps[-1].units,
        memory=memory,
        capacity=capacity,
        notes=(
            *notes_of(found, steps, told, plan, len(fp8), network),
            *of_tables(held_by, exchanges, steps[0].tables),
        ),
    )


def default_gpus(network: Network) -> tuple[int, ...]:
    """`GPUS`, or powers of two in a node where nothing is known of others."""
    if network.between is not None:
        return GPUS
    return tuple(1 << step for step in range(1, network.gpus_per_node.bit_length()))


def _engines(
    engines: Sequence[Engine], groups: Sequence[int], gpus: Sequence[int], network: Network
) -> tuple[tuple[Engine, ...], tuple[int, ...]]:
    for engine in engines:
        if engine not in ENGINES:
            raise UnknownName(f"engine {engine!r}", way_out=f"one of {', '.join(ENGINES)}")
    if groups and engines and "hsdp" not in engines:
        raise LokaError(
            f"groups of {', '.join(map(str, groups))} GPUs under {', '.join(engines)}",
            way_out="hsdp shards in groups: name it too, or leave groups out",
        )
    chosen = tuple(dict.fromkeys(engines)) or (ENGINES if groups else ENGINES[:2])
    if "hsdp" in chosen:
        groups = tuple(dict.fromkeys(groups)) or (network.gpus_per_node,)
        check_groups(groups, gpus, network, option="--group")
    return chosen, tuple(groups)


def _meshes(steps: Sequence[EngineStep], groups: Sequence[int], ranks: int) -> list[tuple[EngineStep, int]]:
    """Each step with its group, 0 where there is none. A group without replicas is FSDP2, and left out."""
    return [
        (step, group)
        for step in steps
        for group in ([one for one in groups if one < ranks] if step.engine == "hsdp" else [0])
    ]


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


class _Steps:
    """Step times of one engine on a number of GPUs; each is worked out once."""

    def __init__(
        self,
        name: str,
        step: EngineStep,
        place: Placed,
        rate: float,
        ranks: int,
        group: int,
        network: Network,
        fp8: frozenset[str],
        tables: Exchange | None,
    ) -> None:
        self.engine, self.ranks, self.formats = name, ranks, _FORMATS[step.engine]
        self._rate, self._network = rate, network
        self._priced = {
            formats: step_of(
                step,
                place,
                ranks,
                formats=formats,
                in_fp8=fp8 if formats.gather == "fp8" else frozenset(),
                tables=tables,
                group=group,
            )
            for formats in self.formats
        }
        self._known: dict[tuple[Any, ...], float] = {}

    def us(self, formats: Formats, ends: Ends, *, planned: bool) -> float:
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
            sent=priced.sent_bytes,
        )

    def _line(self, formats: Formats, ends: Ends, *, planned: bool) -> Timeline:
        priced = self._priced[formats]
        return schedule(priced.items(self._network, self.ranks, rate=self._rate, planned=planned, ends=ends))


def _row(steps: _Steps, formats: Formats, inputs: Mapping[str, Any]) -> AcrossRow:
    plain = steps.formats[0]

    def bf16(ends: Ends) -> float:
        return steps.us(plain, ends, planned=False)

    def planned(ends: Ends) -> float:
        return steps.us(formats, ends, planned=True)

    speedup, swings = ratio_between(lambda ends: bf16(ends) / planned(ends), inputs)
    gain = Estimate(1.0, 1.0, 1.0)
    if formats != plain:
        gain, _ = ratio_between(lambda ends: steps.us(plain, ends, planned=True) / planned(ends), inputs)
    return AcrossRow(
        gpus=steps.ranks,
        engine=steps.engine,
        gather=formats.gather,
        gradients=formats.gradients,
        bf16=time_between(bf16, inputs),
        planned=time_between(planned, inputs),
        speedup=speedup,
        format_gain=gain,
        bf16_parts=steps.parts(plain, planned=False),
        parts=steps.parts(formats, planned=True),
        swings=swings,
    )
