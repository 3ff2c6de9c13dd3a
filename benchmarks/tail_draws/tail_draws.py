"""Do operands drawn from learnt statistics give the GEMM error of the real ones?

    python benchmarks/tail_draws/tail_draws.py --out benchmarks/tail_draws/results.json

One model at a time (--models) fits too: what the file holds of others stays.

Trains the zoo's small models on synthetic clicks, learns statistics from the 24 batches after those, and
compares `sqnr_db` of every GEMM over later batches with that of as many draws: Gaussian, and with
tails. A batch's error in grad_weight varies by 3 dB from one to the next (what adds up in a batch
hangs on the mean of p - y over it), so each mean has a standard error and is given with it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from trained import Operands, operands_of, some, trained

from loka.core.device import fingerprint
from loka.core.error import sqnr_db
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.core.records.stats import Distribution
from loka.core.storage.codec import encode
from loka.core.storage.files import read_record, write_record
from loka.core.table import format_table
from loka.measurement.operands import sides
from loka.statistics import gaussian, tails
from loka.statistics.draw import Sampler, samplers
from loka.statistics.sample_coherence import Samples, merge_samples, samples_of, with_samples

CASTS = {
    "e4m3 tensor": Cast(Format.E4M3, Granularity.TENSOR),
    "e4m3 row": Cast(Format.E4M3, Granularity.ROW),
    "e4m3 1x128": Cast(Format.E4M3, Granularity.GROUP_1X128),
    "e5m2 tensor": Cast(Format.E5M2, Granularity.TENSOR),
}
MODELS = ("dlrm", "dcnv2", "wukong")
LEARNT, FEW = 24, 12  # batches learnt from; those that suffice for GEMMs whose error varies little
WITHIN_DB = 1.0
KIND = "loka-bench-tail-draws"

Errors = dict[tuple[str, str], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--batches", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sites: list[dict[str, object]] = []
    for name in arguments.models:
        started = time.perf_counter()
        sites += _model(name, arguments)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    print(format_table(("model", "site", "cast", "real dB", "gaussian", "with tails"), _misses(sites)))
    summary = _summary(sites)
    print(format_table(("gemm", "sites x casts", "gaussian within 1 dB", "with tails"), summary))
    if arguments.out:
        sites = _others(arguments.out, arguments.models) + sites
        machine = encode(fingerprint("cpu"))
        content = {"machine": machine, "arguments": {**vars(arguments), "out": ""}, "sites": sites}
        write_record(arguments.out, kind=KIND, version=1, content=content)


def _others(path: Path, models: Sequence[str]) -> list[dict[str, object]]:
    """The sites of models that an earlier run into the same file had and this one has not."""
    if not path.exists():
        return []
    content = read_record(path, kind=KIND, version=1, way_out="choose another --out", parse=dict)
    return [site for site in content["sites"] if site["model"] not in models]


def _model(name: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    model, later = trained(name, rows=arguments.rows, batch_size=256, seed=arguments.seed)
    size = arguments.batch_size
    learnt = _learn(operands_of(model, some(later, size, start=0, count=LEARNT)), size)
    real: dict[str, Errors] = {}
    shapes: dict[str, int] = {}
    weights: dict[str, torch.Tensor] = {}
    fresh = operands_of(model, some(later, size, start=LEARNT, count=arguments.batches))
    for index, operands in enumerate(fresh):
        for path, layer in operands.items():
            _note(real.setdefault(path, {}), layer, index)
            shapes[path], weights[path] = layer["input"].shape[0], layer["weight"]
    sites = []
    for path, found in real.items():
        drawn = {}
        for mode in ("gaussian", "tails"):
            made = samplers(learnt[path], torch.device("cpu"), keep_tails=mode == "tails")
            drawn[mode] = _drawn(made, shapes[path], weights[path], arguments.batches)
        for (gemm, cast), errors in found.items():
            means = {"real": _mean(errors), **{m: _mean(drawn[m][gemm, cast]) for m in drawn}}
            sites.append({"model": name, "layer": path, "gemm": gemm, "cast": cast, **means})
    return sites


def _learn(batches: Iterator[Operands], size: int) -> dict[str, dict[str, Distribution]]:
    """What a probe keeps of each layer's input and grad_output in batches of `size`, with its sketches."""
    moments: dict[tuple[str, str], gaussian.Gaussian] = {}
    sketches: dict[tuple[str, str], tails.Tails] = {}
    crosses: dict[str, tails.Cross] = {}
    samples: dict[str, Samples] = {}
    for operands in batches:
        for path, layer in operands.items():
            for name in ("input", "grad_output"):
                key, hp = (path, name), layer[name]
                batch, sketch = gaussian.gaussian_of(hp, full_covariance=512, rank=64), tails.tails_of(hp)
                moments[key] = gaussian.merge(moments[key], batch, rank=64) if key in moments else batch
                sketches[key] = tails.merge_tails(sketches[key], sketch) if key in sketches else sketch
            cross = tails.cross_of(layer["input"], layer["grad_output"])
            crosses[path] = tails.merge_cross(crosses[path], cross) if path in crosses else cross
            if layer["input"].shape[0] > size:
                found = samples_of(*(layer[n].unflatten(0, (size, -1)) for n in ("input", "grad_output")))
                samples[path] = merge_samples(samples[path], found) if path in samples else found
    learnt: dict[str, dict[str, Distribution]] = {}
    for (path, name), kept in moments.items():
        cross = crosses[path] if name == "grad_output" else None
        plain = gaussian.to_distribution(kept)
        kept_too = samples.get(path) if name == "grad_output" else None
        learnt.setdefault(path, {})[name] = with_samples(
            tails.with_tails(plain, sketches[path, name], cross), kept_too
        )
    return learnt


def _drawn(made: dict[str, Sampler], rows: int, weight: torch.Tensor, batches: int) -> Errors:
    errors: Errors = {}
    generator = torch.Generator().manual_seed(0)
    for index in range(batches):
        layer = {name: made[name](rows, generator).bfloat16() for name in ("input", "grad_output")}
        _note(errors, {**layer, "weight": weight}, index)
    return errors


def _note(errors: Errors, layer: dict[str, torch.Tensor], index: int) -> None:
    for gemm in Gemm:
        if gemm is not Gemm.GRAD_WEIGHT and index >= FEW:
            continue
        a, b = (side.float() for side in sides(gemm, layer))
        reference = a @ b.t()
        for name, cast in CASTS.items():
            out = dequantize(quantize(a, cast)) @ dequantize(quantize(b, cast)).t()
            errors.setdefault((gemm.value, name), []).append(sqnr_db(out, reference))


def _mean(errors: Iterable[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    values = [error for error in errors if math.isfinite(error)]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return mean, math.sqrt(variance / len(values))


def _within(site: dict[str, object], mode: str) -> bool:
    return abs(site[mode][0] - site["real"][0]) <= WITHIN_DB


def _misses(sites: list[dict[str, object]]) -> list[tuple[str, ...]]:
    """The sites that one of the two modes misses; a miss is starred."""
    rows = []
    for site in sites:
        if not (_within(site, "gaussian") and _within(site, "tails")):
            cells = [f"{site['real'][0]:.1f} +- {site['real'][1]:.1f}"]
            for mode in ("gaussian", "tails"):
                cells.append(f"{site[mode][0]:.1f}{'' if _within(site, mode) else ' *'}")
            rows.append((site["model"], f"{site['layer']} / {site['gemm']}", site["cast"], *cells))
    return rows


def _summary(sites: list[dict[str, object]]) -> list[tuple[str, ...]]:
    rows = []
    for gemm in (*Gemm, None):
        of = [site for site in sites if gemm is None or site["gemm"] == gemm.value]
        shares = [sum(_within(s, mode) for s in of) / len(of) for mode in ("gaussian", "tails")]
        rows.append((gemm.value if gemm else "all", str(len(of)), *(f"{share:.1%}" for share in shares)))
    return rows


if __name__ == "__main__":
    main()
