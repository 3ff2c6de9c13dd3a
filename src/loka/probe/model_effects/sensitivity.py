"""What quantizing each site would cost the model in KL/H, from one extra backward pass on a sampled step.

    v     = sum_it eps_it sqrt(p_it (1 - p_it)) z_it        z logits [B, T], eps random signs
    g_i   = dv / dY_i                                       at every linear layer's output, at once
    s_ir  = sum over the rows and calls of sample i of g_i . dY_ir        dY_ir: error by recipe r
    term  = 1/2 s_ir^2,     E_eps[s_ir^2] = sum_t p_it (1 - p_it) (J_it . dY_ir)^2   (core/numerics/effect.py)

The signs make the tasks' cross terms vanish in the mean, so several tasks cost one backward. dY is
the actual error of the sampled rows: both operands are quantized as the recipe does, with scales of
the whole tensor where it has such, and g . dY = (g W^) . (x^ - x) + (g (W^ - W)) . x avoids the
difference of two outputs. A sampled forward sees its rows before the optimizer learns from them, so
rows are always probed before they are trained on; on rows seen before the loss is lower and less
sensitive, and predictions come out too small.

The pass goes from the logits to the outputs of linear layers only: no `.grad` is touched, weights'
gradients are not computed, nothing of DistributedDataParallel is woken. A model with backward hooks on
modules, or whose forward puts hooks on tensors (probe/tensor_hooks.py), is left alone. What else of a
program runs in a backward runs in this one too, and nothing shows whether it keeps state: `backward` of an
autograd.Function and hooks on its ctx, a checkpointed function, what unpacks saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from loka.core.numerics.effect import OLD, Effect
from loka.core.numerics.label_rate import Shares, task_rates
from loka.core.records.stats import LinearStats
from loka.probe.extra_backward import extra_backward, in_extra_backward
from loka.probe.model_effects.calls import Call, Found, Sink, Step, changes_at, reason_of, refuse_freed, step_seed
from loka.probe.model_effects.click_loss import ClickLoss
from loka.probe.model_effects.error_projection import effects_of
from loka.probe.model_effects.known import Known, joined_samples
from loka.probe.model_effects.logits import Logits, NoEffect, called_logits, finite, logits_of, refuse
from loka.probe.model_effects.promise import refuse_saturated
from loka.probe.model_effects.sample_rows import ROWS_MIX, RowsMix, batch_of
from loka.probe.model_effects.untouched import batch_norms, buffers_kept
from loka.probe.tensor_hooks import TensorHooks
from loka.probe.trace import unseen
from loka.statistics.effect_casts import CASTS
from loka.statistics.effect_depths import NOTHING, Learnt, Tables, merge_tables, tables_of

_UNREACHED = "no gradient of these logits reaches its output"


class Sensitivity:
    """The effects of every site over the sampled steps.

    What a model is sensitive to moves until late in training, so old samples fade: the weights of
    all sum up to `samples` at most, and those of a step are the latest one's times a constant for
    each step since. A step that says nothing of a site takes away what its samples would have replaced,
    so effects that no step refreshes go, and `of` says why they are old. A site whose gradient is 0 in all
    steps is not reached, and has no effect; where it is 0 in some, as at a dead ReLU, those count as zeros (but
    zeros of before the first other step are in no record). No randomness is carried
    from step to step: a run that goes on from its record learns what it would have learnt uninterrupted.

    Args:
        samples: 0 turns it off.
        per_step: samples of a batch used in one step.
        logits: what takes the model's output to logits; by default the output is taken as it is.
        base_rate: share of positive labels, of several tasks one for each, whose entropy is then H; else
            that of the mean prediction, which is off where the model is not calibrated. With it, a model
            whose output shows no logits falls back to the empirical Fisher: the gradient of training times
            the batch size in place of g. It assumes a loss that is an unscaled mean over the batch.
        seed: of samples and signs.
        sink: receives what each step finds, in place of the effects over the steps.
        by_task: beside the pass of all logits one for each, for the sink.
        chosen: the samples of every batch; by default they are drawn.
        learnt: what all rows so far tell of a site's input, its calls in this step included.
        shows: whether the model's output is known to show logits.
    """

    def __init__(
        self,
        *,
        samples: int,
        per_step: int,
        logits: Logits | None,
        base_rate: Shares | None,
        seed: int,
        sink: Sink | None = None,
        by_task: bool = False,
        chosen: torch.Tensor | None = None,
        learnt: Callable[[str], Learnt] = lambda path: NOTHING,
        shows: bool = False,
    ) -> None:
        self._samples, self._per_step, self._seed = samples, per_step, seed
        self._logits, self._base_rate = logits, base_rate
        self._sink, self._by_task, self._chosen = sink, by_task, chosen
        self._learnt, self._shows = learnt, shows
        self._generator = torch.Generator()
        self._calls: list[tuple[Call, GradientEdge]] = []
        self._step, self._shown = Step(), False  # whether the output ever showed logits
        self._waiting: list[Step] = []  # with gradients of training that are not noted yet
        self._known: dict[str, Known] = {}
        self._reasons: dict[str, str] = {}
        self._missed: dict[str, str] = {}  # why the latest step says nothing, by path
        self.mixing: dict[str, str] = {}  # of sites whose rows mixed samples in some step, what was seen then
        self._restored: set[str] = set()  # whose effects are the record's alone, such as of eval mode
        self.loss, self.hooks = ClickLoss(), TensorHooks()
        self.size = 0  # rows of logits

    def begin(self, arguments: Any, *, step: int) -> None:
        self._flush()
        self._generator.manual_seed(step_seed(self._seed, step))
        self.forget()
        self.size = 0
        self._step = Step(batch_of(arguments))

    def see(
        self,
        path: str,
        weight: torch.Tensor,
        given: torch.Tensor,
        output: torch.Tensor,
        rows: Callable[[torch.Tensor], torch.Tensor],
    ) -> Call | None:
        """A site was called. Keeps what the step keeps anyway, and no copy.

        Returns what `see_gradient` may want later.
        """
        if not self._samples:
            return None
        if not output.requires_grad:
            self._missed[path] = "no gradient flows through its output (frozen, or in a reentrant checkpoint)"
            return None
        if output.is_nested:
            self._missed[path] = "its input is a nested tensor, whose rows are of no known sample"
            return None
        call = Call(path, weight.detach(), given.detach(), given._version, output.dtype, rows, self._step)
        # The edge is of this value, whatever is done to the tensor in place later. It is not part of
        # the call, which a hook on the same node may hold: nobody would ever free such a circle.
        self._calls.append((call, get_gradient_edge(output)))
        return call if self._base_rate is not None and not self._shown else None

    def forget(self) -> None:
        """The forward pass failed, or nobody watches it any more: lets go of inputs and graph."""
        self._calls = []
        self.hooks.forget()

    def finish(self, model: nn.Module, output: Any) -> None:
        """The forward pass is over: the extra backward, and the effects. Never raises an Exception.

        `model` is the one that is called, with its wrappers: they may have freed weights by now.
        """
        seen, self._calls = self._calls, []
        if not seen:
            self.forget()
            return
        calls, edges = [call for call, _ in seen], [edge for _, edge in seen]
        try:
            try:
                z = logits_of(output, self._logits, shown=self._shows)
            except NoEffect as reason:
                self._step.picks = self._fall_back(str(reason))
                return
            self._shown, self.size = True, z.shape[0]
            if self._base_rate is not None:
                task_rates(self._base_rate, z.shape[1])
            refuse(model)
            if hook := self.hooks.would_call(z):
                raise NoEffect(hook)
            refuse_freed(calls)
            picks = finite(self._pick(z.shape[0]), z)
            if self._chosen is None:
                refuse_saturated(z.detach()[picks.to(z.device)])
            signed, p = self._signed(z, picks)
            grads = self._backward(model, z, picks, edges, signed)
            if self._logits is None and self._sink is None:
                self.loss.watch(called_logits(output), z, unless=in_extra_backward)
        except Exception as error:  # user code runs in the pass, and training goes on without it
            self._drop(calls, reason_of(error))
            return
        finally:
            self.hooks.forget()  # whose nodes keep what their backward needs
        reached = {call.path for call, grad in zip(calls, grads, strict=True) if grad is not None}
        self._drop([call for call in calls if call.path not in reached], _UNREACHED)
        found: dict[str, tuple[torch.Tensor, Tables]] = {}
        mixing = batch_norms(model)
        for call, grad in zip(calls, grads, strict=True):
            if grad is not None:
                self._add(found, call, grad, picks, z.shape[0], mixing=mixing)
        if self._sink is None:
            self._note(found, p, signed, self._step.reached())
            return
        tasks = range(z.shape[1]) if self._by_task and z.shape[1] > 1 else ()
        alone = [self._of_task(task, model, z, picks, calls, edges, signed) for task in tasks]
        unreached = {path: found.pop(path)[0] for path in found.keys() - self._step.reached()}
        self._missed |= dict.fromkeys(unreached, _UNREACHED)
        self._sink(Found(found, picks, z.detach()[picks.to(z.device)], signed, alone, unreached))

    def _of_task(
        self,
        task: int,
        model: nn.Module,
        z: torch.Tensor,
        picks: torch.Tensor,
        calls: Sequence[Call],
        edges: Sequence[GradientEdge],
        signed: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """s [m, recipes] of one task's logit, by site; NaN where it does not tell."""
        only = torch.zeros_like(signed)
        only[:, task] = signed[:, task]
        found: dict[str, torch.Tensor] = {}
        for call, grad in zip(calls, self._backward(model, z, picks, edges, only), strict=True):
            if grad is None:  # another task's tower
                changes = torch.zeros(len(picks), len(CASTS), device=z.device)
            else:
                try:
                    learnt = self._learnt_at(call.path)
                    changes, _ = changes_at(call, grad, picks, z.shape[0], self._generator, tables=False, learnt=learnt)
                except NoEffect:
                    changes = torch.full((len(picks), len(CASTS)), torch.nan, device=z.device)
            found[call.path] = found[call.path] + changes if call.path in found else changes
        return found

    def see_gradient(self, call: Call, grad: torch.Tensor) -> None:
        """Training's gradient at an output, where the model's output shows no logits."""
        step = call.step
        if step.picks is not None:
            if step not in self._waiting:
                self._waiting.append(step)
            grad = grad.detach().float() * step.batch
            self._add(step.pending, call, grad, step.picks, step.batch, of_all=True)

    def missed(self) -> dict[str, str]:
        """Why the latest step says nothing, by site."""
        return dict(self._missed)

    def restore(self, path: str, layer: LinearStats) -> None:
        if layer.effects:
            reached = any(effect.total for effect in layer.effects.values())  # of before, all 0 meant unreached too
            self._known[path] = Known(dict(layer.effects), tables_of(layer), reached)
            self._restored.add(path)
        if layer.no_effect:
            self._reasons[path] = layer.no_effect.removeprefix(OLD)
        if self._reasons.get(path, "").startswith(ROWS_MIX):
            self.mixing[path] = self._reasons[path]

    def of(self, path: str) -> tuple[dict[str, Effect], Tables, str]:
        """The effects of a site by recipe name, its histograms, and why there are none, or old ones."""
        self._flush()
        known, reason = self._known.get(path), self._reasons.get(path, "")
        if known is None or not known.reached:
            return {}, {}, reason or ("" if known is None else _UNREACHED)
        return known.effects, known.tables, OLD + reason if reason else ""

    def _fall_back(self, reason: str) -> torch.Tensor:
        if self._base_rate is None:
            raise NoEffect(reason)
        if not self._step.batch:
            unknown = "the first sides of the model's arguments do not tell the size of the batch"
            raise NoEffect(f"{reason}; and {unknown}")
        return self._pick(self._step.batch)

    def _pick(self, batch: int) -> torch.Tensor:
        """Never the whole batch: rows of other samples, whose gradient is 0, show how rows lie."""
        if self._chosen is not None:
            return self._chosen
        if batch < 2:
            raise NoEffect("a batch of one row does not show which rows are of which sample")
        count = min(self._per_step, batch - 1)
        return torch.randperm(batch, generator=self._generator, device="cpu")[:count].sort().values

    def _signed(self, z: torch.Tensor, picks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """eps sqrt(p (1 - p)) and p [m, T] of the picked samples."""
        signs = torch.randint(2, (len(picks), z.shape[1]), generator=self._generator, device="cpu").mul_(2).sub_(1)
        p = z.detach()[picks.to(z.device)].sigmoid()
        return signs.to(z.device) * (p * (1 - p)).sqrt(), p

    def _backward(
        self,
        model: nn.Module,
        z: torch.Tensor,
        picks: torch.Tensor,
        edges: Sequence[GradientEdge],
        signed: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients at `edges` of the picked samples' logits [m, T], weighted by `signed`."""
        weight = torch.zeros_like(z)
        weight[picks.to(z.device)] = signed
        devices = [z.device] if z.device.type == "cuda" else []
        # A checkpoint may draw, and move the buffers of a BatchNorm, when it recomputes.
        with unseen(), buffers_kept(model), torch.random.fork_rng(devices=devices):
            return extra_backward(z, edges, weight)

    def _add(
        self,
        found: dict[str, tuple[torch.Tensor, Tables]],
        call: Call,
        grad: torch.Tensor,
        picks: torch.Tensor,
        batch: int,
        *,
        of_all: bool = False,
        mixing: str = "",
    ) -> None:
        """Adds s [m, recipes] of this call to those of earlier calls of the layer in this step.

        `mixing` says what in the model mixes the rows of samples.
        """
        try:
            tell = self._chosen is None  # histograms are of the sample of all rows
            learnt = self._learnt_at(call.path)
            changes, tables = changes_at(
                call, grad, picks, batch, self._generator, of_all=of_all, tables=tell, learnt=learnt
            )
        except Exception as error:  # out of memory, say; the step itself is whole
            if isinstance(error, RowsMix):
                self._mixes(call.path, reason_of(error) + mixing)
            self._drop([call], self.mixing.get(call.path, reason_of(error)))
            found.pop(call.path, None)
            return
        if call.path in found:
            changes, tables = found[call.path][0] + changes, merge_tables(found[call.path][1], tables)
        found[call.path] = changes, tables

    def _learnt_at(self, path: str) -> Learnt:
        """With the hot columns of the steps before."""
        learnt, known = self._learnt(path), self._known.get(path)
        return learnt if known is None else replace(learnt, tables=known.tables)

    def _flush(self) -> None:
        """Notes what waited for gradients of training, and lets effects of sites that a step missed fade."""
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            if step.picks is not None and self._base_rate is not None:
                pending, step.pending = step.pending, {}
                tasks = len(self._base_rate) if isinstance(self._base_rate, Sequence) else 1
                self._note(pending, torch.empty(len(step.picks), tasks, device="cpu"), None, step.reached())
        missed, self._missed = self._missed, {}
        self._reasons |= missed
        for path in missed.keys() & self._known.keys():
            # What a step would have pushed out goes: a model that no longer shows its effects has none.
            left = self._known[path].count - self._per_step
            if left > 0:
                self._known[path] = self._known[path].faded(left / self._known[path].count)
            else:
                del self._known[path]

    def _note(
        self,
        found: Mapping[str, tuple[torch.Tensor, Tables]],
        predicted: torch.Tensor,
        signed: torch.Tensor | None,
        reached: Collection[str],
    ) -> None:
        """Effects of s [m, recipes]. `signed` [m, T] takes the signs out: E[signed s] = p (1 - p) J . dY."""
        if self._base_rate is not None:
            shares = task_rates(self._base_rate, predicted.shape[1]).shares
            predicted = torch.tensor(shares, dtype=torch.float64, device="cpu").expand(predicted.shape)
        known = effects_of([changes for changes, _ in found.values()], predicted, signed)
        for (path, (_, tables)), effects in zip(found.items(), known, strict=True):
            fresh = Known(dict(zip(CASTS, effects, strict=True)), tables, path in reached)
            if path in self.mixing:
                self._missed[path] = self.mixing[path]
            elif fresh.count:
                self._restored.discard(path)
                self._known[path] = joined_samples(self._known.get(path), fresh, self._samples)
                self._reasons.pop(path, None)
                self._missed.pop(path, None)
            else:
                self._missed[path] = "its effect is finite on no sample"

    def _mixes(self, path: str, reason: str) -> None:
        """The rows of a site mix samples, also in steps whose picks hide that, such as all but one of the batch."""
        self.mixing[path] = reason
        if path not in self._restored:
            self._known.pop(path, None)

    def _drop(self, calls: Sequence[Call], reason: str) -> None:
        for call in calls:
            self._missed[call.path] = reason
