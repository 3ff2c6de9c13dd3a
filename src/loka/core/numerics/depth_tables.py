"""Filling depth histograms: several kinds of scale of one operand in the same few operations.

With v = |x| / scale as `quantize` divides, r = 1 / v, and any weights w of the elements, a bin with centre
c in octave e adds up three sums, from which its moments about the centre follow (core/numerics/depth.py):

    B_j = sum w r^j,  j = 0, 1, 2           w = x^2 (ENERGY), 1 (RELATIVE), weight x^2 (WEIGHTED)
    S0 = 2^2e B_2,    S1 = 2^e B_1 - c S0,    S2 = B_0 - 2 c 2^e B_1 + c^2 S0

So `w` is common to all kinds of scale, and what differs is one division and one scatter. An element's bin
are the upper bits of v as a float32: its exponent and four bits of its mantissa, 16 bins to an octave.
The bits say a zero (a negative v) and a NaN too; a table takes all of them to rows. Several operands share
their operations but for one division to each kind of scale.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

BINS_PER_OCTAVE = 16
# Octaves of v = |x| / scale as e4m3 sees it (FMAX = 1.75 2^8). The three above stay empty, for stored tables
# have them; down to 4 octaves below what e5m2 flushes to zero. The first and last bins are open.
LOWEST, HIGHEST = -28, 11
_REGULAR = (HIGHEST - LOWEST + 1) * BINS_PER_OCTAVE
TOP, ZEROS, NONFINITE = _REGULAR, _REGULAR + 1, _REGULAR + 2
ROWS = _REGULAR + 3

_TOP_BIN = (8 - LOWEST) * BINS_PER_OCTAVE + 12  # the row of an amax, 1.75 2^8, which is counted in TOP
_SHIFT = 23 - 4  # bits of a mantissa that lie below a bin
# What lies up to three float32 steps below an edge counts above it. So the amax, at FMAX but for the
# rounding of its scale, opens a bin; for any other element a threshold between two numbers is as far
# from both, and three steps change nothing.
_STEPS = 3
_CODES = 1 << (32 - _SHIFT)
_PART = {"cpu": 1 << 17, "other": 1 << 21}  # elements times scales at a time: what fits a cache; memory


@dataclass(frozen=True, kw_only=True)
class Operand:
    """Elements whose depths are counted.

    `values` [R, C], any float dtype and strides. `scales`: float32, each broadcastable to [R, C], as
    `core.reference.scale_of` gives them for e4m3, NaN where that is not finite. `weight`: as in
    `statistics.depths.depth_histogram`.
    """

    values: torch.Tensor
    scales: Sequence[torch.Tensor]
    weight: torch.Tensor | None = None


def depth_tables(operands: Sequence[Operand], *, weighted_only: bool = False) -> list[torch.Tensor]:
    """Tables of `DepthHistogram` [scales, ROWS, 7 or 10] float64 of each operand; nothing waits.

    Operands on one device, all of them with a weight or none, share their operations.

    No element lies above its scale's amax: the few steps of float32 by which one seems to are rounding.
    `weighted_only`: the three WEIGHTED columns alone, for half the work.
    """
    device = operands[0].values.device
    weightings = 1 if weighted_only else 2 if operands[0].weight is None else 3
    kinds = [len(operand.scales) for operand in operands]
    sums = torch.zeros(3 * weightings, sum(kinds) * ROWS, dtype=torch.float64, device=device)
    for pieces in _batches(operands, _PART["cpu" if device.type == "cpu" else "other"]):
        _add(sums, pieces, weighted_only=weighted_only)
    return list(_tables(sums.view(weightings, 3, -1, ROWS), counted=not weighted_only).split(kinds))


_Piece = tuple[Operand, int]
"""Some rows of an operand, and the number of its first table."""


def _batches(operands: Sequence[Operand], size: int) -> Iterator[list[_Piece]]:
    """All rows of all operands, at most `size` elements times scales at once but for single rows."""
    batch: list[_Piece] = []
    room, table = size, 0
    for operand in operands:
        rows, columns = operand.values.shape
        each, begin = len(operand.scales) * columns, 0
        while begin < rows and each:
            end = min(begin + max(room // each, 0 if batch else 1), rows)
            if end == begin:
                yield batch
                batch, room = [], size
                continue
            batch.append((_some_rows(operand, begin, end), table))
            room -= (end - begin) * each
            begin = end
        table += len(operand.scales)
    if batch:
        yield batch


def _some_rows(operand: Operand, begin: int, end: int) -> Operand:
    values, weight = operand.values, operand.weight
    if end - begin == values.shape[0]:
        return operand
    scales = [scale if scale.shape[0] == 1 else scale[begin:end] for scale in operand.scales]
    weight = None if weight is None else weight.expand_as(values)[begin:end]
    return Operand(values=values[begin:end], scales=scales, weight=weight)


def _add(sums: torch.Tensor, pieces: Sequence[_Piece], *, weighted_only: bool) -> None:
    """Adds w r^j of the elements, once for each kind of scale, to `sums` [3 weightings, tables * ROWS]."""
    device, tables = sums.device, sums.shape[1] // ROWS
    flat = torch.cat([piece.values.detach().reshape(-1) for piece, _ in pieces]).float()
    # A zero's v is negative and that of what is not finite NaN, whatever the (finite) scale.
    magnitude = flat.abs().nan_to_num_(nan=torch.nan, posinf=torch.nan).masked_fill_(flat == 0, -1.0)
    sizes = [piece.values.numel() for piece, _ in pieces]
    counts = [len(piece.scales) * size for (piece, _), size in zip(pieces, sizes, strict=True)]
    v, first = magnitude.new_empty(sum(counts)), _firsts(tables, device).new_empty(sum(counts))
    terms = sums.new_empty(sums.shape[0] // 3, 3, sum(counts))
    square = torch.empty_like(terms[0, 0]) if weighted_only else terms[0, 0]
    elements = zip(flat.split(sizes), magnitude.split(sizes), strict=True)
    repeated = zip(*(line.split(counts) for line in (v, first, square, terms[-1, 0])), strict=True)
    for (piece, table), (x, size), (quotients, at, energy, weight) in zip(pieces, elements, repeated, strict=True):
        shape, size = (len(piece.scales), *piece.values.shape), size.view_as(piece.values)
        for scale, quotient in zip(piece.scales, quotients.view(shape).unbind(), strict=True):
            torch.div(size, scale, out=quotient)
        at.view(shape[0], -1).copy_(_firsts(tables, device)[table : table + shape[0]])
        energy.view(shape[0], -1).copy_(x)
        if piece.weight is not None:
            weight.view(shape).copy_(piece.weight.detach())
    square.square_()
    if not weighted_only:
        terms[1, 0] = 1
    if pieces[0][0].weight is not None:
        terms[-1, 0] *= square
    row = _rows(v).add_(first)
    # What is below the deepest bin counts as lying at its edge: it is flushed whatever it is.
    r = v.clamp_(min=2.0**LOWEST).reciprocal_().double()
    torch.mul(terms[:, 0], r, out=terms[:, 1])
    torch.mul(terms[:, 1], r, out=terms[:, 2])
    terms = terms.flatten(0, 1)
    index = row.expand_as(terms)
    if torch.are_deterministic_algorithms_enabled():  # which CUDA has for one dimension only
        lines = torch.arange(sums.shape[0], device=device).unsqueeze(1) * sums.shape[1]
        sums.view(-1).scatter_add_(0, (index + lines).view(-1), terms.view(-1))
    else:
        sums.scatter_add_(1, index, terms)


def _rows(v: torch.Tensor) -> torch.Tensor:
    """The row of each v [*], int64."""
    code = v.view(torch.int32).sub((1 << _SHIFT) - _STEPS).bitwise_right_shift_(_SHIFT)
    return _row_of(v.device).index_select(0, code.bitwise_and_(_CODES - 1))


def _tables(sums: torch.Tensor, *, counted: bool) -> torch.Tensor:
    """From B [weightings, 3, tables, ROWS] to the columns of `DepthHistogram`, [tables, ROWS, columns]."""
    zeroth, first, second = sums.unbind(1)
    centre, unit = _frame(sums.device)
    first = first * unit
    second = second * unit.square()
    lean = torch.addcmul(first, second, centre, value=-1)
    spread = torch.addcmul(zeroth, first + lean, centre, value=-1)
    moments = torch.stack([second, lean, spread], dim=3)  # [weightings, tables, ROWS, 3]
    moments[:, :, ZEROS:] = 0
    moments[:, :, TOP, 1:] = 0  # an amax is exact
    count = [zeroth[1].unsqueeze(2)] if counted else []
    return torch.cat([*count, *moments], dim=2)


@functools.lru_cache(maxsize=8)
def _firsts(tables: int, device: torch.device) -> torch.Tensor:
    """The first row of each of `tables`, [tables, 1]."""
    return torch.arange(0, tables * ROWS, ROWS, device=device).unsqueeze(1)


def powers(device: torch.device) -> torch.Tensor:
    """2^e of each octave, [HIGHEST - LOWEST + 1] float64."""
    exponents = torch.arange(LOWEST, HIGHEST + 1, dtype=torch.float64, device="cpu")
    return torch.exp2(exponents).to(device)


@functools.lru_cache(maxsize=8)
def units(device: torch.device) -> torch.Tensor:
    """2^e of each row of a table's bins, [ZEROS]; the amax lies at 1.75 2^8."""
    octaves = powers(device).repeat_interleave(BINS_PER_OCTAVE)
    return torch.cat([octaves, octaves.new_tensor([2.0**8])])


@functools.lru_cache(maxsize=8)
def centres(device: torch.device) -> torch.Tensor:
    """c of each row of a table's bins, [ZEROS]."""
    cells = 1 + (torch.arange(BINS_PER_OCTAVE, dtype=torch.float64, device="cpu") + 0.5) / BINS_PER_OCTAVE
    inside = cells.repeat(HIGHEST - LOWEST + 1)
    return torch.cat([inside, inside.new_tensor([1.75])]).to(device)


@functools.lru_cache(maxsize=8)
def _frame(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """`centres` and `units` [ROWS], 0 in rows that have no moments."""
    pad, padding = torch.nn.functional.pad, (0, ROWS - ZEROS)
    return pad(centres(device), padding), pad(units(device), padding)


@functools.lru_cache(maxsize=8)
def _row_of(device: torch.device) -> torch.Tensor:
    """The row of each code, int64 [_CODES]: codes from _CODES / 2 up are those of negative floats."""
    half = _CODES // 2
    above = torch.arange(half, device="cpu") + 1  # codes are counted from the edge above
    rows = above.sub((LOWEST + 127) * BINS_PER_OCTAVE).clamp_(0, _REGULAR - 1)
    rows[above > (255 << 4)] = NONFINITE  # an infinity is not: a scale from an earlier step can be tiny
    rows[_TOP_BIN + (LOWEST + 127) * BINS_PER_OCTAVE - 1] = TOP
    negative = torch.full((half,), ZEROS, device="cpu")
    negative[-1] = 0  # of what is smaller than _SHIFT bits
    negative[-17:-1] = NONFINITE  # the sign of a NaN means nothing
    return torch.cat([rows, negative]).to(device)
