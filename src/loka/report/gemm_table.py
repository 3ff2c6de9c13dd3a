"""A GEMM benchmark as text: a row a site and layer, then what it comes to."""

from collections.abc import Iterable, Mapping

from loka.core.recipe import Gemm
from loka.core.records.gemm_bench import CHOICE, Contest, GemmBench, or_hp, parted
from loka.core.records.report import HP, site_name
from loka.core.table import format_table
from loka.report.gemm_summary import (
    LOSS,
    TIE,
    WIN,
    ModelTime,
    Standing,
    arms_of,
    best_library,
    label,
    model_times,
    standings,
    verdict,
    worst,
)

_ALL = "all three"


def gemm_table(bench: GemmBench) -> str:
    sites, layers = bench.sites(), bench.whole_layers()
    parts = [f"GEMM suite on {bench.machine}", _coverage(bench)]
    if bench.contests:
        parts += [_rows(bench), _summary(bench, sites, layers)]
    parts.append(f"command: {bench.command}")
    return "\n\n".join(part for part in parts if part)


def _rows(bench: GemmBench) -> str:
    numbers = ("choice", "us", "speed-up", "sqnr_db", "closest rival")
    header = ("layer", "MxKxN", "gemm", "bf16 us", *bench.active, *numbers)
    rows = []
    for path, layer in bench.layers.items():
        for gemm in (*Gemm, None):
            contest = bench.contests.get(site_name(path, gemm) if gemm else path)
            if contest is None:
                continue
            first = (path, str(layer), gemm.value if gemm else _ALL)
            if not contest.arms:
                reasons = "; ".join(contest.failures.values())
                rows.append((*first, "-", *["-"] * len(bench.active), f"none: {reasons}", "-", "-", "-", "-"))
                continue
            cells = [_time(contest, arm) for arm in bench.active]
            choice = contest.timing(CHOICE)
            rows.append(
                (
                    *first,
                    _time(contest, HP, named=False),
                    *cells,
                    _short(contest.arms[CHOICE]),
                    _time(contest, CHOICE, named=False),
                    choice.speedup.shown(".3f") if choice else "-",
                    f"{contest.sqnr_db.value:.1f}" if contest.sqnr_db else "-",
                    _closest(contest, bench.tie),
                )
            )
    return format_table(header, rows)


def _time(contest: Contest, arm: str, *, named: bool = True) -> str:
    runs = contest.arms.get(arm)
    if runs is None or (named and runs == HP):
        return "-"
    timing = contest.timings.get(runs)
    if timing is None:
        return f"failed: {contest.failures.get(runs, 'not timed')}"
    value = f"{timing.microseconds.value:.1f}"
    return f"{value} {_short(runs)}" if named else value


def _short(runs: str) -> str:
    parts = parted(runs)
    return parts[0] if len(set(parts)) == 1 else runs


def _closest(contest: Contest, tie: float) -> str:
    found = worst(contest, tie)
    return f"{found[0]}: {label(found[1])} {found[2].shown('.3f')}" if found else "-"


def _coverage(bench: GemmBench) -> str:
    uses = sum(len(layer.uses) for layer in bench.layers.values())
    lines = [f"{len(bench.layers)} distinct linear shapes, from {uses} rows of the suite."]
    if bench.not_covered:
        lines.append(f"Not covered: {len(bench.not_covered)} rows that are not linear layers:")
        lines += [f"  {name} ({what})" for name, what in bench.not_covered.items()]
    if bench.too_large:
        lines.append(f"Skipped for memory: {len(bench.too_large)} rows:")
        lines += [f"  {name} ({why})" for name, why in bench.too_large.items()]
    lines.append("Libraries: " + "; ".join(_library(name, why) for name, why in bench.libraries.items()))
    lines.append(f"Versions: {bench.machine.versions}")
    return "\n".join(lines)


def _library(name: str, missing: str) -> str:
    return f"{name} not active ({missing})" if missing else f"{name} active"


def _summary(bench: GemmBench, sites: Mapping[str, Contest], layers: Mapping[str, Contest]) -> str:
    parts = []
    if not bench.complete:
        parts.append("INCOMPLETE: the same command again goes on where this one stopped.")
    for title, contests in (("sites", sites), ("whole layers, quantization shared", layers)):
        found = standings(bench, contests.values())
        if not found[HP].contests:
            continue
        parts.append(f"Over {found[HP].contests} {title}, on rounds of their own:\n{_standings(found)}")
        parts.append("\n".join([*_claims(found), *_exceptions(bench, contests)]))
    models = model_times(bench)
    if models:
        parts.append(_models(bench, models))
    return "\n\n".join(parts)


def _standings(found: Mapping[str, Standing]) -> str:
    rows = []
    for arm, standing in found.items():
        counts = [str(standing.verdicts[name]) if arm != CHOICE else "" for name in (WIN, TIE, LOSS)]
        rows.append(
            (
                label(arm),
                f"{standing.fp8} of {standing.contests}",
                standing.speedup.shown(".3f") if standing.speedup else "-",
                standing.versus.shown(".3f") if standing.versus and arm != CHOICE else "",
                *counts,
            )
        )
    header = ("", "in FP8", "geomean over bf16", "choice over it", "wins", "ties", "losses")
    return format_table(header, rows)


def _claims(found: Mapping[str, Standing]) -> list[str]:
    losses = found[HP].verdicts[LOSS]
    lines = [f"Never slower than bf16 beyond noise: {_yes(losses == 0)} ({losses} losses)."]
    libraries = {arm: s for arm, s in found.items() if arm not in (HP, CHOICE)}
    beaten = {arm: s.verdicts[LOSS] for arm, s in libraries.items() if s.verdicts[LOSS]}
    beaten_by = ", ".join(f"{count} to {label(arm)}" for arm, count in beaten.items()) or "0 losses"
    best = best_library(found)
    if best is None or best.versus is None:
        return lines
    lines.append(f"At least as fast as every library everywhere: {_yes(not beaten)} ({beaten_by}).")
    over = best.versus
    state = "yes" if over.low > 1 else "no" if over.high < 1 else "tied"
    best_alone = f"the best single library's ({label(best.arm)})"
    lines.append(f"Geometric mean above {best_alone}: {state}, {over.shown('.3f')} times it.")
    slower = sum(s.slightly_slower for s in found.values())
    if slower:
        lines.append(f"Of the ties, the choice is measurably slower in {slower}, by less than the tie.")
    return lines


def _yes(holds: bool) -> str:
    return "yes" if holds else "NO"


def _exceptions(bench: GemmBench, contests: Mapping[str, Contest]) -> Iterable[str]:
    for place, contest in contests.items():
        for arm, ratio in contest.versus.items():
            if verdict(ratio, bench.tie) == LOSS:
                ran, theirs = _short(contest.arms[CHOICE]), _short(contest.arms[arm])
                yield f"LOSS {place}: {ran} is {ratio.shown('.3f')} times as fast as {label(arm)} ({theirs})"
    for place, contest in contests.items():
        absent = [arm for arm in arms_of(bench) if contest.timing(arm) is None]
        if absent:
            reasons = "; ".join(f"{name}: {why}" for name, why in contest.failures.items()) or "no time"
            yield f"not in the means: {place}: no time for {', '.join(map(label, absent))} ({reasons})"


def _models(bench: GemmBench, models: Iterable[ModelTime]) -> str:
    libraries = [or_hp(library) for library in bench.active]
    rows = []
    for model in models:
        hp, choice = model.by_arm[HP], model.by_arm[CHOICE]
        best = min(libraries, key=lambda arm: (model.by_arm[arm], arm), default=None)
        rows.append(
            (
                model.model,
                model.layers,
                f"{hp:.0f}",
                f"{choice:.0f}",
                f"{hp / choice:.3f}x",
                f"{hp / model.by_arm[best]:.3f}x" if best else "-",
                label(best) if best else "-",
            )
        )
    header = ("model, linear layers", "rows", "bf16 us", "choice us", "speed-up", "best library", "which")
    return format_table(header, rows)
