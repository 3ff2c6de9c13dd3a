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
