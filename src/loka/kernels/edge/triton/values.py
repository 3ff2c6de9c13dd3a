"""The text that computes a program's values (kernels/edge/program.py), for kernels of any shape of tile.

Names in the text: p the index of a value, k a part of the tile.

    raw<p>tk, v<p>k  a leaf as it lies; a value. No k where all parts share it; t: of rows that come in turns
    live, inside     rows, and columns, that exist
"""

import functools
import math
import re
import struct
from collections.abc import Iterable, Sequence

import torch

from loka.core.problem import dtype_name
from loka.kernels.edge.program import BOOLEAN, CONCAT, REDUCTIONS, Argument, Kind, Program, Step

SIZES = {dtype_name(dtype): dtype.itemsize for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_BINARY = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "le": "{} <= {}",
    "lt": "{} < {}", "ge": "{} >= {}", "gt": "{} > {}", "eq": "{} == {}", "ne": "{} != {}",
    "maximum": "maximum_of({}, {})", "minimum": "minimum_of({}, {})",
}  # fmt: skip
_UNARY = {
    "neg": "-{}", "abs": "tl.abs({})", "exp": "exp_of({})", "log": "tl.log({})", "sqrt": "tl.sqrt({})",
    "rsqrt": "tl.rsqrt({})", "reciprocal": "inverse_of({})", "sigmoid": "sigmoid_of({})",
    "tanh": "tanh_of({})", "erf": "erf_of({})", "relu": "relu_of({})", "square": "{0} * {0}",
    "hardswish": "hardswish_of({})", "normal_cdf": "normal_cdf_of({})",
}  # fmt: skip
_LOGICAL = {"and": "{} & {}", "or": "{} | {}", "add": "{} | {}", "mul": "{} & {}", "maximum": "{} | {}",
            "minimum": "{} & {}"}  # fmt: skip
"""Of booleans, as PyTorch has them."""


class Code:
    """What a program says, with blocks of all features as rows: there is no difference but the name."""

    def __init__(self, program: Program, dtypes: tuple[str, ...]) -> None:
        self.program, self.dtypes = program, dtypes
        self.first_step = len(program.leaves)
        self.kinds, self.steps = list(program.kinds), list(program.steps)
        if program.block == program.features:
            self.kinds = [Kind.COLUMN if kind is Kind.BLOCK else kind for kind in self.kinds]
            self.steps = [Step("row_sum", s.args) if s.op == "block_sum" else s for s in self.steps]
        self.boolean = self._booleans()

    def step(self, index: int) -> Step | None:
        return None if index < self.first_step else self.steps[index - self.first_step]

    def is_reduction(self, index: int) -> bool:
        step = self.step(index)
        return step is not None and step.op in REDUCTIONS

    def is_row_sum(self, index: int) -> bool:
        step = self.step(index)
        return step is not None and step.op == "row_sum"

    @functools.cached_property
    def levels(self) -> list[int]:
        """How many sums of rows after each other a value waits for; a sum counts to those it is made with."""
        found = [0] * self.first_step
        for step in self.steps:
            given = [a for a in step.args if isinstance(a, int)]
            found.append(max((found[a] + self.is_row_sum(a) for a in given), default=0))
        return found

    def reached(self, roots: Iterable[int | None]) -> list[int]:
        """Values and what they are computed from, in order."""
        found: set[int] = set()
        waiting = [index for index in roots if index is not None]
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                step = self.step(index)
                waiting += [a for a in step.args if isinstance(a, int)] if step else []
        return sorted(found)

    def leaves(self, indices: Iterable[int], *kinds: Kind) -> list[int]:
        return [p for p in indices if p < self.first_step and self.kinds[p] in kinds]

    def matrices(self, indices: Iterable[int] | None = None) -> list[int]:
        """The leaves that are matrices, or parts of one; of all leaves, or of some values."""
        return self.leaves(range(self.first_step) if indices is None else indices, Kind.FULL, Kind.PART)

    def element_bytes(self, indices: Iterable[int] | None = None) -> float:
        """Of the matrices among leaves, for each element of the program's; of a part its share."""
        sizes = (SIZES[self.dtypes[p]] * self.program.columns[p] for p in self.matrices(indices))
        return sum(sizes) / self.program.features

    def _booleans(self) -> list[bool]:
        found = [dtype == "bool" for dtype in self.dtypes]
        for step in self.steps:
            given = [isinstance(a, int) and found[a] for a in step.args]
            if step.op == "where":
                given = given[1:]
            keeps = step.op in ("where", "copy", *_LOGICAL) and all(given)
            found.append(step.op in BOOLEAN or keeps)
        return found


class Lines:
    """Lines of a kernel that holds tiles of rows and columns, in several parts of one shape.

    Attributes:
        shared: kinds of which all parts have one value.
        shape: of a part, as text: [rows, columns] or [blocks, rows, columns of a block].
        rowwise, columnwise: what makes a tile of numbers for rows, and for columns.
        along, down: the axes of columns, the last first, and that of rows.
        rows_even: whether all rows of tiles exist.
    """

    def __init__(self, code: Code, shape: tuple[int, ...], *, shared: tuple[Kind, ...], rows_even: bool) -> None:
        self.code, self.shared, self.rows_even = code, shared, rows_even
        self.along: tuple[int, ...]
        if len(shape) == 2:
            self.rowwise, self.columnwise, self.along, self.down = "[:, None]", "[None, :]", (1,), 0
        else:
            self.rowwise, self.columnwise, self.along, self.down = ("[None, :, None]", "[:, None, :]", (2, 0), 1)
        self.shape = f"[{', '.join(map(str, shape))}]"
        self.one = f"[{', '.join('1' for _ in shape)}]"
        self.lines: list[str] = []
        self.turn = ""  # of the rows that lines are of, where these come in turns
        self.depth = 1

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def let(self, name: str, text: str) -> str:
        self.emit(f"{name} = {text}")
        return name

    def define(self, name: str, parameters: Iterable[str], plain: Iterable[str]) -> str:
        """The function, with those of the parameters that its lines read: each one costs the host time at a launch.
        `plain` are integers whose values are no reason to compile anew."""
        read = set(re.findall(r"\w+", "\n".join(self.lines)))
        own = [parameter for parameter in parameters if parameter in read]
        plain = [parameter for parameter in plain if parameter in read]
        head = f"@triton.jit(do_not_specialize={plain})\ndef {name}({', '.join(own)}):\n"
        return head + "\n".join(self.lines) + "\n"

    # Which elements exist.

    def live(self, k: str, shape: str = "") -> str | None:
        """The condition that rows of a part exist; None where all do."""
        raise NotImplementedError

    def here(self, name: str, k: str) -> str | None:
        """Likewise for columns: `inside` the program, or `kept` in its padded copies."""
        raise NotImplementedError

    def existing(self, text: str, k: str, zero: str = "0.0") -> str:
        """With zeros beside the program."""
        inside = self.here("inside", k)
        return f"tl.where({inside}, {text}, {zero})" if inside else text

    def has(self, index: int, k: str) -> bool:
        """Whether a part of the tile has elements of a value; a leaf that is a part of a matrix may lie beside it."""
        return True

    def concatenated(self, step: Step, k: str) -> str:
        """The values of parts of a matrix, each in its columns."""
        raise NotImplementedError("only kernels of whole rows read parts of a matrix")

    # Values.

    def name(self, index: int, k: str) -> str:
        return f"v{index}" if self.code.kinds[index] in self.shared else f"v{index}{k}"

    def compute(self, indices: Iterable[int], parts: Sequence[str], *, use: bool = True) -> None:
        """Values, each from those before it; of sums those that can be are made at once."""
        levels = self.code.levels
        waiting: list[int] = []
        for index in sorted(indices, key=lambda p: (levels[p], self.code.is_row_sum(p), p)):
            if waiting and (levels[index] != levels[waiting[0]] or len(waiting) == 2):
                self._sum_rows(waiting, parts)
                waiting = []
            if self.code.is_row_sum(index):
                waiting.append(index)
                continue
            step = self.code.step(index)
            for k in parts[:1] if self.code.kinds[index] in self.shared else parts:
                if not self.has(index, k):
                    continue
                text = self._leaf(index, k) if step is None else self._step(step, k, parts)
                self.let(self.name(index, k), text)
                if use:
                    self.known(index, k)
        self._sum_rows(waiting, parts)

    def known(self, index: int, k: str) -> None:
        """Called when there is a value, so that what is made of it need not wait: registers are few."""

    def _sum_rows(self, indices: list[int], parts: Sequence[str]) -> None:
        """Two sums wait for each other's threads once."""
        steps = [self.code.step(index) for index in indices]
        summed = [a for s in steps if s for a in s.args if isinstance(a, int)]
        values = [" + ".join(self.existing(self.full(a, k), k) for k in parts) for a in summed]
        names = [f"v{index}" for index in indices]
        if len(indices) == 1:
            self.let(names[0], f"{self.across('tl.sum({}, axis={})', values[0])}{self.rowwise}")
        if len(indices) == 2:
            for axis in self.along:
                self.let(", ".join(names), f"sums_of({', '.join(values)}, {axis})")
                values = names
            for name in names:
                self.let(name, f"{name}{self.rowwise}")
        for index in indices:
            self.known(index, parts[0])

    def full(self, index: int, k: str) -> str:
        """The value as float32 for every element."""
        text = self.number(index, k)
        whole = self.code.kinds[index] is Kind.FULL
        return text if whole else f"({text} + tl.zeros({self.shape}, tl.float32))"

    def number(self, index: int, k: str) -> str:
        return f"{self.name(index, k)}.to(tl.float32)" if self.code.boolean[index] else self.name(index, k)

    def _leaf(self, index: int, k: str, less: float = 0.0) -> str:
        kind, dtype = self.code.kinds[index], self.code.dtypes[index]
        raw = f"raw{index}{self.turn}" if kind in self.shared else f"raw{index}{self.turn}{k}"
        if kind is Kind.SCALAR:
            raw = f"tl.load(leaf{index}_ptr)"
        elif kind is Kind.COLUMN:
            raw += self.rowwise
        if dtype == "bool":
            return f"{raw} != 0"
        if dtype in ("float8_e4m3fn", "float8_e5m2"):
            return f"{dtype.removeprefix('float8_').removesuffix('fn')}_number({raw})"
        if dtype == "uint8":
            return f"byte_number({raw}, {less})"
        return f"widened({raw})" if kind in (Kind.FULL, Kind.PART) else f"{raw}.to(tl.float32)"

    def _step(self, step: Step, k: str, parts: Sequence[str]) -> str:
        if step.op in REDUCTIONS:
            return self._reduced(step, k, parts)
        if step.op == CONCAT:
            return self.concatenated(step, k)
        constant = [not isinstance(a, int) for a in step.args]
        boolean = [isinstance(a, int) and self.code.boolean[a] for a in step.args]
        names = [self.name(a, k) if isinstance(a, int) else _literal(a, self.one) for a in step.args]
        if step.op in ("maximum", "minimum") and constant[0]:
            names, boolean = names[::-1], boolean[::-1]
        if all(constant):  # Triton would compute with Python's numbers, or refuse them
            names[0] = f"tl.full({self.one}, {names[0]}, tl.float32)"
        if step.op == "copy":
            return names[0]
        floats = [f"{n}.to(tl.float32)" if b else n for n, b in zip(names, boolean, strict=True)]
        truths = [n if b else f"({n} != 0.0)" for n, b in zip(names, boolean, strict=True)]
        if step.op == "not":
            return f"{names[0]} == 0"
        index, less = step.args[0], step.args[-1]
        if step.op == "sub" and self._is_byte(index) and constant[1] and less * 256 in range(1 << 16):
            return self._leaf(int(index), k, less)
        if step.op == "where":
            chosen = names if all(boolean[1:]) else floats
            return f"tl.where({truths[0]}, {chosen[1]}, {chosen[2]})"
        if step.op in ("and", "or") or (step.op in _LOGICAL and all(boolean)):
            return _LOGICAL[step.op].format(*truths)
        if step.op == "div" and self._is_cheap_to_invert(step.args[1]):
            return f"{floats[0]} * ({_inverse(step.args[1], floats[1], self.one)})"
        if step.op in _BINARY:
            return _BINARY[step.op].format(*floats)
        return _UNARY[step.op].format(*floats)

    def _is_byte(self, index: Argument) -> bool:
        return isinstance(index, int) and index < self.code.first_step and self.code.dtypes[index] == "uint8"

    def _is_cheap_to_invert(self, by: Argument) -> bool:
        """A number for more than an element, and what has an inverse that is a normal number."""
        if isinstance(by, int):
            return self.code.kinds[by] is not Kind.FULL
        return 2.0**-126 <= abs(by) <= 2.0**126

    def _reduced(self, step: Step, k: str, parts: Sequence[str]) -> str:
        (index,) = step.args
        assert isinstance(index, int)
        if step.op == "block_sum":
            return f"tl.sum({self.existing(self.full(index, k), k)}, axis=2)[:, :, None]"
        assert step.op == "row_max"
        values = [self.existing(self.full(index, part), part, "-float('inf')") for part in parts]
        most = self.across("row_max_of({}, {})", folded("maximum_of", values))
        return f"{most}{self.rowwise}"

    def across(self, reduction: str, text: str) -> str:
        """A reduction over all columns."""
        for axis in self.along:
            text = reduction.format(text, axis)
        return text


def folded(function: str, values: Sequence[str]) -> str:
    return functools.reduce(lambda a, b: f"{function}({a}, {b})", values)


def mask_of(*conditions: str | None) -> str:
    """An argument of loads and stores. What is not loaded is any number, and nothing that counts reads it."""
    found = [condition for condition in conditions if condition]
    return f", mask={' & '.join(found)}" if found else ""


def power_above(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << (size - 1).bit_length()


def power_below(size: int) -> int:
    """The largest power of two that is no more, at least 1."""
    return 1 << max(size.bit_length() - 1, 0)


def _inverse(by: Argument, text: str, one: str) -> str:
    return f"1.0 / {text}" if isinstance(by, int) else _literal(1.0 / by, one)


def _literal(number: float, one: str) -> str:
    """A constant as float32, which Triton would take for float64 where it is no normal float32."""
    if math.isnan(number):
        return 'float("nan")'
    try:
        (number,) = struct.unpack("f", struct.pack("f", number))
    except OverflowError:
        number = math.copysign(math.inf, number)
    if math.isinf(number):
        return 'float("inf")' if number > 0 else '(-float("inf"))'
    if 0.0 < abs(number) < 2.0**-126:
        return f"tl.full({one}, {number!r}, tl.float32)"
    return repr(number) if math.copysign(1.0, number) > 0 else f"({number!r})"
