"""Microseconds of LoKA's quantizers: one copy, its transpose, and both from one pass.

    python benchmarks/quantizers/run.py --out benchmarks/quantizers/results.json

CUDA graphs, cold L2, interleaved (core/timing.py), random normal data. The floor is the least
traffic, read once and written once or twice, at the bandwidth that a device copy reaches in the
same run.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

import torch

from loka.core.device import fingerprint
from loka.core.recipe import Cast, Format, Granularity
from loka.core.storage.codec import encode
from loka.core.storage.files import write_record
from loka.core.table import format_table
from loka.core.timing import time_interleaved
from loka.kernels.quantize.quantizer import quantize_pair
from loka.kernels.quantize.side import Side

SHAPES = [
    (8192, 2048, torch.bfloat16),
    (8192, 512, torch.bfloat16),
    (8192, 3456, torch.bfloat16),
    (65536, 512, torch.bfloat16),
    (2048, 2048, torch.float32),
    (5120, 2048, torch.float32),
]
_ROTATION = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    results = []
    for rows, columns, dtype in SHAPES:
        results += _shape(rows, columns, dtype, device)
        print(format_table(("shape", "what", "us", "GB/s", "of copy"), _rows(results)))
    content = {"machine": encode(fingerprint(device)), "results": results}
    write_record(arguments.out, kind="loka-bench-quantizers", version=1, content=content)


def _shape(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[dict[str, object]]:
    size = rows * columns * dtype.itemsize
    copies = max(1, min(8, _ROTATION // size))
    operands = [torch.randn(rows, columns, device=device).to(dtype) for _ in range(copies)]
    given = operands[0].abs().amax().float().view(1) / 448
    functions: dict[str, Callable[[], object]] = {"copy": _rotate(operands, lambda hp: hp.clone())}
    moved = {"copy": 2 * size}
    elements = rows * columns
    casts = {g: Cast(Format.E4M3, g) for g in Granularity}
    sides = {
        g: (Side(cast=c, padded=(rows, columns)), Side(cast=c, padded=(columns, rows)))
        for g, c in casts.items()
    }
    for granularity, (row, column) in sides.items():
        name = granularity.name.lower()
        for label, pair in (("row", (row, None)), ("column", (None, column)), ("both", (row, column))):
            functions[f"{name} {label}"] = _rotate(operands, _quantize(*pair))
            moved[f"{name} {label}"] = size + elements * sum(side is not None for side in pair)
    mixed = (sides[Granularity.ROW][0], sides[Granularity.TENSOR][1])
    functions["row + tensor both"] = _rotate(operands, _quantize(*mixed))
    tensor = sides[Granularity.TENSOR]
    functions["given both"] = _rotate(operands, _quantize(*tensor, given=given))
    functions["given row"] = _rotate(operands, _quantize(tensor[0], None, given=given))
    moved["row + tensor both"] = moved["given both"] = size + 2 * elements
    moved["given row"] = size + elements
    times = time_interleaved(functions, baseline="copy", device=device, keep=list(functions)).timings
    return [
        {
            "shape": f"{rows}x{columns} {str(dtype).removeprefix('torch.')}",
            "what": name,
            "us": times[name].microseconds.value,
            "interval": [times[name].microseconds.low, times[name].microseconds.high],
            "least_bytes": moved[name],
            "copy_us": times["copy"].microseconds.value,
            "copy_bytes": moved["copy"],
        }
        for name in functions
    ]


def _quantize(
    row: Side | None,
    column: Side | None,
    given: torch.Tensor | None = None,
) -> Callable[[torch.Tensor], object]:
    return lambda hp: quantize_pair(hp, row=row, column=column, given=given)


def _rotate(operands: list[torch.Tensor], call: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    turn = itertools.cycle(operands)
    return lambda: call(next(turn))


def _rows(results: list[dict[str, object]]) -> list[tuple[str, ...]]:
    rows = []
    for r in results:
        speed = r["least_bytes"] / r["us"] / 1e3
        copy = r["copy_bytes"] / r["copy_us"] / 1e3
        rows.append((r["shape"], r["what"], f"{r['us']:.1f}", f"{speed:.0f}", f"{speed / copy:.0%}"))
    return rows


if __name__ == "__main__":
    main()
