"""`loka bench gemm`: suite -> measure -> plan -> confirm -> record; each stage as users run it."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from loka.core.budget import Budget
from loka.core.device import fingerprint
from loka.core.exceptions import DataRefused, truncated
from loka.core.progress import Track
from loka.core.records.gemm_bench import CHOICE, Contest, GemmBench, or_hp
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report
from loka.core.storage.codec import encode
from loka.core.storage.files import digest_of
from loka.kernels.gemm.registry import KERNELS
from loka.measurement import Settings, measure
from loka.measurement.rerace import Arms, confirm
from loka.measurement.suite import SPREAD, suite_of, suite_stats, total_memory
from loka.planner import plan as plan_report
from loka.planner.baselines import fastest_of_library, libraries_of, library_of, only_library
from loka.zoo.shapes import lrm_gemm_shapes, of_models, read_shapes

REPORT, PLAN, RESULTS = "report.json", "plan.json", "gemm.json"
_CONFIRM_SEED = 1_000_003  # added to the measurement's seed: other draws, other order of rounds


@dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """What to benchmark, and how finely. `shapes` is a CSV file, None for the suite of LoKA."""

    out: Path
    command: str
    device: str
    shapes: Path | None = None
    models: tuple[str, ...] = ()
    candidates: tuple[str, ...] | None = None
    weight_dtype: str = "bfloat16"
    settings: Settings = field(default_factory=Settings)
    confirm_rounds: int = 41
    budget: Budget = field(default_factory=lambda: Budget(min_speedup=1.0))
    cache: Path | None = None
    time_limit: float | None = None


def run_gemm_bench(config: GemmConfig, *, track: Track | None = None) -> tuple[GemmBench, Report]:
    """Runs what is missing of the benchmark in `config.out`, within the time limit.

    Raises DataRefused where no row of the suite is a linear layer that fits the device.
    """
    deadline = None if config.time_limit is None else time.monotonic() + config.time_limit
    device = torch.device(config.device)
    listed = read_shapes(config.shapes) if config.shapes else lrm_gemm_shapes()
    suite = suite_of(of_models(listed, config.models), weight_dtype=config.weight_dtype, memory=total_memory(device))
    if not suite.layers:
        others = {**suite.not_covered, **suite.too_large}
        raise DataRefused(
            "no row of the suite is a linear layer that can run here",
            why=truncated([f"{name}: {why}" for name, why in others.items()], 10),
            way_out="other models with --model, or a GPU with more memory",
        )
    stats = suite_stats(suite, weight_dtype=config.weight_dtype)
    report = measure(
        stats,
        device=device,
        candidates=config.candidates,
        settings=config.settings,
        out=config.out / REPORT,
        cache=config.cache,
        time_limit=config.time_limit,
        track=track,
    )
    by_sites = replace(report, region_times={})  # what is raced below runs no region
    decided = plan_report(by_sites, config.budget)
    decided.save(config.out / PLAN)
    alone = plan_report(replace(by_sites, quantize_once_savings={}), config.budget)
    site_arms, layer_arms = _arms(report, config.budget, alone=alone, together=decided)
    bench = GemmBench(
        machine=fingerprint(device),
        command=config.command,
        settings={
            **asdict(config.settings),
            "candidates": sorted(config.candidates or ()),
            "confirm_rounds": config.confirm_rounds,
            "budget": encode(config.budget),
            "weight_dtype": config.weight_dtype,
            "spread": SPREAD,
        },
        libraries=_libraries(report),
        layers=suite.layers,
        not_covered=suite.not_covered,
        too_large=suite.too_large,
        contests={},
        plan_digest=digest_of([site_arms, layer_arms]),
        complete=report.complete,
    )
    path = config.out / RESULTS
    bench = _continue_from(path, bench)

    def with_contests(contests: Mapping[str, Contest]) -> GemmBench:
        explained = {place: _explained(contest, alone, place) for place, contest in contests.items()}
        missing = [name for name in suite.layers if name not in contests]
        return replace(bench, contests=explained, complete=report.complete and not (report.timed and missing))

    late = deadline is not None and time.monotonic() >= deadline
    if report.timed and (report.complete or not late):  # a plan of half a report is not the plan
        contests = confirm(
            stats,
            report,
            site_arms=site_arms,
            layer_arms=layer_arms,
            device=device,
            rounds=config.confirm_rounds,
            seed=config.settings.seed + _CONFIRM_SEED,
            done=bench.contests,
            deadline=deadline,
            track=track,
            save=lambda found: with_contests(found).save(path),
        )
        bench = with_contests(contests)
    bench.save(path)
    return bench, report


def _arms(report: Report, budget: Budget, *, alone: Plan, together: Plan) -> tuple[Arms, Arms]:
    site_arms = {CHOICE: _candidates(alone)}
    layer_arms = {CHOICE: _candidates(together)}
    if not report.timed:
        return site_arms, layer_arms
    for library in libraries_of(report):
        everywhere = fastest_of_library(report, library, budget, everywhere=True)
        site_arms[library] = layer_arms[library] = everywhere
        site_arms[or_hp(library)] = fastest_of_library(report, library, budget, everywhere=False)
        layer_arms[or_hp(library)] = _candidates(plan_report(only_library(report, library), budget))
    return site_arms, layer_arms


def _candidates(plan: Plan) -> dict[str, str]:
    return {site: decision.candidate for site, decision in plan.decisions.items()}


def _libraries(report: Report) -> dict[str, str]:
    active = libraries_of(report)
    reasons: dict[str, Counter[str]] = {}
    for site in report.sites.values():
        for name, measured in site.measurements.items():
            if name != HP and measured.unsupported:
                reasons.setdefault(library_of(name), Counter())[measured.unsupported] += 1
    found = {}
    for kernel in KERNELS.values():
        if not kernel.emulates:
            missing = kernel.missing()
            common = reasons.get(kernel.library, Counter()).most_common(1)
            why = missing or (common[0][0] if common else "none of its candidates was asked for")
            found[kernel.library] = "" if kernel.library in active else why
    return found


def _continue_from(path: Path, fresh: GemmBench) -> GemmBench:
    """The contests of an earlier run with the same plan go on; those of another are replaced.

    Raises FileRefused for a damaged file, which may be somebody's only copy.
    """
    if not path.exists():
        return fresh
    earlier = GemmBench.load(path)
    same = all(
        getattr(earlier, name) == getattr(fresh, name) for name in ("machine", "settings", "layers", "plan_digest")
    )
    return replace(fresh, contests=earlier.contests) if same else fresh


def _explained(contest: Contest, plan: Plan, place: str) -> Contest:
    decision = plan.decisions.get(place)
    return replace(contest, sqnr_db=decision.sqnr_db, reason=decision.reason) if decision else contest
