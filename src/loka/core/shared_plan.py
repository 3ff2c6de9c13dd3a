"""The decision that linear layers which read one tensor run as one, as a plan keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loka.core.error import Estimate
from loka.core.report import estimate_from_json, estimate_to_json
from loka.core.shared_input import SharedInput
from loka.core.signature import ModelSignature


@dataclass(frozen=True, kw_only=True)
class SharedDecision:
    """The plan's decisions for the layers of `group` name the kernels, the same ones at each. Times are of
    all of them together, None where none were measured: as one, and in hp."""

    group: SharedInput
    reason: str
    microseconds: Estimate | None = None
    hp_microseconds: Estimate | None = None
    speedup: Estimate | None = None

    def __str__(self) -> str:
        times = (("{:.1f} us", self.microseconds), ("hp {:.1f} us", self.hp_microseconds))
        told = [pattern.format(time.value) for pattern, time in times if time]
        told += [f"{self.speedup.value:.2f}x"] if self.speedup else []
        layers = f"{len(self.group.branches)} layers read one tensor"
        return f"shared input {self.group.name}: {', '.join([layers, *told])}: {self.reason}"


_TIMES = ("microseconds", "hp_microseconds", "speedup")


def decisions_to_json(decisions: Mapping[str, SharedDecision]) -> list[dict[str, Any]]:
    return [
        {
            "group": d.group.to_json(),
            "reason": d.reason,
            **{time: estimate_to_json(getattr(d, time)) for time in _TIMES},
        }
        for d in decisions.values()
    ]


def decisions_from_json(
    content: list[dict[str, Any]], model: ModelSignature, kernels: Mapping[str, Mapping[str, str]]
) -> dict[str, SharedDecision]:
    """By name. `kernels`: by layer and GEMM, as the plan decides them.

    Raises LookupError, TypeError or ValueError for what `decisions_to_json` did not make of this plan.
    """
    found: dict[str, SharedDecision] = {}
    for entry in content:
        group = SharedInput.from_json(entry["group"], model)
        first = kernels.get(group.linears[0])
        if first is None or any(kernels.get(path) != first for path in group.linears):
            raise ValueError(f"{group.name} are to run as one, by different kernels")
        if not isinstance(entry["reason"], str):
            raise ValueError(f"{group.name} lack the reason why they run as one")
        times = {time: estimate_from_json(entry[time]) for time in _TIMES}
        found[group.name] = SharedDecision(**{**entry, **times, "group": group})
    paths = [path for decided in found.values() for path in decided.group.linears]
    if len(set(paths)) < len(paths) or len(found) < len(content):
        raise ValueError("a layer is in two groups that run as one")
    return found
