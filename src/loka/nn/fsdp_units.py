"""What FSDP2 holds: the units of a model, and their parameters.

torch has no public way to give a plain, already sharded parameter an all-gather of its own: `fully_shard`
looks for `fsdp_pre_all_gather` on the local tensor, which has to be a tensor subclass before. Subclasses show
up in state dicts, and optimizers pay for their dispatch, so LoKA puts the hooks on the plain local tensor
afterwards. The private names that this needs (torch 2.11 to 2.13) are in this file alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loka.core.exceptions import LokaError
from loka.core.exchange import has_group
from loka.nn.unwrap import inner_of, named_modules, named_parameters

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


@dataclass(frozen=True, eq=False)
class Sharded:
    """One parameter of a unit. `held` is torch's FSDPParam, `beside` the FSDPParamGroup that it is gathered with."""

    name: str
    unit: str
    held: Any
    beside: Any

    @property
    def owners(self) -> list[tuple[nn.Module, str]]:
        """Modules and attributes that hold it: several where it is tied."""
        info = self.held._module_info
        return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]

    @property
    def size(self) -> torch.Size:
        return self.held._orig_size

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows as the optimizer has them; it may have none."""
        return self.held._sharded_local_tensor

    @property
    def padded(self) -> torch.Tensor:
        """This rank's rows and zeros below them up to as many as rank 0 has, [ceil(N / ranks), K]."""
        return self.held._sharded_param_data.view(self.held.padded_sharded_param_size)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.held.shard_mesh.get_group()

    @property
    def is_gathered(self) -> bool:
        """Whether it is gathered, or a gather is under way, as after `unshard(async_op=True)` and for what is
        prefetched.
        """
        return self.held.sharded_state.name != "SHARDED" or self.beside._all_gather_result is not None

    @property
    def gathers_in(self) -> torch.dtype:
        """The dtype of FSDP2's own all-gather."""
        return self.held.mp_policy.param_dtype or self.held.sharded_param.dtype

    def unfit(self) -> str | None:
        """Why its all-gather cannot be replaced, or None."""
        if self.held.is_dtensor:
            return "it is a DTensor of tensor parallelism besides"
        if self.held.offload_to_cpu:
            return "its shards are offloaded to the CPU"
        if self.held.fsdp_placement.dim != 0:
            return f"it is sharded along dimension {self.held.fsdp_placement.dim}, not along its rows"
        if self.held.post_forward_mesh_info not in (None, self.held.mesh_info):
            return "reshard_after_forward is a number, for which FSDP2 knows no all-gather but its own"
        return None

    def hook(self, before: Any, after: Any) -> None:
        """Has FSDP2 call `before` and `after` around its all-gather; see HOOKS in torch's documentation."""
        local = self.local
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after  # type: ignore[attr-defined]
        self._begin_anew()

    def unhook(self) -> None:
        for name in HOOKS:
            self.local.__dict__.pop(name, None)
        self._begin_anew()

    @property
    def is_hooked(self) -> bool:
        """False after load_state_dict(assign=True), say, which puts another tensor there."""
        return all(hasattr(self.local, name) for name in HOOKS)

    def _begin_anew(self) -> None:
        """FSDP2 allocates the memory that it gathers into once, by what the hooks were at that time; this makes it do
        so again.
        """
        self.held._init_extensions()
        self.held.all_gather_outputs = []
        self.held.__dict__.pop("_unsharded_param", None)


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that `fully_shard` was called for, by path; of a list of modules, each. A wrapper around the
    model, such as what torch.compile returns, may be the root's."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[str, nn.Module] = {path: m for path, m in named_modules(model) if isinstance(m, FSDPModule)}
    wrapper: nn.Module | None = model
    while wrapper is not None and not isinstance(wrapper, FSDPModule):
        wrapper = inner_of(wrapper)
    return found if wrapper is None else {"": wrapper} | found


def group_of_mesh(model: nn.Module) -> dist.ProcessGroup | None:
    """None where a sharded model is on all ranks that there are; otherwise the group of the ranks of one shard."""
    held = sharded_parameters(model)
    alone = held and held[0].held.mesh_info.mesh.size() < dist.get_world_size()
    return held[0].group if alone else None


def reduces_by_its_own(unit: nn.Module) -> bool:
    """Whether `set_custom_reduce_scatter` gave a unit a reduce-scatter that is not torch's."""
    return any(not type(group._reduce_scatter_comm).__module__.startswith("torch.") for group in _groups(unit))


def reshard(model: nn.Module) -> None:
    """Frees what units gathered and kept, such as the root after a forward without backward. Parameters are those of
    the optimizer again, and the next forward gathers them as they are then.
    """
    if has_group():
        for unit in units_of(model).values():
            unit.reshard()  # type: ignore[operator]


def cut_by_others(model: nn.Module) -> list[str]:
    """Names of the parameters that something other than FSDP2 made DTensors, such as tensor parallelism."""
    cut = [(name, parameter) for name, parameter in named_parameters(model) if hasattr(parameter, "device_mesh")]
    if not cut:
        return []
    by_fsdp2 = {
        id(held.sharded_param) for unit in units_of(model).values() for held in _params(unit) if not held.is_dtensor
    }
    return [name for name, parameter in cut if id(parameter) not in by_fsdp2]


def share_unit(twin: nn.Module, model: nn.Module) -> None:
    """Makes `twin`, which has the parameters and hooks of `model`, the same unit of FSDP2, if `model` is one."""
    from torch.distributed._composable_state import _insert_module_state

    if "" in units_of(model):
        _insert_module_state(twin, model._get_fsdp_state())  # type: ignore[operator]


def sharded_parameters(model: nn.Module) -> list[Sharded]:
    """The parameters that FSDP2 shards, in the order of units, which is the same on every rank.

    Raises LokaError where parameters are gathered at the moment, or torch is not as expected.
    """
    names = {id(module): path for path, module in named_modules(model)}
    found: dict[int, Sharded] = {}
    try:
        for unit, module in units_of(model).items():
            for group in _groups(module):
                for held in group.fsdp_params:
                    info = held._module_info
                    path = names.get(id(info.module), "")
                    name = f"{path}.{info.param_name}" if path else info.param_name
                    found.setdefault(id(held), Sharded(name, unit, held, group))
        gathered = [one.name for one in found.values() if one.is_gathered]
    except AttributeError as error:
        raise LokaError(
            f"FSDP2 of torch {torch.__version__} is built in another way than LoKA knows",
            why=[str(error)],
            way_out="gather in the model's precision, which needs nothing; please report it",
        ) from error
    if gathered:
        raise LokaError(
            "parameters are gathered at the moment", why=gathered, way_out="call model.reshard() of each unit first"
        )
    return list(found.values())


@contextmanager
def gathered_throughout(model: nn.Module) -> Iterator[None]:
    """Inside, the weights of all units are whole on every rank, and no forward or backward frees them. A
    collective at the start; without units nothing happens.

    Gradients are reduced as ever. It takes the memory of all units at once, in the dtype that they gather in.
    """
    units = list(units_of(model).values()) if has_group() else []
    groups = [group for unit in units for group in _groups(unit)]
    before = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
    for group in groups:
        group.post_forward_mesh_info, group.reshard_after_backward = None, False
    for unit in units:
        unit.unshard()  # type: ignore[operator]
    try:
        yield
    finally:
        for group, (after_forward, after_backward) in zip(groups, before, strict=True):
            group.post_forward_mesh_info, group.reshard_after_backward = after_forward, after_backward
        for unit in units:
            unit.reshard()  # type: ignore[operator]


def comes_and_goes(module: nn.Module) -> bool:
    """Whether the module is a unit whose forward or backward frees its weights."""
    if not any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return False
    return any(g.reshard_after_backward or g.post_forward_mesh_info is not None for g in _groups(module))


def gathers_in_a_step(unit: Any, *, root: bool) -> int:
    """How often a unit gathers in a step, for forward and backward: once where its weights stay in between, as those of
    the root do unless told otherwise.
    """
    stays = root and unit._get_fsdp_state()._auto_reshard_after_forward
    goes = any(group.post_forward_mesh_info is not None for group in _groups(unit))
    return 2 if goes and not stays else 1


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def _params(module: Any) -> Iterator[Any]:
    for group in _groups(module):
        yield from group.fsdp_params
