"""Planning: for every site, the fastest candidate that the budget admits, with the reasons.

A candidate must be supported and keep the error limits at the safe end of its interval. Where
times were measured, the three GEMMs of a layer are then chosen together for the least time of
the layer, each faster than hp by `min_speedup` (planner/choice/layer_choice.py). Where nothing was timed,
the candidate with the smallest error wins. Everything else stays in hp. What is equal within
the noise goes to the first name, so that every rank and every run decides alike.

A budget of KL/H, of the model or by task and segment, is spent first (planner/choice/ne_budget.py): it grants each
layer what its `output` GEMM may cost, and the rest is decided as ever among the candidates that cost no more.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from loka.core.annealing import annealing_note
from loka.core.budget import Budget, budget_of
from loka.core.exceptions import NoKernelFits, UnknownName, require_kind
from loka.core.recipe import Gemm, recipe_named
from loka.core.records.parts import WHOLE
from loka.core.records.plan import Decision, Plan
from loka.core.records.report import HP, REGION, Report, SiteReport, site_name
from loka.core.signature import ModelSignature
from loka.kernels.gemm.registry import is_candidate, require_legal
from loka.nn.linears import is_prediction
from loka.planner.choice.layer_choice import Layer, Option, option_of
from loka.planner.choice.limits import Cost, Limits, beyond_second_order, limits_of, other_than_the_sum
from loka.planner.choice.ne_budget import Granted, grant
from loka.planner.choice.together import within_together
from loka.planner.choice.untimed import least_effect, most_exact
from loka.planner.decision import decision_of
from loka.planner.neighbours import Decided, choose_joined
from loka.planner.package_target import plan_package
from loka.planner.regions import regions_of, unsupported
from loka.planner.settle import no_candidate, settle


def plan(
    report: Report,
    budget: Budget | None = None,
    *,
    force: Mapping[str, str] | None = None,
    target: Literal["python", "package"] = "python",
) -> Plan:
    """Decides every site of `report` within `budget`. Needs no GPU and no model.

    Args:
        report: from `measure`, perhaps on another machine; the plan will fit that machine.
        budget: limits; `Budget()` by default.
        force: for debugging: pattern of sites ("mlp.*/output", "*") -> candidate or "hp".
            A forced candidate bypasses the budget, not legality. The first match counts.
        target: "package": `output` GEMMs alone, among what can go into an AOTInductor package, and a note of what that
            costs. Give a report for inference: `measure(stats.for_inference())`.

    Raises:
        NoKernelFits: a forced candidate cannot run its site, or a site has no candidate and
            the budget says `on_miss="raise"`.
        UnknownName: a pattern in `force` or `budget.keep` that matches no site, or none that those before it left
            in `force`; another target; a task or segment of the budget that the report does not know.
        EffectUnknown: the budget limits a task or segment whose KL/H is not known well enough.
    """
    require_kind(report, Report, "report", way_out="loka.measure(stats), or loka.Report.load(path)")
    report = _of_this_version(report)
    if target == "package":
        return plan_package(report, budget, force=force, decide=plan)
    if target != "python":
        raise UnknownName(f"no target is called {target!r}", way_out="python or package")
    budget = budget_of(budget)
    force = _checked(force)
    _check_patterns(report, {"force": tuple(force), "keep": budget.keep})
    limits = limits_of(budget, report)
    layers: dict[str, list[SiteReport]] = {}
    for site in report.sites.values():
        layers.setdefault(site.path, []).append(site)

    def decide(charged: Limits) -> tuple[Granted | None, Plan]:
        granted, decisions = _decide_by_sums(report, budget, charged, force, layers)
        return granted, Plan(
            model=report.model,
            machine=report.machine,
            budget=budget,
            timed=report.timed,
            decisions=decisions,
            coverage=report.coverage,
            limits={} if tuple(limits) == (WHOLE,) else limits,
            force=tuple(force.items()),
        )

    granted, decided = within_together(report, limits, decide)
    notes = _notes(decided, granted, report, limits)
    centres, hot_columns = _centres_and_hot_columns(decided, report)
    return replace(decided, notes=notes, centres=centres, hot_columns=hot_columns)


def _of_this_version(report: Report) -> Report:
    """The report, in which candidates that LoKA no longer has count as unsupported."""
    names = {name for site in report.sites.values() for name in site.measurements}
    gone = {name for name in names if name != HP and not is_candidate(name)}
    if not gone:
        return report
    reason = "LoKA had this candidate when the report was measured, and no longer has it"
    sites = {}
    for name, site in report.sites.items():
        found = {n: replace(m, unsupported=m.unsupported or reason) for n, m in site.measurements.items() if n in gone}
        sites[name] = replace(site, measurements={**site.measurements, **found})
    return replace(report, sites=sites)


def _notes(decided: Plan, granted: Granted | None, report: Report, limits: Limits) -> tuple[str, ...]:
    """What a reader of the plan has to know beside its decisions."""
    notes = [f"{path} stays in hp: {reason}" for path, reason in report.skipped.items()]
    notes += [*(granted.notes if granted else ()), *report.notes, *beyond_second_order(decided, limits)]
    if limits:
        notes += [str(report.parts[part]) for part in limits if part in report.parts]
        notes += filter(None, (other_than_the_sum(decided, report, at, limit) for at, limit in limits.items()))
        notes += [report.not_clicks] if report.not_clicks else []
        notes.append(annealing_note(report.final_rate))
    if not report.complete:
        notes.append("the report is incomplete; sites not yet measured stay in hp")
    return tuple(notes)


def _centres_and_hot_columns(
    decided: Plan, report: Report
) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[int, ...]]]:
    """By layer, what its recipe reads when it runs: means of `input`'s columns if centred, indices of hot columns."""
    names, hot = decided.output_recipes, report.hot_columns
    centred = [path for path, name in names.items() if recipe_named(name).centred]
    centres = {path: report.centres[path] for path in centred if path in report.centres}
    return centres, {path: hot[path][name] for path, name in names.items() if name in hot.get(path, ())}


def _decide_by_sums(
    report: Report, budget: Budget, limits: Limits, force: Mapping[str, str], layers: Mapping[str, list[SiteReport]]
) -> Decided:
    """What `limits` grant each layer, and the decisions by site. Limits hold for sums of the layers' effects."""

    def open_layer(path: str, joined: Collection[str] | None) -> Layer:
        return _open_layer(layers[path], report, budget, limits, force, joined)

    def decide(opened: Mapping[str, Layer]) -> tuple[Granted | None, dict[str, Decision]]:
        granted = grant(report, budget, limits, opened) if limits else None
        return granted, _decisions(report, opened, budget, limits, granted.layers if granted else None)

    return choose_joined(
        layers, report.reads, open_layer, decide, placed=bool(report.times_in_chains), limited=bool(limits)
    )


def _matches(site: SiteReport, pattern: str) -> bool:
    """Whether a pattern fits the site's name, "path/gemm", or its layer's path."""
    return _fits(site.name, pattern) or _fits(site.path, pattern)


def _fits(name: str, pattern: str) -> bool:
    """Also the very name: brackets of `w[:64]` stand for a set of characters in a pattern."""
    return name == pattern or fnmatchcase(name, pattern)


def _checked(force: Mapping[str, str] | None) -> dict[str, str]:
    given = {} if force is None else force
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ValueError(
            f"force is {given!r}; it must map patterns of sites to candidates, such as {{'*/output': 'hp'}}"
        )
    return dict(given)


def _check_patterns(report: Report, patterns: Mapping[str, tuple[str, ...]]) -> None:
    names = [(path, site_name(path, gemm)) for path in report.model.layers for gemm in Gemm]
    for where, several in patterns.items():
        left = set(names)
        for pattern in several:
            # All sites of the model: one budget serves a report of a part of them too.
            fits = {pair for pair in names if any(_fits(name, pattern) for name in pair)}
            if not fits:
                known = ", ".join(dict.fromkeys(name for pair in names for name in pair))
                raise UnknownName(f"{where}: no site matches {pattern!r}", way_out=f"one of {known}")
            if where == "force" and not fits & left:
                why = "patterns before it match all its sites"
                raise UnknownName(f"force: {pattern!r} never counts: {why}", way_out="put it first")
            left -= fits


def _decisions(
    report: Report, layers: Mapping[str, Layer], budget: Budget, limits: Limits, granted: Mapping[str, Cost] | None
) -> dict[str, Decision]:
    decided = {
        decision.site: decision
        for path, layer in layers.items()
        for decision in settle(layer, budget, limits, () if granted is None else granted[path])
    }
    return {name: decided[name] for name in report.sites}


def _open_layer(
    sites: list[SiteReport],
    report: Report,
    budget: Budget,
    limits: Limits,
    force: Mapping[str, str],
    joined: Collection[str] | None,
) -> Layer:
    """What a layer may run: decisions that stand already, the timed options of its other GEMMs, and regions.

    `joined`: the layers in regions, beside which its own time there is; None: it may be in none.
    """
    fixed: dict[Gemm, Decision] = {}
    rejected: dict[Gemm, dict[str, str]] = {}
    options: dict[Gemm, dict[str, Option]] = {}
    by_rule = False
    for site in sites:
        gemm = site.problem.gemm
        decision = _fixed(site, report, budget, force)
        by_rule = by_rule or decision is not None
        if decision is None:
            decision, options[gemm], rejected[gemm] = _admit(site, budget, limits, timed=report.timed)
        if decision is not None:
            fixed[gemm] = decision
            known = option_of(site, decision.candidate) if decision.candidate in site.measurements else None
            options[gemm] = {decision.candidate: known} if known else {}
    why = "its neighbours in a region and it slow each other down" if joined is None else ""
    why = "a GEMM of it is decided by rule" if by_rule else why
    regions, why_not = ((), {REGION: why}) if why else regions_of(sites, report, budget, limits, joined or ())
    if report.timed:
        for reasons in rejected.values():
            reasons.update(why_not)
    return Layer(
        sites=tuple(sites),
        fixed=fixed,
        options={gemm: each for gemm, each in options.items() if each},
        rejected=rejected,
        savings=report.quantize_once_savings.get(sites[0].path, {}),
        min_speedup=budget.min_speedup,
        regions=regions,
    )


def _fixed(site: SiteReport, report: Report, budget: Budget, force: Mapping[str, str]) -> Decision | None:
    """The decision of a site that is forced, or kept in hp by rule; None: it is to be chosen."""
    for pattern, wanted in force.items():
        if _matches(site, pattern):
            candidate = _measured_name(site, wanted)
            _check_forced(site, candidate)
            return decision_of(site, candidate, f"forced by {pattern!r}", {})
    kept = _kept(site, report.model, budget)
    return None if kept is None else decision_of(site, HP, kept, {})


def _measured_name(site: SiteReport, wanted: str) -> str:
    """A kernel with several algorithms was measured under the name of the fastest, "kernel:recipe@3"."""
    pinned = [name for name in site.measurements if name.partition("@")[0] == wanted]
    return wanted if wanted in site.measurements or not pinned else pinned[0]


def _check_forced(site: SiteReport, candidate: str) -> None:
    """Forcing bypasses the budget, not legality, nor what was found on the machine that was measured."""
    if candidate == HP:
        return
    require_legal(candidate, site.problem)
    measured = site.measurements.get(candidate)
    if measured is not None and measured.unsupported:
        raise NoKernelFits(
            f"{candidate} cannot run {site.name} on the machine that was measured",
            why=[measured.unsupported],
            way_out="force a candidate that ran there, or measure again",
        )


def _admit(
    site: SiteReport, budget: Budget, limits: Limits, *, timed: bool
) -> tuple[Decision | None, dict[str, Option], dict[str, str]]:
    """Which candidates of a site the budget admits.

    Returns a decision where that settles the site, as none is admitted or nothing was `timed`; else None, and the timed
    options with "hp" among them. Last, why each other candidate is out.
    """
    rejected, admitted = {}, {}
    for name, measured in site.measurements.items():
        if name == HP:
            continue
        reason = unsupported(measured, budget, limits, site.problem.gemm)
        if reason is None and timed and option_of(site, name) is None:
            reason = f"not timed: {site.unfinished or 'no time was measured'}"
        if reason is None:
            admitted[name] = measured
        else:
            rejected[name] = reason
    if not admitted:
        return no_candidate(site, budget, rejected), {}, rejected
    if not timed:
        chosen, why, lost = most_exact(admitted)
        if limits and site.problem.gemm is Gemm.OUTPUT:
            chosen, why, lost = least_effect(site, admitted, limits)
        others = [name for name in admitted if name != chosen]
        runner_up = min(others, key=lambda name: (-admitted[name].errors["sqnr_db"].value, name), default=HP)
        decision = decision_of(site, chosen, why, {**rejected, **lost})
        return replace(decision, runner_up=runner_up), {}, rejected
    options = {name: option_of(site, name) for name in (HP, *admitted)}
    return None, {name: option for name, option in options.items() if option}, rejected


def _kept(site: SiteReport, model: ModelSignature, budget: Budget) -> str | None:
    """Why the budget keeps the site in hp by rule, whatever was measured; or None."""
    for pattern in budget.keep:
        if _matches(site, pattern):
            return f"kept by the budget ({pattern!r})"
    outputs = model.layers[site.path].out_features
    if budget.keep_prediction and is_prediction(outputs):
        return f"{outputs} outputs: taken for a prediction layer"
    return None
