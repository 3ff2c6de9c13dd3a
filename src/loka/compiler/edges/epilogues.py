"""Which programs a GEMM can run in its own epilogue (kernels/gemm/epilogue.py).

A program is compared as a formula, a tree of tuples ("op", argument, ...) over its leaves, in which the
arguments of commutative steps stand in one order.
"""

from typing import Any, NamedTuple

from loka.kernels.edge.program import Argument, Kind, Program
from loka.kernels.gemm.epilogue import Activation, Epilogue

_LONGEST = 20  # steps: formulas are trees, which grow with what is read twice
_COMMUTATIVE = ("add", "mul", "maximum", "minimum")
_V = "v"  # the normalized value


class Matched(NamedTuple):
    """Indices in a program: `product` is the leaf that is normalized, `row_scale` the leaf that it is
    multiplied by, if it is, `inverse_rms` a step."""

    epilogue: Epilogue
    product: int
    row_scale: int | None
    inverse_rms: int


def matched(program: Program) -> Matched | None:
    """What a program does, if a GEMM's epilogue can do it: it normalizes one matrix by blocks, applies an activation,
    quantizes the result in its row layout, and hands out nothing but 1 / rms. None for every other program.
    """
    leaves = sorted(program.leaves)
    if len(program.steps) > _LONGEST or leaves not in ([Kind.FULL], [Kind.COLUMN, Kind.FULL]):
        return None
    if program.gradient is None or program.column or program.transposed is not None or program.sums:
        return None
    if program.integers:  # under one scale, known beforehand, they are no better than e4m3
        return None
    product = program.leaves.index(Kind.FULL)
    row_scale = program.leaves.index(Kind.COLUMN) if len(program.leaves) == 2 else None
    value = _formula(program, product)
    if row_scale is not None:
        value = _ordered("mul", [value, _formula(program, row_scale)])
    for index, step in enumerate(program.steps, len(program.leaves)):
        if step.op != "rsqrt" or any(given != index for given in program.values):
            continue
        inverse = _formula(program, index)
        norm = _norm(program, inverse, value)
        normalized = _ordered("mul", [value, inverse])
        activation = _ACTIVATIONS.get(_replaced(_formula(program, program.gradient), normalized))
        if norm is not None and activation is not None:
            epilogue = Epilogue(block=norm[0], eps=norm[1], activation=activation)
            return Matched(epilogue, product, row_scale, index)
    return None


def _norm(program: Program, inverse: Any, value: Any) -> tuple[int, float] | None:
    """(block, eps) of the formula 1 / sqrt(mean(value^2 over a block) + eps), or None."""
    match inverse:
        case ("rsqrt", ("add", float(eps), ("mul", float(share), (op, squares)))):
            count = 1.0 / share
        case ("rsqrt", ("add", float(eps), ("div", (op, squares), float(count)))):
            pass
        case _:
            return None
    block = {"block_sum": program.block, "row_sum": program.features}.get(op)
    if block != count or eps < 0 or squares not in (("square", value), ("mul", value, value)):
        return None
    return block, eps


def _formula(program: Program, argument: Argument) -> Any:
    if isinstance(argument, float):
        return argument
    if argument < len(program.leaves):
        return f"leaf {argument}"
    step = program.steps[argument - len(program.leaves)]
    return _ordered(step.op, [_formula(program, each) for each in step.args])


def _ordered(op: str, arguments: list[Any]) -> Any:
    """The arguments of a commutative step in one fixed order, with numbers first."""
    if op in _COMMUTATIVE:
        arguments = sorted(arguments, key=lambda each: (not isinstance(each, float), repr(each)))
    return (op, *arguments)


def _replaced(formula: Any, normalized: Any) -> Any:
    if formula == normalized:
        return _V
    if not isinstance(formula, tuple):
        return formula
    return _ordered(formula[0], [_replaced(each, normalized) for each in formula[1:]])


# As torch's decompositions write them.
_GATE = _ordered("minimum", [_ordered("maximum", [_ordered("add", [_V, 3.0]), 0.0]), 6.0])
_LOGISTIC = _ordered("add", [("exp", ("neg", _V)), 1.0])
_ERF = _ordered("add", [("erf", _ordered("mul", [_V, 0.7071067811865476])), 1.0])
_ACTIVATIONS = {
    _V: Activation.NONE,
    ("relu", _V): Activation.RELU,
    ("div", _ordered("mul", [_V, _GATE]), 6.0): Activation.HARD_SWISH,
    ("div", _V, _LOGISTIC): Activation.SWISH,
    _ordered("mul", [_V, ("sigmoid", _V)]): Activation.SWISH,
    _ordered("mul", [_ordered("mul", [_V, 0.5]), _ERF]): Activation.GELU,
}
