"""What a small change of the first weights makes of NE in the first steps of training: noise, not quality.

    python benchmarks/auto/nudge.py --model wukong:2gf --batch-size 96 --steps 25 --nudge 0.001 0.004

Each weight is multiplied by 1 + nudge * n, n normal. Synthetic rows, the three mods, float32 on a CPU, and
the rates of the first steps of a run of 652.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from loka import mods
from loka.cli.demo import MODS
from loka.cli.inputs import model_builder
from loka.data import SyntheticClicks
from loka.train import TrainConfig
from loka.train.metrics import normalized_entropy
from loka.train.optim import build_optimizers, set_rates, warmup_factor
from loka.train.step import Step

RUN_STEPS, WARMUP = 652, 0.1  # of the run beside which this stands (wukong_2gf.json)


def progressive(name: str, rows: SyntheticClicks, *, batch_size: int, nudge: float) -> Sequence[float]:
    """NE over all rows so far, after every fifth step."""
    torch.manual_seed(0)
    model = model_builder(name)(rows)
    mods.apply(model, MODS)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters() if nudge else ():
            weight.mul_(1 + nudge * torch.randn(weight.shape, generator=generator))
    config = TrainConfig(batch_size=batch_size, grad_clip=1.0, precision="fp32")
    optimizers = build_optimizers(model, config)
    step, losses, labels, found = Step(model, optimizers, config), [], [], []
    for number, batch in enumerate(rows.batches(batch_size)):
        set_rates(optimizers, config, warmup_factor(number, RUN_STEPS, WARMUP))
        losses.append(step(batch).losses.clone())
        labels.append(batch.label)
        if number % 5 == 4:
            found.append(normalized_entropy(torch.cat(losses).mean().item(), torch.cat(labels).mean().item()))
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="wukong:2gf")
    options.add_argument("--batch-size", type=int, default=96)
    options.add_argument("--steps", type=int, default=25)
    options.add_argument("--nudge", type=float, nargs="*", default=[0.001, 0.004])
    given = options.parse_args()
    rows = SyntheticClicks(rows=given.batch_size * given.steps, seed=0)
    for nudge in (0.0, *given.nudge):
        found = progressive(given.model, rows, batch_size=given.batch_size, nudge=nudge)
        print(f"nudged by {nudge:g}: " + " ".join(f"{ne:.5f}" for ne in found), flush=True)


if __name__ == "__main__":
    main()
