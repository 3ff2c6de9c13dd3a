"""The time of a site on a GPU: every candidate, and before it the algorithms of one kernel.

What is timed is what runs: quantization of both operands and the GEMM, at the true size, on
operands of the learnt distribution, in a race of all candidates (core/timing.py). A weight that is served
was quantized before.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from loka.core.error import Estimate, sqnr_db
from loka.core.exceptions import first_line
from loka.core.numerics.reference import Quantized
from loka.core.problem import DTYPES, Problem
from loka.core.recipe import Gemm
from loka.core.records.report import HP
from loka.core.storage.codec import sparse
from loka.core.timing import Race, Timing, is_broken, time_interleaved
from loka.kernels.gemm.registry import Candidate, candidate_named
from loka.kernels.gemm.run import ScaledGemm, run_gemm, scaled_gemm
from loka.kernels.quantize.quantizer import quantize_operand
from loka.kernels.quantize.side import BAD_A, BAD_B
from loka.measurement.operands import Operands, any_columns, sides, with_weight_cast
from loka.measurement.settings import Settings
from loka.measurement.times.hp_call import is_odd, padded_call

T = TypeVar("T")

# Two candidates this close in error are equally exact for any budget. Recipes that differ in a
# mantissa bit are 4 dB apart, kernels of one recipe a few hundredths.
_EQUALLY_EXACT_DB = 0.5

# An algorithm that is right differs from the others by its order of additions, a few hundredths
# of a dB; one that is wrong is wrong by tens.
_RIGHT_DB = 3.0
_COMPARED = 1 << 22  # elements of a result in which algorithms are compared


@dataclass(frozen=True, kw_only=True)
class SiteTimes:
    """Times at a site.

    Attributes:
        timings: by candidate; where a kernel's algorithms were searched, by the pinned name.
        pinned: candidate -> the pinned name that stands for it.
        failures: candidate -> why it could not be timed, by the name asked for.
        cut_short: the deadline ended a race before it was decided.
    """

    timings: Mapping[str, Timing]
    pinned: Mapping[str, str]
    failures: Mapping[str, str]
    cut_short: bool = sparse(False)


def rivals_of(errors: Mapping[str, Mapping[str, Estimate]]) -> dict[str, list[str]]:
    """For each candidate those that may drive it out of a race: the ones at least as exact.

    Whatever a budget asks of the error, the fastest candidate that it admits is then still in
    the race at the end. A result with NaN drives nobody out.
    """
    exact = {name: found["sqnr_db"].value for name, found in errors.items()}
    exact = {name: -math.inf if math.isnan(value) else value for name, value in exact.items()}
    return {name: [other for other in exact if exact[other] >= exact[name] - _EQUALLY_EXACT_DB] for name in exact}


def time_site(
    sets: Sequence[Operands],
    problem: Problem,
    names: Sequence[str],
    *,
    device: torch.device,
    settings: Settings,
    rivals: Mapping[str, Sequence[str]] | None = None,
    deadline: float | None = None,
    kept_weight: bool = False,
    stacked: bool = False,
) -> SiteTimes:
    """Times "hp" and the candidates `names` for `problem`.

    Args:
        sets: copies of the layer's operands to rotate.
        names: runnable candidates, "hp" among them.
        rivals: see `rivals_of`.
        deadline: of `time.monotonic()`.
        kept_weight: the weight of an `output` GEMM is quantized before.
        stacked: it is one of a batched GEMM, so that a candidate's result is copied to where hp writes it. That the
            others go one by one too is not counted.
    """
    race = partial(time_interleaved, device=device, tie=settings.tie, deadline=deadline, seed=settings.seed)
    search = partial(race, max_rounds=settings.search_rounds)
    pinned: dict[str, str] = {}
    failures: dict[str, str] = {}
    cut_short = False
    for name in names:
        try:
            if name != HP and (candidates := _algorithms(name, problem)):
                pinned[name], cut = _search(candidates, sets, problem, device, search)
                cut_short = cut_short or cut
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # libraries raise what they like
            error.add_note(f"while the algorithms of {name} were searched for {problem}")
            if is_broken(device):
                raise
            failures[name] = first_line(error)
    entered = {name: pinned.get(name, name) for name in names if name not in failures}
    calls = {
        name: site_call(name, sets, problem, kept_weight=kept_weight, stacked=stacked) for name in entered.values()
    }
    if is_odd(problem):
        calls[HP], cut = _faster_hp(calls[HP], sets, problem, search)
        cut_short = cut_short or cut
    against = None if rivals is None else _renamed(rivals, entered)
    found = race(calls, baseline=HP, rivals=against, max_rounds=settings.max_rounds)
    asked = {actual: name for name, actual in entered.items()}
    failures.update({asked[actual]: reason for actual, reason in found.failures.items()})
    return SiteTimes(
        timings=found.timings,
        pinned={name: actual for name, actual in pinned.items() if name not in failures},
        failures=failures,
        cut_short=cut_short or found.ended == "deadline",
    )


def _faster_hp(
    plain: Callable[[], torch.Tensor], sets: Sequence[Operands], problem: Problem, search: Callable[..., Race]
) -> tuple[Callable[[], torch.Tensor], bool]:
    """`plain` or with padded sides (times/hp_call.py), and whether their race was cut short."""
    padded = padded_call([sides(problem.gemm, each) for each in _for_hp(sets, problem)], problem)
    calls = {HP: plain, f"{HP}, padded": padded}
    found = search(calls, baseline=HP)
    return calls[found.winner], found.ended == "deadline"


def _for_hp(sets: Sequence[Operands], problem: Problem) -> Sequence[Operands]:
    """The operands as a GEMM in high precision gets them; `grad_weight` reads no weight."""
    return sets if problem.gemm is Gemm.GRAD_WEIGHT else [with_weight_cast(each) for each in sets]


def _renamed(rivals: Mapping[str, Sequence[str]], entered: Mapping[str, str]) -> dict[str, list[str]]:
    return {
        actual: [entered[other] for other in rivals.get(name, ()) if other in entered]
        for name, actual in entered.items()
    }


def site_call(
    name: str, sets: Sequence[Operands], problem: Problem, *, kept_weight: bool = False, stacked: bool = False
) -> Callable[[], torch.Tensor]:
    """One GEMM with the quantization of both its operands, from each set in turn; of its input alone where
    the weight is kept in FP8. `stacked`: as of `time_site`."""
    if stacked and name != HP:
        alone = site_call(name, sets, problem, kept_weight=kept_weight)
        return lambda: alone().clone()
    health = torch.zeros(3, dtype=torch.int64, device=sets[0]["weight"].device)
    if name == HP:
        sets = _for_hp(sets, problem)
    operands = _rotate([sides(problem.gemm, each) for each in sets])
    dtype = DTYPES[problem.dtype]
    centred = name != HP and candidate_named(name).recipe.centred  # times do not depend on the numbers
    centre = sets[0]["input"].new_zeros(problem.k, dtype=torch.float32) if centred else None
    hot = any_columns(name, health.device)
    if kept_weight and name != HP and not centred and hot is None:
        return _kept(name, [sides(problem.gemm, each) for each in sets], problem)

    def call() -> torch.Tensor:
        a, b = operands()
        return run_gemm(name, a, b, gemm=problem.gemm, dtype=dtype, health=health, centre=centre, hot=hot)

    return call


def _kept(name: str, sets: Sequence[tuple[torch.Tensor, torch.Tensor]], problem: Problem) -> Callable[[], torch.Tensor]:
    run = scaled_gemm(name, problem)
    operands = _rotate([(a, _quantized(run, a, b)[1]) for a, b in sets])

    def call() -> torch.Tensor:
        a, low_b = operands()
        low_a = quantize_operand(a, run.casts[0], padded=run.padded_a, health=None, slot=BAD_A)
        return run(low_a, low_b)

    return call


def _rotate(items: Sequence[T]) -> Callable[[], T]:
    turn = itertools.cycle(items)
    return lambda: next(turn)


def _algorithms(name: str, problem: Problem) -> list[Candidate]:
    candidate = candidate_named(name)
    if candidate.algorithm is not None:
        return []
    count = candidate.kernel.algorithms(candidate.padded(problem), candidate.recipe)
    return [replace(candidate, algorithm=index) for index in range(count)] if count > 1 else []


def _search(
    candidates: Sequence[Candidate],
    sets: Sequence[Operands],
    problem: Problem,
    device: torch.device,
    search: Callable[..., Race],
) -> tuple[str, bool]:
    """The pinned name of the fastest right algorithm, and whether the search was cut short.

    Operands are quantized once and the GEMM is raced alone: algorithms differ in nothing else.
    Raises RuntimeError, with the reasons, when none works.
    """
    runs = {candidate.name: scaled_gemm(candidate.name, problem) for candidate in candidates}
    first = next(iter(runs.values()))
    low = [_quantized(first, *sides(problem.gemm, each)) for each in sets]
    exact, failures = _exactness(runs, low[0], sides(problem.gemm, sets[0]), device)
    best = max(exact.values(), default=-math.inf)
    right = {name: runs[name] for name, value in exact.items() if best > 0 and value >= best - _RIGHT_DB}

    def gemm(run: ScaledGemm) -> Callable[[], torch.Tensor]:
        operands = _rotate(low)
        return lambda: run(*operands())

    while right:
        try:
            found = search({name: gemm(run) for name, run in right.items()}, baseline=next(iter(right)))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the baseline of this race is one algorithm like another
            if is_broken(device):
                raise
            name = next(iter(right))
            failures[name] = first_line(error)
            del right[name]
            continue
        return found.winner, found.ended == "deadline"
    wrong = [f"{name}: {value:.1f} dB from the product" for name, value in exact.items() if name not in failures]
    reasons = [*dict.fromkeys(failures.values()), *wrong]
    raise RuntimeError(f"none of its {len(runs)} algorithms works: {'; '.join(reasons)}")


def _quantized(run: ScaledGemm, a: torch.Tensor, b: torch.Tensor) -> tuple[Quantized, Quantized]:
    low_a = quantize_operand(a, run.casts[0], padded=run.padded_a, health=None, slot=BAD_A)
    return low_a, quantize_operand(b, run.casts[1], padded=run.padded_b, health=None, slot=BAD_B)


def _exactness(
    runs: Mapping[str, ScaledGemm],
    low: tuple[Quantized, Quantized],
    operands: tuple[torch.Tensor, torch.Tensor],
    device: torch.device,
) -> tuple[dict[str, float], dict[str, str]]:
    """`sqnr_db` of each algorithm's result at the true size, and why another has none.

    In rows spread over the whole result, against the product of the high-precision operands.
    """
    a, b = operands
    step = max(1, a.shape[0] * b.shape[0] // _COMPARED)
    expected = a[::step] @ b.to(a.dtype).t()
    exact: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, run in runs.items():
        try:
            value = sqnr_db(run(*low)[::step], expected)
        except Exception as error:  # libraries raise what they like
            error.add_note(f"while {name} ran {run.problem}")
            if is_broken(device):
                raise
            failures[name] = first_line(error)
            continue
        exact[name] = -math.inf if math.isnan(value) else value
    return exact, failures
