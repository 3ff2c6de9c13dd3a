"""What rounding left of rows' changes, in float32, for the exchange that brings it later (error feedback)."""

import torch


class LeftOver:
    """Rows of a table, as many as were rounded since `clear`; an exchange costs as much as the rows it sends.

    Memory: four bytes for each row of the table, and up to two float32 rows for each that was rounded.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._index = torch.full((len(weight),), -1, dtype=torch.int32, device=weight.device)
        self._ids = torch.empty(0, dtype=torch.int64, device=weight.device)
        self._rows = torch.empty(0, weight.shape[1], device=weight.device)
        self._count = 0

    @property
    def ids(self) -> torch.Tensor:
        """In no order, each once."""
        return self._ids[: self._count]

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """[len(ids), D]; zeros of those that nothing was left of."""
        index = self._index[ids].long()
        found = torch.zeros(len(ids), self._rows.shape[1], device=ids.device)
        found[index >= 0] = self._rows[index[index >= 0]]
        return found

    def keep(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Instead of what was left of these rows, each named once."""
        new = ids[self._index[ids] < 0]
        count = self._count + len(new)
        if count > len(self._ids):
            room = min(2 * count, len(self._index)) - len(self._ids)
            self._ids = torch.cat([self._ids, self._ids.new_zeros(room)])
            self._rows = torch.cat([self._rows, self._rows.new_zeros(room, self._rows.shape[1])])
        self._ids[self._count : count] = new
        self._index[new] = torch.arange(self._count, count, dtype=torch.int32, device=ids.device)
        self._count = count
        self._rows[self._index[ids].long()] = rows

    def clear(self) -> None:
        self._index[self.ids] = -1
        self._ids, self._rows, self._count = self._ids.new_empty(0), self._rows.new_empty(0, self._rows.shape[1]), 0
