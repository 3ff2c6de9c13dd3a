"""A whole training step in one CUDA graph: forward, loss, backward and optimizer, one launch.

    step = graphed(function, *examples, model=model, optimizers=optimizer)
    loss = step(*batch)        call 1 .. warmup: eager;   warmup + 1: capture, replay;   then replay

Every call trains on its batch once, warm-up included, so the weights are those of calling
`function` itself. Capturing records kernels without running them; replaying copies the batch to
the addresses that were recorded and runs them. What the graph cannot know runs eagerly, and
`step.reason` says why. What a graph freezes, and how to live with it: docs/graphs.md.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from loka.core.device import has_graphs, moved
from loka.core.exceptions import first_line
from loka.core.exchange import gather, ranks_of
from loka.core.recording import Recording, capture_stream, record, synced
from loka.core.timing import is_broken
from loka.nn.fsdp_units import units_of
from loka.train.steps.capture import Undo, address, not_capturable

Result = torch.Tensor | tuple[torch.Tensor, ...]

# Reasons of single eager steps, as `eager_steps` counts them.
WARM_UP = "warm-up"
AFTER_A_CHANGE = "warm-up after a change"
OTHER_SHAPE = "a batch of another shape or dtype"
ASKED = "asked for"

REPLICAS = "DistributedDataParallel sends gradients while backward runs, which is not captured"
GATHERS = "FSDP2 gathers weights while forward and backward run, which is not captured"

# DistributedDataParallel puts its buckets together anew in the first step, and times ten with events that it
# waits for; torch's notes on CUDA graphs ask for as many before a capture.
_DDP_WARMUP = 11


_WITH_COLLECTIVES: weakref.WeakSet[GraphedStep] = weakref.WeakSet()


def release_collectives() -> None:
    """Drops all graphs that hold collectives, before their process group is destroyed: NCCL waits for them then,
    and hung two H100s for good."""
    for step in list(_WITH_COLLECTIVES):
        step.reset()


def graphed(
    function: Callable[..., Result],
    *examples: torch.Tensor,
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    warmup: int = 3,
    collectives: bool = False,
) -> GraphedStep:
    """A step that behaves as `function(*batch)` and replays a CUDA graph where it can.

    `function` is one step: `zero_grad(set_to_none=True)`, forward, backward and `step()` of every
    optimizer in `optimizers`; it returns the loss or a tuple of tensors. `examples` give the shapes
    and dtypes of a batch, on any device. `warmup` batches run eagerly before the capture: they make
    what is made once, such as optimizer state and compiled kernels.

    With `collectives` those of DistributedDataParallel are captured too, after 11 warm-ups, and those of FSDP2;
    the first has to be built within `synced(capture_stream(device))` (loka.core.recording). **No run of hours has
    proven that yet**. Where one rank cannot capture none replays; a batch of another shape on one of them alone
    may still hang all. Call the step's `reset()` before the process group is destroyed, which waits for its graph.
    Without it such a model runs eagerly.

    Raises ValueError for warmup < 1, no example, and a model without parameters.
    """
    group = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    return GraphedStep(function, examples, model=model, optimizers=group, warmup=warmup, collectives=collectives)


class GraphedStep:
    """See `graphed`. `eager_steps` counts the steps that ran eagerly by reason, `replays` the others."""

    def __init__(
        self,
        function: Callable[..., Result],
        examples: tuple[torch.Tensor, ...],
        *,
        model: nn.Module,
        optimizers: tuple[Optimizer, ...],
        warmup: int,
        collectives: bool = False,
    ) -> None:
        if warmup < 1:
            raise ValueError(f"warmup={warmup}: optimizer state made inside a graph is made anew by every replay")
        if not examples:
            raise ValueError("no example tensor: a graph reads its batch from tensors of fixed shapes")
        self._units: Any = tuple(units_of(model).values())
        self._share_out()
        # A parameter that only an optimizer knows has a gradient to keep too.
        found = dict.fromkeys(model.parameters())
        found.update(dict.fromkeys(p for o in optimizers for g in o.param_groups for p in g["params"]))
        if not found:
            raise ValueError("neither the model nor an optimizer has a parameter; there is nothing to train")
        self._function = function
        self._model = model
        self._optimizers = optimizers
        self._parameters = tuple(found)
        self._exchanges = _exchanges(model)
        self._warmup = max(warmup, _DDP_WARMUP) if self._exchanges == REPLICAS else warmup
        self._collectives = collectives
        self._shapes = tuple((example.shape, example.dtype) for example in examples)
        self._device = self._parameters[0].device
        self._captured: _Captured | None = None
        self._stream: torch.cuda.Stream | None = None
        self._warm = 0
        self._seen: dict[str, object] | None = None
        self._changed: str | None = None
        self._told: set[str] = set()
        self._refused = self._unfit()
        self.eager_steps: Counter[str] = Counter()
        self.replays = 0

    @property
    def graphed(self) -> bool:
        """Whether the next batch of the examples' shape replays a graph, if nothing changes until then."""
        return self._captured is not None

    @property
    def reason(self) -> str | None:
        """Why it runs eagerly; None exactly where `graphed`."""
        if self.graphed:
            return None
        if self._refused:
            return self._refused
        warming = f"warm-up: {self._warm} of {self._warmup} steps done"
        return f"{self._changed}; {warming}" if self._changed else warming

    def __call__(self, *batch: torch.Tensor, clone: bool = False) -> Any:
        """One step on `batch`; the result of `function`, detached.

        A replay returns the tensors that the next replay overwrites; `clone` copies them. Batches on
        the host are copied without waiting, so pinned memory must stay as it is until the copy ran.

        Raises ValueError for another number of tensors, and for one that requires a gradient.
        """
        if len(batch) != len(self._shapes):
            raise ValueError(f"this step takes {len(self._shapes)} tensors, as its examples; got {len(batch)}")
        if any(tensor.requires_grad for tensor in batch):
            raise ValueError(
                "a batch requires a gradient, which cannot leave a graph by autograd: pass it detached, "
                "call requires_grad_() on a detached view inside the step, and return its .grad"
            )
        if self._refused:
            return self._eager(batch, self._refused)
        if tuple((tensor.shape, tensor.dtype) for tensor in batch) != self._shapes:
            return self._eager(batch, OTHER_SHAPE)
        self._share_out()
        self._watch()
        if self._captured is None and not self._refused:
            if self._warm < self._warmup:
                result = self._eager(batch, AFTER_A_CHANGE if self._changed else WARM_UP)
                self._warm += 1
                self._refused = self._unfit_after_a_step()
                self._tell_refusal()
                return result
            self._capture(batch)
        if self._refused:
            self._tell_refusal()
            return self._eager(batch, self._refused)
        return self._replay(batch, clone)

    def eager(self, *batch: torch.Tensor) -> Any:
        """One step on `batch` without the graph, for a step that something watches (a Probe's sampled one).

        On the graph's stream, and without counting as warm-up. Returns as a call does.
        """
        return self._eager(batch, ASKED)

    def reset(self) -> None:
        """Drops the graph; the next steps warm up and capture again.

        For changes that a step cannot see for itself: other modules or hooks in the model, another
        FP8 plan, `requires_grad`, Python values that `function` closes over.
        """
        self._captured, self._warm, self._seen, self._changed = None, 0, None, None
        self._refused = self._unfit()

    def __repr__(self) -> str:
        state = "graphed" if self.graphed else f"eager ({self.reason})"
        return f"GraphedStep({state}, {self.replays} replays, {self.eager_steps.total()} eager steps)"

    def _eager(self, batch: tuple[torch.Tensor, ...], why: str) -> Result:
        self.eager_steps[why] += 1
        there = [moved(tensor, self._device) for tensor in batch]
        if self._refused:
            return _detached(self._function(*there))
        # Autograd remembers the stream on which it first saw a parameter, and a capture may not
        # wait for another one: whatever runs while a graph is possible runs on the graph's stream.
        with synced(self._side()):
            return _detached(self._function(*there))

    def _share_out(self) -> None:
        """Behind a forward without backward, as of an evaluation, FSDP2 keeps its root gathered until the next
        backward. A graph would hold no gather of it, or leave it for the next such forward: weights of before."""
        for unit in self._units:
            unit.reshard()

    def _side(self) -> torch.cuda.Stream | None:
        if self._stream is None and self._device.type == "cuda":
            # One of its own: cuBLAS keeps its workspace by stream and a graph the workspace of its capture,
            # so that graphs of one stream, replayed at once, would write to the same.
            own = not (self._collectives and self._exchanges)
            self._stream = torch.cuda.Stream(self._device) if own else capture_stream(self._device)
        return self._stream

    def _capture(self, batch: tuple[torch.Tensor, ...]) -> None:
        inputs = tuple(torch.empty(s, dtype=d, device=self._device) for s, d in self._shapes)
        for buffer, tensor in zip(inputs, batch, strict=True):
            buffer.copy_(tensor)  # real values: a capture does not read them, but host code may
        # A step of before, on another stream, may live on in a cycle of Python objects (compiled code is full of
        # them). Autograd then accumulates on that stream still, for which a capture may not wait.
        gc.collect()
        undo = Undo.before(self._model, self._parameters, self._optimizers, self._device)
        wrong = None
        try:
            recording, result = record(lambda: _detached(self._function(*inputs)), self._device, self._side())
        except BaseException as error:
            if not isinstance(error, Exception) or is_broken(self._device):
                undo.everything()
                raise
            wrong = f"the step cannot be captured: {first_line(error)}"
        wrong = wrong or undo.what_a_graph_misses()
        if self._collectives:
            wrong = _of_other_ranks(wrong)
        if wrong:
            undo.everything()
            self._refused = wrong
            return
        gradients = tuple(parameter.grad for parameter in self._parameters)
        self._captured = _Captured(recording, inputs, result, gradients, undo.kept())
        if self._exchanges:
            _WITH_COLLECTIVES.add(self)
        self._changed = None

    def _replay(self, batch: tuple[torch.Tensor, ...], clone: bool) -> Result:
        captured = self._captured
        assert captured is not None
        for buffer, tensor in zip(captured.inputs, batch, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        captured.recording.replay()
        # The graph writes to the tensors it recorded, whatever an eager step has put in .grad since.
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        self.replays += 1
        if not clone:
            return captured.result
        if isinstance(captured.result, torch.Tensor):
            return captured.result.clone()
        return tuple(tensor.clone() for tensor in captured.result)

    def _watch(self) -> None:
        now = self._frozen()
        if self._seen is not None and now != self._seen:
            name, what = _difference(self._seen, now)
            if name not in self._told:
                self._told.add(name)
                warnings.warn(f"no graph until {name} stays: {what}", RuntimeWarning, stacklevel=3)
            self._captured, self._warm, self._changed = None, 0, what
            self._refused = self._unfit()
        self._seen = now

    def _frozen(self) -> dict[str, object]:
        found: dict[str, object] = {
            "model.training": self._model.training,
            "the memory of the parameters": tuple(address(p) for p in self._parameters),
        }
        for index, optimizer in enumerate(self._optimizers):
            name = f"{type(optimizer).__name__} {index}" if index else type(optimizer).__name__
            found[f"the state of {name}"] = _Same(optimizer.state)  # load_state_dict makes a new one
            for at, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key != "params":
                        tensor = isinstance(value, torch.Tensor)
                        found[f"{key!r} of group {at} of {name}"] = _Same(value) if tensor else value
        return found

    def _unfit(self) -> str | None:
        if not has_graphs(self._device):
            return f"CUDA graphs need a CUDA device; the parameters are on {self._device}"
        if elsewhere := {p.device for p in self._parameters} - {self._device}:
            return f"the parameters are on several devices: {self._device} and {', '.join(map(str, elsewhere))}"
        if self._exchanges and not self._collectives:
            return self._exchanges
        for path, module in self._model.named_modules():
            table = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            if table and module.weight.requires_grad:
                return (
                    f"{path or 'the model'} has sparse gradients, whose size is known on the device only; "
                    "give it sparse=False, or look its rows up outside the step"
                )
        return next(filter(None, map(not_capturable, self._optimizers)), None)

    def _unfit_after_a_step(self) -> str | None:
        for path, parameter in self._model.named_parameters():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                return f"the gradient of {path} is {parameter.grad.layout}, which no graph can hold"
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor) and value.device != self._device:
                        return (
                            f"{type(optimizer).__name__} keeps {key!r} on {value.device}, and a graph would "
                            "freeze its value"
                        )
        return None

    def _tell_refusal(self) -> None:
        if self._refused:  # found while running, when nobody reads `reason` any more
            warnings.warn(f"steps run eagerly: {self._refused}", RuntimeWarning, stacklevel=3)


@dataclass(frozen=True)
class _Captured:
    recording: Recording
    inputs: tuple[torch.Tensor, ...]
    result: Result
    gradients: tuple[torch.Tensor | None, ...]
    kept: tuple[object, ...]  # memory that the graph refers to without owning it


class _Same:
    """Equal to itself only; keeps its object, so that another one cannot take its address."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


def _of_other_ranks(wrong: str | None) -> str | None:
    """`wrong`, or why another rank cannot replay: it would send gradients beside the graphs of this one."""
    if ranks_of() == 1:
        return wrong
    told = [why.decode() for why in gather((wrong or "").encode(), None)]
    return "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(told) if why) or None


def _exchanges(model: nn.Module) -> str | None:
    """What the model exchanges with other ranks while it runs, which a graph holds only where asked to."""
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        return REPLICAS
    return GATHERS if units_of(model) else None


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, str]:
    for name in {**old, **new}:
        if old.get(name) != new.get(name):
            if isinstance(new.get(name), bool | int | float | str):
                return name, f"{name} changed from {old.get(name)} to {new[name]}"
            return name, f"{name} changed"
    raise AssertionError("nothing differs")


def _detached(result: Result) -> Result:
    """Without its autograd graph, whose saved tensors would be kept from one step to the next."""
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, tuple) and all(isinstance(tensor, torch.Tensor) for tensor in result):
        return tuple(tensor.detach() for tensor in result)
    raise TypeError(f"a step returns a tensor or a tuple of tensors, not {type(result).__name__}")
