"""Tables of a model, and the rows of them that it is about to look up.

nn.Embedding and nn.EmbeddingBag, which TorchRec's EmbeddingBagCollection holds, and fbgemm's table-batched
embeddings, which its sharded forms hold. These update their rows in backward, so who wants rows as they were
has to look before forward. Nothing here imports TorchRec or fbgemm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from loka.core.exceptions import LokaError
from loka.core.exchange import gather
from loka.core.signature import child_path
from loka.distributed.replicas import sum_of_bits
from loka.distributed.tables.one_group import AdaGrad

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
TABLES = (nn.Embedding, nn.EmbeddingBag)
_BATCHED = "SplitTableBatchedEmbeddingBagsCodegen"
_IN_MEMORY = ("DEVICE", "HOST", "MTIA")  # else rows lie in a cache while they are trained


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A table, or several one behind the other, and who looks rows of it up.

    Attributes:
        name: of the weight in the model; of table-batched embeddings theirs, with the table's index in them where
            they are not one table.
        tensors: reads the weight [rows, D] and the state that is updated with it, each [rows, ...], as far
            as the optimizer has made it.
        module: whose forward looks up.
        ids: of the arguments of that forward, the rows, in any order and number, int64.
        adagrad: row-wise AdaGrad as it is at the moment, where nothing else moves the table; or what does.
    """

    name: str
    tensors: Callable[[], tuple[torch.Tensor, ...]]
    module: nn.Module
    ids: Callable[[Arguments], torch.Tensor]
    adagrad: Callable[[], AdaGrad | str]


def lookups_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Lookup]:
    """Every table of `model`, one that several modules share as often as they are; by name.

    Args:
        optimizer: of the tables that are plain parameters; their state goes with them.

    Raises:
        LokaError: a table's rows cannot be read or written here; each is named.
    """
    found: list[Lookup] = []
    refused: list[str] = []
    for path, module in _modules(model, ""):
        if isinstance(module, TABLES):
            name = child_path(path, "weight")
            if isinstance(module.weight, DTensor):
                refused.append(f"{name}: its rows are shared out over ranks by FSDP2")
            elif module.weight.requires_grad:
                found.append(_plain(name, module, optimizer))
        elif type(module).__name__ == _BATCHED:
            kinds = {spec[2].name for spec in module.embedding_specs}  # type: ignore[union-attr]
            if kinds - set(_IN_MEMORY):
                refused.append(f"{path}: its rows lie in {', '.join(sorted(kinds))}")
            else:
                found += _batched(path, module)
    for one in found:
        weight = one.tensors()[0]
        if not weight.is_floating_point() or weight.element_size() not in (2, 4):
            refused.append(f"{one.name}: it holds {weight.dtype}")
    if refused:
        raise LokaError(
            "rows of these tables cannot be synchronized",
            why=refused,
            way_out="keep tables in a device's or the host's memory, in 16 or 32 bits, or synchronize them "
            "whole (DMPCollection.sync)",
        )
    return found


def frozen_tables(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of tables that are not trained, by name: `lookups_of` leaves them out."""
    tables = ((path, module) for path, module in _modules(model, "") if isinstance(module, TABLES))
    return {child_path(path, "weight"): m.weight for path, m in tables if not m.weight.requires_grad}


def _modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Those that TorchRec's sharded modules keep out of `named_modules` too: their lookups."""
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _modules(child, child_path(path, name))
    if type(module).__module__.startswith("torchrec."):
        for index, child in enumerate(module.__dict__.get("_lookups") or ()):
            yield from _modules(child, child_path(path, f"_lookups.{index}"))


def _plain(name: str, module: nn.Embedding | nn.EmbeddingBag, optimizer: torch.optim.Optimizer | None) -> Lookup:
    def tensors() -> tuple[torch.Tensor, ...]:
        weight = module.weight
        state = optimizer.state.get(weight, {}) if optimizer is not None else {}
        return (weight.detach(), *_of_rows(state, weight, name))

    def ids(arguments: Arguments) -> torch.Tensor:
        args, kwargs = arguments
        return args[0] if args else kwargs["input"]

    def adagrad() -> AdaGrad | str:
        if module.max_norm is not None or module.scale_grad_by_freq:
            return "max_norm" if module.max_norm is not None else "scale_grad_by_freq"
        groups = optimizer.param_groups if optimizer is not None else []
        for group in groups:
            if any(one is module.weight for one in group["params"]):
                if type(optimizer).__name__ not in ("RowwiseAdagrad", "RowWiseAdagrad"):  # LoKA's, TorchRec's
                    return type(optimizer).__name__
                also = [key for key in ("weight_decay", "lr_decay", "maximize") if group.get(key)]
                return f"row-wise AdaGrad with {', '.join(also)}" if also else _adagrad(group["lr"], group["eps"])
        return "no optimizer that was passed"

    return Lookup(name=name, tensors=tensors, module=module, ids=ids, adagrad=adagrad)


def _adagrad(lr: float, eps: float) -> AdaGrad:
    return AdaGrad(lr=float(lr), eps=float(eps))


def _of_rows(state: Mapping[str, Any], weight: torch.Tensor, name: str) -> list[torch.Tensor]:
    """Those with something for each row."""
    found = {k: v for k, v in state.items() if torch.is_tensor(v) and v.shape[:1] == weight.shape[:1]}
    if sparse := [key for key, value in found.items() if value.is_sparse]:
        raise LokaError(
            f"the state {', '.join(sparse)} of {name} is a sparse tensor, whose rows cannot be synchronized",
            why=["momentum of torch.optim.SGD moves rows that no lookup reads"],
            way_out="SGD without momentum, SparseAdam, Adagrad, or a row-wise AdaGrad",
        )
    return list(found.values())


def _batched(path: str, module: Any) -> list[Lookup]:
    """All tables as one where they lie one behind the other, as those of one width do; else a lookup for each."""
    every = range(len(module.embedding_specs))
    whole = _adjacent(_split(module))
    groups = [list(every)] if whole is not None else [[index] for index in every]

    def tensors(group: list[int]) -> Callable[[], tuple[torch.Tensor, ...]]:
        known: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}  # by where they lie: asked for in every step

        def read() -> tuple[torch.Tensor, ...]:
            where = tuple(held.data_ptr() for held in (*module.parameters(), *module.buffers()))
            if where not in known:
                tables = _split(module)
                found = _adjacent([tables[index] for index in group])
                assert found is not None  # fbgemm has a buffer for all
                known.clear()
                known[where] = found
            return known[where]

        return read

    def ids(group: list[int]) -> Callable[[Arguments], torch.Tensor]:
        begins = list(itertools.accumulate((module.embedding_specs[index][0] for index in group), initial=0))
        tables = module.feature_table_map
        shifts = [begins[group.index(table)] if table in group else -1 for table in tables]
        sizes = [module.embedding_specs[table][0] for table in tables]
        device = module.split_embedding_weights()[0].device
        # behind the last feature: no table's
        shift_of, size_of = (torch.tensor([*of_each, -1], device=device) for of_each in (shifts, sizes))

        def of(arguments: Arguments) -> torch.Tensor:
            args, kwargs = arguments
            indices, offsets = (*args, *(kwargs[name] for name in ("indices", "offsets")[len(args) :]))[:2]
            ragged = kwargs.get("batch_size_per_feature_per_rank", args[4] if len(args) > 4 else None)
            each = (offsets.numel() - 1) // len(tables)
            rows = [sum(part) for part in ragged] if ragged else [each] * len(tables)
            ends = offsets[torch.tensor(list(itertools.accumulate(rows)), device=offsets.device)]
            feature = torch.bucketize(torch.arange(len(indices), device=ends.device), ends, right=True)
            shift, size = shift_of[feature], size_of[feature]
            inside = (indices >= 0) & (indices < size)
            return (torch.where(inside, indices, 0) + shift)[shift >= 0]

        return of

    def adagrad() -> AdaGrad | str:
        told = module.optimizer_args
        if (name := module.optimizer.name) != "EXACT_ROWWISE_ADAGRAD":
            return f"fbgemm's {name}"
        also = [key for key in ("weight_decay", "max_norm", "weight_decay_mode") if getattr(told, key, 0)]
        also += ["gradient_clipping"] if told.gradient_clipping else []
        if also:
            return f"fbgemm's {name} with {', '.join(also)}"
        return _adagrad(module.learning_rate_tensor, told.eps)

    return [
        Lookup(
            name=path if whole is not None else child_path(path, str(group[0])),
            tensors=tensors(group),
            module=module,
            ids=ids(group),
            adagrad=adagrad,
        )
        for group in groups
    ]


def _split(module: Any) -> list[tuple[torch.Tensor, ...]]:
    """Of each table its weight and the states that are by row."""
    states = module.split_optimizer_states()
    return [
        (weight.detach(), *(s for s in (states[index] if states else ()) if s.shape[:1] == weight.shape[:1]))
        for index, weight in enumerate(module.split_embedding_weights())
    ]


def _adjacent(tables: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...] | None:
    """One tensor [sum of rows, ...] for those of all tables, in the same memory; None where there is none."""
    joined = []
    for parts in zip(*tables, strict=False):
        first, at = parts[0], parts[0].data_ptr()
        for part in parts:
            if (part.data_ptr(), part.shape[1:], part.dtype) != (at, first.shape[1:], first.dtype):
                return None
            if not part.is_contiguous() or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
                return None
            at += part.nbytes
        joined.append(first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride()))
    return tuple(joined) if len({len(table) for table in tables}) == 1 else None


def differences(lookups: Sequence[Lookup], group: dist.ProcessGroup | None) -> list[str]:
    """Where replicas' tables and the state of them differ in name, shape, dtype or value. A collective; it reads all
    of them."""
    told = [
        f"{one.name}{f', state {index}' if index else ''} {tuple(held.shape)} {held.dtype}, bits {sum_of_bits(held)}"
        for one in lookups
        for index, held in enumerate(one.tensors())
    ]
    answers = [text.decode().split("\n") for text in gather("\n".join(told).encode(), group)]
    found = [
        f"replica {r}: {its}; replica 0: {first}"
        for r, answer in enumerate(answers)
        for its, first in zip(answer, answers[0], strict=False)
        if its != first
    ]
    numbers = [
        f"replica {r} has {len(a)} weights and states" for r, a in enumerate(answers) if len(a) != len(answers[0])
    ]
    return numbers + found
