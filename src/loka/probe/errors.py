"""The error of every candidate at a layer's sites, on operands drawn from its statistics.

All candidates see the same draws and are compared with the float32 product of the same
operands. Draws go on until the 95 % interval of every `sqnr_db` is narrow enough.

At `output` the error "ne" stands beside them: what the candidate's recipe is predicted to add to the
model's NE. It is not drawn but learnt while probing (probe/effects.py), where it could be.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from loka.core.error import Estimate, estimate_mean, mere, sqnr_db
from loka.core.problem import DTYPES, Problem
from loka.core.recipe import Gemm
from loka.core.report import HP
from loka.core.stats import LinearStats
from loka.core.timing import first_line, still_usable
from loka.kernels.registry import candidate_named
from loka.kernels.run import run_gemm
from loka.probe.effects import predicted_ne
from loka.probe.operands import draw_operands, layer_samplers, sides
from loka.probe.settings import Settings

_Samples = dict[tuple[Gemm, str, str], list[float]]


@dataclass(frozen=True, kw_only=True)
class LayerErrors:
    """Errors by GEMM, candidate and measure name; failures by GEMM and candidate."""

    errors: Mapping[Gemm, Mapping[str, Mapping[str, Estimate]]]
    failures: Mapping[Gemm, Mapping[str, str]]


def draw_errors(
    layer: LinearStats,
    problems: Mapping[Gemm, Problem],
    runnable: Mapping[Gemm, Sequence[str]],
    *,
    device: torch.device,
    settings: Settings,
) -> LayerErrors:
    """Draws for the candidates in `runnable`. One that raises is a failure; the others go on.

    What "hp" raises, and an error after which CUDA is unusable, is raised.
    """
    samplers = layer_samplers(layer, device, keep_tails=settings.keep_tails)
    generator = torch.Generator(device).manual_seed(settings.seed)
    samples: _Samples = {}
    failures: dict[Gemm, dict[str, str]] = {gemm: {} for gemm in runnable}
    rows = min(layer.rows, settings.rows)
    for count in itertools.count(1):
        operands = draw_operands(layer, samplers, rows, generator)
        for gemm, names in runnable.items():
            a, b = sides(gemm, operands)
            reference = a.float() @ b.float().t()
            for name in names:
                if name in failures[gemm]:
                    continue
                try:
                    out = run_gemm(name, a, b, gemm=gemm, dtype=DTYPES[problems[gemm].dtype])
                    found = {"sqnr_db": sqnr_db(out, reference), "mere": mere(out, reference)}
                except Exception as error:  # libraries raise what they like
                    error.add_note(f"while the error of {name} was drawn for {problems[gemm]}")
                    if name == HP or (device.type == "cuda" and not still_usable()):
                        raise
                    failures[gemm][name] = first_line(error)
                    continue
                for measure, value in found.items():
                    samples.setdefault((gemm, name, measure), []).append(value)
        samples = {key: values for key, values in samples.items() if key[1] not in failures[key[0]]}
        if count >= settings.max_draws or (count >= settings.min_draws and _narrow(samples, settings)):
            break
    errors: dict[Gemm, dict[str, dict[str, Estimate]]] = {gemm: {} for gemm in runnable}
    for (gemm, name, measure), values in samples.items():
        errors[gemm].setdefault(name, {})[measure] = estimate_mean(values)
    for name, measures in errors.get(Gemm.OUTPUT, {}).items():
        effect = None if name == HP else predicted_ne(layer, candidate_named(name).recipe)
        if effect is not None:
            measures["ne"] = effect
    return LayerErrors(errors=errors, failures=failures)


def _narrow(samples: _Samples, settings: Settings) -> bool:
    estimates = (estimate_mean(v) for key, v in samples.items() if key[2] == "sqnr_db" and key[1] != HP)
    # An infinite or NaN value will not get narrower by drawing more.
    return not any(e.high - e.low > 2 * settings.interval_db for e in estimates)
