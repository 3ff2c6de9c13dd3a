"""Which linear layers a model has: what binds statistics, reports and plans to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One linear layer: weight [out_features, in_features]."""

    in_features: int
    out_features: int
    bias: bool

    def __str__(self) -> str:
        return f"{self.in_features} -> {self.out_features}{', bias' if self.bias else ''}"


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """The linear layers of a model by module path, in the order `named_modules` gives them."""

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
        layers = {
            path: [shape.in_features, shape.out_features, shape.bias] for path, shape in self.layers.items()
        }
        return {"name": self.name, "layers": layers}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ModelSignature:
        layers = {
            path: LinearShape(in_features=shape[0], out_features=shape[1], bias=shape[2])
            for path, shape in content["layers"].items()
        }
        return cls(name=content["name"], layers=layers)
