"""The rows of a table that a replica changed, and what all replicas agree upon for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from loka.distributed.tables.left_over import LeftOver
from loka.distributed.tables.lookups import Lookup
from loka.distributed.tables.one_group import Change

# What all agree upon for the weight and the states of rows: from those before, and what each replica changed.
Rule = Callable[[Sequence[torch.Tensor], Sequence[Change]], list[torch.Tensor]]


@dataclass(kw_only=True)
class Table:
    """One table here: the rows that changed since the last exchange as they were, and what rounding left."""

    lookup: Lookup
    seen: torch.Tensor
    ids: list[torch.Tensor] = field(default_factory=list)
    before: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    left: LeftOver

    def note(self, ids: torch.Tensor) -> None:
        """Saves rows that were not looked up before. An index that is none is row 0's, as fbgemm has it."""
        ids = ids.detach().reshape(-1).to(self.seen.device, torch.int64)
        ids = torch.where((ids >= 0) & (ids < len(self.seen)), ids, 0).unique()
        new = ids[~self.seen[ids]]
        if len(new):
            self.seen[new] = True
            self.ids.append(new)
            self.before.append(tuple(tensor[new].float() for tensor in self.lookup.tensors()))

    def take(self, also: torch.Tensor) -> Sent:
        """The rows that changed, and `also` those, in order; from here on rows change anew."""
        self.note(also)
        tensors = self.lookup.tensors()
        ids = torch.cat([*self.ids, also[:0]])
        ids, order = ids.sort()
        before = tuple(_saved(self.before, index, tensor)[order] for index, tensor in enumerate(tensors))
        self.seen[ids] = False
        self.ids, self.before = [], []
        return Sent(ids=ids, before=before, then=tuple(tensor[ids].float() for tensor in tensors))


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Rows of a table: as they were agreed upon, and as this replica had them when it sent."""

    ids: torch.Tensor
    before: tuple[torch.Tensor, ...]
    then: tuple[torch.Tensor, ...]


def agree_on_rows(
    table: Table, own: Sent, came: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]], rule: Rule
) -> None:
    """Writes what `rule` makes of what came, and on it what this replica did since it sent."""
    ids = torch.cat([one for one, _ in came]).unique()
    in_own, sent_here = indices_in(own.ids, ids)
    fresh_ids = torch.cat([*table.ids, ids[:0]])
    fresh_ids, order = fresh_ids.sort()
    in_fresh, changed_since = indices_in(fresh_ids, ids)
    fresh = [_saved(table.before, index, tensor)[order] for index, tensor in enumerate(table.lookup.tensors())]
    before, since = [], []
    for index, tensor in enumerate(table.lookup.tensors()):
        now = tensor[ids].float()
        then = now.clone()  # of rows that this replica neither sent nor changed since: as all have them
        then[changed_since] = fresh[index][in_fresh[changed_since]]
        since.append(now - then)
        then[sent_here] = own.before[index][in_own[sent_here]]
        before.append(then)
    made = rule(before, [(torch.searchsorted(ids, one), changes) for one, changes in came])
    for index, tensor in enumerate(table.lookup.tensors()):
        agreed = made[index].to(tensor.dtype).float()
        changed = changed_since.view(-1, *[1] * (agreed.dim() - 1))
        tensor[ids] = torch.where(changed, agreed + since[index], agreed).to(tensor.dtype)
        fresh[index][in_fresh[changed_since]] = agreed[changed_since]
    if len(fresh_ids):
        table.ids, table.before = [fresh_ids], [tuple(fresh)]


def mean_of_replicas(before: Sequence[torch.Tensor], changes: Sequence[Change]) -> list[torch.Tensor]:
    """w0 + the mean of what replicas changed, added in their order."""
    totals = [torch.zeros_like(one) for one in before]
    for at, changed in changes:
        for total, one in zip(totals, changed, strict=True):
            total.index_add_(0, at, one)
    return [one + total / len(changes) for one, total in zip(before, totals, strict=True)]


def _saved(before: Sequence[tuple[torch.Tensor, ...]], index: int, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of one tensor that were saved. State that an optimizer has made since was zero before."""
    rows = [
        saved[index] if index < len(saved) else tensor.new_zeros(len(saved[0]), *tensor.shape[1:]).float()
        for saved in before
    ]
    return torch.cat([*rows, tensor[:0].float()])


def indices_in(known: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each of `ids` stands in `known`, both in order, and whether it does."""
    if not len(known):
        return torch.zeros_like(ids), torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    index = torch.searchsorted(known, ids).clamp_max(len(known) - 1)
    return index, known[index] == ids
