"""Puts sites into a model, and takes them out."""

import contextlib
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from loka.core.exceptions import NotConverted
from loka.core.records.report import HP
from loka.core.signature import AS_PROBED, LinearShape, WeightUse
from loka.graph.owner import OwnerForward
from loka.kernels.gemm.registry import candidate_named
from loka.nn.attention import AttentionForward, projection_keys
from loka.nn.leaves import leaf_forward
from loka.nn.linears import is_view_of
from loka.nn.site import Site, SiteForward, install, refuse_replaced, remove, site_forwards
from loka.nn.site_ops import Candidates
from loka.nn.unwrap import named_modules

_PLAN_AGAIN = "plan from a report in which this candidate was measured, which knows them"


def attach(
    model: nn.Module,
    layers: Mapping[str, LinearShape],
    candidates: Mapping[str, Candidates],
    *,
    join: bool = False,
    make: Callable[..., Any] = Site,
    centres: Mapping[str, Sequence[float]] | None = None,
    hot_columns: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Makes the sites that `candidates` names run by them, in place.

    Args:
        layers: the model's sites, such as `plan.model.layers`.
        candidates: by site name, for output, grad_input and grad_weight: "hp" or "kernel:recipe".
        join: whether torch.compile may join them into regions.
        make: makes what `x` and `weight` are handed to; its arguments are those of `Site`.
        centres: by site name, m [K] for what runs by a centred recipe, such as `plan.centres`.
        hot_columns: by site name, those of a hot recipe, such as `plan.hot_columns`.

    Raises:
        NotConverted: the model runs sites already, or a module that a site names is not there, or there is
            no centre for a centred recipe, or no columns for a hot one.
        UnknownName: a candidate that does not exist.
    """
    for names in candidates.values():
        for name in names:
            if name != HP:
                candidate_named(name)
    if site_forwards(model):
        raise NotConverted("sites of this model are converted already", way_out="loka.revert(model) first")
    modules = dict(named_modules(model))
    by_caller: dict[str, dict[WeightUse, Site]] = {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for path, chosen in candidates.items():
        use = use_of(path, layers[path])
        if use.caller not in modules:
            raise NotConverted(f"{path}: the model has no module {use.caller!r}, which calls it", way_out=AS_PROBED)
        centre = _centre(path, chosen[0], layers[path], centres or {})
        hot = _hot(path, chosen[0], layers[path], (hot_columns or {}).get(path, ()))
        by_caller.setdefault(use.caller, {})[use] = make(path, chosen, device, join=join, centre=centre, hot=hot)
    for path, use in _mistaken(modules, layers, candidates).items():
        by_caller.setdefault(use.caller, {})[use] = Site(path, (HP, HP, HP), device)
    low = {use_of(path, layers[path]) for path, chosen in candidates.items() if any(name != HP for name in chosen)}
    forwards = [_forward(modules, caller, sites, low) for caller, sites in by_caller.items()]
    for forward, path in zip(forwards, by_caller, strict=True):
        forward.path = path
        install(forward)
    _keep_out_of_fused_inference(model)


def _mistaken(
    modules: Mapping[str, nn.Module], layers: Mapping[str, LinearShape], candidates: Mapping[str, Candidates]
) -> dict[str, WeightUse]:
    """Sites in high precision that run inside of another module, which multiplies by the same weight in the same
    form at a site in FP8: its function mode would take their calls for its own, so that they get sites too."""
    callers: dict[tuple[int, str, str], set[str]] = {}
    for path in candidates:
        if (use := layers[path].use) is not None:
            callers.setdefault(_identity_of(modules, use), set()).add(use.caller)
    found = {}
    for path, shape in layers.items() if callers else ():
        use = use_of(path, shape)
        with contextlib.suppress(NotConverted):  # a part of the model was converted, without that layer
            others = callers.get(_identity_of(modules, use), set()) - {use.caller}
            if others and path not in candidates and use.caller in modules:
                found[path] = use
    return found


def _identity_of(modules: Mapping[str, nn.Module], use: WeightUse) -> tuple[int, str, str]:
    owner, attribute, name = _owner(modules, use.key)
    if parametrize.is_parametrized(owner, attribute):  # each read computes it anew: known by what computes it
        held = cast(nn.ModuleDict, owner.parametrizations)[attribute]
    else:
        held = getattr(owner, attribute)
    return id(held), use.key.removeprefix(name), use.form


def _centre(path: str, output: str, layer: LinearShape, centres: Mapping[str, Sequence[float]]) -> torch.Tensor | None:
    if output == HP or not candidate_named(output).recipe.centred:
        return None
    centre = torch.tensor(centres.get(path, ()), dtype=torch.float32, device="cpu")
    finite = int(centre.isfinite().sum())
    if {centre.numel(), finite} != {layer.in_features}:
        raise NotConverted(
            f"{path}: {output} needs {layer.in_features} numbers to take off its input, "
            f"and {centre.numel()} are there, {finite} of them finite",
            way_out=_PLAN_AGAIN,
        )
    return centre


def _hot(path: str, output: str, layer: LinearShape, columns: Sequence[int]) -> torch.Tensor | None:
    count = 0 if output == HP else candidate_named(output).recipe.hot
    known = len(set(columns) & set(range(layer.in_features)))
    if count and (len(columns), known) != (count, count):
        raise NotConverted(
            f"{path}: {output} needs {count} of its {layer.in_features} columns, "
            f"and {known} are there among {len(columns)}",
            way_out=_PLAN_AGAIN,
        )
    return torch.tensor(columns, dtype=torch.int64, device="cpu") if count else None


def use_of(path: str, shape: LinearShape) -> WeightUse:
    """How a site reads its weight: `shape.use`, or for a module with a weight of its own that weight in its linear
    form.
    """
    if shape.use is not None:
        return shape.use
    return WeightUse(caller=path, key=f"{path}.weight" if path else "weight", form="linear")


def detach(model: nn.Module) -> int:
    """Takes all sites out; returns how many modules had some. Raises NotConverted where it must not."""
    refuse_replaced(model)
    forwards = site_forwards(model)
    for forward in forwards.values():
        remove(forward)
    for module in model.modules():
        hook = module.__dict__.pop(_HOOK, None)
        if hook is not None:
            hook.remove()
    return len(forwards)


def _forward(
    modules: Mapping[str, nn.Module], caller: str, sites: dict[WeightUse, Site], low: Container[WeightUse]
) -> SiteForward:
    module = modules[caller]
    local = {use.key.removeprefix(f"{caller}." if caller else ""): site for use, site in sites.items()}
    leaf = leaf_forward(module)
    if leaf is not None and list(local) == ["weight"]:
        return leaf(module, list(local.values()))
    if type(module).forward is nn.MultiheadAttention.forward and "forward" not in module.__dict__:
        assert isinstance(module, nn.MultiheadAttention)
        foreign = [key for key in local if key not in projection_keys(module)]
        if foreign:
            raise NotConverted(f"{caller}: attention does not multiply by {', '.join(foreign)}", way_out=AS_PROBED)
        return AttentionForward(module, local)
    owners: dict[str, tuple[nn.Module, str, str]] = {}
    names: set[str] = set()
    for use in sites:
        owner, attribute, name = _owner(modules, use.key)
        owners[name] = (owner, attribute, name)
        if use in low:
            names.add(name)
    return OwnerForward(module, sites, list(owners.values()), names)


def _owner(modules: Mapping[str, nn.Module], key: str) -> tuple[nn.Module, str, str]:
    """Module, attribute and name of the parameter that `key` is a view of: the longest name that fits."""
    for path in sorted(modules, key=len, reverse=True):
        prefix = f"{path}." if path else ""
        if not key.startswith(prefix):
            continue
        rest = key.removeprefix(prefix)
        names = [name for name in _tensors(modules[path]) if is_view_of(rest, name)]
        if names:
            name = max(names, key=len)
            return modules[path], name, prefix + name
    raise NotConverted(f"the model has no parameter for {key}", way_out=AS_PROBED)


def _tensors(module: nn.Module) -> list[str]:
    parametrized = getattr(module, "parametrizations", None)
    return [*module._parameters, *(parametrized or ())]


_HOOK = "loka_hook"


def _stay_in_python(module: nn.Module, args: tuple[object, ...]) -> None:
    """A hook that does nothing. Its presence keeps nn.TransformerEncoderLayer out of the fused inference path, which
    reads the weights of its layers itself and would bypass sites.
    """


def _keep_out_of_fused_inference(model: nn.Module) -> None:
    for layer in model.modules():
        # A part of such a layer may be converted by itself: the path looks for hooks on every module inside.
        part = layer is model and isinstance(layer, (nn.Linear, nn.MultiheadAttention))
        if part or (isinstance(layer, nn.TransformerEncoderLayer) and site_forwards(layer)):
            layer.__dict__[_HOOK] = layer.register_forward_pre_hook(_stay_in_python)
