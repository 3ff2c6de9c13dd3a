"""Applies mods to a model, before it is trained."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from loka.core.exceptions import LokaError, NotConverted
from loka.mods.change import Change, Changes, Mod
from loka.nn.linears import Filter, is_shard
from loka.nn.site import site_forwards
from loka.nn.unwrap import unwrap


def apply(model: nn.Module, mods: Sequence[Mod], *, filter: Filter | None = None) -> Changes:
    """Applies `mods` in order, in place, and returns what changed.

    A mod changes the architecture: parameters go, and the model is to be trained with it from
    the start. Build optimizers afterwards. Where a mod or the filter raises, the model stays as it was.

    Args:
        model: any module.
        mods: such as [NoBias(), BlockNorm(256), HardSwish()].
        filter: (module, fqn) -> whether the mods may touch it; all by default. It receives the paths of sites and
            plans, which wrappers leave out, and is asked for each path of a shared module.

    Raises:
        NotConverted: the model already runs a plan; revert it first.
        LokaError: DistributedDataParallel or FSDP holds its parameters; apply mods before.
    """
    if site_forwards(model):
        raise NotConverted(
            "mods cannot change a converted model", way_out="loka.revert(model), then apply, probe and plan again"
        )
    _refuse_distributed(model)
    changed: list[Change] = []
    kept: list[Change] = []
    with _all_or_nothing(model):
        for mod in mods:
            did, left = mod.apply(unwrap(model), filter or _everything)
            changed += did
            kept += left
    return Changes(changed=tuple(changed), kept=tuple(kept))


# By name, as importing FSDP takes a while; `fully_shard` puts FSDPModule among the bases of a module.
_ENGINES = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}


def _refuse_distributed(model: nn.Module) -> None:
    """Raises LokaError where an engine holds the parameters: it keeps lists of them, and one that a mod takes away
    would fail in the middle of a training step.
    """
    held = [
        f"{path or 'the model'}: {_ENGINES[kind.__name__]}"
        for path, module in model.named_modules()
        for kind in type(module).__mro__
        if kind.__name__ in _ENGINES and kind.__module__.startswith("torch.")
    ]
    if not held:  # it may be a part of a model that is sharded
        held = [f"{name}: a shard" for name, parameter in model.named_parameters() if is_shard(parameter)]
    if held:
        raise LokaError(
            "mods cannot change a model whose parameters are already distributed",
            why=held,
            way_out="apply mods on every rank first, then DistributedDataParallel(model) or fully_shard(model)",
        )


def _everything(module: nn.Module, path: str) -> bool:
    return True


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Puts submodules and parameters back where a mod or a filter raises."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held))
        for module in model.modules()
        for held in (module._parameters, module._modules)
        if isinstance(held, dict)  # those of a scripted module are not, and mods leave it alone
    ]
    try:
        yield
    except BaseException:
        for held, entries in before:
            held.clear()
            held.update(entries)
        raise
