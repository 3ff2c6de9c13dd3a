"""`loka train`: one run, in high precision, by a plan, or from a cold start to FP8."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from loka.cli.commands.ne import named_budget
from loka.cli.inputs import choose_device, open_data, share_of_labels, size_of_world, steps_between, train_config
from loka.cli.models import build_model
from loka.cli.options import (
    AverageName,
    AverageShare,
    BatchSize,
    CacheFolder,
    DataFile,
    DecayShare,
    DenseRate,
    Device,
    FinalRate,
    ModelName,
    NoCache,
    Rows,
    ScheduleName,
    SchemaFile,
    Seed,
    SparseRate,
    StepName,
    TestData,
    Warmup,
    WithMods,
    cache_folder,
    refuse_idle,
    refuse_idle_rates,
)
from loka.cli.terminal import say
from loka.cli.torchrun import (
    check_engine,
    naming_unused,
    over_ranks,
    process_group,
    rank_and_ranks,
    require_same_options,
)
from loka.cli.train_lines import show_log, show_quality, show_result
from loka.core.exceptions import LokaError
from loka.core.numerics.label_rate import Shares
from loka.core.records.plan import Plan
from loka.data.batch import Source
from loka.nn import check_finite
from loka.planner import agree
from loka.report.progress import ProgressBars
from loka.train import Callback, Segments, TrainConfig, TrainLog
from loka.train import train as train_model
from loka.train.automatic.auto import NE_ALLOWED, Auto
from loka.train.automatic.config import MEASURE_SECONDS, AutoConfig
from loka.train.checkpointing.checkpoint import given_plan_in, identity_in
from loka.train.checkpointing.state import plan_in
from loka.train.labels import by_name, count_labels, shares
from loka.train.length import Length
from loka.train.ranks import all_or_none, alone_together, together
from loka.train.schedule import describe
from loka.train.steps.extent import replays_blocks
from loka.train.tensorboard import TensorBoard

_OF_AUTO = (
    *("out", "ne", "min_sqnr_db", "min_speedup", "probe_every", "probe_steps", "measure_seconds", "base_rate"),
    *("candidate", "cache", "no_cache"),
)
_SEGMENTS = 16
_MOST_PARTS = 1 << 16  # of rows; more in a checkpoint is no number of ranks


def train(
    context: typer.Context,
    model: ModelName = "wukong",
    data: DataFile = None,
    schema: SchemaFile = None,
    test_data: TestData = None,
    plan: Annotated[Path | None, typer.Option(help="Train by this plan.")] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="From a cold start: bf16 while a probe learns, then FP8.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Of --auto: folder for all that it writes, checkpoints too; runs/auto by default."),
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder to save to; a run found there is continued, by its plan.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints; 200, or more where saving takes long.")
    ] = None,
    precision: Annotated[str, typer.Option(help="bf16, tf32 or fp32; of what no plan has in FP8.")] = "bf16",
    step: StepName = "eager",
    rows: Rows = None,
    batch_size: BatchSize = 256,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training rows.")] = 1,
    lr: DenseRate = 1e-3,
    sparse_lr: SparseRate = 0.1,
    warmup: Warmup = 0.1,
    schedule: ScheduleName = "cosine",
    decay: DecayShare = 0.2,
    final_rate: FinalRate = 0.0,
    average: AverageName = "none",
    average_share: AverageShare = 0.1,
    grad_clip: Annotated[float | None, typer.Option(help="Largest norm of the dense gradients.")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts that a batch goes through in.")] = 1,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="torch's deterministic algorithms: resumed compiled runs keep bits.")
    ] = False,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between log lines.")] = 100,
    window: Annotated[int, typer.Option(min=1, help="Steps that window metrics cover.")] = 1000,
    segments: Annotated[
        int | None, typer.Option(min=0, help="Sparse column; rows with its first 16 ids are segments.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder to log to for TensorBoard.")] = None,
    ne: Annotated[float | None, typer.Option(min=0, help="Of --auto: KL/H allowed, absolute; 2e-4.")] = None,
    min_sqnr_db: Annotated[float | None, typer.Option(help="Of --auto: floor on every site's error.")] = None,
    min_speedup: Annotated[float | None, typer.Option(min=0, help="Of --auto: least speed-up worth having.")] = None,
    probe_every: Annotated[
        str, typer.Option(help="Of --auto: a step in so many is sampled; auto: 5 % of the phase's time.")
    ] = "auto",
    probe_steps: Annotated[
        int | None, typer.Option(min=1, help="Of --auto: most steps of probing; a fifth of the run.")
    ] = None,
    measure_seconds: Annotated[
        float, typer.Option(min=0, help="Of --auto: after which nothing new is measured; inf: all is.")
    ] = MEASURE_SECONDS,
    base_rate: Annotated[
        float | None, typer.Option(help="Of --auto: share of positive labels, whose entropy H KL/H is relative to.")
    ] = None,
    candidate: Annotated[list[str] | None, typer.Option(help="Of --auto: measure these.")] = None,
    cache: CacheFolder = None,
    no_cache: NoCache = False,
    engine: Annotated[
        str, typer.Option(help="Of tables: torch, whole on each rank; torchrec, sharded over the ranks by TorchRec.")
    ] = "torch",
    qcomm: Annotated[
        str, typer.Option(help="Of --engine torchrec, how embeddings travel: fp32, fp16, bf16, fp8.")
    ] = "fp32",
    pipeline: Annotated[
        bool, typer.Option(help="Of --engine torchrec: ids of the next batches travel while one trains.")
    ] = True,
    dense: Annotated[
        str,
        typer.Option(
            help="Under torchrun: ddp, the whole model on each rank; fsdp2, all but tables sharded over them."
        ),
    ] = "ddp",
    gather: Annotated[
        str,
        typer.Option(
            help="Of --dense fsdp2, how weights travel: hp, as --precision says; fp8, those of "
            "rowwise_e4m3_pow2 sites in a byte an element; auto, of those units where that is faster, by "
            "times taken before training."
        ),
    ] = "hp",
    gradients: Annotated[
        str,
        typer.Option(
            help="Under torchrun, how dense gradients travel: hp, in their own dtype; bf16, int8, e4m3, by "
            "that codec; auto, in eight bits where a gate finds them harmless and faster, before training."
        ),
    ] = "hp",
    seed: Seed = 0,
    device: Device = None,
    with_mods: WithMods = None,
) -> None:
    """Train in bf16, by a plan, or from bf16 to FP8 (--auto), and evaluate on held-out rows.

    Under torchrun every rank trains on rows of its own, in DistributedDataParallel or by FSDP2 (--dense), and
    by one plan; --engine torchrec shards the tables. --batch-size is of a rank; rank 0 prints. A run that
    began on other ranks goes on from its checkpoints, with a --batch-size by which a step has as many rows
    as before.
    """
    with process_group(choose_device(device), of_one=engine == "torchrec") as device:
        config = train_config(
            batch_size=batch_size,
            epochs=epochs,
            lr=lr,
            sparse_lr=sparse_lr,
            warmup=warmup,
            schedule=schedule,
            decay=decay,
            final_rate=final_rate,
            average=average,
            average_share=average_share,
            seed=seed,
            precision=precision,
            grad_clip=grad_clip,
            device=device,
            checkpoint_every=checkpoint_every,
            log_every=log_every,
            accumulate=accumulate,
            step=step,
            window=window,
            gather=gather,
            gradients=gradients,
            deterministic=deterministic,
            pipeline=pipeline,
        )
        require_same_options(context)
        refuse_idle_rates(context, config)
        if not auto:
            refuse_idle(context, "without --auto", *_OF_AUTO)
        if not (auto or checkpoints):
            refuse_idle(context, "without --checkpoints", "checkpoint_every")
        if engine == "torch":
            refuse_idle(context, "without --engine torchrec", "pipeline")
        limits = {"ne": ne, "min_sqnr_db": min_sqnr_db, "min_speedup": min_speedup}
        given = {name: value for name, value in limits.items() if value is not None}
        part = rank_and_ranks()
        bars = ProgressBars("train", console=None if part[0] == 0 else Console(quiet=True))
        if auto:
            out = out or Path("runs/auto")
            checkpoints = checkpoints or out / "checkpoints"
        rows = size_of_world(rows, data)
        source: dict[str, Any] = {"rows": rows, "seed": seed, "schema": schema, "test": test_data}
        opened = all_or_none(lambda: open_data(data, **source, part=part, parts=_parts(checkpoints, part[1])))
        if part[1] > 1 and average != "none":
            raise LokaError("--average works in one process only", way_out="leave it out under torchrun")
        callback: Callback | None = None
        if auto:
            if plan:
                raise LokaError("--auto makes its own plan", way_out="leave --plan or --auto out")

            def share() -> Shares:
                """Of the labels of all rows: the ranks predict by one."""
                everything = opened.train if part[1] == 1 else open_data(data, **source).train
                return share_of_labels(base_rate, everything) or _known_share(everything, batch_size)

            callback = Auto(
                AutoConfig(
                    every=steps_between(probe_every, "--probe-every"),
                    most_steps=probe_steps,
                    base_rate=all_or_none(share),
                    budget=named_budget("default", **{"ne": NE_ALLOWED} | given) if given else None,
                    candidates=tuple(candidate) if candidate else None,
                    measure_seconds=measure_seconds,
                    cache=cache_folder(cache, no_cache=no_cache),
                ),
                folder=out,
                track=bars,
                say=say,
            )
        chosen = _agreed(lambda: Plan.load(plan) if plan else None if auto else _saved_plan(checkpoints))
        if chosen is not None:
            say(chosen.summary())
        planned = auto or chosen is not None
        check_engine(engine, dense, qcomm, config, planned=planned)
        if planned and part[1] > 1 and (note := without_graphs(dense, config)):
            say(note)
        built = all_or_none(lambda: build_model(model, opened.train, seed=seed, with_mods=with_mods))
        say(describe(config, Length.of(opened.train, config).steps))
        shared = out is not None and (checkpoints is None or out.resolve() != checkpoints.resolve())
        first = part[0] == 0
        with (
            alone_together(out if shared else None, saves=False),  # `train` asks where it saves
            TensorBoard(tensorboard) if tensorboard and first else contextlib.nullcontext() as board,
            naming_unused(built),
        ):

            def on_log(line: TrainLog) -> None:
                show_log(line)
                if board is not None:
                    board(line)

            result = train_model(
                over_ranks(built, config, engine=engine, dense=dense, exchange=qcomm),
                opened.train,
                config=config,
                plan=chosen,
                callback=callback,
                identity_extra=({} if engine == "torch" else {"engine": engine, "qcomm": qcomm})
                | ({} if base_rate is None else {"base_rate": base_rate}),
                segments=None if segments is None else _segments(segments, opened.train),
                checkpoints=checkpoints,
                track=bars,
                on_log=on_log,
                check=check_finite,
                say=say,
            )
        show_result(result, config)
        if isinstance(callback, Auto):
            say(callback.timeline)
        if result.exchange is not None:
            say(result.exchange)
        if first or dense == "fsdp2" or engine == "torchrec":  # whose forward is of all ranks
            show_quality(built, opened, config, bars, result.average)


def without_graphs(dense: str, config: TrainConfig) -> str | None:
    """What a plan for several ranks is told, whose steps replay nothing."""
    sharded = dense == "fsdp2"
    if replays_blocks(config, sharded=sharded):
        return None
    by = "with --step graph" if config.accumulate == 1 else "with --step graph and without --accumulate"
    way_out = "" if sharded else f"; {by} what is compiled replays graphs"
    return (
        "note: these steps run without CUDA graphs, by which plans are timed; on two H200s the host made them slower "
        f"than bf16's (docs/distributed.md){way_out}"
    )


def _known_share(source: Source, batch_size: int) -> Shares:
    """Of the labels themselves, by task: early in training predictions say little of it."""
    labels = count_labels(source, batch_size=batch_size)
    rates = shares(labels)
    if rates is None:
        raise LokaError(
            f"--auto plans by what FP8 costs in KL/H, and {by_name(labels)}: H is 0 on these rows",
            way_out="check which column is the label, or say --base-rate; without --auto such rows train",
        )
    say(by_name(labels))
    return rates


def _agreed(load: Callable[[], Plan | None]) -> Plan | None:
    """What `load` gives on rank 0, if a plan, on every rank. Raises LokaError where others have none, or one alone."""
    chosen, told = together(load, lambda found: "no plan" if found is None else "a plan")
    if len(set(told)) > 1:
        raise LokaError(
            "some ranks have a plan, and others have none",
            why=[f"rank {rank}: {what}" for rank, what in enumerate(told)],
            way_out="give all ranks --plan, or --checkpoints in a folder that all of them see",
        )
    return None if chosen is None else agree(chosen)


def _saved_plan(checkpoints: Path | None) -> Plan | None:
    found = given_plan_in(checkpoints) if checkpoints else None
    saved = plan_in(found[0], "given_plan") if found else None
    if found and saved:
        say(f"by the plan in {found[1]}")
    return saved


def _parts(checkpoints: Path | None, ranks: int) -> int:
    """That the rows lie in: as many as the ranks that the run began with."""
    began = identity_in(checkpoints) if checkpoints else None
    source = began.get("source") if began else None
    parts = source.get("parts") if isinstance(source, dict) else None
    return parts if isinstance(parts, int) and 0 < parts <= _MOST_PARTS else ranks


def _segments(column: int, source: Source) -> Segments:
    sizes = source.vocab_sizes
    if column >= len(sizes):
        raise LokaError(
            f"--segments {column}: the rows have {len(sizes)} sparse columns, the first is 0",
            way_out=f"a number below {len(sizes)}",
        )
    return Segments.of_column(column, ids=range(min(_SEGMENTS, sizes[column])))
