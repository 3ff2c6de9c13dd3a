"""A README's table from validations, and from the plans and reports behind them where those are there.

    python benchmarks/quality/table.py FOLDER...           of report.json, plan.json, runs/validation.json
    python benchmarks/quality/table.py validation.json...  the measured half of it

A row a model and arm. Predicted is the sum over FP8 `output` GEMMs of what the probe learnt, in percent of
the control's NE like all that was measured; naive's is of its forward alone, its e5m2 gradients come on top.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from loka.core.budget import total_effect
from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report, site_name
from loka.validation.record import ArmVerdict, Validation

NAIVE_RECIPE = "tensorwise_e4m3"
LARGEST = 3  # sites that are named


class Experiment(NamedTuple):
    """What a folder holds of a model. `plan` and `report` are None of a validation by itself."""

    found: Validation
    plan: Plan | None
    report: Report | None

    @property
    def ne(self) -> float:
        """Of the control on held-out rows, mean over seeds."""
        runs = [r.quality.ne for r in self.found.runs if r.arm == self.found.control and r.quality]
        return math.fsum(runs) / len(runs) if runs else math.nan


def read(path: Path) -> Experiment:
    """Raises FileRefused for a missing or damaged validation, and for a damaged plan or report."""
    if not path.is_dir():
        return Experiment(Validation.load(path), None, None)
    plan, report = path / "plan.json", path / "report.json"
    return Experiment(
        Validation.load(path / "runs" / "validation.json"),
        Plan.load(plan) if plan.exists() else None,
        Report.load(report) if report.exists() else None,
    )


def effects(report: Report, recipes: Mapping[str, str]) -> dict[str, Estimate]:
    """By layer of `recipes`, the predicted KL/H of its `output` GEMM; unknown ones are left out."""
    found = {}
    for path, recipe in recipes.items():
        site = report.sites.get(site_name(path, Gemm.OUTPUT))
        for name, measured in site.measurements.items() if site else ():
            if name.partition("@")[0].endswith(f":{recipe}") and "ne" in measured.errors:
                found[path] = measured.errors["ne"]
                break
    return found


def recipes_of(arm: str, experiment: Experiment) -> Mapping[str, str]:
    """The recipe of each FP8 `output` GEMM of an arm, as far as it is known."""
    if arm == "plan" and experiment.plan is not None:
        return experiment.plan.output_recipes
    if arm == "naive" and experiment.report is not None:
        return dict.fromkeys(experiment.report.model.layers, NAIVE_RECIPE)
    return {}


def sites_in_fp8(arm: str, experiment: Experiment) -> int:
    """By plan; of another arm those that ran, which is as many with every seed."""
    if arm == "plan" and experiment.plan is not None:
        return sum(d.candidate != HP for d in experiment.plan.decisions.values())
    ran = [sum(n > 0 for n in (run.fp8 or {}).values()) for run in experiment.found.runs if run.arm == arm]
    return max(ran, default=0)


def row(arm: ArmVerdict, experiment: Experiment) -> str:
    found, ne = experiment.found, experiment.ne
    sites = str(sites_in_fp8(arm.name, experiment))
    if experiment.plan is not None:
        sites += f" of {len(experiment.plan.decisions)}"
    recipes = recipes_of(arm.name, experiment)
    known = effects(experiment.report, recipes) if experiment.report is not None else {}
    predicted, largest = "-", "-"
    if known:
        total = total_effect(known.values())
        lacks = f", {len(recipes) - len(known)} unknown" if len(known) < len(recipes) else ""
        predicted = f"{percent(scaled(total, 100 / ne))} %{lacks}"
        order = sorted(known, key=lambda path: -known[path].value)[:LARGEST]
        largest = ", ".join(f"`{path}` {100 * known[path].value / ne:+.4f}" for path in order)
    if arm.average is None:
        cells = ["-", "-", arm.broke or "no pair", "-"]
    else:
        variance, verdict = arm.average.variance, arm.verdict
        outlook = arm.average.outlook
        cells = [
            f"{percent(arm.average.ne_percent)} %",
            f"{variance.between_pairs:.3f}",
            f"{verdict}: {outlook}" if outlook else verdict,
            ", ".join(f"{pair.ne_percent.value:+.3f}" for pair in arm.differences.values()),
        ]
    columns = [found.model, f"{ne:.4f}", arm.name, sites, predicted, *cells, largest]
    return f"| {' | '.join(columns)} |"


def scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(*(factor * end for end in (estimate.value, estimate.low, estimate.high)))


def percent(estimate: Estimate) -> str:
    return f"{estimate.value:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"


HEADER = (
    "model",
    "NE of the control",
    "arm",
    "sites in FP8",
    "predicted rise",
    "measured",
    "between pairs",
    "verdict",
    "pairs",
    "largest predicted, %",
)


def main(paths: Sequence[str]) -> None:
    print(f"| {' | '.join(HEADER)} |")
    print(f"|{'---|' * len(HEADER)}")
    experiments = [read(Path(path)) for path in paths]
    for experiment in experiments:
        for arm in experiment.found.arms:
            print(row(arm, experiment))


if __name__ == "__main__":
    main(sys.argv[1:])
