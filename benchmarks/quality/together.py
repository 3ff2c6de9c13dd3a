"""Do effects of sites add up? The sum, the sum with correlations of what two layers change, and what a plan does.

    python benchmarks/quality/together.py dlrm dcnv2 wukong dhen mmoe interformer

Small models of the zoo, 60,000 synthetic rows, every `output` GEMM by e4m3 with row scales, emulated; KL/H on 14,000
rows that neither training nor the probe has seen.
"""

import sys

import torch

from loka import Budget, Probe, measure, plan
from loka.core.records.parts import beyond_sum
from loka.data import SyntheticClicks
from loka.probe import renew_effects
from loka.train.automatic.joint_effect import joint_effect
from loka.train.config import TrainConfig
from loka.train.loop import train
from loka.zoo import build

ROWS, BATCH, PROBED = 60_000, 500, 12


def main() -> None:
    for name in sys.argv[1:]:
        rows = SyntheticClicks(rows=ROWS, seed=0)
        batches = list(SyntheticClicks(rows=20_000, first_row=ROWS, seed=0).batches(BATCH))
        torch.manual_seed(0)
        model = build(name, dense_features=rows.dense_features, vocab_sizes=rows.vocab_sizes)
        with Probe(model, every=50) as probe:
            train(model, rows, config=TrainConfig(batch_size=BATCH, schedule="cosine"))
        stats = renew_effects(model, probe.stats(), batches[:PROBED])
        report = measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"])
        decided = plan(report, Budget(min_sqnr_db=None))
        effects = {d.path: d.kl.value for d in decided.decisions.values() if d.kl}
        added = sum(effects.values())
        together = added + beyond_sum(stats.alike, decided.output_recipes, effects)
        measured = joint_effect(model, decided, batches[PROBED:]).measured.value
        print(
            f"| {name} | {added:.3g}, {measured / added:.2f} | {together:.3g}, {measured / together:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
