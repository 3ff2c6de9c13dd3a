"""Sites in a joint graph: the two ops of each, what they read, and whether they can be joined.

`loka::site` is joined where every GEMM that it runs is FP8 with power-of-two scales of its own values, or
`output` INT8 with scales of rows: then copies of activations and gradients do not depend on who makes them,
and the compiler may have them made where the values are. FP8 weights are the exception: a site by itself has
a scale for each row of its weight, a joined one has one (kernels/quantize/fp8_weights.py). They differ near
e4m3's smallest numbers alone.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from loka.compiler.nodes import args_of
from loka.core.recipe import recipe_in
from loka.core.records.report import REGION, REGION_INT8
from loka.kernels.gemm.registry import candidate_named
from loka.nn.site_ops import Candidates, site_backward, site_forward

_RECIPE, _INTEGERS = "rowwise_e4m3_pow2", "int8_row"

# What a plan names for layers that are to be joined. The sums over all rows of a batch are exact: fast
# accumulation loses too much there.
IN_REGIONS = (f"torch_fast:{_RECIPE}", f"torch_fast:{_RECIPE}", f"torch:{_RECIPE}")
ARMS: Mapping[str, Candidates] = {REGION: IN_REGIONS, REGION_INT8: (f"loka_int8:{_INTEGERS}", *IN_REGIONS[1:])}
_KERNELS = {_RECIPE: ("torch", "torch_fast", "emulated"), _INTEGERS: ("loka_int8", "torch_int8", "emulated")}


def misfit(in_features: int, out_features: int) -> str | None:
    """Why a layer with these sides cannot be in a region, or None where it can."""
    for side, size in (("in_features", in_features), ("out_features", out_features)):
        if not isinstance(size, int) or size % 16:
            return f"{side} = {size} is no multiple of 16"
    return None


def unjoined(candidate: str) -> str | None:
    """Why a GEMM by this candidate cannot be in a region, or None where it can."""
    recipe = recipe_in(candidate)
    if recipe not in _KERNELS:
        return f"{candidate} is none of {', '.join(_KERNELS)}, by which regions quantize"
    if candidate_named(candidate).kernel.name not in _KERNELS[recipe]:
        return f"{candidate} is none of the kernels in regions: {', '.join(_KERNELS[recipe])}"
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class JointSite:
    """One call of a site. y [T, N] = x [T, K] @ weight [N, K]^T; `backward` is None where none is made."""

    name: str
    node: Node
    y: Node
    x: Node
    weight: Node
    health: Node
    candidates: tuple[str, str, str]
    backward: Node | None

    @property
    def inputs(self) -> int:
        return int(self.x.meta["val"].shape[1])

    @property
    def outputs(self) -> int:
        return int(self.weight.meta["val"].shape[0])

    @property
    def rows(self) -> int | torch.SymInt:
        return self.x.meta["val"].shape[0]

    @property
    def integers(self) -> bool:
        """Whether `output` is INT8."""
        return candidate_named(self.candidates[0]).recipe.name == _INTEGERS

    @property
    def grad_output(self) -> Node:
        assert self.backward is not None
        return args_of(self.backward)[0]

    @property
    def wants_input(self) -> bool:
        return self.backward is not None and bool(args_of(self.backward)[9])

    @property
    def wants_weight(self) -> bool:
        return self.backward is not None and bool(args_of(self.backward)[10])

    @property
    def weight_dtype(self) -> torch.dtype:
        assert self.backward is not None
        return args_of(self.backward)[12]


def sites_in(graph: Graph) -> tuple[list[JointSite], dict[str, str]]:
    """The sites that can be joined, in order; and why each other one runs by itself."""
    found: list[JointSite] = []
    apart: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is site_forward:
            site = _site(node)
            if isinstance(site, str):
                apart[str(args_of(node)[3])] = site
            else:
                found.append(site)
    return found, apart


def _site(node: Node) -> JointSite | str:
    x, weight, health, name, output, grad_input, grad_weight, *_, join = args_of(node)
    if not join:
        return "regions are switched off for this model"
    results = {int(args_of(user)[1]): user for user in node.users if user.target is operator.getitem}
    if len(results) < len(node.users) or 0 not in results:
        return "its results are used in a way that is not known"
    backward = _backward(results)
    if isinstance(backward, str):
        return backward
    wanted = [output]
    if backward is not None:
        wanted += [grad_input] * bool(args_of(backward)[9]) + [grad_weight] * bool(args_of(backward)[10])
    reason = next((why for name in wanted if (why := unjoined(str(name)))), None)
    reason = reason or misfit(x.meta["val"].shape[1], weight.meta["val"].shape[0])
    if reason is not None:
        return reason
    rows = x.meta["val"].shape[0]
    if isinstance(rows, int) and rows == 0:
        return "it has no rows"
    return JointSite(
        name=name,
        node=node,
        y=results[0],
        x=x,
        weight=weight,
        health=health,
        candidates=(output, grad_input, grad_weight),
        backward=backward,
    )


def _backward(results: dict[int, Node]) -> Node | str | None:
    """The one op that reads what forward kept; None where no op does; or, as a text, why it is not clear."""
    readers = {user for place, node in results.items() if place for user in node.users}
    if not readers:
        return None
    if len(readers) > 1 or next(iter(readers)).target is not site_backward:
        return "what it keeps for backward is read more than once"
    return next(iter(readers))
