"""How much a program of the grid holds: tiles by a program's width, sums and work, as measured on an H200.

What a kernel does for a byte decides: code that does little waits for the memory, and wants wide loads of several
rows; code that does more waits for itself, and wants few elements in a thread and no padding to compute.
"""

from dataclasses import dataclass

from loka.core.problem import round_up
from loka.kernels.edge.program import CONCAT, Kind
from loka.kernels.edge.triton.rows import row_indices, sides_of
from loka.kernels.edge.triton.tall import fits
from loka.kernels.edge.triton.values import SIZES, Code

TILE: dict[str, int] = {}
"""Overrides of `tile_of` by the names of Tile's attributes, for benchmarks and tests."""

_HEAVY = 1.3  # steps for a byte: a LayerNorm's gradients have 1.5, GELU's 2.3, SiLU's 1.1, ReLU's 0.7
_UNPADDED = 24  # elements of a row in a thread, up to which fewer warps hold rows that pad less


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What programs of the grids hold.

    Attributes:
        warps: at most, of a program that holds rows; fewer where a row has not as many features.
        vector: neighbours that a thread of it holds.
        held: elements of rows in a thread, about; a row is the least.
        stages: groups of rows that a program which walks holds at once: all but one are still read.
        walkers: programs that leave partial sums over rows, about; 0 for as many as the GPU is to hold at once.
        direct: bytes of an element's leaves up to which the transposed value is computed by the second kernel
            from them, instead of being kept as bytes by the first.
        high, wide, tall_warps: of the second kernel.
        turns: elements of a row in a thread up to which the first kernel transposes.
        many: rows from which it does: a program has GROUP of them, and few programs leave processors idle.
    """

    warps: int = 4
    vector: int = 8
    held: int = 16
    stages: int = 3
    walkers: int = 0
    direct: int = 1
    high: int = 64
    wide: int = 128
    tall_warps: int = 4
    turns: int = 32
    many: int = 4096


def tile_of(code: Code) -> Tile:
    """Few warps wait for each other less; what they hold has to fit their registers, which sums over rows of all
    features take for themselves."""
    program = code.program
    columns = round_up(program.features, 16)
    most = 32 if len(program.sums) < 2 else 24  # elements of a row in a thread
    warps = next((w for w in (4, 8) if -(-columns // (256 * w)) * 8 <= most), 16)
    indices = row_indices(code, staged=program.transposed is not None)
    deep = any(code.kinds[p] is Kind.BLOCK for p in indices)
    summed = any(code.is_row_sum(p) for p in indices)
    heavy = not deep and _steps_a_byte(code) >= _HEAVY
    if heavy and (fewer := _unpadded(code, warps)) < warps:  # 768 features by one warp: 0.64 to 0.82 of the time
        return Tile(warps=fewer, held=8)
    if summed and program.sums:  # they want most registers, but sums over short rows wait for each other
        return Tile(warps=warps, held=32 if columns > 1024 and warps == 4 else 16)
    if heavy and program.sums and 128 < columns <= 1024 and is_staged(code, Tile()):  # GELU and bias: 0.75 to 0.91
        return Tile(warps=2 if columns > 512 else warps, held=8)
    transposes = program.column or program.transposed is not None
    if heavy and summed and not transposes and 1024 < columns <= 2048:  # a norm and SiLU forward: 0.86 to 0.90
        return Tile(warps=warps, held=64)
    return Tile(warps=warps, held=8 if deep else 32 if columns <= 512 or (summed and warps == 4) else 16)


def is_staged(code: Code, tile: Tile) -> bool:
    """Whether the transposed value is kept as bytes where rows are read anyway, instead of computed again."""
    program = code.program
    if program.transposed is None:
        return False
    if not fits(code, min(tile.wide, 64)):
        return True
    read = code.element_bytes(code.reached([program.transposed]))
    return bool(row_indices(code, staged=False)) and read > tile.direct


def _steps_a_byte(code: Code) -> float:
    """Elementwise steps for each byte that is read or written."""
    program = code.program
    kinds = zip(code.kinds[code.first_step :], code.steps, strict=True)
    steps = sum(kind is Kind.FULL and step.op != CONCAT for kind, step in kinds)
    moved = program.row + program.column + program.integers + (program.transposed is not None) + code.element_bytes()
    leaving = zip(program.values, program.value_dtypes, strict=True)
    return steps / max(moved + sum(SIZES[dtype] for p, dtype in leaving if code.kinds[p] is Kind.FULL), 1)


def _unpadded(code: Code, warps: int) -> int:
    """As many warps, or fewer where they hold rows with less padding."""

    def held(count: int) -> int:
        sides = sides_of(code, 256 * count, staged=False)
        return sides.parts * sides.width

    fewer = [count for count in (warps // 2, warps // 4) if count and held(count) <= 32 * count * _UNPADDED]
    return min([warps, *fewer], key=held)
