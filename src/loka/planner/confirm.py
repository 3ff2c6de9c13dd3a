"""Checks whether the whole model is faster by its plan. `measure` only times single layers, each with the code around
it.

    hp      the model as it is                                     1
    all     by the plan                                            step time of hp / step time
    half    by the plan, without the half of its layers that it says gain least; then without half of those, ...

Around a layer the compiler may do more in the whole model than in the piece that was timed: fuse a copy, or read a
tensor once for two readers. The plan that comes back is the fastest of these, or hp everywhere.
"""

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from loka.core.compiling import allow_programs
from loka.core.device import peak_of
from loka.core.error import Estimate
from loka.core.exceptions import LokaError, first_line, truncated
from loka.core.records.plan import Decision, Plan
from loka.core.records.report import HP
from loka.core.table import format_table
from loka.core.timing import still_usable, time_interleaved
from loka.nn.copying import private_copy, read_of
from loka.nn.site import site_forwards
from loka.nn.unwrap import device_of
from loka.planner.convert import check, convert, fp8_layers

_ARMS = 4  # each is compiled anew
_ROUNDS = 21


@dataclass(frozen=True, kw_only=True)
class Arm:
    """The model with these layers by the plan: how many times faster a step is than in high precision, or why that is
    not known.

    Attributes:
        memory: what a step takes at its peak, beside what is there between steps, over the same in high precision.
    """

    layers: tuple[str, ...]
    speedup: Estimate | None = None
    microseconds: Estimate | None = None
    memory: float | None = None
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Confirmed:
    """`plan` runs in eight bits what turned out fastest in the whole model; `arms` are the versions that were raced."""

    plan: Plan
    arms: tuple[Arm, ...]

    def __str__(self) -> str:
        rows = [
            (
                str(len(arm.layers)),
                f"{arm.microseconds.value:.1f}" if arm.microseconds else "-",
                arm.speedup.shown(".3f", "x") if arm.speedup else "-",
                f"{arm.memory:.2f}" if arm.memory is not None else "-",
                arm.failure,
            )
            for arm in self.arms
        ]
        left = len(fp8_layers(self.plan))
        header = ("layers by the plan", "us a step", "over high precision", "peak memory of a step", "why not")
        table = format_table(header, rows)
        return f"{table}\n{left} layers run by the plan that is left"


def confirm(
    model: nn.Module,
    plan: Plan,
    step: Callable[[Any], object],
    *,
    compile: Callable[[nn.Module], Any] = torch.compile,
    rounds: int = _ROUNDS,
    on_arm: Callable[[Arm], None] | None = None,
) -> Confirmed:
    """Races whole steps by `plan` against steps in high precision, compiled, in CUDA graphs, in turns, and measures the
    memory of one of each, by which the device's peak statistics start anew.

    Args:
        model: on the device to train or serve on, not converted. It is copied, once for each arm, and stays as it is.
        step: runs one step of what it is given, on tensors that are there already, such as
            `lambda model: loss(model(x), y).backward()`. Gradients are let go before each.
        compile: what the user compiles with, for high precision too.
        rounds: of the race of each arm.
        on_arm: told each arm when it has been raced.

    Raises:
        PlanMismatch, NoKernelFits, WrongResults: as `convert` does.
        LokaError: the model is converted, on no CUDA device, cannot be copied, or is read by its copy; the plan runs
            nothing in eight bits; the step in high precision cannot be captured.
    """
    check(model, plan)
    device = device_of(model)
    layers = _by_promise(plan)
    if site_forwards(model):
        raise LokaError("this model runs by a plan already", way_out="loka.revert(model) first")
    if not layers:
        raise LokaError("this plan runs nothing in eight bits", way_out="there is nothing to confirm")
    if device.type != "cuda":
        raise LokaError(f"steps are timed in CUDA graphs, and the model is on {device}", way_out="model.to('cuda')")
    allow_programs(2 * _ARMS)
    base = _ready(_copy(model, step), step, compile)
    arms: list[Arm] = []
    while layers and len(arms) < _ARMS:
        arm = _raced(
            model, without(plan, fp8_layers(plan).keys() - set(layers), ""), layers, base, step, compile, rounds
        )
        arms.append(arm)
        if on_arm is not None:
            on_arm(arm)
        best = _fastest(arms)
        if best is not None and best is not arm:
            break
        layers = layers[: len(layers) // 2]
    chosen = _fastest(arms)
    kept = set(chosen.layers if chosen else ())
    return Confirmed(plan=_confirmed(plan, kept, arms), arms=tuple(arms))


def without(plan: Plan, layers: Collection[str], reason: str) -> Plan:
    """The plan with these layers in high precision, for a reason."""
    decisions = {
        site: _in_hp(decision, reason) if decision.path in layers and decision.candidate != HP else decision
        for site, decision in plan.decisions.items()
    }
    return replace(
        plan,
        decisions=decisions,
        centres={path: means for path, means in plan.centres.items() if path not in layers},
        hot_columns={path: columns for path, columns in plan.hot_columns.items() if path not in layers},
    )


def _in_hp(decision: Decision, reason: str) -> Decision:
    return replace(
        decision,
        candidate=HP,
        reason=reason,
        sqnr_db=None,
        mere=None,
        kl=None,
        kl_by_part={},
        microseconds=decision.hp_microseconds,
        speedup=None,
        saved_us=0.0,
        runner_up=decision.candidate,
        rejected={**decision.rejected, decision.candidate: reason},
    )


def _by_promise(plan: Plan) -> tuple[str, ...]:
    """The layers with eight bits, ordered by the gain that the plan promises, the largest first."""
    gains: dict[str, float] = {}
    for decision in plan.decisions.values():
        if decision.candidate != HP:
            found = decision.speedup.value if decision.speedup is not None else 1.0
            gains[decision.path] = max(gains.get(decision.path, 0.0), found)
    return tuple(sorted(gains, key=lambda path: -gains[path]))


def _copy(model: nn.Module, step: Callable[[Any], object]) -> nn.Module:
    """A copy of the model. `step` runs on it once, eagerly, to make sure that it reads nothing of the original."""
    copy, _ = private_copy(model)
    if found := read_of(model, lambda: step(copy)):
        raise LokaError(
            "a step of a copy reads the original's weights, so both arms would run the same",
            why=truncated(found, 5),
            way_out="let the step use the model that it is given, and no lambda, hook or global hold this one",
        )
    return copy


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One compiled step of the model, without the gradients of the step before, as a function for the race."""

    model: nn.Module
    compiled: Any
    step: Callable[[Any], object]

    def __call__(self) -> None:
        self.let_go()
        self.step(self.compiled)

    def let_go(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def _ready(model: nn.Module, step: Callable[[Any], object], compile: Callable[[nn.Module], Any]) -> _Step:
    return _Step(model=model, compiled=compile(model), step=step)


def _peak(ready: _Step, device: torch.device) -> int:
    """Bytes that a step takes, its gradients among them."""
    ready.let_go()
    return peak_of(ready, device)


def _raced(
    model: nn.Module,
    plan: Plan,
    layers: tuple[str, ...],
    base: _Step,
    step: Callable[[Any], object],
    compile: Callable[[nn.Module], Any],
    rounds: int,
) -> Arm:
    """Races a step by `plan`, in which `layers` run in eight bits, against `base`, one in high precision.

    Raises LokaError where the step in high precision cannot be captured; that by plan becomes the arm's failure.
    """
    by_plan = _ready(convert(private_copy(model)[0], plan), step, compile)
    functions = {HP: base, "plan": by_plan}
    try:
        found = time_interleaved(
            functions, baseline=HP, device=device_of(model), keep=list(functions), max_rounds=rounds
        )
    except Exception as error:
        if not still_usable():
            raise
        raise LokaError(
            "the step in high precision cannot be captured in a CUDA graph",
            why=[first_line(error)],
            way_out="give a step that does not wait for the device: tensors that are there, no .item(), no data loader",
        ) from error
    finally:
        gc.collect()
    if "plan" in found.failures:
        return Arm(layers=layers, failure=found.failures["plan"])
    timing, device = found.timings["plan"], device_of(model)
    memory = _peak(by_plan, device) / max(_peak(base, device), 1)
    return Arm(layers=layers, speedup=timing.speedup, microseconds=timing.microseconds, memory=memory)


def _fastest(arms: Sequence[Arm]) -> Arm | None:
    """The fastest of the arms that are surely faster than high precision; among ties the one with fewer layers."""
    faster = [(arm, arm.speedup) for arm in arms if arm.speedup is not None and arm.speedup.low > 1.0]
    if not faster:
        return None
    most = max(speedup.value for _, speedup in faster)
    return min((arm for arm, speedup in faster if speedup.high >= most), key=lambda arm: len(arm.layers))


def _confirmed(plan: Plan, kept: set[str], arms: Sequence[Arm]) -> Plan:
    """The plan with the `kept` layers alone in eight bits. Decisions taken back, and a note, say what was measured."""
    measured = "; ".join(
        f"{len(arm.layers)} layers {arm.speedup.shown('.3f', 'x')} with {arm.memory:.2f} of the memory"
        if arm.speedup
        else f"{len(arm.layers)} layers failed: {arm.failure}"
        for arm in arms
    )
    left = fp8_layers(plan).keys() - kept
    reason = f"its gain is not there in the whole model: {measured}"
    note = f"raced in the whole model, over high precision: {measured}"
    return replace(without(plan, left, reason), notes=(*plan.notes, note))
