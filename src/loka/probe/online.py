"""The online half of Probe: hooks on a sampled step learn each layer's operands.

Between sampled steps nothing is attached to the layers: a step costs one hook on the root.
A sampled step runs eagerly (torch.compile is told to stand aside for it), so compiled models
can be probed. Random row samples come from the probe's own generator: training with a probe
gives the same weights, bit for bit, as training without. The first sampled step also shows what share of
its matmul FLOPs are sites. After its forward pass one extra backward shows what quantizing each layer would
cost the model (probe/model_effects/sensitivity.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from loka.core.exceptions import LokaError
from loka.core.numerics.label_rate import Shares
from loka.core.problem import dtype_name
from loka.core.records.coverage import Coverage
from loka.core.records.stats import Stats
from loka.core.signature import ModelSignature
from loka.graph.gemm_calls import lies_across
from loka.nn.linears import Filter, find_linears, signature
from loka.nn.unwrap import device_of, require_initialized, unwrap
from loka.probe import refusals
from loka.probe.async_save import Copied, Saver, own_folder, to_host
from loka.probe.extra_backward import in_extra_backward
from loka.probe.force_eager import capturing, eager
from loka.probe.layer_stats import (
    RunningLayerStats,
    Site,
    add_samples,
    add_tails,
    bytes_of,
    from_record,
    learnt_so_far,
    refuse,
    with_sites,
)
from loka.probe.links import Links
from loka.probe.model_effects.calls import Call, step_seed
from loka.probe.model_effects.logits import Logits
from loka.probe.model_effects.sample_rows import batch_of
from loka.probe.model_effects.sensitivity import Sensitivity
from loka.probe.sampling_schedule import clock_of, sampling_of
from loka.probe.site_trace import SiteCall, SiteNames, SiteTrace
from loka.probe.trace import ModelHook, detach, trains, uncounted, unseen
from loka.statistics import gaussian, matrix_normal
from loka.statistics.depths import depths_of_rows, merge
from loka.statistics.row_picks import row_picks
from loka.statistics.sample_coherence import Picked, pick


class Probe:
    """Learns the distributions of input, weight and grad_output at every GEMM with a parameter.

        with loka.Probe(model, every=100) as probe:
            for batch in loader:
                train_step(model, batch)
        stats = probe.stats()

    Args:
        model: any module, compiled or wrapped in DistributedDataParallel too. Each call of it
            with gradients enabled counts as a step; evaluation passes do not.
        every: a step in `every` is sampled, the first one included; with "auto" as many as `overhead`
            allows, at growing gaps, on all ranks the steps that rank 0 decides (probe/sampling_schedule.py).
        overhead: share of training time that sampled steps may cost, with every="auto".
        rows: rows of an operand used per sampled call; a larger batch is subsampled.
        depth_rows: the same for its depth histograms (statistics/depths.py).
        full_covariance: features up to which the full covariance is kept.
        rank: rank of the covariance beyond that (plus its exact diagonal).
        filter: (module, site name) -> whether to probe a site; the module is the one that calls the GEMM, and
            all are by default.
        save_to: folder to save the statistics in, every `save_every` steps and at the end. A thread
            writes while training goes on. Among several ranks each has its own folder inside, "rank-3". No other
            Probe may save there meanwhile.
        resume: statistics to go on from, of the same model.
        seed: of the row samples.
        effect_samples: examples from which effects on KL/H are known, over sampled steps; earlier ones
            fade, and `renew_effects` replaces them all. 0 turns the extra backward off.
        effect_step: examples of one sampled step that are used for it, at most.
        logits: function from what the model returns to its logits [B] or [B, tasks], float. Not needed
            where it returns those of one task (or probabilities straight out of a sigmoid), under the name
            "logits" among others, or as TorchRec's DLRMTrain does.
        base_rate: share of positive labels, of several tasks one for each, for the entropy H that KL is
            relative to; by default the mean prediction. Where a model's output shows no logits it is needed:
            effects are then taken from the gradient of training, of a loss that is a mean over the batch.

    Raises:
        LokaError: a lazy module was not called yet.
        PlanMismatch: `resume` is of another model; the differences are listed.
        NotConverted: the model runs by a plan; revert it first. So too where it is converted while a Probe
            is open, from the next sampled step.
        InUse: (on entering) another Probe saves to that folder.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | Literal["auto"] = 100,
        overhead: float = 0.01,
        rows: int = 512,
        depth_rows: int = 128,
        full_covariance: int = 512,
        rank: int = 64,
        filter: Filter | None = None,
        save_to: Path | str | None = None,
        save_every: int = 10_000,
        resume: Stats | None = None,
        seed: int = 0,
        effect_samples: int = 512,
        effect_step: int = 64,
        logits: Logits | None = None,
        base_rate: Shares | None = None,
    ) -> None:
        counts = {"rows": rows, "depth_rows": depth_rows, "rank": rank, "save_every": save_every, "seed": seed}
        counts |= {"full_covariance": full_covariance, "effect_samples": effect_samples, "effect_step": effect_step}
        refusals.refuse_settings(counts, base_rate, logits, filter, resume)
        refusals.refuse_converted(model)
        require_initialized(model)
        self._model = model
        self._full_covariance, self._rank = full_covariance, rank
        self._save_to = Path(save_to) if save_to is not None else None
        self._seed, self._rows, self._depth_rows, self._save_every = seed, rows, depth_rows, save_every
        self._generator, self._depth_generator = torch.Generator(), torch.Generator()
        self._linears, self._skipped = find_linears(model, filter=filter)
        self._signature = signature(model)
        self._names = SiteNames(self._linears, {})
        self._trace: SiteTrace | None = None
        self._links = Links()
        self._coverage: Coverage | None = None  # of the first sampled step that went through
        self._steps = self._sampled = self._batch = 0
        self._layers: dict[str, RunningLayerStats] = {}
        self._root_hooks: list[Any] = []
        self._step_hooks: list[Any] = []
        self._eager, self._filter = False, filter
        self._sensitivity = Sensitivity(
            samples=effect_samples, per_step=effect_step, logits=logits, base_rate=base_rate, seed=seed,
            learnt=lambda path: learnt_so_far(self._layers[path]),
        )  # fmt: skip
        self._returned: Any = None  # by the model inside a wrapper, which may change the graph behind it
        refusals.refuse_without_sites(model, self._linears, self._skipped)
        if resume is not None:
            self._restore(resume)
        self._sampling = sampling_of(every, overhead=overhead, start=self._steps)
        self._clock = clock_of(device_of(unwrap(model)))
        self._announced: bool | None = None  # whether the step is sampled, where the program asks for it
        self._saver: Saver | None = None

    def __enter__(self) -> Probe:
        if self._root_hooks:  # those would stay on the model, and count each step twice
            raise LokaError("this Probe is open already", way_out="enter it once")
        refusals.refuse_converted(self._model)
        refusals.refuse_compiled_in_place(self._model)
        if self._save_to is not None:
            self._saver = Saver(own_folder(self._save_to))
        begin = self._model.register_forward_pre_hook(ModelHook(self._begin), with_kwargs=True)
        end = self._model.register_forward_hook(ModelHook(self._end), always_call=True)
        self._root_hooks = [begin, end]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        self._sensitivity.forget()
        for hook in self._root_hooks:
            hook.remove()
        self._root_hooks = []
        if self._saver is None:
            return
        saver, self._saver = self._saver, None
        try:
            saver.close(self._copy if self._sampled else None)
        except LokaError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # what ended the training is what is raised

    def next_step(self) -> bool:
        """Whether the next step is sampled, for loops that decide how a step runs: call it before each.

        A replayed CUDA graph calls no model, so its steps pass unseen. Where this is true, the step
        has to call the model, eagerly; else it may do as it likes. After the first use, calls of the
        model are no longer counted as steps by themselves.
        """
        self._announced = self._advance()
        return self._announced

    def stats(self) -> Stats:
        """What was learnt so far, on the CPU, as a record."""
        return with_sites(self._without_sites(), self._sites(), self._sensitivity.loss.not_clicks())

    def memory(self) -> dict[str, int]:
        """Bytes of everything that is kept: of "input", "weight", "grad_output", and "effects".

        It does not grow with the steps. For a layer [N, K] it is about 4 N K for the weight's mean, 4 K^2
        for a whole covariance of K features or 4 K `rank` else, likewise for N, and 1 MB of histograms.
        """
        return bytes_of(self._sites().values())

    @property
    def overhead(self) -> float | None:
        """The share of sampled steps' extra time in the time of training; None while it is not known."""
        return self._sampling.overhead

    def _sites(self) -> dict[str, Site]:
        in_order = sorted(self._layers.items(), key=lambda item: item[1].order)
        return {path: Site(layer, *self._sensitivity.of(path)) for path, layer in in_order}

    def _copy(self) -> tuple[Callable[[], Stats], Copied]:
        sites, copied = to_host(self._sites())
        return functools.partial(with_sites, self._without_sites(), sites, self._sensitivity.loss.not_clicks()), copied

    def _without_sites(self) -> Stats:
        no_step = (
            "never called in a sampled step; its parent may read its weight directly"
            if self._sampled
            else "no step was sampled: the probed module itself was never called with gradients "
            "enabled (probe the wrapper that you call)"
        )
        return Stats(
            model=ModelSignature(name=self._signature.name, layers={**self._signature.layers, **self._names.layers}),
            steps=self._steps,
            sampled_steps=self._sampled,
            layers={},
            skipped={**dict.fromkeys(self._linears, no_step), **self._skipped},
            coverage=self._coverage,
        )

    def _advance(self) -> bool:
        self._clock.mark(self._steps)
        self._clock.read(self._sampling.costs.took)
        if self._saver is not None:
            if self._sampled and self._steps % self._save_every == 0:
                self._saver.offer(*self._copy())
            self._saver.poll()
        sampled = self._sampling.due(self._steps)
        self._steps += 1
        return sampled

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refusals.refuse_compiling()
        if self._elsewhere():
            refusals.refuse_second_step()
            return
        self._detach()
        if capturing():
            return
        if not trains():
            self._clock.disturb()
            return
        if self._announced is None:
            sampled = self._advance()
        else:
            sampled, self._announced = self._announced, False
        if not sampled:
            return
        refusals.refuse_sampling(self._model)
        self._sampled += 1
        eager.acquire()
        self._eager = True
        for generator in (self._generator, self._depth_generator):
            generator.manual_seed(step_seed(self._seed, self._sampled))
        self._sensitivity.begin((args, kwargs), step=self._sampled)
        self._batch = batch_of((args, kwargs))
        inner = unwrap(self._model)
        if inner is not self._model:
            self._step_hooks.append(inner.register_forward_hook(self._inside))
        self._trace = SiteTrace(
            inner,
            self._names,
            linears=self._linears,
            filter=self._filter,
            observe=self._observe,
            account=self._coverage is None,
            hooks=self._sensitivity.hooks,
            begun=inner is self._model,
        )
        self._trace.start()

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._elsewhere():
            return
        sampled, returned = self._eager, self._returned
        if self._trace is not None and output is not None:  # None: the step failed
            self._skipped.update(self._trace.skipped)
            self._coverage = self._trace.coverage() or self._coverage
        self._detach(failing=module if output is None else None)
        if output is None:
            self._sensitivity.forget()
        elif sampled:
            with uncounted():
                self._sensitivity.finish(self._model, output if returned is None else returned)

    def _inside(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._elsewhere():
            self._returned = output

    def _elsewhere(self) -> bool:
        """Whether this is a thread beside that of the forward pass that is watched, such as one that evaluates."""
        return self._trace is not None and self._trace.is_elsewhere()

    def _detach(self, *, failing: nn.Module | None = None) -> None:
        """Hooks on `failing`, which torch is going through, are left to the next time."""
        if self._trace is not None:
            self._step_hooks += self._trace.stop()
            self._trace, self._links = None, Links()
        self._step_hooks = detach(self._step_hooks, failing)
        self._returned = None
        if self._eager:
            eager.release()
            self._eager = False

    def _observe(self, site: SiteCall, output: torch.Tensor) -> None:
        path, weight = site.path, site.weight
        refusals.refuse_meta(path, output)
        given = torch.cat(site.x.unbind()) if site.x.is_nested else site.x
        with uncounted(), unseen(), torch.no_grad(), torch.autocast(output.device.type, enabled=False):
            layer = self._layers.setdefault(path, RunningLayerStats(order=len(self._layers)))
            rows = given.reshape(-1, weight.shape[1])
            layer.rows = max(layer.rows, rows.shape[0])
            layer.calls += 1
            layer.dtype = dtype_name(output.dtype)
            layer.weight_dtype = dtype_name(weight.dtype)
            layer.needs_input_grad |= given.requires_grad
            layer.needs_weight_grad |= weight.requires_grad
            layer.over_tokens |= lies_across(given)
            layer.reads = tuple(sorted({*layer.reads, *self._links.behind(given)}))
            self._links.note(path, output)
            picked = self._picks(rows)
            part = rows if picked is None else rows[picked]
            layer.input = self._add(layer.input, part, rows)
            add_tails(layer, "input", part)
            keep = max(weight.shape) <= self._full_covariance and output.requires_grad
            known = part.to(torch.float32, copy=True) if keep else None
            some = pick(given, self._batch, weight.numel(), self._rows, self._generator) if keep else None
            self._add_depths(layer, {"input": rows, "weight": weight})
            if layer.weight is None:
                layer.weight = matrix_normal.first_snapshot(weight, full_covariance=self._full_covariance)
            else:
                layer.weight = matrix_normal.update(layer.weight, weight)
        with unseen():
            call = self._sensitivity.see(path, weight, site.x, output, site.rows)
            if output.requires_grad and not output.is_nested:
                to_rows = site.rows  # the site holds x, which need not live until backward
                output.register_hook(lambda g: self._observe_grad(layer, call, picked, known, some, to_rows(g)))

    def _observe_grad(
        self,
        layer: RunningLayerStats,
        call: Call | None,
        picked: torch.Tensor | None,
        known: torch.Tensor | None,
        some: Picked | None,
        grad: torch.Tensor,
    ) -> None:
        """`picked` are the rows taken of the input, `known` their values if few; `some` are whole samples."""
        if in_extra_backward():
            return
        if call is not None:
            self._sensitivity.see_gradient(call, grad)
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            rows = grad.reshape(-1, grad.shape[-1])
            part = rows if picked is None else rows[picked]
            layer.grad_output = self._add(layer.grad_output, part, rows)
            add_tails(layer, "grad_output", part, known)
            add_samples(layer, some, rows)
            self._add_depths(layer, {"grad_output": rows})

    def _picks(self, rows: torch.Tensor) -> torch.Tensor | None:
        return row_picks(rows.shape[0], self._rows, self._generator, rows.device)

    def _add(self, so_far: gaussian.Gaussian | None, part: torch.Tensor, rows: torch.Tensor) -> gaussian.Gaussian:
        batch = gaussian.gaussian_of(part, full_covariance=self._full_covariance, rank=self._rank, whole=rows)
        return batch if so_far is None else gaussian.merge(so_far, batch, rank=self._rank)

    def _add_depths(self, layer: RunningLayerStats, operands: dict[str, torch.Tensor]) -> None:
        for operand, tables in depths_of_rows(operands, self._depth_rows, self._depth_generator).items():
            layer.depths[operand] = merge(layer.depths.get(operand, {}), tables)

    def _restore(self, stats: Stats) -> None:
        like = signature(self._model, like=stats.model)
        refuse(stats, like, full_covariance=self._full_covariance)
        self._names = SiteNames(self._linears, like.traced)
        self._coverage = stats.coverage
        self._sensitivity.loss.restore(stats.not_clicks)
        self._steps, self._sampled = stats.steps, stats.sampled_steps
        for path, layer in stats.layers.items():
            if path in self._linears or path in like.traced:
                self._layers[path] = from_record(layer, device_of(unwrap(self._model)))
                self._sensitivity.restore(path, layer)
