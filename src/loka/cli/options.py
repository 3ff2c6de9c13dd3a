"""Options that several commands take, each declared once, and a check that refuses options without an effect."""

from pathlib import Path
from typing import Annotated

import typer

from loka.core.exceptions import LokaError
from loka.measurement.cache import default_folder
from loka.train.config import TrainConfig

ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        help="wukong, dcnv2, dlrm, interformer, dhen, hstu, kunlun, mmoe, NAME:SIZE, mmoe:SIZE:COLUMN (gates by that "
        "sparse column), or package.module:factory.",
    ),
]
DataFile = Annotated[
    Path | None, typer.Option("--data", help="Criteo TSV, parquet, CSV, or a folder that `loka data convert` wrote.")
]
SchemaFile = Annotated[
    Path | None,
    typer.Option("--schema", help="JSON naming the columns of --data (docs/data.md); Criteo's if left out."),
]
TestData = Annotated[
    Path | None, typer.Option("--test-data", help="Rows to evaluate on; the last fifth of --data if left out.")
]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; the GPU if there is one.")]
Rows = Annotated[
    int | None, typer.Option(min=10, help="Size of the synthetic world, held-out rows included; 50000. Not of --data.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a step.")]
StepName = Annotated[
    str,
    typer.Option(
        "--step", help="eager; compile: blocks are compiled; graph: and captured in one CUDA graph, or one a block."
    ),
]
DenseRate = Annotated[float, typer.Option("--lr", min=0, help="Peak learning rate of dense weights (Adam).")]
SparseRate = Annotated[
    float, typer.Option("--sparse-lr", min=0, help="Peak learning rate of tables (row-wise AdaGrad).")
]
Warmup = Annotated[float, typer.Option(min=0, max=1, help="Share of the steps over which rates rise.")]
ScheduleName = Annotated[
    str,
    typer.Option(
        "--schedule", help="How rates go on from there: cosine or linear, down; wsd, level and then down; constant."
    ),
]
DecayShare = Annotated[
    float, typer.Option("--decay", min=0, max=1, help="With wsd: share of the steps over which rates fall.")
]
FinalRate = Annotated[
    float, typer.Option("--final-rate", min=0, max=1, help="What rates fall to, as a share of the peak.")
]
AverageName = Annotated[
    str, typer.Option("--average", help="Evaluate a mean of the weights too: tail (of the last steps), ema, or none.")
]
AverageShare = Annotated[
    float, typer.Option("--average-share", min=0, max=1, help="Share of the steps that the mean covers.")
]
BaseRate = Annotated[
    float | None,
    typer.Option(
        "--base-rate", help="Share of positive labels, whose entropy H KL/H is relative to; counted if left out."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seeds the initial weights, the synthetic rows and the samples.")]
TimeLimit = Annotated[float | None, typer.Option(min=0, help="Seconds; the same command again goes on from there.")]
CacheFolder = Annotated[Path | None, typer.Option(help="Folder of times measured before; the user's cache by default.")]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Time everything anew.")]
WithMods = Annotated[
    bool | None,
    typer.Option(
        "--mods/--no-mods",
        help="Apply NoBias, BlockNorm and HardSwish; by default to models of LoKA's zoo, not to your own.",
    ),
]
Floor = Annotated[float | None, typer.Option(help="Floor on every site's error, in dB.")]
LeastSpeedup = Annotated[float, typer.Option(min=0, help="Least speed-up over bf16 worth having.")]


def cache_folder(cache: Path | None, *, no_cache: bool) -> Path | None:
    """Where times are kept for the next measurement; None where everything is timed anew."""
    return None if no_cache else cache or default_folder()


def refuse_idle(context: typer.Context, where: str, *names: str) -> None:
    """Raises LokaError for options among `names` that were given where nothing reads them."""
    given = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            given += (option.secondary_opts if context.params[option.name] is False else option.opts)[:1]
    if given:
        raise LokaError(f"{', '.join(given)} {where} would change nothing", way_out="leave it out")


def refuse_idle_rates(context: typer.Context, config: TrainConfig) -> None:
    """As `refuse_idle`, for the options of schedules and of means of weights."""
    if config.schedule != "wsd":
        refuse_idle(context, f"with --schedule {config.schedule}", "decay")
    if config.schedule == "constant":
        refuse_idle(context, "with --schedule constant", "final_rate")
    if config.average == "none":
        refuse_idle(context, "with --average none", "average_share")
