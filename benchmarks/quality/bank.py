"""Power and error rates of a verdict at 0.02 %, by resampling the proof's bank of pairs.

    python benchmarks/quality/bank.py benchmarks/quality/h200/proof.json

For each model and arm, and for the deviations of all FP8 arms together, validations are drawn from its pairs
(validation/pair_bank.py): with no true difference, how many say "fail" and in how many does the interval hold
0; with a harm of 0.05 % planted, how many find it ("fail"); with one of 0.02 %, how many pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from loka.core.table import format_table
from loka.validation.pair_bank import Bank, BankedArm, BankedPair, resample

LIMIT, HARM = 0.02, 0.05
PAIRS = (4, 8, 12)
FP8 = ("plan", "tight")


def bank_of(summary: dict[str, Any]) -> Bank:
    arms = []
    for model, found in summary["models"].items():
        verdicts = found.get("verdicts") or {"arms": {}}
        for name, one in verdicts["arms"].items():
            arms.append(
                BankedArm(
                    world=model,
                    key=name,
                    name=name,
                    model=model,
                    rows=verdicts["rows"],
                    rows_error=one["rows_error"],
                    by_rows=0.0,
                    pairs=tuple(BankedPair(int(seed), pair[0]) for seed, pair in one["pairs"].items()),
                )
            )
    deviations = [
        value
        for arm in arms
        if arm.name in FP8
        for value in (np.array(arm.values) - np.mean(arm.values))
        * (len(arm.pairs) / (len(arm.pairs) - 1)) ** 0.5
    ]
    if deviations:
        widest = max(arm.rows_error for arm in arms if arm.name in FP8)
        pairs = tuple(BankedPair(place, float(value)) for place, value in enumerate(deviations))
        every = BankedArm(
            world="all",
            key="all",
            name="+".join(FP8),
            model="all",
            rows=arms[0].rows,
            rows_error=widest,
            by_rows=0.0,
            pairs=pairs,
        )
        arms.append(every)
    return Bank(tuple(arms))


def table(bank: Bank) -> str:
    rows = []
    for arm in bank.arms:
        for pairs in PAIRS:
            nothing, harm, limit = (
                resample(arm, pairs=pairs, limit=LIMIT, effect=effect) for effect in (0.0, HARM, LIMIT)
            )
            rows.append(
                (
                    arm.model,
                    arm.name,
                    str(len(arm.pairs)),
                    f"{arm.variance.between_pairs:.4f}",
                    str(pairs),
                    f"{nothing.failed:.1%}",
                    f"{nothing.contains_zero:.1%}",
                    f"{nothing.passed:.0%}",
                    f"{harm.failed:.0%}",
                    f"{limit.passed:.1%}",
                )
            )
    header = (
        "model",
        "arm",
        "in the bank",
        "SD of pairs, %",
        "pairs",
        "nothing wrong: fail",
        "holds 0",
        "pass",
    )
    return format_table((*header, f"harm of {HARM:g} %: found", f"of {LIMIT:g} %: passes"), rows)


if __name__ == "__main__":
    print(table(bank_of(json.loads(Path(sys.argv[1]).read_text()))))
