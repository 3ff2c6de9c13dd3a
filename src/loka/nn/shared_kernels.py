"""Which kernels run the GEMMs of layers that share their input: one rule for timing and for planning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping

from loka.core.problem import Problem, linear_problem
from loka.core.recipe import Gemm
from loka.core.report import HP, SiteReport, site_name
from loka.core.shared_input import SharedInput, recipe_fits
from loka.kernels.registry import candidate_named


def shared_kernels(group: SharedInput, sites: Mapping[str, SiteReport]) -> tuple[dict[Gemm, str], str | None]:
    """By GEMM, the candidate that takes least time at the branches together, of those measured at each of
    them; "hp" for a GEMM that never runs. And why there is none, or None.

    Where nothing was timed the first name counts. Gradients keep to exact accumulation: grad_input adds up
    over a longer K than was measured at any branch, and grad_weight over all rows of a batch.
    """
    found: dict[Gemm, str] = {}
    for gemm in Gemm:
        several = [sites[name] for path in group.linears if (name := site_name(path, gemm)) in sites]
        if not several:
            found[gemm] = HP
            continue
        if len(several) < len(group.branches):
            return {}, f"{gemm} runs at some of them only"
        problem = merged_problem(group, [site.problem for site in several])
        times: dict[str, float] = {}
        for name in several[0].measurements:
            if name == HP or not _fits(name, problem):
                continue
            measured = [site.measurements.get(name) for site in several]
            if all(m is not None and not m.unsupported for m in measured):
                times[name] = sum(m.microseconds.value for m in measured if m and m.microseconds)
        if not times:
            return {}, f"no kernel with scales of rows was measured for {gemm} at all of them"
        found[gemm] = min(times, key=lambda name: (times[name], name))
    return found, None


def shared_name(kernels: Mapping[Gemm, str]) -> str:
    """What a report calls the group as one, run by these kernels."""
    return "shared " + _told(kernels)


def apart_name(kernels: Mapping[Gemm, str]) -> str:
    """What it calls the same layers one by one, each by these kernels."""
    return "apart " + _told(kernels)


def _told(kernels: Mapping[Gemm, str]) -> str:
    return " ".join(kernels[gemm] for gemm in Gemm)


def comparable(group: SharedInput, sites: Container[str]) -> SharedInput | None:
    """The branches for which the same GEMMs run, the most there are: a frozen one has no grad_weight.

    `sites` are the names of the GEMMs that run.
    """
    gemms = {path: tuple(g for g in Gemm if site_name(path, g) in sites) for path in group.linears}
    counts = Counter(own for own in gemms.values() if own)
    if not counts:
        return None
    most = counts.most_common(1)[0][0]
    return group.without({path for path, own in gemms.items() if own != most})


def merged_problem(group: SharedInput, problems: list[Problem]) -> Problem:
    """The GEMM that stands for those of all branches, whose `problems` have the same rows."""
    first = problems[0]
    rows = first.k if first.gemm is Gemm.GRAD_WEIGHT else first.m
    return linear_problem(
        first.gemm,
        rows=rows,
        in_features=group.in_features,
        out_features=sum(group.widths),
        dtype=first.dtype,
        target=first.target,
    )


def _fits(name: str, problem: Problem) -> bool:
    candidate = candidate_named(name)
    if not recipe_fits(candidate.recipe) or candidate.algorithm is not None:
        return False
    if problem.gemm is not Gemm.OUTPUT and candidate.kernel.fast:
        return False
    return candidate.illegal(problem) is None
