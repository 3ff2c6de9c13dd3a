"""One budget of NE for the model against one threshold of SQNR or MERE for every site.

    python benchmarks/ne_budget/ne_budget.py --out benchmarks/ne_budget/synthetic.json
    python benchmarks/ne_budget/ne_budget.py --data rows.parquet --out real.json

A small model is trained on one pass of rows and probed on the next ones; its sites are measured
(SQNR and MERE of every recipe on operands drawn from the statistics, the KL/H predicted). Then

* the planner spends `Budget(ne=0.02 % of the model's NE)`, knowing nothing but those predictions, and,
  because small models with norms cost less than that with everything in FP8, shares of what
  everything is predicted to cost (`--plain` builds them without norms);
* every threshold of SQNR, and every one of MERE, that makes a difference is planned with too, and of
  those whose ACTUAL KL/H stays within the budget the one that saves most time is kept. That is hindsight:
  no user of a threshold has the actual KL/H. A second row grants only what the planner's plan really cost.

Actual KL/H is that of the plan with all its FP8 `output` GEMMs emulated (train/automatic/joint_effect.py), on
rows that were neither trained on nor probed. Gradients play no part: only `output` GEMMs are planned.

Times: there is no GPU here, and the small models' GEMMs would be far too small for FP8. So a site of
M x N x K stands for one of `--rows` x 32 N x 32 K (M: rows, times its rows a sample), and its time in
bf16 and by recipe is

    t = a + b MNK + c (MN + MK + NK)

fitted to what was measured on an H200 (gemm_suite/report.json.gz of the raw results, which
benchmarks/README.md says how to get: the fastest kernel of each
recipe, quantization included). The output holds the fit and its error. All arms use the same times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loka
from loka.core.budget import Budget, upper_bound
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report, SiteReport
from loka.core.storage.files import write_record
from loka.core.table import format_table
from loka.data import SyntheticClicks, open_table
from loka.data.batch import Batch, Source
from loka.train import TrainConfig, quality, train
from loka.train.automatic.joint_effect import joint_effect
from loka.zoo import build
from loka.zoo.presets import MODELS

ROOT = Path(__file__).parents[2]
RECIPES = ("tensorwise_e4m3", "rowwise_e4m3", "blockwise_e4m3")
WIDER = 32  # a small model's N and K stand for so many times as many
# The zoo's small sizes with ReLU and without norms, as DLRM and DCN-V2 were published.
PLAIN: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom": (64,), "top": (256, 128, 64)},
    "dcnv2": {"bottom": (64,), "cross_layers": 2, "rank": 64, "deep": (256, 128, 64)},
    "wukong": {
        "bottom": (64,),
        "layers": 2,
        "fm_tokens": 8,
        "lc_tokens": 8,
        "rank": 8,
        "hidden": (128,),
        "top": (128, 64),
    },
}
Fit = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to plan at its best: what it saves of all `output` time, what runs in FP8, what it costs."""

    name: str
    plan: Plan
    saved: float
    fp8: float
    actual: Estimate
    predicted: Estimate | None

    def to_json(self) -> dict[str, Any]:
        predicted = None if self.predicted is None else [self.predicted.value, upper_bound(self.predicted)]
        return {
            "saved_share": self.saved,
            "fp8_share": self.fp8,
            "actual_ne": [self.actual.value, self.actual.low, self.actual.high],
            "predicted_ne_and_upper_end": predicted,
            "fp8": {d.path: d.candidate for d in self.plan.decisions.values() if d.candidate != HP},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="parquet rows in the Criteo layout; synthetic without")
    parser.add_argument("--models", nargs="+", default=["dcnv2", "dlrm", "wukong"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="ReLU and no norms, as first published")
    parser.add_argument("--train-rows", type=int, default=100_000, help="of the synthetic world")
    parser.add_argument("--eval-rows", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=8192, help="batch that times are modelled at")
    parser.add_argument("--percent", type=float, default=0.02, help="budget, of the model's NE")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[0.5, 0.25, 0.1], help="and of what everything costs"
    )
    arguments = parser.parse_args()
    fits = fit_times(Report.load(ROOT / "benchmarks/gemm_suite/report.json.gz"))
    entries: dict[str, Any] = {}
    for name, seed in itertools.product(arguments.models, range(arguments.seeds)):
        began = time.monotonic()
        entries[f"{name}/{seed}"] = run(name, seed, arguments, {key: fit for key, (fit, _) in fits.items()})
        content = {
            "settings": {**vars(arguments), "out": None, "data": arguments.data and arguments.data.name},
            "times": {key: {"us": fit, "median_error": error} for key, (fit, error) in fits.items()},
            "entries": entries,
        }
        write_record(arguments.out, kind="loka-bench-ne-budget", version=1, content=content)
        print(
            f"{name} seed {seed}: {time.monotonic() - began:.0f} s\n{table(entries[f'{name}/{seed}'])}\n",
            flush=True,
        )


def run(name: str, seed: int, arguments: argparse.Namespace, fits: Mapping[str, Fit]) -> dict[str, Any]:
    learnt, fresh = _sources(arguments.data, seed, arguments)
    torch.manual_seed(seed)
    features = {"dense_features": learnt.dense_features, "vocab_sizes": learnt.vocab_sizes}
    if arguments.plain:
        model = MODELS[name](embedding_dim=16, **features, **PLAIN[name])
    else:
        model = build(name, **features)
    train(model, learnt, config=TrainConfig(batch_size=256, schedule="constant", precision="fp32", seed=seed))
    batches = list(itertools.islice(fresh.batches(1024), 1 + arguments.eval_rows // 1024))
    first, rest = batches[0], batches[1:]
    with loka.Probe(model, every=1, effect_step=512, seed=seed) as probe:
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            model(first.dense, first.sparse), first.label
        )
        losses.backward()
    model.zero_grad()
    candidates = [f"emulated:{recipe}" for recipe in RECIPES]
    report = timed(loka.measure(probe.stats(), device="cpu", candidates=candidates), fits, arguments.rows)
    ne = quality(
        torch.cat([_logits(model, batch) for batch in rest]).numpy(),
        torch.cat([batch.label for batch in rest]).numpy(),
    ).ne
    known: dict[str, Estimate] = {}

    def arm(title: str, budget: Budget) -> Arm:
        """Plans, and evaluates what was not evaluated yet."""
        made = loka.plan(report, budget)
        key = json.dumps(made.output_recipes, sort_keys=True)
        if key not in known:
            known[key] = joint_effect(model, made, rest).measured
        return Arm(
            name=title,
            plan=made,
            saved=_saved(report, made),
            fp8=_in_fp8(report, made),
            actual=known[key],
            predicted=made.kl,
        )

    free = Budget(min_sqnr_db=None, min_speedup=1.0)
    everything = arm("everything within speed", free)
    thresholds = [
        arm(f"sqnr >= {limit:.2f} dB", replace(free, min_sqnr_db=limit))
        for limit in _limits(report, "sqnr_db", "low")
    ]
    by_mere = [
        arm(f"mere <= {limit:.4f}", replace(free, max_mere=limit))
        for limit in _limits(report, "mere", "high")
    ]
    assert everything.predicted is not None
    limits = {f"{arguments.percent} % of NE": arguments.percent / 100 * ne}
    limits.update(
        {f"{share:g} of all": share * upper_bound(everything.predicted) for share in arguments.shares}
    )
    budgets = {}
    for title, limit in limits.items():
        mine = arm(f"{limit:.2e}", replace(free, ne=limit))
        found = {"planner": mine}
        for measure, arms in (("sqnr", thresholds), ("mere", by_mere)):
            for granted, most in (("the budget", limit), ("the planner's NE", max(mine.actual.value, 0.0))):
                fitting = [a for a in arms if a.actual.value <= most * (1 + 1e-9)]
                best = max(fitting, key=lambda a: (a.saved, -a.actual.value), default=None)
                if best is not None:
                    found[f"{measure} threshold, within {granted}"] = best
        budgets[title] = {
            "limit": limit,
            "arms": {who: {"rule": a.name, **a.to_json()} for who, a in found.items()},
        }
    return {
        "model": name,
        "seed": seed,
        "ne": ne,
        "sites": len(report.sites),
        "thresholds": len(thresholds) + len(by_mere),
        "everything": everything.to_json(),
        "budgets": budgets,
    }


def _sources(data: Path | None, seed: int, arguments: argparse.Namespace) -> tuple[Source, Source]:
    if data is not None:
        return open_table(data, holdout=0.45)
    rows = arguments.eval_rows + 1024
    world = SyntheticClicks(rows=arguments.train_rows, seed=seed)
    return world, SyntheticClicks(rows=rows, first_row=arguments.train_rows, seed=seed)


def _logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return model(batch.dense, batch.sparse)


def fit_times(suite: Report) -> dict[str, tuple[Fit, float]]:
    """By recipe and "hp": the fit to `output` GEMMs, and its median relative error."""
    found = {}
    for key in (HP, *RECIPES):
        shapes, times = [], []
        for site in suite.sites.values():
            fastest = _fastest(site, key)
            if site.problem.gemm is Gemm.OUTPUT and fastest is not None and site.problem.n >= 64:
                m, n, k = site.problem.m, site.problem.n, site.problem.k
                shapes.append((1.0, m * n * k, m * n + m * k + n * k))
                times.append(fastest)
        # Relative errors count, and no term may be negative: coordinate descent on a convex problem.
        rows = np.array(shapes) / np.array(times)[:, None]
        scale = np.linalg.norm(rows, axis=0)
        rows = rows / scale
        fit = np.zeros(3)
        for _ in range(5000):
            for j in range(3):
                others = rows @ fit - rows[:, j] * fit[j]
                fit[j] = max(0.0, rows[:, j] @ (1 - others) / (rows[:, j] @ rows[:, j]))
        error = float(np.median(np.abs(rows @ fit - 1)))
        found[key] = (tuple(float(v) for v in fit / scale), error)
    return found  # type: ignore[return-value]


def _fastest(site: SiteReport, key: str) -> float | None:
    """Microseconds of hp, or of the recipe's fastest kernel, in units of hp's own race."""
    hp = site.measurements[HP].microseconds
    if key == HP or hp is None:
        return hp.value if hp else None
    ratios = [
        m.speedup.value
        for name, m in site.measurements.items()
        if name.partition("@")[0].endswith(f":{key}") and m.speedup is not None
    ]
    return hp.value / max(ratios) if ratios else None


def timed(report: Report, fits: Mapping[str, Fit], rows: int) -> Report:
    """Only `output` sites, at modelled times."""
    most = min(site.problem.m for site in report.sites.values() if site.problem.gemm is Gemm.OUTPUT)
    sites = {}
    for name, site in report.sites.items():
        if site.problem.gemm is not Gemm.OUTPUT:
            continue
        m = rows * site.problem.m // most
        n, k = WIDER * site.problem.n, WIDER * site.problem.k
        work = np.array((1.0, m * n * k, m * n + m * k + n * k))
        times = {key: float(work @ np.array(fit)) for key, fit in fits.items()}
        measurements = {}
        for candidate, measured in site.measurements.items():
            key = candidate.rpartition(":")[2]
            us, ratio = times[key], times[HP] / times[key]
            measurements[candidate] = replace(
                measured, microseconds=Estimate(us, us, us), speedup=Estimate(ratio, ratio, ratio)
            )
        sites[name] = replace(site, measurements=measurements)
    return replace(report, sites=sites)


def _limits(report: Report, measure: str, end: str) -> Iterable[float]:
    """Every threshold that admits a different set of candidates: what lies at or beyond each value."""
    values = {
        getattr(measured.errors[measure], end)
        for site in report.sites.values()
        for name, measured in site.measurements.items()
        if name != HP
    }
    return sorted(values)


def _total(report: Report, paths: Iterable[str] | None = None) -> float:
    chosen = None if paths is None else set(paths)
    times = [
        site.measurements[HP].microseconds.value
        for site in report.sites.values()
        if (chosen is None or site.path in chosen) and site.measurements[HP].microseconds
    ]
    return float(sum(times))


def _in_fp8(report: Report, made: Plan) -> float:
    return _total(report, made.output_recipes) / _total(report)


def _saved(report: Report, made: Plan) -> float:
    saved = sum(
        d.hp_microseconds.value - d.microseconds.value
        for d in made.decisions.values()
        if d.candidate != HP and d.hp_microseconds and d.microseconds
    )
    return float(saved) / _total(report)


def table(entry: Mapping[str, Any]) -> str:
    everything = entry["everything"]
    rows: list[Sequence[object]] = [_row("", "all that is faster", everything)]
    for name, budget in entry["budgets"].items():
        for title, arm in budget["arms"].items():
            rows.append(_row(f"{name}: {budget['limit']:.2e}", f"{title}: {arm['rule']}", arm))
    header = (
        "budget",
        "plan",
        "of output time in FP8",
        "of it saved",
        "actual KL/H",
        "predicted NE",
        "upper end",
    )
    head = f"NE {entry['ne']:.4f}, {entry['sites']} sites, {entry['thresholds']} thresholds tried"
    return f"{head}\n{format_table(header, rows)}"


def _row(budget: str, title: str, arm: Mapping[str, Any]) -> tuple[str, ...]:
    predicted = arm["predicted_ne_and_upper_end"] or (0.0, 0.0)
    return (
        budget,
        title,
        f"{100 * arm['fp8_share']:.1f} %",
        f"{100 * arm['saved_share']:.2f} %",
        f"{arm['actual_ne'][0]:.2e}",
        *(f"{value:.2e}" for value in predicted),
    )


if __name__ == "__main__":
    main()
