"""One step of training on a batch: forward, loss, backward, optimizers, run as the config asks.

    eager     as written
    compile   the model's blocks compiled, or the whole (train/steps/blocks.py), the rest as written
  graph   blocks compiled, and all but tables with sparse gradients in one CUDA graph (train/steps/graphed.py);
          where there can be no such graph, each block in graphs of its own, with what travels between them

What cannot run as asked, or computes something else when compiled (train/steps/agreement.py), runs as the line
above it, with the same result up to rounding, and `reason` says why. A batch of another size than the config's,
such as the last one, runs eagerly: it is not worth a compile. Its gradients are as much smaller as it is shorter:
Adam, which does not see a size that stays, would else move the weights by a few rows as far as by a whole batch.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

from loka.core.exceptions import first_line
from loka.data.batch import Batch, rows_of
from loka.distributed.dense_sharding import average_gradients, is_sharded, replicated_tables
from loka.distributed.tables.sharded_tables import sharded_modules
from loka.nn import unwrap
from loka.nn.fp8_state_dict import fp8_state_dict, load_fp8_state_dict
from loka.nn.unwrap import device_of
from loka.train.ahead import Ahead
from loka.train.config import TrainConfig
from loka.train.steps.agreement import disagreement
from loka.train.steps.blocks import compiled, left_as_written, uncompiled
from loka.train.steps.extent import Extent, extent_of
from loka.train.steps.forward import arguments, predict, tasks_in
from loka.train.steps.graphed import GraphedStep, graphed
from loka.train.steps.pipelined import Pipelined, pipelined
from loka.zoo import look_up

Sight = Literal["none", "host", "hooks"]
"""Who has to see a step: nobody; code on the host, so that no graph replays it; hooks, so that no compiled
code runs it either."""


_PIPELINE = "TorchRec's pipeline: ids of the next batch travel while a batch trains"
_ONE_BY_ONE = "TorchRec, a batch at a time"


class Predicted(NamedTuple):
    """Of the batch, before it was learned from: float32 [B] each, or [B, tasks]. The next step may overwrite
    them."""

    losses: torch.Tensor
    logits: torch.Tensor


class Step:
    """`step(batch)` trains `model` once. Make it anew when the model's modules or its plan change.

    Args:
        coming: the batches behind the one of a call, for TorchRec's pipeline; None where nobody may be ahead.
    """

    def __init__(
        self, model: nn.Module, optimizers: Mapping[str, Optimizer], config: TrainConfig, *, coming: Ahead | None = None
    ) -> None:
        self._model, self._optimizers, self._config = model, optimizers, config
        self._compiled = config.step != "eager"
        self._tried = False  # whether a compiled step was completed
        self._rehearsing = False
        self._why_not_compiled: str | None = None
        self._graphed: GraphedStep | None = None
        self._replicated = replicated_tables(model)
        self._whole = False
        self._coming = coming if config.pipeline and sharded_modules(model) else None
        self._pipeline: Pipelined | None = None
        self.exchange = _ONE_BY_ONE if sharded_modules(model) else None  # of TorchRec's ids and embeddings
        self._extent = extent_of(model, optimizers, config) if config.step == "graph" else Extent(model)
        self._left = left_as_written(unwrap(model)) if self._compiled else None
        if self._compiled:
            compiled(unwrap(model), replayed=self._extent.by_block)

    @property
    def reason(self) -> str | None:
        """Why it does not run as the config asks; None where it does, or asks for nothing."""
        if self._why_not_compiled or self._config.step != "graph":
            return self._why_not_compiled or self._left
        why = self._extent.reason or (self._graphed.reason if self._graphed else "no step was run yet")
        return "; ".join(each for each in (why, self._left) if each) or None

    def __call__(self, batch: Batch, *, sight: Sight = "none") -> Predicted:
        if self._pipeline is not None:  # ids of this batch are on their way
            short = len(batch) != self._config.batch_size
            with _eagerly(self._compiled and (short or sight == "hooks")):
                return self._inside(batch)
        if sight == "hooks" or len(batch) != self._config.batch_size:
            with _eagerly(self._compiled):
                return self._outside(batch)
        if sight == "host" and self._graphed is not None:
            return self._outside(batch)
        if not self._compiled or self._tried:
            return self._inside(batch)
        before = _Before(self._model)
        try:
            self._why_not_compiled = self._disagreement(batch, before)
            before.put_back()
            if self._why_not_compiled is None:
                found = self._inside(batch)
                self._tried = True
                return found
        except torch._dynamo.exc.TorchDynamoException as error:
            # The optimizers have not stepped: forward or backward failed while being compiled.
            before.put_back()
            cause = getattr(error, "inner_exception", error)
            self._why_not_compiled = f"torch.compile failed: {first_line(cause)}"
        self._compiled = False
        uncompiled(unwrap(self._model))
        return self._inside(batch)

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Within it a step goes forward and backward and updates nothing; then all is as before."""
        before = _Before(self._model)
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing = False
            self._zero_grad()
            before.put_back()

    def close(self) -> None:
        """The model runs as it did before."""
        if self._compiled:
            uncompiled(unwrap(self._model))
        self._graphed = None
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None

    def _inside(self, batch: Batch) -> Predicted:
        if self._extent.by_block:
            torch.compiler.cudagraph_mark_step_begin()
        if self._coming is not None and (self._tried or not self._compiled):
            self._begin_pipeline(batch, self._coming)
        if self._pipeline is not None:
            return self._pipeline()
        if self._config.step != "graph" or self._extent.why_no_graph:
            return self._learn(arguments(batch), batch.label)
        inputs = arguments(batch)
        rows: list[torch.Tensor] = []
        if self._extent.beside:
            inputs = (inputs[0], *look_up(self._model, *inputs[1:3]), *inputs[3:])
            rows = _rows_in(inputs)
            inputs = tuple(tensor.detach() for tensor in inputs)
        if self._graphed is None:
            self._graphed = graphed(
                self._captured,
                *inputs,
                batch.label,
                model=self._extent.part,
                optimizers=self._optimizers["dense"],
                collectives=self._config.capture_collectives,
            )
        losses, logits, *gradients = self._graphed(*inputs, batch.label)
        if rows:
            self._optimizers["sparse"].zero_grad(set_to_none=True)
            torch.autograd.backward(rows, gradients)
            average_gradients(self._replicated)
            self._optimizers["sparse"].step()
        return Predicted(losses, logits)

    def _disagreement(self, batch: Batch, before: "_Before") -> str | None:
        """Of the blocks compiled with those as written; None where forward exchanges with other ranks too, each of
        which may run out of memory by itself."""
        model = unwrap(self._model)
        if is_sharded(self._model) or sharded_modules(self._model):
            return None
        part = rows_of(batch, 0, self._config.part_rows(len(batch)))

        def forward() -> torch.Tensor:
            before.put_back()  # buffers that count forwards; and copies, for models that write to their inputs
            copies = tuple(tensor.clone() for tensor in arguments(part))
            return predict(model, copies, self._config.precision, tasks=tasks_in(batch))

        return disagreement(model, forward)

    def _outside(self, batch: Batch) -> Predicted:
        """Through the model itself, not replayed. Where a graph may exist, on its stream."""
        if self._graphed is None:
            return self._learn(arguments(batch), batch.label)
        self._whole = True
        try:
            losses, logits = self._graphed.eager(*arguments(batch), batch.label)
        finally:
            self._whole = False
        return Predicted(losses, logits)

    def _captured(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *given, label = tensors
        inputs = tuple(given)
        if self._whole:
            return self._learn(inputs, label)
        rows: list[torch.Tensor] = []
        if self._extent.beside:
            inputs = tuple(tensor.detach() for tensor in inputs)
            rows = [tensor.requires_grad_() for tensor in _rows_in(inputs)]
        self._optimizers["dense"].zero_grad(set_to_none=True)
        losses, logits = _backward(self._extent.part, inputs, label, self._config)
        self._clip()
        self._optimizers["dense"].step()
        # Zeros where the model did not use them: a graph has one number of outputs.
        gradients = [torch.zeros_like(row) if row.grad is None else row.grad for row in rows]
        return losses, logits, *gradients

    def _learn(self, inputs: tuple[torch.Tensor, ...], label: torch.Tensor) -> Predicted:
        self._zero_grad()
        predicted = _backward(self._model, inputs, label, self._config)
        average_gradients(self._replicated)
        self._update()
        return predicted

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def _update(self) -> None:
        if self._rehearsing:
            return
        self._clip()
        for optimizer in self._optimizers.values():
            optimizer.step()

    def _begin_pipeline(self, batch: Batch, coming: Ahead) -> None:
        self._coming = None  # tried once
        made = pipelined(
            self._model,
            batch,
            coming,
            forward=lambda inputs, label: _forward(self._model, inputs, label, self._config),
            zero_grad=self._zero_grad,
            update=self._update,
        )
        if isinstance(made, str):
            self.exchange = f"{_ONE_BY_ONE}: {made}"
        else:
            self._pipeline = made
            self.exchange = _PIPELINE

    def _clip(self) -> None:
        if self._config.grad_clip is not None and "dense" in self._optimizers:
            groups = self._optimizers["dense"].param_groups
            weights = [weight for group in groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(weights, self._config.grad_clip)


def _rows_in(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What was looked up, of the arguments of `dense_part`: in the place of ids, and of a history's, which
    stay ids where the model does not read them."""
    return [tensor for tensor in inputs[1:3] if tensor.is_floating_point()]


def _backward(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], label: torch.Tensor, config: TrainConfig
) -> Predicted:
    """Gradients of the sum of the rows' losses over `config.batch_size`: their mean, or less in a short
    batch, so that each row counts alike. Losses of a row's tasks add up. The batch goes through the model in
    `accumulate` parts."""
    rows, size = len(label), config.part_rows(len(label))
    losses, logits = [], []
    for first in range(0, rows, size):
        part = slice(first, first + size)
        loss, found = _forward(model, tuple(tensor[part] for tensor in inputs), label[part], config)
        loss.backward()
        losses.append(found.losses)
        logits.append(found.logits)
    return Predicted(torch.cat(losses), torch.cat(logits))


def _forward(
    model: nn.Module, inputs: tuple[Any, ...], label: torch.Tensor, config: TrainConfig
) -> tuple[torch.Tensor, Predicted]:
    tasks = 1 if label.ndim == 1 else label.shape[1]
    logits = predict(model, inputs, config.precision, tasks=tasks)
    losses = functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
    if len(label) == config.batch_size:  # the whole batch at once
        loss = (losses if losses.ndim == 1 else losses.sum(1)).mean()
    else:
        loss = losses.sum() / config.batch_size
    return loss, Predicted(losses.detach(), logits.detach())


def _eagerly(compiled: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


class _Before:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._carried: dict[str, Any] = copy.deepcopy(fp8_state_dict(model))
        self._random: list[tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = [
            (torch.set_rng_state, torch.get_rng_state())
        ]
        if (device := device_of(model)).type == "cuda":  # which need not be the current one
            self._random.append((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))

    @torch.no_grad()
    def put_back(self) -> None:
        for buffer, value in self._buffers:
            buffer.copy_(value)
        load_fp8_state_dict(self._model, self._carried)
        for put, state in self._random:
            put(state)
