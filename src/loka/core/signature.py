"""Which GEMMs with a parameter a model has: what binds statistics, reports and plans to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loka.core.storage.codec import record, sparse

MODEL_OPTIONS = "on the command line its --model, and --mods or --no-mods"
"""Of the ways out of errors about another model: what says there which model is built."""
AS_PROBED = f"build the model as it was probed ({MODEL_OPTIONS}), or probe, measure and plan this one"


def child_path(path: str, name: str) -> str:
    """The path of what is called `name` inside of the module at `path`; either is "" for the module itself."""
    return f"{path}.{name}" if path and name else path or name


@record(row=True)
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


@record(row=True)
@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """One site: weight [out_features, in_features], whichever way it lies. `use`: None for nn.Linear."""

    in_features: int
    out_features: int
    bias: bool
    use: WeightUse | None = sparse(None)

    @property
    def stacked(self) -> bool:
        """Whether one batched GEMM of the model multiplies by it and by others."""
        return self.use is not None and self.use.expert is not None

    def __str__(self) -> str:
        text = f"{self.in_features} -> {self.out_features}{', bias' if self.bias else ''}"
        return text if self.use is None else f"{text}, in {self.use.caller or 'the model'}"


@dataclass(frozen=True, kw_only=True)
class ModelSignature:
    """The sites of a model: nn.Linear modules in the order of `named_modules`, then others that Probe saw."""

    name: str
    layers: Mapping[str, LinearShape]

    @property
    def traced(self) -> dict[str, LinearShape]:
        """The sites that are no linear layer's own call, which a trace of the model alone finds."""
        return {path: shape for path, shape in self.layers.items() if shape.use is not None}

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
