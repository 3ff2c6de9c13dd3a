"""Power and error rates of a verdict at 0.02 %, by resampling the proof's bank of pairs.

    python benchmarks/quality/bank.py benchmarks/quality/h200/proof.json benchmarks/quality/h200/proof_2.json

Validations are drawn from the pairs of each arm (validation/pair_bank.py): with no true difference, how many
say "fail", in how many does the interval hold 0, and how many pass; with a harm of 0.05 % planted, how many
find it ("fail"); with one of 0.02 %, how many pass. In the mean of arms, and in the worst, by where the
spread to expect (validation/variance.py) comes from: a bank of the other models, of two others, KL/H (no
bank), or nowhere (Student's t, as it was). `all` are the deviations of all arms as those of one model.

Synthetic worlds have models that differ in scale (a factor of 1.6) and fresh pairs, not eight drawn again.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loka.core.table import format_table
from loka.validation.arms import NUDGED
from loka.validation.pair_bank import Bank, BankedArm, BankedPair, expected_of, resample
from loka.validation.power import Rates, rates
from loka.validation.variance import KL_SHARE, Expected

LIMIT, HARM = 0.02, 0.05
PAIRS = (4, 8, 12)
FP8 = ("plan", "tight")
ALONE = Expected(0.0, 0, "the pairs alone")
SETTING = "proof"
EFFECTS, NAMES = (0.0, HARM, LIMIT), ("failed", "contains_zero", "passed")


def bank_of(*summaries: dict[str, Any]) -> Bank:
    """The planned arms and the A/A arm of each model that has verdicts."""
    arms = []
    models = [each for summary in summaries for each in summary["models"].items() if "verdicts" in each[1]]
    for model, verdicts in [(name, found["verdicts"]) for name, found in models]:
        for name in (*FP8, NUDGED):
            one = verdicts["arms"][name]
            pairs = tuple(
                BankedPair(int(seed), pair[0], kl[0] / verdicts["ne"][seed])
                for (seed, pair), kl in zip(one["pairs"].items(), one["kl_percent_of_h"], strict=True)
            )
            arm = BankedArm(
                world=model,
                key=name,
                name=name,
                model=model,
                rows=verdicts["rows"],
                rows_error=one["rows_error"],
                by_rows=0.0,
                pairs=pairs,
                setting=SETTING,
            )
            arms.append(arm)
    return Bank(tuple(arms))


def together(arms: Sequence[BankedArm]) -> BankedArm:
    """The deviations of all `arms`, as those of one."""
    pairs = [
        replace(pair, ne_percent=(pair.ne_percent - arm.variance.mean) * math.sqrt(n / (n - 1)))
        for arm in arms
        for n in [len(arm.pairs)]
        for pair in arm.pairs
    ]
    return replace(arms[0], world="all", rows_error=max(a.rows_error for a in arms), pairs=tuple(pairs))


def others(arms: Sequence[BankedArm], arm: BankedArm) -> Expected | None:
    bank = Bank(tuple(each for each in arms if each.world != arm.world))
    return expected_of(bank, world=arm.world, setting=SETTING, seeds=())


def line(of: Sequence[Sequence[Rates]]) -> tuple[str, ...]:
    """Means, and the worst of `of`."""
    failed, holds, passed = ([getattr(one[0], name) for one in of] for name in NAMES)
    found, wrong = [one[1].failed for one in of], [one[2].passed for one in of]
    return (
        f"{np.mean(failed):.1%}",
        f"{np.mean(holds):.1%} ({min(holds):.1%})",
        f"{np.mean(passed):.0%}",
        f"{np.mean(found):.0%} ({min(found):.0%})",
        f"{np.mean(wrong):.1%} ({max(wrong):.1%})",
    )


HEADER = ("nothing wrong: fail", "holds 0 (least)", "pass")
HEADER = (*HEADER, f"harm of {HARM:g} %: found (least)", f"of {LIMIT:g} %: passes (most)")


def arms_table(bank: Bank) -> str:
    arms, again = ([arm for arm in bank.arms if (arm.name == NUDGED) == a_a] for a_a in (False, True))
    names = list(dict.fromkeys(arm.model for arm in arms))
    halves = [[arm for arm in arms if arm.model in part] for part in (names[:2], names[2:])]
    whole = together(arms)
    every = {"KL/H": lambda arm: None, "none": lambda arm: ALONE}
    rules = [
        ("arms, the other models", arms, lambda arm: others(arms, arm)),
        (f"arms, {' and '.join(names[:2])}", halves[1], lambda arm: others(halves[0], arm)),
        (f"arms, {' and '.join(names[2:])}", halves[0], lambda arm: others(halves[1], arm)),
        *((f"arms, {rule}", arms, expected) for rule, expected in every.items()),
        ("A/A, KL/H", again, every["KL/H"]),
        ("all, the same models", [whole], lambda arm: others(arms, arm)),
        *((f"all, {rule}", [whole], expected) for rule, expected in every.items()),
    ]
    rows = []
    for pairs in PAIRS:
        for name, of, expected in rules:
            found = [
                [
                    resample(arm, pairs=pairs, limit=LIMIT, effect=effect, expected=expected(arm))
                    for effect in EFFECTS
                ]
                for arm in of
            ]
            rows.append((str(pairs), name, *line(found)))
            if pairs == PAIRS[0] and len(of) == len(arms):
                each = (
                    (f"  {arm.model} {arm.name}, SD {arm.variance.between_pairs:.4f}", *line([one]))
                    for arm, one in zip(of, found, strict=True)
                )
                rows += [(str(pairs), *cells) for cells in each]
    return format_table(("pairs", "spread to expect by", *HEADER), rows)


def shaped(kind: str, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Mean 0 and deviation 1; in two kinds one in 16 is four times as wide, or three deviations off."""
    z, far = rng.normal(size=shape), rng.random(shape) < 1 / 16
    if kind == "t, 3 degrees":
        return rng.standard_t(3, size=shape) / math.sqrt(3)
    if kind == "contaminated":
        return np.where(far, 4 * z, z) / math.sqrt(31 / 16)
    skewed = (0.6 * z + 3 * far - 3 / 16) / math.sqrt(0.36 + 9 * 15 / 256)
    return {"normal": z, "skewed up": skewed, "skewed down": -skewed}[kind]


def worlds_table(scale: float = 0.011, models: int = 200, draws: int = 400) -> str:
    """`models` models with three others in the bank, of each two arms of eight seeds as in the proof."""
    rows = []
    for kind in ("normal", "t, 3 degrees", "contaminated", "skewed up", "skewed down"):
        for pairs in PAIRS:
            rng, found = np.random.default_rng(0), {"other models": [], "KL/H": [], "none": []}
            for _ in range(models):
                own, *known = scale * np.exp(0.45 * rng.normal(size=4))
                first, second = shaped(kind, rng, 2, 3, 8)
                variances = [arm.var(axis=1, ddof=1) for arm in (first, 0.8 * first + 0.6 * second)]
                bank = np.square(known) * np.median(variances, axis=0)
                kl = own / (0.39 * math.exp(0.4 * rng.normal()))
                values = own * shaped(kind, rng, draws, pairs)
                expected = (Expected(math.sqrt(bank.mean()), 6, ""), Expected(KL_SHARE * kl, 0, ""), ALONE)
                for each, into in zip(expected, found.values(), strict=True):
                    of = [
                        rates(values + effect, rows_error=0.0, limit=LIMIT, expected=each)
                        for effect in EFFECTS
                    ]
                    into.append(of)
            for rule, each in found.items():
                rows.append((kind, str(pairs), rule, *(cell.split(" (")[0] for cell in line(each))))
    return format_table(("world", "pairs", "spread to expect by", *HEADER), rows)


if __name__ == "__main__":
    print(arms_table(bank_of(*(json.loads(Path(given).read_text()) for given in sys.argv[1:]))))
    print()
    print(worlds_table())
