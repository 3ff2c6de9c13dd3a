"""The text of the kernel that holds whole rows of a program: one text for each way to launch it.

A program of the grid reads every leaf of R rows once and holds all N features of them in registers, so that
sums over rows and the maximum of a row take no second look. It writes what lies row by row. Where sums over all
rows are wanted, a program walks through several groups of R rows, and leaves one sum of them.

What is wanted transposed is written here too where a program can hold `GROUP` rows of bytes: it computes every
fourth row of them, in four turns, until four rows make one word of a copy. Else bytes are written row by row,
and transposed by tall.py.

A row is parts of one shape: [R, C], or [B, R, b] where blocks count: B blocks of b features, padded to a
power of two. Threads lie along a part with V features each, as far as it reaches, and hold all its rows:
Triton shares a tile among warps along its last axis first, then along its first. The padding of a copy lies
behind the last block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from loka.core.problem import round_up
from loka.kernels.edge.program import GROUP, Kind, Step
from loka.kernels.edge.triton.values import Code, Lines, folded, mask_of, power_above


class Sides(NamedTuple):
    """Of a row: how many parts it has, and of a part the blocks, 0 where they do not count, and features."""

    parts: int
    blocks: int
    wide: int

    @property
    def width(self) -> int:
        return max(self.blocks, 1) * self.wide


@dataclass(frozen=True, kw_only=True)
class RowLaunch:
    """All that the text depends on besides the program and its leaves' dtypes.

    Attributes:
        rows: R.
        vector: V.
        walks: whether a program has more than one group of R rows.
        stages: groups that it then holds at once: all but one are still read.
        even: whether all rows of groups exist.
        copy: whether the bytes of the gradient are written.
        staged: whether those of the transposed value are computed.
        turns: whether `rows` is a quarter of GROUP, which come in four turns, and copies are transposed here.
        scales: numbers of the input's scale for a row then: 0 for one of all rows, None where it has none.
    """

    rows: int
    sides: Sides
    vector: int
    walks: bool
    stages: int
    even: bool
    copy: bool
    staged: bool
    turns: bool = False
    scales: int | None = None


def row_indices(code: Code, *, staged: bool) -> list[int]:
    """The values that the kernel computes."""
    program = code.program
    transposed = program.transposed if staged else None
    return code.reached([program.gradient, transposed, *program.sums, *program.values])


def sides_of(code: Code, width: int, *, staged: bool) -> Sides:
    """For parts of about that width, where a row is wider."""
    program = code.program
    columns = round_up(program.features, 16)
    if Kind.BLOCK not in (code.kinds[p] for p in row_indices(code, staged=staged)):
        wide = min(power_above(columns), width)
        return Sides(-(-columns // wide), 0, wide)
    wide = power_above(program.block + columns - program.features)
    count = program.features // program.block
    blocks = min(max(width // wide, 1), power_above(count))
    return Sides(-(-count // blocks), blocks, wide)


def row_source(code: Code, launch: RowLaunch) -> str:
    """Python that defines the kernel `edge_rows`."""
    return _Rows(code, launch).text()


class _Rows(Lines):
    def __init__(self, code: Code, launch: RowLaunch) -> None:
        sides = launch.sides
        shape = (*((sides.blocks,) if sides.blocks else ()), launch.rows, sides.wide)
        super().__init__(code, shape, shared=(Kind.COLUMN, Kind.SCALAR), rows_even=launch.even)
        self.launch, self.sides = launch, sides
        self.indices = row_indices(code, staged=launch.staged)
        self.columns = round_up(code.program.features, 16)
        self.parts = [f"_{k}" for k in range(sides.parts)]
        self.reach = max(sides.blocks, 1) * (code.program.block if sides.blocks else sides.wide)
        whole = sides.blocks == 0 or sides.wide == code.program.block
        self.even = [whole and (k + 1) * self.reach <= code.program.features for k in range(sides.parts)]

    def live(self, k: str, shape: str = "") -> str | None:
        return None if self.rows_even else f"live{self.turn}{shape}"

    def here(self, name: str, k: str) -> str | None:
        return None if self.even[int(k[1:])] else f"{name}{k}{self.columnwise}"

    def text(self) -> str:
        launch, kinds = self.launch, self.code.kinds
        before = [p for p in self.indices if kinds[p] in (Kind.ROW, Kind.SCALAR)]
        self._open(before)
        if launch.turns:
            self._take_turns(before)
            return self._defined()
        if launch.walks:
            along = f"0, (end - begin).to(tl.int32), {launch.rows}, num_stages={launch.stages}"
            self.emit(f"for group in tl.range({along}):")
            self.depth += 1
            self.emit("start = begin + group")
        self.emit(f"q = tl.arange(0, {launch.rows})")
        self._load("end" if launch.walks else "rows")
        self._compute(before)
        if launch.walks:
            self.depth -= 1
        self._leave_sums()
        return self._defined()

    def _defined(self) -> str:
        return self.define("edge_rows", self._parameters(), ("rows", "span", "count"))

    def _parameters(self) -> list[str]:
        program = self.code.program
        return [
            *(f"leaf{p}_ptr" for p in range(len(program.leaves))),
            *("row_ptr", "staged_ptr", "r_ptr", "integer_ptr", "step_ptr", "part_ptr"),
            *(f"value{number}_ptr" for number in range(len(program.values))),
            *("column_ptr", "transposed_ptr", "top_ptr", "tops_ptr", "input_scale_ptr", "padded_rows"),
            *("gradient_scale_ptr", "given_ptr", "rows", "span", "count"),
            *(f"stride{p}" for p in self.code.matrices()),
        ]

    def _compute(self, before: Sequence[int]) -> None:
        for index in before:
            self.known(index, "")
        self.compute([p for p in self.indices if p not in before], self.parts)
        self._scale()

    def _take_turns(self, before: Sequence[int]) -> None:
        """Each reads ahead for the next one."""
        turns = [f"_t{number}" for number in range(4)]
        column = self.code.program.column
        self.emit(f"w = tl.arange(0, {self.launch.rows})")
        self.emit(f"q = tl.arange(0, {GROUP})")
        if column:
            self._read_scales()
        for number, ahead in enumerate([*turns, ""]):
            if ahead:
                self.turn = ahead
                self.emit(f"q{ahead} = 4 * w + {number}")
                self._load("rows")
            if number:
                self.turn = turns[number - 1]
                self._compute(before)
            elif self.launch.staged:
                self._read_top()
        self.turn = ""
        self._store_scales(turns)
        self.emit("along, high = padded_rows // 4, start // 4")
        if column:
            self._store_top()
            self._transpose("row", "column", turns)
        if self.launch.staged:
            self.emit("if tl.program_id(0) == 0:")
            self.emit("    tl.store(top_ptr, top)")
            self._transpose("staged", "transposed", turns)

    def _store_scales(self, turns: Sequence[str]) -> None:
        """At once, as they lie: one exchange among threads in place of four."""
        first, second, third, fourth = (f"r{turn}" for turn in turns)
        self.let("r", f"tl.join(tl.join({first}, {third}), tl.join({second}, {fourth}))")
        self.let("r", f"tl.reshape(r, [{GROUP}])")
        self.emit(f"tl.store(r_ptr + start + q, r{mask_of(self._all_live())})")

    def _all_live(self) -> str | None:
        return None if self.launch.even else "q < rows - start"

    def _read_scales(self) -> None:
        """Of the input, for all turns: what is read first is there when it is needed, and no sooner."""
        scales = self.launch.scales
        if scales is None:
            self.let("input_scale", "1.0")
        elif scales > 1:
            count = f"{scales}, {power_above(scales)}"
            self.let("input_scale", f"numbers_of(input_scale_ptr, start + q, rows, {count})")
        else:
            at = f"input_scale_ptr + start + q{mask_of(self._all_live())}" if scales else "input_scale_ptr"
            self.let("input_scale", f"tl.load({at})")

    def _store_top(self) -> None:
        """Of r times the input's scale."""
        several = (self.launch.scales or 0) > 1
        live, scale = self._all_live(), "largest_of(input_scale)" if several else "input_scale"
        bits = f"magnitude_bits(r * {scale})"
        bits = f"tl.where({live}, {bits}, 0)" if live else bits
        self.emit(f"tl.store(tops_ptr + tl.program_id(0), tl.max({bits}, axis=0).to(tl.float32, bitcast=True))")

    def _transpose(self, name: str, to: str, turns: Sequence[str]) -> None:
        below = None if self.launch.even else f"(high + w < along){self.rowwise}"
        for k in self.parts:
            words = f"four_rows({', '.join(f'{name}{turn}{k}' for turn in turns)})"
            at = f"{to}_ptr + high + (c{k}{self.columnwise}.to(tl.int64) * along + w{self.rowwise})"
            self.emit(f"tl.store({at}, {words}{mask_of(below, self.here('kept', k))})")

    def _open(self, before: Sequence[int]) -> None:
        launch = self.launch
        if launch.walks:
            self.emit("begin = tl.program_id(0).to(tl.int64) * span")
            self.emit("end = tl.minimum(begin + span, rows)")
        else:
            self.emit(f"start = tl.program_id(0).to(tl.int64) * {GROUP if launch.turns else launch.rows}")
        for number, k in enumerate(self.parts):
            self._columns(number, k)
        for index in self.code.leaves(before, Kind.ROW):
            for k in self.parts:
                at = f"leaf{index}_ptr + c{k}{self.columnwise}"
                self.let(f"raw{index}{k}", f"tl.load({at}{mask_of(self.here('inside', k))})")
        self.compute(before, self.parts, use=False)
        if launch.staged and not launch.turns:
            self._read_top()
        blocks, wide = self.sides[1:]
        shape = f"[{blocks}, {wide}]" if blocks else f"[{wide}]"
        for number in range(len(self.code.program.sums)):
            for k in self.parts:
                self.let(f"total{number}{k}", f"tl.zeros({shape}, tl.float32)")

    def _read_top(self) -> None:
        self.emit("top = top_of(given_ptr, count)")
        self.let("by", "inverse_of_power(top)")

    def _columns(self, number: int, k: str) -> None:
        """Their numbers: V at a time count as neighbours, whatever lies in a thread then."""
        program, (_, blocks, wide) = self.code.program, self.sides
        along = f"tl.max_contiguous(tl.arange(0, {wide}), {min(self.launch.vector, wide)})"
        if not blocks:
            self.let(f"c{k}", f"{number * wide} + {along}")
            self.let(f"inside{k}", f"c{k} < {program.features}")
            self.let(f"kept{k}", f"c{k} < {self.columns}")
            return
        self.let("t", along)
        self.let(f"b{k}", f"{number * blocks} + tl.arange(0, {blocks})")
        self.let(f"c{k}", f"b{k}[:, None] * {program.block} + t[None, :]")
        count = program.features // program.block
        self.let(f"inside{k}", f"(t < {program.block})[None, :] & (b{k} < {count})[:, None]")
        self.let(f"kept{k}", f"inside{k} | (b{k} == {count - 1})[:, None] & (c{k} < {self.columns})")

    # Leaves.

    def _load(self, end: str) -> None:
        """All leaves of a group before any arithmetic, so that no load waits for it."""
        start, live, q = "start", self.live(""), f"q{self.turn}"
        if live:
            self.emit(f"{live} = {q} < {end} - start")
        for index in self.code.leaves(self.indices, Kind.FULL, Kind.PART, Kind.COLUMN, Kind.BLOCK):
            kind = self.code.kinds[index]
            if kind is Kind.COLUMN:
                self.let(f"raw{index}{self.turn}", f"tl.load(leaf{index}_ptr + {start} + {q}{mask_of(live)})")
                continue
            for k in self.parts:
                if not self.has(index, k):
                    continue
                among = None
                if kind is Kind.BLOCK:
                    at, inside = self._blocks(start, k)
                else:
                    at, inside = self._elements(start, f"stride{index}", k), self.here("inside", k)
                if kind is Kind.PART:
                    at, among = f"{at} - {self.code.program.spans[index][0]}", self._among(index, k)
                mask = mask_of(self.live("", self.rowwise), inside, among)
                self.let(f"raw{index}{self.turn}{k}", f"tl.load(leaf{index}_ptr + {at}{mask})")
        if self.launch.staged:
            self.let(f"rawscale{self.turn}", f"tl.load(gradient_scale_ptr + {start} + {q}{mask_of(live)})")

    def _elements(self, start: str, stride: str | int, k: str) -> str:
        return f"{start} * {stride} + (q{self.turn}{self.rowwise} * {stride} + c{k}{self.columnwise})"

    def _blocks(self, start: str, k: str) -> tuple[str, str | None]:
        """Where numbers of blocks lie, and which of them exist."""
        count = self.code.program.features // self.code.program.block
        at = f"{start} * {count} + (q{self.turn}{self.rowwise} * {count} + b{k}[:, None, None])"
        return at, None if self.even[int(k[1:])] else f"(b{k} < {count})[:, None, None]"

    def has(self, index: int, k: str) -> bool:
        begin, end = self.code.program.spans.get(index, self._reach(k))
        return begin < self._reach(k)[1] and self._reach(k)[0] < end

    def concatenated(self, step: Step, k: str) -> str:
        *others, last = (int(index) for index in step.args if self.has(int(index), k))
        text = self.name(last, k)
        for index in reversed(others):
            behind = self.code.program.spans[index][1]
            text = f"tl.where(c{k}{self.columnwise} < {behind}, {self.name(index, k)}, {text})"
        return text

    def _reach(self, k: str) -> tuple[int, int]:
        """The columns of a part of the tile."""
        begin = int(k[1:]) * self.reach
        return begin, min(begin + self.reach, self.code.program.features)

    def _among(self, index: int, k: str) -> str | None:
        """Which columns of a part of the tile a leaf has that is a part of a matrix; None where it has all."""
        (begin, end), (first, last) = self.code.program.spans[index], self._reach(k)
        limits = [f"(c{k} >= {begin})"] * (first < begin) + [f"(c{k} < {end})"] * (end < last)
        return f"({' & '.join(limits)}){self.columnwise}" if limits else None

    # Outputs.

    def known(self, index: int, k: str) -> None:
        kind = self.code.kinds[index]
        for part in self.parts if kind in self.shared or kind is Kind.ROW else [k]:
            self._use(index, part)

    def _use(self, index: int, k: str) -> None:
        program, launch = self.code.program, self.launch
        if launch.staged and index == program.transposed:
            self.let("factor", f"(rawscale{self.turn} * by){self.rowwise}")
            self._store_bytes("staged", f"{self.full(index, k)} * factor", k)
        for number, summed in enumerate(program.sums):
            if index == summed:
                text = self.full(index, k)
                if not launch.even:
                    text = f"tl.where({self.live('', self.rowwise)}, {text}, 0.0)"
                self.let(f"total{number}{k}", f"total{number}{k} + tl.sum({text}, axis={self.down})")
        for number, (value, dtype) in enumerate(zip(program.values, program.value_dtypes, strict=True)):
            if index == value:
                self._store_value(number, index, dtype, k)

    def _scale(self) -> None:
        gradient = self.code.program.gradient
        if gradient is None:
            return
        self._largest(gradient)
        self.let(f"r{self.turn}, inverse_r", "scale_above(most)")
        if not self.launch.turns:  # else those of all turns at once
            self._store_number("r")
        self.let("inverse_r", f"inverse_r{self.rowwise}")
        for k in self.parts if self.launch.copy else ():
            self._store_bytes("row", f"{self.full(gradient, k)} * inverse_r", k)
        if self.code.program.integers:
            self.let("step", "step_above(most)")
            self._store_number("step")
            self.let("inverse_step", f"tl.div_rn(1.0, step){self.rowwise}")
            for k in self.parts:
                self._store_bytes("integer", f"{self.full(gradient, k)} * inverse_step", k, "as_integers")

    def _largest(self, gradient: int) -> None:
        """The bits of the largest magnitude in a row. Parts are compared as numbers, which takes the magnitude in the
        same operation, and threads as integers, for which the hardware has a reduction."""
        sizes = [f"tl.abs({self.existing(self.full(gradient, k), k)})" for k in self.parts]
        largest = f"{folded('maximum_of', sizes)}.to(tl.int32, bitcast=True)"
        self.let("most", self.across("tl.max({}, axis={})", largest))

    def _store_number(self, name: str) -> None:
        self.emit(f"tl.store({name}_ptr + start + q{self.turn}, {name}{mask_of(self.live(''))})")

    def _store_bytes(self, name: str, text: str, k: str, cast: str = "as_bytes") -> None:
        text = f"{cast}({self.existing(text, k) if self.columns != self.code.program.features else text})"
        if self.launch.turns and name != "integer":
            if not self.rows_even:  # transposed copies have more
                text = f"tl.where({self.live('', self.rowwise)}, {text}, 0).to(tl.uint8)"
            text = self.let(f"{name}{self.turn}{k}", text)
            if name == "staged" or not self.code.program.row:
                return
        mask = mask_of(self.live(k, self.rowwise), self.here("kept", k))
        self.emit(f"tl.store({name}_ptr + {self._elements('start', self.columns, k)}, {text}{mask})")

    def _store_value(self, number: int, index: int, dtype: str, k: str) -> None:
        kind, features = self.code.kinds[index], self.code.program.features
        if kind is Kind.COLUMN:
            if k != self.parts[0]:
                return
            at, inside = f"start + q{self.turn}{self.rowwise}", None
        elif kind is Kind.FULL:
            at, inside = self._elements("start", features, k), self.here("inside", k)
        else:
            at, inside = self._blocks("start", k)
        mask = mask_of(self.live(k, self.rowwise), inside)
        self.emit(f"tl.store(value{number}_ptr + {at}, narrowed({self.number(index, k)}, tl.{dtype}){mask})")

    def _leave_sums(self) -> None:
        for number in range(len(self.code.program.sums)):
            line = f"({number} * tl.num_programs(0) + tl.program_id(0)) * {self.code.program.features}"
            for k in self.parts:
                mask = mask_of(None if self.even[int(k[1:])] else f"inside{k}")
                self.emit(f"tl.store(part_ptr + {line} + c{k}, total{number}{k}{mask})")
