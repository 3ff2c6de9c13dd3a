"""What a GEMM benchmark says: verdicts, counts, geometric means; all from the record alone."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loka.core.error import Estimate
from loka.core.records.gemm_bench import CHOICE, Contest, GemmBench, or_hp
from loka.core.records.report import HP

WIN, TIE, LOSS = "win", "tie", "LOSS"


def verdict(versus: Estimate, tie: float) -> str:
    """The choice against an arm: a win or a loss lies beyond `tie` with its whole interval."""
    if versus.low > 1 + tie:
        return WIN
    return LOSS if versus.high < 1 / (1 + tie) else TIE


def worst(contest: Contest, tie: float) -> tuple[str, str, Estimate] | None:
    """Verdict, arm and ratio of the arm that did best against the choice; None without any."""
    if not contest.versus:
        return None
    arm = min(contest.versus, key=lambda name: (contest.versus[name].value, name))
    losses = [a for a, ratio in contest.versus.items() if verdict(ratio, tie) == LOSS]
    arm = min(losses, key=lambda name: contest.versus[name].value) if losses else arm
    return verdict(contest.versus[arm], tie), arm, contest.versus[arm]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One arm over many contests. `fp8` counts those in which it ran something else than hp.

    `speedup` is the geometric mean over hp; `versus` that of the arm's time over the choice's.
    Their intervals hold the noise of timing, not the choice of shapes.
    """

    arm: str
    contests: int
    fp8: int
    speedup: Estimate | None
    versus: Estimate | None
    verdicts: Mapping[str, int]
    slightly_slower: int
    """Ties in which the choice is slower beyond noise, by less than the tie."""


def label(arm: str) -> str:
    """An arm in the reader's words."""
    return {HP: "bf16", CHOICE: "the choice"}.get(arm, arm.replace("or hp", "or bf16"))


def arms_of(bench: GemmBench) -> list[str]:
    """hp, every active library alone and with hp to fall back on, and the choice."""
    libraries = [name for library in bench.active for name in (library, or_hp(library))]
    return [HP, *libraries, CHOICE]


def standings(bench: GemmBench, contests: Iterable[Contest]) -> dict[str, Standing]:
    """By arm, over the contests in which every arm has a time: all means are over the same shapes."""
    arms = arms_of(bench)
    usable = [c for c in contests if all(c.timing(arm) is not None for arm in arms)]
    found = {}
    for arm in arms:
        speedups = [timing.speedup for c in usable if (timing := c.timing(arm)) is not None]
        ratios = [c.versus[arm] for c in usable if arm in c.versus]
        verdicts = Counter(verdict(ratio, bench.tie) for ratio in ratios)
        found[arm] = Standing(
            arm=arm,
            contests=len(usable),
            fp8=sum(c.arms[arm] != HP for c in usable),
            speedup=geometric_mean(speedups),
            versus=geometric_mean(ratios),
            verdicts={name: verdicts[name] for name in (WIN, TIE, LOSS)},
            slightly_slower=sum(ratio.high < 1 and verdict(ratio, bench.tie) == TIE for ratio in ratios),
        )
    return found


def best_library(found: Mapping[str, Standing]) -> Standing | None:
    """The single library with the highest mean, falling back on hp where that is faster."""
    others = [s for arm, s in found.items() if arm not in (HP, CHOICE) and s.speedup is not None]
    return max(others, key=lambda s: (s.speedup.value if s.speedup else 0.0, s.arm), default=None)


def geometric_mean(ratios: Iterable[Estimate]) -> Estimate | None:
    """exp of the mean logarithm; the intervals' half-widths add in quadrature."""
    several = list(ratios)
    if not several:
        return None
    mean = math.fsum(math.log(ratio.value) for ratio in several) / len(several)
    halves = [(math.log(ratio.high) - math.log(ratio.low)) / 2 if ratio.low > 0 else math.inf for ratio in several]
    half = math.sqrt(math.fsum(half**2 for half in halves)) / len(several)
    return Estimate(math.exp(mean), math.exp(mean - half), math.exp(mean + half) if half < 700 else math.inf)


@dataclass(frozen=True, kw_only=True)
class ModelTime:
    """Microseconds of a model's measured layers, forward and backward, each by its count."""

    model: str
    layers: int
    by_arm: Mapping[str, float]


def model_times(bench: GemmBench) -> list[ModelTime]:
    """Of the models all of whose linear shapes in the suite were confirmed."""
    arms = arms_of(bench)
    sums: dict[str, dict[str, float]] = {}
    layers: Counter[str] = Counter()
    incomplete = {name.partition(": ")[0] for name in bench.too_large}
    contests = bench.whole_layers()
    for path, layer in bench.layers.items():
        contest = contests.get(path)
        timings = {arm: contest.timing(arm) for arm in arms} if contest else {}
        hp = timings.get(HP)
        for use in layer.uses:
            if hp is None or any(timing is None for timing in timings.values()):
                incomplete.add(use.model)
                continue
            layers[use.model] += 1
            total = sums.setdefault(use.model, dict.fromkeys(arms, 0.0))
            for arm, timing in timings.items():
                assert timing is not None
                # Through the paired speed-up, which clock drift between arms does not touch.
                total[arm] += use.count * hp.microseconds.value / timing.speedup.value
    return [
        ModelTime(model=model, layers=layers[model], by_arm=total)
        for model, total in sums.items()
        if model not in incomplete
    ]
