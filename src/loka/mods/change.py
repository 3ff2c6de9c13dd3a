"""What a mod did to a model, as a value that prints."""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from loka.core.table import format_table
from loka.nn.linears import Filter


@dataclass(frozen=True, kw_only=True)
class Change:
    """One module that a mod changed, or left alone for a reason."""

    mod: str
    path: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Changes:
    """All that `apply` did, in order."""

    changed: tuple[Change, ...]
    kept: tuple[Change, ...]

    def __str__(self) -> str:
        rows = [(c.mod, c.path, c.what) for c in self.changed]
        rows += [(c.mod, c.path, f"kept: {c.what}") for c in self.kept]
        table = format_table(("mod", "module", "what"), rows)
        return f"{table}\n{self.summary()}" if rows else self.summary()

    def summary(self) -> str:
        return f"{len(self.changed)} modules changed, {len(self.kept)} kept"


class Mod(Protocol):
    """A change to the model that makes it friendlier to FP8."""

    def apply(self, model: nn.Module, filter: Filter) -> tuple[list[Change], list[Change]]:
        """Changes `model` in place; returns what changed and what was kept, with reasons."""
        ...


def fused_parents(model: nn.Module) -> set[str]:
    """Paths inside modules whose fused path reads their children's parameters directly.

    nn.TransformerEncoderLayer hands `linear1.bias` and `norm1.weight` to one fused kernel in
    inference; a child without them would crash it.
    """
    owners = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)
    return {
        f"{path}.{inner}" if path else inner
        for path, module in model.named_modules()
        if isinstance(module, owners)
        for inner, _ in module.named_modules()
        if inner
    }


FUSED_PARENT = "its parent reads its parameters directly"
HOOKED = "it has hooks, which a module in its place would lack"


def has_hooks(module: nn.Module) -> bool:
    """Of any kind that torch keeps on a module: forward, backward, state dict."""
    return any(value for name, value in vars(module).items() if name.endswith("_hooks"))


def replace_module(model: nn.Module, path: str, new: nn.Module) -> None:
    """Puts `new` at `path`, and wherever else the same module is registered."""
    old = model.get_submodule(path)
    for parent in model.modules():
        for name, child in list(parent._modules.items()):  # named_children hides repeats
            if child is old:
                setattr(parent, name, new)
    new.train(old.training)
