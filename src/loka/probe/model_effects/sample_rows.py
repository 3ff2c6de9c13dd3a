"""How many samples a batch has, and which rows of a layer's input belong to which of them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from loka.core.exceptions import DataRefused
from loka.probe.model_effects.logits import NoEffect
from loka.probe.trace import tensors_in

ROWS_MIX = "its rows mix samples"
_LEAKED = 1e-3  # of the gradient's energy that may lie on rows of other samples


class RowsMix(NoEffect):
    """The gradient of one sample reaches rows of others."""


def batch_of(arguments: Any) -> int:
    """The batch's size by what the model is called with; 0 where that does not tell.

    It is the first side that most tensors have: values and offsets of sparse features may have others.
    Two that are as frequent are a riddle, such as rows of several users beside one row for each of them.
    """
    sides = Counter(t.shape[0] for t in tensors_in(arguments) if t.ndim and not t.is_nested)
    (most, votes), (_, others) = [*sides.most_common(2), (0, 0), (0, 0)][:2]
    return most if votes > others else 0


def rows_of(
    leading: Sequence[int], grads: torch.Tensor, picks: torch.Tensor, batch: int, *, of_all: bool = False
) -> torch.Tensor:
    """Rows [m, n] that the samples `picks` [m] have in an input [*leading, K], as `grads` [rows, N] shows.

    Samples lie along the first side, or the second one (sequence first), or inside a flattened one.
    Only picked samples have a gradient, so a wrong guess leaves gradient on rows that are of none. In a
    gradient `of_all` samples nothing shows; the shape alone has to tell, and rows that mix samples pass.
    """
    count = grads.shape[0]
    if not count or count % batch:
        raise NoEffect(f"its {count} rows do not split over the {batch} samples of the batch")
    index = torch.arange(count, device=grads.device)
    layouts = [index.view(batch, -1)]
    if of_all:
        sides = [side for side in (0, 1) if list(leading[side : side + 1]) == [batch]]
        if len(sides) != 1:
            raise NoEffect(f"an input of {tuple(leading)} rows does not tell which are of which of {batch} samples")
        if sides == [1]:
            layouts = [index.view(leading[0], batch, -1).transpose(0, 1).reshape(batch, -1)]
        return layouts[0][picks]
    if len(leading) > 1 and leading[1] == batch:
        layouts.append(index.view(leading[0], batch, -1).transpose(0, 1).reshape(batch, -1))
    elif count > batch:
        layouts.append(index.view(-1, batch).t())
    energy = grads.float().square().sum(dim=1).nan_to_num(nan=0, posinf=0)  # of rows that are not finite
    total = energy.sum().item()
    for layout in layouts:
        rows = layout[picks]
        if energy[rows].sum().item() >= (1 - _LEAKED) * total:
            return rows
    raise RowsMix(f"{ROWS_MIX}: the gradient of a sample reaches rows that are not its own")


def clusters_of_rows(given: torch.Tensor, rows: int) -> torch.Tensor:
    """int64 [B]. Raises DataRefused for another shape, and for fractions, which would all be one cluster."""
    given = _by_row("clusters", given, rows)
    if given.is_floating_point() and not torch.equal(given, given.round()):
        raise DataRefused("clusters are fractions", way_out="give whole numbers, the same to rows that may be alike")
    return given.to(torch.int64)


def weights_of_rows(given: torch.Tensor, rows: int) -> torch.Tensor:
    """float64 [B]. Raises DataRefused for another shape."""
    return _by_row("weights", given, rows).to(torch.float64)


def _by_row(what: str, given: torch.Tensor, rows: int) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        raise DataRefused(
            f"{what} are of type {type(given).__name__}", way_out="return a tensor, one for each row: [B]"
        )
    if given.shape != (rows,):
        raise DataRefused(f"{what} are {list(given.shape)} for {rows} rows", way_out="give each row one: [B]")
    return given.cpu()


def require_weights(weights: torch.Tensor) -> torch.Tensor:
    """`weights` of rows. Raises ValueError where they are negative, not finite or all 0."""
    if not (weights.isfinite().all() and (weights >= 0).all() and weights.sum() > 0):
        raise ValueError("weights of rows are finite, not negative, and not all 0")
    return weights
