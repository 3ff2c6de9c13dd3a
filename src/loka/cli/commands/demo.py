"""`loka demo`: the whole loop on one model after another.

bf16 training teaches the probe; its statistics are measured and planned; then the same model
is trained again by plan, from the same initial weights over the same batches, and both are
evaluated on held-out rows. An interrupted demo goes on where it was when started again.

It prints its progress, and at the end one screen; long tables go to details.txt beside the records.
"""

import contextlib
import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from loka.cli.commands.ne import named_budget
from loka.cli.demo_screen import DETAILS, PAGE, Shown, screen_of, write_pages
from loka.cli.inputs import Data, choose_device, one_task, open_data, size_of_world, train_config
from loka.cli.models import line_of, modded_builder
from loka.cli.options import DataFile, Device, ScheduleName, SchemaFile, Seed, TestData
from loka.cli.terminal import printable, say
from loka.cli.torchrun import require_alone
from loka.core.budget import Budget
from loka.core.exceptions import FileRefused, LokaError, differing
from loka.core.numerics.label_rate import Shares
from loka.core.records.plan import Plan
from loka.core.records.report import HP
from loka.core.records.stats import Stats
from loka.core.storage.alone import alone_in
from loka.core.storage.files import write_atomic
from loka.core.storage.untrusted import Limits, parse_json, read_bounded
from loka.measurement import measure
from loka.mods import Changes
from loka.planner import plan
from loka.probe import Probe
from loka.report.progress import ProgressBars
from loka.report.quality import quality_table
from loka.train import TrainConfig, newest_step
from loka.train.labels import count_labels, require_both, shares
from loka.validation import paired_difference
from loka.validation.arms import ArmSpec, by_plan, nudged
from loka.validation.compare import Arm, Comparison, Pair
from loka.validation.runs import Bench, HeldOut, Watch, held_out, run

_CHECKPOINT_EVERY = 200
_BF16 = ArmSpec(name="bf16", apply=lambda model: None, identity={})


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What a demo runs; equal values give equal results, and are needed to continue one."""

    models: tuple[str, ...]
    data: str | None
    rows: int
    batch_size: int
    pairs: int
    seed: int
    device: str
    min_sqnr_db: float | None
    min_speedup: float
    schedule: str
    schema: str | None
    test_data: str | None


def demo(
    data: DataFile = None,
    schema: SchemaFile = None,
    test_data: TestData = None,
    model: Annotated[list[str] | None, typer.Option("--model", help="May be given several times.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for everything written.")] = Path("runs/demo"),
    rows: Annotated[int | None, typer.Option(min=10, help="Size of the synthetic world.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows in a step.")] = None,
    pairs: Annotated[int | None, typer.Option(min=1, help="Training seeds to compare over.")] = None,
    seed: Seed = 0,
    device: Device = None,
    min_sqnr_db: Annotated[float | None, typer.Option(help="Floor on every site's error.")] = None,
    min_speedup: Annotated[float | None, typer.Option(min=0, help="Least speed-up worth having.")] = None,
    schedule: ScheduleName = "cosine",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the long tables of details.txt too.")] = False,
) -> None:
    """Run the whole loop: probe, measure, plan, convert and train; compare the plan with bf16 in paired runs."""
    require_alone("demo")
    device = choose_device(device)
    train_config(batch_size=1, schedule=schedule)  # refuses a name that does not exist, before the folder
    gpu = torch.device(device).type == "cuda"
    allowed = named_budget("default", min_sqnr_db=min_sqnr_db, min_speedup=min_speedup)
    # Sizes that suit the machine: small on a CPU, published sizes on a GPU.
    config = DemoConfig(
        models=tuple(model or (("wukong:2gf", "dcnv2:mlperf") if gpu else ("wukong", "dcnv2"))),
        data=str(data) if data else None,
        rows=size_of_world(rows, data, default=800_000 if gpu else 50_000),
        batch_size=(8192 if gpu else 256) if batch_size is None else batch_size,
        pairs=(1 if gpu else 2) if pairs is None else pairs,
        seed=seed,
        device=device,
        min_sqnr_db=allowed.min_sqnr_db,
        min_speedup=allowed.min_speedup,
        schedule=schedule,
        schema=str(schema) if schema else None,
        test_data=str(test_data) if test_data else None,
    )
    with alone_in(out, "running a demo"):
        _run_demo(config, out, Details(verbose=verbose))


class Details:
    """Long tables: kept for a file, and printed where that is asked for."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._lines: list[str] = []

    def __call__(self, text: str) -> None:
        self._lines.append(text)
        if self._verbose:
            say(text)

    def save(self, path: Path) -> None:
        write_atomic(path, ("\n\n".join(map(printable, self._lines)) + "\n").encode())


def _run_demo(config: DemoConfig, out: Path, details: Details) -> None:
    """Runs the loop for every model and writes stats/, report.json, plan.json, train.json and a page.

    Raises LokaError where `out` holds another demo.
    """
    _claim(out, config)
    data = open_data(
        Path(config.data) if config.data else None,
        rows=config.rows,
        seed=config.seed,
        schema=Path(config.schema) if config.schema else None,
        test=Path(config.test_data) if config.test_data else None,
    )
    one_task(data.train, "loka demo", instead="compare by task: loka probe, plan and validate")
    for part, source in (("rows to train on", data.train), ("held-out rows", data.test)):
        require_both(source, batch_size=config.batch_size, what=f"the {part}")
    features = f"{data.train.dense_features} dense and {len(data.train.vocab_sizes)} sparse features"
    say(f"data: {data.description}, {features}")
    shown = []
    for name in config.models:
        say(f"\n== {name}")
        folder = out / name.replace(":", "-")
        decided, comparison = _run_model(name, config, data, folder, details)
        shown.append(Shown(name=name, folder=folder, plan=decided, comparison=comparison))
    for line in data.account():
        say(line)
    details.save(out / DETAILS)
    given = {"--data": config.data, "--schema": config.schema, "--test-data": config.test_data}
    given |= {"--batch-size": str(config.batch_size), "--schedule": config.schedule}
    screen = screen_of(shown, out, data=given)
    write_pages(shown, out, screen)
    say(f"\n{screen}")


def _claim(out: Path, config: DemoConfig) -> None:
    file = out / "demo.json"
    wanted = json.loads(json.dumps(asdict(config)))
    if file.exists():
        try:
            found = dict(parse_json(read_bounded(file, Limits()), Limits()))
        except (ValueError, TypeError, OSError, RecursionError) as error:
            raise LokaError(f"{file} is damaged ({error})", way_out="choose another --out") from error
        if different := differing(found, wanted):
            raise LokaError(
                f"{out} holds another demo", why=different, way_out="choose another --out, or remove that folder"
            )
    write_atomic(file, json.dumps(wanted, indent=1).encode())


def _run_model(name: str, config: DemoConfig, data: Data, out: Path, details: Details) -> tuple[Plan, Comparison]:
    details(f"== {name}")

    @functools.cache  # each run builds a model anew, and they change all alike
    def show(changes: Changes) -> None:
        say(line_of(changes))
        details(str(changes))

    builder = modded_builder(name, show=show)
    bars = ProgressBars(name)
    base_rate = shares(count_labels(data.train, batch_size=config.batch_size))
    bench = Bench(
        build=functools.partial(builder, data.train),
        train=data.train,
        test=data.test,
        config=train_config(
            batch_size=config.batch_size,
            schedule=config.schedule,
            device=config.device,
            checkpoint_every=_CHECKPOINT_EVERY,
            keep_checkpoints=1,
        ),
        out=out,
        identity={"name": name},
        track=bars,
    )
    every = max(1, data.train.rows // config.batch_size // 20)
    probed = functools.partial(_probed, out / "stats", every, base_rate)
    pairs: list[Pair] = []
    control = noise = None
    decided: Plan | None = None
    for seed in range(config.seed, config.seed + config.pairs):
        bf16, expected = _arm(bench, _BF16, seed, probed if decided is None else None)
        if decided is None:
            decided = _decide(Stats.load(out / "stats"), config, out, details, bars)
            control, found = _arm(bench, replace(nudged(), name="bf16 nudged"), seed)
            noise = paired_difference(expected.logits, found.logits, expected.labels)
        fp8, found = _arm(bench, by_plan(decided), seed)
        if not pairs:
            details(_proof(decided, fp8))
        difference = paired_difference(expected.logits, found.logits, expected.labels)
        pairs.append(Pair(seed=seed, bf16=bf16, fp8=fp8, difference=difference))
    assert decided is not None
    comparison = Comparison(
        model=name,
        pairs=tuple(pairs),
        control=control,
        noise=noise,
        context={**asdict(config), "rows_used": data.description, "plan": decided.summary()},
    )
    comparison.save(out / "train.json")
    details(quality_table(comparison))
    if torch.device(config.device).type == "cpu":
        details("rows/s: on a CPU FP8 is emulated, so only its quality means anything here.")
    say(f"written to {out}: stats/, report.json, plan.json, train.json, {PAGE}")
    return decided, comparison


def _arm(bench: Bench, spec: ArmSpec, seed: int, watch: Watch | None = None) -> tuple[Arm, HeldOut]:
    (done,) = run(bench, spec, seed, watch=watch)
    if done.quality is None:
        raise LokaError(
            f"{spec.name} ends in NaN with seed {seed}",
            why=done.broke.splitlines()[:1],
            way_out="look at the rows; `loka train` has --lr and --grad-clip",
        )
    arm = Arm(
        name=f"{spec.name} (probed)" if watch else spec.name,
        quality=done.quality,
        train_ne=done.train_ne,
        rows_per_second=done.rows_per_second,
        runs=done.fp8,
    )
    return arm, held_out(bench.out, spec.name, seed)


@contextlib.contextmanager
def _probed(
    folder: Path, every: int, base_rate: Shares | None, model: nn.Module, config: TrainConfig, checkpoints: Path
) -> Iterator[Callable[[int], None]]:
    """Statistics are saved with every checkpoint, so that both resume together."""
    _drop_unwatched(checkpoints, folder)
    with Probe(model, every=every, save_to=folder, resume=_saved_stats(folder), base_rate=base_rate) as probe:

        def keep(step: int) -> None:
            if step % _CHECKPOINT_EVERY == 0:
                probe.stats().save(folder)

        yield keep


def _saved_stats(folder: Path) -> Stats | None:
    try:
        return Stats.load(folder)
    except FileRefused:
        return None


def _drop_unwatched(checkpoints: Path, folder: Path) -> None:
    """Starts the probed arm over when its statistics do not reach its newest checkpoint.

    A kill between the two saves leaves steps that trained without being watched.
    """
    newest = newest_step(checkpoints)
    stats = _saved_stats(folder)
    watched = stats.steps if stats else 0
    if newest == watched:
        return
    say(f"statistics cover {watched} steps and the checkpoint {newest}: the probed run starts over")
    for leftover in (checkpoints, folder):
        if leftover.exists():
            shutil.rmtree(leftover)


def _decide(stats: Stats, config: DemoConfig, out: Path, details: Details, bars: ProgressBars) -> Plan:
    say(f"probe: {stats.sampled_steps} of {stats.steps} steps sampled, {len(stats.layers)} linear layers")
    report = measure(stats, device=config.device, out=out / "report.json", track=bars)
    budget = Budget(min_sqnr_db=config.min_sqnr_db, min_speedup=config.min_speedup)
    decided = plan(report, budget)
    decided.save(out / "plan.json")
    say(f"plan: {decided.summary()}")
    details(str(decided))
    return decided


def _proof(decided: Plan, arm: Arm) -> str:
    by_candidate: Counter[str] = Counter()
    idle = []
    for decision in decided.decisions.values():
        if decision.candidate == HP:
            continue
        by_candidate[decision.candidate] += arm.runs.get(decision.site, 0)
        if not arm.runs.get(decision.site):
            idle.append(decision.site)
    counted = ", ".join(f"{count} x {name}" for name, count in sorted(by_candidate.items())) or "none"
    lines = [f"FP8 GEMMs that ran (training and evaluation): {counted}"]
    if idle:
        lines.append(f"planned for FP8 but never ran: {', '.join(idle)}")
    return "\n".join(lines)
