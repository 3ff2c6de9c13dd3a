"""Which segment a row belongs to."""

from collections.abc import Callable
from typing import Any, Protocol

import torch


class RowSegments(Protocol):
    """Such as `loka.train.Segments`: `of(batch)` gives each row's place in `names`, int64 [B]; a row of any other
    number belongs to none."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def of(self) -> Callable[[Any], torch.Tensor]: ...


def places_of(segments: RowSegments, batch: Any) -> torch.Tensor:
    """What `of` gives, int64 [B]. Raises ValueError for another shape, floats and truth values: True is no place,
    though it would count as the second."""
    found = segments.of(batch)
    if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise ValueError(
            f"segments.of gives {found.dtype} {list(found.shape)}, not whole numbers [B]: a row's place "
            "in `names`, or any other number for none"
        )
    return found.to(torch.int64)
