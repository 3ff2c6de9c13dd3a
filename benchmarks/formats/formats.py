"""Which eight bits: what a format costs a trained model's predictions (KL/H) and its NE by the labels.

    python benchmarks/formats/formats.py --out formats.json --real rows.parquet     # goes on where it stopped
    python benchmarks/formats/formats.py --out formats.json --show

Each model is trained in float32 on one pass, with a cosine to 0, and then multiplies in a format: a question
of serving, after training. The `output` GEMMs of all sites (K >= 64, N > 8) run in it. On rows held out, each
with its logit z in high precision and z' in the format, p = sigmoid(z), H the entropy of their labels' rate:

    KL/H          = mean[ p (z - z') + log(1 + e^z') - log(1 + e^z) ] / H     knows no label
    change of NE  = mean[ loss(y, z') - loss(y, z) ] / H                      paired by row

    recentred     = the same of z' - mean(z' - z), the logits without the shift that all rows have in common

with standard errors over rows, and over seeds: each has other initial weights, another world or another fifth
of the real rows held out.

    fp8_tensor, fp8_row, fp8_128   e4m3, a scale each tensor (1,024 rows); row; 1x128 against 128x128
    mxfp8                          e4m3 with powers of two for 1x32
    nvfp4                          e2m1 with e4m3 scales for 1x16 under one scale a tensor
    int8_row                       symmetric, scales of rows, both operands
    + centre                       y = Q(x - m) Q(W)^T + m W^T;  m_k the mean of column k where above sd / 2
    + hot x                        y += Q(x - Q(x)) Q(W)^T over the 32 hottest columns, by the row's scale
    + hot xw                       and Q(x) Q(W - Q(W))^T over them too: 64 more columns of the GEMM
    w8a16, w4a16                   weights alone: INT8 by row; INT4 by groups of 128

m and the hottest columns, the largest sums of J_k^2 x_k^2 with J what a logit feels, are of 1,024 other rows.
"""

import argparse
import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from loka.core.device import fingerprint
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import RECIPES, Cast, Format, Gemm, Granularity
from loka.core.storage.codec import encode
from loka.core.storage.files import read_record, write_record
from loka.core.table import format_table
from loka.data import Source, SyntheticClicks, open_table
from loka.data.batch import Batch
from loka.kernels.gemm.run import run_gemm
from loka.train import TrainConfig, train
from loka.train.metrics import Floats, checked, divergences, log_losses, normalized_entropy
from loka.zoo import build

_KIND, _VERSION = "loka-bench-formats", 2
HOT = 32
E4M3, INT8 = Cast(Format.E4M3, Granularity.ROW), Cast(Format.INT8, Granularity.ROW)
_E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
MEASURES = ("KL/H", "change of NE", "recentred")
MODELS = ("dlrm", "dcnv2", "wukong", "interformer", "dhen", "foreign")


@dataclass(frozen=True, kw_only=True)
class Settings:
    train_rows: int = 200_000
    probe_rows: int = 1024
    eval_rows: int = 65_536
    batch: int = 128
    folds: int = 5


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
    nearest = _E2M1[torch.bucketize(u.abs(), (_E2M1[1:] + _E2M1[:-1]) / 2)]
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


class Foreign(nn.Module):
    """DCNv2 by FuxiCTR's equations, its tower with LayerNorm and ReLU. None of LoKA's modules."""

    def __init__(self, dense_features: int, vocab_sizes: Sequence[int], dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, dim) for size in vocab_sizes)
        width = dense_features + dim * len(vocab_sizes)
        self.cross_layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.fc = nn.Linear(width + 128, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        fields = [table(sparse[:, at]) for at, table in enumerate(self.tables)]
        first = torch.cat([dense, *fields], dim=1)
        crossed = first
        for layer in self.cross_layers:
            crossed = crossed + first * layer(crossed)
        return self.fc(torch.cat([crossed, self.mlp(first)], dim=1)).squeeze(1)


@contextlib.contextmanager
def sources(real: Path | None, seed: int, settings: Settings) -> Iterator[tuple[Source, Source]]:
    """To train on and held out: of the world of that seed, or of real rows another fifth for each seed."""
    rows, held_out = settings.train_rows, settings.probe_rows + settings.eval_rows
    if real is None:
        world = SyntheticClicks(rows=rows, seed=seed)
        yield world, SyntheticClicks(rows=held_out, first_row=rows, seed=seed)
        return
    import pyarrow
    from pyarrow import parquet

    table = parquet.read_table(real)
    cut = len(table) * (settings.folds - seed) // settings.folds
    with tempfile.TemporaryDirectory() as folder:
        rotated = Path(folder) / "rows.parquet"
        parquet.write_table(pyarrow.concat_tables([table[cut:], table[:cut]]), rotated)
        yield open_table(rotated, holdout=1 / settings.folds)


def trained(name: str, world: Source, settings: Settings, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    columns = {"dense_features": world.dense_features, "vocab_sizes": world.vocab_sizes}
    model = Foreign(**columns) if name == "foreign" else build(name, **columns)
    config = TrainConfig(batch_size=settings.batch, schedule="cosine", precision="fp32", seed=seed)
    train(model, world, config=config)
    return model.eval()


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


def logits(model: nn.Module, batches: Sequence[Batch]) -> Floats:
    return torch.cat([model(batch.dense, batch.sparse) for batch in batches]).double().numpy()


def probe(model: nn.Module, batch: Batch, seed: int) -> dict[str, Columns]:
    """By site. Layers over tokens have several rows a sample, which count alike."""
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.in_features >= 64 and module.out_features > 8:

            def hook(module: Any, args: Any, output: Any, path: str = path) -> None:
                assert path not in seen, f"{path} is called twice"
                output.retain_grad()
                seen[path] = args[0].detach(), output

            handles.append(module.register_forward_hook(hook))
    z = model(batch.dense, batch.sparse)
    p = z.detach().sigmoid()
    sign = torch.randint(2, z.shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    (sign * (p * (1 - p)).sqrt() * z).sum().backward()
    for handle in handles:
        handle.remove()
    return {path: columns_of(model.get_submodule(path).weight.detach(), *seen[path]) for path in seen}


def columns_of(weight: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> Columns:
    assert output.grad is not None
    x, grads = x.flatten(0, -2), output.grad.flatten(0, -2)
    mean, sd = x.mean(dim=0), x.std(dim=0)
    m = mean.where(mean.abs() > sd / 2, 0)
    felt = (grads @ weight).square() + grads.square() @ weight.square()  # by an error of x, and of the weight
    hottest = (felt.mul(given.square()).sum(dim=0).topk(min(HOT, len(m))).indices for given in (x, x - m))
    return Columns(m, *hottest)


def mean_and_error(values: Floats) -> tuple[float, float]:
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def run(real: Path | None, seed: int, settings: Settings) -> dict[str, Any]:
    """By model, and "all" of them in the mean, a row at a time: MEASURES of each format."""
    with sources(real, seed, settings) as (world, held_out):
        first, *rest = held_out.batches(settings.probe_rows)
        fresh = {name: trained(name, world, settings, seed) for name in MODELS}
    label = torch.cat([batch.label for batch in rest]).numpy()
    entropy = 1 / normalized_entropy(1.0, float(label.mean()))
    found: dict[str, Any] = {"rows": len(label), "rate": float(label.mean()), "models": {}}
    sums = {arm: np.zeros((len(MEASURES), len(label))) for arm in ARMS}
    for name, model in fresh.items():
        columns = probe(model, first, seed)
        with torch.no_grad():
            base, clicked = checked(logits(model, rest), label)
        loss = log_losses(base, clicked)
        formats = {}
        for arm, product in ARMS.items():
            with running(model, product, columns):
                z, _ = checked(logits(model, rest), label)
            recentred = z - (z - base).mean()
            costs = [divergences(base, z), *(log_losses(each, clicked) - loss for each in (z, recentred))]
            sums[arm] += np.stack(costs) / entropy / len(MODELS)
            formats[arm] = [mean_and_error(values / entropy) for values in costs]
        ne = float(loss.mean()) / entropy
        found["models"][name] = {"ne": ne, "sites": len(columns), "formats": formats}
    means = {arm: [mean_and_error(values) for values in costs] for arm, costs in sums.items()}
    found["models"]["all"] = {"formats": means}
    return found


def tables(entries: Mapping[str, Any]) -> str:
    """Of each data set KL/H and the change of NE by model, then all measures in the mean of the models."""
    lines = []
    for data in dict.fromkeys(key.partition("/")[0] for key in entries):
        mine = [entry for key, entry in entries.items() if key.startswith(f"{data}/")]
        *names, mean = mine[0]["models"]
        rows, clicks = sum(e["rows"] for e in mine), sum(e["rows"] * e["rate"] for e in mine)
        known = {
            (name, arm, what): pooled([entry["models"][name]["formats"][arm][at] for entry in mine])
            for name in (*names, mean)
            for arm in ARMS
            for at, what in enumerate(MEASURES)
        }
        kl, ne, _ = MEASURES
        lines += [f"{data}: {len(mine)} seeds, {rows} rows, {clicks:.0f} clicks; model, NE, sites:"]
        for name in names:
            models = [entry["models"][name] for entry in mine]
            lines += [f"  {name} {np.mean([each['ne'] for each in models]):.4f} {models[0]['sites']}"]
        lines += ["x 1e-6: KL/H(SE over seeds) change of NE(SE over rows)"]
        table = [
            (arm, *(f"{cell(known[n, arm, kl], 'seeds')} {cell(known[n, arm, ne], 'rows')}" for n in names))
            for arm in ARMS
        ]
        lines += [format_table(("format", *names), table), "mean of the models(SE over rows; over seeds)"]
        table = [(arm, *(cell(known[mean, arm, what], "rows", "seeds") for what in MEASURES)) for arm in ARMS]
        lines += [format_table(("format", *MEASURES), table)]
        for what in MEASURES[1:]:
            pairs = [(known[n, arm, what], known[n, arm, kl]) for n in names for arm in ARMS]
            within = sum(abs(one["mean"] - other["mean"]) < 2 * one["rows"] for one, other in pairs)
            lines += [f"{what} within 2 SE over rows of KL/H: {within} of {len(pairs)}"]
    return "\n".join(lines)


def pooled(seeds: Sequence[Sequence[float]]) -> dict[str, float]:
    """The mean of the seeds' means, and its standard errors."""
    means = np.array([mean for mean, _ in seeds])
    over_rows = math.hypot(*(error for _, error in seeds)) / len(seeds)
    over_seeds = mean_and_error(means)[1] if len(seeds) > 1 else math.nan
    return {"mean": float(means.mean()), "rows": over_rows, "seeds": over_seeds}


def cell(of: Mapping[str, float], *errors: str) -> str:
    return f"{number(of['mean'])}({'; '.join(number(of[each]) for each in errors)})"


def number(value: float) -> str:
    return f"{1e6 * value:.0f}" if abs(value) > 1e-5 else f"{1e6 * value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--real", type=Path, help="a table in the Criteo layout, besides the synthetic world")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--show", action="store_true", help="print the tables of --out and stop")
    arguments = parser.parse_args()
    settings = Settings()
    head = {"machine": encode(fingerprint("cpu")), "settings": asdict(settings)}
    head["real"] = arguments.real and arguments.real.name
    entries: dict[str, Any] = {}
    if arguments.out.exists():
        content = read_record(arguments.out, kind=_KIND, version=_VERSION, way_out="remove it", parse=dict)
        entries = content.pop("entries")
        if content != encode(head) and not arguments.show:
            raise SystemExit(f"{arguments.out} is of other settings or another machine: choose another --out")
    sets = {"synthetic": None} | ({"real": arguments.real} if arguments.real else {})
    for seed in range(0 if arguments.show else arguments.seeds):
        for data, real in sets.items():
            if f"{data}/{seed}" not in entries and (real is None or seed < settings.folds):
                began = time.monotonic()
                entry = run(real, seed, settings)
                entries[f"{data}/{seed}"] = {**entry, "seconds": round(time.monotonic() - began, 1)}
                content = {**head, "entries": entries}
                write_record(arguments.out, kind=_KIND, version=_VERSION, content=content)
                print(f"{data}, seed {seed}: {entries[f'{data}/{seed}']['seconds']} s", flush=True)
    print(tables(entries))


if __name__ == "__main__":
    main()
