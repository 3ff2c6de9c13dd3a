"""The rows of a table that a replica changed, and what all replicas agree upon for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from loka.distributed.tables.lookups import Lookup


@dataclass(kw_only=True)
class Table:
    """One table here: the rows that changed since the last exchange as they were, and what rounding left."""

    lookup: Lookup
    seen: torch.Tensor
    ids: list[torch.Tensor] = field(default_factory=list)
    before: list[tuple[torch.Tensor, ...]] = field(default_factory=list)
    left_ids: torch.Tensor
    left: torch.Tensor

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
        before = tuple(_saved(self.before, place, tensor)[order] for place, tensor in enumerate(tensors))
        self.seen[ids] = False
        self.ids, self.before = [], []
        return Sent(ids=ids, before=before, then=tuple(tensor[ids].float() for tensor in tensors))


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Rows of a table: as they were agreed upon, and as this replica had them when it sent."""

    ids: torch.Tensor
    before: tuple[torch.Tensor, ...]
    then: tuple[torch.Tensor, ...]


def agree(table: Table, own: Sent, came: Sequence[tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
    """Writes w0 + the mean of what came, and on it what this replica did since it sent."""
    ids = torch.cat([one for one, _ in came]).unique()
    in_own, sent_here = places(own.ids, ids)
    fresh_ids = torch.cat([*table.ids, ids[:0]])
    fresh_ids, order = fresh_ids.sort()
    in_fresh, changed_since = places(fresh_ids, ids)
    saved: list[torch.Tensor] = []
    for place, tensor in enumerate(table.lookup.tensors()):
        fresh = _saved(table.before, place, tensor)[order]
        now = tensor[ids].float()
        then = now.clone()  # of rows that this replica neither sent nor changed since: as all have them
        then[changed_since] = fresh[in_fresh[changed_since]]
        before = then.clone()
        before[sent_here] = own.before[place][in_own[sent_here]]
        total = torch.zeros_like(before)
        for one, changes in came:
            total.index_add_(0, torch.searchsorted(ids, one), changes[place])
        agreed = (before + total / len(came)).to(tensor.dtype).float()
        mine = torch.where(changed_since.view(-1, *[1] * (now.dim() - 1)), agreed + (now - then), agreed)
        tensor[ids] = mine.to(tensor.dtype)
        fresh[in_fresh[changed_since]] = agreed[changed_since]
        saved.append(fresh)
    if len(fresh_ids):
        table.ids, table.before = [fresh_ids], [tuple(saved)]


def _saved(before: Sequence[tuple[torch.Tensor, ...]], place: int, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of one tensor that were saved. State that an optimizer has made since was zero before."""
    rows = [
        saved[place] if place < len(saved) else tensor.new_zeros(len(saved[0]), *tensor.shape[1:]).float()
        for saved in before
    ]
    return torch.cat([*rows, tensor[:0].float()])


def places(known: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each of `ids` stands in `known`, both in order, and whether it does."""
    if not len(known):
        return torch.zeros_like(ids), torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    place = torch.searchsorted(known, ids).clamp_max(len(known) - 1)
    return place, known[place] == ids
