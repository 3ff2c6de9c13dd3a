"""Commands that are killed and started again, each small enough to take some seconds, and what they end in.

`prepared` makes their inputs; `ends` lists all that a finished command leaves, as digests by name, without
times: bytes of shards, weights, optimizers, random state, records.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from command_line import loka, measure_coarsely

from loka.cli import app
from loka.cli.commands import validate
from loka.data import conversion
from loka.train import load_newest, newest_step

INPUTS = "inputs"
_TRAINED = ("--model", "dlrm", "--device", "cpu", "--batch-size", "128", "--rows", "4000")
# What a run measures by the clock. All else has to be the same bits.
_TIMES = {"seconds", "rows_per_second", "timeline"}
_SAID = ("held out", "ran ")  # other lines say what was done by the last process, and how fast


@dataclass(frozen=True, kw_only=True)
class Command:
    """`arguments` are for a folder beside `INPUTS`; `standing` says how much of the work is saved there."""

    arguments: tuple[str, ...]
    standing: Callable[[Path], int]
    saves_at_sigterm: bool = False


def _shards(folder):
    return len(list(folder.glob("out/shard-*.parquet")))


def _steps(folder):
    return newest_step(folder / "out" / "checkpoints")


def _sites(folder):
    report = folder / "report.json"
    return len(json.loads(report.read_text())["content"]["sites"]) if report.exists() else 0


def _runs(folder):
    return len(list(folder.glob("out/runs/*/run.json")))


COMMANDS = {
    "convert": Command(
        arguments=("data", "convert", f"../{INPUTS}/rows.tsv", "--out", "out", "--min-count", "2"), standing=_shards
    ),
    "train": Command(
        arguments=(
            *("train", *_TRAINED, "--plan", f"../{INPUTS}/plan.json", "--average", "tail"),
            *("--checkpoints", "out/checkpoints", "--checkpoint-every", "3"),
        ),
        standing=_steps,
        saves_at_sigterm=True,
    ),
    "auto": Command(
        arguments=(
            *("train", *_TRAINED, "--auto", "--probe-every", "4", "--probe-steps", "9", "--no-cache"),
            *("--candidate", "emulated:rowwise_e4m3", "--out", "out", "--checkpoint-every", "3"),
        ),
        standing=_steps,
        saves_at_sigterm=True,
    ),
    "measure": Command(
        arguments=("measure", f"../{INPUTS}/stats", "--out", "report.json", "--device", "cpu", "--no-cache"),
        standing=_sites,
    ),
    "validate": Command(
        arguments=("validate", *_TRAINED[:-1], "2000", "--arm", "naive", "--pairs", "2", "--out", "out"), standing=_runs
    ),
}


def prepared(folder):
    """The inputs, in a folder of their own: rows, statistics, and a plan."""
    from click_files import made_up, write_tsv  # of tests/data

    inputs = folder / INPUTS
    inputs.mkdir(parents=True)
    write_tsv(inputs / "rows.tsv", made_up(4000, seed=3))
    loka("probe", *_TRAINED, "--every", 4, "--out", "stats", cwd=inputs)
    app.measure_stats = measure_coarsely
    loka("measure", "stats", "--out", "report.json", "--no-cache", cwd=inputs)
    loka("plan", "report.json", "--min-sqnr-db", 20, "--min-speedup", 0, cwd=inputs)


def work(name, folder):
    """The command in this process, which may be killed at any moment; it says what it does in `printed`."""
    with (folder / "printed").open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    conversion.LEAST_SHARD = 20_000  # some forty pieces of a small file
    app.measure_stats = measure_coarsely
    validate.train_config = _saved_often
    sys.argv = ["loka", *COMMANDS[name].arguments]
    app.main()


def _saved_often(**fields):
    from loka.cli.inputs import train_config

    return train_config(**{**fields, "checkpoint_every": 2})


def ends(folder):
    """A digest of every file, of every value in records and in the newest checkpoint, and what was said."""
    found = {f"said {n}": line for n, line in enumerate(_said(folder))}
    checkpoints = folder / "out" / "checkpoints"
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if checkpoints in path.parents:
            continue  # of the newest, below, what is in it; of others there may be two or one
        if path.suffix == ".json":
            found.update(_leaves(json.loads(path.read_bytes())["content"], name))
        elif path.is_file() and name != "printed":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    newest = load_newest(checkpoints) if checkpoints.exists() else None
    if newest is not None:
        found.update(_leaves({"step": newest.step, **newest.state}, "checkpoint"))
    return found


def unlike(found, expected):
    """The names under which the two differ."""
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def litter(folder):
    """Names that begin with a dot: temporary files and folders, and locks. A finished command leaves none."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob(".*"))


def _said(folder):
    return [line for line in (folder / "printed").read_text().splitlines() if line.startswith(_SAID)]


def _leaves(value, at):
    if isinstance(value, dict):
        for key, entry in value.items():
            if key not in _TIMES:
                yield from _leaves(entry, f"{at}/{key}")
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from _leaves(entry, f"{at}/{place}")
    elif isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield at, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
    elif isinstance(value, str) and value.startswith('{"'):  # plans and timelines in a checkpoint
        yield from _leaves(json.loads(value), at)
    else:
        yield at, repr(value)
