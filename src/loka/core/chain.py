"""A chain: linear layers whose tensors feed each other through a norm and an activation.

    A_0 = E_0(x)                          E_0: what comes before the first linear layer, often nothing
    Z_l = A_{l-1} W_l^T + b_l             l = 1 .. L
    A_l = E_l(Z_l),  E = activation(norm(.))

It is the unit of the fused path (docs/chains.md): the kernel that computes A_l writes it in FP8, as
the next GEMM reads it, so that quantization adds no pass over the activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from loka.core.signature import LinearShape, ModelSignature


class Norm(StrEnum):
    NONE = "none"
    BLOCK = "block"  # RMSNorm over fixed blocks of features
    RMS = "rms"
    LAYER = "layer"


class Activation(StrEnum):
    NONE = "none"
    HARD_SWISH = "hard_swish"
    RELU = "relu"
    SWISH = "swish"
    GELU = "gelu"  # the exact one, by erf


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """activation(norm(z) * gamma + beta). `block` is for Norm.BLOCK: features a norm reduces over.

    `gamma` and `beta` say whether the norm has them; an elementwise norm parameter has no bound.
    """

    norm: Norm = Norm.NONE
    block: int = 0
    eps: float = 0.0
    gamma: bool = False
    beta: bool = False
    activation: Activation = Activation.NONE

    def bound(self, features: int) -> float | None:
        """What |values| cannot exceed, whatever the data; None where there is no such bound.

        A normalized value's square is at most the sum of squares over what was normalized
        together: |y| <= sqrt(b). Every activation here keeps |act(y)| <= |y|.
        """
        if self.norm is Norm.NONE or self.gamma or self.beta:
            return None
        return math.sqrt(min(self.block, features) if self.norm is Norm.BLOCK else features)

    @property
    def identity(self) -> bool:
        return self.norm is Norm.NONE and self.activation is Activation.NONE

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "norm": self.norm.value, "activation": self.activation.value}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Epilogue:
        """Raises LookupError, TypeError or ValueError for what `to_json` did not make."""
        norm, activation = Norm(content["norm"]), Activation(content["activation"])
        found = cls(**{**content, "norm": norm, "activation": activation})
        if (found.block > 0) != (norm is Norm.BLOCK) or not 0 <= found.eps < math.inf:
            raise ValueError(f"{found} is no epilogue")
        return found


NOTHING = Epilogue()


@dataclass(frozen=True, kw_only=True)
class Link:
    """One linear layer [out_features, in_features] at `path`, and what follows it at `members`."""

    path: str
    in_features: int
    out_features: int
    bias: bool
    epilogue: Epilogue = NOTHING
    members: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chain:
    """`links` in the order of the dataflow; `prologue` is E_0 at `members`.

    Module paths in one chain are distinct, and the output of each module goes to the next one
    only, so that a chain can run as a whole in the place of its first module.
    """

    links: tuple[Link, ...]
    prologue: Epilogue = NOTHING
    members: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The path of its first linear layer."""
        return self.links[0].path

    @property
    def lone(self) -> bool:
        """Whether it is a linear layer with nothing before or after it: no more than its sites."""
        return len(self.links) == 1 and self.prologue.identity and self.links[0].epilogue.identity

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(link.path for link in self.links)

    @property
    def paths(self) -> tuple[str, ...]:
        """All modules in the order they are called."""
        return self.members + tuple(path for link in self.links for path in (link.path, *link.members))

    def describe(self) -> str:
        """Such as "Linear(256, 512), block norm, hard_swish, Linear(512, 64)"."""
        stages: list[str] = []
        for link in (None, *self.links):
            epilogue = self.prologue if link is None else link.epilogue
            if link is not None:
                bias = "" if link.bias else ", no bias"
                stages.append(f"Linear({link.in_features}, {link.out_features}{bias})")
            if epilogue.norm is not Norm.NONE:
                stages.append(f"{epilogue.norm} norm")
            if epilogue.activation is not Activation.NONE:
                stages.append(epilogue.activation.value)
        return ", ".join(stages)

    def to_json(self) -> dict[str, Any]:
        links = [
            {**link.__dict__, "epilogue": link.epilogue.to_json(), "members": list(link.members)}
            for link in self.links
        ]
        return {"prologue": self.prologue.to_json(), "members": list(self.members), "links": links}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], model: ModelSignature) -> Chain:
        """Raises LookupError, TypeError or ValueError for what is no chain of `model` by `to_json`."""
        links = tuple(
            Link(
                **{
                    **link,
                    "epilogue": Epilogue.from_json(link["epilogue"]),
                    "members": tuple(link["members"]),
                }
            )
            for link in content["links"]
        )
        chain = cls(
            links=links,
            prologue=Epilogue.from_json(content["prologue"]),
            members=tuple(content["members"]),
        )
        if not links or len(set(chain.paths)) < len(chain.paths):
            raise ValueError("a chain has no linear layer, or one module twice")
        for before, link in zip((None, *links), links, strict=False):
            shape = LinearShape(in_features=link.in_features, out_features=link.out_features, bias=link.bias)
            if model.layers.get(link.path) != shape:
                raise ValueError(f"chain {chain.name}: {link.path} ({shape}) is no layer of the model")
            if before is not None and before.out_features != link.in_features:
                raise ValueError(f"chain {chain.name}: {link.path} does not fit what comes before it")
        return chain


def chains_from_json(content: Iterable[Mapping[str, Any]], model: ModelSignature) -> tuple[Chain, ...]:
    """Chains of one model; a module is in one of them at most. Raises as `Chain.from_json`."""
    chains = tuple(Chain.from_json(chain, model) for chain in content)
    paths = [path for chain in chains for path in chain.paths]
    if len(set(paths)) < len(paths):
        raise ValueError("a module is in two chains")
    return chains


def power_of_two_above(value: float) -> float:
    """The least power of two that is not below `value` > 0."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def constant_scale(bound: float, largest: float) -> float:
    """The dequantizing power-of-two scale under which |values| <= `bound` never saturate.

    16 and e4m3's 448 give 2^-4: 16 becomes 256. A power of two costs at most one of e4m3's 14.8
    octaves, and makes every later rescaling exact.
    """
    return power_of_two_above(bound / largest)
