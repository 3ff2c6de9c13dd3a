"""Whose output a model takes a view of, as only contiguous tensors allow: found in autograd's graph.

A layer over tokens that reads its input as it lies returns a transposed view (nn/turned.py), of which
`view` makes an error. `reshape` and `flatten` of a contiguous tensor leave the same trace and are taken
for it: a layer then stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from loka.nn.watched import tensors_in
from loka.probe.learnt import Learnt

_VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "AsStridedBackward")


def viewed(outputs: Sequence[torch.Tensor], returned: Any) -> list[bool]:
    """For each of `outputs`, which require a gradient, whether a view of it leads to what was `returned`."""
    wanted = {output.grad_fn for output in outputs}
    found = set()
    ahead = [tensor.grad_fn for tensor in tensors_in(returned) if tensor.grad_fn is not None]
    seen = set(ahead)
    while ahead:
        node = ahead.pop()
        for before, _ in node.next_functions:
            if before in wanted and node.name().startswith(_VIEWS):
                found.add(before)
            if before is not None and before not in seen:
                seen.add(before)
                ahead.append(before)
    return [output.grad_fn in found for output in outputs]


def leave_viewed(over_tokens: Sequence[tuple[Learnt, torch.Tensor]], returned: Any) -> None:
    """Layers with these outputs of which a view was taken count as not turned from now on."""
    seen = viewed([output for _, output in over_tokens], returned)
    for (learnt, _), was_viewed in zip(over_tokens, seen, strict=True):
        if was_viewed:
            learnt.turned = 0
