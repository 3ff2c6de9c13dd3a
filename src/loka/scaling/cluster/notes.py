"""What the answer on many GPUs says of itself: where times are from, what was taken so, what is not in it."""

from collections.abc import Mapping, Sequence

from loka.core.records.network import Network
from loka.core.records.plan import Plan
from loka.core.records.scale import Scale
from loka.scaling.cluster.compute import GemmTime, Placed
from loka.scaling.cluster.engines import EngineStep
from loka.scaling.cluster.memory import ORIGIN
from loka.scaling.cluster.tables import Exchange, Tables


def origins(times: Sequence[GemmTime], plan: Plan | None, kernels: str) -> str:
    if plan is not None:
        return f"measured by the plan on {plan.machine}"
    total = sum(time.flops for time in times) or 1.0
    shares = {
        origin: sum(time.flops for time in times if time.origin == origin) / total
        for origin in ("measured", "interpolated", "unknown")
    }
    parts = [f"{100 * share:.3g} % {origin}" for origin, share in shares.items() if share]
    which = "of all libraries" if kernels == "all" else f"of {kernels} alone"
    return f"LoKA's stored ones, {which}; of the sites' FLOPs {', '.join(parts)}"


def of_tables(
    tables: Tables | None, exchanges: Mapping[int, Exchange], left_out: Sequence[tuple[int, int]]
) -> list[str]:
    if tables is not None:
        at = {one.how: [str(n) for n in exchanges if exchanges[n].how == one.how] for one in exchanges.values()}
        placed = "; ".join(f"{how} (at {', '.join(ranks)} GPUs)" for how, ranks in at.items())
        notes = [
            f"tables: {len(tables.shapes)} of {sum(r * w for r, w in tables.shapes)} elements, "
            f"{tables.ids:g} ids a sample in each, embeddings in {tables.qcomm}; assumed: they lie {placed}; "
            "rows are read and written at the memory bandwidth, and ids travel behind compute"
        ]
        if tables.group:
            notes.append(
                f"tables in groups of {tables.group}, as DMPCollection makes them: replicas follow one "
                f"another; every {tables.every} steps weights, then AdaGrad's state are all-reduced in "
                "float32, compute waits, and each step has its share"
            )
        return notes
    elements = sum(rows * width for rows, width in left_out)
    note = f"not in it: tables of {elements} elements, the exchange of their lookups and their optimizer (--ids)"
    return [note] if left_out else []


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


def _of_units(steps: Sequence[EngineStep]) -> list[str]:
    units = next((step.units for step in steps if step.engine != "ddp"), None)
    if units is None:
        return []
    names = f"{', '.join(units[:6])}{', ...' if len(units) > 6 else ''}"
    notes = [f"FSDP2 shards {len(units)} units and the root: {names}"]
    if any(step.engine == "hsdp" for step in steps):
        notes.append(
            "hsdp/N: FSDP2 in each N GPUs that follow one another, and an all-reduce of each unit's shard in "
            "bf16 across replicas; assumed: where a group is a node it runs beside gathers, else takes its "
            "turn with them. A group without replicas is FSDP2, and has no row"
        )
    return notes


def notes_of(
    found: Scale,
    steps: Sequence[EngineStep],
    on_gpu: Mapping[str, Placed],
    plan: Plan | None,
    fp8: int,
    network: Network,
) -> tuple[str, ...]:
    """What was measured, assumed and left out of a forecast. `fp8`: how many weights are gathered in FP8."""
    step, first = steps[0], on_gpu[steps[0].engine]
    notes = [
        *found.notes,
        *([f"network: {network.comment}"] if network.comment else []),
        *_measured_notes(network, found.machine.device if plan is None else plan.machine.device),
        *_of_units(steps),
        f"FP8 gather: {fp8} weights"
        + (", as if every site that gains ran by rowwise_e4m3_pow2" if plan is None else ", by the plan's recipes"),
        "assumed: 28 bytes move for each trained parameter that a GPU holds, as in a fused Adam in float32",
        ORIGIN,
        "int8 gradients under DDP: LoKA's hook waits for its collectives, so nothing of them is hidden",
    ]
    if step.buffers and step.engine == "ddp":
        notes.append(f"not in it: DDP's broadcast of {step.buffers} bytes of buffers before each forward")
    if first.missing:
        notes.append(f"not in it: {100 * first.missing:.2g} % of the sites' FLOPs, of unknown time")
    for engine, where in on_gpu.items():
        if where.unseen:
            notes.append(
                f"{engine}: {100 * where.unseen:.2g} % of the sites' FLOPs ran by products of other shapes; "
                "their time stands in front of the step, where nothing hides behind it"
            )
    return (
        *notes,
        "not in it: input pipeline, launches of an eager step, stragglers, traffic of other jobs, compute "
        "slowed by the collectives beside it",
    )
