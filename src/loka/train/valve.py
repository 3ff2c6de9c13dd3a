"""The drift valve: during training it returns to high precision what FP8 no longer represents.

    saturated share   = elements beyond the largest value of the format / elements
    underflowed share = elements that were not zero and became it / elements
    drifting where      saturated > 1e-4,  or  underflowed > what it was after converting + 0.05

A chain's or a cross stack's scales are those of earlier steps, so data that moves faster than they follow is
clipped, and gradients that spread over more octaves than e4m3 has are flushed to zero. Both are counted on
the device for the last few steps of each period; counting takes a tenth of a producer's time, so it is off
otherwise. A chain in which a tensor drifts runs in high precision from then on; the others keep their
scales. A weight that saturates is off by no more than it moved in one step, so that is not looked at. Layers
that run alone, and chains with current scales, take each scale from the data at hand and cannot saturate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from loka.core.chain import NOTHING
from loka.core.plan import Plan
from loka.core.producer import NO_PARAMETERS
from loka.core.recipe import Format
from loka.core.report import HP
from loka.kernels.current import scale_produced
from loka.nn import chain_snapshot, count_rounding
from loka.nn.chain import running_chains
from loka.nn.chain_state import RunningChain
from loka.nn.cross import running_crosses
from loka.nn.unwrap import named_modules
from loka.train.ranks import together
from loka.train.run import Companion, Run
from loka.train.step import Sight

_FEW = 8  # elements that may saturate in a period whatever their share, which in a small tensor says little


@dataclass(frozen=True, kw_only=True)
class ValveConfig:
    """Every `every` steps, by what was counted over the `watch` steps before. Shares of elements.

    `underflowed` is the rise over the first period that was counted.
    """

    every: int = 300
    watch: int = 4
    saturated: float = 1e-4
    underflowed: float = 0.05

    def __post_init__(self) -> None:
        if not 1 <= self.watch <= self.every:
            raise ValueError(f"watch is {self.watch}; it has to lie between 1 and every, {self.every}")
        for name in ("saturated", "underflowed"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a share lies between 0 and 1")


class Valve(Companion):
    """See the module's text. `closed` says by chain or stack at which step it was closed, and why.

    Among several ranks they close alike: what drifts on one is closed on all.
    """

    def __init__(
        self, config: ValveConfig | None = None, *, say: Callable[[str], None] | None = None
    ) -> None:
        self.config = config or ValveConfig()
        self.closed: dict[str, str] = {}
        self._say = say or (lambda text: None)
        self._rows: dict[str, int] = {}  # by chain or stack, in a step
        self._begun: dict[str, dict[str, float]] | None = None  # the counters when counting began
        self._first: dict[str, float] = {}  # underflowed share by slot, of the first period
        self._counting = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def identity(self) -> dict[str, Any]:
        return {"valve": asdict(self.config)}

    def before(self, run: Run) -> Sight:
        if run.plan is None or not run.plan.wholes:
            return "none"
        counting = run.step % self.config.every >= self.config.every - self.config.watch
        if counting != self._counting:
            self._count(run, counting)
        return self._hook(run.model) if counting else "none"

    def after(self, run: Run) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._begun is None or run.step % self.config.every or run.plan is None:
            return
        drifting = self._drifting_anywhere(run)
        self._count(run, False)
        if not drifting:
            return
        for name, reason in drifting.items():
            self.closed[name] = f"step {run.step}: {reason}"
            self._say(f"step {run.step}: the valve returns {name} to high precision: {reason}")
        left = without(run.plan, drifting)
        together(lambda: run.adopt(left))
        run.save_due = True

    def state(self) -> dict[str, Any]:
        held = {"closed": self.closed, "rows": self._rows, "begun": self._begun, "first": self._first}
        return {"valve": json.dumps(held)}

    def restore(self, state: Mapping[str, Any]) -> None:
        held = json.loads(state["valve"])
        self.closed, self._rows = held["closed"], held["rows"]
        self._begun, self._first = held["begun"], held["first"]

    def _count(self, run: Run, counting: bool) -> None:
        self._counting = counting
        count_rounding(run.model, counting)
        if not counting:
            self._begun = None
        elif self._begun is None:  # else a checkpoint was made while counting
            self._begun = chain_snapshot(run.model)

    def _drifting_anywhere(self, run: Run) -> dict[str, str]:
        """Of all ranks, with the reason that the first of them gives, in one order."""
        _, told = together(lambda: self._drifting(run), json.dumps)
        found: dict[str, str] = {}
        for one in told:
            found = {**json.loads(one), **found}
        return dict(sorted(found.items()))

    def _drifting(self, run: Run) -> dict[str, str]:
        """The chains and stacks in which a tensor drifts, with the first one that does and how."""
        assert self._begun is not None
        assert run.plan is not None
        inside = {path: whole.name for whole, _ in run.plan.wholes for path in whole.linears}
        found: dict[str, str] = {}
        for slot, now in chain_snapshot(run.model).items():
            path, _, operand = slot.rpartition("/")
            name, shape = inside[path], run.plan.model.layers[path]
            sizes = {
                "input": self._rows.get(name, 0) * shape.in_features,
                "grad_output": self._rows.get(name, 0) * shape.out_features,
                "weight": shape.in_features * shape.out_features,
            }
            elements = sizes[operand] * self.config.watch
            if not elements:
                continue
            before = self._begun[slot]
            saturated, underflowed = (
                (now[kind] - before[kind]) / elements for kind in ("saturated", "underflowed")
            )
            usual = self._first.setdefault(slot, underflowed)
            some = now["saturated"] - before["saturated"] >= _FEW and operand != "weight"
            if some and saturated > self.config.saturated:
                found.setdefault(name, f"{slot}: {saturated:.1e} of its elements saturate")
            elif underflowed > usual + self.config.underflowed:
                change = f"{underflowed:.0%} of its elements become zero, {usual:.0%} before"
                found.setdefault(name, f"{slot}: {change}")
        return found

    def _hook(self, model: nn.Module) -> Sight:
        """Makes the coming step count what its kernels do not: rows, once, and what becomes of a chain's own
        input where nothing produces it inside the chain."""
        chains = running_chains(model)
        heads = {name: running.chain.paths[0] for name, running in chains.items()}
        heads |= {name: running.stack.layers[0].path for name, running in running_crosses(model).items()}
        modules = dict(named_modules(model))
        for name, path in heads.items():
            chain = chains.get(name)
            slot = chain.inputs[0] if chain is not None and chain.chain.prologue.identity else None
            counts = slot is not None
            if name in self._rows and not counts:
                continue
            rows = None if name in self._rows else self._rows
            if rows is not None:
                rows[name] = 0
            seen = _Seen(name, rows, chain if counts else None)
            self._hooks.append(modules[path].register_forward_hook(seen, with_kwargs=True))
        return "hooks" if self._hooks else "host"


@dataclass(frozen=True)
class _Seen:
    """A hook on the first module of a chain or stack, after its forward: the scale is the one it used."""

    name: str
    rows: dict[str, int] | None
    chain: RunningChain | None

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x = next(given for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor))
        if self.rows is not None:
            self.rows[self.name] += x.numel() // x.shape[-1]
        if self.chain is None:
            return
        slot = self.chain.inputs[0]
        assert slot is not None
        current = self.chain.current_scales()
        scale = self.chain.input_scale(0, current)
        if current is not None:
            scale_produced(x.reshape(-1, x.shape[-1]), NOTHING, NO_PARAMETERS, scale=scale)
        scaled = x.float() / scale
        clipped = (scaled.abs() > Format.E4M3.max).sum()
        lost = ((scaled != 0) & (scaled.abs() <= Format.E4M3.smallest_subnormal / 2)).sum()
        self.chain.state.book.counts(slot).add_(torch.stack((clipped, lost)))


def without(plan: Plan, closed: Mapping[str, str]) -> Plan:
    """`plan` with the chains and stacks in `closed` (name -> why) in high precision, site by site."""
    paths = {path: whole.name for whole, _ in plan.wholes if whole.name in closed for path in whole.linears}
    decisions = {
        name: replace(d, candidate=HP, reason=f"closed by the valve: {closed[paths[d.path]]}", saved_us=0.0)
        if d.path in paths
        else d
        for name, d in plan.decisions.items()
    }
    return replace(
        plan,
        decisions=decisions,
        chains={name: chain for name, chain in plan.chains.items() if name not in closed},
        crosses={name: cross for name, cross in plan.crosses.items() if name not in closed},
    )
