"""`loka.scale`: will eight bits help this model on that GPU? Asked before training, and without the GPU."""

from typing import Any, Literal, get_args

from torch import nn

from loka.core.exceptions import LokaError, UnknownName, truncated
from loka.core.records.scale import Scale
from loka.scaling.forecast import layer_times
from loka.scaling.inputs import heights_of, rows_of
from loka.scaling.stored import StoredTimes, stored_times
from loka.scaling.trace import Traced, trace

Kernels = Literal["all", "torch"]


def scale(
    model: nn.Module, batch: Any, *, gpu: str = "h200", batch_size: int | None = None, kernels: Kernels = "all"
) -> Scale:
    """What eight bits would give a training step of `model`, by sites, from measurements that come with LoKA.

        print(loka.scale(model, (dense, sparse), gpu="h200", batch_size=8192))

    The model is left as it is; one built under `torch._subclasses.FakeTensorMode` needs no memory. Weights in
    float32 are taken to run under bf16 autocast, others as they are.

    Args:
        model: any module, as you train it.
        batch: what it is called with: a tensor, a tuple of arguments, or a dict of named ones.
        gpu: whose measurements to use.
        batch_size: rows of a step; None: as many as the batch has. Of a batch with other rows, all that is as
            high as its first tensor is taken to grow.
        kernels: "all" libraries that LoKA knows, or "torch" alone.

    Raises:
        UnknownName: of this GPU nothing is stored, or there are no such kernels.
        LokaError: a batch size below 1, a model that does not run on the batch, one without sites, or with lazy
            modules that were not called yet.
        NotConverted: the model runs by a plan.
    """
    stored = checked(gpu=gpu, batch_size=batch_size, kernels=kernels)
    traced = trace(model, batch, batch_size=batch_size)
    grown = _grown(batch, batch_size)
    calls = [call for call in traced.calls if call.rows]
    if not calls:
        raise _without_sites(traced)
    return Scale(
        model=traced.model,
        batch_size=traced.batch_size,
        gpu=gpu.lower(),
        machine=stored.machine,
        kernels=kernels,
        layers=layer_times(calls, stored, kernels=kernels),
        coverage=traced.coverage,
        regions={found.name: found.speedup for found in stored.regions},
        notes=(*grown, *_notes(traced)),
    )


def checked(*, gpu: str, batch_size: int | None, kernels: str) -> StoredTimes:
    """What is stored of the GPU; raises what `scale` raises of these arguments."""
    if batch_size is not None and batch_size < 1:
        raise LokaError(
            f"a step of {batch_size} rows", way_out="a batch size of 1 or more, such as 8192; or leave it out"
        )
    if kernels not in get_args(Kernels):
        known = ", ".join(get_args(Kernels))
        raise UnknownName(f"no times are stored of kernels {kernels!r}", way_out=f"one of {known}")
    return stored_times(gpu.lower())


def _grown(batch: Any, batch_size: int | None) -> tuple[str, ...]:
    given = rows_of(batch)
    if batch_size is None or given is None or given == batch_size:
        return ()
    note = f"the batch has {given} rows; each tensor of it with {given} rows was taken to have {batch_size}"
    others = sorted({*heights_of(batch)} - {given})
    return (note + f", and those with {', '.join(map(str, others))} rows to stay as they are" * bool(others),)


def _notes(traced: Traced) -> tuple[str, ...]:
    notes = list(traced.notes)
    if any(call.weight_dtype == "float32" for call in traced.calls):
        notes.append("weights are in float32, and GEMMs are taken to run in bf16, as under autocast")
    if any(call.weight_dtype == "float16" for call in traced.calls):
        notes.append("weights are in float16, and taken to be as fast as those in bfloat16, which were measured")
    notes += [f"no row reaches {path} in a call, which is left out" for path in _without_rows(traced)]
    notes += [f"no site: {path}: {reason}" for path, reason in traced.skipped.items()]
    return tuple(notes)


def _without_rows(traced: Traced) -> tuple[str, ...]:
    return tuple(dict.fromkeys(call.path for call in traced.calls if not call.rows))


def _without_sites(traced: Traced) -> LokaError:
    if empty := _without_rows(traced):
        return LokaError(
            f"no row of the batch reaches a site of {traced.model}",
            why=truncated([f"{path} is called with no rows" for path in empty], 6),
            way_out="give a batch of rows such as a step has",
        )
    return LokaError(
        f"{traced.model} has no sites: none of its GEMMs multiplies by a parameter",
        why=[*traced.coverage.lines(), *(f"{path}: {reason}" for path, reason in traced.skipped.items())],
        way_out="LoKA decides GEMMs that multiply by a parameter, such as those of nn.Linear (docs/sites.md)",
    )
