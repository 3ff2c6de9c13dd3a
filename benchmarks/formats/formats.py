"""Which eight bits: forward KL/H of formats by site, and what the probe's histograms predict of them.

    python benchmarks/formats/formats.py --out formats.json                # goes on where it was interrupted
    python benchmarks/formats/formats.py --out formats.json --show

Each model is trained on one pass of a synthetic world, with a cosine to 0. 1,024 fresh rows are probed. On
rows behind those the `output` GEMM of one site at a time (K >= 64, N > 8) runs in a format, then all of them:

    KL / H = mean[ p (z - z') + log(1 + e^z') - log(1 + e^z) ] / H        z' logits in the format

    fp8_tensor, fp8_row, fp8_128   e4m3, a scale each tensor; row; 1x128 against 128x128
    mxfp8                          e4m3 with powers of two for 1x32
    nvfp4                          e2m1 with e4m3 scales for 1x16 under one scale a tensor
    int8_row                       symmetric, scales of rows, both operands
    + centre                       y = Q(x - m) Q(W)^T + m W^T;  m_k the mean of column k where above sd / 2
    + hot x                        y += Q(x - Q(x)) Q(W)^T over the 32 hottest columns, by the row's scale
    + hot xw                       and Q(x) Q(W - Q(W))^T over them too: 64 more columns of the GEMM
    w8a16, w4a16                   weights alone: INT8 by row; INT4 by groups of 128

Predictions quantize nothing. With the histograms of core/numerics/depth.py, weighted by what a logit feels
(statistics/effect_depths.py), of x as it is and of x - m: input and weight terms I, V of a site. The residual
of the hot columns takes their share of I (and of V) away, shares being those of sum J_k^2 x_k^2 over columns.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.core.device import fingerprint
from loka.core.numerics.depth import WEIGHTED, DepthHistogram, error_sum
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import RECIPES, Cast, Format, Gemm, Granularity
from loka.core.storage.codec import encode
from loka.core.storage.files import read_record, write_record
from loka.core.table import format_table
from loka.data import SyntheticClicks
from loka.data.batch import Batch
from loka.kernels.gemm.run import run_gemm
from loka.statistics.depths import layout_of
from loka.statistics.effect_depths import Tables, effect_tables
from loka.train import TrainConfig, train
from loka.zoo import build

_KIND, _VERSION = "loka-bench-formats", 1
HOT = 32
E4M3, INT8 = Cast(Format.E4M3, Granularity.ROW), Cast(Format.INT8, Granularity.ROW)
TENSOR = Cast(Format.E4M3, Granularity.TENSOR)
_E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass(frozen=True, kw_only=True)
class Settings:
    train_rows: int = 60_000
    probe_rows: int = 1024
    eval_rows: int = 8192
    batch: int = 256


@dataclass(frozen=True)
class Columns:
    """Of a site's input, from the probed rows: m [K], and the hottest columns as they are and centred."""

    centre: torch.Tensor
    hot: torch.Tensor
    hot_centred: torch.Tensor


Product = Callable[[torch.Tensor, torch.Tensor, Columns], torch.Tensor]
"""x [T, K], weight [N, K] -> [T, N] float32."""


def low(hp: torch.Tensor, cast: Cast) -> torch.Tensor:
    return dequantize(quantize(hp, cast))


def by_recipe(name: str) -> Product:
    """As a converted site runs it."""

    def product(x: torch.Tensor, weight: torch.Tensor, columns: Columns) -> torch.Tensor:
        centred = RECIPES[name].centred
        m, hot = (columns.centre, columns.hot_centred) if centred else (None, columns.hot)
        gemm, dtype = Gemm.OUTPUT, torch.float32
        return run_gemm(f"emulated:{name}", x, weight, gemm=gemm, dtype=dtype, centre=m, hot=hot)

    return product


def hot_x(x: torch.Tensor, weight: torch.Tensor, columns: Columns) -> torch.Tensor:
    """The residual of x alone, which shares the scales of its rows."""
    given, low_weight, at = quantize(x, E4M3), low(weight, E4M3), columns.hot
    left = (x - dequantize(given))[:, at] / given.scale
    left = left.to(given.data.dtype).float() * given.scale
    return dequantize(given) @ low_weight.t() + left @ low_weight[:, at].t()


def grouped(hp: torch.Tensor, wide: int) -> torch.Tensor:
    return nn.functional.pad(hp, (0, -hp.shape[1] % wide)).unflatten(1, (-1, wide))


def mx(hp: torch.Tensor) -> torch.Tensor:
    """OCP MXFP8: e4m3, the scale of 32 is 2^(floor(log2 amax) - 8), beyond which values saturate."""
    groups = grouped(hp, 32)
    amax = groups.abs().amax(dim=2, keepdim=True).clamp_min(2.0**-100)
    scale = torch.exp2(amax.log2().floor() - 8)
    values = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return values.flatten(1)[:, : hp.shape[1]]


def nv(hp: torch.Tensor) -> torch.Tensor:
    """NVFP4: e2m1, scales of 16 in e4m3 under one float32 scale of the tensor."""
    groups = grouped(hp, 16)
    amax = groups.abs().amax(dim=2, keepdim=True)
    whole = amax.amax().clamp_min(2.0**-100) / (6 * 448)
    scale = (amax / 6 / whole).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float() * whole
    u = (groups / scale).clamp(-6, 6)
    nearest = _E2M1[(u.abs().unsqueeze(3) - _E2M1).abs().argmin(dim=3)]
    return (nearest * u.sign() * scale).flatten(1)[:, : hp.shape[1]]


def int4(weight: torch.Tensor) -> torch.Tensor:
    groups = grouped(weight, 128)
    step = groups.abs().amax(dim=2, keepdim=True).clamp_min(2.0**-100) / 7
    return ((groups / step).round() * step).flatten(1)[:, : weight.shape[1]]


ARMS: dict[str, Product] = {
    "fp8_tensor": by_recipe("tensorwise_e4m3"),
    "fp8_row": by_recipe("rowwise_e4m3"),
    "fp8_128": by_recipe("blockwise_e4m3"),
    "mxfp8": lambda x, weight, columns: mx(x) @ mx(weight).t(),
    "nvfp4": lambda x, weight, columns: nv(x) @ nv(weight).t(),
    "fp8_row + centre": by_recipe("rowwise_e4m3_centred"),
    "fp8_row + hot x": hot_x,
    "fp8_row + hot xw": by_recipe("rowwise_e4m3_hot32"),
    "fp8_row + centre + hot xw": by_recipe("rowwise_e4m3_centred_hot32"),
    "int8_row": by_recipe("int8_row"),
    "int8_row + centre": by_recipe("int8_row_centred"),
    "w8a16": lambda x, weight, columns: x @ low(weight, INT8).t(),
    "w4a16": lambda x, weight, columns: x @ int4(weight).t(),
}
PREDICTED = tuple(name for name in ARMS if name.startswith(("fp8_tensor", "fp8_row", "int8")))


class Foreign(nn.Module):
    """A click model as written elsewhere: DCNv2 by FuxiCTR's equations, its tower with LayerNorm and ReLU.
    None of LoKA's modules."""

    def __init__(self, dense_features: int, vocab_sizes: Sequence[int], dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in vocab_sizes)
        width = dense_features + dim * len(vocab_sizes)
        self.cross_layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()
        )
        self.fc = nn.Linear(width + 128, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        fields = [table(sparse[:, at]) for at, table in enumerate(self.tables)]
        first = torch.cat([dense, *fields], dim=1)
        crossed = first
        for layer in self.cross_layers:
            crossed = crossed + first * layer(crossed)
        return self.fc(torch.cat([crossed, self.mlp(first)], dim=1)).squeeze(1)


def trained(name: str, settings: Settings, seed: int) -> tuple[nn.Module, Batch, list[Batch]]:
    """The model, the rows to probe, and those to evaluate on, none of them trained on."""
    torch.manual_seed(seed)
    world = SyntheticClicks(rows=settings.train_rows, seed=seed)
    fresh = SyntheticClicks(
        rows=settings.probe_rows + settings.eval_rows, first_row=settings.train_rows, seed=seed
    )
    columns = {"dense_features": world.dense_features, "vocab_sizes": world.vocab_sizes}
    kind, _, size = name.partition(":")
    model = Foreign(**columns) if kind == "foreign" else build(kind, size=size or "small", **columns)
    config = TrainConfig(batch_size=settings.batch, schedule="cosine", precision="fp32", seed=seed)
    train(model, world, config=config)
    first, *rest = fresh.batches(settings.probe_rows)
    return model.eval(), first, rest


@contextlib.contextmanager
def running(model: nn.Module, arm: Product, sites: Mapping[str, Columns]) -> Iterator[None]:
    """Inside, the named layers multiply by `arm`."""
    handles = []
    for path, columns in sites.items():

        def hook(module: Any, args: Any, output: Any, columns: Columns = columns) -> Any:
            rows = args[0].reshape(-1, module.in_features)
            result = arm(rows, module.weight.detach(), columns).view(output.shape)
            return result if module.bias is None else result + module.bias

        handles.append(model.get_submodule(path).register_forward_hook(hook))
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def logits(model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    return torch.cat([model(batch.dense, batch.sparse) for batch in batches]).double()


def divergence(base: torch.Tensor, changed: torch.Tensor) -> float:
    p = base.sigmoid()
    softplus = nn.functional.softplus
    q = float(p.mean())
    entropy = -q * math.log(q) - (1 - q) * math.log1p(-q)
    return float((p * (base - changed) + softplus(changed) - softplus(base)).mean()) / entropy


def probe(model: nn.Module, batch: Batch, seed: int) -> dict[str, tuple[Columns, dict[str, float]]]:
    """Of each site its columns, and KL/H as predicted of each arm in PREDICTED."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.in_features >= 64 and module.out_features > 8:

            def hook(module: Any, args: Any, output: Any, path: str = path) -> None:
                output.retain_grad()
                seen[path] = args[0].detach(), output

            handles.append(module.register_forward_hook(hook))
    z = model(batch.dense, batch.sparse)
    p = z.detach().sigmoid()
    sign = torch.randint(2, z.shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    (sign * (p * (1 - p)).sqrt() * z).sum().backward()
    for handle in handles:
        handle.remove()
    q = float(p.double().mean())
    unit = 2 * len(z) * (-q * math.log(q) - (1 - q) * math.log1p(-q))
    found = {}
    for path, (given, output) in seen.items():
        weight, grads = model.get_submodule(path).weight.detach(), output.grad
        assert grads is not None
        given, grads = given.reshape(len(z), -1, weight.shape[1]), grads.reshape(len(z), -1, weight.shape[0])
        assert given.shape[1] == 1, f"{path}: several rows a sample"
        found[path] = predict(given[:, 0], weight, grads[:, 0], unit)
    return found


def predict(
    x: torch.Tensor, weight: torch.Tensor, grads: torch.Tensor, unit: float
) -> tuple[Columns, dict[str, float]]:
    mean, sd = x.mean(dim=0), x.std(dim=0)
    m = mean.where(mean.abs() > sd / 2, 0)
    rows, told, hottest = torch.arange(len(x)).unsqueeze(1), {}, []
    for centre, given in (("", x), (" + centre", x - m)):
        casts = [(E4M3, E4M3), (TENSOR, TENSOR)]
        tables = effect_tables(given, weight, grads, rows, casts, torch.Generator())
        energy = (grads @ weight).square().mul(given.square()).sum(dim=0)
        weighed = (grads.square() @ weight.square()).mul(given.square()).sum(dim=0)
        hot = (energy + weighed).topk(min(HOT, len(energy))).indices
        hottest.append(hot)
        spared = energy[hot].sum() / energy.sum(), weighed[hot].sum() / weighed.sum()
        for name, cast in (("fp8_tensor", TENSOR), ("fp8_row", E4M3), ("int8_row", INT8)):
            of_input, of_weight = (term(tables, operand, cast) / unit for operand in ("input", "weight"))
            told[name + centre] = of_input + of_weight
            told[f"{name}{centre} + hot x"] = of_input * (1 - float(spared[0])) + of_weight
            told[f"{name}{centre} + hot xw"] = of_input * (1 - float(spared[0])) + of_weight * (
                1 - float(spared[1])
            )
    return Columns(m, *hottest), {name: told[name] for name in PREDICTED}


def term(tables: Tables, operand: str, cast: Cast) -> float:
    """Sum over samples of J^2 (x - Q(x))^2 [nats, doubled] from a histogram of depths."""
    table = tables[f"{operand}/effect_{layout_of(cast, transposed=False).name}"]
    whole = torch.zeros(len(table), 10, dtype=torch.float64)
    whole[:, -3:] = table
    return float(error_sum(DepthHistogram(whole), cast.format, weighting=WEIGHTED))


def run(name: str, seed: int, settings: Settings) -> dict[str, Any]:
    model, first, batches = trained(name, settings, seed)
    probed = probe(model, first, seed)
    columns = {path: of for path, (of, _) in probed.items()}
    with torch.no_grad():
        base = logits(model, batches)
    points, joint = [], {}
    for arm, product in ARMS.items():
        for path, (of, told) in probed.items():
            with running(model, product, {path: of}):
                actual = divergence(base, logits(model, batches))
            points.append({"site": path, "arm": arm, "actual": actual, "predicted": told.get(arm)})
        with running(model, product, columns):
            joint[arm] = divergence(base, logits(model, batches))
    centred = {path: float((of.centre != 0).double().mean()) for path, of in columns.items()}
    return {"model": name, "seed": seed, "points": points, "joint": joint, "centred": centred}


def tables(entries: Mapping[str, Any]) -> str:
    """All sites together, by model; and predicted against actual, by site."""
    names = list(dict.fromkeys(entry["model"] for entry in entries.values()))
    lines = ["KL/H x 1e-6 of all sites together, mean of the seeds"]
    rows = []
    for arm in ARMS:
        means = [[e["joint"][arm] for e in entries.values() if e["model"] == name] for name in names]
        rows.append((arm, *(f"{1e6 * sum(each) / len(each):.3g}" for each in means)))
    lines += [format_table(("format", *names), rows), "", "actual / predicted by site: median [least, most]"]
    rows = []
    for arm in PREDICTED:
        row = [arm]
        for name in [*names, "all"]:
            mine = [e for e in entries.values() if name in (e["model"], "all")]
            found = [p for e in mine for p in e["points"] if p["arm"] == arm and p["predicted"]]
            ratios = sorted(p["actual"] / p["predicted"] for p in found)
            row.append(f"{ratios[len(ratios) // 2]:.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] of {len(ratios)}")
        rows.append(tuple(row))
    return "\n".join([*lines, format_table(("format", *names, "all"), rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["dlrm", "dcnv2", "foreign"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="print the tables of --out and stop")
    arguments = parser.parse_args()
    settings = Settings()
    head = {"machine": encode(fingerprint("cpu")), "settings": asdict(settings)}
    entries: dict[str, Any] = {}
    if arguments.out.exists():
        content = read_record(arguments.out, kind=_KIND, version=_VERSION, way_out="remove it", parse=dict)
        entries = content.pop("entries")
        if content != head and not arguments.show:
            raise SystemExit(f"{arguments.out} is of other settings or another machine: choose another --out")
    for seed in range(0 if arguments.show else arguments.seeds):
        for name in arguments.models:
            if f"{name}/{seed}" not in entries:
                began = time.monotonic()
                entry = run(name, seed, settings)
                entries[f"{name}/{seed}"] = {**entry, "seconds": round(time.monotonic() - began, 1)}
                content = {**head, "entries": entries}
                write_record(arguments.out, kind=_KIND, version=_VERSION, content=content)
                print(f"{name}, seed {seed}: {entries[f'{name}/{seed}']['seconds']} s", flush=True)
    print(tables(entries))


if __name__ == "__main__":
    main()
