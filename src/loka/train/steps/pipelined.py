"""Steps through TorchRec's TrainPipelineSparseDist: ids of the next batches travel while this one trains.

    batch i + 2   to the device          batch i + 1   ids to the ranks that hold their rows
    batch i       lookup, forward, loss, backward, optimizers: as without a pipeline, to the same bits

The pipeline reads batches ahead of the loop that trains on them, so both read them from one `Ahead`. It
traces the model with torch.fx to find which ids the tables get; a model that fx cannot trace trains a batch
at a time. While a pipeline stands only its own calls of the model are right, hooks of a Probe included: who
calls the model between two steps (`--auto`, to renew effects) closes it first, and the next step begins
another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from loka.core.device import synchronize
from loka.core.exceptions import first_line
from loka.data.batch import Batch
from loka.distributed.tables.embedding_bags import EmbeddingBags, embedding_bags_in, quiet, torchrec
from loka.nn import unwrap
from loka.train.ahead import Ahead
from loka.train.steps.forward import arguments

Forward = Callable[[tuple[Any, ...], torch.Tensor], tuple[torch.Tensor, Any]]


class Pipelined:
    """A call trains on the batch that the loop has come to, and returns what `forward` gave with the loss."""

    def __init__(self, pipeline: Any, feed: Iterator[Any], device: torch.device) -> None:
        self._pipeline, self._feed, self._device = pipeline, feed, device

    def __call__(self) -> Any:
        return self._pipeline.progress(self._feed)

    def close(self) -> None:
        """The model can be called by anyone again."""
        self._pipeline.detach()
        synchronize(self._device)


def pipelined(
    model: nn.Module,
    first: Batch,
    coming: Ahead,
    *,
    forward: Forward,
    zero_grad: Callable[[], None],
    update: Callable[[], None],
) -> Pipelined | str:
    """A pipeline whose first step is that on `first`, which lies on the device; or why there is none.

    Args:
        forward: of inputs, with jagged ids in the place of sparse ones, and labels: a loss, and what the step
            returns.
        zero_grad, update: called before forward and after backward.
    """
    tables = embedding_bags_in(model)
    if len(tables) != 1:
        return "its pipeline gets the ids of the zoo's tables only, and this model makes its own of them"
    device = first.label.device

    unread: list[Exception] = []

    def feed() -> Iterator[_Fed]:
        yield _Fed(first, tables[0])
        try:
            for batch in coming.early(device):
                yield _Fed(batch, tables[0])
        except Exception as error:
            unread.append(error)
            raise

    torchrec("torchrec.streamable").Pipelineable.register(_Fed)  # the abstract class that it looks for
    synchronize(device)  # batches were moved by another stream than the one that reads them next
    batches = feed()
    pipeline = torchrec("torchrec.distributed").TrainPipelineSparseDist(
        _OfBatch(unwrap(model)),
        SimpleNamespace(zero_grad=zero_grad, step=update),
        device,
        custom_model_fwd=lambda batch: forward(batch.inputs(), batch.batch.label),
    )
    try:
        # The tracer goes through what is compiled on its way to the tables; only its copy of the model is eager.
        with quiet(), torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            pipeline.fill_pipeline(batches)
    except Exception as error:  # what a tracer raises on a user's code has no bounds
        synchronize(device)
        pipeline.detach()
        if unread:
            raise unread[0] from None
        return f"torch.fx cannot trace the model: {first_line(error)}"
    if not pipeline._pipelined_modules:
        pipeline.detach()
        return "its pipeline found no way from the batch to the tables"
    return Pipelined(pipeline, batches, device)


class _OfBatch(nn.Module):
    """What the pipeline traces: it follows attributes of one argument to the tables."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return self.model(batch.dense, batch.ids)


class _Fed:
    """A batch as the pipeline wants it: on the device already, with jagged ids."""

    def __init__(self, batch: Batch, tables: EmbeddingBags) -> None:
        self.batch, self.dense = batch, batch.dense
        self.ids = tables.jagged(batch.sparse)

    def inputs(self) -> tuple[Any, ...]:
        dense, _, *rest = arguments(self.batch)
        return dense, self.ids, *rest

    def to(self, device: torch.device, non_blocking: bool = False) -> _Fed:
        return self

    def record_stream(self, stream: Any) -> None:
        for tensor in self.batch.tensors().values():
            tensor.record_stream(stream)
        self.ids.record_stream(stream)
