"""Programs of fewer operations for the same values: edges that compute much wait for instructions, not for the memory.

What a graph of aten ops says in several steps is one here: x / (1 + exp(-u)) is x sigmoid(u), which a backward pass
needs anyway, and the parts of HardSwish and GELU are functions of their own. Constants move to where one operation
serves a whole row or column. Values are the same but for rounding in float32 (kernels/edge/twin.py runs either form).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from loka.kernels.edge.program import BOOLEAN, Argument, Kind, Program, Step, kind_made_by

_ROOT_OF_HALF = math.sqrt(0.5)
_LARGE = 2.0**20  # constants that are moved lie between it and its inverse: others might leave float32's range
_AMBIGUOUS = (*BOOLEAN, "where", "maximum", "minimum", "add", "mul", "copy")
"""Whose results may be true or false, as what they are given may be."""


@functools.lru_cache(maxsize=4096)
def simplified(program: Program) -> Program:
    """The program with fewer operations, and without steps that nothing needs."""
    written = _Steps(program)
    found: list[Argument] = list(range(len(program.leaves)))
    for step in program.steps:
        found.append(written.simpler(step.op, tuple(found[a] if isinstance(a, int) else a for a in step.args)))
    return _renamed(program, written.steps, found)


class _Steps:
    """Steps that are written anew, and what is known of them."""

    def __init__(self, program: Program) -> None:
        self.first = len(program.leaves)
        self.steps: list[Step] = []
        self.kinds = list(program.leaves)
        self._known: dict[Step, int] = {}
        self._numbers = [False] * self.first  # what is certainly no value that is true or false
        self._rules: dict[str, Callable[[Argument, Argument], Argument | None]] = {
            "mul": self._product, "div": self._quotient, "add": self._sum,
        }  # fmt: skip

    def simpler(self, op: str, args: tuple[Argument, ...]) -> Argument:
        """The value of a step, by a rule where one fits."""
        if op == "copy" and isinstance(args[0], int):
            return args[0]
        if op == "reciprocal" and (of := self._of_sigmoid(args[0])) is not None:
            return self.push("sigmoid", of)
        rule = self._rules.get(op)
        made = rule(args[0], args[1]) if rule else None
        return self.push(op, *args) if made is None else made

    def push(self, op: str, *args: Argument) -> int:
        step = Step(op, args)
        if step in self._known:
            return self._known[step]
        self.steps.append(step)
        self.kinds.append(kind_made_by(step, self.kinds))
        counts = op in ("add", "mul") and any(not isinstance(a, int) or self._numbers[a] for a in args)
        self._numbers.append(counts or op not in _AMBIGUOUS)
        self._known[step] = self.first + len(self.steps) - 1
        return self._known[step]

    def args(self, value: Argument, op: str) -> tuple[Argument, ...] | None:
        """Of the step that makes a value, if it is such a step."""
        if not isinstance(value, int) or value < self.first:
            return None
        step = self.steps[value - self.first]
        return step.args if step.op == op else None

    def _product(self, a: Argument, b: Argument) -> Argument | None:
        if not isinstance(a, int):
            a, b = b, a
        if not isinstance(a, int):
            return None
        if not isinstance(b, int):
            return self._scaled(a, b)
        base_a, by_a = self._taken_apart(a)
        base_b, by_b = self._taken_apart(b)
        for value, other, by in ((a, base_b, by_b), (b, base_a, by_a)):
            if self._clamps_above(other, value):
                return self._scaled(self.push("hardswish", value), 6.0 * by)
        full_a, full_b = self.kinds[a] is Kind.FULL, self.kinds[b] is Kind.FULL
        if full_a and full_b:
            if by_a == 1.0 or by_b == 1.0 or not _moves(by_a * by_b, 16.0):  # else the product might leave it
                return None
            return self._scaled(self.push("mul", base_a, base_b), by_a * by_b)
        if full_a and by_a != 1.0:
            return self.push("mul", base_a, self._scaled(b, by_a))
        if full_b and by_b != 1.0:
            return self.push("mul", base_b, self._scaled(a, by_b))
        return None

    def _scaled(self, value: int, by: float) -> int:
        """value * by."""
        base, known = self._taken_apart(value)
        if not _moves(by) or not _moves(known * by):
            return self.push("mul", value, by)
        if known * by == 1.0 and self._numbers[base]:
            return base
        return self.push("mul", base, known * by)

    def _taken_apart(self, value: int) -> tuple[int, float]:
        """A value and the constant that it is multiplied by."""
        found = self.args(value, "mul")
        if found is not None and isinstance(found[0], int) and not isinstance(found[1], int) and _moves(found[1]):
            return found[0], found[1]
        return value, 1.0

    def _quotient(self, a: Argument, b: Argument) -> Argument | None:
        if (of := self._of_sigmoid(b)) is not None:
            sigmoid = self.push("sigmoid", of)
            return sigmoid if a == 1.0 and not isinstance(a, int) else self.simpler("mul", (a, sigmoid))
        if isinstance(a, int) and not isinstance(b, int) and _moves(b):
            return self._scaled(a, 1.0 / b)
        return None

    def _of_sigmoid(self, value: Argument) -> Argument | None:
        """u where the value is 1 + exp(-u)."""
        found = self.args(value, "add")
        if found is None or not _is_constant(found[1], 1.0):
            return None
        power = self.args(found[0], "exp")
        turned = self.args(power[0], "neg") if power else None
        return turned[0] if turned else None

    def _sum(self, a: Argument, b: Argument) -> Argument | None:
        """Constants come last; 1 + erf(x sqrt(1/2)) is twice the normal distribution of x."""
        if not isinstance(a, int):
            a, b = b, a
        if not isinstance(a, int):
            return None
        of = self.args(a, "erf") if _is_constant(b, 1.0) else None
        if of and isinstance(of[0], int):
            base, by = self._taken_apart(of[0])
            if math.isclose(by, _ROOT_OF_HALF, rel_tol=1e-6):
                return self._scaled(self.push("normal_cdf", base), 2.0)
        return self.push("add", a, b)

    def _clamps_above(self, value: int, x: Argument) -> bool:
        """Whether the value is x + 3 held between 0 and 6."""
        below = self.args(value, "minimum")
        if below is None or not _is_constant(below[1], 6.0):
            return False
        above = self.args(below[0], "maximum")
        if above is not None and _is_constant(above[1], 0.0):
            moved = self.args(above[0], "add")
        else:
            rectified = self.args(below[0], "relu")
            moved = self.args(rectified[0], "add") if rectified else None
        return moved is not None and moved[0] == x and isinstance(moved[0], int) and _is_constant(moved[1], 3.0)


def _is_constant(value: Argument, number: float) -> bool:
    return not isinstance(value, int) and value == number


def _moves(constant: Argument, most: float = _LARGE) -> bool:
    """Whether an argument is a constant that may be multiplied later."""
    return not isinstance(constant, int) and 1.0 / most <= abs(constant) <= most


def _renamed(program: Program, steps: Sequence[Step], found: Sequence[Argument]) -> Program:
    """With those of `steps` that results need, and results named by their new indices."""
    first = len(program.leaves)
    outputs = [program.gradient, program.transposed, *program.sums, *program.values]
    needed: set[int] = set()
    waiting = [found[index] for index in outputs if index is not None]
    while waiting:
        index = waiting.pop()
        if isinstance(index, int) and index not in needed:
            needed.add(index)
            waiting += steps[index - first].args if index >= first else ()
    names = {index: index for index in range(first)}
    names |= {index: number for number, index in enumerate(sorted(i for i in needed if i >= first), first)}
    kept = [
        Step(step.op, tuple(names[a] if isinstance(a, int) else a for a in step.args))
        for index, step in enumerate(steps, first)
        if index in needed
    ]

    def named(index: int | None) -> int | None:
        return None if index is None else names[int(found[index])]

    return replace(
        program,
        steps=tuple(kept),
        gradient=named(program.gradient),
        transposed=named(program.transposed),
        sums=tuple(names[int(found[index])] for index in program.sums),
        values=tuple(names[int(found[index])] for index in program.values),
    )
