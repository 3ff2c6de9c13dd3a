"""Cross layers in a model: which modules run a stack as a whole, and undoing it.

The first cross layer of a stack computes all of it, and the others return their x: the user's own
forward code runs as before, layer by layer. As with chains (nn/chain.py) only the class of each module
changes, here to a subclass of the user's own that is made when it is needed. A pickle names the
user's class alone: it can be read wherever that class can be imported.

Under autocast x_0 and x are cast to its dtype and so is what the stack returns, where the plain
formula would have promoted it to that of x_0.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from loka.core.chain_recipe import SAFE, ChainRecipe, chain_recipe_named
from loka.core.cross_record import CrossStack
from loka.core.exceptions import NoKernelFits, NotConverted
from loka.core.recipe import Gemm
from loka.kernels.registry import candidate_named
from loka.nn.chain_kernels import plain_kernels
from loka.nn.cross_flow import arguments_of
from loka.nn.cross_match import CrossSpec, match
from loka.nn.cross_ops import CrossGemms
from loka.nn.cross_state import Formed, RunningCross
from loka.nn.handover import reader_of, serve_with
from loka.nn.unwrap import unwrap


class Crossed(nn.Module):
    """A cross layer inside a stack. `loka_cross` is the stack where this is the first one, else None."""

    loka_cross: RunningCross | None
    loka_spec: CrossSpec
    loka_was: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        arguments = arguments_of(self.loka_spec, args, kwargs)
        if arguments is None:
            raise TypeError(
                f"{self.loka_was.__name__} runs in FP8 and takes {' and '.join(self.loka_spec.names)}"
            )
        x0, x = arguments
        return x if self.loka_cross is None else _run(self.loka_cross, x0, x)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.loka_cross is not None:  # loaded weights may be far from what the scales are used to
            self.loka_cross.state.bank.forget()

    def extra_repr(self) -> str:
        was = super().extra_repr()
        how = "crossed"
        if self.loka_cross is not None:
            layers = len(self.loka_cross.stack.layers)
            how = f"runs {layers} cross layer{'s' * (layers > 1)}, {self.loka_cross.recipe.candidate}"
            if self.loka_cross.reader is not None:
                how += f", served with {self.loka_cross.reader.chain.name}"
        return f"{was}, {how}" if was else how

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made anew from the user's: pickle would not find it by its name."""
        return _blank, (self.loka_was,), self.__getstate__()  # type: ignore[attr-defined,unused-ignore]


def _run(running: RunningCross, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    first, features = running.stack.layers[0], running.stack.features
    joint = x is x0
    if x0.shape != x.shape or x.shape[-1] != features:
        raise ValueError(
            f"{first.path}: x_0 is {list(x0.shape)} and x {list(x.shape)}; "
            f"the cross layers take two of one shape with {features} features"
        )
    kind = x.device.type
    weight = running.linear(first.u).weight
    if torch.is_autocast_enabled(kind):
        x0 = x0.to(torch.get_autocast_dtype(kind))
        x = x0 if joint else x.to(x0.dtype)
    elif not x.dtype == x0.dtype == weight.dtype:
        raise TypeError(
            f"{first.path}: x_0 is {x0.dtype}, x {x.dtype}, the weight {weight.dtype}; "
            "cast them, or use torch.autocast"
        )
    width = features
    rows0 = x0.reshape(-1, features)
    rows = None if joint else x.reshape(-1, features)
    parameters = running.parameters()
    training = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (rows0, *([] if rows is None else [rows]), *parameters)
    )
    reader = None if training else reader_of(running, x0)
    if 0 in rows0.shape:
        out = _empty(running, rows0, rows0 if rows is None else rows)
    elif reader is not None:
        out = serve_with(running, reader, rows0, rows)
        width = out.shape[1]
    else:
        out = CrossGemms.apply(rows0, rows, running.state.handle, running.place, training, *parameters)
    # As F.linear does: a plain view of a custom function's output refuses in-place ops.
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], width])


def _empty(running: RunningCross, x0: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """No rows: nothing to compute, but every parameter gets a gradient of zeros, as from nn.Linear."""
    for layer in running.stack.layers:
        inner = x
        for path in layer.shapes:
            linear = running.linear(path)
            bias = None if linear.bias is None else linear.bias.to(x.dtype)
            inner = nn.functional.linear(inner, linear.weight.to(x.dtype), bias)
        x = x0 * inner + x
    return x


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _crossed(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _CLASSES:
        _CLASSES[cls] = types.new_class(
            f"Crossed{cls.__name__}", (Crossed, cls), exec_body=lambda body: body.update(__module__=__name__)
        )
    return _CLASSES[cls]


def _blank(cls: type[nn.Module]) -> nn.Module:
    """A crossed module of the user's class without its state, which pickle and copy set."""
    made = _crossed(cls)
    return made.__new__(made)


def prepare(
    stack: CrossStack, recipe_name: str, kernels: Mapping[str, str], found: Callable[[str], Any]
) -> Formed:
    """What forms `stack` of the model whose modules `found` gives by path.

    Raises:
        NotConverted: a module is no cross layer, or not the one that the record describes.
        NoKernelFits: the recipe or a kernel is none that the stack can run with.
        UnknownName: a recipe or kernel that does not exist.
    """
    recipe = chain_recipe_named(recipe_name)
    reason = recipe_objection(recipe)
    if reason is not None:
        raise NoKernelFits(
            f"cannot form the cross layers at {stack.name}", why=[reason], way_out=f"use {SAFE}"
        )
    specs, reasons = [], []
    for layer in stack.layers:
        module = found(layer.path)
        spec = None if isinstance(module, Crossed) else match(module)
        inside = dict(module.named_modules())
        wanted = (layer.u, layer.v)
        if spec is None:
            reasons.append(f"{layer.path} is a {type(module).__name__} that is no cross layer")
            continue
        seen = tuple(None if name is None else inside[name] for name in (spec.u, spec.v))
        if seen != tuple(None if path is None else found(path) for path in wanted):
            reasons.append(f"{layer.path} multiplies by other linear layers than {layer.u} and {layer.v}")
        specs.append(spec)
    if reasons:
        raise NotConverted(
            f"cannot form the cross layers at {stack.name}",
            why=reasons,
            way_out="revert the model first, or leave this stack out of the plan",
        )
    complete = {**plain_kernels(stack, recipe, found(stack.linears[0]).weight.device), **kernels}
    for site, name in complete.items():
        _check_kernel(site, name, recipe)
    return Formed(stack=stack, recipe=recipe, kernels=complete, specs=tuple(specs))


def recipe_objection(recipe: ChainRecipe) -> str | None:
    """Why cross layers cannot run by this recipe, or None."""
    return (
        None if recipe.name == SAFE else f"cross layers run by the recipe {SAFE} only, not by {recipe.name}"
    )


def _check_kernel(site: str, name: str, recipe: ChainRecipe) -> None:
    wanted = recipe.gemm_recipe(Gemm.OUTPUT)
    if candidate_named(name).recipe.name != wanted:
        raise NoKernelFits(
            f"{name} cannot run {site} inside of a stack of cross layers",
            why=[f"it does not take operands by {wanted}"],
            way_out="name another kernel",
        )


def swap(running: RunningCross, found: Callable[[str], Any]) -> None:
    """Changes the classes of the stack's modules; undone by `restore`."""
    for place, (path, spec) in enumerate(zip(running.stack.paths, running.formed.specs, strict=True)):
        module = found(path)
        module.__dict__["loka_was"] = type(module)
        module.__dict__["loka_spec"] = spec
        module.__dict__["loka_cross"] = None if place else running
        module.__class__ = _crossed(type(module))


def restore(module: Crossed) -> None:
    """A plain module of the user's class again; nothing of LoKA stays on the object."""
    was = module.loka_was
    for name in ("loka_was", "loka_spec", "loka_cross"):
        del module.__dict__[name]
    module.__class__ = was  # type: ignore[assignment]


def running_crosses(model: nn.Module) -> dict[str, RunningCross]:
    """The stacks that run in `model`, by name."""
    heads = [m.loka_cross for m in unwrap(model).modules() if isinstance(m, Crossed) and m.loka_cross]
    return {running.stack.name: running for running in heads}
