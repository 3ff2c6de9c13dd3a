"""What a Probe refuses."""

import math
from collections.abc import Mapping
from numbers import Integral

import torch
from torch import nn

from loka.core.compiling import traced_here
from loka.core.exceptions import LokaError, NotConverted, PlanMismatch, require_kind
from loka.core.numerics.label_rate import Shares, require_shares
from loka.core.records.stats import Stats
from loka.core.signature import ModelSignature
from loka.nn.site import site_forwards
from loka.nn.unwrap import class_name, unwrap

_LEAST = {"effect_samples": 0, "full_covariance": 0, "seed": -math.inf}  # of others 1


def refuse_settings(
    numbers: Mapping[str, int], base_rate: Shares | None, logits: object, filter: object, resume: object
) -> None:
    """Raises ValueError for `numbers`, by name, that are no whole ones or below their least value, and LokaError for
    what is of another kind.
    """
    for name, value in numbers.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it must be a whole number")
        if value < (least := _LEAST.get(name, 1)):
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    require_shares(base_rate)
    for name, given, example in (
        ("logits", logits, "from what the model returns to its logits, such as lambda output: output['click']"),
        ("filter", filter, "of a module and the name of a site, such as lambda module, name: 'head' not in name"),
    ):
        if given is not None and not callable(given):
            raise LokaError(f"{name} is {given!r}; it must be a function", way_out=f"one {example}")
    require_kind(resume, Stats | None, "resume", way_out="loka.Stats.load(folder)")


def refuse_converted(model: nn.Module) -> None:
    """A converted model's GEMMs are not the calls that Probe watches: it would learn nothing, in silence."""
    if site_forwards(model):
        raise NotConverted(
            "a Probe watches models in high precision, and this one runs by a plan",
            way_out="leave the Probe before loka.convert(model), or loka.revert(model) first",
        )


def refuse_other_model(stats: Stats, model: ModelSignature) -> None:
    """Raises PlanMismatch where `stats` are of another model than `model`; all differences are listed."""
    differences = model.differences(stats.model)
    if differences:
        raise PlanMismatch("these statistics are of another model", why=differences, way_out="probe this model afresh")


def refuse_meta(path: str, output: torch.Tensor) -> None:
    """Raises LokaError for a result without values."""
    if output.is_meta:
        raise LokaError(
            f"{path} ran on the meta device, where tensors have no values",
            way_out="give the model weights on a CPU or a GPU (model.to_empty, then its weights), and run it there",
        )


def refuse_without_sites(model: nn.Module, linears: Mapping[str, nn.Linear], skipped: Mapping[str, str]) -> None:
    """Raises LokaError where a model has no parameter that a GEMM could multiply by."""
    if linears or any(parameter.dim() > 1 for parameter in unwrap(model).parameters()):
        return
    raise LokaError(
        f"{class_name(model)} has no GEMM with a parameter to probe",
        why=[f"{path}: {reason}" for path, reason in skipped.items()],
        way_out="LoKA decides GEMMs that multiply by a parameter, such as those of nn.Linear",
    )


def refuse_compiling() -> None:
    """Of a hook that is traced, as the probed module is called by compiled code: no single step is seen there. Dynamo
    of torch 2.11 cannot raise from a function that does more.
    """
    if traced_here():
        raise LokaError(
            "this Probe watches a module inside of what torch.compile compiles, whose steps it cannot watch",
            way_out="probe what you call: compiled = torch.compile(model), and Probe(compiled)",
        )


def refuse_compiled_in_place(model: nn.Module) -> None:
    """Of a module that `model.compile()` compiled: its hooks are traced, so no single step is seen."""
    if unwrap(model)._compiled_call_impl is not None:
        raise LokaError(
            "model.compile() compiled this module in place, so single steps cannot be watched",
            way_out="use compiled = torch.compile(model), and Probe(compiled)",
        )


def refuse_second_step() -> None:
    """Of a call in another thread than that whose forward pass is watched. Without gradients it is no step."""
    if torch.is_grad_enabled():
        raise LokaError(
            "two threads call the probed model at once, with gradients enabled",
            why=["a sampled step ends where the next one begins, so steps have to come one after another"],
            way_out="let one thread train at a time, and call the model under torch.no_grad() where it only predicts",
        )


def refuse_sampling(model: nn.Module) -> None:
    """Of a sampled step: a model that was converted since the last one, and torch.func.vmap, which hides whole batches
    from what reads their numbers.
    """
    refuse_converted(model)
    top = torch._C._functorch.peek_interpreter_stack() if torch._C._are_functorch_transforms_active() else None
    if top is not None and top.key() == torch._C._functorch.TransformType.Vmap:
        raise LokaError(
            "a Probe cannot sample a step inside torch.func.vmap",
            why=["vmap hides the batch, of which statistics are made"],
            way_out="probe the model on whole batches, as in training",
        )
