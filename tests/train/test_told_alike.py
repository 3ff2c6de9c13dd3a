"""What two ranks under FSDP2 are told, and what is looked at between their steps."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from small_run import RandomRows
from torch import nn

from loka.core.exceptions import CheckpointRefused, LokaError
from loka.data import Dealt, SyntheticClicks
from loka.distributed import shard_dense
from loka.train import TrainConfig, evaluate, newest_step, train
from loka.train.automatic.auto import Auto
from loka.train.automatic.config import AutoConfig
from loka.train.checkpointing import sharded
from loka.zoo import build

ROWS, HELD = 256, SyntheticClicks(rows=64, first_row=256, seed=0)
CONFIG = TrainConfig(batch_size=32, precision="fp32", log_every=2)


def model(**beside):
    torch.manual_seed(0)
    built = build("dlrm", dense_features=HELD.dense_features, vocab_sizes=HELD.vocab_sizes)
    for name, module in beside.items():
        built.add_module(name, module)
    return shard_dense(built, [], device="cpu", gather_in=None)


def dealt(rank, seed=0):
    parts = [SyntheticClicks(rows=ROWS, seed=seed, shard=part, shards=2) for part in range(2)]
    return Dealt(parts, rank=rank, ranks=2)


def differing(rank):
    """What all ranks are told where rank 1 trains what rank 0 does not, by what it is."""
    rows = dealt(rank)
    columns = (*HELD.vocab_sizes[:-1], HELD.vocab_sizes[-1] - rank)
    given = {
        "model": (model(act=nn.GELU() if rank else nn.ReLU()), rows, {}),
        "rows": (model(), dealt(rank, seed=rank), {}),
        "columns": (model(), RandomRows(ROWS, dense_features=HELD.dense_features, vocab_sizes=columns), {}),
        "callback": (model(), rows, {"callback": Auto(AutoConfig(every=rank + 2))}),
    }
    found = {}
    for what, (ours, source, others) in given.items():
        with pytest.raises(LokaError, match="different configurations") as caught:
            train(ours, source, config=CONFIG, **others)
        found[what] = caught.value.why
    with mock.patch.object(torch, "__version__", "9.0" if rank else "8.0"), pytest.raises(LokaError) as caught:
        train(model(), rows, config=CONFIG)
    return {**found, "torch": caught.value.why}


def job(rank, folder):
    rows = dealt(rank)
    seen, ours = [], model()

    def look(line):
        seen.append(evaluate(ours, HELD, batch_size=32)[0])

    done = train(ours, rows, config=CONFIG, on_log=look, checkpoints=folder / "looked")
    alone = train(model(), rows, config=CONFIG)
    other = {"lr": 1e-2, "grad_clip": 0.5, "gradients": "int8"} if rank else {"seed": 3}
    with pytest.raises(LokaError, match="different configurations") as caught:
        train(model(), rows, config=replace(CONFIG, **other))
    train(model(), rows, config=replace(CONFIG, seed=rank))
    own = folder / f"of rank {rank}"
    shown = mock.patch.object(sharded, "_SHOWN", 0.2)
    with shown, pytest.raises(CheckpointRefused, match="is not one folder on all ranks") as apart:
        train(model(), rows, config=CONFIG, checkpoints=own)
    return {
        "moved": float(abs(seen[0] - seen[-1]).max()),
        "saved": newest_step(folder / "looked"),
        "alike": done.train_ne == alone.train_ne,
        "why": caught.value.why,
        "differing": differing(rank),
        "apart": (apart.value.why, [*own.glob("*")]),
    }


def late(rank, folder):
    """The folder that rank 0 makes, seen by rank 1 at its third look, as over NFS."""
    looks, is_dir = [], Path.is_dir

    def seen(path, **how):
        if path.parent != folder:
            return is_dir(path, **how)
        looks.append(path.name)
        return is_dir(path, **how) and (rank == 0 or len(looks) > 2)

    with mock.patch.object(Path, "is_dir", seen):
        folder.mkdir(exist_ok=True)
        sharded.require_one_folder(folder)
    dist.barrier()  # rank 0 has removed what it made
    return {"looks": len(looks), "left": [path.name for path in folder.iterdir()]}


def test_a_folder_that_another_machine_sees_later_is_one(tmp_path):
    assert on_ranks(late, 2, tmp_path / "shared") == [{"looks": 1, "left": []}, {"looks": 3, "left": []}]


@pytest.mark.slow
def test_evaluations_between_steps_and_other_configurations(tmp_path):
    for rank in on_ranks(job, 2, tmp_path):
        assert rank["saved"] == ROWS // 32 // 2
        assert rank["moved"] > 0
        assert rank["alike"]
        assert sorted(rank["why"]) == [
            "rank 1: grad_clip is 0.5, and None on rank 0",
            "rank 1: gradients is 'int8', and 'hp' on rank 0",
            "rank 1: lr is 0.01, and 0.001 on rank 0",
        ]
        assert [(what, line.split(" is ")[0]) for what, why in rank["differing"].items() for line in why] == [
            ("model", "rank 1: model.layout"),
            ("rows", "rank 1: source.identity"),
            ("columns", f"rank 1: columns.sparse.{len(HELD.vocab_sizes) - 1}"),
            ("callback", "rank 1: beside.auto.every"),
            ("torch", "rank 1: torch"),
        ]
        assert rank["apart"] == (("rank 1 does not see what rank 0 writes",), [])
