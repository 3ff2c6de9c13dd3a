"""The ablation of the mods: none, each alone, all three; each in bf16, naive FP8 and FP8 by plan.

    python benchmarks/ablation/ablation.py --data rows.parquet --out runs/ablation \\
        --candidate emulated:rowwise_e4m3 --candidate emulated:tensorwise_e4m3
    python benchmarks/ablation/ablation.py --show benchmarks/ablation/dcnv2.json

Every combination is trained with every seed, from the same initial weights (less what a mod takes away)
over the same rows in the same order, and judged on the same held-out rows. Two questions are asked of the
pairs, in percent of the control's NE, with the interval of `loka validate` over seeds and rows together:

    against bf16       what FP8 does to a model: naive or by plan, against bf16 under the same mods
    against no mods    what a combination does in all: against bf16 of the model as it is written

Each model has a plan of its own. It is learnt from a bf16 run over the first rows, each seen once, with a
seed that no pair has: no run that is judged had a part in its own plan. On a GPU a training step of
each combination is raced against the unchanged model's in bf16, both compiled, in CUDA graphs.

Mods that make the same model as others, having found nothing to change, are named and not trained. `--out`
keeps finished runs and `ablation.json`; a killed ablation goes on when started again.
Step times take compiling, mostly: `--compile-only MODS PART` does a part of that and stops (ahead.py).
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ahead import rehearse_sites
from torch import nn

from loka import mods
from loka.cli.commands.demo import MODS
from loka.cli.inputs import choose_device, model_builder, open_data
from loka.core.budget import Budget, total_effect
from loka.core.device import fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.recipe import RECIPES
from loka.core.records.plan import Plan
from loka.core.records.stats import Stats
from loka.core.storage.codec import decode, encode
from loka.core.storage.files import read_record, write_record
from loka.core.table import format_table
from loka.data.batch import Batch
from loka.measurement import measure
from loka.measurement.predicted_kl import predicted_kl
from loka.measurement.settings import COARSE, Settings
from loka.nn import sites_of
from loka.planner import plan as plan_report
from loka.probe import Probe
from loka.report.progress import ProgressBars
from loka.train import TrainConfig, train
from loka.train.metrics import checked, log_losses
from loka.train.steps.step_time import Arm, StepTime, has_graphs, time_steps
from loka.validation.arms import NAIVE, ArmSpec, by_plan, by_recipe
from loka.validation.paired import NE_LIMIT_PERCENT
from loka.validation.runs import Bench, Run, held_out, run
from loka.validation.variance import MIN_PAIRS, pair_variances
from loka.validation.verdicts import ERROR, RowsVerdict

_KIND, _VERSION = "loka-bench-ablation", 1
SETTINGS = {"none": (), **{type(mod).__name__: (mod,) for mod in MODS}, "all three": MODS}
PRECISIONS = ("bf16", NAIVE, "plan")
PARTS = ("bf16", NAIVE, "sites")
PROBE_SEED = 10_000  # added to --seed: far from any pair's
SAMPLED = 25  # steps of the probed run

ARGUMENTS = ("model", "batch_size", "seed", "step", "probe_steps", "candidate", "ne")
Key = tuple[str, str]  # mods, precision
PLAIN: Key = ("none", "bf16")
UNCHANGED = ArmSpec(name="bf16", apply=lambda model: None, identity={})


def settings_of(bench: Bench) -> dict[str, dict[str, Any]]:
    """What each choice of mods changes, and which earlier one, if any, makes the same model."""
    known: dict[tuple[mods.Change, ...], str] = {}
    found = {}
    for name, chosen in SETTINGS.items():
        changed = mods.apply(bench.build(), chosen).changed
        counts = Counter(change.mod for change in changed)
        found[name] = {"changed": dict(counts), "same_as": known.get(changed), "predicted": {}}
        known.setdefault(changed, name)
    return found


class Record:
    """`ablation.json`, written anew at every change; refuses to go on with something else."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self._path = path
        self.content: dict[str, Any] = {"head": dict(head), "settings": {}, "runs": [], "judged": {}}
        if path.exists():
            self.content = load(path)
            there = self.content["head"]
            differs = [f"{k}: {there.get(k)} there, {v} now" for k, v in head.items() if there.get(k) != v]
            if differs:
                raise LokaError(f"{path} is of something else", why=differs, way_out="choose another --out")

    def write(self) -> None:
        write_record(self._path, kind=_KIND, version=_VERSION, content=self.content)


def load(path: Path) -> dict[str, Any]:
    way_out = "remove it; finished runs stay"
    return read_record(path, kind=_KIND, version=_VERSION, way_out=way_out, parse=dict)


def plan_for(bench: Bench, name: str, given: argparse.Namespace) -> tuple[Plan, Estimate | None]:
    """The plan for one choice of mods, and what naive FP8 is predicted to add to NE."""
    folder, bars = bench.out / "plans" / name, ProgressBars(name)
    stats = probed(bench, name, given.probe_steps)
    if not (folder / "plan.json").exists():
        budget = Budget(ne=given.ne)
        report = measure(
            stats,
            device=given.device,
            candidates=given.candidate,
            settings=COARSE if given.coarse else Settings(),
            out=folder / "report.json",
            cache=bench.out / "times",
            time_limit=given.measure_seconds,
            track=bars,
        )
        plan_report(report, budget).save(folder / "plan.json")
    recipe = RECIPES[by_recipe(NAIVE, rows=given.batch_size).identity["recipes"]["output"]]
    effects = [predicted_kl(layer, recipe) for layer in stats.layers.values()]
    naive = total_effect([effect for effect in effects if effect]) if all(effects) else None
    return Plan.load(folder / "plan.json"), naive


def probed(bench: Bench, name: str, most_steps: int) -> Stats:
    """What a probe learns of the model under one choice of mods, kept in the folder of its plan."""
    folder = bench.out / "plans" / name / "stats"
    if not folder.exists():
        _probe(bench, name, most_steps).save(folder)
    return Stats.load(folder)


def _probe(bench: Bench, name: str, most_steps: int) -> Stats:
    size, seed = bench.config.batch_size, bench.config.seed + PROBE_SEED
    torch.manual_seed(seed)
    model = bench.build().to(bench.config.device)
    mods.apply(model, SETTINGS[name])
    labels = torch.cat([batch.label for batch in itertools.islice(bench.train.batches(size), most_steps)])
    config = replace(bench.config, seed=seed, max_rows=len(labels), step="eager")
    every = max(len(labels) // size // SAMPLED, 1)
    with Probe(model, every=every, base_rate=labels.float().mean().item()) as probe:
        train(model, bench.train, config=config, track=ProgressBars(name))
    return probe.stats()


def arm_of(key: Key, precision: ArmSpec) -> ArmSpec:
    """The mods, and behind them what `precision` does."""
    chosen = SETTINGS[key[0]]

    def apply(model: nn.Module) -> None:
        mods.apply(model, chosen)
        precision.apply(model)

    identity = {"mods": [repr(mod) for mod in chosen], **precision.identity}
    return ArmSpec(name=name_of(key), apply=apply, identity=identity)


def name_of(key: Key) -> str:
    return ", ".join(key)


def questions(keys: Sequence[Key]) -> Iterator[tuple[str, Key, Key]]:
    """Name of the question, control and arm."""
    for key in keys:
        if key[1] != "bf16":
            yield "against bf16", (key[0], "bf16"), key
        if key != PLAIN:
            yield "against no mods", PLAIN, key


def judge(out: Path, control: Key, arm: Key, runs: Sequence[Run]) -> RowsVerdict | None:
    """Over the seeds that both have finished; None where there are none."""
    whole = {(run.arm, run.seed) for run in runs if not run.broke}
    seeds = [seed for name, seed in sorted(whole) if name == name_of(arm)]
    losses = []
    for seed in (seed for seed in seeds if (name_of(control), seed) in whole):
        before, after = (held_out(out, name_of(key), seed) for key in (control, arm))
        (a, clicked), (b, _) = (checked(each.logits, before.labels) for each in (before, after))
        losses.append((log_losses(a, clicked), log_losses(b, clicked)))
    if not losses:
        return None
    variance = pair_variances(losses, np.zeros(len(clicked), np.int64), 1)[0]
    clicks = int(clicked.sum())
    return RowsVerdict(
        name=name_of(arm), variance=variance, clicks=clicks, limit=NE_LIMIT_PERCENT, tail=ERROR
    )


def train_all(bench: Bench, arms: Mapping[Key, ArmSpec], pairs: int, record: Record) -> None:
    """Seed by seed, so that a run cut short has whole pairs of everything."""
    runs: list[Run] = []
    for seed in range(bench.config.seed, bench.config.seed + pairs):
        for arm in arms.values():
            began = time.perf_counter()
            (found,) = run(bench, arm, seed)
            runs.append(found)
            told = found.broke.splitlines()[0] if found.quality is None else f"NE {found.quality.ne:.5f}"
            took = time.perf_counter() - began
            place = f"{len(runs)} of {pairs * len(arms)}"
            print(f"{place}: {arm.name}, seed {seed}: {told}, {took:.0f} s", flush=True)
            record.content["runs"] = [encode(replace(each, curve=())) for each in runs]
            record.write()
        for question, control, key in questions(list(arms)):
            judged = judge(bench.out, control, key, runs)
            if judged:
                record.content["judged"].setdefault(name_of(key), {})[question] = encode(judged)
        record.write()


def time_all(bench: Bench, arms: Mapping[Key, ArmSpec], record: Record) -> None:
    """What is not yet in the record, against the unchanged model in bf16."""
    times = record.content.setdefault("step_times", {})
    emulated: dict[str, int] = {}

    def counted(arm: ArmSpec) -> nn.Module:
        model = built(bench, arm)
        candidates = [name for site in sites_of(model).values() for name in site.candidates]
        emulated[arm.name] = sum(name.startswith("emulated:") for name in candidates)
        return model

    def keep(found: StepTime) -> None:
        print(f"{found.name}: {found.failure or f'{found.microseconds} us, {found.speedup}x'}", flush=True)
        measured = {name: encode(getattr(found, name)) for name in ("microseconds", "speedup")}
        by_emulation = emulated.get(found.name, 0)
        times[found.name] = {**measured, "emulated_gemms": by_emulation, "failure": found.failure}
        record.write()

    ends = sorted(arms, key=lambda key: key[0] not in ("none", "all three"))  # they come first
    several = {name_of(key): Arm(name=name_of(key), build=partial(counted, arms[key])) for key in ends}
    missing = {name: arm for name, arm in several.items() if not times.get(name, {}).get("speedup")}
    if missing:
        device = torch.device(bench.config.device)
        time_steps(several[name_of(PLAIN)], missing, first_batch(bench), device=device, on_result=keep)


def built(bench: Bench, arm: ArmSpec) -> nn.Module:
    torch.manual_seed(bench.config.seed)
    model = bench.build().to(bench.config.device).train()
    arm.apply(model)
    return model


def first_batch(bench: Bench) -> Batch:
    return next(iter(bench.train.batches(bench.config.batch_size)))


def compile_only(bench: Bench, name: str, part: str, given: argparse.Namespace) -> None:
    """One part of what an ablation compiles, for the caches: see the module's text."""
    device = torch.device(given.device)
    if part in ("bf16", NAIVE):
        precision = UNCHANGED if part == "bf16" else by_recipe(NAIVE, rows=given.batch_size)
        arm = arm_of((name, part), precision)
        itself = Arm(name=arm.name, build=partial(built, bench, arm))
        time_steps(itself, {}, first_batch(bench), device=device, rounds=1)
        return
    stats = probed(bench, name, given.probe_steps)
    rehearse_sites(stats, device=device, candidates=given.candidate, limit=given.measure_seconds)


def table(content: Mapping[str, Any]) -> str:
    """All combinations, and what each choice of mods found to change."""
    rows, lines, runs = [], [], [decode(Run, entry) for entry in content["runs"]]
    for name, setting in content["settings"].items():
        found = ", ".join(f"{mod} {count}" for mod, count in setting["changed"].items())
        lines.append(f"{name}: changes {found or 'nothing'}; {setting.get('plan') or 'not planned'}")
        if setting["same_as"]:
            rows.append((name, f"the same model as {setting['same_as']}", *6 * [""]))
        else:
            rows += [_row(content, (name, precision), runs) for precision in PRECISIONS]
    header = ("mods", "arm", "FP8 sites", "predicted dNE", "NE", "against bf16, %", "against no mods, %")
    return "\n".join([format_table((*header, "ms a step, speed-up"), rows), "", *lines])


def _row(content: Mapping[str, Any], key: Key, runs: Sequence[Run]) -> tuple[str, ...]:
    mine = [run for run in runs if run.arm == name_of(key)]
    ne, broken = [run.quality.ne for run in mine if run.quality], sum(bool(run.broke) for run in mine)
    predicted = decode(Estimate | None, content["settings"][key[0]]["predicted"].get(key[1]))
    judged = content["judged"].get(name_of(key), {})
    step = content.get("step_times", {}).get(name_of(key))
    return (
        *key,
        str(sum(count > 0 for count in (mine[-1].fp8 or {}).values())) if mine else "-",
        f"{predicted.value:.1e} [{predicted.low:.1e}, {predicted.high:.1e}]" if predicted else "-",
        f"NaN in {broken} of {len(mine)}" if broken else f"{np.mean(ne):.5f}" if ne else "-",
        _told(judged.get("against bf16")),
        _told(judged.get("against no mods")),
        _timed(step) if step else "n/a",
    )


def _timed(step: Mapping[str, Any]) -> str:
    microseconds, speedup = (decode(Estimate, step[name]) for name in ("microseconds", "speedup"))
    if microseconds is None:
        return str(step["failure"])
    slow = f", {step['emulated_gemms']} GEMMs emulated" if step["emulated_gemms"] else ""
    return f"{microseconds.value / 1e3:.3f}, {speedup}x{slow}"


def outlooks(content: Mapping[str, Any]) -> str:
    """What would decide the undecided."""
    lines = []
    for name, judged in content["judged"].items():
        found = {question: decode(RowsVerdict, entry).outlook for question, entry in judged.items()}
        lines += [f"{name}, {question}: {outlook}" for question, outlook in found.items() if outlook]
    return "\n".join(lines)


def _told(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "-"
    ends, verdict = decode(RowsVerdict, entry).ne_percent, entry["verdict"]
    return f"{ends.value:+.3f} [{ends.low:+.3f}, {ends.high:+.3f}] {verdict}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default="dcnv2", help="as `loka validate` takes it, such as wukong:2gf")
    options.add_argument("--data", type=Path, help="rows in the Criteo layout; synthetic without")
    options.add_argument("--rows", type=int, default=50_000, help="of the synthetic world, a fifth held out")
    options.add_argument("--batch-size", type=int, default=256)
    options.add_argument("--pairs", type=int, default=MIN_PAIRS, help="seeds; 0: plans and step times only")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--device")
    options.add_argument("--step", default="eager", choices=("eager", "compile", "graph"), help="of training")
    options.add_argument("--probe-steps", type=int, default=250)
    options.add_argument("--candidate", action="append", help="plan over these only; repeatable")
    options.add_argument("--measure-seconds", type=float, help="limit of measuring for each plan")
    options.add_argument("--coarse", action="store_true", help="measure with few draws and rounds")
    options.add_argument("--ne", type=float, default=2e-4, help="budget of each plan")
    options.add_argument("--out", type=Path, default=Path("runs/ablation"))
    options.add_argument(
        "--compile-only", nargs=2, metavar=("MODS", "PART"), help="fill the compile caches and stop"
    )
    options.add_argument("--show", type=Path, metavar="FILE", help="print the table of an ablation.json")
    given = options.parse_args()
    if given.compile_only and not (given.compile_only[0] in SETTINGS and given.compile_only[1] in PARTS):
        options.error(f"--compile-only takes one of {', '.join(SETTINGS)}, and one of {', '.join(PARTS)}")
    if given.show:
        found = load(given.show)
        print(table(found), outlooks(found), sep="\n\n")
        return
    given.device = choose_device(given.device)
    data = open_data(given.data, rows=given.rows, seed=given.seed)
    told = {name: getattr(given, name) for name in ("batch_size", "seed", "device", "step")}
    config = TrainConfig(schedule="constant", **told)  # as the runs beside this file were
    bench = Bench(
        build=partial(model_builder(given.model), data.train),
        train=data.train,
        test=data.test,
        config=config,
        out=given.out,
        identity={"name": given.model},
        track=ProgressBars("ablation"),
    )
    if given.compile_only:
        compile_only(bench, *given.compile_only, given)
        return
    head = {name: getattr(given, name) for name in ARGUMENTS}
    head["data"] = f"{'a file' if given.data else 'synthetic'}, {data.train.rows} + {data.test.rows} held out"
    head["machine"] = encode(fingerprint(given.device))
    record = Record(given.out / "ablation.json", head)
    arms: dict[Key, ArmSpec] = {}
    for name, setting in settings_of(bench).items():
        if setting["same_as"] is None:
            plan, naive = plan_for(bench, name, given)
            setting["plan"] = plan.summary()
            setting["predicted"] = {NAIVE: encode(naive), "plan": encode(plan.kl)}
            for precision in (UNCHANGED, by_recipe(NAIVE, rows=given.batch_size), by_plan(plan)):
                arms[name, precision.name] = arm_of((name, precision.name), precision)
        record.content["settings"][name] = setting
        record.write()
        print(f"{name}: {setting.get('plan') or 'the same model as ' + setting['same_as']}", flush=True)
    if has_graphs(torch.device(given.device)):
        time_all(bench, arms, record)
    train_all(bench, arms, given.pairs, record)
    print(table(record.content), outlooks(record.content), sep="\n\n")


if __name__ == "__main__":
    main()
