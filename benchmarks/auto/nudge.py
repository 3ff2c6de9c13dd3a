"""How far rounding alone drives a run apart: the same steps eager, captured, and from nudged weights.

    python benchmarks/auto/nudge.py --model wukong:2gf --batch-size 6144
    python benchmarks/auto/nudge.py --model wukong --batch-size 64 --steps 10 --device cpu

Every arm trains the same model over the same synthetic rows in the same order, with the warm-up and the rates
of auto.py. Nudged ones begin with every weight multiplied by 1 + s N(0, 1). Printed are the losses of the
first steps, which tell arms apart that compute something else, and progressive NE after each five steps.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from typing import Any

import torch

from loka import mods
from loka.cli.commands.demo import MODS
from loka.cli.inputs import choose_device, model_builder
from loka.core.table import format_table
from loka.data import SyntheticClicks
from loka.data.batch import Batch
from loka.train import TrainConfig
from loka.train.config import Precision, StepMode
from loka.train.metrics import normalized_entropy
from loka.train.optim import build_optimizers
from loka.train.schedule import schedulers
from loka.train.steps.step import Step

FIRST, EVERY = 4, 5


def train(
    batches: Sequence[Batch],
    source: SyntheticClicks,
    config: TrainConfig,
    given: argparse.Namespace,
    *,
    nudge: float = 0.0,
    seed: int = 0,
    eager: Sequence[int] = (),
) -> tuple[list[float], list[float]]:
    """Mean losses of the first steps; NE so far after each `EVERY`. `eager`: steps that run as if sampled."""
    torch.manual_seed(0)
    model = model_builder(given.model)(source)
    mods.apply(model, MODS)
    model.to(config.device)
    generator = torch.Generator(config.device).manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters() if nudge else ():
            noise = torch.randn(weight.shape, generator=generator, device=weight.device)
            weight.mul_(1 + nudge * noise)
    optimizers = build_optimizers(model, config)
    step = Step(model, optimizers, config)
    rates = schedulers(optimizers, config, given.schedule)
    losses: list[torch.Tensor] = []
    curve = []
    for number, batch in enumerate(batches):
        result = step(batch, sight="hooks" if number in eager else "none")
        for scheduler in rates.values():
            scheduler.step()
        losses.append(result.losses.clone())
        if (number + 1) % EVERY == 0:
            labels = torch.cat([each.label for each in batches[: number + 1]])
            curve.append(normalized_entropy(torch.cat(losses).mean().item(), labels.mean().item()))
    step.close()
    torch._dynamo.reset()
    return [each.mean().item() for each in losses[:FIRST]], curve


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="wukong:2gf")
    options.add_argument("--batch-size", type=int, default=6144)
    options.add_argument("--steps", type=int, default=25)
    options.add_argument("--schedule", type=int, default=406, help="steps that the warm-up is a share of")
    options.add_argument("--device")
    given = options.parse_args()
    device = choose_device(given.device)
    source = SyntheticClicks(rows=given.batch_size * given.steps, seed=0)
    batches = [batch.to(device) for batch in source.batches(given.batch_size)]
    arms: dict[str, tuple[Precision, StepMode, dict[str, Any]]] = {"eager": ("bf16", "eager", {})}
    arms |= {
        f"eager, nudged by 2e-3, seed {s}": ("bf16", "eager", {"nudge": 2e-3, "seed": s}) for s in range(5, 9)
    }
    arms |= {
        f"eager, nudged by 1e-4, seed {s}": ("bf16", "eager", {"nudge": 1e-4, "seed": s}) for s in range(5, 7)
    }
    arms["eager, float32"] = ("fp32", "eager", {})
    arms["eager, float32, nudged by 1e-4"] = ("fp32", "eager", {"nudge": 1e-4})
    if device == "cuda":
        arms["captured"] = ("bf16", "graph", {})
        arms["captured, steps 0 and 20 sampled"] = ("bf16", "graph", {"eager": (0, 20)})
    rows = []
    for name, (precision, mode, options_) in arms.items():
        config = TrainConfig(
            batch_size=given.batch_size,
            lr=1e-3,
            schedule="constant",
            grad_clip=1.0,
            precision=precision,
            device=device,
            step=mode,
        )
        first, curve = train(batches, source, config, given, **options_)
        rows.append((name, " ".join(f"{x:.5f}" for x in first), " ".join(f"{x:.5f}" for x in curve)))
        print(*rows[-1], sep="  ", flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    print(format_table(("arm", f"loss of the first {FIRST} steps", f"NE after each {EVERY} steps"), rows))


if __name__ == "__main__":
    main()
