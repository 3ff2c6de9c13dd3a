"""`loka serve`: freeze a checkpoint by a plan, test its load, package it, check a folder."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from loka.cli.inputs import Data, choose_device, open_data, restore, size_of_world
from loka.cli.models import build_model
from loka.cli.options import BatchSize, DataFile, Device, ModelName, Rows, SchemaFile, Seed, WithMods, refuse_idle
from loka.cli.terminal import say
from loka.cli.trained_on import OTHER_ROWS, are_others, rows_of_run, rows_of_server
from loka.core.exceptions import LokaError
from loka.core.records.plan import Plan
from loka.core.storage.alone import alone_in
from loka.data.batch import Source
from loka.serve import Server, load
from loka.serve import freeze as freeze_model
from loka.serve.load_test import load_test
from loka.serve.watch.monitor import EVERY, WINDOW, is_looked_at
from loka.train.steps.forward import arguments

serve_app = typer.Typer(no_args_is_help=True, help="Serve a model by a plan, with FP8 weights kept.")

Folder = Annotated[Path, typer.Argument(help="Folder that `loka serve freeze` wrote.")]
Graphs = Annotated[
    bool | None, typer.Option("--graphs/--no-graphs", help="Compiled, a CUDA graph a bucket; on where there is CUDA.")
]


@serve_app.command()
def freeze(
    plan: Annotated[
        list[str], typer.Option(help="The plan to serve by; or several as ROWS=FILE, each for up to so many rows.")
    ],
    checkpoint: Annotated[Path, typer.Option(help="Of `loka train`: a folder of them, or one.")],
    out: Annotated[Path, typer.Option(help="Folder for the server.")] = Path("server"),
    model: ModelName = "wukong",
    data: DataFile = None,
    schema: SchemaFile = None,
    rows: Rows = None,
    calibration_rows: Annotated[
        int, typer.Option(min=32, help="Of the held-out rows, at most so many, the first ones.")
    ] = 4096,
    seed: Seed = 0,
    device: Device = None,
    with_mods: WithMods = None,
    autocast: Annotated[
        bool, typer.Option("--autocast/--no-autocast", help="Answer under bf16 autocast, as trained.")
    ] = True,
    shadow: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests to answer in high precision too.")
    ] = 0.0,
    graphs: Graphs = None,
    race: Annotated[
        bool, typer.Option(help="Time each bucket's graph by every plan and without FP8, and take the fastest.")
    ] = False,
) -> None:
    """Quantize the weights of a checkpoint once, calibrate on held-out rows, and write a folder."""
    if out.is_file():
        raise LokaError(f"--out {out} is a file", way_out="name a folder")
    plans, opening = _plans(plan), _opening(data, schema, rows, seed)
    opened, built = _model(model, opening, seed, device, with_mods)
    trained_on = rows_of_run(restore(checkpoint, built))
    if are_others(trained_on, opened, opening):
        say(OTHER_ROWS)
    server = freeze_model(
        built,
        plans,
        calibration=list(_requests(opened.test, 512, calibration_rows)),
        name=f"held-out rows of {opened.description}",
        autocast=torch.bfloat16 if autocast else None,
        shadow=shadow,
        graphs=graphs,
        race=race,
    )
    with alone_in(out, "freezing"):
        server.save(out)
        if trained_on is not None:
            trained_on.keep(out)
    say(server)
    say(f"written: {out}")


@serve_app.command()
def check(
    folder: Folder,
    model: ModelName = "wukong",
    data: DataFile = None,
    schema: SchemaFile = None,
    rows: Rows = None,
    batch_size: BatchSize = 256,
    seed: Seed = 0,
    device: Device = None,
    with_mods: WithMods = None,
) -> None:
    """Load a folder, answer the held-out rows, and say what the alarm saw.

    Exit status 0: sound; 1: an alarm, or rows with NaN; 2: the folder is refused.
    """
    opened, server = _server(folder, model, data, schema, rows, seed, device, with_mods)
    say(server)
    bad = count = answered = 0
    for request in _requests(opened.test, batch_size, opened.test.rows):
        answer = server(request)
        bad += answer.nonfinite_rows
        count += request[0].shape[0]
        answered += 1
    say(f"{count} rows answered, {bad} of them with NaN or infinity")
    for alarm in server.alarms():
        say(f"alarm: {alarm}")
    if (looks := sum(map(is_looked_at, range(answered)))) < WINDOW:
        way_out = (
            f"--batch-size {max(1, count // (EVERY * WINDOW))} gives enough"
            if count >= EVERY * WINDOW
            else "give more rows"
        )
        say(f"the alarm looked at {looks} requests, and sees no shift before {WINDOW}: {way_out}")
    raise typer.Exit(1 if bad or server.alarms() else 0)


@serve_app.command()
def bench(
    context: typer.Context,
    folder: Folder,
    model: ModelName = "wukong",
    data: DataFile = None,
    schema: SchemaFile = None,
    rows: Rows = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows in a request.")] = 128,
    rate: Annotated[float | None, typer.Option(min=0, help="Requests a second, instead of --load.")] = None,
    share: Annotated[float, typer.Option("--load", min=0, help="Of what one thread answers back to back.")] = 0.7,
    seconds: Annotated[float, typer.Option(min=0.01, max=3600, help="Of arrivals.")] = 10.0,
    threads: Annotated[int, typer.Option(min=1, max=256, help="That answer.")] = 1,
    seed: Seed = 0,
    device: Device = None,
    with_mods: WithMods = None,
    graphs: Graphs = None,
) -> None:
    """Latency under an open load: requests arrive by a Poisson process, answered or not."""
    if rate is not None:
        refuse_idle(context, "with --rate", "share")
    opened, server = _server(folder, model, data, schema, rows, seed, device, with_mods, graphs)
    requests = list(_requests(opened.test, batch_size, min(64 * batch_size, opened.test.rows)))
    if server.device.type == "cpu":
        say("on a CPU, where FP8 is emulated: these times say nothing of a GPU's")

    def answer(turn: int) -> int:
        return server(requests[turn % len(requests)]).nonfinite_rows  # waits for the device

    found = load_test(answer, rate=rate, load=share, seconds=seconds, threads=threads, seed=seed)
    say(f"{batch_size} rows a request, {threads} threads, {server.card.machine}")
    say(found)
    raise typer.Exit(1 if found.failed or found.unanswered else 0)


@serve_app.command()
def package(
    context: typer.Context,
    folder: Folder,
    out: Annotated[Path, typer.Option(help="File that AOTInductor runs without loka.")] = Path("model.pt2"),
    weights_for: Annotated[
        Path | None,
        typer.Option(help="A package of this model and plan: compile nothing, and write weights for it to --out."),
    ] = None,
    triton: Annotated[
        Path | None, typer.Option(help="Instead of --out: Triton Inference Server's folder of models.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of the model in that folder; its next version is written.")] = "",
    delay_us: Annotated[
        int, typer.Option(min=0, help="How long a request waits there for others, in microseconds.")
    ] = 0,
    model: ModelName = "wukong",
    data: DataFile = None,
    schema: SchemaFile = None,
    rows: Rows = None,
    least: Annotated[int, typer.Option(min=1, help="Rows in a request.")] = 1,
    most: Annotated[int, typer.Option(min=1, help="Rows in a request.")] = 4096,
    seed: Seed = 0,
    device: Device = None,
    with_mods: WithMods = None,
) -> None:
    """Compile a folder into one file, and run that in a process without loka."""
    if weights_for is not None:
        refuse_idle(context, "with --weights-for", "triton", "name", "delay_us", "least", "most")
    refuse_idle(context, *(("without --triton", "name", "delay_us") if triton is None else ("with --triton", "out")))
    if triton is not None and least != 1:
        raise LokaError(f"--least {least} with --triton", way_out="the server sends single rows too: --least 1")
    _, server = _server(folder, model, data, schema, rows, seed, device, with_mods)
    if weights_for is not None:
        say(server.package_weights(weights_for, out))
        return
    if triton is None:
        say(server.package(out, batch=(least, most)))
        return
    written, found = server.publish(triton, name or model.partition(":")[0], most=most, delay_us=delay_us)
    say(found)
    say(f"written: {written}")


def _plans(given: list[str]) -> Plan | dict[int, Plan]:
    if len(given) == 1 and not _is_count(given[0].partition("=")[0]):
        return Plan.load(Path(given[0]))
    plans: dict[int, Plan] = {}
    for text in given:
        rows, _, file = text.partition("=")
        if not (_is_count(rows) and int(rows) and file) or int(rows) in plans:
            raise LokaError(
                f"--plan {text} beside {len(given) - 1} others",
                way_out="one file, or ROWS=FILE for each: --plan 128=few.json --plan 4096=many.json",
            )
        plans[int(rows)] = Plan.load(Path(file))
    return plans


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _opening(data: Path | None, schema: Path | None, rows: int | None, seed: int) -> Callable[..., Data]:
    return partial(open_data, data, rows=size_of_world(rows, data), seed=seed, schema=schema)


def _model(
    name: str, opening: Callable[..., Data], seed: int, device: str | None, with_mods: bool | None
) -> tuple[Data, nn.Module]:
    opened = opening()
    if not opened.test.rows:
        raise LokaError("no rows are held out to serve", way_out="give more --rows, or other --data")
    built = build_model(name, opened.train, seed=seed, with_mods=with_mods)
    return opened, built.to(choose_device(device)).eval()


def _server(
    folder: Path,
    name: str,
    data: Path | None,
    schema: Path | None,
    rows: int | None,
    seed: int,
    device: str | None,
    with_mods: bool | None,
    graphs: bool | None = False,
) -> tuple[Data, Server]:
    """Without graphs where nothing is timed: they take a minute to compile. Says so where the rows are not those that
    the server's run trained on."""
    opening = _opening(data, schema, rows, seed)
    opened, built = _model(name, opening, seed, device, with_mods)
    server = load(folder, built, graphs=graphs)
    trained_on = rows_of_server(folder)
    if trained_on is not None and are_others(trained_on, opened, opening):
        say(OTHER_ROWS)
    return opened, server


def _requests(source: Source, batch_size: int, rows: int) -> Iterator[tuple[torch.Tensor, ...]]:
    for batch in source.batches(batch_size):
        if rows <= 0:
            return
        yield tuple(tensor[:rows] for tensor in arguments(batch))
        rows -= len(batch)
