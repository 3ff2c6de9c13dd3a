"""Programs on the GPU: each becomes kernels of its own. Twin: kernels/edge/twin.py.

    edge_rows    whole rows: what lies row by row, partial sums over rows, and what lies transposed where it can
    edge_tall    after that: what lies transposed where it cannot, and the sums

A program that asks for nothing of one of them goes without it.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from loka.core.problem import dtype_name, round_up
from loka.kernels.edge.outputs import unwritten
from loka.kernels.edge.program import GROUP, Kind, Program
from loka.kernels.edge.triton.device import NAMES
from loka.kernels.edge.triton.rows import RowLaunch, Sides, row_indices, row_source, sides_of
from loka.kernels.edge.triton.simplify import simplified
from loka.kernels.edge.triton.tall import TallLaunch, fits, summing, tall_source
from loka.kernels.edge.triton.tiles import TILE, Tile, is_staged, tile_of
from loka.kernels.edge.triton.values import SIZES, Code, power_above, power_below
from loka.kernels.edge.twin import run_program
from loka.kernels.triton.launch import allocated, cdiv, launch, launches_are_traced, launching_on, recorded
from loka.kernels.triton.pack import INTERPRETED
from loka.kernels.triton.processors import multiprocessors
from loka.kernels.triton.source import compiled


class Launch(NamedTuple):
    kernel: Any
    programs: int
    warps: int

    def run(self, arguments: dict[str, Any], programs: int, registers: int = 0) -> None:
        values, options = self._values(arguments), self._options(registers)
        launch(self.kernel, (programs, 1), tuple(values), {}, **options)

    def resident(self, arguments: dict[str, Any]) -> tuple[int, int]:
        """How many programs walk at once, and the limit of registers by which the GPU holds so many."""
        if INTERPRETED:
            return 3, 0
        device = arguments["leaf0_ptr"].device
        key = self.kernel, self.warps, device
        if key not in _RESIDENT:
            free = self._compiled(arguments, 0)
            registers, limit = free.n_regs, 0
            if _MANY < registers <= _TOO_MANY and self._compiled(arguments, _MANY).n_spills <= _FEW_SPILLS:
                registers = limit = _MANY
            each = min(65536 // (-(-registers // 8) * 8 * 32 * self.warps), 64 // self.warps, _WALKERS)
            each = min(each, _SHARED // (free.metadata.shared + 1024))
            _RESIDENT[key] = max(each, 1) * multiprocessors(device), limit
        return _RESIDENT[key]

    def spilled(self, arguments: dict[str, Any], registers: int) -> int:
        """Words that a thread keeps in memory, because it has no registers for them."""
        if INTERPRETED:
            return 0
        key = self.kernel, self.warps, arguments["leaf0_ptr"].device, registers
        if key not in _SPILLED:
            _SPILLED[key] = self._compiled(arguments, registers).n_spills
        return _SPILLED[key]

    def _compiled(self, arguments: dict[str, Any], registers: int) -> Any:
        values, options = self._values(arguments), self._options(registers)
        compiled = self.kernel.warmup(*values, grid=(1,), **options)
        compiled._init_handles()
        return compiled

    def _options(self, registers: int) -> dict[str, int]:
        return {"num_warps": self.warps, **({"maxnreg": registers} if registers else {})}

    def _values(self, arguments: dict[str, Any]) -> list[Any]:
        spare = arguments["leaf0_ptr"]  # for a scale that the kernel is handed and does not read
        return [spare if (value := arguments[name]) is None else value for name in self.kernel.arg_names]


_ANY = 1
"""Stands for a symbolic number of rows in a plan: no group of several rows is known to be whole."""

_RESIDENT: dict[Any, tuple[int, int]] = {}
_SPILLED: dict[Any, int] = {}
_MANY, _TOO_MANY = 128, 200  # registers of a thread, above which a multiprocessor holds less than 16 warps
_SHARED = 228 << 10  # bytes of a multiprocessor, of which each program takes 1024 more than its own
_AHEAD, _MOST_AHEAD = 16 << 10, 160 << 10  # of them, into which a warp and a program may read ahead
_WALKERS = 8  # on a multiprocessor: each leaves a partial sum, and the second kernel reads all of them
_FEW_SPILLS = 32  # words that a thread may keep in memory for that


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a program is run on a number of rows.

    Attributes:
        high: rows that a program of the first kernel holds.
        walks, walkers: whether it goes through several groups of them, and how many programs do; 0 for what
            the GPU holds.
        copied: whether the first kernel writes the gradient's bytes for the second.
        staged: whether it writes the transposed value's.
        turns: whether the first kernel transposes, in turns.
        registers: of a thread of the first kernel at most; 0 for as many as it takes.
    """

    rows: Launch | None
    tall: Launch | None
    high: int
    walks: bool
    walkers: int
    copied: bool
    staged: bool
    turns: bool = False
    registers: int = 0


def run_program_fused(
    program: Program,
    leaves: list[torch.Tensor],
    rows: int,
    input_scale: torch.Tensor | None,
    gradient_scale: torch.Tensor | None,
    tops: torch.Tensor | None,
) -> list[torch.Tensor]:
    """edge/twin.run_program. Leaves lie as edge/op.lying has them.

    A call on tensors that lie alike makes allocations and launches of the first one again
    (kernels/triton/launch.py): binding a kernel's arguments takes the host longer than many edges take.
    """
    if rows == 0:
        return run_program(program, leaves, rows, input_scale, gradient_scale, tops)
    given = (*leaves, *map(_contiguous, (input_scale, gradient_scale, tops)))
    if INTERPRETED or not leaves[0].is_cuda or launches_are_traced():
        return _run(program, leaves, rows, *given[len(leaves) :])
    lying = tuple(None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in given)
    with launching_on(leaves[0]):
        found: list[torch.Tensor] = recorded(
            ("edge", program, rows, lying, tuple(TILE.items())),
            given,
            lambda: _run(program, leaves, rows, *given[len(leaves) :]),
            lambda outputs, recording: [recording.slot_of(output) for output in outputs],
            lambda slots, tensors: [tensors[slot] for slot in slots],
        )
    return found


def _run(
    program: Program,
    leaves: list[torch.Tensor],
    rows: int,
    input_scale: torch.Tensor | None,
    gradient_scale: torch.Tensor | None,
    tops: torch.Tensor | None,
) -> list[torch.Tensor]:
    scales = None if input_scale is None else 0 if input_scale.numel() == 1 else input_scale.numel() // rows
    dtypes = tuple(dtype_name(leaf.dtype) for leaf in leaves)
    given: dict[str, Any] = {"input_scale_ptr": input_scale, "gradient_scale_ptr": gradient_scale, "given_ptr": tops}
    given["count"] = 0 if tops is None else tops.numel()
    device = leaves[0].device
    outputs = [allocated(output) for output in unwritten(program, rows, device)]
    for registers in _TURNS:
        plan = plan_of(program, dtypes, rows if isinstance(rows, int) else _ANY, scales, registers)
        arguments = given | _arguments(program, plan, leaves, rows, outputs)
        if not plan.turns or plan.rows is None:
            break
        with launching_on(leaves[0]):
            # Few words in memory cost less than a second kernel that reads and writes every byte: up to 1,024
            # features 0.59 to 0.93 of its time, for up to 18 words. Of wider rows some lose (0.83 to 1.23).
            if plan.rows.spilled(arguments, plan.registers) <= (_FEW_SPILLS if program.features <= _WIDE else 0):
                break
    # The grid of the second kernel is sized for the rows of the plan; of a symbol these are one.
    assert plan.tall is None or isinstance(rows, int), "transposed copies of a symbolic number of rows"
    if plan.copied and not program.row:
        arguments["row_ptr"] = _bytes(program, rows, device)
    if plan.staged:
        arguments["staged_ptr"] = _bytes(program, rows, device)
    with launching_on(leaves[0]):
        if plan.rows is not None:
            groups = cdiv(rows, plan.high)
            walkers, registers = plan.rows.resident(arguments) if plan.walks else (groups, plan.registers)
            turns = cdiv(groups, plan.walkers or walkers) if plan.walks else 1
            programs = cdiv(groups, turns)
            arguments |= {"span": turns * plan.high, "parts": programs}
            if program.sums:
                size = len(program.sums), programs, program.features
                arguments["part_ptr"] = allocated(torch.empty(size, dtype=torch.float32, device=device))
            plan.rows.run(arguments, programs, registers)
        if plan.tall is not None:
            plan.tall.run(arguments, plan.tall.programs)
    return outputs


def _arguments(
    program: Program, plan: Plan, leaves: list[torch.Tensor], rows: int, outputs: list[torch.Tensor]
) -> dict[str, Any]:
    named = zip(program.outputs, outputs, strict=True)
    found: dict[str, Any] = {f"{name}_ptr": _words(out, name) for name, out in named}
    found |= {f"leaf{p}_ptr": _numbers(leaf) for p, leaf in enumerate(leaves)}
    found |= {f"stride{p}": leaves[p].stride(0) for p in program.columns}
    if program.sums:  # until there are parts, of their dtype: for another one the kernel would be compiled twice
        found["part_ptr"] = found["sum0_ptr"]
    return found | {"rows": rows, "padded_rows": round_up(rows, 16), "span": plan.high}


def plan_of(program: Program, dtypes: tuple[str, ...], rows: int, scales: int | None, registers: int) -> Plan:
    """`registers`: one of `_TURNS`, that a kernel which transposes in turns is to try; 0: without such a kernel."""
    return _plan(program, dtypes, rows, scales, tuple(TILE.items()), registers)


@functools.lru_cache(maxsize=8192)
def _plan(
    program: Program,
    dtypes: tuple[str, ...],
    rows: int,
    scales: int | None,
    tiles: tuple[tuple[str, int], ...],
    registers: int,
) -> Plan:
    tile = replace(tile_of(Code(program, dtypes)), **dict(tiles))  # measured by the steps of programs as they come
    program = simplified(program)
    code = Code(program, dtypes)
    if registers and (one := _in_turns(code, rows, scales, tile, registers)) is not None:
        return one
    staged = is_staged(code, tile)
    copied = program.row or program.column
    first, high = None, 0
    if row_indices(code, staged=staged):
        sides = sides_of(code, 32 * tile.warps * tile.vector, staged=staged)
        warps = max(min(sides.width // (32 * tile.vector), tile.warps), 1)
        high = power_below(tile.held * 32 * warps // (sides.parts * sides.width))
        rows_launch = RowLaunch(
            rows=high,
            sides=sides,
            vector=tile.vector,
            walks=bool(program.sums),
            stages=_stages(code, tile, sides, high, warps, staged=staged) if program.sums else 1,
            even=rows % high == 0,
            copy=copied,
            staged=staged,
        )
        first = Launch(_row_kernel(program, dtypes, rows_launch), 0, warps)
    return Plan(
        rows=first,
        tall=_tall(code, rows, scales, staged, tile),
        high=high,
        walks=bool(program.sums),
        walkers=tile.walkers,
        copied=copied,
        staged=staged,
    )


def _in_turns(code: Code, rows: int, scales: int | None, tile: Tile, registers: int) -> Plan | None:
    """One kernel for all, where threads can hold the bytes of GROUP rows, in so many registers or more."""
    program = code.program
    staged, high = program.transposed is not None, GROUP // 4
    if program.sums or rows < tile.many or program.gradient is None or not (program.column or staged):
        return None
    sides = sides_of(code, 32 * tile.vector, staged=staged)
    least = min(high, high * sides.width // (32 * tile.vector))  # a row is a warp's, or several warps'
    warps = max(power_above(cdiv(high * sides.parts * sides.width, 32 * tile.turns)), least, 1)
    if warps > _MOST_WARPS:
        return None
    few = high * sides.parts * sides.width <= _SHORT * 32 * warps
    rows_launch = RowLaunch(
        rows=high,
        sides=sides_of(code, 32 * tile.vector * max(warps // high, 1), staged=staged),
        vector=tile.vector,
        walks=False,
        stages=1,
        even=rows % GROUP == 0,
        copy=program.row or program.column,
        staged=staged,
        turns=True,
        scales=scales,
    )
    return Plan(
        rows=Launch(_row_kernel(program, code.dtypes, rows_launch), 0, warps),
        tall=None,
        high=GROUP,
        walks=False,
        walkers=0,
        copied=False,
        staged=False,
        turns=True,
        registers=registers if few else _MANY,
    )


_MOST_WARPS = 16  # with _MANY registers in a thread they are all that a multiprocessor has
_WIDE = 1024  # features, up to which a kernel that transposes may keep a few words in memory
_SHORT = 8  # elements of a turn in a thread, up to which half of them will do: 0.78 to 0.92 of the time
_TURNS = (_MANY // 2, _MANY, 0)  # limits of registers that are tried in turn; 0 for two kernels


def _stages(code: Code, tile: Tile, sides: Sides, high: int, warps: int, *, staged: bool) -> int:
    """As many as lie in a multiprocessor's memory beside those of other programs."""
    indices, elements = row_indices(code, staged=staged), sides.parts * sides.width * high
    size = elements * code.element_bytes(indices)
    size += elements // sides.wide * sum(SIZES[code.dtypes[p]] for p in code.leaves(indices, Kind.BLOCK))
    return max(min(tile.stages, 1 + min(_AHEAD * warps, _MOST_AHEAD) // max(math.ceil(size), 1)), 1)


def _tall(code: Code, rows: int, scales: int | None, staged: bool, tile: Tile) -> Launch | None:
    program = code.program
    transposes = program.column or program.transposed is not None
    if not transposes and not program.sums:
        return None
    columns = round_up(program.features, 16)
    wide = min(tile.wide, power_above(columns))
    while not staged and not fits(code, wide):
        wide //= 2
    launch = TallLaunch(high=tile.high, wide=wide, even=rows % tile.high == 0, staged=staged, scales=scales)
    tiles = cdiv(round_up(rows, 16), launch.high) * cdiv(columns, wide) if transposes else 0
    kernel = _tall_kernel(program, code.dtypes, launch)
    return Launch(kernel, summing(code) + tiles, tile.tall_warps)


@functools.lru_cache(maxsize=4096)
def _row_kernel(program: Program, dtypes: tuple[str, ...], launch: RowLaunch) -> Any:
    return compiled(row_source(Code(program, dtypes), launch), "edge_rows", NAMES)


@functools.lru_cache(maxsize=4096)
def _tall_kernel(program: Program, dtypes: tuple[str, ...], launch: TallLaunch) -> Any:
    return compiled(tall_source(Code(program, dtypes), launch), "edge_tall", NAMES)


def _bytes(program: Program, rows: int, device: torch.device) -> torch.Tensor:
    return allocated(torch.empty(rows, round_up(program.features, 16), dtype=torch.uint8, device=device))


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _numbers(leaf: torch.Tensor) -> torch.Tensor:
    """As the kernel reads it: what Triton has no loads for as bytes."""
    narrow = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
    return leaf.view(torch.uint8) if leaf.dtype in narrow else leaf


def _words(output: torch.Tensor, name: str) -> torch.Tensor:
    """As kernels write it: transposed copies four rows at a time."""
    if name in ("column", "transposed"):
        return output.view(torch.int32)
    return output.view(torch.uint8) if name in ("row", "integer") else output
