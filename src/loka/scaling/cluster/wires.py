"""Bytes of the collectives of a traced step, by number of ranks and by format.

                 bf16                                      eight bits
    DDP          all-reduce of the bucket                  all-to-all, all-gather of codes (gradient_wire.py)
    FSDP2        reduce-scatter of the padded unit         all-to-all of codes
                 all-gather of the padded unit             matrices of FP8 sites by one byte an element
    HSDP         these in a group of ranks; an all-reduce of a unit's shard across replicas is in bf16

FSDP2 pads every parameter to whole rows a rank, codecs pad to whole blocks. `check_traced` holds the first
column against what the engine itself asked for in the trace; tests hold the second against real ranks.
"""

from collections.abc import Sequence
from typing import Literal

from loka.core.exceptions import LokaError
from loka.distributed.gradient_codec import block_begins, codec_named, padded_columns
from loka.scaling.cluster.collectives import Wire
from loka.scaling.cluster.engines import TRACED, EngineStep, Gathered, Param, Reduced, Replicated

Gradients = Literal["bf16", "int8", "e4m3"]

_BF16 = 2
_COMPRESSED = 16
"""Bytes that DDP's bf16_compress_hook reads and writes for a float32 element, there and back."""
ENCODED = {"int8": 52, "e4m3": 44}
"""Bytes that a codec reads and writes for an element to encode it, op by op; a test counts them."""
DECODED = {"int8": 16, "e4m3": 16}
_QUANTIZED = 19
"""Bytes for an element of this rank's shards in fp8_all_gather's `renew`: its norm reads 4, float32 / scale
reads and writes 4, the cast 4 and 1, the copy 1 and 1."""


def gather_wire(params: Sequence[Param], ranks: int, *, in_fp8: frozenset[str] = frozenset()) -> Wire:
    """FSDP2's all-gather of a unit. `in_fp8`: names of parameters that travel as one byte an element."""
    size = sum(_padded(p, ranks) * (1 if p.name in in_fp8 else _BF16) for p in params)
    return Wire("all_gather", size)


def reduce_wires(
    engine: str, params: Sequence[Param], ranks: int, *, gradients: Gradients = "bf16", itemsize: int = 4
) -> tuple[Wire, ...]:
    """Of a bucket of DDP, or a unit of FSDP2, in the order in which they run. `itemsize`: of DDP's buckets,
    from which torch's bf16_compress_hook makes bf16."""
    if engine == "ddp":
        if gradients == "bf16":
            numel = sum(p.numel for p in params)
            return (Wire("all_reduce", numel * _BF16, numel * (_COMPRESSED if itemsize > _BF16 else 0)),)
        matrices = padded_columns(block_begins(p.numel for p in params if len(p.shape) > 1)[1], ranks)
        vectors = -(-sum(p.numel for p in params if len(p.shape) <= 1) // ranks)
        size = ranks * _row(gradients, matrices, vectors)
        there, back = ENCODED[gradients] * matrices, DECODED[gradients] * ranks * matrices
        return Wire("all_to_all", size, ranks * there + back), Wire("all_gather", size, there + back)
    if gradients == "bf16":
        return (Wire("reduce_scatter", sum(_padded(p, ranks) for p in params) * _BF16),)
    each = {p.name: _padded(p, ranks) // ranks for p in params}
    matrices = block_begins(each[p.name] for p in params if len(p.shape) > 1)[1]
    vectors = sum(each[p.name] for p in params if len(p.shape) <= 1)
    moved = (ENCODED[gradients] + DECODED[gradients]) * ranks * matrices
    return (Wire("all_to_all", ranks * _row(gradients, matrices, vectors), moved),)


def replica_wire(params: Sequence[Param], group: int, ranks: int) -> Wire:
    """HSDP's all-reduce of what a rank of a group holds of a unit's gradients, by codecs or not, in bf16."""
    return Wire("all_reduce", held_elements(params, group) * _BF16, ranks=ranks // group, stride=group)


def scale_wire(weights: int) -> Wire:
    """fp8_all_gather's maxima of all weights, a float32 each, before the first gather of a step."""
    return Wire("all_reduce", 4 * weights)


def quantized_bytes(params: Sequence[Param], ranks: int, in_fp8: frozenset[str]) -> float:
    """That fp8_all_gather reads and writes in a rank's memory before the first gather of a step."""
    return _QUANTIZED * sum(_padded(p, ranks) for p in params if p.name in in_fp8) / ranks


def check_traced(step: EngineStep) -> None:
    """Raises LokaError where torch's engine asked for other bytes than are counted here."""
    for event in step.events:
        if isinstance(event, Gathered):
            counted = gather_wire(event.params, TRACED).size
        elif isinstance(event, Reduced):
            counted = reduce_wires(step.engine, event.params, TRACED)[0].size
            counted *= event.itemsize / _BF16
        elif isinstance(event, Replicated):
            counted = replica_wire(event.params, TRACED, TRACED).size * event.itemsize / _BF16
        else:
            continue
        if counted != event.size:
            raise LokaError(
                f"{step.engine} sends {event.size} bytes where {counted} were counted",
                why=[f"of {', '.join(p.name for p in event.params[:6])}"],
                way_out="use every parameter in each step; else please report the model",
            )


def _padded(param: Param, ranks: int) -> int:
    """Elements over all ranks with as many rows on each; a rank holds ceil(rows / ranks)."""
    rows, *rest = param.shape
    whole = -(-rows // ranks) * ranks
    for side in rest:
        whole *= side
    return whole


def _row(gradients: str, matrices: int, vectors: int) -> int:
    """Bytes to one rank."""
    return codec_named(gradients).width(matrices) + 4 * vectors


def held_elements(params: Sequence[Param], ranks: int) -> int:
    """Of the parameters, on each of the ranks that share them."""
    return sum(_padded(p, ranks) for p in params) // ranks if ranks > 1 else sum(p.numel for p in params)
