"""Lets DistributedDataParallel and FSDP2 send gradients by a codec.

    DDP      a bucket:  scatter, sum in float32, gather          register_comm_hook
    FSDP2    a unit:    scatter, sum in float32                  set_custom_reduce_scatter

Matrices go by the codec. Vectors (biases, norms) are sent exactly: they are few bytes, and rounding them to eight bits
is what biases training (docs/distributed.md). Each matrix begins a block of its own, since a small matrix could vanish
beside the large numbers of its neighbour. Means are torch's: over the ranks of the group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from loka.core.exceptions import LokaError, truncated
from loka.core.exchange import same_on_all
from loka.core.problem import dtype_name
from loka.distributed.dense_sharding import sparse_tables
from loka.distributed.gradient_codec import (
    BLOCK,
    Codec,
    block_begins,
    codec_named,
    gathered,
    padded_columns,
    scattered_sum,
)
from loka.nn.fsdp_units import Sharded, group_of_mesh, reduces_by_its_own, sharded_parameters, units_of
from loka.nn.unwrap import named_parameters

# Its name from torch 2.13 on.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(kw_only=True)
class GradientWire:
    """How ranks send gradients, as names of codecs: bf16, int8, e4m3, fp32.

    `gather` is used by DDP alone, since FSDP2 sends no sums. `sent_bytes` counts what this rank has sent so far.
    """

    scatter: str = "bf16"
    gather: str = "bf16"
    sent_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.codecs: tuple[Codec, Codec] = (codec_named(self.scatter), codec_named(self.gather))


Segments = tuple[tuple[str, int, int], ...]
"""Names of matrices and where they begin and end in a row of what is sent."""


@dataclass
class Sending:
    """What hooks go by: `wire`, or torch's own way. `observe` gets a name, float32 [ranks, C] of matrices,
    what is in the row that this rank adds up, the group, and whether sums are sent too."""

    wire: GradientWire | None
    observe: Callable[[str, torch.Tensor, Segments, dist.ProcessGroup, bool], None] | None = None


def send_gradients(model: nn.Module, wire: GradientWire) -> None:
    """Has the ranks of `model` send their gradients by `wire`, and add them in float32.

    A collective: call it on every rank after wrapping and before the first backward. `no_sync`, accumulation,
    clipping and GradScaler work as before: what DDP and FSDP2 would reduce comes through the codec, and nothing else.
    As by any hook, DDP's `join` divides by all ranks, whatever `divide_by_initial_world_size` says.

    Args:
        model: in DistributedDataParallel, or with units of `fully_shard` in it.

    Raises:
        LokaError: the model is neither, it has a hook or a reduce-scatter already, gradients in float64 or complex
            numbers, or tables with sparse ones.
        PlanMismatch: ranks would send by other codecs, or one cannot; none is hooked.
    """
    agree_on_codecs(model, f"{wire.scatter}, {wire.gather}")
    hook_gradients(model, Sending(wire))


def agree_on_codecs(model: nn.Module, codecs: str) -> None:
    """Compares the codecs of the ranks, before any rank is hooked. A collective; raises as `send_gradients`."""
    mine: str | LokaError = codecs
    try:
        _group_to_hook(model)
    except LokaError as error:
        mine = error
    group = model.process_group if isinstance(model, DistributedDataParallel) else group_of_mesh(model)
    what = "the ranks would send gradients by other codecs"  # whose bytes are numbers to any
    same_on_all(mine, group, what=what, way_out="the same codecs, and a model wrapped alike, on all ranks")


def _group_to_hook(model: nn.Module) -> dist.ProcessGroup:
    """The group of the ranks that send. Raises LokaError where `model` takes no hooks."""
    wide = [
        f"{name} in {dtype_name(p.dtype)}"
        for name, p in named_parameters(model)
        if p.requires_grad and (p.dtype is torch.float64 or p.is_complex())
    ]
    if wide:
        raise LokaError(
            "gradients are in float64 or complex numbers, and codecs add real ones in float32",
            why=truncated(wide, 5),
            way_out="model.float(), real numbers for complex ones, or leave its gradients to torch",
        )
    if not isinstance(model, DistributedDataParallel):
        if held := sharded_parameters(model):
            if taken := [unit or "(root)" for unit, module in units_of(model).items() if reduces_by_its_own(module)]:
                raise LokaError(
                    "units of this model have a reduce-scatter of their own",
                    why=truncated(taken, 5),
                    way_out="leave out set_custom_reduce_scatter, and send_gradients before",
                )
            return held[0].group
        raise LokaError(
            "the model is neither in DistributedDataParallel nor sharded by FSDP2",
            way_out="wrap it first, or call fully_shard",
        )
    if sparse_tables(model):
        raise _sparse("tables of the model")
    if hook := model._get_ddp_logging_data().get("comm_hook"):
        raise LokaError("this model has a communication hook", why=[hook], way_out="wrap the module anew")
    return model.process_group


def hook_gradients(model: nn.Module, sending: Sending) -> None:
    """As `send_gradients`, by what `sending` says in each backward."""
    group = _group_to_hook(model)
    if isinstance(model, DistributedDataParallel):
        names = {id(weight): name for name, weight in named_parameters(model)}
        model.register_comm_hook((sending, group, names), _reduce_bucket)
        return
    units = units_of(model)
    by_unit: dict[str, list[Sharded]] = {}
    for one in sharded_parameters(model):
        by_unit.setdefault(one.unit, []).append(one)
    for unit, held in by_unit.items():
        units[unit].set_custom_reduce_scatter(_ReduceScatter(unit, held, sending))  # type: ignore[operator]


def _sparse(what: str) -> LokaError:
    return LokaError(
        f"gradients of {what} are sparse, and codecs take dense ones",
        way_out="tables without sparse=True, or fully_shard (--dense fsdp2)",
    )


def _reduce_bucket(
    state: tuple[Sending, dist.ProcessGroup, dict[int, str]], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The mean of a bucket over ranks, in its buffer. Its collectives are in the order of buckets."""
    sending, group, names = state
    wire = sending.wire
    if wire is None and sending.observe is None:
        return allreduce_hook(group, bucket)
    parts = bucket.gradients()
    if any(part.is_sparse for part in parts):
        raise _sparse("a bucket")
    ranks = group.size()
    matrices, vectors = ([p for p in parts if (p.dim() > 1) is wide] for wide in (True, False))
    buffer = bucket.buffer()
    begins, count = block_begins([part.numel() for part in matrices])
    wide = _rows(matrices, begins, ranks, padded_columns(count, ranks), buffer)
    if sending.observe is not None:
        weights = [names[id(w)] for w in bucket.parameters() if w.dim() > 1]
        row = _row_of(group.rank(), wide.shape[1], weights, begins, [part.numel() for part in matrices])
        sending.observe(f"bucket {bucket.index()}", wide, row, group, True)
    if wire is None:
        return allreduce_hook(group, bucket)
    thin_begins, thin_count = block_begins([part.numel() for part in vectors], block=1)
    thin = _rows(vectors, thin_begins, ranks, -(-thin_count // ranks), buffer)
    scatter, gather = wire.codecs
    sums = scattered_sum(wide, thin, scatter, group)
    means = gathered(sums[0] / ranks, sums[1] / ranks, gather, group)
    _note(wire, wide, thin, scatter, ranks - 1)
    _note(wire, wide, thin, gather, ranks - 1)
    for found, into, offsets in zip(means, (matrices, vectors), (begins, thin_begins), strict=True):
        flat = found.flatten()
        for part, begin in zip(into, offsets, strict=True):
            part.copy_(flat[begin : begin + part.numel()].view_as(part))
    return done_with(buffer)


def done_with(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


def _rows(
    parts: Sequence[torch.Tensor], begins: Sequence[int], ranks: int, columns: int, like: torch.Tensor
) -> torch.Tensor:
    """float32 [ranks, columns] of all elements, with zeros between and behind them."""
    found = like.new_zeros(ranks * columns, dtype=torch.float32)
    for part, begin in zip(parts, begins, strict=True):
        found[begin : begin + part.numel()] = part.reshape(-1)
    return found.view(ranks, columns)


def _row_of(row: int, columns: int, names: Sequence[str], begins: Sequence[int], sizes: Sequence[int]) -> Segments:
    """Which elements of matrices are in one row of `_rows`."""
    found = []
    for name, at, size in zip(names, begins, sizes, strict=True):
        begin, end = max(at - row * columns, 0), min(at - row * columns + size, columns)
        if begin < end:
            found.append((name, begin, end))
    return tuple(found)


def _note(wire: GradientWire, wide: torch.Tensor, thin: torch.Tensor, codec: Codec, others: int) -> None:
    """To each other rank go the bytes of one row, in either shot."""
    wire.sent_bytes += others * (codec.width(wide.shape[1]) + 4 * thin.shape[1])


class _ReduceScatter:
    """FSDP2's reduce-scatter of one unit: torch's interface `ReduceScatter`, of which FSDP2 asks no more.

    A row of its input holds a chunk of each parameter's gradient, in the order of the unit's parameters.
    """

    def __init__(self, unit: str, held: list[Sharded], sending: Sending) -> None:
        self.unit, self.held, self.sending = unit, held, sending

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        wire, observe = self.sending.wire, self.sending.observe
        if wire is None and observe is None:
            reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        ranks = group.size()
        trained = [one for one in self.held if one.held.sharded_param.requires_grad]
        sizes = [one.padded.numel() for one in trained]
        if sum(sizes) * ranks != input_tensor.numel():
            raise LokaError(
                f"unit {self.unit or '(root)'}: some parameters have no gradient in this backward",
                why=["FSDP2 then leaves them out of what it reduces, and does not say which"],
                way_out="use all parameters in every step, or a unit of their own for those that rest",
            )
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise LokaError(
                f"unit {self.unit or '(root)'}: gradients are to be divided by a number of your own",
                why=["codecs take means and sums over ranks"],
                way_out="leave FSDP2's gradient divide factor as it is",
            )
        chunks = input_tensor.view(ranks, -1).float().split(sizes, dim=1)
        is_wide = [len(one.size) > 1 for one in trained]
        wide = [chunk for chunk, matrix in zip(chunks, is_wide, strict=True) if matrix]
        thin = [chunk for chunk, matrix in zip(chunks, is_wide, strict=True) if not matrix]
        begins, _ = block_begins([chunk.shape[1] for chunk in wide])
        none = input_tensor.new_zeros(ranks, 0, dtype=torch.float32)
        padded = [nn.functional.pad(chunk, (0, -chunk.shape[1] % BLOCK)) for chunk in wide]
        matrices, vectors = torch.cat([*padded, none], dim=1), torch.cat([*thin, none], dim=1)
        if observe is not None:
            names = [one.name for one, matrix in zip(trained, is_wide, strict=True) if matrix]
            row = _row_of(0, matrices.shape[1], names, begins, [chunk.shape[1] for chunk in wide])
            observe(f"unit {self.unit}", matrices, row, group, False)
        if wire is None:
            reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        codec = wire.codecs[0]
        sums = scattered_sum(matrices, vectors, codec, group)
        _note(wire, matrices, vectors, codec, ranks - 1)
        offsets = iter(begins), iter(block_begins([chunk.shape[1] for chunk in thin], block=1)[0])
        start = 0
        for size, matrix in zip(sizes, is_wide, strict=True):
            kind = 0 if matrix else 1
            begin = next(offsets[kind])
            found = sums[kind][begin : begin + size]
            if op == dist.ReduceOp.AVG:
                found = found / ranks
            output_tensor[start : start + size] = found
            start += size
