"""Runs of four ranks that are killed go on: on four bit for bit, on two and on one from the same numbers.

Over gloo, under FSDP2 with FP8 gathers and under DistributedDataParallel.
"""

import errno
import io
import json
import os
import pickle
import shutil
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fp8_run import digest, tower
from ranks import on_ranks
from resharded_runs import EVERY, PARTS, ROWS, SAVED, STEPS, die_at, ended, pow2_plan, run
from sweeps import sweep
from test_checkpoint import Payload
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from loka.core.exceptions import CheckpointRefused
from loka.core.records.plan import Plan
from loka.train import load_newest
from loka.train.checkpointing import sharded
from loka.train.checkpointing.checkpoint import load_one

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@dataclass(frozen=True)
class Straight:
    plan: Plan
    engine: str
    killed: tuple[Path, ...]

    def __call__(self, rank, folder):
        seen = run(folder / "straight", self.plan, self.engine)
        found = {"straight": ended(seen), "gathering": str(seen.result.gathering)}
        for path in self.killed:
            seen = run(path, self.plan, self.engine)
            found[path.name] = {"state": seen.state, "end": ended(seen)}
        return found


@dataclass(frozen=True)
class Killed:
    plan: Plan
    engine: str
    saving: bool = False

    def __call__(self, rank, folder):
        if not self.saving:
            run(folder / "run", self.plan, self.engine, on_step=die_at(SAVED + 1, rank=2))
            return {}
        real = sharded.write_state

        def write_state(file, state):
            if rank == 2 and f"{SAVED + EVERY:08d}" in str(file):
                file.write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            real(file, state)

        sharded.write_state = write_state
        run(folder / "run", self.plan, self.engine)
        return {}


@dataclass(frozen=True)
class Resumed:
    plan: Plan
    engine: str
    path: Path

    def __call__(self, rank, folder):
        seen = run(self.path, self.plan, self.engine)
        return {"state": seen.state, "end": ended(seen)}


@pytest.fixture(scope="module")
def plan():
    return pow2_plan()


@pytest.fixture(scope="module", params=sweep(["fsdp2", "ddp"], []))
def runs(request, plan, tmp_path_factory):
    engine, folder = request.param, tmp_path_factory.mktemp("runs")
    for name, saving in (("stepping", False), ("saving", True)):
        (folder / name).mkdir()
        if saving:
            shutil.copytree(folder / "stepping-as-left", folder / name / "run")
        with pytest.raises(AssertionError, match="exit code -9"):
            on_ranks(Killed(plan, engine, saving), PARTS, folder / name)
        shutil.copytree(folder / name / "run", folder / f"{name}-as-left")
        (folder / name / "run").rename(folder / f"{name}-four")
    left = folder / "stepping-as-left"
    for where in ("two", "one"):
        shutil.copytree(left, folder / where)
    (folder / "meet").mkdir()
    (folder / "meet-two").mkdir()
    four = on_ranks(Straight(plan, engine, (folder / "stepping-four", folder / "saving-four")), PARTS, folder / "meet")
    two = on_ranks(Resumed(plan, engine, folder / "two"), 2, folder / "meet-two")
    one = Resumed(plan, engine, folder / "one")(0, folder)
    return {"engine": engine, "left": left, "folder": folder, "four": four, "two": two, "one": one}


def as_saved(path, folder):
    """Tensors by name as torch itself reads them."""
    dcp_to_torch_save(path, folder / "whole.pt")
    return {name: digest(value) for name, value in torch.load(folder / "whole.pt").items()}


def test_as_many_ranks_go_on_bit_for_bit(runs):
    for found in runs["four"]:
        straight = found["straight"]
        assert straight.pop("resumed") is None
        for name in ("stepping-four", "saving-four"):
            end = found[name]["end"]
            skipped = end.pop("skipped")
            assert end.pop("resumed") == SAVED
            assert end == {k: v for k, v in straight.items() if k != "skipped"}
            assert any("its save was interrupted" in line for line in skipped) == (name == "saving-four")
    assert len({json.dumps(found["straight"]["weights"]) for found in runs["four"]}) == 1
    if runs["engine"] == "fsdp2":
        assert len({found["straight"]["own"] for found in runs["four"]}) > 1, "buffers are of a rank's rows"


@pytest.mark.parametrize("ranks", ["two", "one"])
def test_other_ranks_go_on_from_the_same_numbers(runs, ranks):
    """Weights and optimizer state bit for bit, and in the end as many rows as four ranks train on."""
    step = runs["left"] / f"step-{SAVED:08d}"
    saved = as_saved(step, runs["folder"])
    assert {name.partition("/")[0] for name in saved} == {"average", "model", "optimizers"}
    assert {"optimizers/dense/mlp.0.weight/exp_avg", "optimizers/sparse/table.weight/sum"} <= saved.keys()
    every = runs[ranks] if ranks == "two" else [runs[ranks]]
    for found in every:
        assert found["state"] == saved
        assert found["end"]["resumed"] == SAVED
    straight = [found["straight"] for found in runs["four"]]
    assert sum(found["end"]["rows"] for found in every) == sum(found["rows"] for found in straight)


def test_fp8_weights_travel_in_bytes(runs):
    told = runs["four"][0]["gathering"]
    assert ("mlp.0.weight" in told) == (runs["engine"] == "fsdp2")


def test_one_process_reads_the_whole_model(runs):
    """As `loka serve` and `loka probe` do."""
    found = load_one(runs["left"])
    model = tower(seed=3)
    model.load_state_dict(found.state["model"])
    saved = as_saved(found.path, runs["folder"])
    assert {f"model/{name}": digest(weight.detach()) for name, weight in model.named_parameters()} == {
        name: value for name, value in saved.items() if name.startswith("model/")
    }
    assert found.state["running"]["rows"] == SAVED * ROWS
    assert not found.sharded


def damaged(runs, tmp_path, name):
    path = tmp_path / "run"
    shutil.copytree(runs["left"], path)
    file = path / f"step-{SAVED:08d}" / name
    file.write_bytes(file.read_bytes()[:-50])
    return path


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp", "rank-3.pt", "manifest.json"])
def test_the_one_before_a_damaged_one_is_used(runs, tmp_path, name):
    reason = "it is not complete JSON" if name == "manifest.json" else f"the checksum of {name} differs"
    found = load_newest(damaged(runs, tmp_path, name))
    assert found.step == SAVED - EVERY
    assert f"step-{SAVED:08d}: {reason}" in found.skipped[0]


def test_code_in_metadata_is_not_run(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(Exception, match="code from a checkpoint is not run"):
        sharded._metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_metadata_of_dcp_loads(tmp_path):
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(2, 2, dtype=torch.int64)}
    dcp.save(tensors, checkpoint_id=tmp_path, no_dist=True)
    found = sharded._metadata(tmp_path).state_dict_metadata
    assert {name: found[name].size for name in found} == {n: t.shape for n, t in tensors.items()}


@pytest.mark.parametrize(("kind", "refused"), [("TORCH_STRIDED", True), ("TORCH_CONTIGUOUS_FORMAT", False)])
def test_members_of_enums_are_read_as_older_pythons_write_them(tmp_path, kind, refused):
    where = "torch.Size" if refused else "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"
    module, _, name = where.rpartition(".")
    asked = f"cbuiltins\ngetattr\n(c{module}\n{name}\nS'{kind}'\ntR.".encode()
    unpickler = sharded._Metadata(io.BytesIO(asked))
    if refused:
        with pytest.raises(pickle.UnpicklingError, match="is no enum"):
            unpickler.load()
    else:
        assert unpickler.load().name == kind


def with_a_full_disk(rank, folder):
    real = sharded.write_state

    def write_state(file, state):
        if rank == 1 and f"{EVERY:08d}" in str(file):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, state)

    sharded.write_state = write_state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = run(folder / "run", None, "ddp")
    dist.barrier()
    return {"unsaved": seen.result.unsaved, "left": sorted(path.name for path in (folder / "run").iterdir())}


def test_a_full_disk_of_one_rank_is_told_by_all_and_costs_no_step(tmp_path):
    first, second = on_ranks(with_a_full_disk, 2, tmp_path)
    for found in (first, second):
        (line,) = found["unsaved"]
        assert f"cannot save {tmp_path / 'run'}/step-{EVERY:08d}" in line
        assert "No space left on device" in line
        assert found["left"] == [f"step-{STEPS - 1:08d}", f"step-{STEPS:08d}"]
    assert "rank 1: " in first["unsaved"][0]


IDENTITY = {"config": {"batch_size": 64}, "source": {"identity": "a", "rows": 128, "parts": 4}}


@pytest.mark.parametrize(
    ("identities", "steps", "says"),
    [
        ([{**IDENTITY, "source": {"rank": rank}} for rank in range(4)], 2, "rows of its own, which nobody can"),
        ([IDENTITY] * 4, 3, "a run of 3 steps, and 1 ranks would take 2"),
        ([{**IDENTITY, "config": {"batch_size": 32}}] * 4, 2, "batch_size: 32 in the checkpoint, 64 now"),
    ],
)
def test_what_other_ranks_cannot_go_on_with_is_refused(tmp_path, identities, steps, says):
    manifest = sharded.Manifest(3, steps, 4, {}, tuple(identities))
    with pytest.raises(CheckpointRefused, match=says):
        sharded.require_same_run(tmp_path, manifest, IDENTITY, steps=2)
    alike = sharded.Manifest(3, 2, 4, {}, (IDENTITY,) * 4)
    sharded.require_same_run(tmp_path, alike, IDENTITY, steps=2)


def test_folders_of_ranks_are_refused(tmp_path):
    (tmp_path / "rank-1" / "step-00000003").mkdir(parents=True)
    with pytest.raises(CheckpointRefused, match=r"(?s)folder of checkpoints for each rank.*version that began it"):
        load_newest(tmp_path)
