"""A stack of DCN-V2's cross layers that feed each other: a unit of the fused path, beside the chain.

    x_{l+1} = x_0 * (U_l V_l x_l + b_l) + x_l         l = 1 .. L,   W_l in the place of U_l V_l at full rank

Layer l + 1 alone reads what layer l returns, and all layers read one x_0 (core/chain.py is about
linear layers that feed each other; core/cross.py has what the kernels compute).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loka.core.chain import Chain
from loka.core.signature import LinearShape, ModelSignature


@dataclass(frozen=True, kw_only=True)
class CrossLink:
    """One cross layer: the module at `path`, and the linear layers at `u` [features, rank] and `v`
    [rank, features] inside of it. `v` and `rank` are None at full rank; `bias` is u's."""

    path: str
    u: str
    v: str | None
    features: int
    rank: int | None
    bias: bool

    @property
    def shapes(self) -> dict[str, LinearShape]:
        """Of its linear layers by path, in the order in which they run."""
        inner = self.features if self.rank is None else self.rank
        found = {}
        if self.v is not None:
            found[self.v] = LinearShape(in_features=self.features, out_features=inner, bias=False)
        found[self.u] = LinearShape(in_features=inner, out_features=self.features, bias=self.bias)
        return found


@dataclass(frozen=True, kw_only=True)
class CrossStack:
    """`layers` in the order of the dataflow. `joint`: the first layer's x was x_0 itself.

    `reader` is the path of the module that alone reads what the last layer returns, where that is a
    linear layer or another that may be in a chain; None where it is none of those, or has company.
    """

    layers: tuple[CrossLink, ...]
    joint: bool
    reader: str | None = None

    @property
    def name(self) -> str:
        """The path of its first cross layer."""
        return self.layers[0].path

    @property
    def features(self) -> int:
        return self.layers[0].features

    @property
    def paths(self) -> tuple[str, ...]:
        """The cross layers in the order they are called."""
        return tuple(layer.path for layer in self.layers)

    @property
    def linears(self) -> tuple[str, ...]:
        """The linear layers inside, in the order they run."""
        return tuple(path for layer in self.layers for path in layer.shapes)

    def feeds(self, chain: Chain) -> bool:
        """Whether `chain` alone reads what the stack returns, and can read it in FP8 (nn/handover.py).

        Served with the stack, the chain's result stands in for what the stack returns, and their
        widths tell the two apart: a chain that ends as wide as the stack does not count.
        """
        wide = chain.links[0].in_features == self.features != chain.links[-1].out_features
        return wide and chain.prologue.identity and chain.paths[0] == self.reader

    def to_json(self) -> dict[str, Any]:
        layers = [dict(layer.__dict__) for layer in self.layers]
        return {"layers": layers, "joint": self.joint, "reader": self.reader}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], model: ModelSignature) -> CrossStack:
        """Raises LookupError, TypeError or ValueError for what is no stack of `model` by `to_json`."""
        layers = tuple(CrossLink(**layer) for layer in content["layers"])
        if not layers or content["joint"] not in (True, False):
            raise ValueError("a stack has no cross layer, or does not say whether its x is x_0")
        reader = content.get("reader")  # records of an older LoKA lack it
        if reader is not None and not isinstance(reader, str):
            raise TypeError(f"the reader of a stack is {reader!r}, and no module's path")
        stack = cls(layers=layers, joint=content["joint"], reader=reader)
        if len({*stack.paths, *stack.linears}) < len(stack.paths) + len(stack.linears):
            raise ValueError(f"cross layers at {stack.name}: one module twice")
        for layer in layers:
            if (layer.v is None) != (layer.rank is None) or layer.features != stack.features:
                raise ValueError(f"{layer} does not fit into the stack at {stack.name}")
            for path, shape in layer.shapes.items():
                if model.layers.get(path) != shape:
                    raise ValueError(f"cross layer {layer.path}: {path} ({shape}) is no layer of the model")
        return stack


Whole = Chain | CrossStack
"""What runs as a whole. Both have a `name`, and `linears` and `paths` in the order of the dataflow."""


def crosses_from_json(
    content: Iterable[Mapping[str, Any]], chains: Iterable[Chain], model: ModelSignature
) -> tuple[CrossStack, ...]:
    """Stacks of one model; a module is in one of them, or one of `chains`, at most. Raises as
    `CrossStack.from_json`."""
    stacks = tuple(CrossStack.from_json(stack, model) for stack in content)
    check_distinct(chains, stacks)
    return stacks


def check_distinct(chains: Iterable[Chain], stacks: Iterable[CrossStack]) -> None:
    """Raises ValueError for a module in two of them."""
    paths = [path for chain in chains for path in chain.paths]
    paths += [path for stack in stacks for path in (*stack.paths, *stack.linears)]
    if len(set(paths)) < len(paths):
        raise ValueError("a module is in two chains, or in a chain and a stack of cross layers")
