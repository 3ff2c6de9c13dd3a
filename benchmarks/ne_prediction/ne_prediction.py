"""Predicted against actual KL/H of quantizing one site, and of quantizing several together.

    python benchmarks/ne_prediction/ne_prediction.py --out benchmarks/ne_prediction/synthetic.json
    python benchmarks/ne_prediction/ne_prediction.py --data rows.parquet --out real.json

For each model and seed: train on one pass of rows, probe the next 512 (never trained on), and on a
large set of rows behind those measure, site by site and recipe by recipe with the `output` GEMM of
that site alone emulated,

    KL / H = mean[ p (z - z') + log(1 + e^z') - log(1 + e^z) ] / H        z' quantized logits

the second-order change of NE without the noise of labels, which at these sizes drowns it: the plain
change of NE stands beside it with its standard error. Runs on a CPU, 1 to 3 minutes a model and seed
with two cores; one JSON entry for each, so an interrupted run goes on where it was. It fixes no
target: `--out` holds every point, and the tables are printed again with `--show`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import loka
from loka.core.device import fingerprint
from loka.core.error import mere, sqnr_db
from loka.core.numerics.reference import dequantize, quantize, scaled_mm
from loka.core.recipe import Casts, Recipe
from loka.core.records.stats import LinearStats
from loka.core.storage.codec import encode
from loka.core.storage.files import read_record, write_record
from loka.core.table import format_table
from loka.data import SyntheticClicks, open_table
from loka.data.batch import Batch, Source
from loka.measurement.predicted_kl import depth_kl, joint_kl
from loka.statistics.effect_casts import CASTS
from loka.train import TrainConfig, train
from loka.zoo import build

_KIND, _VERSION = "loka-bench-ne-prediction", 1
PREDICTORS = ("ggn", "depth")
MEASURES = ("output_error", "sqnr", "cosine", "mere")
SUBSET_RECIPES = ("tensorwise_e4m3", "rowwise_e4m3", "rowwise_e5m2")


@dataclass(frozen=True, kw_only=True)
class Settings:
    train_rows: int
    eval_rows: int
    probe_rows: int = 1024
    samples: int = 512
    train_batch: int = 256
    eval_batch: int = 1024
    subsets: int = 12
    holdout: float = 0.45  # of the rows of a file, which is trained on in one pass
    rate: str = "labels"  # where the probe has its base rate from: training labels, or predictions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="parquet rows in the Criteo layout; synthetic without")
    parser.add_argument(
        "--models", nargs="+", default=["dcnv2", "dlrm", "wukong"], help="of the zoo, such as dlrm:mlperf too"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--train-rows", type=int, default=100_000, help="of the synthetic world")
    parser.add_argument("--eval-rows", type=int, default=16_384, help="at most, of a file")
    parser.add_argument("--rate", choices=("labels", "predictions"), default="labels")
    parser.add_argument("--show", action="store_true", help="print the tables of --out and stop")
    arguments = parser.parse_args()
    settings = Settings(train_rows=arguments.train_rows, eval_rows=arguments.eval_rows, rate=arguments.rate)
    head = {
        "machine": encode(fingerprint("cpu")),
        "settings": asdict(settings),
        "data": "synthetic" if arguments.data is None else f"a file of {arguments.data.stat().st_size} bytes",
    }
    entries = _entries(arguments.out, None if arguments.show else head)
    if not arguments.show:
        for name, seed in itertools.product(arguments.models, range(arguments.seeds)):
            if f"{name}/{seed}" not in entries:
                began = time.monotonic()
                entry = run(name, seed, arguments.data, settings)
                entries[f"{name}/{seed}"] = {**entry, "seconds": round(time.monotonic() - began, 1)}
                content = {**head, "entries": entries}
                write_record(arguments.out, kind=_KIND, version=_VERSION, content=content)
                print(f"{name} seed {seed}: NE {entry['ne']:.4f}, {entries[f'{name}/{seed}']['seconds']} s")
    print(tables(entries))


def _entries(path: Path, head: Mapping[str, Any] | None) -> dict[str, Any]:
    """Those of an earlier run with the same settings on the same data; `head` None takes any."""
    if not path.exists():
        return {}
    content = read_record(path, kind=_KIND, version=_VERSION, way_out="remove it", parse=dict)
    found = content.pop("entries")
    if head is not None and content != json.loads(json.dumps(head)):
        raise SystemExit(f"{path} is of other settings, data or machine: choose another --out, or remove it")
    return found


def run(name: str, seed: int, data: Path | None, settings: Settings) -> dict[str, Any]:
    """Everything of one model and seed; with a seed go the world, the weights and the sampled rows."""
    learnt, fresh = _sources(data, seed, settings)
    torch.manual_seed(seed)
    kind, _, size = name.partition(":")
    columns = {"dense_features": learnt.dense_features, "vocab_sizes": learnt.vocab_sizes}
    model = build(kind, size=size or "small", **columns)
    train(
        model,
        learnt,
        config=TrainConfig(batch_size=settings.train_batch, schedule="constant", precision="fp32", seed=seed),
    )
    first = next(iter(fresh.batches(settings.probe_rows)))
    clicks = torch.cat([batch.label for batch in learnt.batches(settings.eval_batch)]).double().mean().item()
    known = clicks if settings.rate == "labels" else None
    with loka.Probe(model, every=1, effect_step=settings.samples, base_rate=known, seed=seed) as probe:
        model(first.dense, first.sparse)
    stats = probe.stats()
    batches = list(itertools.islice(fresh.batches(settings.eval_batch), 1, None))
    batches = batches[: settings.eval_rows // settings.eval_batch]
    model.eval()
    labels = torch.cat([batch.label for batch in batches]).double().numpy()
    rate = labels.mean()
    entropy = -rate * np.log(rate) - (1 - rate) * np.log1p(-rate)
    base = logits_of(model, batches, {})
    points = []
    for path in stats.layers:
        local = _tensor_measures(model, path, first)
        for recipe, casts in CASTS.items():
            change = _change(base, logits_of(model, batches, {path: casts}), labels, entropy)
            predicted = stats.layers[path].effects[recipe].kl()
            points.append(
                {
                    "site": path,
                    "recipe": recipe,
                    **change,
                    "ggn": predicted.value,
                    "ggn_low": predicted.low,
                    "ggn_high": predicted.high,
                    "depth": depth_kl(stats.layers[path], casts),
                    **local[recipe],
                }
            )
    return {
        "model": name,
        "seed": seed,
        "eval_rows": len(labels),
        "base_rate": rate,
        "ne": float(_losses(base, labels).mean() / entropy),
        "points": points,
        "subsets": list(
            _subsets(model, stats.layers, batches, base, labels, entropy, points, seed, settings)
        ),
    }


def _sources(data: Path | None, seed: int, settings: Settings) -> tuple[Source, Source]:
    if data is not None:
        return open_table(data, holdout=settings.holdout)
    rows = settings.probe_rows + settings.eval_rows
    rows += -rows % settings.eval_batch
    world = SyntheticClicks(rows=settings.train_rows, seed=seed)
    return world, SyntheticClicks(rows=rows, first_row=settings.train_rows, seed=seed)


@contextlib.contextmanager
def emulated(model: nn.Module, chosen: Mapping[str, Casts]) -> Iterator[None]:
    """Inside, the `output` GEMMs of the named layers run in emulated FP8."""
    handles = []
    for path, (of_input, of_weight) in chosen.items():
        linear = model.get_submodule(path)
        low = quantize(linear.weight.detach(), of_weight)

        def hook(module: Any, args: Any, output: Any, low: Any = low, cast: Any = of_input) -> Any:
            rows = args[0].reshape(-1, module.in_features)
            result = scaled_mm(quantize(rows, cast), low, dtype=torch.float32).view(output.shape)
            return result if module.bias is None else result + module.bias

        handles.append(linear.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def logits_of(model: nn.Module, batches: Sequence[Batch], chosen: Mapping[str, Casts]) -> np.ndarray:
    with torch.no_grad(), emulated(model, chosen):
        return torch.cat([model(batch.dense, batch.sparse) for batch in batches]).double().numpy()


def _losses(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, z) - labels * z


def _change(base: np.ndarray, low: np.ndarray, labels: np.ndarray, entropy: float) -> dict[str, float]:
    p = 1 / (1 + np.exp(-base))
    kl = p * (base - low) + np.logaddexp(0, low) - np.logaddexp(0, base)
    plain = _losses(low, labels) - _losses(base, labels)
    return {
        "kl": kl.mean() / entropy,
        "dne": plain.mean() / entropy,
        "dne_se": plain.std() / np.sqrt(len(plain)) / entropy,
    }


def _tensor_measures(model: nn.Module, path: str, batch: Batch) -> dict[str, dict[str, float]]:
    """What tools rank layers by, on the probed rows; larger is worse in all of them."""
    linear = model.get_submodule(path)
    seen: list[torch.Tensor] = []
    handle = linear.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    with torch.no_grad():
        model(batch.dense, batch.sparse)
    handle.remove()
    rows, weight = seen[0].reshape(-1, linear.in_features), linear.weight.detach()
    exact = rows @ weight.t()
    found = {}
    for recipe, (of_input, of_weight) in CASTS.items():
        low_rows, low_weight = quantize(rows, of_input), quantize(weight, of_weight)
        low = scaled_mm(low_rows, low_weight, dtype=torch.float32)
        noise = sum(
            10 ** (-sqnr_db(dequantize(quantized), tensor) / 10)
            for quantized, tensor in ((low_rows, rows), (low_weight, weight))
        )
        cosine = torch.nn.functional.cosine_similarity(
            low.double().flatten(), exact.double().flatten(), dim=0
        )
        found[recipe] = {
            "output_error": 10 ** (-sqnr_db(low, exact) / 10),
            "sqnr": noise,
            "cosine": 1 - cosine.item(),
            "mere": mere(low, exact),
        }
    return found


def _subsets(
    model: nn.Module,
    layers: Mapping[str, LinearStats],
    batches: Sequence[Batch],
    base: np.ndarray,
    labels: np.ndarray,
    entropy: float,
    points: Sequence[Mapping[str, Any]],
    seed: int,
    settings: Settings,
) -> Iterator[dict[str, Any]]:
    """Random subsets of 3 to all sites, the last one all of them, for a few recipes."""
    random = np.random.default_rng(seed)
    sites = list(dict.fromkeys(point["site"] for point in points))
    by_name = {(point["site"], point["recipe"]): point for point in points}
    for recipe in SUBSET_RECIPES:
        whole = Recipe(name=recipe, output=CASTS[recipe], grad_input=None, grad_weight=None)
        for index in range(settings.subsets):
            size = len(sites) if index + 1 == settings.subsets else int(random.integers(3, len(sites) + 1))
            picked = sorted(random.choice(len(sites), size, replace=False))
            names = [sites[at] for at in picked]
            low = logits_of(model, batches, dict.fromkeys(names, CASTS[recipe]))
            chosen = [by_name[name, recipe] for name in names]
            yield {
                "recipe": recipe,
                "sites": names,
                **_change(base, low, labels, entropy),
                "ggn": sum(point["ggn"] for point in chosen),
                "joint_ne": joint_kl(layers, dict.fromkeys(names, whole)),
                "depth": sum(point["depth"] for point in chosen),
                "single": sum(point["kl"] for point in chosen),
            }


def tables(entries: Mapping[str, Any]) -> str:
    """Per model: rank correlation within a recipe, calibration, and sums against joint effects."""
    names = list(dict.fromkeys(entry["model"] for entry in entries.values()))
    single, joint = [], []
    for name in [*names, "all"]:
        mine = [entry for entry in entries.values() if name in (entry["model"], "all")]
        ranks = {m: _within_recipe(mine, m) for m in (*PREDICTORS, *MEASURES)}
        points = [point for entry in mine for point in entry["points"]]
        row = [name, str(len(points))]
        row += [f"{np.median(ranks[p]):.3f} (least {min(ranks[p]):.2f})" for p in PREDICTORS]
        row += [_spread([point["kl"] / point[p] for point in points]) for p in PREDICTORS]
        row += [f"{np.median(ranks[m]):.2f}" for m in MEASURES]
        covered = np.mean([point["ggn_low"] <= point["kl"] <= point["ggn_high"] for point in points])
        sure = [point for point in points if abs(point["dne"]) > 2 * point["dne_se"]]
        single.append((*row, f"{covered:.0%}", f"{len(sure)}"))
        subsets = [subset for entry in mine for subset in entry["subsets"]]
        for key in ("ggn", "joint_ne", "depth", "single"):
            ratios = np.array([subset["kl"] / subset[key] for subset in subsets if key in subset])
            if not len(ratios):
                continue
            within = np.mean((ratios < 1.6) & (ratios > 1 / 1.6))
            joint.append((name, key, str(len(ratios)), _spread(ratios), f"{within:.0%}"))
    header = ("model", "points", "rank ggn", "rank depth", "actual/ggn", "actual/depth")
    header = (*header, *(f"rank {m}" for m in MEASURES), "in interval", "labels > 2 SE")
    lines = [format_table(header, single), ""]
    lines += [format_table(("model", "sum of", "subsets", "joint/sum", "within 1.6"), joint)]
    return "\n".join(lines)


def _within_recipe(entries: Sequence[Mapping[str, Any]], measure: str) -> list[float]:
    """Spearman over the sites, of a measure and KL, for each entry and recipe."""
    found = []
    for entry, recipe in itertools.product(entries, CASTS):
        chosen = [point for point in entry["points"] if point["recipe"] == recipe]
        found.append(_spearman([p[measure] for p in chosen], [p["kl"] for p in chosen]))
    return found


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def _spread(values: Sequence[float] | np.ndarray) -> str:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    main()
