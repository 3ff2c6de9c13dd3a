"""The modules of a model as mods see them: each once, by all of its paths, and whether another may take its place.

Paths are those of sites and plans: wrappers (torch.compile, activation checkpointing) leave no prefix.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from loka.core.signature import child_path
from loka.mods.change import Change
from loka.nn.linears import Filter
from loka.nn.unwrap import named_modules, unwrap

FUSED_PARENT = "its parent reads its parameters directly"
HOOKED = "it has hooks, which a module in its place would lack"
_ROOT = "it is the model itself, which no parent holds; put it into an nn.Sequential first"
_COMPILED = "torch.compile was called on it alone, and that call would still run it; apply mods before"


@dataclass(frozen=True, kw_only=True, eq=False)
class Selected:
    """A module that the filter takes. A shared one has several paths; `split` says where the filter takes only some."""

    module: nn.Module
    paths: tuple[str, ...]
    split: str | None

    def change(self, mod: str, what: str) -> Change:
        first, *others = self.paths
        return Change(mod=mod, path=first, what=", also at ".join([what, ", ".join(others)]) if others else what)


def select(model: nn.Module, filter: Filter, wanted: Callable[[nn.Module], bool]) -> list[Selected]:
    """The `wanted` modules that `filter` takes by one of their paths at least."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in _every_path(unwrap(model)):
        if wanted(module):
            paths.setdefault(module, []).append(path)
    found = []
    for module, known in paths.items():
        taken = [path for path in known if filter(module, path)]
        left = [path for path in known if path not in taken]
        if taken:
            split = f"it is one module with {', '.join(left)}, which the filter leaves out" if left else None
            found.append(Selected(module=module, paths=tuple(taken), split=split))
    return found


def _every_path(
    module: nn.Module, path: str = "", above: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is not None and (inner := unwrap(child)) not in above:
            yield from _every_path(inner, child_path(path, name), (*above, module))


def fused_children(model: nn.Module) -> set[nn.Module]:
    """Modules inside those whose fused path reads their children's parameters directly.

    In inference nn.TransformerEncoderLayer hands `linear1.bias` and `norm1.weight` to one fused kernel, with the
    activation that it was built with; a child without them would crash it, another activation would not run.
    """
    owners = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
    return {
        inner
        for module in model.modules()
        if isinstance(module, owners)
        for inner in module.modules()
        if inner is not module
    }


def irreplaceable(model: nn.Module, module: nn.Module, outside: dict[nn.Module, str]) -> str | None:
    """Why `replace_module` would change nothing or lose something, or None; `outside` is `held_outside(model)`."""
    if module is unwrap(model):
        return _ROOT
    if has_hooks(module):
        return HOOKED
    if any(name == "_orig_mod" for _, name in _holders(model, module)):
        return _COMPILED
    if module in outside:
        return still_run(outside[module])
    return None


def still_run(attribute: str) -> str:
    return f"{attribute} holds it too, outside of the registered modules, and would still run it"


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of any kind that torch keeps: forward, backward, state dict."""
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))


def held_outside(model: nn.Module) -> dict[nn.Module, str]:
    """Modules that an attribute of a module holds without registering them, and the attribute's path.

    Such as `self.layers = [self.norm]`: torch does not look into lists, tuples, sets and dicts.
    """
    registered = set(model.modules())
    found: dict[nn.Module, str] = {}
    for path, owner in named_modules(model):
        for name, value in vars(owner).items():
            if name != "_modules":
                for module in _modules_in(value, registered):
                    found.setdefault(module, child_path(path, name))
    return found


_MAY_HOLD = (nn.Module, dict, list, tuple, set, frozenset, MethodType)


def _modules_in(value: object, registered: set[nn.Module]) -> Iterator[nn.Module]:
    """All modules in nested containers, bound methods, and modules that are not registered themselves."""
    stack, seen = [value], set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner: Any = ()
        if isinstance(value, nn.Module):
            yield value
            inner = () if value in registered else [vars(value)]
        elif isinstance(value, MethodType):
            inner = [value.__self__]
        elif isinstance(value, dict):
            inner = value.values()
        elif isinstance(value, _MAY_HOLD):
            inner = value
        stack += [each for each in inner if isinstance(each, _MAY_HOLD)]


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Registers `new` wherever `old` is registered."""
    for parent, name in _holders(model, old):
        setattr(parent, name, new)
    new.train(old.training)


def _holders(model: nn.Module, module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The parents that hold a module, wrappers among them, and the names that they hold it by."""
    return [
        (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()  # named_children hides repeats
        if child is module
    ]
