"""Writes rows of the synthetic world, planted teacher and all, as a folder that every command reads.

    python benchmarks/quality/synthetic.py --rows 12000000 --out rows
    loka validate --schedule constant --data rows --model dcnv2 --batch-size 8192 --arm plan.json --arm naive

A process draws some 30,000 to 100,000 rows a second, fewer than training on a GPU takes; read back, they
come by the million. Shards are drawn by as many processes as there are processors; each is whole or not
there, and a second start writes what is missing. `--history` gives each row a sequence.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import numpy as np

from loka.core.exceptions import FileRefused
from loka.data import SyntheticClicks
from loka.data.block import Block
from loka.data.formats.shard_writer import ShardWriter
from loka.data.formats.shards import GROUP_ROWS, Manifest, Shard, read_manifest, write_manifest
from loka.data.workers import processors

SHARD_ROWS = 524_288
BATCH = 8192


def write_shard(folder: Path, number: int, *, rows: int, shards: int, seed: int, history: int) -> Shard:
    """Number `number` of `shards` equal parts of the world's rows."""
    source = SyntheticClicks(rows=rows, seed=seed, shard=number, shards=shards, history=history)
    writer = ShardWriter(folder, f"shard-{number:05d}.parquet", group_rows=GROUP_ROWS)
    for batch in source.batches(BATCH):
        arrays = {name: tensor.numpy() for name, tensor in batch.tensors().items()}
        arrays["sparse"] = arrays["sparse"].astype(np.int32)
        writer.add(Block(**arrays, counts=np.empty((len(batch), 0), np.int32)))
    return Shard(file=writer.name, bytes=writer.finish(), rows=writer.rows, counts={})


def write(folder: Path, *, rows: int, seed: int, history: int, workers: int) -> Manifest:
    """The folder, whole. Raises FileRefused where it holds something else."""
    folder.mkdir(parents=True, exist_ok=True)
    world = SyntheticClicks(rows=rows, seed=seed, history=history)
    shards = max(-(-rows // SHARD_ROWS), 1)
    fields = {
        "settings": {"rows": "benchmarks/quality/synthetic.py", "world": world.identity},
        "digest": f"{world.identity} in {shards}",
        "pieces": shards,
        "dense": tuple(f"I{number + 1}" for number in range(world.dense_features)),
        "sparse": tuple(f"C{number + 1}" for number in range(len(world.vocab_sizes))),
        "vocab_sizes": world.vocab_sizes,
        "history": world.history,
        "group_rows": GROUP_ROWS,
    }
    done: dict[int, Shard] = {}
    if any(folder.iterdir()):
        there = read_manifest(folder)
        if there.digest != fields["digest"]:
            raise FileRefused(f"{folder} holds other rows", way_out="choose another folder, or remove it")
        done = {place: one for place, one in there.shards.items() if (folder / one.file).exists()}
    write_manifest(folder, Manifest(**fields, shards=done))
    job = partial(write_shard, folder, rows=rows, shards=shards, seed=seed, history=history)
    fresh = multiprocessing.get_context("spawn")  # threads of this process do not survive a fork
    with ProcessPoolExecutor(min(workers, shards), mp_context=fresh) as pool:
        waiting = {pool.submit(job, number): number for number in range(shards) if number not in done}
        for finished in as_completed(waiting):
            done[waiting[finished]] = finished.result()
            write_manifest(folder, Manifest(**fields, shards=done))
            print(f"{len(done)} of {shards} shards", flush=True)
    return read_manifest(folder)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=12_000_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--history", type=int, default=0, help="ids of the longest sequence; 0 for none")
    options.add_argument("--workers", type=int, default=processors())
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    began = time.perf_counter()
    made = write(given.out, rows=given.rows, seed=given.seed, history=given.history, workers=given.workers)
    took = time.perf_counter() - began
    print(f"{made.rows} rows in {took:.1f} s, {made.rows / took:.0f} a second")


if __name__ == "__main__":
    main()
