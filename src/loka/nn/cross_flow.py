"""Finding stacks of cross layers (core/cross_record.py) in the forward pass that nn/dataflow.py watches.

    layer l + 1 follows l  <=>  its x is what l returned and nobody else reads that,
                                and both read the same x_0, unchanged in between

A stack is a maximal run. What happens inside a cross layer is not watched: nn/cross_match.py has
read it. Linear layers inside are in no chain, whether their stack is formed or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from loka.core.cross_record import CrossLink, CrossStack
from loka.nn.cross_match import CrossSpec, match
from loka.nn.linears import is_prediction
from loka.nn.unwrap import named_modules
from loka.nn.watched import Call, foreign_hooks, refuse


@dataclass(frozen=True, kw_only=True)
class CrossPart:
    """A module that is a cross layer, and what a record says of it."""

    module: nn.Module
    spec: CrossSpec
    link: CrossLink


def cross_parts(root: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, CrossPart]:
    """The cross layers of a model by path. `linears` are those that may be converted."""
    if foreign_hooks(vars(torch.nn.modules.module), "_global"):
        return {}
    paths = Counter(module for _, module in named_modules(root, once=False))
    found: dict[str, CrossPart] = {}
    inside: set[nn.Module] = set()
    for path, module in named_modules(root):
        if module in inside or any(paths[inner] > 1 for inner in module.modules()):
            continue
        part = _part(path, module, linears)
        if part is not None:
            found[path] = part
            inside |= set(module.modules())
    return found


def _part(path: str, module: nn.Module, linears: Mapping[str, nn.Linear]) -> CrossPart | None:
    spec = None if hasattr(module, "loka_was") else match(module)
    if spec is None:
        return None
    outer, inner = _below(path, spec.u), None if spec.v is None else _below(path, spec.v)
    if outer not in linears or (inner is not None and inner not in linears):
        return None
    u = linears[outer]
    v = u if inner is None else linears[inner]
    if is_prediction(u.out_features):
        return None
    if (u.weight.dtype, u.weight.device) != (v.weight.dtype, v.weight.device):
        return None
    link = CrossLink(
        path=path,
        u=outer,
        v=inner,
        features=u.out_features,
        rank=None if inner is None else v.out_features,
        bias=u.bias is not None,
    )
    return CrossPart(module=module, spec=spec, link=link)


def _below(path: str, inner: str) -> str:
    return f"{path}.{inner}" if path else inner


def arguments_of(spec: CrossSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """x_0 and x of a call, None where it is called otherwise than its forward says."""
    given = dict(zip(spec.names, args, strict=False))
    if len(args) + len(kwargs) != 2 or set(given) & set(kwargs) or {*given, *kwargs} != set(spec.names):
        return None
    given.update(kwargs)
    return given[spec.names[spec.x0]], given[spec.names[spec.x]]


def note_arguments(call: Call, arguments: tuple[Any, Any] | None) -> str:
    """Notes x_0 of a cross layer's call; why the call can be in no stack, or ""."""
    if arguments is None:
        return "it is not called with x_0 and x"
    x0, x = arguments
    reason = refuse([x0]) or refuse([x])
    if reason:
        return reason
    if x0.shape != x.shape or x0.device != x.device:
        return "its x_0 and x differ in shape or device"
    if x0.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return "its x_0 and x differ in dtype"
    if x0.is_inference():
        return "its x_0 is an inference tensor, whose changes nobody counts"
    call.outer = x0, x0._version
    call.joint = x0 is x
    return ""


def find_stacks(
    calls: Sequence[Call], parts: Mapping[str, CrossPart]
) -> tuple[tuple[CrossStack, ...], dict[str, str]]:
    """The stacks in the order of the pass; and why linear layers of other cross layers are in none."""
    crosses = [call for call in calls if call.path in parts]
    counts = Counter(call.path for call in crosses)
    reasons = dict.fromkeys(parts, "it is not called in this pass")
    for call in crosses:
        reasons[call.path] = call.broken
        if counts[call.path] > 1:
            reasons[call.path] = f"it is called {counts[call.path]} times"
    good = {id(call) for call in crosses if not reasons[call.path]}
    following: dict[int, Call] = {}
    for call in crosses:
        reader = call.value.reader if call.value else None
        if reader is not None and {id(call), id(reader)} <= good and _continues(call, reader):
            following[id(call)] = reader
    heads = good - {id(call) for call in following.values()}
    stacks = []
    for call in crosses:
        if id(call) not in heads:
            continue
        run = [call]
        while id(run[-1]) in following:
            run.append(following[id(run[-1])])
        layers = tuple(parts[at.path].link for at in run)
        stacks.append(CrossStack(layers=layers, joint=call.joint, reader=_reader(run[-1], parts)))
    alone = {
        linear: f"in cross layer {path}: {reason}"
        for path, reason in reasons.items()
        if reason
        for linear in parts[path].link.shapes
    }
    return tuple(stacks), alone


def _reader(last: Call, parts: Mapping[str, CrossPart]) -> str | None:
    """Who alone reads what the last layer of a stack returned, under the same state: no cross layer."""
    reader = last.value.reader if last.value else None
    if reader is None or reader.broken or reader.path in parts or reader.state != last.state:
        return None
    return reader.path


def _continues(call: Call, reader: Call) -> bool:
    """Whether `reader`, the one reader of what `call` returned, is the next layer of the same stack."""
    assert call.outer is not None
    assert reader.outer is not None
    same = call.outer[0] is reader.outer[0] and call.outer[1] == reader.outer[1]
    return same and reader.source is call.value and call.state == reader.state
