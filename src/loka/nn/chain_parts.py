"""What may be in a chain, and how a run of modules that feed each other is cut into chains.

    [norm] [activation] Linear [norm] [activation] Linear ...

A second norm or activation, or a norm after an activation, ends a link, and with it the chain; it
may begin the next one as its prologue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from loka.core.chain import NOTHING, Activation, Chain, Epilogue, Link, Norm
from loka.nn.block_norm import BlockNorm

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Hardswish: Activation.HARD_SWISH,
    nn.ReLU: Activation.RELU,
    nn.SiLU: Activation.SWISH,
    nn.GELU: Activation.GELU,
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A module that was called once, and whether it worked in place."""

    path: str
    module: nn.Module
    in_place: bool = False


@dataclass(kw_only=True)
class _Segment:
    """A linear layer, or None before the first one, and what follows it."""

    linear: Part | None
    epilogue: Epilogue = NOTHING
    members: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)  # pass-throughs, kept if something follows


def is_part(module: nn.Module) -> bool:
    """Whether it may stand between two linear layers of a chain."""
    return _norm_of(module) is not None or _activation_of(module) is not None or _passes(module)


def is_in_place(module: nn.Module) -> bool:
    return bool(getattr(module, "inplace", False)) and not _passes(module)


def join(run: Sequence[Part]) -> Iterator[Chain]:
    """The chains in a run of parts, each of which feeds the next one only."""
    segments = [_Segment(linear=None)]
    for part in run:
        if not _grow(segments, part):
            yield from _closed(segments)
            segments = [_Segment(linear=None)]
            _grow(segments, part)
    yield from _closed(segments)


def _grow(segments: list[_Segment], part: Part) -> bool:
    """Adds `part`; False if it does not belong here."""
    last = segments[-1]
    begun = last.linear is not None or bool(last.members)
    if isinstance(part.module, nn.Linear):
        before = last.linear.module if last.linear else part.module
        if _kept_in(before) != _kept_in(part.module):
            return False
        segments.append(_Segment(linear=part))
    elif _passes(part.module):
        if begun:
            last.passed.append(part.path)
        return True
    else:
        norm, activation = _norm_of(part.module), _activation_of(part.module)
        if activation is not None:
            # In place at the front, it would change a tensor that others may see through a view.
            if last.epilogue.activation is not Activation.NONE or (part.in_place and not begun):
                return False
            last.epilogue = replace(last.epilogue, activation=activation)
        elif norm is not None and last.epilogue.identity:
            last.epilogue = norm
        else:
            return False
        last.members += [*last.passed, part.path]
        last.passed = []
        return True
    if last.linear is not None or last.members:
        last.members += last.passed
        last.passed = []
    return True


def _closed(segments: list[_Segment]) -> Iterator[Chain]:
    before, *rest = segments
    links = []
    for segment in rest:
        assert segment.linear is not None
        linear = segment.linear.module
        assert isinstance(linear, nn.Linear)
        links.append(
            Link(
                path=segment.linear.path,
                in_features=linear.in_features,
                out_features=linear.out_features,
                bias=linear.bias is not None,
                epilogue=segment.epilogue,
                members=tuple(segment.members),
            )
        )
    if links:
        yield Chain(links=tuple(links), prologue=before.epilogue, members=tuple(before.members))


def _kept_in(linear: nn.Module) -> tuple[torch.dtype, torch.device]:
    assert isinstance(linear, nn.Linear)
    return linear.weight.dtype, linear.weight.device


def _passes(module: nn.Module) -> bool:
    return type(module) is nn.Identity or (type(module) is nn.Dropout and module.p == 0)


def _activation_of(module: nn.Module) -> Activation | None:
    if type(module) is nn.GELU and module.approximate != "none":
        return None
    return ACTIVATIONS.get(type(module))


def _norm_of(module: nn.Module) -> Epilogue | None:
    if type(module) is BlockNorm:
        return Epilogue(norm=Norm.BLOCK, block=module.block, eps=module.eps)
    if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or len(module.normalized_shape) != 1:
        return None
    gamma = module.weight is not None
    if type(module) is nn.LayerNorm:
        return Epilogue(norm=Norm.LAYER, eps=module.eps, gamma=gamma, beta=module.bias is not None)
    if type(module) is nn.RMSNorm:
        # Without an eps it takes that of the type it sums in, float32 for bfloat16 too.
        eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
        return Epilogue(norm=Norm.RMS, eps=eps, gamma=gamma)
    return None
