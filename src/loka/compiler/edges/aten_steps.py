"""Which aten ops a program can hold, and as which steps (kernels/edge/program.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from loka.compiler.nodes import args_of, is_tensor, item_of, value_of
from loka.core.problem import FLOATS
from loka.kernels.edge.program import Step

aten, prims = torch.ops.aten, torch.ops.prims

# What changes a tensor's shape, dtype or place alone.
_PASSED_ON = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.alias.default, aten.clone.default,
    aten.detach.default, prims.convert_element_type.default, aten._to_copy.default, aten.contiguous.default,
    prims.view_of.default, aten.lift_fresh_copy.default,
}  # fmt: skip

_SAME = {
    aten.add.Tensor: "add", aten.add.Scalar: "add", aten.sub.Tensor: "sub", aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.div.Tensor: "div", aten.div.Scalar: "div",
    aten.neg.default: "neg", aten.abs.default: "abs", aten.exp.default: "exp", aten.log.default: "log",
    aten.sqrt.default: "sqrt", aten.rsqrt.default: "rsqrt", aten.reciprocal.default: "reciprocal",
    aten.sigmoid.default: "sigmoid", aten.tanh.default: "tanh", aten.erf.default: "erf",
    aten.relu.default: "relu", aten.maximum.default: "maximum", aten.minimum.default: "minimum",
    aten.clamp_min.default: "maximum", aten.clamp_max.default: "minimum", aten.where.self: "where",
    aten.le.Scalar: "le", aten.le.Tensor: "le", aten.lt.Scalar: "lt", aten.lt.Tensor: "lt",
    aten.ge.Scalar: "ge", aten.ge.Tensor: "ge", aten.gt.Scalar: "gt", aten.gt.Tensor: "gt",
    aten.eq.Scalar: "eq", aten.eq.Tensor: "eq", aten.ne.Scalar: "ne", aten.ne.Tensor: "ne",
    aten.logical_and.default: "and", aten.logical_or.default: "or", aten.logical_not.default: "not",
}  # fmt: skip
_EQUALITIES = (aten.eq.Tensor, aten.ne.Tensor)
_ORDERINGS = (aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor)
EXTREMES = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
_POWERS = {-1.0: "reciprocal", 0.5: "sqrt", -0.5: "rsqrt", 1.0: "copy", 2.0: "square"}
SUMS = (aten.sum.dim_IntList, aten.mean.dim)

Value = int | float
"""An index into the values of a program, or a constant."""


def passes_on(node: Node) -> bool:
    """Whether an op keeps every value of its operand. Inside a program float32 stands for every float dtype.

    A cast to bool, to integers or to eight bits makes other values, and a copy from another device is no view.
    """
    if node.op != "call_function" or node.target not in _PASSED_ON:
        return False
    if not is_tensor(node) or not is_tensor(args_of(node)[0]):
        return False
    read, made = value_of(args_of(node)[0]), value_of(node)
    return read.device == made.device and made.dtype in (read.dtype, *FLOATS) and not read.dtype.is_complex


def exact(node: Node) -> bool:
    """Whether an op asks which elements equal others, or are the largest. A program or a fused kernel knows values as
    they were before memory rounded them to 16 bits, and the others are rounded: no element would equal them.
    """
    if node.target in _EQUALITIES:
        return True
    return node.target in _ORDERINGS and any(made_by(a).target in EXTREMES for a in node.all_input_nodes)


def made_by(node: Node) -> Node:
    """The node that made the values of `node`: the first one above it that is no view and no cast."""
    while passes_on(node):
        node = args_of(node)[0]
    return node


def is_pointwise(node: Node) -> bool:
    """Whether a program can compute the node elementwise, from values in the same places."""
    if node.op != "call_function":
        return False
    if node.target in _PASSED_ON:
        return passes_on(node)
    if node.target is aten.pow.Tensor_Scalar:
        return float(args_of(node)[1]) in (*_POWERS, 3.0, 4.0)
    if node.target in (aten.scalar_tensor.default, aten.full.default):
        return isinstance(args_of(node)[-1] if node.target is aten.full.default else args_of(node)[0], int | float)
    if node.target not in _SAME:
        return False
    val = node.meta.get("val")
    scaled = {"alpha", "rounding_mode"} & set(node.kwargs)
    return isinstance(val, torch.Tensor) and not scaled and (val.dtype.is_floating_point or val.dtype == torch.bool)


def operands(node: Node) -> list[Node | float]:
    """The nodes that a pointwise node is computed from, in the order of its step's operands."""
    if node.target in _PASSED_ON or node.target is aten.pow.Tensor_Scalar:
        return [args_of(node)[0]]
    if node.target is aten.scalar_tensor.default:
        return [float(args_of(node)[0])]
    if node.target is aten.full.default:
        return [float(args_of(node)[1])]
    return [a if isinstance(a, Node) else float(a) for a in args_of(node) if a is not None]


def steps_of(node: Node, values: list[Value], push: Callable[[Step], int]) -> Value:
    """The value of a pointwise node, given those of its operands; `push` appends a step and returns its index."""
    target: Any = node.target
    if target in (aten.scalar_tensor.default, aten.full.default):
        return values[0]
    if target in _PASSED_ON:
        is_truth = value_of(args_of(node)[0]).dtype == torch.bool and value_of(node).dtype != torch.bool
        # A boolean becomes a number here: as numbers two of them add up to 2, as booleans "add" is their "or".
        return push(Step("where", (values[0], 1.0, 0.0))) if is_truth else values[0]
    if target is aten.pow.Tensor_Scalar:
        power = float(args_of(node)[1])
        if power in _POWERS:
            return push(Step(_POWERS[power], (values[0],)))
        square = push(Step("square", (values[0],)))
        return push(Step("mul", (square, values[0] if power == 3.0 else square)))
    return push(Step(_SAME[target], tuple(values)))


def computed_from(node: Node) -> list[Node | float]:
    """The operands that a node inside a cone is computed from."""
    if node.target in SUMS:
        return [args_of(node)[0]]
    if (made := variance_of(node)) is not None:
        return [args_of(made)[0]]
    return operands(node)


def variance_of(node: Node) -> Node | None:
    """The var_mean op that `node` is a result of (item 0 is the variance, 1 the mean); None for other nodes."""
    return item_of(node, aten.var_mean.correction)
