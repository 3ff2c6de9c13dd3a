"""What serving costs and keeps, on a CPU: bytes, load, refresh, the alarm, batch invariance.

    python benchmarks/serve/serve.py

FP8 is emulated, so no time here says anything of a GPU. Models of the zoo with random weights, random rows.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import loka
from loka.measurement import Settings
from loka.serve import Server, freeze, load
from loka.serve.rows import leaves
from loka.serve.watch.monitor import EVERY
from loka.zoo import build

RECIPE = "emulated:rowwise_e4m3"
FIELDS, DENSE, VOCAB = 26, 13, 1000
BATCH = 512


def rows(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(count, DENSE, generator=generator)
    return dense, torch.randint(0, VOCAB, (count, FIELDS), generator=generator)


def planned(model: nn.Module) -> loka.Plan:
    """All `output` GEMMs but those of narrow layers by row scales; nothing is compared."""
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(*rows(64, 0)).sum().backward()
    settings = Settings(rows=64, min_draws=2, max_draws=2)
    report = loka.measure(probe.stats(), device="cpu", candidates=[RECIPE], settings=settings)
    keep = {f"{path}/*": "hp" for path, s in report.model.layers.items() if s.out_features <= 8}
    return loka.plan(report, force={**keep, "*/output": RECIPE, "*": "hp"})


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def alarm_cost(server: Server) -> float:
    """Share of time that looking at every `EVERY`th request takes: pairs of requests, in turn."""
    request = rows(BATCH, 3)
    looked = plain = 0.0
    first = next(server._requests) + 1
    for number in range(first, first + 24 * EVERY):
        spent = seconds(lambda: server(request))
        if number % EVERY == 0:
            looked += spent
        else:
            plain += spent / (EVERY - 1)
    return (looked - plain) / (looked + (EVERY - 1) * plain)


def invariance(model: nn.Module, plan: loka.Plan) -> tuple[float, float]:
    """The largest change of a logit from bucket to bucket, and the root mean square of logits."""
    request = rows(16, 5)
    answers = []
    for bucket in (16, 64, 128, 512, 2048):
        server = freeze(model, plan, calibration=[rows(64, 1)], buckets=(bucket,), autocast=torch.bfloat16)
        answers.append(leaves(server(request).output)[0].double())
    apart = max(float((one - two).abs().max()) for one in answers for two in answers)
    return apart, float(answers[0].square().mean().sqrt())


def measured(name: str) -> str:
    torch.manual_seed(0)
    model = build(name, size="small", dense_features=DENSE, vocab_sizes=(VOCAB,) * FIELDS).eval()
    plan = planned(model)
    batches = [rows(512, seed) for seed in range(4)]
    server = freeze(model, plan, calibration=batches, autocast=torch.bfloat16)
    low, high = server.card.dense_bytes
    with tempfile.TemporaryDirectory() as folder:
        server.save(folder)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        loading = seconds(lambda: load(folder, model), 3)
    refresh = seconds(lambda: server.refresh(model.state_dict()), 5)
    apart, rms = invariance(model, plan)
    return (
        f"{name}: {len(server.card.sites)} sites, FP8 weights {low / high:.3f} of bf16's bytes, "
        f"folder {size} B; load {loading:.3f} s, refresh {refresh:.3f} s; "
        f"alarm {alarm_cost(server):.2%} of the time at {BATCH} rows; "
        f"largest change of a logit between buckets {apart:.2e}, of rms {rms:.2e}; "
        f"FP8 itself {server.card.answers.mean_abs:.2e} on average"
    )


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, FP8 emulated")
    for name in ("dlrm", "dcnv2", "wukong"):
        print(measured(name))


if __name__ == "__main__":
    main()
