"""A run: the model with what trains it, and what may go on beside its steps.

    for each batch:   callback.before(run)    step    callback.after(run)    log, checkpoint

A callback watches (a Probe), or changes the plan that the model runs (`--auto`). It is called
between steps only, and what it has to remember goes into the run's checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import LokaError, PlanMismatch
from loka.core.exchange import ranks_of
from loka.core.records.plan import Plan
from loka.core.records.row_segments import places_of
from loka.data.batch import ONE_TASK, Batch
from loka.distributed import (
    Choice,
    Fp8AllGather,
    GradientWire,
    choose_gather,
    choose_gradients,
    fp8_all_gather,
    send_gradients,
)
from loka.distributed.dense_sharding import replicated_tables
from loka.distributed.gradient_gate import STEPS
from loka.distributed.tables.sharded_tables import sharded_modules
from loka.nn.fp8_state_dict import carry_over, fp8_state_dict
from loka.nn.fsdp_units import reshard
from loka.nn.site import site_forwards
from loka.planner import convert, revert
from loka.train.ahead import Ahead
from loka.train.average import Weights, averaged_weights, due
from loka.train.checkpointing import state as run_state
from loka.train.checkpointing.checkpoint import Checkpoint, save
from loka.train.checkpointing.identity import plan_identity
from loka.train.checkpointing.resharding import own_state, restore_sharded, tensors_of
from loka.train.checkpointing.sharded import save_sharded
from loka.train.config import TrainConfig
from loka.train.interrupt import Interrupt
from loka.train.optim import build_optimizers
from loka.train.ranks import together
from loka.train.running import RunningTasks
from loka.train.schedule import rate_factor, schedulers
from loka.train.segments import Segments
from loka.train.steps.step import Sight, Step


class Callback:
    """What goes on beside the steps; this class itself does nothing.

    A callback that calls the model between two steps calls `run.close()` first: TorchRec's pipeline has ids of the next
    batch on their way.
    """

    def identity(self) -> dict[str, Any] | None:
        """JSON values that a checkpoint has to share for a run to go on from it; None without any."""
        return None

    def start(self, run: Run) -> None:
        """Called once, before the first step of this process; after `restore`, where there was a checkpoint."""

    def before(self, run: Run) -> Sight:
        """Before each step. Who has to see it."""
        return "none"

    def after(self, run: Run) -> None:
        """Called after each step."""

    def stop(self, run: Run, error: BaseException | None) -> None:
        """Called at the end, also after an error."""

    def state(self) -> dict[str, Any]:
        """What `restore` gets back: plain tensors, numbers and text."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Run:
    """A model on `config.device` with its optimizers, metrics and plan, `step` steps into training."""

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        steps: int,
        segments: Segments | None = None,
        tasks: Sequence[str] = ONE_TASK,
        say: Callable[[object], object] = lambda what: None,
        before: Checkpoint | None = None,
    ) -> None:
        self.device = torch.device(config.device)
        self.model = model.to(self.device)
        self.config = config
        self.steps = steps
        self.step = 0
        self.plan: Plan | None = None
        self.say = say
        self.choices: dict[str, Choice] = {}  # of the ranks together, where the config leaves it to them
        saved = before.state.get("choices", {}) if before else {}
        self._held = {what: Choice(*values) for what, values in saved.items()}
        self.gathering: Fp8AllGather | None = None  # how FSDP2 gathers where the config asks for FP8
        self.segments = segments
        self.optimizers = build_optimizers(model, config)
        self.average = averaged_weights(model, config, steps)
        self._weights = Weights(model)
        self._schedulers = schedulers(self.optimizers, config, steps)
        self.tasks = tuple(tasks)
        self.running = RunningTasks(tasks, self.device, window=config.window, segments=segments)
        self.interrupt = Interrupt()
        self.unused: Callable[[], Iterator[Batch]] = lambda: iter(())  # batches that no step has trained on
        self.save_due = False  # a callback sets it where the next step may not be the same again
        self.coming: Ahead | None = None  # the batches that steps are called with
        self._step: Step | None = None

    @property
    def step_reason(self) -> str | None:
        """Why steps do not run as the config asks."""
        return self._step.reason if self._step else None

    @property
    def exchange(self) -> str | None:
        """How TorchRec exchanges ids and embeddings; None where it does not."""
        return self._step.exchange if self._step else None

    @property
    def replicas(self) -> list[torch.Tensor]:
        """What has to be equal on all ranks, or is one tensor sharded over all of them: what the dense optimizer trains
        (of a model of tables alone, the tables), and tables beside the units of FSDP2.
        """
        optimizer = next(iter(self.optimizers.values()))
        dense = [weight for group in optimizer.param_groups for weight in group["params"]]
        return [*dense, *replicated_tables(self.model)]

    def _stepping(self) -> Step:
        if self._step is None:
            self._step = Step(self.model, self.optimizers, self.config, coming=self.coming)
        return self._step

    def _chosen(self, what: str, choose: Callable[[], Choice]) -> Choice:
        choice = before = self._held.pop(what, None)
        if choice is None or choice.ranks != ranks_of():
            choice = choose()
        if before is not None and choice is not before:
            anew = f"chosen anew: the run began on {before.ranks} ranks, which take other times"
            choice = replace(choice, told=f"{choice}\n{anew}")
        self.choices[what] = choice
        self.say(choice)
        return choice

    def open_wire(self, batches: Iterator[Batch]) -> None:
        """Has gradients travel between ranks as the config says. It is called once, before the first step, which takes
        `batches`; a choice by measurement looks at them and updates nothing. Raises what `choose_gradients` raises.
        A collective.
        """
        codec = self.config.gradients
        if codec == "hp" or self.step == self.steps:
            return
        taken: tuple[str, ...] = (codec,)
        if codec == "auto":
            held = self._held.get("gradients")
            choice = self._chosen("gradients", lambda: self._gate(batches))
            if choice is not held:
                return  # the gate has hooked the model
            taken = choice.taken
        for name in taken:
            send_gradients(self.model, GradientWire(scatter=name, gather=name))

    def _gate(self, batches: Iterator[Batch]) -> Choice:
        some = [batch.to(self.device) for batch in itertools.islice(batches, STEPS)]
        step = self._stepping()
        with step.rehearsing():
            return choose_gradients(self.model, lambda number: step(some[number % len(some)]))

    def learn(self, batch: Batch, *, sight: Sight = "none") -> None:
        """One step on `batch`, which lies on the device."""
        predicted = self._stepping()(batch, sight=sight)
        for scheduler in self._schedulers.values():
            scheduler.step()
        self.running.add(
            predicted.losses, predicted.logits, batch.label, places_of(self.segments, batch) if self.segments else None
        )
        self.step += 1
        if self.average is not None and due(self.step, self.steps, self.config):
            self.average.update_parameters(self._weights)

    @property
    def rate(self) -> float:
        """The dense learning rate of the last step, or that of the tables where nothing else is trained."""
        return float(next(iter(self._schedulers.values())).base_lrs[0]) * self.rate_factor

    @property
    def rate_factor(self) -> float:
        """The learning rate of the last step, as a share of the peak."""
        return rate_factor(max(self.step - 1, 0), self.steps, self.config)

    def adopt(self, plan: Plan | None) -> None:
        """From the next step on the model runs by `plan`, or in high precision where it is None.

        Parameters and optimizers stay the same objects. Sites that run in FP8 before and after keep their
        counts. A collective. Raises as `loka.convert`, after which the model runs in high precision on all ranks.
        """
        before = fp8_state_dict(self.model) if self.plan else None
        self.close()
        if self.config.step != "eager":
            torch._dynamo.reset()  # compiled code of modules that are about to change would be kept for good
        if self.gathering is not None:
            self.gathering.remove()
            self.gathering = None
        if self.plan:
            revert(self.model)
            self.plan = None
        if plan is None:
            return
        self._convert(plan)
        self.plan = plan
        if before:
            carry_over(before, self.model)
        if self.config.gather != "hp":
            units = None
            if self.config.gather == "auto":
                units = self._chosen("gather", lambda: choose_gather(self.model, plan)).taken
            self.gathering = fp8_all_gather(self.model, plan, units=units)
            self.say(self.gathering)

    def _convert(self, plan: Plan) -> None:
        """On all ranks or on none: where one refuses, the others would wait for it in their next collective."""
        refusals: list[LokaError] = []

        def work() -> str:
            try:
                convert(self.model, plan)
            except LokaError as error:
                refusals.append(error)
            return "".join(map(str, refusals))

        try:
            _, messages = together(work)
            if not any(messages):
                return
        except BaseException:
            self._revert()  # another rank raised what is no refusal
            raise
        if refusals and len(set(messages)) == 1:
            raise refusals[0]
        self._revert()
        raise PlanMismatch(
            "some ranks cannot run the plan",
            why=[f"rank {rank}: {why}" for rank, why in enumerate(messages) if why],
            way_out="give all ranks the same model, libraries and kind of GPU",
        )

    def _revert(self) -> None:
        if site_forwards(self.model):  # a plan may have none in FP8
            revert(self.model)

    def save(self, folder: Path, *, beside: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
        """Saves all that a run needs to go on from here, and `beside`. With several ranks, or tables of TorchRec, it
        uses DCP and is a collective.
        """
        reshard(self.model)  # a forward beside the steps leaves FSDP2's root gathered
        what = (self.model, self.optimizers, self.running, self.average, self.plan)
        keep = self.config.keep_checkpoints
        if ranks_of() == 1 and not sharded_modules(self.model):
            state = {**run_state.capture(*what), **beside}
            save(folder, step=self.step, state=state, identity=identity, keep=keep)
            return
        save_sharded(
            folder,
            step=self.step,
            steps=self.steps,
            tensors=tensors_of(self.model, self.optimizers, self.average),
            own={**own_state(*what), **beside, "choices": {n: astuple(c) for n, c in self.choices.items()}},
            identity=identity,
            keep=keep,
        )

    def restore(self, found: Checkpoint, given: Plan | None = None) -> None:
        """Goes on where it was saved, by the plan that ran then: by `given`, where that is the same."""
        saved = run_state.plan_in(found.state)
        same = plan_identity(saved) == plan_identity(given)
        if saved is not None:
            self.adopt(given if same else saved)
        put_back = restore_sharded if found.sharded else run_state.restore
        put_back(found.state, self.model, self.optimizers, self.running, self.average, path=found.path)
        self.step = found.step
        self._schedulers = schedulers(self.optimizers, self.config, self.steps, done=self.step)

    def close(self) -> None:
        """The model runs as it would without a run; the next step makes what it needs anew."""
        if self._step is not None:
            self._step.close()
        self._step = None
