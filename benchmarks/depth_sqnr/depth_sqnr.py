"""SQNR predicted from depth histograms against SQNR measured by quantizing.

    python benchmarks/depth_sqnr/depth_sqnr.py --out benchmarks/depth_sqnr/results.json

Every family of families.py in three odd shapes with three seeds, e4m3 and e5m2, scales for tensors,
rows, columns, 1x128 and 128x128, plain and powers of two. Four predictions of each:

    whole      the histogram of all rows: what the module promises
    streamed   five batches of rows collected apart, each with the scales of its own, and merged
    margin     tensor scales with 0.3 octaves free, from the histogram without
    sample     128 rows of it with the scales of the whole: what a sample misses, not the histogram
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from families import FAMILIES

from loka.core.device import fingerprint
from loka.core.error import sqnr_db
from loka.core.numerics.depth import DepthHistogram, depth_error, depth_histogram, group_amax
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.core.storage.codec import encode
from loka.core.storage.files import write_record
from loka.core.table import format_table

SHAPES = ((509, 257), (1024, 131), (130, 1000))
SEEDS = 3
BATCHES = 5
MARGIN = 0.3
SAMPLE = 128
WHATS = ("whole", "streamed", "margin", "sample")
_COLUMN = "column"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    started = time.perf_counter()
    results = []
    for name, make in FAMILIES.items():
        for shape in SHAPES:
            for seed in range(SEEDS):
                hp = make(*shape, torch.Generator().manual_seed(seed)).to(arguments.device)
                results += [{"family": name, "shape": shape, "seed": seed, **r} for r in _predict(hp)]
    summary = {what: _summary(results, what) for what in WHATS}
    headers = ("family", "cast", "measured dB", "predicted", "worst", "worst streamed", "worst sample")
    print(format_table(headers, _rows(results)))
    for what, line in summary.items():
        print(
            f"{what}: {line['cases']} cases, mean |error| {line['mean']:.5f} dB, worst {line['worst']:.5f} dB"
        )
    print(f"{time.perf_counter() - started:.0f} s")
    if arguments.out:
        machine = encode(fingerprint(arguments.device))
        rows = [dict(zip(headers, row, strict=True)) for row in _rows(results)]
        content = {"machine": machine, "summary": summary, "by_family_and_cast": rows}
        write_record(arguments.out, kind="loka-bench-depth-sqnr", version=1, content=content)


def _predict(hp: torch.Tensor) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    kinds = [(granularity.name.lower(), granularity, hp) for granularity in Granularity]
    kinds.append((_COLUMN, Granularity.ROW, hp.t()))
    for label, granularity, operand in kinds:
        amax = group_amax(operand, granularity).expand_as(operand)
        lines = torch.randperm(hp.shape[0], generator=torch.Generator().manual_seed(0))[:SAMPLE]
        lines = lines.to(hp.device)
        axis = 1 if label == _COLUMN else 0
        some, some_amax = operand.index_select(axis, lines), amax.index_select(axis, lines)
        for power_of_two in (False, True):
            sample = depth_histogram(some, granularity, power_of_two=power_of_two, amax=some_amax)
            whole = depth_histogram(operand, granularity, power_of_two=power_of_two)
            parts = operand.chunk(BATCHES, dim=axis)
            tables = [depth_histogram(part, granularity, power_of_two=power_of_two).table for part in parts]
            merged = DepthHistogram(torch.stack(tables).sum(dim=0))
            for format in Format:
                cast = Cast(format, granularity, power_of_two)
                found.append(
                    {
                        "cast": f"{format.name.lower()} {label}{' pow2' if power_of_two else ''}",
                        "measured": sqnr_db(dequantize(quantize(operand, cast)), operand),
                        "whole": depth_error(whole, format).sqnr_db,
                        "measured_streamed": _in_parts(parts, cast),
                        "sample": depth_error(sample, format).sqnr_db,
                        "streamed": depth_error(merged, format).sqnr_db,
                    }
                )
                if granularity is Granularity.TENSOR and not power_of_two:
                    scale = (operand.abs().amax() * 2**MARGIN / format.max).reshape(1)
                    delayed = dequantize(quantize(operand, cast, scale=scale))
                    found[-1]["measured_margin"] = sqnr_db(delayed, operand)
                    found[-1]["margin"] = depth_error(whole, format, margin=MARGIN).sqnr_db
    return found


def _in_parts(parts: tuple[torch.Tensor, ...], cast: Cast) -> float:
    rounded = [dequantize(quantize(part, cast)).flatten() for part in parts]
    return sqnr_db(torch.cat(rounded), torch.cat([part.flatten() for part in parts]))


def _errors(results: list[dict[str, object]], what: str) -> list[float]:
    measured = "measured" if what in ("whole", "sample") else f"measured_{what}"
    errors = [abs(r[what] - r[measured]) for r in results if what in r]
    assert all(math.isfinite(error) for error in errors)
    return errors


def _summary(results: list[dict[str, object]], what: str) -> dict[str, float]:
    errors = _errors(results, what)
    return {"cases": len(errors), "mean": sum(errors) / len(errors), "worst": max(errors)}


def _rows(results: list[dict[str, object]]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[dict[str, object]]] = {}
    for r in results:
        groups.setdefault((r["family"], r["cast"]), []).append(r)
    rows = []
    for (family, cast), group in groups.items():
        means = [sum(r[what] for r in group) / len(group) for what in ("measured", "whole")]
        rows.append((family, cast, *(f"{m:.2f}" for m in means)))
        rows[-1] += tuple(f"{max(_errors(group, what)):.4f}" for what in ("whole", "streamed", "sample"))
    return rows


if __name__ == "__main__":
    main()
