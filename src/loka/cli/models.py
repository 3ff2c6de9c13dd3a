"""Which model a command runs: as it is built, or with LoKA's mods, which make another model of it.

Models of LoKA's zoo get the mods by default. What a user's factory builds stays as it is unless --mods asks for them:
checkpoints of the changed model would fit the user's class by name, and give other numbers there.
"""

from collections.abc import Callable

import torch
from torch import nn

from loka import mods
from loka.cli.inputs import Build, is_of_zoo, model_builder
from loka.cli.terminal import say
from loka.data.batch import Source
from loka.mods import Changes

MODS = (mods.NoBias(), mods.BlockNorm(256), mods.HardSwish())

Show = Callable[[Changes], None]


def takes_mods(name: str, asked: bool | None) -> bool:
    """Whether `model_builder(name)`'s model gets mods: what --mods or --no-mods says, and without either whether it
    is of LoKA's zoo."""
    return is_of_zoo(name) if asked is None else asked


def line_of(changes: Changes) -> str:
    return f"mods: {changes.summary()}, by {', '.join(type(mod).__name__ for mod in MODS)}"


def show_line(changes: Changes) -> None:
    say(line_of(changes))


def apply_mods(model: nn.Module, name: str, asked: bool | None, *, show: Show) -> None:
    """Applies the mods to the model, in place, where `takes_mods` says so; `show` receives what they changed."""
    if takes_mods(name, asked):
        show(mods.apply(model, MODS))


def modded_builder(name: str, *, with_mods: bool | None = None, show: Show) -> Build:
    """`model_builder(name)`, and `apply_mods` to each model that it builds."""
    builder = model_builder(name)

    def built(source: Source) -> nn.Module:
        model = builder(source)
        apply_mods(model, name, with_mods, show=show)
        return model

    return built


def build_model(
    name: str, source: Source, *, seed: int, with_mods: bool | None = None, show: Show = show_line
) -> nn.Module:
    torch.manual_seed(seed)
    return modded_builder(name, with_mods=with_mods, show=show)(source)
