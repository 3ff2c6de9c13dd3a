"""What it saves to quantize a tensor and its transpose in one pass, on a GPU.

When two GEMMs of a layer run in FP8, the tensor between them is wanted twice: as it lies, and
transposed. The times of sites (measurement/times/site_times.py) hold a pass for each; this measures

    saved = time(row-major copy) + time(transposed copy) - time(both in one pass)

for each pair of casts. The passes are timed apart and with a cold cache, because in a training
step they are a forward or a GEMM apart.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from loka.core.error import Estimate
from loka.core.problem import Problem
from loka.core.recipe import SHARED_OPERANDS, Cast, Gemm
from loka.core.records.report import HP
from loka.core.storage.codec import sparse
from loka.core.timing import median_interval, time_interleaved
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.quantize.quantizer import quantize_pair
from loka.kernels.quantize.side import BAD_A, Side
from loka.measurement.operands import Operands
from loka.measurement.settings import Settings

_Pair = tuple[Side | None, Side | None]


@dataclass(frozen=True, kw_only=True)
class QuantizeOnceSavings:
    """Microseconds saved, by tensor and casts "row+column" (`Cast.name`), as in a report."""

    saved: Mapping[str, Mapping[str, Estimate]]
    failures: Mapping[str, str]
    cut_short: bool = sparse(False)


def shared_casts(
    problems: Mapping[Gemm, Problem], names: Mapping[Gemm, Iterable[str]]
) -> dict[str, tuple[dict[Cast, tuple[int, int]], dict[Cast, tuple[int, int]]]]:
    """For each tensor with two GEMMs: casts of its row-major copy and of the transposed one.

    Each with the sides it is padded to; where kernels pad differently, the largest.
    """

    def casts(gemm: Gemm, index: int) -> dict[Cast, tuple[int, int]]:
        found: dict[Cast, tuple[int, int]] = {}
        for name in names.get(gemm, ()):
            if name == HP:
                continue
            candidate = candidate_named(name)
            pair = candidate.recipe.casts(gemm)
            assert pair is not None
            padded = candidate.padded(problems[gemm])
            high, wide = found.get(pair[index], (0, 0))
            found[pair[index]] = (max(high, (padded.m, padded.n)[index]), max(wide, padded.k))
        return found

    both = {name: (casts(*row), casts(*column)) for name, (row, column) in SHARED_OPERANDS.items()}
    return {name: (rows, columns) for name, (rows, columns) in both.items() if rows and columns}


def time_quantize_once(
    sets: Sequence[Operands],
    problems: Mapping[Gemm, Problem],
    names: Mapping[Gemm, Iterable[str]],
    *,
    device: torch.device,
    settings: Settings,
    deadline: float | None = None,
) -> QuantizeOnceSavings:
    """Times both passes and the shared one for each pair of casts among candidates `names`."""
    saved: dict[str, dict[str, Estimate]] = {}
    failures: dict[str, str] = {}
    cut_short = False
    for tensor, (rows, columns) in shared_casts(problems, names).items():
        row_sides = {cast: Side(cast=cast, padded=sides, flag=BAD_A) for cast, sides in rows.items()}
        column_sides = {cast: Side(cast=cast, padded=sides, flag=BAD_A) for cast, sides in columns.items()}
        passes: dict[str, _Pair] = {}
        for row, column in itertools.product(row_sides.values(), column_sides.values()):
            passes[_name(row, column)] = (row, column)
            passes[_name(row, None)] = (row, None)
            passes[_name(None, column)] = (None, column)
        found = time_interleaved(
            {name: _pass([each[tensor] for each in sets], pair, device) for name, pair in passes.items()},
            baseline=next(iter(passes)),
            device=device,
            keep=list(passes),
            max_rounds=settings.quantize_once_rounds,
            deadline=deadline,
            seed=settings.seed,
        )
        cut_short = cut_short or found.ended == "deadline"
        failures.update({f"{tensor} {name}": reason for name, reason in found.failures.items()})
        saved[tensor] = {}
        for name, (row_side, column_side) in passes.items():
            parts = (name, _name(row_side, None), _name(None, column_side))
            if row_side and column_side and all(part in found.samples for part in parts):
                together, first, second = (found.samples[part] for part in parts)
                saved[tensor][name] = median_interval(
                    [a + b - both for a, b, both in zip(first, second, together, strict=True)]
                )
    return QuantizeOnceSavings(saved=saved, failures=failures, cut_short=cut_short)


def _name(row: Side | None, column: Side | None) -> str:
    return f"{row.cast.name if row else ''}+{column.cast.name if column else ''}"


def _pass(tensors: Sequence[torch.Tensor], pair: _Pair, device: torch.device) -> Callable[[], object]:
    turn = itertools.cycle(tensors)
    health = torch.zeros(3, dtype=torch.int64, device=device)
    return lambda: quantize_pair(next(turn), row=pair[0], column=pair[1], health=health)
