"""Which layers over tokens read a transposed view as it lies: those in hp for which it is faster.

Precision is the same in both forms, so that no budget of error has a say; `Budget.keep` has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from loka.core.budget import Budget
from loka.core.error import Estimate
from loka.core.fusion import fusion_forced
from loka.core.plan import Decision
from loka.core.report import HP, Report

_TIE = 1.01  # lower end of a speed-up; less is noise


def decide_turned(
    report: Report, budget: Budget, decisions: Mapping[str, Decision], inside: Collection[str]
) -> dict[str, Estimate]:
    """Speed-ups by path; none outside of `forced_fusion`.

    A layer that matches `budget.keep` stays as it is; `inside` are the layers that run within a chain or a
    stack of cross layers.
    """
    if not fusion_forced():
        return {}
    low = {decision.path for decision in decisions.values() if decision.candidate != HP}
    return {
        path: measured.speedup
        for path, measured in report.turned_times.items()
        if measured.speedup is not None
        and measured.speedup.low > _TIE
        and path not in low
        and path not in inside
        and not any(fnmatchcase(path, pattern) for pattern in budget.keep)
    }
