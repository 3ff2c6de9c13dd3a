"""Which rows that a site sees are those of a request, and which belong to the rows that only pad it.

    B rows of a batch, T rows of the site for each       row i of the site is of
    batch first    b0 t0, b0 t1, .., b1 t0, ..           row i // T of the batch
    batch last     b0 t0, b1 t0, .., b0 t1, ..           row i % B, as nn.MultiheadAttention transposes its input

What pads are copies of the last row (serve/rows.py), so that a run of such rows tells the order of each site.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch

from loka.serve.sites import answering, observed_by


class RowOrder(Enum):
    BATCH_FIRST = "batch first"
    BATCH_LAST = "batch last"


def row_orders(
    call: Callable[[Sequence[torch.Tensor]], object], rows: Sequence[torch.Tensor], bucket: int
) -> Mapping[str, RowOrder | None]:
    """By site, in the order in which they run, of a frozen tree that `call` calls with as many rows as `rows` [B, ...]
    has, three or more: the first two of them. None where it is neither.

    Bits are compared. A site whose rows mix those of a batch, or are chosen by data, has None.
    """
    found: dict[str, RowOrder | None] = {}

    def see(name: str, seen: torch.Tensor) -> None:
        order = _order(seen, count)
        found[name] = order if found.setdefault(name, order) is order else None

    count = rows[0].shape[0]
    padded = [torch.cat([each[:1], each[1:2].expand(count - 1, *each.shape[1:])]) for each in rows]
    with answering(bucket), observed_by(see):
        call(padded)
    return found


def _order(seen: torch.Tensor, count: int) -> RowOrder | None:
    each, left = divmod(seen.shape[0], count)
    if left or not each:
        return None
    first, last = seen.view(count, each, -1), seen.view(each, count, -1).transpose(0, 1)
    for order, by_row in ((RowOrder.BATCH_FIRST, first), (RowOrder.BATCH_LAST, last)):
        if torch.equal(by_row[1:], by_row[1:2].expand_as(by_row[1:])):
            return order
    return None


def own_rows(order: RowOrder | None, seen: int, *, count: int, padded: int, apart: int = 1) -> slice | torch.Tensor:
    """Places of a request's own rows, of every `apart`-th of `seen` rows of a site, where `count` rows were padded.

    All of them where the order is unknown: then the last row counts several times, and none is missed.
    """
    if order is None or seen % padded:
        return slice(None)
    if order is RowOrder.BATCH_FIRST or seen == padded:
        return slice(-(-(count * seen // padded) // apart))
    return torch.arange(0, seen, apart, device="cpu").remainder(padded).lt(count).nonzero().view(-1)
