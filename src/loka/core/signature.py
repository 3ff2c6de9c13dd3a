"""Which GEMMs with a parameter a model has: what binds statistics, reports and plans to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class WeightUse:
    """Where a GEMM stands whose weight is not the `weight` of an nn.Linear that calls it.

    Attributes:
        caller: path of the innermost module whose forward makes the call.
        key: the parameter's name, then the view that is multiplied by (graph/views.py).
        form: how the call reads it (graph/gemm_calls.py).
        expert: which of several stacked weights; None where there is one.
    """

    caller: str
    key: str
    form: str
    expert: int | None = None


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One site: weight [out_features, in_features], whichever way it lies. `use`: None for nn.Linear."""

    in_features: int
    out_features: int
    bias: bool
    use: WeightUse | None = None

    def __str__(self) -> str:
        told = f"{self.in_features} -> {self.out_features}{', bias' if self.bias else ''}"
        return told if self.use is None else f"{told}, in {self.use.caller or 'the model'}"


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """The sites of a model: nn.Linear modules in the order of `named_modules`, then others that Probe saw."""

    name: str
    layers: Mapping[str, LinearShape]

    def differences(self, other: ModelSignature) -> list[str]:
        """One line for each layer that `other` lacks, adds, or has in another shape."""
        lines = []
        for path, shape in self.layers.items():
            if path not in other.layers:
                lines.append(f"{path} ({shape}) is in this model only")
            elif other.layers[path] != shape:
                lines.append(f"{path} is {shape} in this model, {other.layers[path]} there")
        lines += [
            f"{path} ({shape}) is missing in this model"
            for path, shape in other.layers.items()
            if path not in self.layers
        ]
        return lines

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "layers": {path: _to_json(shape) for path, shape in self.layers.items()}}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ModelSignature:
        layers = {path: _from_json(shape) for path, shape in content["layers"].items()}
        return cls(name=content["name"], layers=layers)


def _to_json(shape: LinearShape) -> list[Any]:
    plain: list[Any] = [shape.in_features, shape.out_features, shape.bias]
    use = shape.use
    return plain if use is None else [*plain, [use.caller, use.key, use.form, use.expert]]


def _from_json(content: list[Any]) -> LinearShape:
    use = None
    if len(content) > 3:
        caller, key, form, expert = content[3]
        if not all(isinstance(text, str) for text in (caller, key, form)):
            raise ValueError(f"a site is used at {content[3]}, which are no names")
        use = WeightUse(caller=caller, key=key, form=form, expert=None if expert is None else int(expert))
    return LinearShape(in_features=content[0], out_features=content[1], bias=content[2], use=use)
