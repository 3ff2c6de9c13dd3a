"""What several ranks save of a run, and how as many or other ranks go on from it.

    tensors    weights, optimizer state, the mean of the weights: sharded, or equal on all ranks; by name
    own        of each rank: random state, sums of the metrics of its rows, buffers, counts of FP8 sites, the plan

As many ranks as before get their own parts back, bit for bit. With another number of ranks, rank r of R goes on for the
earlier ranks r, r + R, ...: it adds up their sums of metrics, so that no row is lost from them, and takes the rest from
rank r mod W of the W earlier ones. Weights and optimizer state are the same numbers for any number of ranks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from loka.core.exchange import rank_of, ranks_of
from loka.core.records.plan import Plan
from loka.distributed.tables.sharded_tables import sharded_states, sharded_weights
from loka.nn.unwrap import unwrap
from loka.train.checkpointing.sharded import Manifest, read_own, read_tensors
from loka.train.checkpointing.state import capture, restore_optimizer, restore_own
from loka.train.running import SUMS, RunningTasks

_MODEL, _OPTIMIZERS, _AVERAGE = "model/", "optimizers/", "average/"
_SPARSE = f"{_OPTIMIZERS}sparse/"


def tensors_of(
    model: nn.Module, optimizers: Mapping[str, Optimizer], average: AveragedModel | None
) -> dict[str, torch.Tensor]:
    """The tensors of a run by name, shared with the model, not copied. A weight that modules share is there under each
    name.
    """
    inner = unwrap(model)
    found = _weights(inner) | _states_of_tables(inner)
    names = {id(weight): name for name, weight in inner.named_parameters()}
    for kind, optimizer in optimizers.items():
        for weight, state in optimizer.state.items():
            for key, value in state.items():
                found[f"{_OPTIMIZERS}{kind}/{names[id(weight)]}/{key}"] = value
    if average is not None:
        found |= _means(inner, average)
    return found


def own_state(
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    running: RunningTasks,
    average: AveragedModel | None,
    plan: Plan | None,
) -> dict[str, Any]:
    """The state of this rank alone. Its tensors are shared, not copied."""
    inner = unwrap(model)
    found = capture(inner, {}, running, None, plan)
    state = found.pop("model")
    weights = _weights(inner)
    return {
        **found,
        "persistent": [name for name in state if _MODEL + name not in weights],
        "groups": {kind: optimizer.state_dict()["param_groups"] for kind, optimizer in optimizers.items()},
        "averaged": None if average is None else average.n_averaged,
    }


def restore_sharded(
    state: Mapping[str, Any],
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    running: RunningTasks,
    average: AveragedModel | None,
    *,
    path: Path,
) -> None:
    """Puts the tensors in `path`, and the own `state` of a rank, in place, however the model is sharded now.

    The model has to run by the plan of the state already. A collective.
    """
    inner = unwrap(model)
    weights = dict(inner.named_parameters())
    tables = _states_of_tables(inner)  # the memory that they are trained in; those of other ranks stay there
    of_tables = {f"{_SPARSE}{name}" for name in sharded_weights(inner)}
    states: dict[str, dict[str, dict[str, torch.Tensor]]] = {kind: {} for kind in optimizers}

    def wanted(there: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        into = _weights(inner) | tables
        if average is not None:
            into |= _means(inner, average)
        for name, found in there.items():
            if name.startswith(_OPTIMIZERS) and name.rpartition("/")[0] not in of_tables:
                kind, _, rest = name.removeprefix(_OPTIMIZERS).partition("/")
                weight, _, key = rest.rpartition("/")
                into[name] = _empty(found, weights.get(weight))
                states.setdefault(kind, {}).setdefault(weight, {})[key] = into[name]
        return into

    read_tensors(path, wanted)
    groups = _groups(state["groups"], optimizers)
    for kind, optimizer in optimizers.items():
        names = {id(weight): name for name, weight in weights.items()}
        order = [names[id(weight)] for group in optimizer.param_groups for weight in group["params"]]
        by_index = {index: states[kind][name] for index, name in enumerate(order) if name in states[kind]}
        restore_optimizer(optimizer, {"state": by_index, "param_groups": groups.get(kind, [])}, path=path)
    if average is not None:
        average.n_averaged.copy_(state["averaged"])
    restore_own(state, inner, running, path=path)


def _groups(there: Mapping[str, Any], optimizers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Until 2026-11-28 tables that TorchRec shards were `sparse`, and those beside them were in no optimizer."""
    if "fused" in optimizers and "fused" not in there:
        return {"fused" if kind == "sparse" else kind: groups for kind, groups in there.items()}
    return there


def taken_over(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The own state of this rank, or that of the ranks it goes on for. Raises FileRefused."""
    base = read_own(path, (rank := rank_of()) % manifest.ranks)
    if ranks_of() == manifest.ranks:
        return base
    others = [read_own(path, other)["running"] for other in range(rank, manifest.ranks, ranks_of())]
    return {**base, "running": _added_up(others, base["running"])}


def whole_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The state as a run of one process would have saved it, without the tensors of the optimizers.
    Raises FileRefused.
    """
    own = [read_own(path, rank) for rank in range(manifest.ranks)]
    state = own[0]
    model: dict[str, torch.Tensor] = {}

    def wanted(there: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        into = {name: _empty(found, None) for name, found in there.items() if name.startswith(_MODEL)}
        model.update({name.removeprefix(_MODEL): value for name, value in into.items()})
        return into

    read_tensors(path, wanted)
    return {
        **state,
        "model": {**model, **{name: state["buffers"][name] for name in state["persistent"]}},
        "running": _added_up([one["running"] for one in own], state["running"]),
        "optimizers": {kind: {"param_groups": groups} for kind, groups in state["groups"].items()},
    }


def _weights(inner: nn.Module) -> dict[str, torch.Tensor]:
    everything = inner.named_parameters(remove_duplicate=False)
    tables = sharded_weights(inner)
    own = {name: weight.detach() for name, weight in everything if name not in tables}
    return {_MODEL + name: weight for name, weight in (own | tables).items()}


def _states_of_tables(inner: nn.Module) -> dict[str, torch.Tensor]:
    return {_SPARSE + name: state for name, state in sharded_states(inner).items()}


def _means(inner: nn.Module, average: AveragedModel) -> dict[str, torch.Tensor]:
    names = [name for name, _ in inner.named_parameters()]
    means = average.module.parameters()
    return {_AVERAGE + name: mean.detach() for name, mean in zip(names, means, strict=True)}


def _empty(found: Any, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is not None and weight.shape == found.size:
        return torch.zeros_like(weight, dtype=found.properties.dtype, requires_grad=False)
    return torch.zeros(found.size, dtype=found.properties.dtype, device="cpu")


def _added_up(states: Sequence[Mapping[str, Any]], like: Mapping[str, Any]) -> dict[str, Any]:
    if "sums" not in like:
        return {task: _added_up([one[task] for one in states], its) for task, its in like.items()}
    sums = {name: sum((one[name] for one in states), torch.zeros_like(like[name])) for name in SUMS}
    return {**like, **sums, "rows": sum(one["rows"] for one in states)}
