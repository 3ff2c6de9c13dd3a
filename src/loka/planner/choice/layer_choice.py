"""The three GEMMs of a layer, chosen together, because they share the quantization of their tensors.

    time(choice) = sum of the sites' times - what shared passes save

A site's time holds the quantization of both its operands. Where two GEMMs of a layer run in
FP8, the tensor between them is read once for both copies (nn/site_ops.py), which saves what
`Report.quantize_once_savings` says. So a grad_weight that loses by itself may win beside an FP8 grad_input.

A choice is allowed if every FP8 GEMM in it earns its place: taking it back to hp, with the rest
as it is, costs at least what `min_speedup` asks, at the safe end of all intervals. The fastest
allowed choice wins. Choices that differ from it in GEMMs that take no more than 1 % longer are
ties; they go to the one with the fewest FP8 GEMMs, then to the first by name, so that every
rank and every run decides alike.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from loka.compiler.joint_sites import ARMS
from loka.core.error import Estimate, exactly
from loka.core.recipe import SHARED_OPERANDS, Gemm
from loka.core.records.plan import Decision
from loka.core.records.report import HP, REGION, Measurement, SiteReport
from loka.core.timing import TIE
from loka.kernels.gemm.registry import candidate_named

Savings = Mapping[str, Mapping[str, Estimate]]
"""Tensor -> casts "row+column" -> microseconds saved."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """A candidate at a site: its time free of clock drift, and how it casts A and B (none in hp)."""

    name: str
    time: Estimate
    casts: tuple[str, str] | None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One option a GEMM, and the microseconds saved on each tensor that two of them share."""

    options: Mapping[Gemm, Option]
    saved: Mapping[str, Estimate]
    arm: str | None = None  # which of `ARMS`, where the choice is a region
    times: Mapping[str, Measurement] = field(default_factory=dict)  # of the layer there, by arm

    def saved_at(self, gemm: Gemm) -> float:
        """Microseconds saved on tensors of which `gemm` takes the transpose; each counts once."""
        return sum(saving.value for tensor, saving in self.saved.items() if SHARED_OPERANDS[tensor][1][0] is gemm)

    @property
    def region(self) -> Estimate | None:
        """Speed-up of the layer in a region, where the choice is that."""
        return None if self.arm is None else self.times[self.arm].speedup

    @property
    def microseconds(self) -> float:
        spent = sum(option.time.value for option in self.options.values())
        return spent - sum(saving.value for saving in self.saved.values())


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer on its way to decisions: what is `fixed` by GEMM, forced and kept and untimed GEMMs among it,
    the timed `options` of each GEMM ("hp" among those of one that is not fixed), why others are out."""

    sites: tuple[SiteReport, ...]
    fixed: Mapping[Gemm, Decision]
    options: Mapping[Gemm, Mapping[str, Option]]
    rejected: Mapping[Gemm, Mapping[str, str]]
    savings: Savings
    min_speedup: float
    regions: Sequence[Choice] = ()  # all GEMMs as parts of a region, where that was timed and is allowed

    @cached_property
    def allowed(self) -> list[Choice]:
        fixed = set(self.fixed)
        return allowed_choices(
            self.options, self.savings, min_speedup=self.min_speedup, fixed=fixed, regions=self.regions
        )


def option_of(site: SiteReport, name: str) -> Option | None:
    """A candidate with its time, in units of hp's median; None where it was not timed."""
    hp, measured = site.measurements[HP].microseconds, site.measurements[name]
    if hp is None:
        return None
    if name == HP:
        return Option(name=HP, time=exactly(hp.value), casts=None)
    time = measured.beside(hp)
    if time is None:
        return None
    casts = candidate_named(name).recipe.casts(site.problem.gemm)
    assert casts is not None
    return Option(name=name, time=time, casts=(casts[0].name, casts[1].name))


def allowed_choices(
    options: Mapping[Gemm, Mapping[str, Option]],
    savings: Savings,
    *,
    min_speedup: float,
    fixed: Collection[Gemm] = (),
    regions: Iterable[Choice] = (),
) -> list[Choice]:
    """Those in which every FP8 GEMM earns its place, hp everywhere that is free among them; and regions, each
    of which earns its place as a whole. A `fixed` GEMM has one option; each other one has "hp" among its own."""
    reduced = {gemm: _fastest_by_casts(each) for gemm, each in options.items()}
    allowed = []
    for combination in itertools.product(*reduced.values()):
        choice = combine(dict(zip(reduced, combination, strict=True)), savings)
        free = [gemm for gemm in choice.options if gemm not in fixed]
        if all(earns(choice, gemm, options[gemm][HP], min_speedup) for gemm in free):
            allowed.append(choice)
    return allowed + [r for r in regions if r.region is not None and r.region.low >= min_speedup]


def region_choice(options: Mapping[Gemm, Option], times: Mapping[str, Measurement], arm: str = REGION) -> Choice | None:
    """The layer as a part of a region, from its GEMMs in hp; None where that was not timed.

    What the region saves is taken off the GEMMs in proportion to their times, so that choices compare.
    """
    region, hp = times.get(arm), times.get(HP)
    if region is None or hp is None or not region.microseconds or not hp.microseconds or not region.speedup:
        return None
    total = sum(option.time.value for option in options.values())
    speedups = (region.speedup.value, region.speedup.high, max(region.speedup.low, 1e-9))
    saved = [hp.microseconds.value * (1 - 1 / speedup) for speedup in speedups]
    left = [max(1 - us / total, 0.01) if total else 1.0 for us in saved]
    names = dict(zip(Gemm, ARMS[arm], strict=True))
    inside = {
        gemm: Option(name=names[gemm], time=Estimate(*(option.time.value * each for each in left)), casts=None)
        for gemm, option in options.items()
    }
    return Choice(options=inside, saved={}, arm=arm, times=times)


def best_of(allowed: Sequence[Choice]) -> Choice:
    """The fastest of the choices, or the one that is tied with it and comes first."""
    best = min(allowed, key=lambda choice: (choice.microseconds, _order(choice)))
    return min((choice for choice in allowed if tied(choice, best)), key=_order)


def tied(choice: Choice, best: Choice) -> bool:
    """Whether two choices differ by at most 1 % of the time of those GEMMs in which they differ; the rest of the layer
    does not count.
    """
    differing = [o for gemm, o in best.options.items() if o.name != choice.options[gemm].name]
    return choice.microseconds - best.microseconds <= TIE * sum(option.time.value for option in differing)


def combine(options: Mapping[Gemm, Option], savings: Savings) -> Choice:
    saved = {}
    for tensor, ((row_gemm, row_index), (column_gemm, column_index)) in SHARED_OPERANDS.items():
        row, column = options.get(row_gemm), options.get(column_gemm)
        if row and column and row.casts and column.casts:
            key = f"{row.casts[row_index]}+{column.casts[column_index]}"
            saving = savings.get(tensor, {}).get(key)
            if saving is not None:
                saved[tensor] = saving
    return Choice(options=options, saved=saved)


def speedup_of(choice: Choice, gemm: Gemm, hp: Option) -> Estimate:
    """The time in hp over what this GEMM adds to the time of the layer, with the rest of the choice as it is."""
    time = choice.options[gemm].time
    savings = [
        choice.saved[tensor]
        for tensor, ends in SHARED_OPERANDS.items()
        if tensor in choice.saved and gemm in (ends[0][0], ends[1][0])
    ]
    adds = Estimate(
        time.value - sum(s.value for s in savings),
        time.low - sum(s.high for s in savings),
        time.high - sum(s.low for s in savings),
    )
    return adds.mapped(lambda added: max(added, 1e-9)).under(hp.time.value)


def earns(choice: Choice, gemm: Gemm, hp: Option, min_speedup: float) -> bool:
    if choice.options[gemm].name == HP:
        return True
    return speedup_of(choice, gemm, hp).low >= min_speedup


def _fastest_by_casts(options: Mapping[str, Option]) -> list[Option]:
    """hp, then of each pair of casts, on which alone savings depend, those to which none is preferred whatever the
    rest of the layer: none is faster by more than a tie and as surely short, so that it earns its place too."""
    by_casts: dict[tuple[str, str] | None, list[Option]] = {}
    for option in options.values():
        by_casts.setdefault(option.casts, []).append(option)
    kept = [*by_casts.pop(None, [])]
    for several in by_casts.values():
        kept += [option for option in several if not any(_preferred(other, option) for other in several)]
    return kept


def _preferred(other: Option, option: Option) -> bool:
    return other.time.value * (1 + TIE) < option.time.value and other.time.high <= option.time.high


def _order(choice: Choice) -> tuple[int, tuple[str, ...]]:
    names = tuple(choice.options[gemm].name for gemm in Gemm if gemm in choice.options)  # in whatever order sites came
    return sum(name != HP for name in names), names
