"""What computes in a traced step, and how long: GEMMs of sites, other products, and everything between.

A GEMM of the trace is one of a site by its shape and direction, in the order of the trace. Times of sites are
those of `loka scale` or of a measured plan. Products that are no site run at the mean bf16 rate of the sites,
and bytes between GEMMs at the memory bandwidth of the network file: both are assumptions, and are told so.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from loka.core.error import Estimate, exactly
from loka.core.exceptions import LokaError, PlanMismatch, truncated
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.records.report import HP, site_name
from loka.core.records.scale import LayerTimes, Origin, Scale
from loka.scaling.cluster.engines import EngineStep, Matmul

UNKNOWN = 0.05
"""The share of the sites' FLOPs that may have no time; they are left out and told. Beyond, nothing is."""

OTHER_RATE = Estimate(1.0, 0.5, 3.0)
"""Time of a product that is no site, over that of as many FLOPs of sites in bf16: a guess, and a wide one."""

BY_PLAN = Estimate(1.0, 0.7, 1.0)
"""Bytes between GEMMs by plan, over those in bf16: a guess. Once it was measured: 0.73, Wukong 2 GF (2026-11-24)."""

_SHOWN = 8  # sites that an error names
_Key = tuple[bool, int, int, int]


@dataclass(frozen=True, kw_only=True)
class GemmTime:
    """A GEMM of a site. `bf16` in microseconds, `gain` of it by plan, 1 where it stays in bf16."""

    path: str
    gemm: str
    m: int
    n: int
    k: int
    flops: float
    bf16: Estimate | None
    gain: Estimate
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What computes between two collectives. `gemms` of sites; `flops` of other products; `moved` bytes."""

    gemms: tuple[GemmTime, ...] = ()
    flops: float = 0.0
    moved: float = 0.0


@dataclass(kw_only=True)
class Placed:
    """Segments stand where the trace had them; `missing` share of the sites' FLOPs has no time, and `unseen`
    is the share that no product of the trace matched: its time stands in front of the step."""

    segments: dict[int, Segment] = field(default_factory=dict)
    missing: float = 0.0
    unseen: float = 0.0


def forecast_times(found: Scale) -> tuple[GemmTime, ...]:
    """Of `loka scale`; every GEMM of a layer gains what the layer does by sites."""
    return tuple(
        _gemm_time(layer, gemm, site.bf16 if layer.speedup else None, layer.speedup, layer.origin)
        for layer in found.layers
        for gemm, site in layer.gemms.items()
    )


def _gemm_time(layer: LayerTimes, gemm: str, bf16: Estimate | None, gain: Estimate | None, origin: Origin) -> GemmTime:
    site = layer.gemms[gemm]
    return GemmTime(
        path=layer.path,
        gemm=gemm,
        m=site.m,
        n=site.n,
        k=site.k,
        flops=2.0 * site.m * site.n * site.k,
        bf16=bf16,
        gain=gain or exactly(1.0),
        origin=origin,
    )


def planned_times(found: Scale, plan: Plan) -> tuple[GemmTime, ...]:
    """Of a plan that was measured, at the very shapes of the step.

    Raises PlanMismatch for sites that the plan does not decide or decides at other shapes or for weights of
    another dtype, LokaError for a plan without times.
    """
    if not plan.timed:
        raise LokaError(
            "this plan was not timed, so it says nothing of a step's time",
            way_out="`loka measure` on the GPU, then plan again; or `loka scale` without --plan",
        )
    times, wrong = [], []
    for layer in found.layers:
        for gemm, site in layer.gemms.items():
            name = site_name(layer.path, Gemm(gemm))
            decision = plan.decisions.get(name)
            shape = (site.m, site.n, site.k)
            if decision is None:
                wrong.append(f"{name}: the plan decides nothing")
                continue
            problem = decision.problem
            if (problem.m, problem.n, problem.k) != shape:
                measured = f"{problem.m}x{problem.n}x{problem.k}"
                wrong.append(f"{name}: measured at {measured}, runs at {site.m}x{site.n}x{site.k}")
                continue
            if gemm == Gemm.GRAD_WEIGHT and problem.dtype != layer.weight_dtype:
                wrong.append(f"{name}: measured with weights in {problem.dtype}, here they are in {layer.weight_dtype}")
                continue
            hp, us = decision.hp_microseconds, decision.microseconds
            if hp is None or (us is None and decision.candidate != HP):
                wrong.append(f"{name}: no time was measured")
                continue
            gain = exactly(1.0)
            if decision.candidate != HP and us is not None:
                gain = _gain(hp, us, decision.saved_us)
            times.append(_gemm_time(layer, gemm, hp, gain, "measured"))
    if wrong:
        raise PlanMismatch(
            "the plan was not measured at what this step runs",
            why=truncated(wrong, _SHOWN),
            way_out="measure at this batch size (--batch-size of the plan's), or leave --plan out to be told "
            "interpolated times",
        )
    return tuple(times)


def _gain(hp: Estimate, us: Estimate, saved: float) -> Estimate:
    """hp / (us - saved); the ends of `us` alone, for those of `hp` move both steps."""
    return us.mapped(lambda end: max(end - saved, 1e-9)).under(hp.value)


def placed(step: EngineStep, times: Sequence[GemmTime]) -> Placed:
    """Where each site's GEMM stands in the step.

    Raises LokaError where more than UNKNOWN of the sites' FLOPs has no time.
    """
    total = sum(time.flops for time in times) or 1.0
    missing = sum(time.flops for time in times if time.bf16 is None) / total
    if missing > UNKNOWN:
        lost = sorted({f"{t.path}/{t.gemm} {t.m}x{t.n}x{t.k}" for t in times if t.bf16 is None})
        raise LokaError(
            f"{100 * missing:.0f} % of the sites' FLOPs are at shapes that nobody measured near",
            why=truncated(lost, _SHOWN),
            way_out="measure them: `loka probe`, `loka measure`, `loka plan`, then `loka scale --plan`",
        )
    waiting: dict[_Key, list[GemmTime]] = defaultdict(list)
    for time in times:
        waiting[time.gemm != Gemm.OUTPUT.value, time.m, time.n, time.k].append(time)
    found = Placed(missing=missing)
    for place, event in enumerate(step.events):
        if isinstance(event, Matmul):
            key = (event.backward, event.m, event.n, event.k)
            taken = [waiting[key].pop(0) for _ in range(min(event.count, len(waiting[key])))]
            rest = event.flops * (event.count - len(taken)) / event.count
            known = tuple(time for time in taken if time.bf16 is not None)
            found.segments[place] = Segment(gemms=known, flops=rest)
    left = [time for several in waiting.values() for time in several if time.bf16 is not None]
    found.unseen = sum(time.flops for time in left) / total
    found.segments[-1] = Segment(gemms=tuple(left))
    return found


def mean_rate(times: Sequence[GemmTime]) -> float:
    """FLOPs a microsecond of all sites in bf16."""
    known = [(time.flops, time.bf16.value) for time in times if time.bf16 is not None]
    return sum(flops for flops, _ in known) / max(sum(us for _, us in known), 1e-9)


def gemm_us(gemms: Sequence[GemmTime], *, planned: bool, time: str = "value", gain: str = "value") -> float:
    """Microseconds of sites, at the ends that `time` and `gain` name."""
    found = 0.0
    for one in gemms:
        assert one.bf16 is not None
        found += getattr(one.bf16, time) / (getattr(one.gain, gain) if planned else 1.0)
    return found


def layers_in_fp8(found: Scale, plan: Plan | None) -> tuple[LayerTimes, ...]:
    """Layers whose weight may travel in eight bits: by plan, where its recipes allow that; without one, where
    eight bits pay, as if by a recipe that allows it."""
    if plan is None:
        return tuple(layer for layer in found.layers if layer.speedup is not None and layer.speedup.value > 1)
    return tuple(layer for layer in found.layers if _reads_bytes(layer.path, plan))


def cast_weights(found: Scale, plan: Plan | None) -> frozenset[str]:
    """Names of the weights, of layers or plain parameters, of which sites make copies in eight bits."""
    cast = {layer.path for layer in layers_in_fp8(found, None)}
    if plan is not None:
        made = (d for d in plan.decisions.values() if d.candidate != HP)
        cast = {d.path for d in made if d.problem.gemm is not Gemm.GRAD_WEIGHT}
    return frozenset(name for path in cast for name in (path, f"{path}.weight"))


def _reads_bytes(path: str, plan: Plan) -> bool:
    from loka.kernels.gemm.registry import candidate_named
    from loka.nn.fp8_weight import CAST

    for gemm in (Gemm.OUTPUT, Gemm.GRAD_INPUT):
        decision = plan.decisions.get(site_name(path, gemm))
        if decision is None:
            if gemm is Gemm.OUTPUT:
                return False
            continue
        casts = None if decision.candidate == HP else candidate_named(decision.candidate).recipe.casts(gemm)
        if casts is None or casts[1] != CAST:
            return False
    return True
