"""The offline half of Probe: error and time of every candidate at every site.

Operands are drawn from the learnt statistics, every candidate runs on the same draws, and
its result is compared with the float32 product of the same operands. Draws go on until the
95 % interval of `sqnr_db` is narrow enough. On a GPU the true problem is then timed with its
quantization, under CUDA graphs, interleaved with bf16 (core/timing.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from loka.core.device import fingerprint
from loka.core.error import Estimate, estimate_mean, mere, sqnr_db
from loka.core.exceptions import FileRefused, LokaError
from loka.core.problem import DTYPES, Problem, linear_problem, target_of
from loka.core.recipe import Gemm
from loka.core.report import HP, Measurement, Report, SiteReport, site_name
from loka.core.stats import LinearStats, Stats
from loka.core.timing import Timing, time_interleaved
from loka.kernels.registry import all_candidates, candidate_named
from loka.kernels.run import run_gemm
from loka.probe.draw import Sampler, sampler

T = TypeVar("T")
Track = Callable[[Iterable[T], str, int], Iterable[T]]
"""(items, description, total) -> the same items; a place for a progress bar."""

Operands = dict[str, torch.Tensor]
"""input [T, in], weight [out, in], grad_output [T, out], in the dtypes the model uses."""

_TIMED_ROWS = 16_384  # rows drawn for timing; longer operands repeat them
_ROTATION_BYTES = 1 << 30  # copies of the operands to rotate, so that none stays in the L2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How finely to measure.

    Attributes:
        rows: input rows drawn for the error (and contracted over in grad_weight).
        min_draws, max_draws: bounds on the number of draws of a layer's operands.
        interval_db: half-width of the `sqnr_db` interval at which drawing stops.
        rounds, calls: of timing, see core/timing.py.
        seed: of the draws.
    """

    rows: int = 256
    min_draws: int = 4
    max_draws: int = 16
    interval_db: float = 0.25
    rounds: int = 25
    calls: int = 8
    seed: int = 0


def measure(
    stats: Stats,
    *,
    device: torch.device | str | None = None,
    candidates: Sequence[str] | None = None,
    settings: Settings | None = None,
    out: Path | str | None = None,
    track: Track | None = None,
) -> Report:
    """Measures every candidate at every site of `stats`.

    Args:
        stats: from `Probe.stats()` or `Stats.load`.
        device: where to measure; the GPU if there is one. Times are taken on GPUs only.
        candidates: names to measure; by default all, without emulation where a GPU is used.
        settings: how finely.
        out: report file, written after every layer. If it holds an unfinished measurement of
            the same statistics on the same machine, that one is continued.
        track: wraps the loop over layers, for a progress bar.

    Raises:
        UnknownName: a candidate that does not exist.
        LokaError: no step was sampled, so nothing was learnt.
    """
    if not stats.layers:
        raise LokaError(
            "these statistics hold no layer to measure",
            why=[f"{path}: {reason}" for path, reason in stats.skipped.items()],
            way_out="probe at least one step, with gradients enabled",
        )
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    settings = settings or Settings()
    if candidates is None:
        emulate = device.type == "cpu"
        candidates = [c.name for c in all_candidates() if emulate or not c.kernel.emulates]
    else:
        candidates = [candidate_named(name).name for name in candidates if name != HP]
    report = Report(
        model=stats.model,
        machine=fingerprint(device),
        stats_digest=stats.digest(),
        settings={**asdict(settings), "candidates": list(candidates)},
        sites={},
        skipped=dict(stats.skipped),
        complete=False,
    )
    path = Path(out) if out is not None else None
    if path is not None:
        report = _continue_from(path, report)
    timed: dict[tuple[Problem, str], dict[str, Timing]] = {}
    layers = list(stats.layers.items())
    for layer_path, layer in (track or _untracked)(layers, "measuring layers", len(layers)):
        sites, skipped = _measure_layer(layer_path, layer, report, candidates, device, settings, timed)
        report = replace(report, sites={**report.sites, **sites}, skipped={**report.skipped, **skipped})
        if path is not None:
            report.save(path)
    report = replace(report, complete=True)
    if path is not None:
        report.save(path)
    return report


def _untracked(items: Iterable[T], description: str, total: int) -> Iterable[T]:
    return items


def _continue_from(path: Path, fresh: Report) -> Report:
    """An unfinished report of the same measurement goes on; another report is replaced.

    Raises FileRefused when the file is no whole report: it may be somebody's only copy.
    """
    if not path.exists():
        return fresh
    try:
        earlier = Report.load(path)
    except FileRefused as error:
        raise FileRefused(
            f"will not overwrite {path}", why=error.why, way_out="choose another file, or remove this one"
        ) from error
    same = (
        earlier.stats_digest == fresh.stats_digest
        and earlier.machine == fresh.machine
        and earlier.settings == fresh.settings
    )
    return replace(earlier, complete=False) if same else fresh


def _measure_layer(
    path: str,
    layer: LinearStats,
    report: Report,
    candidates: Sequence[str],
    device: torch.device,
    settings: Settings,
    timed: dict[tuple[Problem, str], dict[str, Timing]],
) -> tuple[dict[str, SiteReport], dict[str, str]]:
    gemms, skipped = _gemms_of(path, layer)
    gemms = [gemm for gemm in gemms if site_name(path, gemm) not in report.sites]
    if not gemms:
        return {}, skipped
    problems = {gemm: _problem(path, layer, report, gemm, device) for gemm in gemms}
    runnable: dict[Gemm, list[str]] = {}
    refused: dict[Gemm, dict[str, str]] = {}
    for gemm, problem in problems.items():
        reasons = {name: candidate_named(name).unsupported(problem) for name in candidates}
        runnable[gemm] = [HP, *(name for name, reason in reasons.items() if reason is None)]
        refused[gemm] = {name: reason for name, reason in reasons.items() if reason is not None}
    samplers = {name: sampler(found, device) for name, found in layer.operands.items()}
    errors = _errors(layer, samplers, runnable, device, settings)
    sites = {}
    for gemm, problem in problems.items():
        times = {}
        if device.type == "cuda":
            key = (problem, layer.weight_dtype)
            if key not in timed:
                timed[key] = _times(layer, samplers, problem, runnable[gemm], device, settings)
            times = timed[key]
        measurements = {
            name: Measurement(
                errors=errors[gemm][name],
                microseconds=times[name].microseconds if name in times else None,
                speedup=times[name].speedup if name in times else None,
            )
            for name in runnable[gemm]
        }
        for name, reason in refused[gemm].items():
            measurements[name] = Measurement(unsupported=reason)
        site = SiteReport(path=path, problem=problem, measurements=measurements)
        sites[site.name] = site
    return sites, skipped


def _gemms_of(path: str, layer: LinearStats) -> tuple[list[Gemm], dict[str, str]]:
    """The GEMMs that run in training, and why another does not."""
    empty = [
        name for name, learnt in layer.operands.items() if name != "weight" and not learnt.numbers["count"]
    ]
    if empty:
        reason = f"no finite row of {' or '.join(empty)} was seen, so there is nothing to draw from"
        return [], {site_name(path, gemm): reason for gemm in Gemm}
    gemms, skipped = [Gemm.OUTPUT], {}
    if "grad_output" not in layer.operands:
        reason = "no gradient reached this layer while it was probed (or it is in a reentrant checkpoint)"
        return gemms, {site_name(path, g): reason for g in (Gemm.GRAD_INPUT, Gemm.GRAD_WEIGHT)}
    if layer.needs_input_grad:
        gemms.append(Gemm.GRAD_INPUT)
    else:
        skipped[site_name(path, Gemm.GRAD_INPUT)] = "its input needs no gradient, so it never runs"
    if layer.needs_weight_grad:
        gemms.append(Gemm.GRAD_WEIGHT)
    else:
        skipped[site_name(path, Gemm.GRAD_WEIGHT)] = "its weight is frozen, so it never runs"
    return gemms, skipped


def _problem(path: str, layer: LinearStats, report: Report, gemm: Gemm, device: torch.device) -> Problem:
    shape = report.model.layers[path]
    return linear_problem(
        gemm,
        rows=layer.rows,
        in_features=shape.in_features,
        out_features=shape.out_features,
        dtype=layer.dtype,
        target=target_of(device),
    )


def _draw(
    layer: LinearStats, samplers: dict[str, Sampler], rows: int, generator: torch.Generator
) -> Operands:
    dtypes = {"input": layer.dtype, "weight": layer.weight_dtype, "grad_output": layer.dtype}
    return {name: draw(rows, generator).to(DTYPES[dtypes[name]]) for name, draw in samplers.items()}


def _sides(gemm: Gemm, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a GEMM written A @ B^T (core/recipe.py)."""
    if gemm is Gemm.OUTPUT:
        return operands["input"], operands["weight"]
    if gemm is Gemm.GRAD_INPUT:
        return operands["grad_output"], operands["weight"].t()
    return operands["grad_output"].t(), operands["input"].t()


def _errors(
    layer: LinearStats,
    samplers: dict[str, Sampler],
    runnable: dict[Gemm, list[str]],
    device: torch.device,
    settings: Settings,
) -> dict[Gemm, dict[str, dict[str, Estimate]]]:
    generator = torch.Generator(device).manual_seed(settings.seed)
    samples: dict[tuple[Gemm, str, str], list[float]] = {}
    rows = min(layer.rows, settings.rows)
    for count in itertools.count(1):
        operands = _draw(layer, samplers, rows, generator)
        for gemm, names in runnable.items():
            a, b = _sides(gemm, operands)
            reference = a.float() @ b.float().t()
            for name in names:
                out = run_gemm(name, a, b, gemm=gemm, dtype=DTYPES[layer.dtype])
                samples.setdefault((gemm, name, "sqnr_db"), []).append(sqnr_db(out, reference))
                samples.setdefault((gemm, name, "mere"), []).append(mere(out, reference))
        if count >= settings.max_draws or (count >= settings.min_draws and _narrow(samples, settings)):
            break
    found: dict[Gemm, dict[str, dict[str, Estimate]]] = {gemm: {} for gemm in runnable}
    for (gemm, name, measure_name), values in samples.items():
        found[gemm].setdefault(name, {})[measure_name] = estimate_mean(values)
    return found


def _narrow(samples: dict[tuple[Gemm, str, str], list[float]], settings: Settings) -> bool:
    estimates = (estimate_mean(v) for key, v in samples.items() if key[2] == "sqnr_db" and key[1] != HP)
    # An infinite or NaN value will not get narrower by drawing more.
    return not any(e.high - e.low > 2 * settings.interval_db for e in estimates)


def _times(
    layer: LinearStats,
    samplers: dict[str, Sampler],
    problem: Problem,
    names: Sequence[str],
    device: torch.device,
    settings: Settings,
) -> dict[str, Timing]:
    gemm, dtype = problem.gemm, DTYPES[layer.dtype]
    generator = torch.Generator(device).manual_seed(settings.seed)
    operands = _draw(layer, samplers, min(layer.rows, _TIMED_ROWS), generator)
    for name in ("input", "grad_output"):
        if name in operands:
            repeats = -(-layer.rows // operands[name].shape[0])
            operands[name] = operands[name].repeat(repeats, 1)[: layer.rows]
    size = sum(operand.numel() * operand.element_size() for operand in operands.values())
    copies = max(1, min(settings.calls, _ROTATION_BYTES // max(size, 1)))
    sets = [{name: operand.clone() for name, operand in operands.items()} for _ in range(copies)]
    health = torch.zeros(3, dtype=torch.int64, device=device)

    def site(name: str) -> Callable[[], torch.Tensor]:
        turn = itertools.cycle(range(copies))
        # bf16 gets its weight cast beforehand, as autocast's cache does for it within a step.
        cast = [{**s, "weight": s["weight"].to(dtype)} for s in sets] if name == HP else sets

        def call() -> torch.Tensor:
            a, b = _sides(gemm, cast[next(turn)])
            return run_gemm(name, a, b, gemm=gemm, dtype=dtype, health=health)

        return call

    return time_interleaved(
        {name: site(name) for name in names},
        baseline=HP,
        device=device,
        calls=settings.calls,
        rounds=settings.rounds,
        seed=settings.seed,
    )
