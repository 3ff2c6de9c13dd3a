"""`loka validate`: paired runs with a verdict. Exit status 0: pass; 1: fail; 4: undecided."""

from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from loka.cli.commands.power import Power
from loka.cli.inputs import choose_device, open_data, size_of_world, train_config
from loka.cli.models import modded_builder, show_line, takes_mods
from loka.cli.options import (
    AverageName,
    AverageShare,
    BatchSize,
    DataFile,
    DecayShare,
    DenseRate,
    Device,
    FinalRate,
    ModelName,
    Rows,
    ScheduleName,
    SchemaFile,
    Seed,
    SparseRate,
    StepName,
    TestData,
    Warmup,
    WithMods,
    refuse_idle,
    refuse_idle_rates,
)
from loka.cli.terminal import say
from loka.cli.torchrun import require_alone
from loka.core.exceptions import LokaError
from loka.core.storage.alone import alone_in
from loka.data.batch import Source, tasks_of
from loka.report.progress import ProgressBars
from loka.report.validation_table import validation_table, verdict_line
from loka.train import TrainLog
from loka.train.length import Length
from loka.train.schedule import describe
from loka.validation.arms import arm_named
from loka.validation.paired import NE_LIMIT_PERCENT
from loka.validation.record import Validation
from loka.validation.segments import Division, cluster_named, default_divisions, division_named
from loka.validation.validate import validate as validate_arms
from loka.validation.variance import MIN_PAIRS

PASS, FAIL, UNDECIDED = 0, 1, 4  # exit statuses; 2 is an error's


def validate(
    context: typer.Context,
    arm: Annotated[
        list[str],
        typer.Option(
            help="A plan file, naive (tensor scales on every linear layer), a recipe, or nudged (the control "
            "once more, an A/A arm); repeatable."
        ),
    ],
    model: ModelName = "wukong",
    data: DataFile = None,
    schema: SchemaFile = None,
    test_data: TestData = None,
    pairs: Annotated[int, typer.Option(min=1, help="Training seeds; a verdict takes 4 or more.")] = MIN_PAIRS,
    segment: Annotated[
        list[str] | None,
        typer.Option(
            help="dense:FEATURE[:BUCKETS], sparse:FEATURE[:COUNT] or none; repeatable. By default the "
            "first dense and the first sparse feature."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="sparse:FEATURE, such as the user: rows of one id are taken to come together.")
    ] = None,
    limit: Annotated[float, typer.Option(help="Percent of NE, either way.")] = NE_LIMIT_PERCENT,
    segment_limit: Annotated[float | None, typer.Option(help="Percent of a segment's NE; --limit without it.")] = None,
    sequential: Annotated[
        bool, typer.Option("--sequential", help="Stop after any pair that decides; --pairs are the most.")
    ] = False,
    bank: Annotated[
        Path | None,
        typer.Option(help="File of earlier pairs: says what spread to expect and what can be decided; takes the new."),
    ] = None,
    prior_sd: Annotated[
        float | None, typer.Option(min=0, help="Standard deviation between pairs to expect, in %.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the runs and of validation.json.")] = Path("runs/validate"),
    rows: Rows = None,
    batch_size: BatchSize = 256,
    step: StepName = "eager",
    lr: DenseRate = 1e-3,
    sparse_lr: SparseRate = 0.1,
    warmup: Warmup = 0.1,
    schedule: ScheduleName = "cosine",
    decay: DecayShare = 0.2,
    final_rate: FinalRate = 0.0,
    average: AverageName = "tail",
    average_share: AverageShare = 0.1,
    seed: Seed = 0,
    device: Device = None,
    with_mods: WithMods = None,
) -> None:
    """Is FP8 within 0.02 % of NE? Paired runs against bf16, overall and by segment.

    Exit status 0: pass; 1: fail; 4: undecided, with what would decide it. A killed validation goes on
    when started again, and --pairs may grow: finished runs are kept.
    """
    require_alone("validate")
    if not all(0 < at_most < inf for at_most in (limit, limit if segment_limit is None else segment_limit)):
        raise LokaError("a limit has to be a finite number above 0, in percent", way_out="such as --limit 0.02")
    device = choose_device(device)
    opened = open_data(data, rows=size_of_world(rows, data), seed=seed, schema=schema, test=test_data)
    arms = [arm_named(name, rows=batch_size) for name in arm]
    # Each run builds a model anew, and they change all alike: said once.
    builder = modded_builder(model, with_mods=with_mods, show=cache(show_line))
    modded = takes_mods(model, with_mods)

    def show(found: Validation) -> None:
        say(f"pair {len(found.seeds)} of {pairs}: {'; '.join(map(verdict_line, found.arms))}")

    config = train_config(
        batch_size=batch_size,
        seed=seed,
        device=device,
        checkpoint_every=200,
        step=step,
        lr=lr,
        sparse_lr=sparse_lr,
        warmup=warmup,
        schedule=schedule,
        decay=decay,
        final_rate=final_rate,
        average=average,
        average_share=average_share,
    )
    refuse_idle_rates(context, config)
    if segment == ["none"]:
        refuse_idle(context, "with --segment none", "segment_limit")
    if sequential and pairs < MIN_PAIRS:
        raise LokaError(
            f"--sequential with {pairs} pairs: looks begin after {MIN_PAIRS}", way_out=f"--pairs {MIN_PAIRS} or more"
        )
    say(f"data: {opened.description}")
    say(describe(config, Length.of(opened.train, config).steps))
    tasks = len(tasks_of(opened.test))
    power = Power(file=bank, prior_sd=prior_sd, pairs=pairs, limit=limit, sequential=sequential, tasks=tasks)
    with alone_in(out, "validating"):
        found = validate_arms(
            partial(builder, opened.train),
            opened.train,
            opened.test,
            arms,
            config=config,
            out=out,
            model=model,
            pairs=pairs,
            divisions=_divisions(segment, opened.test),
            cluster=None if cluster is None else cluster_named(cluster, opened.test),
            limit=limit,
            segment_limit=segment_limit,
            sequential=sequential,
            bank=power.bank,
            identity={"mods": modded},
            context={
                "data": opened.description,
                "batch_size": batch_size,
                "mods": modded,
                **({"cluster": cluster} if cluster else {}),
            },
            track=ProgressBars("validate"),
            on_log=_Tenths(),
            on_pair=show,
            on_start=lambda world: say(power.before(world, [a.name for a in arms], opened.test.rows)),
        )
    say(validation_table(found))
    if (after := power.after(found)) is not None:
        say(after)
    for line in opened.account():
        say(line)
    say(f"written: {out / 'validation.json'}")
    raise typer.Exit({"pass": PASS, "fail": FAIL, "undecided": UNDECIDED}[found.verdict])


def _divisions(names: list[str] | None, source: Source) -> list[Division]:
    if names is None:
        return default_divisions(source)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LokaError(
            f"--segment {', '.join(twice)} is given twice",
            why=["each segment shares the error of all, so that a second copy would widen every interval"],
            way_out="give it once",
        )
    if "none" in names and names != ["none"]:
        raise LokaError("--segment none stands beside others", way_out="none alone, or leave it out")
    return [] if names == ["none"] else [division_named(name, source) for name in names]


class _Tenths:
    def __init__(self) -> None:
        self._shown: dict[str, int] = {}

    def __call__(self, run: str, line: TrainLog) -> None:
        tenth = 10 * line.step // line.total_steps
        if tenth > self._shown.get(run, 0):
            self._shown[run] = tenth
            speed = f"{line.rows_per_second:.0f} rows/s"
            parts = [
                f"{f'{task} ' if len(line.reading_by_task) > 1 else ''}ne {reading.lifetime.ne:.5f}"
                for task, reading in line.reading_by_task.items()
            ]
            say(f"{run}: step {line.step}/{line.total_steps}  {'  '.join(parts)}  {speed}")
