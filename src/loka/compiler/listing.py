"""`loka.regions`: what a plan wants joined, what was joined when it last ran, and why the rest was not."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from loka.compiler.joint_sites import unjoined
from loka.compiler.notes import launches_of, record_of
from loka.core.records.report import HP
from loka.core.table import format_table
from loka.kernels.quantize.side import RUNS
from loka.nn.site import Site, sites_of

_EAGER = (
    "it ran, but not compiled by Inductor with LoKA's pass: eagerly, or by another backend; or its graph has "
    "no site that fits a region"
)
_NOT_RUN = "it has not run yet, or on no rows: call the compiled model"
_BYPASSED = (
    "it has not run, and other sites have: what ran does not call it, calls it on no rows, or multiplies by its weight "
    "in another way than the probed step did, in high precision"
)
_WARM_UP = 20  # launches by the host, before a graph is captured and for each that is
_BY_HOST = (
    "the host launched graphs {} times op after op, which takes it longer than in bf16: use "
    'torch.compile(model, mode="reduce-overhead"), or a CUDA graph of the whole step (docs/graphs.md)'
)


@dataclass(frozen=True, kw_only=True)
class Regions:
    """Which planned sites ran in regions, and which did not.

    Attributes:
        planned: names of the sites whose recipe is that of regions.
        applied: the regions that ran last, each as its site names. A site that ran by itself in a graph is a region of
            one.
        apart: why each other planned site is in no region.
        breaks: why Dynamo broke graphs, which makes regions smaller. The list covers this process so far, and is filled
            where more than one region ran, or a site in none.
        launched, captured: how often graphs with these regions were launched on a GPU by the host, op after op, and
            into a CUDA graph, of which replays do not count.
    """

    planned: tuple[str, ...]
    applied: tuple[tuple[str, ...], ...]
    apart: Mapping[str, str]
    breaks: tuple[str, ...] = ()
    launched: int = 0
    captured: int = 0

    @property
    def complete(self) -> bool:
        """Whether every planned site ran in a region."""
        return not self.apart

    def __str__(self) -> str:
        numbers = {site: place for place, region in enumerate(self.applied, 1) for site in region}
        rows = [(site, str(numbers.get(site, "-")), self.apart.get(site, "")) for site in self.planned]
        lines = [
            f"{len(self.planned) - len(self.apart)} of {len(self.planned)} planned sites ran in "
            f"{len(self.applied)} regions",
            format_table(("site", "region", "why not"), rows),
        ]
        lines += [f"graph break: {reason}" for reason in self.breaks]
        if self.launched > _WARM_UP * (1 + self.captured):
            lines.append(_BY_HOST.format(self.launched))
        return "\n".join(lines)


def regions(model: nn.Module) -> Regions:
    """The regions of a converted model as they ran last, whichever compiled graph or cache they came from.

    Under torch.compile LoKA joins the sites that the compiler sees in one graph; eagerly each site runs by itself. The
    call compiles and runs nothing. It reads counters of sites that ran by themselves, which synchronizes with the
    device.
    """
    sites = sites_of(model)
    planned = {name: site for name, site in sites.items() if _wanted(site)}
    applied: list[tuple[str, ...]] = []
    told: dict[str, str] = {}  # reasons out of the graphs that ran the others
    for name, site in planned.items():
        record = record_of(site.health)
        if record is None:
            continue
        found = next((region for region in record[0] if site.name in region), None)
        if found is not None and not any(name in region for region in applied):
            applied.append(_named(found, site, name, sites))
        told |= {name.removesuffix(site.name) + other: why for other, why in record[1].items()}
    joined = {name for region in applied for name in region}
    not_run = _BYPASSED if any(map(_ran, sites.values())) else _NOT_RUN
    apart = {name: told.get(name) or _reason(site, not_run) for name, site in planned.items() if name not in joined}
    breaks = _breaks() if apart or len(applied) > 1 else ()
    launches = [launches_of(site.health) for name, site in planned.items() if name in joined]
    launched, captured = max(launches, default=(0, 0))
    return Regions(
        planned=tuple(planned), applied=tuple(applied), apart=apart, breaks=breaks, launched=launched, captured=captured
    )


def _wanted(site: Site) -> bool:
    return any(name != HP and unjoined(name) is None for name in site.candidates)


def _named(region: list[str], site: Site, name: str, known: Collection[str]) -> tuple[str, ...]:
    """The names in this model: a part that was converted by itself gets its path in front."""
    prefix = name.removesuffix(site.name)
    return tuple(prefix + other if prefix + other in known else other for other in region)


def _ran(site: Site) -> bool:
    return bool(site.health[:, RUNS].any())


def _reason(site: Site, not_run: str) -> str:
    if not site.join:
        return "regions are switched off for this model: convert(model, plan, regions=False)"
    for candidate in site.candidates:
        if candidate != HP and (why := unjoined(candidate)):
            return why
    return _EAGER if _ran(site) else not_run


def _breaks() -> tuple[str, ...]:
    from torch._dynamo.utils import counters

    return tuple(str(reason).splitlines()[0] for reason in counters["graph_break"])
