"""The records of a run as a markdown table: python benchmarks/regions/table.py regions.jsonl"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from arms import BF16, LOKA, TORCHAO, WHOLE
from records import Record, read

_HEAD = (
    "cell",
    "bf16 whole, us",
    "by block, us",
    "LoKA, us",
    "**LoKA over the best bf16**",
    "best torchao",
    "peak memory of a step",
    "sites in FP8, of FLOPs",
    "error of the output to float32",
)


def table(records: Iterable[Record]) -> str:
    lines = [_row(_HEAD), _row(["---"] * len(_HEAD))]
    notes = []
    measured: dict[str, list[str]] = {}
    for record in records:
        measured.setdefault(_conditions(record), []).append(record["cell"])
        lines.append(_row(_cells(record)))
        notes += [
            f"- {record['cell']}, {arm}: {found['failure']}"
            for arm, found in record["arms"].items()
            if "failure" in found and found["failure"] != "torchao is not installed"
        ]
    told = [f"- {told}: {', '.join(cells)}" for told, cells in measured.items()]
    return "\n".join([*lines, "", "Measured on", *told, *(["", "Did not run:", *notes] if notes else [])])


def _conditions(record: Record) -> str:
    """Of one line: lines of several machines, versions or options may stand in one file."""
    machine, least = record["machine"], record["budget"]["min_speedup"]
    told = {
        f"torch {machine['torch']}": True,
        **{f"{name} {version}": name in ("triton", "torchao") for name, version in machine["libraries"].items()},
        record["mode"]: True,
        f"{record.get('rounds', 0)} rounds": True,
        f"min_speedup {least:g}": least != 1,
        **{f"forced {sites}={candidate}": True for sites, candidate in record["force"].items()},
        "profiled too": record.get("kernels"),
        "tiny": record["tiny"],
        "times of a CPU": machine["target"] == "cpu",
    }
    return ", ".join([machine["device"], *(part for part, holds in told.items() if holds)])


def _cells(record: Record) -> list[str]:
    arms = record["arms"]
    plan = record.get("plan") or {}
    speedup, ratios = record.get("speedup"), record.get("speedups") or {}
    over = "-"
    if speedup:
        value, low, high = speedup
        over = f"**{value:.3f}x**" + (f" [{low:.3f}, {high:.3f}]" if low is not None else "")
    torchao = [(ratios[arm][0], arm) for arm in TORCHAO if arm in ratios]
    share = next(iter(plan.get("coverage", ())), "").partition(" of the step")[0]
    fastest = max(torchao, default=None)
    output = arms.get(LOKA, {}).get("errors_float32", {}).get("output")
    return [
        record["cell"],
        *(_microseconds(record, arm) for arm in (*BF16, LOKA)),
        over,
        f"{fastest[0]:.3f}x {fastest[1].removeprefix('torchao_')}" if fastest else "-",
        _memory(arms),
        f"{plan['fp8']} of {plan['sites']}, {share or '-'}" if plan else "-",
        f"{output:.2%}" if isinstance(output, float) else str(output or "-"),
    ]


def _microseconds(record: Record, arm: str) -> str:
    return f"{record['us'][arm]:.1f}" if arm in record["us"] else "-"


def _memory(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """LoKA's over that of the whole compiled bf16 model, both beyond what lies there before a step."""
    ours, theirs = (arms.get(arm, {}).get("memory") for arm in (LOKA, WHOLE))
    return f"{ours['step'] / theirs['step']:.2f}" if ours and theirs and theirs["step"] else "-"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(table(read(Path(name)).values()))
