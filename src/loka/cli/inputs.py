"""What --model, --data and --device mean, for every command alike."""

import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from loka.cli.terminal import say
from loka.core.device import default_device, device_named
from loka.core.exceptions import CheckpointRefused, LokaError, UnknownName
from loka.core.numerics.label_rate import Shares
from loka.data import Dealt, Reader, Schema, SyntheticClicks, history_of, open_rows, tasks_of
from loka.data.batch import Source
from loka.data.opening import PREPARE_ONCE
from loka.train.checkpointing.checkpoint import Checkpoint, load_one, require_model
from loka.train.checkpointing.state import restore_model
from loka.train.config import NAMED, TrainConfig
from loka.train.labels import by_name, count_labels, shares
from loka.zoo import HistoryTable, build, presets, takes_history
from loka.zoo.presets import PREDICTION_WIDTH

Build = Callable[[Source], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Rows to train on and rows held out, of the same table or the same synthetic world."""

    train: Source
    test: Source
    description: str

    def account(self) -> list[str]:
        """A line for each reason for which values or rows of either part were replaced or skipped.

        Counts what this process read, every pass over the rows included.
        """
        total = Counter(self.train.account()) + Counter(self.test.account())  # drops zero counts
        return [
            f"rows read: {count} {reason}{'' if reason.endswith(')') else ' (all passes of this process)'}"
            for reason, count in total.items()
        ]


def open_data(
    path: Path | None,
    *,
    rows: int,
    seed: int,
    holdout: float = 0.2,
    schema: Path | None = None,
    test: Path | None = None,
    part: tuple[int, int] = (0, 1),
    parts: int | None = None,
) -> Data:
    """A file, a folder of prepared clicks or of npy files, or the synthetic world when there is none.

    `rows` is the size of the synthetic world, held-out part included; what is on disk is taken whole. The
    last `holdout` share is held out, unless there is a `test` file or folder. `schema` is that of files.
    `part` is rank and number of ranks: each trains on as many rows of its own, and all hold out the same. The
    rows lie in `parts`, of which every step takes equally many (loka.data.Dealt): by default one a rank.

    Raises LokaError for a table that several ranks would read.
    """
    rank, ranks = part
    parts = parts or ranks
    several = ranks > 1 or parts > 1
    if path is not None:
        columns = Schema.from_json(schema) if schema else None
        if several and path.is_file():  # what is not there at all `open_rows` tells
            raise LokaError(f"{path}: a table is read in its own order, by one rank", way_out=PREPARE_ONCE)
        table, tail = open_rows(path, holdout=holdout, test=test, schema=columns)
        if several:
            assert isinstance(table, Reader)
            table = Dealt(table.parts(parts), rank=rank, ranks=ranks)
        of = f" of {test.name}" if test else ""
        return Data(train=table, test=tail, description=f"{path.name}, {table.rows} + {tail.rows} held out{of}")
    if schema or test:
        raise LokaError(
            f"{'--schema' if schema else '--test-data'} without --data",
            way_out="name the rows to train on, or leave it out: synthetic rows have columns of their own",
        )
    first = max(int(rows * (1 - holdout)), 1)
    world: Source = SyntheticClicks(rows=first, seed=seed)
    if several:
        shared = first - first % parts
        each = [SyntheticClicks(rows=shared, seed=seed, shard=p, shards=parts) for p in range(parts)]
        world = Dealt(each, rank=rank, ranks=ranks)
    rest = SyntheticClicks(rows=rows - first, first_row=first, seed=seed)
    return Data(train=world, test=rest, description=f"synthetic, {world.rows} + {rest.rows} held out")


def size_of_world(rows: int | None, data: Path | None, *, default: int = 50_000) -> int:
    """What --rows says. Raises LokaError beside --data, which is taken whole."""
    if rows is not None and data is not None:
        raise LokaError(
            f"--rows {rows} sets the number of synthetic rows, and {data.name} is read in full",
            way_out="leave --rows out",
        )
    return default if rows is None else rows


def model_builder(name: str) -> Build:
    """A function that builds the model for a source.

    Args:
        name: "wukong", "wukong:2gf" (see `loka.zoo.presets`), "mmoe:small:3" (gates by sparse column 3,
            counted from 0), or "package.module:factory", whose factory is called with dense_features and
            vocab_sizes; where rows have several labels, with tasks, their number, too; and where they have a
            history, with history, its `loka.data.History`, if it has a parameter of that name.

    Raises:
        UnknownName: neither; the known models are listed.
    """
    head, _, tail = name.partition(":")
    known = {model for model, _ in presets()}
    if head in known:
        size, colon, domain = tail.partition(":")
        size = size or "small"
        if (head, size) not in presets():
            sizes = ", ".join(s for model, s in presets() if model == head)
            raise UnknownName(f"{head} has no size {size!r}", way_out=f"one of {sizes}")
        if colon and not (head == "mmoe" and domain.isdecimal()):
            raise UnknownName(
                f"{name}: {domain!r} is no domain", way_out="mmoe:SIZE:COLUMN, its gates by a sparse column"
            )
        return functools.partial(_of_zoo, head, size, int(domain) if colon else None)
    names = ", ".join(f"{model}:{size}" for model, size in presets())
    if not tail:
        raise UnknownName(f"no model is called {name!r}", way_out=f"one of {names}, or package.module:factory")
    factory = find_function(name, way_out=f"one of {names}, or package.module:factory")

    def built(source: Source) -> nn.Module:
        given: dict[str, Any] = {"dense_features": source.dense_features, "vocab_sizes": source.vocab_sizes}
        if len(tasks_of(source)) > 1:
            given["tasks"] = len(tasks_of(source))
        if (history := history_of(source)) is not None and _takes_history(factory):
            given["history"] = history  # one that takes none may know how many ids there are
        try:
            model = factory(**given)
        except TypeError as error:
            raise LokaError(
                f"cannot call {name}", why=[str(error)], way_out=f"it is called with {' and '.join(given)}"
            ) from error
        if not isinstance(model, nn.Module):
            raise LokaError(
                f"{name} returned a {type(model).__name__}, not an nn.Module", way_out="return the model that it builds"
            )
        return model

    return built


def _takes_history(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # of one that is written in C
        return False
    return "history" in parameters or any(found.kind is found.VAR_KEYWORD for found in parameters.values())


def find_function(name: str, *, way_out: str) -> Callable[..., Any]:
    """What "package.module:function" names; modules of the working directory are found too.

    Raises UnknownName where there is none, or its module cannot be imported.
    """
    head, _, tail = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # the installed command knows the folder of its own script alone
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(head), tail)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownName(f"cannot find the model {name!r}", why=[str(error)], way_out=way_out) from error
    return found


def is_of_zoo(name: str) -> bool:
    return name.partition(":")[0] in {model for model, _ in presets()}


def _of_zoo(name: str, size: str, domain: int | None, source: Source) -> nn.Module:
    columns = len(source.vocab_sizes)
    if domain is not None and domain >= columns:
        raise LokaError(
            f"--model {name}:{size}:{domain}: the rows have {columns} sparse columns",
            way_out=f"from 0 to {columns - 1}",
        )
    held = history_of(source) if takes_history(name) else None
    return build(
        name,
        size=size,
        dense_features=source.dense_features,
        vocab_sizes=source.vocab_sizes,
        history=None if held is None else HistoryTable(vocab_size=held.vocab_size),
        tasks=_tasks_of_zoo(source),
        domain=domain,
    )


def _tasks_of_zoo(source: Source) -> int:
    tasks = tasks_of(source)
    if len(tasks) > PREDICTION_WIDTH:
        raise LokaError(
            f"the rows have {len(tasks)} labels, {', '.join(tasks)}, and the zoo's models have up to "
            f"{PREDICTION_WIDTH} logits",
            way_out=f"name at most {PREDICTION_WIDTH} labels in the schema, or bring a model of your own: "
            "--model package.module:factory",
        )
    return len(tasks)


def one_task(source: Source, command: str, *, instead: str) -> None:
    """Raises LokaError, which names `instead`, where rows have several labels."""
    tasks = tasks_of(source)
    if len(tasks) > 1:
        raise LokaError(
            f"`{command}` takes rows with one label, and these have {len(tasks)}: {', '.join(tasks)}",
            way_out=f'name one in the schema ("label": "{tasks[0]}"), or {instead}',
        )


def steps_between(every: str, option: str) -> int | Literal["auto"]:
    """What --every or --probe-every says: a number from 1 on, or auto; UnknownName for anything else."""
    if every == "auto":
        return "auto"
    if not every.isdecimal() or int(every) < 1:
        raise UnknownName(f"{option} {every!r} is no number of steps", way_out="a number from 1 on, or auto")
    return int(every)


def share_of_labels(base_rate: float | None, source: Source | None = None) -> float | None:
    """What --base-rate says; raises LokaError for what is no share, or has no entropy, and for rows with
    several labels, whose shares are not one."""
    if base_rate is not None and source is not None and len(tasks := tasks_of(source)) > 1:
        raise LokaError(
            f"--base-rate gives the share of one label, and the rows have {len(tasks)}: {', '.join(tasks)}",
            way_out="leave --base-rate out: the labels of each task are counted",
        )
    if base_rate is not None and not 0 < base_rate < 1:
        raise LokaError(
            f"--base-rate {base_rate}: a share of labels lies between 0 and 1", way_out="such as 0.03, or leave it out"
        )
    return base_rate


def effects_by(base_rate: float | None, source: Source, batch_size: int) -> dict[str, Any]:
    """Arguments of a Probe: the base rate that H is computed from, as given or counted from the labels of `source`.

    Where the labels have none, the Probe measures no KL/H: with the mean prediction in its place it would promise an
    effect that does not exist.
    """
    rate: Shares | None = _share_in_rows(source, batch_size) if base_rate is None else base_rate
    return {"effect_samples": 0} if rate is None else {"base_rate": rate}


def _share_in_rows(source: Source, batch_size: int) -> Shares | None:
    labels = count_labels(source, batch_size=batch_size)
    rates = shares(labels)
    if rates is None:
        say(
            f"{by_name(labels)}: H is 0 on these rows, so no KL/H is measured and none is "
            "promised. Check which column is the label, or say --base-rate"
        )
    else:
        say(by_name(labels))
    return rates


def choose_device(name: str | None) -> str:
    """ "cuda" where there is a GPU, else "cpu"; a named one must exist."""
    device = name or default_device()
    device_named(device, f"--device {device}")
    return device


def restore(path: Path, model: nn.Module) -> Checkpoint:
    """The checkpoint at `path`, in `model`. Raises CheckpointRefused where there is none, or one of another model."""
    found = load_one(path)
    if found is None:
        raise CheckpointRefused(
            f"{path} holds no checkpoint", way_out="name the folder that `loka train --checkpoints` wrote to"
        )
    if not require_model(found, model):
        say("the checkpoint does not say of which kinds of modules its model is: only names and shapes were compared")
    restore_model(found.state, model, path=found.path)
    if found.state.get("average") or found.state.get("averaged") is not None:  # of one rank, of several
        say("the weights are those of the last step, not their mean (--average)")
    return found


def train_config(**fields: object) -> TrainConfig:
    """The configuration of a run. Raises UnknownName for an unknown name, such as that of a precision or a schedule,
    and LokaError for other values that cannot be."""
    for name, known in NAMED.items():
        names = get_args(known)
        if fields.get(name, names[0]) not in names:
            raise UnknownName(f"--{name} {fields[name]!r} is not known", way_out=f"one of {', '.join(names)}")
    try:
        return TrainConfig(**fields)  # type: ignore[arg-type]
    except ValueError as error:
        raise LokaError(str(error)) from None
