"""From a cold start to FP8 in one run: bf16 while a probe learns, then measure, plan, convert, and on.

    probe      bf16, some steps sampled; ends when the predicted effects on KL/H are narrow and no longer move by
               orders of magnitude, or after its share, with effects of the model as it is by then, from fresh rows
    measure    no steps: errors, and on a GPU times, of every candidate at every site; a plan in the budget
    fp8        by the plan       (bf16, where nothing is worth FP8 or is allowed to be)
    bf16       again, where on a GPU steps by the plan do not turn out faster than those before it (pace.py)

Parameters and optimizers stay the same objects all the way. A checkpoint holds the phase, the statistics so
far and the plan, so a run that is killed goes on in the phase that it was in; a measurement goes on from its
file. Among several ranks rank 0 ends the probe and plans, on the statistics of all; where FSDP2 shards the
model, its weights stay gathered throughout a sampled step, which goes backward twice.
"""

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from loka.core.budget import Budget
from loka.core.device import has_graphs
from loka.core.error import Estimate
from loka.core.exceptions import CheckpointRefused, EffectUnknown, NoKernelFits, PlanMismatch, WrongResults
from loka.core.exchange import rank_of, ranks_of
from loka.core.numerics.effect import NO_PROMISE
from loka.core.progress import Track
from loka.core.records.drift import effects_of
from loka.core.records.plan import Plan
from loka.core.records.report import HP
from loka.core.records.stats import Stats
from loka.core.records.stats_bytes import from_bytes, to_bytes
from loka.core.storage.codec import decode, encode
from loka.core.storage.files import require_writable
from loka.measurement import measure
from loka.nn.fsdp_units import gathered_throughout
from loka.nn.unwrap import unwrap
from loka.planner import agree
from loka.planner import plan as plan_report
from loka.probe import Probe
from loka.probe.merging import gather_renewed
from loka.train.automatic.as_it_is import as_they_are, relative_width
from loka.train.automatic.config import AutoConfig
from loka.train.automatic.looks import Look, look_at, next_look, renewed
from loka.train.automatic.pace import KEPT, SETTLED, Pace, gain, pace_on, worth_it
from loka.train.automatic.timeline import Event, Timeline
from loka.train.ranks import all_or_none, by_the_first, first_rank, together
from loka.train.run import Callback, Run
from loka.train.steps.blocks import left_as_written
from loka.train.steps.step import Sight

Phase = Literal["probe", "measure", "fp8", "bf16"]

NE_ALLOWED = 2e-4
_CANNOT_RUN = (EffectUnknown, NoKernelFits, PlanMismatch, WrongResults)  # a plan; bf16 goes on
_RESTLESS = 10.0  # times the estimate; 1.5 to 3 in a model that settles, 1e10 in one that had collapsed (docs/log.md)
# What regions join and torch brings. Of all that there is a cold H200 timed one layer of 18 in the minute.
_WITHIN_A_MINUTE = ("torch:rowwise_e4m3_pow2", "torch_fast:rowwise_e4m3_pow2", "torch_fast:tensorwise_e4m3")
_LOOK_EVERY = 25  # steps between two looks at how narrow the effects are


class Auto(Callback):
    """See the module's text. To be given to `train` as its callback, with the model as it is.

    Args:
        config: what to do when.
        folder: for stats/, report.json, plan.json and timeline.json; None keeps all in memory.
        track: progress of measuring.
        say: receives a line at each turn of the run.

    `phase`, `timeline` and `plan` (None before it is made) can be read at any time.
    """

    def __init__(
        self,
        config: AutoConfig | None = None,
        *,
        folder: Path | str | None = None,
        track: Track | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        folder = Path(folder) if folder else None
        self.config = config or AutoConfig()
        self.phase: Phase = "probe"
        self.plan: Plan | None = None
        self.timeline = Timeline(file=self._timeline_file(folder))
        self._folder, self._track = folder, track
        self._say = say or (lambda text: None)
        self._probe: Probe | None = None
        self._stats: Stats | None = None
        self._unseen = False  # whether a step was sampled since effects were last asked how narrow they are
        self._least = 0  # steps of the probe's phase, once it was found too early to end it
        self._looks: list[Look] = []  # each at twice the steps of the one before
        self._step = ExitStack()  # open during a sampled step, in which FSDP2 keeps weights gathered
        self._pace: Pace | None = None
        self._in_bf16: Estimate | None = None  # milliseconds of a step before the plan
        self._verdict_at = 0  # the step at which to judge the plan; 0: never, or done
        self._verdict = ""

    def identity(self) -> dict[str, Any]:
        config = self.config
        return {
            "auto": {
                "every": config.every,
                "least_steps": config.least_steps,
                "most_steps": config.most_steps,
                "width": config.width,
                "budget": encode(config.budget) if config.budget else None,
                "candidates": list(config.candidates) if config.candidates else None,
                "settings": encode(config.settings),
            }
        }

    def start(self, run: Run) -> None:
        """Raises NotWritten where `folder` takes no file: before the phases whose results it is to hold."""
        folder = self._folder
        if folder is not None and run.step < run.steps:
            all_or_none(lambda: require_writable(folder) if first_rank() else None)
        if not self.timeline.events:
            self.timeline = Timeline(file=self._timeline_file(self._folder))
            self._begin("probe", run)
        if self.phase == "probe":
            self._watch(run, self._stats)
        self.plan = run.plan
        self._pace = pace_on(run.device) if self.phase in ("probe", "measure") or self._verdict_at else None
        if self._verdict_at:  # the steps so far were another process's
            self._verdict_at = run.step + SETTLED + KEPT if self._pace else 0

    def _watch(self, run: Run, stats: Stats | None) -> None:
        self._probe = Probe(
            run.model,
            every=self.config.every,
            overhead=self.config.overhead,
            base_rate=self.config.base_rate,
            logits=as_they_are,
            seed=rank_of(),
            resume=stats,
        ).__enter__()

    def before(self, run: Run) -> Sight:
        if self.phase == "measure":
            self._turn_to_fp8(run)
        sampled = self._probe is not None and self._probe.next_step()
        if self._pace is not None:
            self._pace.step(counts=not sampled)
        if sampled:
            self._unseen = True
            self._step.enter_context(gathered_throughout(run.model))
            return "hooks"
        return "none"

    def after(self, run: Run) -> None:
        self._step.close()
        if self.phase == "probe" and self._enough(run):
            self._end_probe(run)
        elif self.phase == "probe" and run.step == next_look(self._looks, self._half(run)):
            assert self._probe is not None
            if run.exchange is not None:
                run.close()  # TorchRec's pipeline has the ids of its next batch under way
            found = self._renewed(run, self._probe.stats(), until=run.step, say=lambda text: None)
            self._looks = [*self._looks[-1:], look_at(found)]
        elif self._verdict_at and run.step >= self._verdict_at:
            self._reach_verdict(run)

    def stop(self, run: Run, error: BaseException | None) -> None:
        self._step.close()
        if self._probe is not None:
            self._probe.__exit__(type(error) if error else None, error, None)
            self._probe = None
        if error is None:
            planned = self.phase in ("fp8", "bf16")
            self._begin("end", run, note=self._verdict if planned else "no plan was made: all in bf16")

    def state(self) -> dict[str, Any]:
        stats = self._probe.stats() if self._probe else self._stats if self.phase == "measure" else None
        return {
            "phase": self.phase,
            "least": self._least,
            "unseen": self._unseen,
            "looks": json.dumps(encode(self._looks)),
            "stats": torch.frombuffer(bytearray(to_bytes(stats)), dtype=torch.uint8) if stats else None,
            "timeline": json.dumps(encode(self.timeline.events)),
            "seconds": self.timeline.seconds,
            "pace": json.dumps(encode((self._in_bf16, self._verdict_at, self._verdict))),
            "ranks": ranks_of(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.phase, self._least, self._unseen = state["phase"], state.get("least", 0), state.get("unseen", True)
        self._looks = list(decode(tuple[Look, ...], json.loads(state.get("looks", "[]")), at="looks"))
        in_bf16, self._verdict_at, self._verdict = json.loads(state.get("pace", '[null, 0, ""]'))
        as_then = state.get("ranks") == ranks_of()  # else a step has other rows
        self._in_bf16 = decode(Estimate | None, in_bf16, at="pace") if as_then else None
        if state["stats"] is not None:
            if (before := state.get("ranks", ranks_of())) != ranks_of():
                raise CheckpointRefused(
                    f"the probe of {before} ranks is under way, and {ranks_of()} are here",
                    why=["each has statistics of its own rows"],
                    way_out=f"go on with {before} until they are merged, at the end of the probe",
                )
            self._stats = from_bytes(state["stats"].numpy().tobytes())
        events = decode(tuple[Event, ...], json.loads(state["timeline"]), at="timeline")
        self.timeline = Timeline(events, seconds=state["seconds"], file=self._timeline_file(self._folder))

    def _enough(self, run: Run) -> bool:
        if run.step >= self._most(run):
            return True
        if run.step < max(self._least_steps(run), self._least) or run.step % _LOOK_EVERY:
            return False
        looks, self._unseen = self._unseen, False
        _, narrow = together(lambda: looks and first_rank() and self._narrow())
        return narrow[0] == str(True)

    def _least_steps(self, run: Run) -> int:
        return self.config.least_steps or max(int(run.steps * run.config.warmup), 100)

    def _half(self, run: Run) -> int:
        """Half of the way to the step at which the probe may end first."""
        return max(min(self._least_steps(run), self._most(run)) // 2, 1)

    def _most(self, run: Run) -> int:
        return self.config.most_steps or max(run.steps // 5, 1)

    def _narrow(self) -> bool:
        assert self._probe is not None
        return (relative_width(self._probe.stats()) or math.inf) <= self.config.width

    def _end_probe(self, run: Run) -> None:
        assert self._probe is not None
        stats = self._probe.stats()
        self._probe.__exit__(None, None, None)
        self._probe = None
        self._in_bf16 = self._pace.read() if self._pace else None
        run.close()  # compiled code and graphs of bf16 are of no more use
        # Beyond twice the steps so far nobody knows how a model moves.
        until = min(run.steps, 2 * run.step)
        merged = gather_renewed(stats, lambda own: self._renewed(run, own, until=until, say=self._tell))
        merged = replace(merged, final_rate=run.rate_factor)
        vague = ", ".join(name for name, p in merged.parts.items() if not p.unknown and p.width > p.allowed)
        width = relative_width(merged)
        said = f"effects on KL/H known to a factor of {width:.2f}" if width else "no effect on KL/H known"
        said = f"{stats.sampled_steps} of {stats.steps} steps sampled, {said}"
        self._tell(f"step {run.step}: probed: {said}")
        if (vague or (width or 0.0) > _RESTLESS) and run.step < self._most(run):
            self._least = min(2 * run.step, self._most(run))
            self._tell(f"{vague or 'the model'} not known well enough for a plan: probing to step {self._least}")
            self._looks = [*self._looks[-1:], look_at(replace(merged, steps=stats.steps))]
            self._watch(run, stats)
            return
        together(lambda: self._save(merged))
        self._stats = merged
        self.phase = "measure"
        run.save_due = True  # a run killed while measuring need not probe again
        self._begin("measure", run, note=said)

    def _renewed(self, run: Run, stats: Stats, *, until: int, say: Callable[[str], None]) -> Stats:
        given: dict[str, Any] = {"until": until, "base_rate": self.config.base_rate, "say": say}
        with gathered_throughout(run.model):
            return all_or_none(lambda: renewed(run, stats, self._looks, **given))

    def _turn_to_fp8(self, run: Run) -> None:
        assert self._stats is not None
        run.close()  # compiled code and graphs of bf16 make room
        gc.collect()
        devices = [run.device] if run.device.type == "cuda" else []
        torch.cuda.empty_cache()  # nothing where there is no CUDA
        with torch.random.fork_rng(devices):
            decided = json.loads(by_the_first(lambda alive: self._decide(run, alive), idle=run.interrupt.check))
        refused, self.plan = decided.get("refused"), None
        if refused is None:
            self.plan = Plan.from_json(decided["plan"])
            refused = self._adopted(run)
        if refused is not None:
            self.phase, note = "bf16", f"stays in bf16: {refused}"
        else:
            assert self.plan is not None
            self.phase, note = ("fp8" if run.plan else "bf16"), self.plan.summary()
            if self.phase == "fp8" and self._pace:
                self._verdict_at = run.step + SETTLED + KEPT
        self._stats, self._looks = None, []
        run.save_due = True
        self._tell(f"step {run.step}: {note}")
        self._begin(self.phase, run, note=note)

    def _decide(self, run: Run, alive: Callable[[], object]) -> str:
        try:
            return json.dumps({"plan": self._planned(run, alive).to_json()}, allow_nan=False)
        except _CANNOT_RUN as error:
            return json.dumps({"refused": str(error)})

    def _planned(self, run: Run, alive: Callable[[], object]) -> Plan:
        assert self._stats is not None
        if not has_graphs(run.device):
            self._tell("nothing is timed on a CPU: the plan goes by errors alone, and no speed is claimed")
        config, folder = self.config, self._folder
        report = measure(
            self._stats,
            device=run.device,
            candidates=config.candidates or (_WITHIN_A_MINUTE if has_graphs(run.device) else None),
            settings=config.settings,
            out=folder / "report.json" if folder else None,
            cache=config.cache,
            time_limit=config.measure_seconds,
            track=self._tracked(run, alive),
        )
        if has_graphs(run.device) and not report.timed:  # a plan would go by errors, and may be slower
            raise NoKernelFits("nothing was timed", why=report.notes, way_out="a larger measure_seconds, or a cache")
        budget = config.budget or self._default_budget()
        if run.config.step == "eager" or left_as_written(unwrap(run.model)):  # by themselves: by sites' own times
            budget = replace(budget, regions=False)
        decided = plan_report(report, budget)
        if folder:
            decided.save(folder / "plan.json")
        return decided

    def _adopted(self, run: Run) -> str | None:
        """Why the ranks, all or none, do not run by the plan; None where they do."""
        assert self.plan is not None
        try:
            agree(self.plan)  # whether every rank is a machine that it was made for
            if any(d.candidate != HP for d in self.plan.decisions.values()):
                run.adopt(self.plan)
        except _CANNOT_RUN as error:
            if run.plan:
                run.adopt(None)
            return str(error)
        return None

    def _reach_verdict(self, run: Run) -> None:
        """Goes back to bf16 where steps by the plan are not faster, by the times that rank 0 takes."""
        self._verdict_at = 0
        assert self.plan is not None
        assert self._pace is not None
        before, now, least = self._in_bf16, self._pace.read(), self.plan.budget.min_speedup
        self._pace = None
        stays, text = True, ""
        if before and now:
            gained = gain(before, now)
            stays = worth_it(gained, least)
            text = f"a step takes {now.value:.3g} ms by the plan, {before.value:.3g} before: {gained.shown('.3f', 'x')}"
        _, said = together(lambda: json.dumps([stays, text]))
        stays, self._verdict = json.loads(said[0])
        if stays:
            self._tell(f"step {run.step}: {self._verdict or 'too few steps were timed to tell what the plan gains'}")
            return
        run.adopt(None)
        self.phase, self.plan, run.save_due = "bf16", None, True
        self._tell(f"step {run.step}: back in bf16: {self._verdict}")
        self._begin("bf16", run, note=f"back from the plan: {self._verdict}")
        self._verdict = ""

    def _save(self, stats: Stats) -> None:
        if self._folder is not None and first_rank():
            stats.save(self._folder / "stats")

    def _default_budget(self) -> Budget:
        assert self._stats is not None
        known = any(effects_of(self._stats).values())
        reasons = dict.fromkeys(layer.no_effect for layer in self._stats.layers.values() if layer.no_effect)
        if known or any(reason.startswith(NO_PROMISE) for reason in reasons):
            return Budget(ne=NE_ALLOWED)  # what is refused stays in high precision
        self._tell(f"nothing limits KL/H, of which no effect is known: {'; '.join([*reasons][:2]) or 'no step told'}")
        return Budget()

    def _tracked(self, run: Run, alive: Callable[[], object]) -> Track:
        """A progress display that lets Ctrl-C through. Ctrl-C is otherwise deferred to the end of a step, and measuring
        is work between two steps.
        """

        def track(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
            for item in self._track(items, description, total) if self._track else items:
                run.interrupt.check()
                alive()
                yield item

        return track

    def _begin(self, phase: str, run: Run, *, note: str = "") -> None:
        self.timeline.begin(phase, step=run.step, rows=run.running.rows, device=run.device, note=note)

    def _tell(self, text: str) -> None:
        if first_rank():
            self._say(text)

    @staticmethod
    def _timeline_file(folder: Path | None) -> Path | None:
        return folder / "timeline.json" if folder is not None and first_rank() else None
