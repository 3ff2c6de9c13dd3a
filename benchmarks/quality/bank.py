"""Power and error rates of a verdict at 0.02 %, by resampling the proof's bank of pairs.

    python benchmarks/quality/bank.py benchmarks/quality/h200/proof.json benchmarks/quality/h200/proof_2.json

Validations are drawn from the pairs of each arm (validation/pair_bank.py): with no true difference, how many
say "fail", in how many does the interval hold 0, and how many pass; with a harm of 0.05 % planted, how many
find it ("fail"); with one of 0.02 %, how many pass. Each under three spreads to expect
(validation/variance.py):

    other models   that of the models that the arm is not of, as with a bank
    KL/H           a third of the KL/H of the pairs drawn, as without a bank
    none           Student's t on the pairs alone, as it was

`all` are the deviations of all arms as one model's: there "other models" are the same ones; in `halves` two
models are judged by the other two. Then the same of synthetic worlds, whose models differ in scale (a factor
of 1.6) and have fresh pairs, not eight that are drawn again: normal, t with 3 degrees of freedom, one in 16
four times as wide, one in 16 three deviations above. Of the two sides of a harm the worse one is shown.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loka.core.table import format_table
from loka.validation.pair_bank import Bank, BankedArm, BankedPair, expected_of, resample
from loka.validation.power import Rates, rates
from loka.validation.variance import KL_SHARE, Expected

LIMIT, HARM = 0.02, 0.05
PAIRS = (4, 8, 12)
FP8 = ("plan", "tight")
ALONE = Expected(0.0, 0, "the pairs alone")
SETTING = "proof"


def bank_of(*summaries: dict[str, Any]) -> Bank:
    """All arms of each model that has verdicts."""
    arms = []
    for summary in summaries:
        for model, found in summary["models"].items():
            verdicts = found.get("verdicts") or {"arms": {}}
            for name, one in verdicts["arms"].items():
                parted = zip(one["pairs"].items(), one["kl_percent_of_h"], strict=True)
                pairs = tuple(
                    BankedPair(int(seed), pair[0], kl[0] / verdicts["ne"][seed])
                    for (seed, pair), kl in parted
                )
                arms.append(
                    BankedArm(
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
                )
    return Bank(tuple(arms))


def together(arms: list[BankedArm]) -> BankedArm:
    """The deviations of all `arms`, as those of one."""
    pairs = [
        replace(pair, ne_percent=(pair.ne_percent - arm.variance.mean) * math.sqrt(n / (n - 1)))
        for arm in arms
        for n in [len(arm.pairs)]
        for pair in arm.pairs
    ]
    widest = max(arm.rows_error for arm in arms)
    return replace(arms[0], world="all", model="all", rows_error=widest, pairs=tuple(pairs))


def spreads(bank: Bank, arm: BankedArm, models: tuple[str, ...] = ()) -> dict[str, Expected | None]:
    """What to expect of an arm, by where it comes from, `models` or all others; None: by its own KL/H."""
    others = Bank(
        tuple(
            each
            for each in bank.arms
            if each.world != arm.world and each.name in FP8 and (not models or each.model in models)
        )
    )
    return {
        "other models": expected_of(others, world=arm.world, setting=SETTING, seeds=()),
        "KL/H": None,
        "none": ALONE,
    }


def line(of: list[tuple[Rates, ...]]) -> tuple[str, ...]:
    """Means over arms, and the worst arm's."""
    nothing, harm, limit = zip(*of, strict=True)
    holds = [rates.contains_zero for rates in nothing]
    found, passed = [rates.failed for rates in harm], [rates.passed for rates in limit]
    return (
        f"{np.mean([rates.failed for rates in nothing]):.1%}",
        f"{np.mean(holds):.1%} ({min(holds):.1%})",
        f"{np.mean([rates.passed for rates in nothing]):.0%}",
        f"{np.mean(found):.0%} ({min(found):.0%})",
        f"{np.mean(passed):.1%} ({max(passed):.1%})",
    )


HEADER = ("nothing wrong: fail", "holds 0 (least)", "pass")
HEADER = (*HEADER, f"harm of {HARM:g} %: found (least)", f"of {LIMIT:g} %: passes (most)")


def arms_table(bank: Bank) -> str:
    arms = [arm for arm in bank.arms if arm.name in FP8]
    names = list(dict.fromkeys(arm.model for arm in arms))
    half = len(names) // 2

    def drawn(arm: BankedArm, pairs: int, expected: Expected | None) -> tuple[Rates, ...]:
        return tuple(
            resample(arm, pairs=pairs, limit=LIMIT, effect=effect, expected=expected)
            for effect in (0.0, HARM, LIMIT)
        )

    rows = []
    for pairs in PAIRS:
        for rule in ("other models", "KL/H", "none"):
            by_arm = [drawn(arm, pairs, spreads(bank, arm)[rule]) for arm in arms]
            rows.append((str(pairs), "mean of arms", rule, *line(by_arm)))
            whole = together(arms)
            rows.append((str(pairs), "all", rule, *line([drawn(whole, pairs, spreads(bank, whole)[rule])])))
            if rule == "other models":
                for part in (tuple(names[:half]), tuple(names[half:])):
                    of = [arm for arm in arms if arm.model not in part]
                    found = [drawn(arm, pairs, spreads(bank, arm, part)[rule]) for arm in of]
                    rows.append((str(pairs), "halves", f"{' and '.join(part)}", *line(found)))
            if pairs == PAIRS[0]:
                rows += [
                    (
                        str(pairs),
                        f"{arm.model} {arm.name}, {arm.variance.between_pairs:.4f}",
                        rule,
                        *line([one]),
                    )
                    for arm, one in zip(arms, by_arm, strict=True)
                ]
    return format_table(("pairs", "arm, SD", "spread to expect by", *HEADER), rows)


def shaped(kind: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Mean 0 and standard deviation 1."""
    z, far = rng.normal(size=shape), rng.random(shape) < 1 / 16
    if kind == "t, 3 degrees":
        return rng.standard_t(3, size=shape) / math.sqrt(3)
    if kind == "contaminated":
        return np.where(far, 4 * z, z) / math.sqrt(15 / 16 + 16 / 16)
    if kind == "skewed":
        return (0.6 * z + 3 * far - 3 / 16) / math.sqrt(0.36 + 9 * 15 / 256)
    return z


def worlds_table(scale: float = 0.011, models: int = 200, draws: int = 400) -> str:
    """`models` models, each with three others in its bank: two arms of eight seeds, as in the proof."""
    rows = []
    for kind in ("normal", "t, 3 degrees", "contaminated", "skewed"):
        for pairs in PAIRS:
            rng, found = np.random.default_rng(0), {rule: [] for rule in ("other models", "KL/H", "none")}
            for _ in range(models):
                own, *others = scale * np.exp(0.45 * rng.normal(size=4))
                variances = []
                for other in others:
                    first, second = shaped(kind, rng, (2, 8))
                    both = (first, 0.8 * first + 0.6 * second)
                    variances.append(np.median([(other * arm).var(ddof=1) for arm in both]))
                kl = own / (0.39 * math.exp(0.4 * rng.normal()))
                values = own * shaped(kind, rng, (draws, pairs))
                expected = {
                    "other models": Expected(math.sqrt(np.mean(variances)), 6, ""),
                    "KL/H": Expected(KL_SHARE * kl, 0, ""),
                    "none": ALONE,
                }
                for rule, one in expected.items():
                    nothing, harm, over, under = (
                        rates(values + effect, rows_error=0.0, limit=LIMIT, expected=one)
                        for effect in (0.0, HARM, LIMIT, -LIMIT)
                    )
                    found[rule].append((nothing, harm, over, under))
            for rule, each in found.items():
                sides = [line([(n, h, side) for n, h, *both in each for side in [both[at]]]) for at in (0, 1)]
                worse = max(sides, key=lambda side: float(side[-1].split("%")[0]))
                rows.append((kind, str(pairs), rule, *(cell.split(" (")[0] for cell in worse)))
    return format_table(("world", "pairs", "spread to expect by", *HEADER), rows)


if __name__ == "__main__":
    print(arms_table(bank_of(*(json.loads(Path(given).read_text()) for given in sys.argv[1:]))))
    print()
    print(worlds_table())
