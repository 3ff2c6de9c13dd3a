"""A wrong scale, planted: seen on learnt inputs, hardly or not at all on standard-normal ones.

A small DCNv2 is trained for 60 steps and probed. At one of its layers (512 -> 256, batch 512) operands are
drawn from the learnt statistics, and from N(0, 1). They are quantized in 128x128 blocks, once with float32
scales and once with powers of two, and multiplied by a right kernel and by three wrong ones:

    neighbour   block (i, j) of the input is multiplied by the scale of block (i, j - 1)
    order       the input's scales lie in memory row by row and are read column by column
    weight      as neighbour, for the weight

Prints the table of docs/self_check.md.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity

import loka
from loka.core.error import Estimate, estimate_mean, mere, sqnr_db
from loka.core.numerics.reference import Quantized, quantize, scaled_mm
from loka.core.recipe import Cast, Format, Granularity
from loka.core.table import format_table
from loka.data import SyntheticClicks
from loka.data.generated.synthetic import VOCAB_SIZES
from loka.statistics.draw import sampler
from loka.train.config import TrainConfig
from loka.train.optim import build_optimizers
from loka.zoo import build

LAYER, ROWS, DRAWS = "deep.0", 512, 8


Operands = tuple[Quantized, Quantized]


def right(a: Quantized, b: Quantized) -> Operands:
    return a, b


def neighbour(a: Quantized, b: Quantized) -> Operands:
    return replace(a, scale=a.scale.roll(1, dims=1)), b


def order(a: Quantized, b: Quantized) -> Operands:
    return replace(a, scale=a.scale.t().reshape(a.scale.shape)), b


def weight(a: Quantized, b: Quantized) -> Operands:
    return a, replace(b, scale=b.scale.roll(1, dims=1))


KERNELS: dict[str, Callable[[Quantized, Quantized], Operands]] = {
    "right": right,
    "neighbour": neighbour,
    "order": order,
    "weight": weight,
}
SCALES = {
    "float32": Cast(Format.E4M3, Granularity.BLOCK_128X128),
    "power of two": Cast(Format.E4M3, Granularity.BLOCK_128X128, power_of_two=True),
}
Case = tuple[str, str, str]
"""(inputs, scales, kernel)"""


def probed(steps: int = 60, batch: int = 512) -> loka.Stats:
    """Statistics of a small DCNv2 after `steps` steps on synthetic clicks."""
    torch.manual_seed(0)
    # 31 tables and the bottom MLP make 32 tokens of 16: K = 512, four whole blocks.
    rows = SyntheticClicks(rows=steps * batch, seed=0, vocab_sizes=(*VOCAB_SIZES, *VOCAB_SIZES[:5]))
    model = build("dcnv2", dense_features=rows.dense_features, vocab_sizes=rows.vocab_sizes, size="small")
    optimizers = build_optimizers(model, TrainConfig(batch_size=batch)).values()
    with loka.Probe(model, every=10) as probe:
        for clicks in rows.batches(batch):
            dense, sparse, label = map(torch.as_tensor, (clicks.dense, clicks.sparse, clicks.label))
            loss = binary_cross_entropy_with_logits(model(dense, sparse), label)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    return probe.stats()


def calc_diff(out: torch.Tensor, reference: torch.Tensor) -> float:
    """DeepGEMM's measure: 1 - 2 <x, y> / (|x|^2 + |y|^2); its tests ask for less than 0.001."""
    x, y = out.double(), reference.double()
    return 1 - float(2 * (x * y).sum() / (x * x + y * y).sum())


def cosine(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float(cosine_similarity(out.double().flatten(), reference.double().flatten(), dim=0))


MEASURES = {"sqnr_db": sqnr_db, "mere": mere, "cosine": cosine, "calc_diff": calc_diff}


def measured(stats: loka.Stats) -> tuple[dict[Case, dict[str, Estimate]], dict[Case, bool]]:
    """Every measure of every case over the draws, and whether it gave the right kernel's very bits."""
    learnt = {name: sampler(found, torch.device("cpu")) for name, found in stats.layers[LAYER].operands.items()}
    generator = torch.Generator().manual_seed(0)
    samples: dict[Case, dict[str, list[float]]] = {}
    same: dict[Case, bool] = {}
    for _ in range(DRAWS):
        x, weight = learnt["input"](ROWS, generator), learnt["weight"](0, generator)
        normal = torch.randn(x.shape, generator=generator), torch.randn(weight.shape, generator=generator)
        for inputs, (a, b) in {"standard normal": normal, "learnt": (x, weight)}.items():
            reference = a @ b.t()
            for scales, cast in SCALES.items():
                low_a, low_b = quantize(a, cast), quantize(b, cast)
                sound = scaled_mm(low_a, low_b, dtype=torch.bfloat16)
                for kernel, reads in KERNELS.items():
                    out = scaled_mm(*reads(low_a, low_b), dtype=torch.bfloat16)
                    case = (inputs, scales, kernel)
                    same[case] = same.get(case, True) and torch.equal(out, sound)
                    kept = samples.setdefault(case, {name: [] for name in MEASURES})
                    for name, measure in MEASURES.items():
                        kept[name].append(measure(out, reference))
    found = {case: {name: estimate_mean(values) for name, values in kept.items()} for case, kept in samples.items()}
    return found, same


def table(found: dict[Case, dict[str, Estimate]], same: dict[Case, bool]) -> str:
    header = ("inputs", "scales", "kernel", "sqnr_db", "mere, 95 % interval", "cosine", "calc_diff", "")
    rows = []
    for case, values in found.items():
        relative = values["mere"]
        rows.append(
            (
                *case,
                f"{values['sqnr_db'].value:.1f}",
                f"{relative.value:.2f} [{relative.low:.2f}, {relative.high:.2f}]",
                f"{values['cosine'].value:.4f}",
                f"{values['calc_diff'].value:.4f}",
                "same bits as right" if same[case] and case[2] != "right" else "",
            )
        )
    return format_table(header, rows)


if __name__ == "__main__":
    print(table(*measured(probed())))
