"""The command line. Each command parses, calls the library, and prints what comes back."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from loka.cli.commands.bench import bench
from loka.cli.commands.data import data_app
from loka.cli.commands.demo import demo
from loka.cli.commands.doctor import diagnose
from loka.cli.commands.ne import limited_by_name, named_budget, show_drift, show_frontier
from loka.cli.commands.probe import probe
from loka.cli.commands.report import report as write_report
from loka.cli.commands.scale import calibrate_links, deal_lengths, scale
from loka.cli.commands.serve import serve_app
from loka.cli.commands.train import train
from loka.cli.commands.validate import validate
from loka.cli.inputs import choose_device
from loka.cli.options import CacheFolder, Device, NoCache, TimeLimit, cache_folder
from loka.cli.terminal import say
from loka.cli.torchrun import under_torchrun
from loka.core.exceptions import LokaError
from loka.core.records.plan import Plan
from loka.core.records.report import Report
from loka.core.records.stats import Stats
from loka.measurement import measure as measure_stats
from loka.planner import diff as diff_plans
from loka.planner import plan as plan_report
from loka.probe import merge_stats
from loka.report.progress import ProgressBars
from loka.train.interrupt import is_terminated, terminable

_INTERRUPTED = (
    "interrupted; demo, measure, validate, bench and data convert go on where they stopped when they are started again"
)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM end the command, with a message that says what is kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        say(f"interrupted: {error}" if error.args else _INTERRUPTED, error=True)
        raise SystemExit(143 if is_terminated(error) else 130) from None


def _at_home(argument: str) -> str:
    """Also `--out=~/plan.json`, which bash leaves as it is: a folder called "~" would hold the plan."""
    option, equals, value = argument.rpartition("=~/")
    if equals and option.startswith("--") and "=" not in option:
        return f"{option}={os.path.expanduser(f'~/{value}')}"
    return os.path.expanduser(argument) if argument.startswith("~/") else argument


class _Commands(typer.core.TyperGroup):
    """The commands. An interrupted one says what is kept, where click would only say "Aborted!". A command of two
    words, such as `scale calibrate`, is found before the command of its first word."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if " ".join(args[:2]) in self.commands:
            args = [" ".join(args[:2]), *args[2:]]
        return super().resolve_command(ctx, args)

    def make_context(self, info_name: Any, args: list[str], *given: Any, **named: Any) -> Any:
        with _interruptible():
            return super().make_context(info_name, [_at_home(text) for text in args], *given, **named)

    def invoke(self, ctx: Any) -> Any:
        with _interruptible():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="FP8 where it is safe and fast, for recommendation models.",
)
app.add_typer(bench, name="bench")
app.add_typer(data_app, name="data")
app.add_typer(serve_app, name="serve")


@app.command()
def doctor(
    target: Annotated[str | None, typer.Option(help="Another target to ask for, such as sm_90.")] = None,
) -> None:
    """List what can run here, and why the rest cannot."""
    say(diagnose(target))


app.command()(demo)


@app.command()
def merge(
    stats: Annotated[list[Path], typer.Argument(help="Folders of statistics, of ranks or of runs.")],
    out: Annotated[Path, typer.Option(help="Folder for the merged statistics.")] = Path("stats"),
) -> None:
    """Merge statistics of several ranks or runs, which saw different rows, into one set."""
    merged = merge_stats([Stats.load(folder) for folder in stats])
    merged.save(out)
    say(f"{merged.sampled_steps} of {merged.steps} steps sampled in {len(stats)} folders; written: {out}")
    for reason, which in merged.without_effect().items():
        say(f"effect on KL/H of {which}: {reason}")


@app.command()
def measure(
    stats: Annotated[Path, typer.Argument(help="Folder written by `loka probe`.")],
    out: Annotated[Path, typer.Option(help="Report file; an unfinished one is continued.")] = Path("report.json"),
    device: Device = None,
    candidate: Annotated[list[str] | None, typer.Option(help="Measure only these; may be repeated.")] = None,
    errors_only: Annotated[
        bool, typer.Option("--errors-only", help="Take no times, on a GPU either: first see where FP8 is safe.")
    ] = False,
    inference: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="For `loka serve`: measure forward alone, with FP8 weights kept, at this multiple of the probed rows.",
        ),
    ] = None,
    time_limit: TimeLimit = None,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
) -> None:
    """Measure the error, and on a GPU the time, of every candidate at every site."""
    found = Stats.load(stats)
    report = measure_stats(
        found if inference is None else found.for_inference(batch=inference),
        device=choose_device(device),
        candidates=candidate,
        errors_only=errors_only,
        out=out,
        cache=cache_folder(cache, no_cache=no_cache),
        time_limit=time_limit,
        track=ProgressBars("measure"),
    )
    say(report)
    say(f"written: {out}")


@app.command()
def plan(
    report: Annotated[Path, typer.Argument(help="File written by `loka measure`.")],
    out: Annotated[
        Path | None, typer.Option(help="Plan file; plan.json by default. Of a frontier: .svg, .png, .pdf or .json.")
    ] = None,
    budget: Annotated[
        str, typer.Option(help="default, or paper: MERE below 0.2 and a speed-up above 1.05, nothing else.")
    ] = "default",
    ne: Annotated[float | None, typer.Option(min=0, help="KL/H allowed in all, absolute, such as 2e-4.")] = None,
    ne_of: Annotated[
        list[str] | None,
        typer.Option(help="NAME=KL/H of a task or a segment that was probed, such as click=1e-4; repeatable."),
    ] = None,
    min_sqnr_db: Annotated[float | None, typer.Option(help="Floor on every site's error; 25 dB.")] = None,
    max_mere: Annotated[float | None, typer.Option(help="The paper's limit, 0.2 there.")] = None,
    min_speedup: Annotated[
        float | None, typer.Option(min=0, help="Least speed-up over bf16 worth having; 1.05.")
    ] = None,
    keep: Annotated[list[str] | None, typer.Option(help="Pattern of sites to keep in hp; repeatable.")] = None,
    force: Annotated[
        list[str] | None, typer.Option(help="SITE=CANDIDATE, for debugging; SITE may be a pattern.")
    ] = None,
    target: Annotated[
        Literal["python", "package"],
        typer.Option(help="package: `output` GEMMs, among what runs without loka (`loka serve package`)."),
    ] = "python",
    frontier: Annotated[
        bool, typer.Option("--frontier", help="KL/H against time over budgets, instead of one plan.")
    ] = False,
) -> None:
    """Decide for every site what it runs, within a budget, and say why. Needs no GPU."""
    allowed = named_budget(
        budget,
        ne=ne,
        min_sqnr_db=min_sqnr_db,
        max_mere=max_mere,
        min_speedup=min_speedup,
        keep=tuple(keep) if keep else None,
    )
    loaded = Report.load(report)
    if ne_of:
        allowed = limited_by_name(allowed, ne_of, loaded)
    if frontier:
        if allowed.ne is not None or force or target != "python":
            raise LokaError(
                "a frontier plans at many budgets of KL/H, for Python",
                way_out="leave --ne, --ne-of of tasks, --force and --target out",
            )
        show_frontier(loaded, allowed, out)
        return
    out = out or Path("plan.json")
    decided = plan_report(loaded, allowed, force=_forced(force or []), target=target)
    decided.save(out)
    say(decided)
    say(f"written: {out}")


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A plan.")],
    second: Annotated[Path, typer.Argument(help="Another plan.")],
) -> None:
    """List the decisions that differ between two plans."""
    say(diff_plans(Plan.load(first), Plan.load(second)))


@app.command()
def drift(
    plan: Annotated[Path, typer.Argument(help="The plan that runs.")],
    stats: Annotated[list[Path], typer.Argument(help="Folders written by `loka probe` since, the oldest first.")],
    before: Annotated[
        Path | None,
        typer.Option(help="The statistics behind the plan; without them only effects on KL/H are compared."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="The report behind the plan; then it lists which decisions would change.")
    ] = None,
) -> None:
    """Has the data moved since a plan was made?

    Exit status 0: it holds; 1: plan again; 3: the drift guard acts; 4: the last window does not tell.
    """
    status = show_drift(
        Plan.load(plan),
        [Stats.load(folder) for folder in stats],
        Stats.load(before) if before else None,
        Report.load(report) if report else None,
    )
    raise typer.Exit(status)


app.command()(probe)
app.command()(train)
app.command()(validate)
app.command()(scale)
app.command("scale calibrate")(calibrate_links)
app.command("scale lengths")(deal_lengths)
app.command("report")(write_report)


def _forced(pairs: list[str]) -> dict[str, str]:
    force: dict[str, str] = {}
    for pair in pairs:
        site, equals, candidate = pair.partition("=")
        if not equals or not candidate:
            raise LokaError(f"--force {pair!r} is not SITE=CANDIDATE", way_out="such as --force '*/output=hp'")
        if site in force:
            raise LokaError(f"--force {pair!r}: {site} is forced already", way_out="force it once")
        force[site] = candidate
    return force


def main() -> None:
    """The `loka` command: a LokaError is a message and exit status 2, not a traceback."""
    try:
        # A rank may wait for others in C++, where no handler of Python's runs: SIGTERM ends it as it is.
        with _interruptible(), contextlib.nullcontext() if under_torchrun() else terminable():
            app()  # which first makes the commands, for a tenth of a second
    except (LokaError, OSError) as error:
        say(f"{_whose()}{type(error).__name__}: {error}", error=True)
        raise SystemExit(2) from None
    finally:
        # A rank's process group ends with its last owner, and some owners are in reference cycles. Without a collection
        # gloo's threads outlive the group, free tensors while Python shuts down, and abort the rank.
        if under_torchrun():
            gc.collect()


def _whose() -> str:
    """Which rank a message is from: under torchrun all ranks write to one terminal."""
    return f"rank {os.environ.get('RANK', '?')}: " if under_torchrun() else ""
