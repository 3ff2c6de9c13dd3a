"""How often eight bits flip an early exit: a Wukong with a head after each layer.

A row leaves after the first layer if |logit| is large, BranchyNet's rule (arXiv 1709.01686). The
line is the median: half the rows leave. FP8 is emulated; intervals of 95 % (Wilson) are for other rows of the
same model, and models differ by more.
"""

import copy
import sys

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import loka
from loka.data import SyntheticClicks
from loka.measurement import Settings
from loka.train import TrainConfig
from loka.train.optim import build_optimizers
from loka.zoo import build

VOCAB, ROWS = (50, 80, 40), 24_576


class EarlyExit(nn.Module):
    """dense [B, D], sparse [B, F] -> logits [B, layers], one after each layer."""

    def __init__(self) -> None:
        super().__init__()
        wukong = build("wukong", dense_features=4, vocab_sizes=VOCAB)
        self.front, self.layers = wukong.front, wukong.layers
        self.heads = nn.ModuleList(nn.Linear(16 * 16, 1) for _ in self.layers)  # 8 + 8 tokens of 16

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x, logits = self.front(dense, sparse), []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            logits.append(head(x.flatten(1)))
        return torch.cat(logits, dim=1)


def wilson(count: int, rows: int, z: float = 1.96) -> tuple[float, float]:
    middle = (count + z * z / 2) / (rows + z * z)
    half = z / (rows + z * z) * (count * (rows - count) / rows + z * z / 4) ** 0.5
    return max(middle - half, 0.0), middle + half


def main(seeds: int = 1) -> None:
    for seed in range(seeds):
        torch.manual_seed(seed)
        model, world = EarlyExit(), {"seed": seed, "vocab_sizes": VOCAB, "dense_features": 4}
        optimizers = build_optimizers(model, TrainConfig(batch_size=512, lr=3e-3)).values()
        with loka.Probe(model, every=8) as probe:
            for batch in SyntheticClicks(rows=ROWS, **world).batches(512):
                logits = model(batch.dense, batch.sparse)
                bce(logits, batch.label[:, None].expand_as(logits)).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        (held,) = SyntheticClicks(rows=ROWS, first_row=ROWS, **world).batches(ROWS)
        with torch.no_grad():
            exact = model(held.dense, held.sparse)[:, 0].abs()
        line = exact.median()
        for arm in ("bf16", "emulated:rowwise_e4m3", "emulated:tensorwise_e4m3"):
            planned, settings = copy.deepcopy(model), Settings(min_draws=2, max_draws=2)
            if arm != "bf16":
                report = loka.measure(probe.stats(), device="cpu", candidates=["hp", arm], settings=settings)
                loka.convert(planned, loka.plan(report, loka.Budget(min_sqnr_db=10)))
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                found = planned(held.dense, held.sparse)[:, 0].float().abs()
            flips = int(((exact > line) != (found > line)).sum())
            low, high = wilson(flips, ROWS)
            print(f"seed {seed}  {arm:24} {flips} of {ROWS}: {flips / ROWS:.2%} [{low:.2%}, {high:.2%}]")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
