"""How many cases a test of a Triton kernel has: all of them on a GPU, a part in the interpreter.

A GPU runs a case in microseconds and has faults of its own to find: layouts, races, hardware casts.
The interpreter takes up to a second a case, and what it can find, wrong arithmetic, masks and
addresses, shows in any case that takes the branch. So a CPU runs as few cases as still hold every pair
of values, and shapes of few programs.
"""

import itertools
from collections import Counter
from typing import TypeVar

import torch

T = TypeVar("T")
ON_GPU = torch.cuda.is_available()


def on_gpu_or_cpu(gpu, cpu):
    """A size, a shape or a list of cases by where kernels run."""
    return gpu if ON_GPU else cpu


def combinations(*axes, together):
    """All combinations of the axes' values on a GPU; on a CPU few that hold every pair of values of
    two axes (`together` 2), or all three of three (3). The same ones in every process."""
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    if not ON_GPU:
        rows = _covering(rows, together)
    return [tuple(axis[place] for axis, place in zip(axes, row, strict=True)) for row in rows]


def _covering(rows, together):
    """Greedy: the row that holds most of what is missing, until nothing is; of equals the one whose
    values were taken least, so that none is left to the rows that the others need not."""
    parts = {row: set(itertools.combinations(enumerate(row), together)) for row in rows}
    missing = set().union(*parts.values())
    taken = Counter()
    kept = []
    while missing:
        best = max(rows, key=lambda row: (len(parts[row] & missing), -sum(taken[one] for one in enumerate(row))))
        kept.append(best)
        taken.update(enumerate(best))
        missing -= parts[best]
    return sorted(kept)
