"""`loka bench`: numbers with their conditions, and the command that repeats them."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from loka.cli.commands.gemm import PLAN, REPORT, RESULTS, GemmConfig, run_gemm_bench
from loka.cli.commands.ne import named_budget
from loka.cli.commands.step import StepConfig, by_plan, run_step_bench, step_table
from loka.cli.inputs import choose_device, one_task, open_data, share_of_labels
from loka.cli.options import (
    BaseRate,
    BatchSize,
    CacheFolder,
    DataFile,
    Device,
    Floor,
    LeastSpeedup,
    ModelName,
    NoCache,
    SchemaFile,
    Seed,
    TimeLimit,
    cache_folder,
)
from loka.cli.terminal import say
from loka.core.budget import Budget
from loka.core.exceptions import MissingLibrary, UnknownName
from loka.core.records.gemm_bench import GemmBench
from loka.core.storage.alone import alone_in
from loka.core.storage.files import write_atomic
from loka.measurement import Settings
from loka.measurement.cache import default_folder
from loka.report.gemm_table import gemm_table
from loka.report.plot import plot_gemm
from loka.report.progress import ProgressBars
from loka.train.steps.step_time import ROUNDS

bench = typer.Typer(no_args_is_help=True, help="Benchmarks: GEMM shapes of recommendation models.")

_Results = Annotated[Path, typer.Argument(help=f"{RESULTS}, written by `loka bench gemm`.")]
_PICTURES = ("gemm.png", "gemm.svg")


@bench.command()
def gemm(
    model: Annotated[
        list[str] | None, typer.Option(help="Pattern of models in the suite, such as 'wukong-*'; repeatable.")
    ] = None,
    shapes: Annotated[
        Path | None, typer.Option(help="CSV with columns model, site, kind, M, K, N; LoKA's own by default.")
    ] = None,
    candidate: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Folder; an unfinished run in it is continued.")] = Path("runs/bench_gemm"),
    device: Device = None,
    weight_dtype: Annotated[str, typer.Option(help="bfloat16, or float32 master weights.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=6, help="At most so many in a race.")] = Settings().max_rounds,
    draws: Annotated[int, typer.Option(min=2, help="At most so many for an error.")] = Settings().max_draws,
    confirm_rounds: Annotated[
        int, typer.Option(min=9, help="Of the race that confirms the choice.")
    ] = GemmConfig.confirm_rounds,
    min_sqnr_db: Floor = Budget.min_sqnr_db,
    min_speedup: LeastSpeedup = 1.0,
    time_limit: TimeLimit = None,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
) -> None:
    """All three GEMMs of every shape, every candidate; the plan's choice against each library."""
    if weight_dtype not in ("bfloat16", "float32"):
        raise UnknownName(f"--weight-dtype {weight_dtype!r} is not known", way_out="bfloat16 or float32")
    defaults = Settings()
    config = GemmConfig(
        out=out,
        command=shlex.join(["loka", *sys.argv[1:]]),
        device=choose_device(device),
        shapes=shapes,
        models=tuple(model or ()),
        candidates=tuple(candidate) if candidate else None,
        weight_dtype=weight_dtype,
        settings=Settings(
            max_rounds=rounds,
            search_rounds=min(defaults.search_rounds, rounds),
            quantize_once_rounds=min(defaults.quantize_once_rounds, rounds),
            min_draws=min(defaults.min_draws, draws),
            max_draws=draws,
        ),
        confirm_rounds=confirm_rounds,
        budget=named_budget("default", min_sqnr_db=min_sqnr_db, min_speedup=min_speedup),
        cache=cache_folder(cache, no_cache=no_cache),
        time_limit=time_limit,
    )
    with alone_in(out, "benchmarking"):
        found, report = run_gemm_bench(config, track=ProgressBars("bench"))
    text = gemm_table(found)
    if not report.timed:
        text = f"{report}\n\n{text}"
    write_atomic(out / "gemm.txt", f"{text}\n".encode())
    say(text)
    written = [REPORT, PLAN, RESULTS, "gemm.txt"]
    if not report.timed:
        reason = "Times need a GPU" if report.machine.target == "cpu" else "Nothing is timed yet"
        say(f"{reason}: errors only, no plot.")
    elif found.contests:
        written += _pictures(found, out)
    if not found.complete:
        say("\n  ".join(["Incomplete; the same command again goes on.", *report.notes]))
    say(f"written: {', '.join(str(out / name) for name in written)}")


@bench.command()
def step(
    model: ModelName = "wukong:2gf",
    data: DataFile = None,
    schema: SchemaFile = None,
    batch_size: BatchSize = 6144,
    arm: Annotated[list[str] | None, typer.Option(help="Only these arms; repeatable. All by default.")] = None,
    candidate: Annotated[list[str] | None, typer.Option(help="Plan over these only; repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="Folder; statistics and report in it are used.")] = Path("runs/bench_step"),
    device: Annotated[str | None, typer.Option(help="cuda; steps are timed on a GPU only.")] = None,
    seed: Seed = 0,
    rounds: Annotated[int, typer.Option(min=9, help="Of each race against bf16.")] = ROUNDS,
    compile_blocks: Annotated[bool, typer.Option("--compile/--eager", help="torch.compile all arms.")] = True,
    min_sqnr_db: Floor = Budget.min_sqnr_db,
    min_speedup: LeastSpeedup = Budget.min_speedup,
    time_limit: Annotated[float | None, typer.Option(min=0, help="Seconds for measuring sites.")] = None,
    base_rate: BaseRate = None,
) -> None:
    """Forward and backward of a model by torchao's recipes, by one library, and by plan."""
    config = StepConfig(
        model=model,
        batch_size=batch_size,
        out=out,
        command=shlex.join(["loka", *sys.argv[1:]]),
        device=choose_device(device),
        seed=seed,
        arms=tuple(arm or ()),
        candidates=tuple(candidate) if candidate else None,
        rounds=rounds,
        compile_blocks=compile_blocks,
        budget=named_budget("default", min_sqnr_db=min_sqnr_db, min_speedup=min_speedup),
        cache=default_folder(),
        time_limit=time_limit,
        base_rate=share_of_labels(base_rate),
    )
    rows = config.batch_size * (config.probe_steps + 1)
    opened = open_data(data, rows=rows, seed=seed, holdout=0.01, schema=schema)
    one_task(opened.train, "loka bench step", instead="plan by task: loka probe, measure and plan")
    with alone_in(out, "benchmarking"):
        text = step_table(run_step_bench(config, opened))
    write_atomic(out / "step.txt", f"{text}\n".encode())
    say(text)
    written = ["step.json", "step.txt", *([PLAN] if by_plan(config.arms) else [])]
    say(f"written: {', '.join(str(out / name) for name in written)}")


@bench.command()
def plot(
    results: _Results, out: Annotated[Path, typer.Option(help="Picture; .png, .svg or .pdf.")] = Path("gemm.png")
) -> None:
    """Speed-up over bf16 by shape. Needs the results alone: no GPU, any machine."""
    plot_gemm(GemmBench.load(results), out)
    say(f"written: {out}")


@bench.command()
def show(results: _Results) -> None:
    """The table of results again."""
    say(gemm_table(GemmBench.load(results)))


def _pictures(found: GemmBench, out: Path) -> list[str]:
    try:
        for name in _PICTURES:
            plot_gemm(found, out / name)
    except MissingLibrary as error:
        say(f"{error}; then: loka bench plot {out / RESULTS}")
        return []
    return list(_PICTURES)
