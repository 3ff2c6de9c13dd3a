"""Changed rows of a table as bytes: their ids, codes of what the weight changed by, and its states in float32."""

from collections.abc import Sequence

import torch

from loka.distributed.gradient_codec import FP32, Codec, codec_named
from loka.distributed.tables.changed_rows import Sent, Table


def codec_of(table: Table, name: str, *, exact: bool) -> Codec:
    """The codec for the rows of a table, a scale a row; float32 where an exchange is exact."""
    return FP32 if exact else codec_named(name, block=table.lookup.tensors()[0].shape[1])


def byte_counts(table: Table, rows: int, codec: Codec) -> list[int]:
    """Bytes of the ids, the weight's codes and each state of so many rows."""
    weight, *states = table.lookup.tensors()
    return [8 * rows, rows * codec.width(weight.shape[1]), *(4 * rows * s[:1].numel() for s in states)]


def encode_rows(table: Table, taken: Sent, codec: Codec, *, exact: bool) -> list[torch.Tensor]:
    """Ids, codes and states of the rows `taken`, as many bytes as `byte_counts` says. What rounding leaves of them is
    kept in `table` for the next exchange.
    """
    x = taken.then[0] - taken.before[0]
    x += table.left.of(taken.ids)
    code = codec.encode(x)
    if exact:
        table.left.clear()
    elif codec.name != FP32.name:
        table.left.keep(taken.ids, (x - codec.decode(code)).nan_to_num(0.0, 0.0, 0.0))
    states = [after - was for after, was in zip(taken.then[1:], taken.before[1:], strict=True)]
    return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (taken.ids, code, *states)]


def decode_rows(
    table: Table, sent: Sequence[torch.Tensor], rows: int, codec: Codec
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The ids [rows], and by how much the weight and its states changed, of what `encode_rows` gave on a replica."""
    weight, *states = table.lookup.tensors()
    ids, code, *others = (each.clone() for each in sent)  # clones begin where their dtype may begin
    changed = codec.decode(code.view(rows, codec.width(weight.shape[1])))
    moved = [c.view(torch.float32).view(rows, *s.shape[1:]) for c, s in zip(others, states, strict=True)]
    return ids.view(torch.int64), [changed, *moved]
