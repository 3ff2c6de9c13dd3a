"""`loka train --auto` from a cold start beside bf16 over the same rows: NE, throughput, time to equal NE.

    python benchmarks/auto/auto.py --out benchmarks/auto/wukong_2gf.json
    python benchmarks/auto/auto.py --model dcnv2 --rows 8000 --batch-size 64 --step eager --device cpu \\
        --candidate emulated:rowwise_e4m3 --probe-every 5 --out auto.json

Both arms start from the same weights and see the same batches in the same order, with the same schedule of
rates; rows are generated before and lie on the device, so that data bounds neither. A few steps of bf16 are
trained and thrown away first, so that neither arm pays for compiling what both run (bf16's blocks). All that
--auto does besides, it pays for: sampled steps, measuring, planning, converting, compiling what is new.

    ne            progressive, over all rows so far: each batch is judged before it is learned from
    rows/s        median over log intervals of a phase
    time to x     seconds from the arm's begin until its NE is x, here bf16's at the end of its rows

Where FP8 ends above x, the last tenth of its curve says how many more rows it would take; that is an
estimate and is marked as one. A measurement costs the same however long the run is: `break_even` is the
number of rows from which on --auto is ahead, at the throughputs found. The output is written as it goes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from loka import mods
from loka.cli.commands.demo import MODS
from loka.cli.inputs import choose_device, model_builder, steps_between
from loka.core.budget import Budget
from loka.core.device import fingerprint
from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.core.storage.codec import encode
from loka.core.storage.files import write_atomic
from loka.core.table import format_table
from loka.data import SyntheticClicks
from loka.data.batch import Batch
from loka.measurement.settings import COARSE, Settings
from loka.nn import check_finite
from loka.train import TrainConfig, TrainLog, evaluate, quality, train
from loka.train.automatic.auto import Auto, AutoConfig
from loka.train.automatic.timeline import Event
from loka.validation import paired_difference

HELD_OUT = 200_000


@dataclass(frozen=True)
class Held:
    """A source whose rows lie on the device."""

    batch: Batch
    vocab_sizes: tuple[int, ...]
    identity: str

    @property
    def rows(self) -> int:
        return len(self.batch)

    @property
    def dense_features(self) -> int:
        return self.batch.dense.shape[1]

    def batches(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        for first in range(start * batch_size, self.rows, batch_size):
            part = slice(first, first + batch_size)
            yield Batch(**{name: tensor[part] for name, tensor in self.batch.tensors().items()})

    def account(self) -> dict[str, int]:
        return {}


def generated(rows: int, *, first_row: int, seed: int, device: str, workers: int) -> Held:
    """Synthetic rows, made by `workers` processes."""
    shards = min(workers, max(rows // 4096, 1))
    fresh = multiprocessing.get_context("spawn")  # threads of this process do not survive a fork
    with ProcessPoolExecutor(shards, mp_context=fresh) as pool:
        jobs = [pool.submit(_shard, rows, first_row, seed, shard, shards) for shard in range(shards)]
        parts = [job.result() for job in jobs]
    names = ("dense", "sparse", "label")
    found = {name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in names}
    found["sparse"] = found["sparse"].long()
    source = SyntheticClicks(rows=rows, first_row=first_row, seed=seed)
    return Held(Batch(**found).to(device), source.vocab_sizes, source.identity)


def _shard(rows: int, first_row: int, seed: int, shard: int, shards: int) -> dict[str, np.ndarray]:
    torch.set_num_threads(1)
    source = SyntheticClicks(rows=rows, first_row=first_row, seed=seed, shard=shard, shards=shards)
    batches = list(source.batches(8192))
    return {
        "dense": torch.cat([batch.dense for batch in batches]).numpy(),
        "sparse": torch.cat([batch.sparse for batch in batches]).int().numpy(),
        "label": torch.cat([batch.label for batch in batches]).numpy(),
    }


@dataclass(frozen=True)
class Point:
    step: int
    rows: int
    seconds: float
    ne: float
    window_ne: float
    rows_per_second: float


class Record:
    """The output file, written anew at every change."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path, self.content = path, content
        self._write()

    def add(self, **fields: Any) -> None:
        self.content.update(fields)
        self._write()

    def _write(self) -> None:
        write_atomic(self._path, json.dumps(self.content, indent=1).encode())


@dataclass(frozen=True)
class Arm:
    name: str
    points: Sequence[Point]
    logits: np.ndarray
    labels: np.ndarray
    seconds: float
    step_reason: str | None


def run_arm(
    name: str,
    model: nn.Module,
    rows: Held,
    held_out: Held,
    config: TrainConfig,
    record: Record,
    auto: Auto | None,
) -> Arm:
    points: list[Point] = []
    started = time.perf_counter()

    def on_log(line: TrainLog) -> None:
        now = time.perf_counter() - started
        window = line.reading.window.ne
        points.append(Point(line.step, line.rows, now, line.ne, window, line.rows_per_second))
        print(
            f"{name:5} step {line.step:6} {now:7.1f} s  ne {line.ne:.5f}  window {window:.5f}  "
            f"{line.rows_per_second:9.0f} rows/s",
            flush=True,
        )
        record.add(**{name: {"points": [asdict(point) for point in points]}})

    result = train(model, rows, config=config, callback=auto, on_log=on_log, check=check_finite)
    seconds = time.perf_counter() - started
    logits, labels = evaluate(
        model, held_out, batch_size=config.batch_size, device=config.device, precision="bf16"
    )
    judged = quality(logits, labels)
    record.add(
        **{
            name: {
                "points": [asdict(point) for point in points],
                "seconds": seconds,
                "step_reason": result.step_reason,
                "progressive": asdict(result.quality),
                "held_out": asdict(judged),
            }
        }
    )
    print(f"{name}: {seconds:.1f} s, held out: ne {judged.ne:.6f} auc {judged.auc:.5f}", flush=True)
    return Arm(name, points, logits, labels, seconds, result.step_reason)


def throughputs(points: Sequence[Point], events: Sequence[Event]) -> dict[str, float]:
    """Median rows/s of the log intervals that lie within one phase, the first of which compiles."""
    found = {}
    for event, after in itertools.pairwise(events):
        inside = [p for last, p in itertools.pairwise(points) if last.step >= event.step]
        inside = [p for p in inside if p.step <= after.step]
        if len(inside) > 1:
            found[event.phase] = median(point.rows_per_second for point in inside[1:])
    return found


def time_to(points: Sequence[Point], ne: float) -> dict[str, float] | None:
    """When the curve reaches `ne`; past its end as the last tenth of it goes on, where that falls."""
    for before, point in zip([None, *points], points, strict=False):
        if point.ne <= ne:
            if before is None:
                return {"seconds": point.seconds, "rows": point.rows}
            share = (before.ne - ne) / (before.ne - point.ne)
            return {
                "seconds": before.seconds + share * (point.seconds - before.seconds),
                "rows": before.rows + share * (point.rows - before.rows),
            }
    tail = points[-max(len(points) // 10, 2) :]
    fall = (tail[0].ne - tail[-1].ne) / (tail[-1].rows - tail[0].rows) if len(tail) > 1 else 0.0
    if fall <= 0:
        return None
    more = (tail[-1].ne - ne) / fall
    speed = (tail[-1].rows - tail[0].rows) / (tail[-1].seconds - tail[0].seconds)
    return {"seconds": tail[-1].seconds + more / speed, "rows": tail[-1].rows + more, "estimated": True}


def break_even(bf16: Arm, auto: Arm, fp8: float | None) -> float | None:
    """Rows from which on --auto is ahead in time, if it goes on as in its last phase."""
    plain = median(point.rows_per_second for point in bf16.points[1:] or bf16.points)
    if fp8 is None or fp8 <= plain:
        return None
    last = auto.points[-1]
    return last.rows + max(last.seconds - bf16.points[-1].seconds, 0.0) / (1 / plain - 1 / fp8)


def compare(bf16: Arm, auto: Arm, events: Sequence[Event], record: Record) -> None:
    target = bf16.points[-1].ne
    speeds = throughputs(auto.points, events)
    plain = median(point.rows_per_second for point in bf16.points[1:] or bf16.points)
    difference = paired_difference(bf16.logits, auto.logits, bf16.labels)
    equal = {arm.name: time_to(arm.points, target) for arm in (bf16, auto)}
    found = {
        "rows_per_second": {"bf16": plain, **{f"auto, {phase}": speed for phase, speed in speeds.items()}},
        "speedup_after_converting": speeds["fp8"] / plain if "fp8" in speeds else None,
        "time_to_equal_ne": {"ne": target, **equal},
        "break_even_rows": break_even(bf16, auto, speeds.get("fp8")),
        "held_out_ne_percent": asdict(difference.ne_percent),
        "progressive_ne_percent": 100 * (auto.points[-1].ne / target - 1),
    }
    record.add(comparison=found)
    rows = [
        (name, f"{speed:.0f}", f"{speed / plain:.2f}x") for name, speed in found["rows_per_second"].items()
    ]
    print(format_table(("phase", "rows/s", "against bf16"), rows))
    print(f"NE on held-out rows: {difference.ne_percent} % against bf16")
    for name, reached in equal.items():
        told = "its curve does not fall any more" if reached is None else f"{reached['seconds']:.1f} s"
        mark = " (estimated: past its rows)" if reached and "estimated" in reached else ""
        print(f"{name}: NE {target:.6f} after {told}{mark}")
    even = found["break_even_rows"]
    print(f"break-even after {even:.3g} rows" if even else "no break-even: FP8 is not faster here")


def planned(plan: Plan | None, report: Path) -> dict[str, Any]:
    """What was decided, and what was not measured."""
    if plan is None:
        return {"plan": None}
    return {"plan": plan.summary(), "notes": Report.load(report).notes}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="wukong:2gf")
    options.add_argument("--rows", type=int, default=12_000_000, help="of training; whole batches of them")
    options.add_argument("--held-out", type=int, default=HELD_OUT)
    options.add_argument("--batch-size", type=int, default=6144)
    options.add_argument("--step", default="graph", choices=("eager", "compile", "graph"))
    options.add_argument("--device")
    options.add_argument("--lr", type=float, default=1e-3)
    options.add_argument("--grad-clip", type=float, default=1.0)
    options.add_argument("--probe-every", default="20")
    options.add_argument("--probe-steps", type=int, default=400)
    options.add_argument("--measure-seconds", type=float, default=150.0)
    options.add_argument("--coarse", action="store_true", help="measure with few draws and rounds")
    options.add_argument("--ne", type=float, default=2e-4)
    options.add_argument("--candidate", action="append", help="measure only these")
    options.add_argument("--log-every", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--out", type=Path, default=Path("auto.json"))
    given = options.parse_args()

    device = choose_device(given.device)
    given.rows -= given.rows % given.batch_size  # a short last batch is a step like the others, of few rows
    workers, began = len(os.sched_getaffinity(0)), time.perf_counter()
    rows = generated(given.rows, first_row=0, seed=given.seed, device=device, workers=workers)
    held_out = generated(
        given.held_out, first_row=given.rows, seed=given.seed, device=device, workers=workers
    )
    print(f"{rows.rows} + {held_out.rows} rows generated in {time.perf_counter() - began:.1f} s", flush=True)
    config = TrainConfig(
        batch_size=given.batch_size,
        lr=given.lr,
        schedule="constant",  # as the runs beside this file were
        grad_clip=given.grad_clip,
        seed=given.seed,
        device=device,
        step=given.step,
        log_every=given.log_every,
        window=8 * given.log_every,
    )

    def fresh() -> nn.Module:
        torch.manual_seed(given.seed)
        model = model_builder(given.model)(rows)
        mods.apply(model, MODS)
        return model

    record = Record(
        given.out,
        {
            "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in vars(given).items()},
            "machine": str(fingerprint(torch.device(device))),
            "weights": sum(weight.numel() for weight in fresh().parameters()),
        },
    )
    began = time.perf_counter()
    few = replace(config, max_rows=min(12 * given.batch_size, rows.rows))
    train(fresh(), rows, config=few)
    _free()
    print(f"warmed up in {time.perf_counter() - began:.1f} s", flush=True)
    bf16 = run_arm("bf16", fresh(), rows, held_out, config, record, None)
    _free()
    folder = given.out.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)  # a report in it would not be a cold start
    auto = Auto(
        AutoConfig(
            every=steps_between(given.probe_every),
            most_steps=given.probe_steps,
            budget=Budget(ne=given.ne),
            candidates=tuple(given.candidate) if given.candidate else None,
            settings=COARSE if given.coarse else Settings(),
            measure_seconds=given.measure_seconds,
        ),
        folder=folder,
        say=lambda text: print(text, flush=True),
    )
    found = run_arm("auto", fresh(), rows, held_out, config, record, auto)
    record.add(
        timeline=encode(auto.timeline.events),
        phase=auto.phase,
        **planned(auto.plan, folder / "report.json"),
    )
    print(auto.timeline)
    compare(bf16, found, auto.timeline.events, record)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
