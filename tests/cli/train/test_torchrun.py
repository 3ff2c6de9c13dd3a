import os
import re
import subprocess
import sys
from unittest import mock

import command_line
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

from loka.cli.commands import train as train_command
from loka.cli.commands.train import without_graphs
from loka.cli.inputs import open_data
from loka.core.exceptions import DataRefused, LokaError
from loka.train import TrainConfig

SMALL = ("train", "--model", "dlrm", "--rows", "4000", "--batch-size", "64", "--device", "cpu")
AUTO = ("--auto", "--probe-every", "4", "--probe-steps", "9", "--candidate", "emulated:rowwise_e4m3", "--no-cache")
HELD_OUT = re.compile(r"held out: .*\(800 rows.*")


def loka(folder, *arguments, fails=False):
    dist.barrier()
    return command_line.loka(*SMALL, *arguments, cwd=folder, fails=fails)


def trained(rank, folder):
    kept = ("--checkpoints", "kept", "--checkpoint-every", "10")
    said = {"trained": loka(folder, *kept), "goes on": loka(folder, *kept)}
    # Its lines come at other steps than another's, so they would wait for each other.
    said["apart"] = loka(folder, *(("--log-every", "3", "--plan", "one.json") if rank else ()), fails=True)
    with mock.patch.object(train_command, "_saved_plan", return_value=None if rank else "a plan"):
        said["planned"] = loka(folder, fails=True)
    said["differs"] = loka(folder, "--model", "test_torchrun:Differing", fails=True)
    if rank == 0:
        said["breaks"] = loka(folder, "--model", "test_torchrun:Breaking", fails=True)
    else:
        with pytest.raises(RuntimeError, match="no memory for it"):
            loka(folder, "--model", "test_torchrun:Breaking", fails=True)
    said["average"] = loka(folder, "--average", "tail", fails=True)
    said["unused"] = loka(folder, "--model", "test_torchrun:Unused", fails=True)
    for own in ("Scaled", "Tied"):
        said[own] = loka(folder, "--model", f"test_torchrun:{own}", "--dense", "fsdp2", fails=True)
    return said


class Own(nn.Module):
    def __init__(self, dense_features, vocab_sizes):
        super().__init__()
        self.first, self.second, self.logit = nn.Linear(dense_features, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, dense, sparse):
        return self.logit(torch.relu(self.second(torch.relu(self.first(dense))))).squeeze(1)


class Differing(Own):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.second = nn.Linear(16, 16, bias=dist.get_rank() == 0)


class Breaking(Own):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        if dist.get_rank() == 1:
            raise RuntimeError("no memory for it")


class Unused(Own):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.extra = nn.Linear(16, 8)


class Scaled(Own):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, dense, sparse):
        return super().forward(dense, sparse) * self.temperature


class Tied(Own):
    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
        self.towers[1][0].weight = self.towers[0][0].weight

    def forward(self, dense, sparse):
        return self.logit(self.towers[1](self.towers[0](torch.relu(self.first(dense))))).squeeze(1)


def planned(rank, folder):
    said = {"auto": loka(folder, *AUTO, "--out", "runs"), "again": loka(folder, *AUTO, "--out", "runs")}
    said["by plan"] = loka(folder, "--plan", "runs/plan.json", "--checkpoints", "kept")
    said["goes on"] = loka(folder, "--checkpoints", "kept")
    return said


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(trained, 2, tmp_path_factory.mktemp("torchrun"))


def held_out(text):
    (line,) = HELD_OUT.findall(text)
    return line


@pytest.mark.slow
def test_what_engines_do_not_take_is_told_by_name(two):
    for said in two:
        assert re.search(r"(?s)no gradient in a step.*\n  extra.weight\n  extra.bias\n.*--dense fsdp2", said["unused"])
        assert "temperature is a scalar" in said["Scaled"]
        assert re.search(r"\d\.0\.weight and towers\.1\.0\.weight are one weight", said["Tied"])
        assert all("--dense ddp" in said[own] for own in ("Scaled", "Tied"))


def test_rank_0_speaks_and_judges_all_held_out_rows(two):
    first, second = two
    assert "train: 25 steps" in first["trained"]  # 3,200 rows to train on, 64 of each rank in a step
    assert "continued from step 25" in first["goes on"]
    assert held_out(first["trained"]) == held_out(first["goes on"])
    assert not second["trained"]
    assert not second["goes on"]


def test_ranks_that_differ_all_stop(two):
    for said in two:
        assert "rank 1: --plan is 'a path', and None on rank 0" in said["apart"]
        assert "rank 1: --log-every is 3, and 100 on rank 0" in said["apart"]
        assert "some ranks have a plan, and others have none\n  rank 0: a plan\n  rank 1: no plan" in said["planned"]
        assert "rank 1: model.layout is" in said["differs"]
        assert "--average works in one process only" in said["average"]


def test_where_one_rank_cannot_begin_the_other_says_which(two):
    assert "RankFailed: " in two[0]["breaks"]
    assert "rank 1: RuntimeError: no memory for it" in two[0]["breaks"]


def test_an_error_says_of_which_rank_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command_line.loka("plan", "none.json", cwd=tmp_path, fails=True).startswith("rank 1: ")


def test_each_rank_reads_its_own_rows_and_all_hold_out_the_same(tmp_path):
    """101 rows of a folder, 81 to train on: one is left out, and the account says so."""
    dense = np.arange(101, dtype=np.float32).repeat(13).reshape(101, 13)
    np.save(tmp_path / "day_0_dense.npy", dense)
    np.save(tmp_path / "day_0_sparse.npy", np.zeros((101, 26), np.int32))
    np.save(tmp_path / "day_0_labels.npy", np.arange(101, dtype=np.int32)[:, None] % 2)
    whole = open_data(tmp_path, rows=0, seed=0)
    parts = [open_data(tmp_path, rows=0, seed=0, part=(rank, 2)) for rank in range(2)]
    assert read(whole.train) == list(range(81))
    assert [row for part in parts for row in read(part.train)] == list(range(80))
    assert all(read(part.test) == read(whole.test) == list(range(81, 101)) for part in parts)
    assert "1 rows left out of each epoch" in "\n".join(parts[0].account())
    world = [open_data(None, rows=101, seed=0, part=(rank, 2)).train.rows for rank in range(2)]
    assert world == [40, 40]
    (tmp_path / "rows.csv").write_text("label,i1\n")
    with pytest.raises(LokaError, match="loka data convert"):
        open_data(tmp_path / "rows.csv", rows=0, seed=0, part=(1, 2))


def read(source):
    return [int(value) for batch in source.batches(7) for value in batch.dense[:, 0]]


def test_steps_that_replay_nothing_are_said():
    whole, parts = (TrainConfig(batch_size=64, step="graph", accumulate=parts) for parts in (1, 2))
    assert without_graphs("ddp", whole) is None
    assert "with --step graph and without --accumulate what is compiled replays" in without_graphs("ddp", parts)
    assert "replays" not in without_graphs("fsdp2", whole)


@pytest.mark.slow
def test_from_bf16_to_fp8_and_by_that_plan(tmp_path):
    first, second = on_ranks(planned, 2, tmp_path)
    assert "sites in FP8" in first["auto"]
    assert "continued from step 25" in first["again"]
    assert held_out(first["again"]) == held_out(first["auto"])
    assert "ran 25 x " in first["by plan"]
    assert "with --step graph what is compiled replays graphs" in " ".join(first["by plan"].split())
    assert "by the plan in" in first["goes on"]
    assert held_out(first["goes on"]) == held_out(first["by plan"])
    assert not any(second.values())


def test_other_commands_are_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in (("validate", "--arm", "plan.json"), ("probe",), ("demo",)):
        said = command_line.loka(*command, cwd=tmp_path, fails=True)
        assert f"loka {command[0]} runs in one process only" in said


def torchrun(folder, *arguments, ranks=2):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "loka",
    ]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_by_torchrun(tmp_path):
    done = torchrun(tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    assert len(HELD_OUT.findall(done.stdout)) == 1


DYING = """
import os
from loka.zoo import build

def made(**sides):
    model = build("dlrm", **sides)
    model.register_forward_hook(died)
    return model

def died(module, args, output):
    module.calls = getattr(module, "calls", 0) + 1
    if os.environ["RANK"] == "1" and module.calls == 8:
        raise RuntimeError("the eighth batch is one too many")
"""


@pytest.mark.slow
def test_a_rank_that_dies_ends_all_with_its_message(tmp_path):
    (tmp_path / "dying.py").write_text(DYING)
    done = torchrun(tmp_path, *SMALL[:1], "--model", "dying:made", *SMALL[3:])
    assert done.returncode != 0
    assert "the eighth batch is one too many" in done.stderr
    assert not HELD_OUT.search(done.stdout)


def test_a_path_of_nothing_is_no_table_that_one_rank_reads(tmp_path):
    with pytest.raises(DataRefused, match="nowhere: cannot be opened"):
        open_data(tmp_path / "nowhere", rows=0, seed=0, part=(1, 2))
