"""What GEMMs took by shape, from raw results: the file that `loka scale` reads, and how far to trust it.

    git archive 9497e54 benchmarks | tar x -C /tmp/raw        # raw results, as benchmarks/README.md says
    python benchmarks/shape_times/shape_times.py --raw /tmp/raw/benchmarks

Writes src/loka/scaling/times/h200.json.gz and prints what leaving out each layer, and then each model, says
of the predictions. Needs no GPU; a minute or two on one core.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from fit import fit
from left_out import tell

from loka.core.error import Estimate
from loka.core.recipe import Gemm
from loka.core.records.gemm_bench import CHOICE, GemmBench, or_hp
from loka.core.records.report import HP, Report, site_name
from loka.core.storage.codec import encode
from loka.core.storage.files import write_record
from loka.planner.baselines import library_of
from loka.planner.layer_choice import Option, choose, option_of
from loka.scaling.stored import KIND, VERSION, RegionGain, Source, StoredGemm, StoredLayer, StoredTimes

MIN_SQNR_DB = 25.0  # what a plan asks of a site by default
THIN = 128
KERNELS = {"all": None, "torch": "torch"}
# launch us, TFLOP/s, GB/s of an H200 in bf16; in eight bits three launches, and passes that quantize
BF16 = (4.0, 800.0, 3500.0)
EIGHT = (12.0, 1400.0, 2500.0)

STEP = "wukong_step/report.json.gz"
REPORTS = {
    "gemm_suite/report.json.gz": (
        "bfloat16",
        "loka bench gemm --draws 3 --rounds 9 --confirm-rounds 13 --time-limit 500 --out runs/suite",
        "2026-11-21",
    ),
    STEP: (
        "float32",
        "loka bench step, see benchmarks/wukong_step/README.md",
        "2026-11-21",
    ),
}
RACES = ("gemm_suite/gemm.json", *REPORTS["gemm_suite/report.json.gz"][1:])
ARMS = {"all": CHOICE, "torch": or_hp("torch")}
_HERE = Path(__file__).parent
_REGIONS = _HERE.parent / "regions" / "README.md"
_ROW = r"^\| (\w[^ ,|]+)(?:,[^|]*)? \|.*?\| \**([\d.]+)x\** \[([\d.]+), ([\d.]+)\] \|"
REGIONS = ("regions/README.md", "python benchmarks/regions/regions.py --gate", "2026-11-22")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", type=Path, required=True, help="folder with the raw results of benchmarks/")
    parser.add_argument("--out", type=Path, default=Path("src/loka/scaling/times/h200.json.gz"))
    given = parser.parse_args()
    layers: list[StoredLayer] = []
    for name, (weight_dtype, _, _) in REPORTS.items():
        report = Report.load(given.raw / name)
        found = layers_of(report, weight_dtype)
        layers += found if name != STEP else [without_thin_gains(layer) for layer in found]
    races = GemmBench.load(given.raw / RACES[0])
    layers = [with_race(layer, races) for layer in layers]
    made = [(name, command, date) for name, (_, command, date) in REPORTS.items()]
    empty = StoredTimes(
        machine=Report.load(given.raw / next(iter(REPORTS))).machine,
        sources=(
            *(source(given.raw, *one) for one in (*made, RACES)),
            source(_HERE.parent, *REGIONS),
        ),
        layers=tuple(layers),
        bf16=None,  # type: ignore[arg-type]
        gains={},
        regions=region_gains(),
    )
    points = empty.bf16_points()
    bf16 = fit(list(points), [found.value for found in points.values()], BF16)
    gains = {}
    for kernels in KERNELS:
        points = empty.gain_points(kernels)
        gains[kernels] = fit(list(points), [found.value for found in points.values()], (*BF16, *EIGHT))
    times = StoredTimes(**{**vars(empty), "bf16": bf16, "gains": gains})
    write(times, given.out)
    tell(times, races)


def layers_of(report: Report, weight_dtype: str) -> list[StoredLayer]:
    """Each distinct shape once, from the first layer that has it."""
    found: dict[tuple[int, int, int], StoredLayer] = {}
    for path, shape in report.model.layers.items():
        sites = {gemm: report.sites.get(site_name(path, gemm)) for gemm in Gemm}
        timed = {gemm: site for gemm, site in sites.items() if site and site.measurements[HP].microseconds}
        if Gemm.OUTPUT not in timed:
            continue
        key = (timed[Gemm.OUTPUT].problem.m, shape.in_features, shape.out_features)
        if key in found:
            continue
        options = {gemm: admitted(site) for gemm, site in timed.items()}
        gemms = {
            gemm.value: StoredGemm(
                bf16=rounded(site.measurements[HP].microseconds),
                gains={name: gain for name, only in KERNELS.items() if (gain := best(site, only))},
            )
            for gemm, site in timed.items()
        }
        together = {
            name: gain
            for name, only in KERNELS.items()
            if (gain := together_of(timed, options, report.quantize_once_savings.get(path, {}), only))
        }
        found[key] = StoredLayer(
            rows=key[0],
            in_features=key[1],
            out_features=key[2],
            weight_dtype=weight_dtype,
            gemms=gemms,
            together=together,
        )
    return list(found.values())


def without_thin_gains(layer: StoredLayer) -> StoredLayer:
    """The step timed seven kernels. Those that win at thin matrices, blockwise ones, were not among them, so
    what it has there is not what eight bits can do."""
    if max(layer.in_features, layer.out_features) >= THIN:
        return layer
    bare = {name: replace(gemm, gains={}) for name, gemm in layer.gemms.items()}
    return replace(layer, gemms=bare, together={})


def with_race(layer: StoredLayer, races: GemmBench) -> StoredLayer:
    """With what the layer took as a whole, raced again after planning, where it was."""
    for path, raced in races.layers.items():
        same = (raced.rows, raced.in_features, raced.out_features)
        if layer.weight_dtype == "bfloat16" and same == (layer.rows, layer.in_features, layer.out_features):
            contest = races.contests[path]
            found = {
                kernels: Estimate(1.0, 1.0, 1.0)
                if contest.arms[arm] == HP
                else rounded(contest.timing(arm).speedup)
                for kernels, arm in ARMS.items()
                if contest.arms[arm] == HP or contest.timing(arm)
            }
            return replace(layer, by_sites=found)
    return layer


def admitted(site) -> dict[str, Option]:
    """What runs and keeps the default limit on the error, bf16 among it."""
    return {
        name: option
        for name, measured in site.measurements.items()
        if not measured.unsupported
        and (name == HP or measured.errors["sqnr_db"].low >= MIN_SQNR_DB)
        and (option := option_of(site, name)) is not None
    }


def best(site, only: str | None) -> Estimate | None:
    speedups = [
        measured.speedup
        for name, measured in site.measurements.items()
        if name != HP and name in admitted(site) and (only is None or library_of(name) == only)
    ]
    return rounded(max(speedups, key=lambda found: found.value)) if speedups else None


def together_of(timed, options, sharing, only: str | None) -> Estimate | None:
    """All three in eight bits, by the planner's own rule; None where one cannot be."""
    eight = {
        gemm: {n: o for n, o in each.items() if n == HP or only is None or library_of(n) == only}
        for gemm, each in options.items()
    }
    eight = {gemm: {n: o for n, o in each.items() if n != HP} for gemm, each in eight.items()}
    if len(eight) < len(Gemm) or not all(eight.values()):
        return None
    choice = choose(eight, sharing, min_speedup=0.0, fixed=list(Gemm))
    hp = sum(site.measurements[HP].microseconds.value for site in timed.values())
    low = sum(o.time.low for o in choice.options.values()) - sum(s.high for s in choice.saved.values())
    high = sum(o.time.high for o in choice.options.values()) - sum(s.low for s in choice.saved.values())
    return rounded(Estimate(hp / choice.microseconds, hp / high, hp / low))


def rounded(found: Estimate) -> Estimate:
    """To five digits: the clock knows fewer."""
    return Estimate(*(float(f"{value:.5g}") for value in (found.value, found.low, found.high)))


def region_gains() -> tuple[RegionGain, ...]:
    """What the table in benchmarks/regions has, where the newest race stands."""
    rows = re.findall(_ROW, _REGIONS.read_text(), re.M)
    return tuple(RegionGain(name=name, speedup=Estimate(*map(float, found))) for name, *found in rows)


def source(raw: Path, name: str, command: str, date: str) -> Source:
    """Raises SystemExit for a raw result that is not the one in the list."""
    found = hashlib.sha256((raw / name).read_bytes()).hexdigest()
    listed = dict(reversed(line.split()) for line in (_HERE.parent / "RAW.sha256").read_text().splitlines())
    if listed.get(name, found) != found:
        raise SystemExit(f"{raw / name} is not the file that benchmarks/RAW.sha256 lists")
    return Source(path=f"benchmarks/{name}", sha256=found, command=command, date=date)


def write(times: StoredTimes, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.json"
        write_record(plain, kind=KIND, version=VERSION, content=encode(times))
        content = json.dumps(json.loads(plain.read_text()), separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0))
    print(f"written: {path}, {path.stat().st_size / 1e3:.0f} kB, {len(times.layers)} layers")


if __name__ == "__main__":
    main()
