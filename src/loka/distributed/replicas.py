"""Whether all ranks hold the same weights and buffers, bit for bit."""

import torch
from torch import nn

from loka.core.exceptions import LokaError, truncated
from loka.core.exchange import gather_json
from loka.nn.unwrap import named_parameters

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_alike(model: nn.Module) -> None:
    """Shards of different models would be put together to one that nobody built. No engine shards buffers, and
    FSDP2 leaves each rank its own."""
    mine = {name: _told(held) for name, held in (*named_parameters(model), *model.named_buffers())}
    every = gather_json(mine)
    differences = [
        f"rank {rank}: {name}"
        for rank, theirs in enumerate(every)
        for name in sorted(theirs.keys() | every[0].keys())
        if theirs.get(name) != every[0].get(name)
    ]
    if differences:
        raise LokaError(
            "the ranks hold other weights or buffers than rank 0, and each would shard its own",
            why=truncated(differences, 8),
            way_out="seed alike before building the model, or load one checkpoint on all ranks",
        )


def _told(weight: torch.Tensor) -> str:
    bits = "not made yet" if weight.is_meta else sum_of_bits(weight.detach())
    return f"{weight.dtype} {tuple(weight.shape)} {bits}"


def sum_of_bits(weight: torch.Tensor) -> int:
    """Differs where values or their indices do, but for chance in 64 bits. A million numbers at a time."""
    weight = torch.view_as_real(weight.resolve_conj()) if weight.is_complex() else weight
    bits = weight.contiguous().view(-1).view(_BITS[weight.element_size()])
    found = torch.zeros((), dtype=torch.int64, device=bits.device)
    for begin, part in enumerate(bits.split(1 << 20)):
        indices = torch.arange(1, len(part) + 1, device=bits.device) + (begin << 20)
        found += (part * indices).sum()
    return int(found)
