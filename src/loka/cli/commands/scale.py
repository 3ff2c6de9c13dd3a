"""`loka scale`: will eight bits help this model? Before any training, and without a GPU."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from loka.cli.inputs import choose_device, find_function, is_of_zoo, model_builder, open_data
from loka.cli.models import apply_mods, line_of
from loka.cli.options import DataFile, Device, SchemaFile, WithMods, refuse_idle
from loka.cli.terminal import say
from loka.cli.torchrun import process_group, rank_and_ranks
from loka.core.exceptions import LokaError
from loka.core.records.across import Across
from loka.core.records.network import Network
from loka.core.records.plan import Plan
from loka.core.records.scale import Scale
from loka.core.storage.codec import decode
from loka.core.storage.files import read_json, write_atomic
from loka.data.batch import Batch, Source
from loka.report.pages.across import across_page
from loka.scaling import scale as scale_model
from loka.scaling.cluster.across import default_gpus
from loka.scaling.cluster.calibrate import SIZES, calibrate
from loka.scaling.cluster.fitting import parsed_step
from loka.scaling.cluster.tables import parsed
from loka.scaling.inputs import fake_mode, rows_of
from loka.scaling.lengths import LengthTimes, waits
from loka.scaling.scale import checked
from loka.train.steps.forward import arguments

_FEW_ROWS = 64  # of the batch that shows the columns; it is resized
_LENGTHS = "docs/scale.md has both files"
_WAY_OUT = (
    "a function that returns (model, batch), called with batch_size if it takes that; or one that returns "
    "the model, and another for the batch with --inputs package.module:function"
)


def scale(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="package.module:function that returns (model, batch), or a model; or of the zoo: NAME:SIZE."
        ),
    ],
    batch_size: Annotated[int, typer.Option(help="Rows in a step.")] = 8192,
    gpu: Annotated[str, typer.Option(help="Whose stored measurements to use.")] = "h200",
    inputs: Annotated[
        str | None, typer.Option(help="package.module:function that returns what it is called with.")
    ] = None,
    kernels: Annotated[str, typer.Option(help="all: the fastest library at each shape; torch: its own alone.")] = "all",
    data: DataFile = None,
    schema: SchemaFile = None,
    with_mods: WithMods = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for all of it.")] = None,
    page: Annotated[Path | None, typer.Option(help="With --network: HTML page with plots.")] = None,
    network: Annotated[
        Path | None,
        typer.Option(help="JSON file of a cluster's links: tells steps on many GPUs instead (docs/scale.md)."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="With --network: numbers of GPUs; by default 8,64,256,1024, or those of a node.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="With --network: a plan measured at this batch size, for its times.")
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(help="With --network: of ddp, fsdp2, hsdp.")] = None,
    group: Annotated[list[int] | None, typer.Option(help="With --network: GPUs of a group of hsdp.")] = None,
    unit: Annotated[
        list[str] | None,
        typer.Option(help="With --network: paths that FSDP2 shards each for itself, such as 'layers.*'."),
    ] = None,
    ids: Annotated[
        float | None, typer.Option(help="With --network: tables too, with so many ids a sample in each.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(help="With --network: tables in place of the model's, such as 26x1000000x128.")
    ] = None,
    qcomm: Annotated[str, typer.Option(help="With --network: embeddings in fp32, bf16 or fp8.")] = "bf16",
    tables_by: Annotated[str, typer.Option(help="Tables placed by size, by rows, or by torchrec's planner.")] = "size",
    table_group: Annotated[int, typer.Option(min=0, help="GPUs that share tables (2D).")] = 0,
    sync_every: Annotated[int, typer.Option(min=0, help="Steps between syncs of such groups.")] = 0,
    step: Annotated[
        list[str] | None,
        typer.Option(
            help="With --network: a measured step to fit compute to, such as ddp@2=29.9/22.9: ms in bf16, by plan."
        ),
    ] = None,
) -> None:
    """Will eight bits help? The sites of a model, their share of the FLOPs, and what they would take.

    Needs no GPU: times are stored measurements, interpolated where that was checked, and unknown elsewhere.
    With --network: does it still pay on many GPUs, under DDP, FSDP2 and HSDP?
    """
    checked(gpu=gpu, batch_size=batch_size, kernels=kernels)  # before anything is built
    placed = tables_by != "size" or table_group or sync_every or qcomm != "bf16"
    if network is None and any((plan, gpus, engine, group, unit, table, ids is not None, page, placed, step)):
        raise LokaError(
            "--page, --plan, --gpus, --engine, --group, --unit, --step and options of tables are of steps on many GPUs",
            way_out="give --network too, such as examples/h200-ib.json",
        )
    ask = _on_one(gpu=gpu, batch_size=batch_size, kernels=kernels)
    if network is not None:
        links = Network.load(network)
        ask = _on_many(
            links,
            default_gpus(links) if gpus is None else _numbers(gpus),
            gpu=gpu,
            batch_size=batch_size,
            kernels=kernels,
            options={
                "plan": None if plan is None else Plan.load(plan),
                "engines": engine or (),
                "groups": group or (),
                "units": tuple(unit or ()),
                "tables": [shape for one in table or () for shape in parsed(one)],
                "ids": ids,
                "qcomm": qcomm,
                "tables_by": tables_by,
                "table_group": table_group,
                "sync_every": sync_every,
                "measured": [parsed_step(one) for one in step or ()],
            },
        )
    function = None if is_of_zoo(model) else _function(model)
    if function is None or ("dense_features" in _parameters(function) and inputs is None):
        refuse_idle(context, f"with {model}, which takes rows of --data", "inputs")
        build = _of_rows(model, data, schema)
    else:
        refuse_idle(context, f"with {model}, which brings its batch", "data", "schema")
        build = _own(function, model, inputs, batch_size)
    build = _modded(build, model, with_mods)
    found = (_without_numbers if network is None else _never_with_numbers)(build, ask)
    say(found)
    if out is not None:
        found.save(out)
        say(f"written: {out}")
    if page is not None:
        assert isinstance(found, Across)
        write_atomic(page, across_page(found).encode())
        say(f"written: {page}")


def calibrate_links(
    out: Annotated[Path, typer.Option(help="Network file to write, for `loka scale --network`.")],
    base: Annotated[Path | None, typer.Option(help="Network file, for what is not measured here.")] = None,
    max_mb: Annotated[int, typer.Option(min=1, help="Largest message, in MB.")] = SIZES[-1] >> 20,
    device: Device = None,
) -> None:
    """Under torchrun: measures the links between ranks, for `loka scale --network`."""
    known = None if base is None else Network.load(base)
    with process_group(choose_device(device)) as place:
        found = calibrate(place, base=known, most_bytes=max_mb << 20)
        if rank_and_ranks()[0] == 0:
            found.save(out)
            say(found.measured)
            say("\n".join(f"  {name}: {quantity}" for name, quantity in found.quantities.items()))
            say(f"written: {out}")


def deal_lengths(
    times: Path,
    lengths: Path,
    gpus: str = "8,64",
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a GPU.")] = 128,
) -> None:
    """What a step waits for its longest rows, and what dealing them by measured times of lengths gains."""
    table = read_json(times, "times of lengths", way_out=_LENGTHS, parse=partial(decode, LengthTimes))
    rows = read_json(lengths, "lengths", way_out=_LENGTHS, parse=partial(decode, tuple[float, ...]))
    told = {
        f"{ranks} GPUs, {arm}": waits(table.of(arm, rows), ranks=ranks, batch_size=batch_size)
        for ranks in _numbers(gpus)
        for arm in table.us
    }
    for what, (random, even) in told.items():
        say(f"{what}: {random} us at random, {even} balanced")


@dataclass(frozen=True, kw_only=True)
class _Built:
    """`sized`: the batch was made with as many rows as were asked for. `changed`: what mods did to the model."""

    model: nn.Module
    batch: Any
    sized: bool
    changed: tuple[str, ...] = ()

    def other_rows(self, asked: int) -> tuple[str, ...]:
        """What to say of a batch that was made with `asked` rows, and shows another number."""
        given = rows_of(self.batch) if self.sized else None
        if given in (None, asked):
            return ()
        return (f"the batch was made with batch_size={asked}, and its first tensor has {given} rows: taken as it is",)


_Ask = Callable[[_Built], Scale | Across]


def _without_numbers(build: Callable[[], _Built], ask: _Ask) -> Scale | Across:
    try:
        with fake_mode():
            built = build()
        return ask(built)
    except Exception:  # a model's own code raises what it likes where numbers are missing
        return ask(build())


def _never_with_numbers(build: Callable[[], _Built], ask: _Ask) -> Scale | Across:
    """The same of a step that is traced without numbers in any case, so that to ask again is of no use."""
    try:
        with fake_mode():
            built = build()
    except Exception:
        built = build()
    return ask(built)


def _on_one(*, gpu: str, batch_size: int, kernels: Any) -> _Ask:
    def ask(built: _Built) -> Scale:
        rows = None if built.sized else batch_size
        found = scale_model(built.model, built.batch, gpu=gpu, batch_size=rows, kernels=kernels)
        return replace(
            found, batch_size=batch_size, notes=(*built.changed, *built.other_rows(batch_size), *found.notes)
        )

    return ask


def _on_many(
    network: Network, gpus: tuple[int, ...], *, gpu: str, batch_size: int, kernels: Any, options: dict[str, Any]
) -> _Ask:
    from loka.scaling.cluster import scale_across
    from loka.scaling.cluster.collectives import check_ranks

    def ask(built: _Built) -> Across:
        other = built.other_rows(batch_size)
        if other and (options["ids"] is not None or options["tables"]):
            raise LokaError(
                "tables are looked up for each row of a batch, and how many this one has does not show",
                why=other,
                way_out="a batch whose first tensor has a row for each, or leave --ids and --table out",
            )
        found = scale_across(
            built.model,
            built.batch,
            network=network,
            gpus=gpus,
            gpu=gpu,
            batch_size=None if built.sized else batch_size,
            kernels=kernels,
            **options,
        )
        return replace(found, batch_size=batch_size, notes=(*built.changed, *other, *found.notes))

    for ranks in gpus:  # before anything is built
        check_ranks(ranks, network)
    return ask


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise LokaError(f"--gpus {text!r} are no numbers", way_out="such as 8,64,256,1024")
    return tuple(map(int, parts))


def _modded(build: Callable[[], _Built], name: str, asked: bool | None) -> Callable[[], _Built]:
    """With mods where `loka train` would apply them, so that what is told is of the model that it trains."""

    def modded() -> _Built:
        built, changed = build(), list[str]()
        apply_mods(built.model, name, asked, show=lambda changes: changed.append(line_of(changes)))
        return replace(built, changed=tuple(changed))

    return modded


def _of_rows(model: str, data: Path | None, schema: Path | None) -> Callable[[], _Built]:
    source: Source = open_data(data, rows=_FEW_ROWS * 2, seed=0, schema=schema).train
    few = next(iter(source.batches(_FEW_ROWS)))
    factory = model_builder(model)
    return lambda: _Built(model=factory(source), batch=arguments(few), sized=False)


def _function(name: str) -> Callable[..., Any]:
    if ":" not in name:
        model_builder(name)  # raises, and lists the zoo's
    return find_function(name, way_out=_WAY_OUT)


def _own(function: Callable[..., Any], name: str, inputs: str | None, batch_size: int) -> Callable[[], _Built]:
    batch_of = None if inputs is None else find_function(inputs, way_out=_WAY_OUT)

    def built() -> _Built:
        made = _called(function, name, batch_size)
        sized = "batch_size" in _parameters(function)
        if batch_of is not None and inputs is not None:
            made = (made[0] if isinstance(made, tuple) else made, _called(batch_of, inputs, batch_size))
            sized = "batch_size" in _parameters(batch_of)
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
            told = ", ".join(type(one).__name__ for one in made) if isinstance(made, tuple) else ""
            raise LokaError(
                f"{name} returned {f'({told})' if told else f'a {type(made).__name__}'}, not (model, batch)",
                way_out=_WAY_OUT,
            )
        model, batch = made
        return _Built(model=model, batch=arguments(batch) if isinstance(batch, Batch) else batch, sized=sized)

    return built


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built in
        return ()


def _called(function: Callable[..., Any], name: str, batch_size: int) -> Any:
    """Raises LokaError for whatever the function raises."""
    given = {"batch_size": batch_size} if "batch_size" in _parameters(function) else {}
    try:
        return function(**given)
    except Exception as error:
        raise LokaError(
            f"cannot build a model by {name}({', '.join(f'{k}={v}' for k, v in given.items())})",
            why=[f"{type(error).__name__}: {error}"],
            way_out=_WAY_OUT,
        ) from error
