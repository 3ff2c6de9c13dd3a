"""Rows per second from parquet shards to batches, by order, threads and device; and memory by file size.

    python benchmarks/reader/reader.py --out benchmarks/reader/NAME.json

Writes `--rows` rows (see rows.py), then in every round, one after the other: stored and shuffled order with
all threads, shuffled with copies to the GPU if there is one (pinned, non-blocking, waited for at the end).
Then threads 1, 2, 4, ... . Each arm reads batches for `--seconds` or to the end; its first batch counts too.
Peak memory is that of fresh processes that read a quarter of the shards and all of them. Last, `--tsv-rows`
raw lines are converted with hashing. Files are in the page cache: decoding is measured, not the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rows import link_part, total_bytes, write_shards, write_tsv

from loka.core.device import fingerprint
from loka.core.storage.codec import encode
from loka.core.storage.files import write_record
from loka.data import Shuffle, convert, hashed_vocabulary, open_shards
from loka.data.workers import processors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--tsv-rows", type=int, default=2_000_000)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=processors())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peak-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak_of:
        _peak(given.peak_of, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = _measure(Path(folder), given)
    if given.out:
        write_record(given.out, kind="reader benchmark", version=1, content=result)
        print(f"written: {given.out}")


def _measure(folder: Path, given: argparse.Namespace) -> dict[str, object]:
    machine = _machine()
    print(json.dumps(machine), flush=True)
    started = time.perf_counter()
    manifest = write_shards(folder / "all", given.rows, workers=given.workers)
    seconds = time.perf_counter() - started
    stored = sum(shard.bytes for shard in manifest.shards.values())
    shards = len(manifest.shards)
    print(
        f"wrote {manifest.rows} rows in {shards} shards of {stored / manifest.rows:.1f} bytes a row, "
        f"{seconds:.1f} s"
    )
    link_part(folder / "quarter", folder / "all", manifest, shards=max(shards // 4, 1))

    arms = {"stored": (None, "cpu"), "shuffled": (0, "cpu")}
    if torch.cuda.is_available():
        arms["shuffled, to the GPU"] = (0, "cuda")
    found: dict[str, list[float]] = {name: [] for name in arms}
    per_core: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(given.rounds):
        for name, (seed, device) in arms.items():
            rate, core = _rate(folder / "all", given, workers=given.workers, seed=seed, device=device)
            found[name].append(rate)
            per_core[name].append(core)
            print(f"round {number}: {name}: {_shown(rate, core)}", flush=True)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    cores = {name: statistics.median(rates) for name, rates in per_core.items()}
    for name, rate in medians.items():
        print(f"median: {name}: {_shown(rate, cores[name])}")
    scaling = {}
    workers = 1
    while workers <= given.workers:
        scaling[workers], core = _rate(folder / "all", given, workers=workers, seed=0, device="cpu")
        print(f"shuffled, {workers} threads: {_shown(scaling[workers], core)}", flush=True)
        workers *= 2
    peaks = {part: _peak_of(folder / part, given) for part in ("quarter", "all")}
    for part, peak in peaks.items():
        print(
            f"peak memory, {part}: {peak['rows']} rows, {peak['peak'] / 1e6:.0f} MB, "
            f"{peak['before'] / 1e6:.0f} MB before the first row"
        )
    return {
        "machine": machine,
        "settings": {k: v for k, v in vars(given).items() if k not in ("out", "peak_of")},
        "rows": manifest.rows,
        "bytes_per_row": stored / manifest.rows,
        "write_seconds": seconds,
        "rows_per_second": found,
        "median_rows_per_second": medians,
        "median_rows_per_core_second": cores,
        "by_workers": {f"{count}": rate for count, rate in scaling.items()},
        "peak_memory": peaks,
        "convert": _converted(folder, given),
    }


def _rate(
    folder: Path, given: argparse.Namespace, *, workers: int, seed: int | None, device: str
) -> tuple[float, float]:
    """Rows per second from opening the reader to the last batch on its device, and per CPU second."""
    pin = device == "cuda"
    reader = open_shards(folder, shuffle=Shuffle(seed=seed), workers=workers, pin=pin)
    rows, started, used = 0, time.perf_counter(), time.process_time()
    for batch in reader.batches(given.batch_size):
        if pin:
            batch = batch.to(device)
        rows += len(batch)
        if time.perf_counter() - started > given.seconds:
            break
    if pin:
        torch.cuda.synchronize()
    return rows / (time.perf_counter() - started), rows / (time.process_time() - used)


def _shown(rate: float, core: float) -> str:
    return f"{rate / 1e6:.2f} M rows/s, {core / 1e6:.2f} M per second of CPU time"


def _peak(folder: Path, given: argparse.Namespace) -> None:
    before = _highest_memory()
    reader = open_shards(folder, shuffle=Shuffle(seed=0), workers=given.workers)
    rows = sum(map(len, reader.batches(given.batch_size)))
    print(json.dumps({"rows": rows, "before": before, "peak": _highest_memory()}))


def _highest_memory() -> int:
    """Bytes. Not getrusage: its maximum is inherited from the process that started this one."""
    (line,) = (line for line in _lines("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _peak_of(folder: Path, given: argparse.Namespace) -> dict[str, int]:
    command = [sys.executable, __file__, "--peak-of", str(folder), "--workers", str(given.workers)]
    command += ["--batch-size", str(given.batch_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _converted(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    if not given.tsv_rows:
        return {}
    files = write_tsv(folder / "tsv", given.tsv_rows, workers=given.workers)
    size = total_bytes(files)
    started, used = time.perf_counter(), time.process_time()
    manifest = convert(
        files, folder / "converted", vocabulary=hashed_vocabulary(1 << 20), workers=given.workers
    )
    seconds, core_seconds = time.perf_counter() - started, time.process_time() - used
    print(
        f"converted {manifest.rows} lines, {size / 1e6:.0f} MB of TSV, in {seconds:.1f} s: "
        f"{size / seconds / 1e6:.0f} MB/s, {_shown(manifest.rows / seconds, manifest.rows / core_seconds)}",
        flush=True,
    )
    return {
        "rows": manifest.rows,
        "tsv_bytes": size,
        "seconds": seconds,
        "rows_per_second": manifest.rows / seconds,
        "rows_per_core_second": manifest.rows / core_seconds,
    }


def _machine() -> dict[str, object]:
    import pyarrow

    names = {
        line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    }
    memory = [line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": ", ".join(sorted(names)) or platform.processor(),
        "cores": processors(),
        "memory_gb": round(int(memory[0]) / 1e6) if memory else None,
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyarrow": pyarrow.__version__,
        "gpu": encode(fingerprint("cuda" if torch.cuda.is_available() else "cpu")),
        "free_disk_gb": round(shutil.disk_usage(tempfile.gettempdir()).free / 1e9),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if __name__ == "__main__":
    main()
