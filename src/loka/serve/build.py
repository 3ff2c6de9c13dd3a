"""Builds one version of a frozen model: from weights in high precision to a module tree that nothing writes to.

    skeleton  the model without its weights (serve/model/absent.py)
    precise   a skeleton with the weights of a version: what eight bits are compared with
    frozen    the same with FP8 sites; where nothing else reads the weight of a site, only its FP8 copy is kept

New weights make a new tree. Requests that are running keep the old tree until they end, so no request sees two.
"""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import ServeRefused, truncated
from loka.core.problem import dtype_name
from loka.core.records.plan import Plan
from loka.core.records.report import HP
from loka.graph.attach import attach, detach
from loka.nn.leaves import LinearForward
from loka.nn.site import site_forwards
from loka.nn.unwrap import named_modules
from loka.planner.convert import fp8_layers
from loka.serve.model.absent import absent
from loka.serve.model.private import tried
from loka.serve.sites import (
    FrozenSite,
    FrozenWeight,
    HighPrecisionSite,
    RecordingSite,
    UnreachedSite,
    Watch,
    freeze_weight,
)


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of the model in which every tensor of the state dict is absent; other tensors are copied.

    Raises ServeRefused where no state dict can be made of it: by that a refresh and `load` find the places of weights.
    """
    tensors = [*model.parameters(), *model.buffers()]
    held = {id(value) for value in model.state_dict(keep_vars=True).values()}
    memo: dict[int, Any] = {id(tensor): absent(tensor) for tensor in tensors if id(tensor) in held}
    skeleton: nn.Module = copy.deepcopy(model, memo)
    tried(
        skeleton.state_dict,
        "this model computes its state dict from weights, which are put into it later",
        "let its state dict hold parameters and buffers as they are, and compute in forward or after load_state_dict",
    )
    return skeleton


def relinked(skeleton: nn.Module, model: nn.Module) -> nn.Module:
    """A tree of `skeleton` that holds the tensors of `model`, put there in the way in which a refresh puts new ones."""
    tree = copy.deepcopy(skeleton)
    tree.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    return tree.requires_grad_(False)


def load_precise(
    skeleton: nn.Module,
    state: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    before: Mapping[str, torch.Tensor],
    dropped: Sequence[str] = (),
) -> nn.Module:
    """A tree with copies of the weights in `state` on `device`, in the dtypes that the model had. Weights named in
    `dropped` stay absent.

    Raises ServeRefused where keys or shapes differ, where integers stand for floats, where a weight holds NaN or
    infinity in the dtype of the model in other places than `before`, as masks do, and where modules share other
    tensors than before.
    """
    wanted = skeleton.state_dict(keep_vars=True)
    tensors = {key: value for key, value in wanted.items() if isinstance(value, torch.Tensor)}
    wrong = [f"{key} is missing" for key in wanted if key not in state]
    wrong += [f"{key} is not in the model" for key in state if key not in wanted]
    given = {key: (_form if key in dropped else _given)(state[key]) for key in tensors if key in state}
    wrong += [
        f"{key} is {has}, the model has {form}" for key, has in given.items() if has != (form := _form(tensors[key]))
    ]
    others = tried(
        lambda: copy.deepcopy({key: state.get(key) for key in wanted if key not in tensors}),
        "what is no tensor in these weights cannot be copied, and training may go on with it",
        "let get_extra_state return numbers, texts, detached tensors, and containers of these",
    )
    copies = OrderedDict[str, Any]((key, others.get(key, state.get(key))) for key in wanted)
    versions = getattr(
        state, "_metadata", getattr(wanted, "_metadata", None)
    )  # the versions of the form in which modules write their state
    if versions is not None:
        copies._metadata = versions  # type: ignore[attr-defined]
    shared: dict[int, str] = {}
    for key, value in {} if wrong else tensors.items():
        if key in dropped:
            continue
        copies[key] = state[key].detach().to(device=device, dtype=value.dtype, copy=True)
        if isinstance(value, nn.Parameter):  # modules would make one each of a tensor that they share
            copies[key] = nn.Parameter(copies[key], requires_grad=False)
        if not _finite(copies[key], before.get(key)):
            wrong.append(f"{key} holds NaN or infinity in {dtype_name(copies[key].dtype)}")
        elif (one := shared.setdefault(id(value), key)) != key:
            if not torch.equal(copies[one], copies[key]):
                wrong.append(f"{one} and {key} are one weight in the model, and differ")
            copies[key] = copies[one]
    if wrong:
        keys = [str(key) for key in state]
        wrapped = next((name for name in ("module.", "_orig_mod.") if any(key.startswith(name) for key in keys)), None)
        raise ServeRefused(
            "these weights are not served",
            why=truncated(wrong, 10),
            way_out="give the whole state dict of the model that was frozen"
            + (f", without the {wrapped!r} that a wrapper puts before its keys" if wrapped else ""),
        )
    tree = copy.deepcopy(skeleton)
    tree.load_state_dict(copies, assign=True)
    return tree.requires_grad_(False)


def _given(value: Any) -> str:
    if type(value) not in (torch.Tensor, nn.Parameter):
        return f"a {type(value).__name__}"
    if value.layout is not torch.strided or value.is_meta:
        return f"{value.layout} on {value.device}"
    return "freed" if value.numel() and not value.untyped_storage().nbytes() else _form(value)


def _form(value: torch.Tensor) -> str:
    kind = "" if value.is_floating_point() else " of complex numbers" if value.is_complex() else " of integers"
    return f"{list(value.shape)}{kind}"


def _finite(value: torch.Tensor, before: torch.Tensor | None) -> bool:
    if not value.is_floating_point() or bool((finite := torch.isfinite(value)).all()):
        return True
    if before is None or before.is_meta:
        return False
    return torch.allclose(value[~finite], before.to(value)[~finite], rtol=0.0, atol=0.0, equal_nan=True)


def share(model: nn.Module) -> nn.Module:
    """Another tree of the same modules, which holds the same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def watch(precise: nn.Module, plan: Plan, watcher: Watch, call: Callable[[nn.Module], Any]) -> Any:
    """Runs `call(precise)` while `watcher` sees the inputs of the FP8 sites. No request may use the tree meanwhile."""
    attach(
        precise,
        plan.model.layers,
        fp8_layers(plan),
        make=lambda name, chosen, *_, **__: RecordingSite(name, chosen, watcher),
    )
    try:
        return call(precise)
    finally:
        detach(precise)


def record_weights(
    precise: nn.Module, plan: Plan, call: Callable[[nn.Module], Any], *, joined: bool
) -> dict[str, FrozenWeight]:
    """The FP8 weight of each site that `call(precise)` reaches. With `joined` a weight has one scale for all rows
    wherever a region may take the site.

    Raises ServeRefused where a site multiplies by another weight from call to call, or by one that holds NaN or
    infinity.
    """
    found: dict[str, FrozenWeight] = {}

    def note(name: str, candidate: str, rows: torch.Tensor, weight: torch.Tensor) -> None:
        frozen = freeze_weight(candidate, weight, rows.dtype, joined=joined)
        before = found.setdefault(name, frozen)
        if not torch.equal(before.low.data.view(torch.uint8), frozen.low.data.view(torch.uint8)):
            raise ServeRefused(
                f"{name} multiplies by another weight from call to call, so none can be kept",
                way_out="plan again with this site forced to 'hp'",
            )
        if not bool(torch.isfinite(frozen.low.scale).all()):
            raise ServeRefused(f"the weight of {name} holds NaN or infinity", way_out="give a sound checkpoint")

    watch(precise, plan, note, call)
    return found


def frozen_tree(
    tree: nn.Module,
    plan: Plan,
    weights: Mapping[str, FrozenWeight],
    scales: Mapping[str, torch.Tensor],
    dropped: Sequence[str],
    in_hp: Mapping[str, Collection[int]],
) -> nn.Module:
    """Puts frozen sites into `tree`, in place. Its weights named in `dropped` are absent from then on.

    `in_hp`: for each site, the buckets that run it in high precision.
    """

    def make(name: str, chosen: tuple[str, str, str], *_: object, **__: object) -> object:
        if chosen[0] == HP:
            return HighPrecisionSite(name)
        if name not in weights:
            return UnreachedSite(name)
        return FrozenSite(name, chosen[0], weights[name], scales.get(name), in_hp.get(name, ()))

    attach(tree, plan.model.layers, fp8_layers(plan), make=make)
    modules = dict(named_modules(tree))
    for key in dropped:
        path, _, attribute = key.rpartition(".")
        if path not in modules:  # a second name of a module
            continue
        weight = modules[path]._parameters[attribute]
        assert weight is not None
        modules[path]._parameters[attribute] = absent(weight)  # type: ignore[assignment]
    return tree


def droppable(
    tree: nn.Module, weights: Mapping[str, FrozenWeight], in_hp: Mapping[str, Collection[int]]
) -> tuple[list[str], list[str]]:
    """Keys of the weights that only frozen sites read, and for other weights of FP8 sites why they are kept.

    Only weights of their own of nn.Linear are dropped. Raw parameters that are read as views, the projections of
    attention, and weights that modules share are kept in high precision as well.
    """
    uses = Counter(
        id(parameter)
        for _, module in named_modules(tree)
        for parameter in module._parameters.values()
        if parameter is not None
    )
    keys, kept = [], []
    for path, forward in site_forwards(tree).items():
        sites = [site for site in forward.sites if site.name in weights]
        own = forward.module._parameters.get("weight")
        if any(in_hp.get(site.name) for site in sites):
            kept += [f"{site.name} (in high precision for some numbers of rows)" for site in sites]
        elif type(forward) is LinearForward and sites and own is not None and uses[id(own)] == 1:
            keys.append(f"{path}.weight" if path else "weight")
        elif sites:
            reason = "a shared or computed weight" if type(forward) is LinearForward else "read as a view"
            kept += [f"{site.name} ({reason})" for site in sites]
    held = tree.state_dict(keep_vars=True)
    once = {id(held[key]) for key in keys if key in held}
    return keys + [key for key, value in held.items() if id(value) in once and key not in keys], kept  # second names
