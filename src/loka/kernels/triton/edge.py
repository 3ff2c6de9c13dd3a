"""Programs on the GPU: each becomes kernels of its own. Twin: kernels/edge/twin.py.

    edge_rows    whole rows: what lies row by row, and partial sums over rows
    edge_tall    after that: what lies transposed, and the sums

A program that asks for nothing of one of them goes without it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from loka.core.problem import round_up
from loka.kernels.edge.outputs import unwritten
from loka.kernels.edge.program import Kind, Program
from loka.kernels.edge.twin import run_program
from loka.kernels.triton.edge_device import NAMES
from loka.kernels.triton.edge_rows import RowLaunch, row_parameters, row_places, row_source, sides_of
from loka.kernels.triton.edge_tall import TallLaunch, fits, summing, tall_parameters, tall_source
from loka.kernels.triton.edge_values import Code, power_above, power_below
from loka.kernels.triton.launch import cdiv, launching_on
from loka.kernels.triton.pack import INTERPRETED
from loka.kernels.triton.processors import multiprocessors
from loka.kernels.triton.source import compiled

TILE: dict[str, int] = {}
"""Overrides of `tile_of` by the names of Tile's attributes, for benchmarks and tests."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What programs of the grids hold.

    Attributes:
        warps: at most, of a program that holds rows; fewer where a row has not as many features.
        vector: neighbours that a thread of it holds.
        held: elements of rows in a thread, about; a row is the least.
        ahead: whether rows are read while those before are computed, where a program walks.
        walkers: programs that leave partial sums over rows, about; 0 for as many as the GPU holds at once.
        direct: bytes of an element's leaves up to which the turned value is computed by the second kernel
            from them, instead of being kept as bytes by the first.
        high, wide, tall_warps: of the second kernel.
    """

    warps: int = 4
    vector: int = 8
    held: int = 16
    registers: int = 0
    ahead: int = 1
    walkers: int = 0
    direct: int = 1
    high: int = 128
    wide: int = 128
    tall_warps: int = 4


class Launch(NamedTuple):
    kernel: Any
    parameters: list[str]
    programs: int
    warps: int
    registers: int = 0

    def run(self, arguments: dict[str, Any], programs: int) -> None:
        self.kernel[(programs,)](*self._values(arguments), **self._options())

    def resident(self, arguments: dict[str, Any]) -> int:
        """How many programs the GPU holds at once, by their registers."""
        device = arguments["leaf0_ptr"].device
        if INTERPRETED:
            return 3
        key = self.kernel, self.warps, self.registers, device
        if key not in _RESIDENT:
            values = self._values(arguments)
            compiled = self.kernel.warmup(*values, grid=(1,), **self._options())
            compiled._init_handles()
            registers = -(-max(compiled.n_regs, 24) // 8) * 8 * 32 * self.warps
            each = min(65536 // registers, 64 // self.warps, 32)
            _RESIDENT[key] = max(each, 1) * multiprocessors(device)
        return _RESIDENT[key]

    def _options(self) -> dict[str, int]:
        return {"num_warps": self.warps, **({"maxnreg": self.registers} if self.registers else {})}

    def _values(self, arguments: dict[str, Any]) -> list[Any]:
        spare = arguments["leaf0_ptr"]  # for what this program has not
        return [spare if (value := arguments.get(name)) is None else value for name in self.parameters]


_RESIDENT: dict[Any, int] = {}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a program is run on a number of rows.

    Attributes:
        high: rows that a program of the first kernel holds.
        walks: whether it goes through several groups of them.
        copied: whether the first kernel writes the gradient's bytes.
        staged: whether it writes the turned value's.
    """

    rows: Launch | None
    tall: Launch | None
    high: int
    walks: bool
    copied: bool
    staged: bool


def run_program_fused(
    program: Program,
    leaves: list[torch.Tensor],
    rows: int,
    input_scale: torch.Tensor | None,
    unit: torch.Tensor | None,
    tops: torch.Tensor | None,
) -> list[torch.Tensor]:
    """edge/twin.run_program. Leaves lie as edge/op.lying has them."""
    if rows == 0:
        return run_program(program, leaves, rows, input_scale, unit, tops)
    scales = 0 if input_scale is None else 1 if input_scale.numel() == 1 else 2
    dtypes = tuple(str(leaf.dtype).removeprefix("torch.") for leaf in leaves)
    tile = tile_of(program)
    plan, walkers = plan_of(program, dtypes, rows, scales, tile), tile.walkers
    outputs = unwritten(program, rows, leaves[0].device)
    named = dict(zip(program.outputs, outputs, strict=True))
    given = {"input_scale": input_scale, "unit": unit, "given": tops}
    arguments: dict[str, Any] = {f"{name}_ptr": _contiguous(tensor) for name, tensor in given.items()}
    arguments |= {f"{name}_ptr": _words(out, name) for name, out in named.items()}
    device = leaves[0].device
    if plan.copied and not program.row:
        arguments["row_ptr"] = _bytes(program, rows, device)
    if plan.staged:
        arguments["staged_ptr"] = _bytes(program, rows, device)
    arguments |= {f"leaf{p}_ptr": _numbers(leaf) for p, leaf in enumerate(leaves)}
    arguments |= {
        f"stride{p}": leaf.stride(0)
        for p, (leaf, kind) in enumerate(zip(leaves, program.leaves, strict=True))
        if kind is Kind.FULL
    }
    for name in ("row", "staged"):  # the second kernel reads four columns at a time
        data = arguments.get(f"{name}_ptr")
        arguments[f"{name}_words_ptr"] = None if data is None else data.view(torch.int32)
    arguments |= {"rows": rows, "padded_rows": round_up(rows, 16), "span": plan.high}
    arguments["count"] = 0 if tops is None else tops.numel()
    with launching_on(leaves[0]):
        if plan.rows is not None:
            groups = cdiv(rows, plan.high)
            turns = cdiv(groups, walkers or plan.rows.resident(arguments)) if plan.walks else 1
            programs = cdiv(groups, turns)
            arguments |= {"span": turns * plan.high, "parts": programs}
            if program.sums:
                size = len(program.sums), programs, program.features
                arguments["part_ptr"] = torch.empty(size, dtype=torch.float32, device=device)
            plan.rows.run(arguments, programs)
        if plan.tall is not None:
            plan.tall.run(arguments, plan.tall.programs)
    return outputs


def tile_of(program: Program) -> Tile:
    return replace(Tile(), **TILE)


@functools.lru_cache(maxsize=8192)
def plan_of(program: Program, dtypes: tuple[str, ...], rows: int, scales: int, tile: Tile) -> Plan:
    code = Code(program, dtypes)
    staged = _is_staged(code, tile)
    copied = program.row or program.column
    first, high = None, 0
    if row_places(code, staged=staged):
        sides = sides_of(code, 32 * tile.warps * tile.vector, staged=staged)
        warps = max(min(sides.width // (32 * tile.vector), tile.warps), 1)
        high = power_below(tile.held * 32 * warps // (sides.parts * sides.width))
        rows_launch = RowLaunch(
            rows=high,
            sides=sides,
            vector=tile.vector,
            walks=bool(program.sums),
            ahead=bool(tile.ahead),
            even=rows % high == 0,
            copy=copied,
            staged=staged,
        )
        first = Launch(
            _row_kernel(program, dtypes, rows_launch), row_parameters(code), 0, warps, tile.registers
        )
    return Plan(
        rows=first,
        tall=_tall(code, rows, scales, staged, tile),
        high=high,
        walks=bool(program.sums),
        copied=copied,
        staged=staged,
    )


def _tall(code: Code, rows: int, scales: int, staged: bool, tile: Tile) -> Launch | None:
    program = code.program
    transposes = program.column or program.turned is not None
    if not transposes and not program.sums:
        return None
    columns = round_up(program.features, 16)
    wide = min(tile.wide, power_above(columns))
    while not staged and not fits(code, wide):
        wide //= 2
    launch = TallLaunch(high=tile.high, wide=wide, even=rows % tile.high == 0, staged=staged, scales=scales)
    tiles = cdiv(round_up(rows, 16), launch.high) * cdiv(columns, wide) if transposes else 0
    kernel = _tall_kernel(program, code.dtypes, launch)
    return Launch(kernel, tall_parameters(code), summing(code) + tiles, tile.tall_warps)


def _is_staged(code: Code, tile: Tile) -> bool:
    """Whether the turned value is kept as bytes where rows are read anyway, instead of computed again."""
    program = code.program
    if program.turned is None:
        return False
    if not fits(code, min(tile.wide, 64)):
        return True
    read = code.leaves(code.reached([program.turned]), Kind.FULL)
    return bool(row_places(code, staged=False)) and sum(_SIZES[code.dtypes[p]] for p in read) > tile.direct


_SIZES = {
    str(dtype).removeprefix("torch."): dtype.itemsize
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@functools.lru_cache(maxsize=4096)
def _row_kernel(program: Program, dtypes: tuple[str, ...], launch: RowLaunch) -> Any:
    return compiled(row_source(Code(program, dtypes), launch), "edge_rows", NAMES)


@functools.lru_cache(maxsize=4096)
def _tall_kernel(program: Program, dtypes: tuple[str, ...], launch: TallLaunch) -> Any:
    return compiled(tall_source(Code(program, dtypes), launch), "edge_tall", NAMES)


def _bytes(program: Program, rows: int, device: torch.device) -> torch.Tensor:
    return torch.empty(rows, round_up(program.features, 16), dtype=torch.uint8, device=device)


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _numbers(leaf: torch.Tensor) -> torch.Tensor:
    """As the kernel reads it: what Triton has no loads for as bytes."""
    narrow = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
    return leaf.view(torch.uint8) if leaf.dtype in narrow else leaf


def _words(output: torch.Tensor, name: str) -> torch.Tensor:
    """As kernels write it: transposed copies four rows at a time."""
    if name in ("column", "turned"):
        return output.view(torch.int32)
    return output.view(torch.uint8) if name == "row" else output
