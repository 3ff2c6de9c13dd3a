"""One forward pass without numbers: the GEMMs of every site, and the share of all FLOPs that they are.

The matcher and the account are Probe's (probe/site_trace.py, graph/flops.py), so that what is told of a model
before training is what Probe finds in it. Where a model's own code looks at values, which fake tensors have
not, two passes over a few real rows are carried on to the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import LokaError, first_line
from loka.core.problem import dtype_name
from loka.core.recipe import Gemm
from loka.core.records.coverage import Coverage
from loka.nn.linears import find_linears
from loka.nn.unwrap import class_name, require_initialized, unwrap
from loka.probe.refusals import refuse_converted
from loka.probe.site_trace import SiteCall, SiteNames, SiteTrace
from loka.scaling.inputs import arguments, fake_batch, fake_mode, fake_model, mode_of, repeated, rows_of

_FEW = 8  # real rows of the smaller of two passes
_GIVE = "give what you call the model with: a tensor, a tuple of arguments, or a dict of named ones"


@dataclass(frozen=True, kw_only=True)
class SiteGemms:
    """What one call of a site multiplies: input [rows, in_features], weight [out_features, in_features].

    `gemms` are those that run in training, `stacked` says whether the weight is one of several in one call.
    """

    path: str
    rows: int
    in_features: int
    out_features: int
    weight_dtype: str
    gemms: tuple[Gemm, ...]
    stacked: bool


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model's step. `notes` say what was not as it should be."""

    model: str
    batch_size: int
    calls: tuple[SiteGemms, ...]
    coverage: Coverage
    skipped: dict[str, str]
    notes: tuple[str, ...] = ()


def trace(model: nn.Module, batch: Any, *, batch_size: int | None) -> Traced:
    """The sites of `model` in a step on `batch`.

    Args:
        batch: what the model is called with: a tensor, a tuple of arguments, or a dict of named ones.
        batch_size: rows of the step; None: as many as the batch has. What has as many rows as the first
            tensor of the batch is resized.

    Raises:
        LokaError: the model cannot run on the batch, and what it raised; or it has lazy modules, by name.
    """
    refuse_converted(model)
    require_initialized(model)
    rows = batch_size if batch_size is not None else rows_of(batch)
    if rows is None:
        raise LokaError(
            f"the batch holds no tensor with rows: {type(batch).__name__}", way_out=f"say batch_size, or {_GIVE}"
        )
    failed: Exception
    try:
        mode = mode_of(model) or fake_mode()
        inner = fake_model(unwrap(model), mode)
        with mode:
            return _traced_forward(inner, fake_batch(batch, mode, rows=rows), rows)
    except Exception as error:  # a model's own code raises what it likes
        failed = error
    if mode_of(model) is not None:
        raise _does_not_run(model, failed) from failed
    try:
        if rows_of(batch) in (None, rows):
            whole = _real(unwrap(model), batch, None, rows)
            return replace(whole, notes=(_why_real(failed, f"{rows} rows"),))
        return _carried_on(unwrap(model), batch, rows, failed)
    except LokaError:
        raise
    except Exception as error:
        raise _does_not_run(model, error) from error


def _does_not_run(model: nn.Module, error: Exception) -> LokaError:
    return LokaError(
        f"{class_name(model)} does not run on the given batch", why=[first_line(error)[:200]], way_out=_GIVE
    )


def _traced_forward(model: nn.Module, batch: Any, rows: int) -> Traced:
    """One forward pass of the model under the matcher of Probe, and the GEMMs of its sites in the order of calls."""
    linears, skipped = find_linears(model)
    names = SiteNames(linears, {})
    calls: list[SiteGemms] = []

    def observe(site: SiteCall, output: torch.Tensor) -> None:
        calls.append(_gemms(site, output, names))

    watch = SiteTrace(model, names, linears=linears, filter=None, observe=observe, account=True)
    positional, named = arguments(batch)
    hooks: list[Any] = []
    with torch.enable_grad():
        watch.start()
        try:
            model(*positional, **named)
            coverage = watch.coverage()
        finally:
            hooks = watch.stop()
            for hook in hooks:
                hook.remove()
    assert coverage is not None
    return Traced(
        model=class_name(model),
        batch_size=rows,
        calls=tuple(calls),
        coverage=coverage,
        skipped={**skipped, **watch.skipped},
    )


def _gemms(site: SiteCall, output: torch.Tensor, names: SiteNames) -> SiteGemms:
    """The GEMMs that run are those whose FLOPs `SiteTrace` counts."""
    runs: list[Gemm] = [Gemm.OUTPUT]
    if output.requires_grad:
        runs += [Gemm.GRAD_INPUT] if site.x.requires_grad else []
        runs += [Gemm.GRAD_WEIGHT] if site.weight.requires_grad else []
    shape = names.layers.get(site.path)
    out_features, in_features = site.weight.shape
    return SiteGemms(
        path=site.path,
        rows=site.x.numel() // max(in_features, 1),
        in_features=in_features,
        out_features=out_features,
        weight_dtype=dtype_name(site.weight.dtype),
        gemms=tuple(runs),
        stacked=shape is not None and shape.stacked,
    )


def _carried_on(model: nn.Module, batch: Any, rows: int, failed: Exception) -> Traced:
    """From two passes over few rows, where everything grows along a line: lengths of the longest row do not, as a
    third, from the batch's end, shows."""
    few = _FEW
    first, second, third = (_real(model, batch, taken, abs(taken)) for taken in (few, 2 * few, -4 * few))
    line, check = (_line(few, 2 * few, whole) for whole in (rows, 4 * few))
    sizes = [_sizes(traced) for traced in (first, second, third)]
    same = len({tuple(size) for size in sizes}) == 1
    if not same or any(abs(check(a, b) - c) > 1e-6 * c for a, b, c in zip(*(s.values() for s in sizes), strict=True)):
        raise LokaError(
            f"{class_name(model)} does other GEMMs for other rows, so few rows do not tell of {rows}",
            why=[f"without numbers it raises {first_line(failed)[:200]}"],
            way_out=f"give a batch of {rows} rows, which then runs as it is",
        )
    calls = tuple(
        replace(one, rows=max(round(line(one.rows, two.rows)), 1))
        for one, two in zip(first.calls, second.calls, strict=True)
    )
    sites = {
        path: {gemm: line(flops, second.coverage.sites[path][gemm]) for gemm, flops in gemms.items()}
        for path, gemms in first.coverage.sites.items()
    }
    rest = tuple(
        replace(one, flops=line(one.flops, two.flops))
        for one, two in zip(first.coverage.uncovered, second.coverage.uncovered, strict=True)
    )
    ran = f"{few} and {2 * few} rows, and the step of {rows} is carried on from them"
    return replace(
        first,
        batch_size=rows,
        calls=calls,
        coverage=Coverage(sites=sites, uncovered=rest),
        notes=(_why_real(failed, ran),),
    )


def _sizes(traced: Traced) -> dict[Any, float]:
    found = {(index, call.path): float(call.rows) for index, call in enumerate(traced.calls)}
    return found | {(index, one.op): one.flops for index, one in enumerate(traced.coverage.uncovered)}


def _real(model: nn.Module, batch: Any, taken: int | None, rows: int) -> Traced:
    """On `taken` rows of the batch, below 0 from its end, None: as it is. Statistics of norms move in a pass and
    random numbers are drawn; both are put back."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng():
            return _traced_forward(model, batch if taken is None else repeated(batch, taken), rows)
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before and buffer.shape == before[name].shape:
                    buffer.copy_(before[name])


def _line(first: int, second: int, rows: int) -> Callable[[float, float], float]:
    return lambda one, two: one + (two - one) * (rows - first) / (second - first)


def _why_real(failed: Exception, ran: str) -> str:
    return f"without numbers the model raises {first_line(failed)[:200]}; so it ran for real on {ran}"
