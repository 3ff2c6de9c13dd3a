"""The text of the kernel that writes what a program wants transposed, and finishes its sums.

A program of the grid owns a tile [H, W] of rows and features. `column` is the transpose of bytes that
rows.py wrote. `transposed` is too, or it is computed here from the leaves: as four quarters of every fourth
row, so that four rows become one word of the copy (triton/pack.py). The first programs add up sums instead.
"""

from dataclasses import dataclass

from loka.core.problem import round_up
from loka.kernels.edge.program import GROUP, Kind
from loka.kernels.edge.triton.values import Code, Lines, mask_of, power_above

QUARTERS = range(4)
SUMMED = 8  # columns that a program adds up


@dataclass(frozen=True, kw_only=True)
class TallLaunch:
    """All that the text depends on besides the program and its leaves' dtypes.

    Attributes:
        high, wide: H, a multiple of 64, and W, one of 16; powers of two.
        even: whether all rows of tiles exist.
        staged: whether the transposed value comes as bytes.
        scales: numbers of the input's scale for a row: 0 for one of all rows, None where it has none.
    """

    high: int
    wide: int
    even: bool
    staged: bool
    scales: int | None


def tall_source(code: Code, launch: TallLaunch) -> str:
    """Python that defines the kernel `edge_tall`."""
    return _Tall(code, launch).text()


def summing(code: Code) -> int:
    """Programs of the grid that add up sums."""
    return len(code.program.sums) * -(-code.program.features // SUMMED)


def fits(code: Code, wide: int) -> bool:
    """Whether tiles so wide can compute the transposed value: no sums in it, no tile with parts of blocks, and no parts
    of a matrix.
    """
    live = code.reached([code.program.transposed])
    blocks = any(code.kinds[p] is Kind.BLOCK for p in live)
    apart = any(code.is_reduction(p) or code.kinds[p] is Kind.PART for p in live)
    return not apart and not (blocks and code.program.block % wide)


class _Tall(Lines):
    def __init__(self, code: Code, launch: TallLaunch) -> None:
        super().__init__(code, (launch.high // 4, launch.wide), shared=(Kind.ROW, Kind.SCALAR), rows_even=launch.even)
        self.launch = launch
        self.columns = round_up(code.program.features, 16)
        self.columns_even = code.program.features % launch.wide == 0

    def live(self, k: str, shape: str = "") -> str | None:
        return None if self.rows_even else f"live{k}{shape}"

    def here(self, name: str, k: str = "") -> str | None:
        return None if self.columns_even else f"{name}{self.columnwise}"

    def filled(self, text: str, k: str) -> str:
        """With zeros in the padding of copies, which is written."""
        conditions = [self.live(k, self.rowwise), self.here("inside")]
        found = [condition for condition in conditions if condition]
        return f"tl.where({' & '.join(found)}, {text}, 0.0)" if found else text

    def text(self) -> str:
        program = self.code.program
        first = summing(self.code)
        each = first // len(program.sums) if program.sums else 0
        self.emit("program = tl.program_id(0)")
        for number in range(len(program.sums)):
            self.emit(f"if (program >= {number * each}) & (program < {(number + 1) * each}):")
            part = f"part_ptr + {number * program.features} * parts.to(tl.int64)"
            begin = f"(program - {number * each}) * {SUMMED}"
            self.emit(f"    finish_sums({part}, sum{number}_ptr, {begin}, parts, {program.features}, {SUMMED})")
        if program.column or program.transposed is not None:
            self.emit(f"tile = program - {first}")
            if first:
                self.emit("if tile >= 0:")
                self.depth += 1
            self._tile()
        return self.define("edge_tall", self._parameters(), ("rows", "count", "parts"))

    def _parameters(self) -> list[str]:
        program = self.code.program
        return [
            *(f"leaf{p}_ptr" for p in range(len(program.leaves))),
            *("row_ptr", "staged_ptr", "part_ptr", "column_ptr", "transposed_ptr", "top_ptr", "r_ptr", "tops_ptr"),
            *(f"sum{number}_ptr" for number in range(len(program.sums))),
            *("input_scale_ptr", "gradient_scale_ptr", "given_ptr", "rows", "padded_rows", "count", "parts"),
            *(f"stride{p}" for p in self.code.matrices()),
        ]

    def _tile(self) -> None:
        """The rows written last come first: they may still lie in a cache."""
        program, launch = self.code.program, self.launch
        across = -(-self.columns // launch.wide)
        self.emit(f"down = (padded_rows + {launch.high - 1}) // {launch.high} - 1 - tile // {across}")
        self.emit(f"start = down.to(tl.int64) * {launch.high}")
        self.emit(f"first = tile % {across} * {launch.wide}")
        if program.column:
            self._transpose("row", "column")
            self._tops()
        if program.transposed is None:
            return
        if launch.staged:
            self.emit("if tile == 0:")
            self.emit("    tl.store(top_ptr, top_of(given_ptr, count))")
            self._transpose("staged", "transposed")
        else:
            self._compute_transposed(program.transposed)

    def _transpose(self, source: str, target: str) -> None:
        sizes = f"{self.columns}, {self.launch.high}, {self.launch.wide}"
        self.emit(f"transposed({source}_ptr, {target}_ptr, start, first, rows, padded_rows, {sizes})")

    def _tops(self) -> None:
        groups = self.launch.high // GROUP
        for group in range(groups):
            self.emit(f"if (first == 0) & (start + {group * GROUP} < rows):")
            here = f"down * {groups} + {group}"
            scales = f"{self.launch.scales}, {power_above(self.launch.scales or 1)}"
            self.emit(f"    store_tops(r_ptr, input_scale_ptr, tops_ptr, {here}, rows, {scales})")

    def _compute_transposed(self, transposed: int) -> None:
        launch, code = self.launch, self.code
        self.emit("top = top_of(given_ptr, count)")
        self.emit("if tile == 0:")
        self.emit("    tl.store(top_ptr, top)")
        self.emit("by = inverse_of_power(top)")
        self.emit(f"w = tl.arange(0, {launch.high // 4})")
        self.emit(f"c = first + tl.arange(0, {launch.wide})")
        if not self.columns_even:
            self.emit(f"inside = c < {code.program.features}")
            self.emit(f"kept = c < {self.columns}")
        indices = code.reached([transposed])
        for k in QUARTERS:
            self._load(indices, k)
        for index in code.leaves(indices, Kind.ROW):
            mask = mask_of(self.here("inside"))
            self.let(f"raw{index}", f"tl.load(leaf{index}_ptr + c{self.columnwise}{mask})")
        self.compute([p for p in indices if code.kinds[p] in self.shared], ("",))
        for k in QUARTERS:
            self.compute([p for p in indices if code.kinds[p] not in self.shared], (f"_{k}",))
            self.let(f"out_{k}", self.filled(f"{self.full(transposed, f'_{k}')} * factor_{k}", f"_{k}"))
            if k == 1:  # so that no more than two wait in float32
                self.let("low", "half(out_0, out_1)")
        self.emit("along = padded_rows // 4")
        self.emit("high = start // 4")
        at = f"high + (c{self.columnwise}.to(tl.int64) * along + w{self.rowwise})"
        below = None if launch.even else f"(high + w < along){self.rowwise}"
        self.emit(f"tl.store(transposed_ptr + {at}, whole(low, out_2, out_3){mask_of(below, self.here('kept'))})")

    def _load(self, indices: list[int], k: int) -> None:
        """All leaves before any arithmetic, so that no load waits for it."""
        program = self.code.program
        if not self.launch.even:
            self.emit(f"live_{k} = 4 * w + {k} < rows - start")
        mask = mask_of(self.live(f"_{k}"))
        self.let(f"factor_{k}", f"(tl.load(gradient_scale_ptr + start + {k} + 4 * w{mask}) * by){self.rowwise}")
        for index in self.code.leaves(indices, Kind.FULL, Kind.COLUMN, Kind.BLOCK):
            kind = self.code.kinds[index]
            if kind is Kind.FULL:
                at = f"(start + {k}) * stride{index} + "
                at += f"(w{self.rowwise} * (4 * stride{index}) + c{self.columnwise})"
                mask = mask_of(self.live(f"_{k}", self.rowwise), self.here("inside"))
            elif kind is Kind.COLUMN:
                at, mask = f"start + {k} + 4 * w", mask_of(self.live(f"_{k}"))
            else:
                count = program.features // program.block
                at = f"(start + {k}) * {count} + first // {program.block} + w{self.rowwise} * {4 * count}"
                mask = mask_of(self.live(f"_{k}", self.rowwise))
            self.let(f"raw{index}_{k}", f"tl.load(leaf{index}_ptr + {at}{mask})")
