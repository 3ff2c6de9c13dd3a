"""The online half of Probe: hooks on a sampled step learn each layer's operands.

Between sampled steps nothing is attached to the layers: a step costs one hook on the root.
A sampled step runs eagerly (torch.compile is told to stand aside for it), so compiled models
can be probed. Random row samples come from the probe's own generator: training with a probe
gives the same weights, bit for bit, as training without. The first sampled step also shows which
layers feed each other: the chains and the stacks of cross layers (nn/dataflow.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from loka.core.chain import Chain
from loka.core.cross_record import CrossStack
from loka.core.exceptions import LokaError, NotConverted, PlanMismatch
from loka.core.problem import dtype_name
from loka.core.stats import LinearStats, Stats
from loka.nn.chain import runs_fused
from loka.nn.dataflow import Dataflow, unseen
from loka.nn.linears import Filter, find_linears, signature
from loka.nn.turned import lies_turned
from loka.nn.unwrap import unwrap
from loka.probe import gaussian, matrix_normal


class _Eager:
    """torch.compile stands aside while any probe's sampled step runs; nested probes count."""

    def __init__(self) -> None:
        self._depth = 0
        self._stance: Any = None

    def acquire(self) -> None:
        if self._depth == 0:
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._stance.__exit__(None, None, None)


_eager = _Eager()


@dataclass
class _Learnt:
    """What was learnt of one layer so far; the streams of its three operands."""

    order: int
    rows: int = 0
    calls: int = 0
    dtype: str = ""
    weight_dtype: str = ""
    needs_input_grad: bool = False
    needs_weight_grad: bool = False
    turned: int | None = None
    input: gaussian.Gaussian | None = None
    weight: matrix_normal.MatrixNormal | None = None
    grad_output: gaussian.Gaussian | None = None


class Probe:
    """Learns the distributions of input, weight and grad_output at every linear layer.

        with loka.Probe(model, every=100) as probe:
            for batch in loader:
                train_step(model, batch)
        stats = probe.stats()

    Args:
        model: any module, compiled or wrapped in DistributedDataParallel too. Each call of it
            with gradients enabled counts as a step; evaluation passes do not.
        every: a step in `every` is sampled, the first one included.
        rows: rows of an operand used per sampled call; a larger batch is subsampled.
        full_covariance: features up to which the full covariance is kept.
        rank: rank of the covariance beyond that (plus its exact diagonal).
        filter: (module, fqn) -> whether to probe a layer; all linear layers by default.
        save_to: folder to save the statistics in, every `save_every` steps and at the end.
        resume: statistics to go on from, of the same model.
        seed: of the row samples.

    Raises:
        PlanMismatch: `resume` is of another model; the differences are listed.
        NotConverted: chains of the model run as a whole; revert it first.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        rows: int = 512,
        full_covariance: int = 512,
        rank: int = 64,
        filter: Filter | None = None,
        save_to: Path | str | None = None,
        save_every: int = 10_000,
        resume: Stats | None = None,
        seed: int = 0,
    ) -> None:
        for name, value in (("every", every), ("rows", rows), ("rank", rank), ("save_every", save_every)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if runs_fused(model):
            raise NotConverted(
                "inner tensors of a chain cannot be watched: it runs as a whole",
                way_out="loka.revert(model), then probe",
            )
        self._model = model
        self._every, self._rows = every, rows
        self._full_covariance, self._rank = full_covariance, rank
        self._save_to = Path(save_to) if save_to is not None else None
        self._save_every = save_every
        self._generator = torch.Generator().manual_seed(seed)
        self._linears, self._skipped = find_linears(model, filter=filter)
        self._signature = signature(model)
        self._steps = self._sampled = 0
        self._learnt: dict[str, _Learnt] = {}
        self._root_hooks: list[Any] = []
        self._step_hooks: list[Any] = []
        self._eager = False
        self._filter = filter
        self._dataflow: Dataflow | None = None
        self._chains: tuple[Chain, ...] | None = None
        self._crosses: tuple[CrossStack, ...] = ()
        if not self._linears:
            raise LokaError(
                f"{self._signature.name} has no linear layer to probe",
                why=[f"{path}: {reason}" for path, reason in self._skipped.items()],
                way_out="LoKA decides the GEMMs of nn.Linear modules",
            )
        if resume is not None:
            self._restore(resume)

    def __enter__(self) -> Probe:
        if unwrap(self._model)._compiled_call_impl is not None:
            raise LokaError(
                "model.compile() compiled this module in place, so single steps cannot be watched",
                way_out="use compiled = torch.compile(model), and Probe(compiled)",
            )
        begin = self._model.register_forward_pre_hook(self._begin)
        end = self._model.register_forward_hook(self._end, always_call=True)
        self._root_hooks = [begin, end]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        for hook in self._root_hooks:
            hook.remove()
        self._root_hooks = []
        if self._save_to is not None and self._sampled:
            self.stats().save(self._save_to)

    def stats(self) -> Stats:
        """What was learnt so far, on the CPU, as a record."""
        layers, skipped = {}, dict(self._skipped)
        for path, learnt in sorted(self._learnt.items(), key=lambda item: item[1].order):
            layers[path] = _to_record(learnt)
        for path in self._linears:
            if path not in layers:
                skipped[path] = (
                    "never called in a sampled step; its parent may read its weight directly"
                    if self._sampled
                    else "no step was sampled: the probed module itself was never called with gradients "
                    "enabled (probe the wrapper that you call)"
                )
        return Stats(
            model=self._signature,
            steps=self._steps,
            sampled_steps=self._sampled,
            layers=layers,
            skipped=skipped,
            chains=self._chains or (),
            crosses=self._crosses,
        )

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._detach()
        if not torch.is_grad_enabled():
            return
        if self._save_to is not None and self._steps and self._steps % self._save_every == 0:
            self.stats().save(self._save_to)
        sampled = self._steps % self._every == 0
        self._steps += 1
        if not sampled:
            return
        self._sampled += 1
        _eager.acquire()
        self._eager = True
        if self._chains is None:
            self._dataflow = Dataflow(self._model, filter=self._filter)
            self._dataflow.start()
        for path, linear in self._linears.items():
            self._step_hooks.append(
                linear.register_forward_hook(self._observer(path), with_kwargs=True, prepend=True)
            )

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._dataflow is not None and output is not None:  # None: the step failed
            self._chains, _, self._crosses = self._dataflow.finish(output)
        self._detach()

    def _detach(self) -> None:
        if self._dataflow is not None:
            self._dataflow.stop()
            self._dataflow = None
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []
        if self._eager:
            _eager.release()
            self._eager = False

    def _observer(
        self, path: str
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], torch.Tensor], None]:
        def observe(
            linear: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
        ) -> None:
            assert isinstance(linear, nn.Linear)
            given = args[0] if args else kwargs["input"]
            if given.is_nested:
                given = torch.cat(given.unbind())
            with unseen(), torch.no_grad(), torch.autocast(output.device.type, enabled=False):
                learnt = self._learnt.setdefault(path, _Learnt(order=len(self._learnt)))
                rows = given.reshape(-1, linear.in_features)
                learnt.rows = max(learnt.rows, rows.shape[0])
                turned = given.shape[-2] if lies_turned(given) else 0
                learnt.turned = turned if learnt.turned in (None, turned) else 0
                learnt.calls += 1
                learnt.dtype = dtype_name(output.dtype)
                learnt.weight_dtype = dtype_name(linear.weight.dtype)
                learnt.needs_input_grad |= given.requires_grad
                learnt.needs_weight_grad |= linear.weight.requires_grad
                learnt.input = self._add(learnt.input, rows)
                if learnt.weight is None:
                    learnt.weight = matrix_normal.first_snapshot(
                        linear.weight, full_covariance=self._full_covariance
                    )
                else:
                    learnt.weight = matrix_normal.update(learnt.weight, linear.weight)
            with unseen():
                if output.requires_grad and not output.is_nested:
                    output.register_hook(lambda grad: self._observe_grad(learnt, grad))

        return observe

    def _observe_grad(self, learnt: _Learnt, grad: torch.Tensor) -> None:
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            learnt.grad_output = self._add(learnt.grad_output, grad.reshape(-1, grad.shape[-1]))

    def _add(self, so_far: gaussian.Gaussian | None, rows: torch.Tensor) -> gaussian.Gaussian:
        if rows.shape[0] > self._rows:
            picked = torch.randint(rows.shape[0], (self._rows,), generator=self._generator)
            rows = rows[picked.to(rows.device)]
        batch = gaussian.gaussian_of(rows, full_covariance=self._full_covariance, rank=self._rank)
        return batch if so_far is None else gaussian.merge(so_far, batch, rank=self._rank)

    def _restore(self, stats: Stats) -> None:
        differences = self._signature.differences(stats.model)
        if differences:
            raise PlanMismatch(
                "these statistics are of another model", why=differences, way_out="probe this model afresh"
            )
        for path, layer in stats.layers.items():
            for operand, learnt in layer.operands.items():
                kept_in_full = "scatter" in learnt.tensors
                if learnt.kind == gaussian.KIND and kept_in_full != (
                    learnt.tensors["mean"].shape[0] <= self._full_covariance
                ):
                    raise LokaError(
                        f"{path}, {operand}: these statistics were kept with another full_covariance "
                        f"than {self._full_covariance}",
                        way_out="resume with the value of the first run",
                    )
        self._steps, self._sampled = stats.steps, stats.sampled_steps
        if stats.chains or stats.crosses:  # statistics of an older LoKA have none
            self._chains, self._crosses = stats.chains, stats.crosses
        for path, layer in stats.layers.items():
            if path in self._linears:
                self._learnt[path] = _from_record(layer, self._linears[path].weight.device)


def _to_record(learnt: _Learnt) -> LinearStats:
    operands = {}
    if learnt.input is not None:
        operands["input"] = gaussian.to_distribution(learnt.input)
    if learnt.weight is not None:
        operands["weight"] = matrix_normal.to_distribution(learnt.weight)
    if learnt.grad_output is not None:
        operands["grad_output"] = gaussian.to_distribution(learnt.grad_output)
    return LinearStats(
        rows=learnt.rows,
        calls=learnt.calls,
        order=learnt.order,
        dtype=learnt.dtype,
        weight_dtype=learnt.weight_dtype,
        needs_input_grad=learnt.needs_input_grad,
        needs_weight_grad=learnt.needs_weight_grad,
        turned=learnt.turned or 0,
        operands={name: distribution.to("cpu") for name, distribution in operands.items()},
    )


def _from_record(layer: LinearStats, device: torch.device) -> _Learnt:
    operands = {name: distribution.to(device) for name, distribution in layer.operands.items()}
    return _Learnt(
        order=layer.order,
        rows=layer.rows,
        calls=layer.calls,
        dtype=layer.dtype,
        weight_dtype=layer.weight_dtype,
        needs_input_grad=layer.needs_input_grad,
        needs_weight_grad=layer.needs_weight_grad,
        turned=layer.turned,
        input=gaussian.from_distribution(operands["input"]) if "input" in operands else None,
        weight=matrix_normal.from_distribution(operands["weight"]) if "weight" in operands else None,
        grad_output=(
            gaussian.from_distribution(operands["grad_output"]) if "grad_output" in operands else None
        ),
    )
