"""What lies between two FP8 GEMMs, written down as values: pointwise code and norms of one matrix [T, N].

A program is in single assignment form: leaves are tensors that a kernel reads, steps are float32 (or
boolean) values computed from earlier ones. It names which values leave, and in which form. The text of a
program is an argument of the op that runs it (kernels/edge/op.py), so that compiled graphs and their
caches hold all there is to know.

Kinds of values, by what they are a number for:

    full    [T, N]     an element        column  [T]        a row
    row     [N]        a feature         block   [T, N / b] a row and block of b features
    scalar  []         all               part    [T, n]     an element of some columns, read by `concat` alone
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a value of a program is a number for; see the text of this module."""

    FULL = "full"
    ROW = "row"
    COLUMN = "column"
    BLOCK = "block"
    SCALAR = "scalar"
    PART = "part"


Argument = int | float
"""Of a step: an int is the index of a leaf or an earlier step, a float is a constant."""

POINTWISE = (
    "add", "sub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sigmoid", "tanh",
    "erf", "relu", "maximum", "minimum", "square", "where", "le", "lt", "ge", "gt", "eq", "ne", "and", "or",
    "not", "copy", "hardswish", "normal_cdf",
)  # fmt: skip
BOOLEAN = ("le", "lt", "ge", "gt", "eq", "ne", "and", "or", "not")
REDUCTIONS = ("row_sum", "row_max", "block_sum")  # full -> column, column, block; float32
CONCAT = "concat"  # parts, side by side -> full
VALUE_DTYPES = ("float32", "bfloat16", "float16")  # in which values leave
_TWO = (
    "add", "sub", "mul", "div", "maximum", "minimum", "le", "lt", "ge", "gt", "eq", "ne", "and", "or",
)  # fmt: skip
ARITY = {**dict.fromkeys(POINTWISE + REDUCTIONS, 1), **dict.fromkeys(_TWO, 2), "where": 3}


@dataclass(frozen=True, eq=False)
class Step:
    """One operation of a program: its name, and its arguments as indices of earlier values or as constants."""

    op: str
    args: tuple[Argument, ...]

    def __eq__(self, other: object) -> bool:
        """Compares the texts, because in Python the index 0 equals the constants 0.0 and -0.0."""
        return isinstance(other, Step) and (self.op, repr(self.args)) == (other.op, repr(other.args))

    def __hash__(self) -> int:
        return hash((self.op, repr(self.args)))


@dataclass(frozen=True, kw_only=True)
class Program:
    """Computes on matrices of `features` columns.

    Attributes:
        leaves: the kind of every tensor read. float8 leaves count as their stored numbers: a program
            multiplies by their scales itself.
        steps: in order; index p < len(leaves) is a leaf, then come the steps.
        block: features of one block, which divides `features`; `features` where no step asks for blocks.
        gradient: the value G to be quantized under a power-of-two scale r_i of each row, or None.
        row, column: whether G's copies are wanted as they lie, and transposed.
        integers: whether a copy as it lies is wanted in INT8 too, by the recipe `int8_row`.
        transposed: the value A to be written transposed, times the r_i of another gradient, or None.
        sums: values whose sums over rows are wanted.
        values: values that leave as they are, in the `value_dtypes`: full, column or block.
        widths: columns n of each leaf that is a part, in their order.
    """

    features: int
    block: int
    leaves: tuple[Kind, ...]
    steps: tuple[Step, ...] = ()
    gradient: int | None = None
    row: bool = False
    column: bool = False
    integers: bool = False
    transposed: int | None = None
    sums: tuple[int, ...] = ()
    values: tuple[int, ...] = ()
    value_dtypes: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """A kernel's text is made of what is checked here: names out of closed lists, and numbers."""
        _check(type(self.features) is int and type(self.block) is int, "sizes that are no integers")
        if self.features < 1 or self.block < 1 or self.features % self.block:
            raise ValueError(f"blocks of {self.block} do not divide {self.features} features")
        _check(all(isinstance(kind, Kind) for kind in self.leaves), "leaves of no kind")
        parts = [index for index, kind in enumerate(self.leaves) if kind is Kind.PART]
        _check(len(self.widths) == len(parts), f"widths {self.widths} of {len(parts)} parts")
        _check(all(type(each) is int and each > 0 for each in self.widths), f"widths {self.widths}")
        read: list[int] = []
        for index, step in enumerate(self.steps, len(self.leaves)):
            arity = len(step.args) if step.op == CONCAT else ARITY.get(step.op)
            if arity is None:
                raise ValueError(f"a program has no step {step.op!r}; it has {(*POINTWISE, *REDUCTIONS, CONCAT)}")
            _check(len(step.args) == arity, f"{arity} arguments are not those of {step}")
            _check(all(type(a) in (int, float) for a in step.args), f"{step} of what is no number")
            if any(isinstance(a, int) and not 0 <= a < index for a in step.args):
                raise ValueError(f"step {index} reads what comes after it: {step}")
            _check(step.op not in REDUCTIONS or type(step.args[0]) is int, f"{step} of a constant")
            _check((step.op == CONCAT) == any(a in parts for a in _indices(step)), f"{step} of parts, or of none")
            if step.op == CONCAT:
                _check(set(step.args) <= set(parts), f"{step} of other than parts")
                wide = sum(self.columns[index] for index in _indices(step))
                _check(wide == self.features, f"{step} of {wide} columns for {self.features}")
                read += _indices(step)
        _check(len(read) == len(set(read)), "a part that is read twice")
        self._check_results()

    def _check_results(self) -> None:
        count = len(self.leaves) + len(self.steps)
        for value in (self.gradient, self.transposed, *self.sums, *self.values):
            _check(value is None or type(value) is int, f"an index that is no integer, {value!r}")
            if value is not None and not 0 <= value < count:
                raise ValueError(f"the program has no value {value}")
            _check(value is None or self.kinds[value] is not Kind.PART, f"a part, {value}, as a result")
        told = (self.row, self.column, self.integers)
        _check(all(type(each) is bool for each in told), "copies that are not told by booleans")
        if self.gradient is None and (self.row or self.column or self.integers):
            raise ValueError("copies of a gradient that the program does not have")
        _check(
            len(self.values) == len(self.value_dtypes) and set(self.value_dtypes) <= set(VALUE_DTYPES),
            f"dtypes {self.value_dtypes} for values {self.values}",
        )
        for value in self.values:
            kind = self.kinds[value]
            _check(kind in (Kind.FULL, Kind.COLUMN, Kind.BLOCK), f"value {value} cannot leave: it is {kind}")

    def __hash__(self) -> int:
        """Computed once: every launch looks a program up, and hashing a long one takes longer than the lookup."""
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(value for name, value in self.__dict__.items() if name not in _DERIVED))

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of all values, in the order of their indices."""
        found = list(self.leaves)
        for step in self.steps:
            found.append(kind_made_by(step, found))
        return tuple(found)

    @functools.cached_property
    def columns(self) -> dict[int, int]:
        """How many each leaf has that is a matrix."""
        widths = iter(self.widths)
        matrices = [(index, kind) for index, kind in enumerate(self.leaves) if kind in (Kind.FULL, Kind.PART)]
        return {index: self.features if kind is Kind.FULL else next(widths) for index, kind in matrices}

    @functools.cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        """Of each part that a `concat` reads: its first column there, and the column behind its last."""
        found = {}
        for step in self.steps:
            begin = 0
            for index in _indices(step) if step.op == CONCAT else ():
                found[index] = begin, begin + self.columns[index]
                begin += self.columns[index]
        return found

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the tensors that the op returns, in order.

        row    float8 [T, N16]   G / r              column  float8 [N16, T16]  its transpose
        r      float32 [T, 1]                       tops    float32 [P]   maxima of r_i * input_scale_i over
                                                            every `GROUP` rows; where column is wanted
        integer int8 [T, N16]    G / step           step    float32 [T, 1]
        transposed float8 [N16, T16] (A r' / M)^T       top     float32 [1]   M, the maximum of the given tops
        sum<i> float32 [N]       over all rows
        value<i>                 full [T, N], column [T, 1], block [T, N / b, 1]
        """
        names: list[str] = []
        if self.gradient is not None:
            names += ["row"] * self.row + ["column"] * self.column + ["r"] + ["tops"] * self.column
            names += ["integer", "step"] * self.integers
        if self.transposed is not None:
            names += ["transposed", "top"]
        names += (f"sum{index}" for index in range(len(self.sums)))
        return (*names, *(f"value{index}" for index in range(len(self.values))))

    def to_text(self) -> str:
        content = {
            **self.__dict__,
            "leaves": [kind.value for kind in self.leaves],
            "steps": [[step.op, *(a if isinstance(a, int) else repr(a) for a in step.args)] for step in self.steps],
        }
        for name in _DERIVED:
            content.pop(name, None)
        return json.dumps(content, separators=(",", ":"))


_DERIVED = ("kinds", "columns", "spans", "_hash")  # what a program's own attributes say already
GROUP = 32  # rows that one of the tops is of, and runs of a transposed copy that a kernel writes at least


def _indices(step: Step) -> list[int]:
    return [a for a in step.args if isinstance(a, int)]


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"this is no program: {what}")


@functools.lru_cache(maxsize=4096)
def program_of(text: str) -> Program:
    """The program that `Program.to_text` wrote. Other text raises ValueError, LookupError or TypeError."""
    content: dict[str, Any] = json.loads(text)
    steps = tuple(
        Step(op, tuple(float(a) if isinstance(a, str) else a for a in args)) for op, *args in content["steps"]
    )
    lists = {name: tuple(content[name]) for name in ("sums", "values", "value_dtypes", "widths")}
    leaves = tuple(Kind(kind) for kind in content["leaves"])
    return Program(**{**content, **lists, "leaves": leaves, "steps": steps})


def in_parts(program: Program, leaf: int, widths: Sequence[int]) -> Program:
    """The program that reads a leaf, a matrix, as parts of these widths."""
    more, first = len(widths) - 1, len(program.leaves) + len(widths) - 1

    def moved(index: int) -> int:
        if index == leaf:
            return first
        return index + (index > leaf) * more + (index >= len(program.leaves))

    def moved_if(index: int | None) -> int | None:
        return None if index is None else moved(index)

    steps = (Step(s.op, tuple(moved(a) if isinstance(a, int) else a for a in s.args)) for s in program.steps)
    before = sum(kind is Kind.PART for kind in program.leaves[:leaf])
    return replace(
        program,
        leaves=(*program.leaves[:leaf], *[Kind.PART] * len(widths), *program.leaves[leaf + 1 :]),
        steps=(Step(CONCAT, tuple(range(leaf, leaf + len(widths)))), *steps),
        gradient=moved_if(program.gradient),
        transposed=moved_if(program.transposed),
        sums=tuple(map(moved, program.sums)),
        values=tuple(map(moved, program.values)),
        widths=(*program.widths[:before], *widths, *program.widths[before:]),
    )


def kind_made_by(step: Step, kinds: Sequence[Kind]) -> Kind:
    """The kind of a step's value, given those of the values before it."""
    if step.op == CONCAT:
        return Kind.FULL
    if step.op in REDUCTIONS:
        return Kind.BLOCK if step.op == "block_sum" else Kind.COLUMN
    return joined([kinds[a] for a in step.args if isinstance(a, int)])


def joined(kinds: list[Kind]) -> Kind:
    """The kind of what is computed elementwise from values of these kinds."""
    found = set(kinds) - {Kind.SCALAR}
    if not found:
        return Kind.SCALAR
    if found == {Kind.ROW}:
        return Kind.ROW
    if Kind.FULL in found or Kind.ROW in found:
        return Kind.FULL
    return Kind.BLOCK if Kind.BLOCK in found else Kind.COLUMN
