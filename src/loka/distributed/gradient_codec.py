"""How gradients and rows of tables travel between ranks: what a rank sends of float32 numbers, and how sums are made.

    scatter   rank r sends block j of its gradients to rank j    all-to-all of codes
    sum       rank j decodes what came and adds it in float32    in the order of ranks, rounded nowhere else
    gather    rank j sends its sum to all                        all-gather of codes

Every number is rounded once in scatter and once in gather, whatever the number of ranks. Sums in eight bits would round
at every addition (FP8-LM, arXiv 2310.18313, adds e4m3 in NCCL): their error grows with the number of ranks, and
docs/distributed.md measures it beside these codecs.

Eight-bit codes have a float32 scale for each 128 elements: 1.03 bytes an element, 0.516 of bf16's. Rows of a table have
one scale each (row_sync.py).

    int8   code = round(x / s),  s = max|x| / 127         evenly spaced: less error where a block has no tail
    e4m3   code = e4m3(x / s),   s = max|x| / 448

A block with NaN or infinity arrives as NaN or infinity, so that GradScaler and finite checks see it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from loka.core.exceptions import UnknownName
from loka.core.recipe import Format

BLOCK = 128
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on


@dataclass(frozen=True, kw_only=True)
class Codec:
    """`encode` float32 [R, C] to uint8 [R, width(C)], `decode` back; C is a multiple of `block`."""

    name: str
    bits: int
    block: int
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]

    def width(self, columns: int) -> int:
        """The bytes of a row of `columns` elements."""
        return columns * self.bits // 8 + (columns // self.block * 4 if self.bits == 8 else 0)


def _plain(name: str, dtype: torch.dtype, block: int) -> Codec:
    def encode(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).contiguous().view(torch.uint8)

    def decode(code: torch.Tensor) -> torch.Tensor:
        return code.contiguous().view(dtype).float()

    return Codec(name=name, bits=8 * dtype.itemsize, block=block, encode=encode, decode=decode)


def _blockwise(name: str, dtype: torch.dtype, block: int) -> Codec:
    largest = Format.INT8.max if dtype is torch.int8 else torch.finfo(dtype).max

    def encode(x: torch.Tensor) -> torch.Tensor:
        blocks = x.reshape(x.shape[0], x.shape[1] // block, block)
        scale = blocks.abs().amax(2, keepdim=True) / largest
        # Of a block of zeros, or of numbers so small that their scale is none: they become zeros.
        scale = torch.where(scale > 0, scale, torch.where(scale.isnan(), scale, 1.0))
        values = (blocks / scale).clamp(-largest, largest)
        code = (values.round() if dtype is torch.int8 else values).nan_to_num(0.0).to(dtype)
        return torch.cat([code.view(torch.uint8).flatten(1), scale.view(torch.uint8).flatten(1)], dim=1)

    def decode(code: torch.Tensor) -> torch.Tensor:
        columns = code.shape[1] * block // (block + 4)
        values = code[:, :columns].contiguous().view(dtype).float().view(code.shape[0], columns // block, block)
        # A copy, of one row too, whose scales may begin at a byte that no float32 may begin at.
        scale = code[:, columns:].flatten().clone().view(torch.float32).view(code.shape[0], columns // block, 1)
        # Zero times infinity is NaN: a block that was not finite cannot come out as numbers.
        return (values * scale).flatten(1)

    return Codec(name=name, bits=8, block=block, encode=encode, decode=decode)


CODECS: dict[str, tuple[Callable[[str, torch.dtype, int], Codec], torch.dtype]] = {
    "fp32": (_plain, torch.float32),
    "bf16": (_plain, torch.bfloat16),
    "int8": (_blockwise, torch.int8),
    "e4m3": (_blockwise, torch.float8_e4m3fn),
}


def codec_named(name: str, block: int = BLOCK) -> Codec:
    """The codec of that name; one of eight bits has a scale for each `block` elements.

    Raises UnknownName, which lists the known codecs.
    """
    if name not in CODECS:
        raise UnknownName(f"no codec is called {name!r}", way_out=f"one of {', '.join(CODECS)}")
    made, dtype = CODECS[name]
    return made(name, dtype, block)


FP32 = codec_named("fp32")


def block_begins(sizes: Iterable[int], *, block: int = BLOCK) -> tuple[list[int], int]:
    """The offsets of matrices of these sizes, each at the begin of a block, and the end of the last one's block."""
    ends = list(itertools.accumulate((-(-size // block) * block for size in sizes), initial=0))
    return ends[:-1], ends[-1]


def padded_columns(elements: int, ranks: int) -> int:
    """The columns C of [ranks, C] that hold `elements`, in whole blocks."""
    return -(-elements // (ranks * BLOCK)) * BLOCK


def scattered_sum(
    matrices: torch.Tensor, vectors: torch.Tensor, codec: Codec, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum over ranks of this rank's row of both: float32 [C] and [V]. A collective, one all-to-all.

    Args:
        matrices: float32 [ranks, C], C a multiple of BLOCK; sent by `codec`.
        vectors: float32 [ranks, V]; sent as they are.
    """
    code = torch.cat([codec.encode(matrices), FP32.encode(vectors)], dim=1)
    came = torch.empty_like(code)
    dist.all_to_all_single(came, code, group=group)
    split = codec.width(matrices.shape[1])
    return codec.decode(came[:, :split]).sum(0), FP32.decode(came[:, split:]).sum(0)


def gathered(
    matrices: torch.Tensor, vectors: torch.Tensor, codec: Codec, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [ranks, C] and [ranks, V] of all ranks, where this rank has [C] and [V]. A collective.

    All ranks decode the same bytes, their own too, so replicas stay equal bit for bit.
    """
    code = torch.cat([codec.encode(matrices[None]), FP32.encode(vectors[None])], dim=1)
    ranks = dist.get_world_size(group)
    came = torch.empty(ranks, code.shape[1], dtype=torch.uint8, device=code.device)
    all_gather(came, code, group=group)
    split = codec.width(matrices.shape[0])
    return codec.decode(came[:, :split]), FP32.decode(came[:, split:])
