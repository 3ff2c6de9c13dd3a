"""What synchronizing replicas' tables by rows costs in NE, and saves in bytes: on a CPU, without TorchRec.

    python benchmarks/row_sync/ne.py --out runs/row_sync.jsonl [--seeds 4] [--rows 400000]

Two replicas over gloo train DLRM on synthetic clicks, each on its half of every batch: dense layers in
DistributedDataParallel with Adam, tables by row-wise AdaGrad with c = 2, rates with cosine decay. An arm is
how tables are brought together. `one` is one group with whole batches; `whole` takes the mean of what changed
in float32 after every step, as DMPCollection.sync does of whole tables. Held-out log losses of the same seed
are subtracted row by row: in float32 from those of `whole`, else from those in float32 at the same interval.
A line of JSON an arm and seed; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loka.core.error import estimate_mean
from loka.data import SyntheticClicks
from loka.distributed import momentum_scaled, row_sync
from loka.train.metrics import log_losses
from loka.train.optim import RowwiseAdagrad
from loka.zoo import build

REPLICAS, BATCH, HELD_OUT = 2, 1024, 100_000
VOCABULARY = (50_000,) * 4 + (5_000,) * 4
ARMS: dict[str, dict[str, Any]] = {
    "whole": {"every": 1, "codec": "fp32"},
    "one": {},
    **{f"fp32, every {n}": {"every": n, "codec": "fp32"} for n in (4, 16, 64)},
    **{f"e4m3, every {n}": {"every": n} for n in (4, 16, 64)},
    "e4m3, every 16, never exact": {"every": 16, "exact_every": 10**6},
    "e4m3, every 16, late by 4": {"every": 16, "staleness": 4},
    "e4m3, every 16, late by 15": {"every": 16, "staleness": 15},
    "e4m3 weights, every 16": {"every": 16, "codec": "fp32", "weights": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    known = _known(arguments.out)
    for seed in range(arguments.seeds):
        for arm in arguments.arms:
            if (arm, seed) in known:
                continue
            began = time.monotonic()
            store = arguments.out.with_suffix(".store")
            store.unlink(missing_ok=True)
            mp.spawn(_work, args=(arm, seed, arguments.rows, store, arguments.out), nprocs=REPLICAS)
            store.unlink(missing_ok=True)
            print(f"{arm}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    print(table(_known(arguments.out), arguments.out))


def _known(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {(record["arm"], record["seed"]): record for record in map(json.loads, lines)}


def _work(rank: int, arm: str, seed: int, rows: int, store: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store.absolute()}", rank=rank, world_size=REPLICAS)
    record, losses = trained(rank, arm, seed, rows)
    if rank == 0:
        np.save(_losses(out, arm, seed), losses)
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
    dist.destroy_process_group()


def _losses(out: Path, arm: str, seed: int) -> Path:
    return out.with_name(f"{out.stem}.{arm.replace(' ', '_').replace(',', '')}.{seed}.npy")


def trained(rank: int, arm: str, seed: int, rows: int) -> tuple[dict[str, Any], np.ndarray]:
    torch.manual_seed(seed)
    model = build("dlrm", dense_features=13, vocab_sizes=VOCABULARY)
    names = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    tables = [p for n, p in model.named_parameters() if n in names]
    dense = [p for n, p in model.named_parameters() if n not in names]
    scaled = momentum_scaled(lr=0.1, eps=1e-8, c=1.0 if arm == "one" else float(REPLICAS))
    sparse_optimizer = RowwiseAdagrad(tables, **scaled)
    dense_optimizer = torch.optim.Adam(dense, lr=2e-3)
    steps = rows // BATCH

    def decay(step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * step / steps))

    schedules = [torch.optim.lr_scheduler.LambdaLR(o, decay) for o in (sparse_optimizer, dense_optimizer)]
    settings = dict(ARMS[arm])
    in_eight_bits = settings.pop("weights", False)
    sync = row_sync(model, optimizer=sparse_optimizer, **settings) if arm != "one" else None
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))
    wrapped = DistributedDataParallel(model)
    source = SyntheticClicks(rows=rows, seed=seed, vocab_sizes=VOCABULARY)
    part = slice(None) if arm == "one" else slice(rank * BATCH // REPLICAS, (rank + 1) * BATCH // REPLICAS)
    for step, batch in zip(range(steps), source.batches(BATCH), strict=False):
        dense_rows, ids, labels = (torch.as_tensor(x)[part] for x in (batch.dense, batch.sparse, batch.label))
        loss = nn.functional.binary_cross_entropy_with_logits(wrapped(dense_rows, ids), labels)
        for optimizer in (sparse_optimizer, dense_optimizer):
            optimizer.zero_grad()
        loss.backward()
        for optimizer, schedule in zip((sparse_optimizer, dense_optimizer), schedules, strict=True):
            optimizer.step()
            schedule.step()
        if sync is not None:
            sync.step()
            if in_eight_bits and (step + 1) % settings["every"] == 0:
                for weight in tables:
                    _through_e4m3(weight)
    if sync is not None:
        sync.flush()
    momentum = float(sum(sparse_optimizer.state[weight]["sum"].double().sum() for weight in tables))
    losses, ne = _held_out(model, seed, rows)
    traffic = vars(sync.traffic) if sync is not None else {}
    record = {"arm": arm, "seed": seed, "rows": rows, "ne": ne, "momentum": momentum, **traffic}
    return record, losses


@torch.no_grad()
def _through_e4m3(weight: torch.Tensor) -> None:
    """Each row as eight bits and a scale: what a wire that carries weights in FP8 does to them."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 448
    weight.copy_((weight / scale).to(torch.float8_e4m3fn).float() * scale)


@torch.no_grad()
def _held_out(model: nn.Module, seed: int, rows: int) -> tuple[np.ndarray, float]:
    source = SyntheticClicks(rows=HELD_OUT, seed=seed, first_row=rows, vocab_sizes=VOCABULARY)
    logits, labels = [], []
    for batch in source.batches(4096):
        logits.append(model(torch.as_tensor(batch.dense), torch.as_tensor(batch.sparse)).numpy())
        labels.append(batch.label)
    z, y = np.concatenate(logits).astype(np.float64), np.concatenate(labels) > 0.5
    losses = log_losses(z, y)
    rate = y.mean()
    return losses, float(losses.mean() / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))


def _against(arm: str) -> str:
    every = ARMS[arm].get("every")
    return f"fp32, every {every}" if arm.startswith("e4m3") else "whole"


def table(known: dict[tuple[str, int], dict[str, Any]], out: Path) -> str:
    """NE against `whole` in percent, over seeds; bytes against whole tables once in as many steps."""
    by_arm: dict[str, list[float]] = defaultdict(list)
    for arm, seed in known:
        other = _against(arm)
        if arm != other and (other, seed) in known:
            mine, its = (np.load(_losses(out, name, seed)) for name in (arm, other))
            by_arm[arm].append(float(100 * (mine - its).mean() / its.mean()))
    head = ("arm", "NE", "against", "pairs", "bytes of whole tables'", "V / c of one group's")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    ones = {seed: record["momentum"] for (name, seed), record in known.items() if name == "one"}
    for arm in ARMS:
        records = [record for (name, _), record in known.items() if name == arm]
        if not records:
            continue
        found = estimate_mean(by_arm[arm]) if len(by_arm[arm]) > 1 else None
        shares = [record["received"] / record["whole"] for record in records if "whole" in record]
        ratios = [r["momentum"] / REPLICAS / ones[r["seed"]] for r in records if r["seed"] in ones]
        cells = (
            arm,
            f"{found.value:+.4f} % [{found.low:+.4f}, {found.high:+.4f}]" if found else "-",
            _against(arm) if found else "-",
            str(len(by_arm[arm])),
            f"{np.mean(shares):.3f}" if shares else "-",
            f"{np.mean(ratios):.3f}" if ratios and arm != "one" else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
