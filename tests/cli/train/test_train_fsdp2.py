import functools
import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import command_line
import pytest
import test_torchrun
import torch
import torch.distributed as dist
from models import as_gathered, forced_plan
from ranks import on_ranks

import loka
from loka.cli.commands import train as command
from loka.cli.inputs import open_data
from loka.distributed import choose_gather, choose_gradients, send_gradients
from loka.train import TrainConfig, run, train
from loka.train.checkpointing import saves
from loka.train.checkpointing.checkpoint import load_newest
from loka.train.steps import step as steps

POW2 = "emulated:rowwise_e4m3_pow2"
ROWS, BATCH, STEPS = 800, 64, 5  # 640 rows to train on, 64 of each rank in a step
MODEL = ("--model", "dlrm", "--device", "cpu", "--precision", "fp32", "--log-every", "1")
SHARDED = ("--batch-size", BATCH, "--dense", "fsdp2", "--plan", "plan.json", "--gather", "fp8")
HELD_OUT = re.compile(r"held out: .*")


def built(name="dlrm"):
    data = open_data(None, rows=ROWS, seed=0)
    return command.build_model(name, data.train, seed=0, with_mods=True)


def make_plan(folder):
    """Every GEMM in FP8, by the recipe whose weights can travel in FP8."""
    model, data = built(), open_data(None, rows=ROWS, seed=0)
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        train(model, data.train, config=TrainConfig(batch_size=BATCH, max_rows=2 * BATCH, precision="fp32"))
    plan = forced_plan(probe.stats(), POW2, budget=loka.Budget(min_sqnr_db=None))
    plan.save(folder / "plan.json")
    return plan


def adding(losses):
    return lambda line: losses.append(line.reading.lifetime.logloss * line.rows)


def logged(folder, *arguments, fails=False):
    """What the command says, and the sum of the losses of this rank's rows after each step."""
    losses, rows = [], () if "--data" in arguments else ("--rows", ROWS)
    if dist.is_initialized():
        dist.barrier()
    with mock.patch.object(command, "show_log", adding(losses)):
        said = command_line.loka("train", *MODEL, *rows, *arguments, cwd=folder, fails=fails)
    return {"said": said, "losses": losses}


@dataclass(frozen=True)
class Job:
    folder: Path

    def __call__(self, rank, _):
        kept = ("--checkpoints", "kept", "--checkpoint-every", "2")
        refused = {
            "engine": ("--dense", "fsdp1"),
            "ddp": ("--gather", "fp8", "--plan", "plan.json"),
            "unplanned": ("--dense", "fsdp2", "--gather", "fp8"),
            "of tables": ("--gradients", "int8"),
        }
        found = {
            name: logged(self.folder, "--batch-size", BATCH, *options, fails=True)["said"]
            for name, options in refused.items()
        }
        found["of one"] = logged(self.folder, "--batch-size", BATCH, "--checkpoints", "alone", fails=True)["said"]
        found["trained"] = logged(self.folder, *SHARDED, *kept)
        found["goes on"] = logged(self.folder, *SHARDED, *kept)
        found |= {f"chosen {name}": said for name, said in self.chosen(rank).items()}
        found["half a step"] = logged(self.folder, "--batch-size", 32, *SHARDED[2:], *kept, fails=True)["said"]
        return found

    def chosen(self, rank):
        """Gathers in FP8, gradients in torch's own way, as the clock says; on from a checkpoint; and as if
        four ranks had chosen units, and two a codec."""
        fp8, asked = 10.0 + rank, 0
        sent = []

        def timer(ways, device):
            nonlocal asked
            asked += 1
            times = {"fp8": fp8, "hp": 15.0, "int8": 1.0, "e4m3": 20.0}
            return {name: [1.0 if len(ways) == 1 else times[name]] * 11 for name in ways}

        def elsewhere(*arguments, **options):
            found = load_newest(*arguments, **options)
            gather = (4, *found.state["choices"]["gather"][1:])
            choices = {"gather": gather, "gradients": (2, ("e4m3",), "held")}
            return replace(found, state={**found.state, "choices": choices})

        def send(model, wire):
            sent.append(f"{wire.scatter} {wire.gather}")
            send_gradients(model, wire)

        options = (*SHARDED[:-1], "auto", "--gradients", "auto", "--checkpoints", "chosen")
        with ExitStack() as held:
            for name, choose in (("choose_gather", choose_gather), ("choose_gradients", choose_gradients)):
                timed = functools.partial(choose, timer=timer)
                held.enter_context(mock.patch.object(run, name, timed))
            held.enter_context(mock.patch.object(run, "send_gradients", send))
            said = {"sent": sent}
            for name in ("began", "goes on", "elsewhere"):
                if name != "began":
                    dist.barrier()
                    if rank == 0:
                        shutil.rmtree(self.folder / "chosen" / f"step-{STEPS:08d}")
                    fp8 = 20.0 - rank
                if name == "elsewhere":
                    held.enter_context(mock.patch.object(saves, "load_newest", elsewhere))
                said[name] = logged(self.folder, *options, "--checkpoint-every", "2")
                said[f"asked {name}"] = asked
        return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp2")


@pytest.fixture(scope="module")
def plan(folder):
    return make_plan(folder)


@pytest.fixture(scope="module")
def two(folder, plan):
    logged(folder, "--batch-size", 2 * BATCH, "--checkpoints", "alone")
    return on_ranks(Job(folder), 2, folder)


def alone(plan, names):
    """Sums of losses of one process that takes the ranks' rows one after the other, with weights as they are
    gathered; the masters get the mean gradients."""
    real = steps._backward

    def backward(model, *arguments):
        with as_gathered(model, names):
            return real(model, *arguments)

    losses = []
    rows = open_data(None, rows=ROWS, seed=0, parts=2).train
    config = TrainConfig(batch_size=2 * BATCH, accumulate=2, precision="fp32", log_every=1)
    with mock.patch.object(steps, "_backward", backward):
        train(built(), rows, config=config, plan=plan, on_log=adding(losses))
    return losses


def test_two_ranks_train_what_one_process_does(two, plan):
    told = two[0]["trained"]["said"]
    names = set(re.findall(r"^(\S+\.weight) .* FP8 *$", told, re.MULTILINE))
    assert {f"{site.rpartition('/')[0]}.weight" for site in plan.decisions} == names
    assert len(names) > 4
    expected = alone(plan, names)
    found = [sum(each) for each in zip(*(rank["trained"]["losses"] for rank in two), strict=True)]
    assert len(found) == len(expected) == STEPS
    # On two ranks gradients are sums of two numbers, which have one order; losses are added in float64.
    assert found == pytest.approx(expected, rel=1e-12)


def test_it_goes_on_by_its_plan_and_judges_all_held_out_rows(two):
    first, second = two
    assert f"continued from step {STEPS}" in first["goes on"]["said"]
    assert "(160 rows" in held_out(first["trained"]["said"])
    assert held_out(first["goes on"]["said"]) == held_out(first["trained"]["said"])
    # torch 2.11 warns of sparse gradients whatever is said of their invariants.
    assert not second["trained"]["said"] or torch.__version__ < "2.13"


def test_other_ranks_go_on_with_as_many_rows_in_a_step(two, folder):
    for rank in two:
        assert "config.batch_size: 128 in the checkpoint, 64 now" in rank["half a step"]
    shutil.copytree(folder / "kept", folder / "one")
    for newest in (folder / "one").glob(f"step-{STEPS:08d}"):
        shutil.rmtree(newest)
    alone = logged(folder, "--batch-size", 2 * BATCH, "--checkpoints", "one")
    assert "by the plan in" in alone["said"]
    assert "continued from step 4" in alone["said"]
    assert "train: 5 steps" in alone["said"]
    few = logged(folder, "--batch-size", BATCH, "--checkpoints", "one", fails=True)["said"]
    assert "config.batch_size: 128 in the checkpoint, 64 now" in few


def test_one_process_probes_the_model_of_all_ranks(two, folder):
    common = ("--model", "dlrm", "--rows", ROWS, "--batch-size", 32, "--device", "cpu")
    said = command_line.loka("probe", *common, "--checkpoint", "kept", cwd=folder)
    assert f"step-{STEPS:08d}, after {STEPS} steps" in said


def test_what_ranks_choose_is_held(two):
    """Looking at gradients and timing steps trains nothing: losses are those of --gather fp8, bit for bit."""
    for rank in two:
        began, asked = rank["chosen began"], rank["chosen asked began"]
        assert began["losses"] == rank["trained"]["losses"]
        assert rank["chosen goes on"]["losses"] == began["losses"][-1:]
        assert rank["chosen asked goes on"] == asked
        assert rank["chosen asked elsewhere"] == 2 * asked - 1, "the codec is held"
        assert rank["chosen sent"] == ["e4m3 e4m3"]
    said = {name: two[0][f"chosen {name}"]["said"] for name in ("began", "goes on", "elsewhere")}
    assert "top.0.weight        -  - " in said["began"], "INT8, the fastest by this clock, is not admitted"
    for name in ("began", "goes on"):
        assert said[name].count("1.364 [1.364, 1.364]  FP8") == 2  # 15 over the 11 of the slower rank
        assert "gradients travel as torch sends them" in said[name]
        assert "chosen anew" not in said[name]
    assert "run without CUDA graphs" in said["began"]
    assert said["elsewhere"].count("chosen anew: the run began on 4 ranks") == 1
    assert said["elsewhere"].count("its unit is not faster so") > 2
    assert "gradients of tables of the model are sparse" in two[0]["of tables"]


def test_what_cannot_be_is_refused(two, folder):
    for rank in two:
        assert "is of one process, and 2 ranks are here" in rank["of one"]
        assert "one of ddp, fsdp2" in rank["engine"]
        assert "add --dense fsdp2" in rank["ddp"]
        assert "add --plan or --auto" in rank["unplanned"]
    for option in (("--dense", "fsdp2"), ("--gradients", "int8")):
        assert "torchrun --nproc-per-node" in logged(folder, *option, fails=True)["said"]


@pytest.mark.slow
def test_a_rank_of_four_dies_and_two_go_on(tmp_path):
    (tmp_path / "dying.py").write_text(test_torchrun.DYING)
    arguments = ("train", "--rows", 3200, "--device", "cpu", "--dense", "fsdp2", "--checkpoints", "kept")
    arguments = (*arguments, "--checkpoint-every", 3)
    died = test_torchrun.torchrun(tmp_path, *arguments, "--model", "dying:made", "--batch-size", 32, ranks=4)
    assert died.returncode != 0
    assert "the eighth batch is one too many" in died.stderr
    assert not HELD_OUT.search(died.stdout)
    done = test_torchrun.torchrun(tmp_path, *arguments, "--model", "dlrm", "--no-mods", "--batch-size", 64)
    assert done.returncode == 0, done.stderr
    assert "continued from step 6" in done.stdout
    assert "train: 20 steps" in done.stdout
    assert len(HELD_OUT.findall(done.stdout)) == 1


AUTO = ("--auto", "--probe-every", 2, "--probe-steps", 3, "--candidate", POW2, "--no-cache")


def automatic(rank, folder):
    found = {}
    for dense in ("ddp", "fsdp2"):
        options = ("--batch-size", BATCH, "--dense", dense, *AUTO, "--out", dense)
        said = logged(folder, *options)
        stats = loka.Stats.load(folder / dense / "stats")
        found[dense] = {
            "losses": said["losses"],
            "effects": {path: str(layer.effects) for path, layer in stats.layers.items()},
            "plan": loka.Plan.load(folder / dense / "plan.json").to_json(),
        }
    options = ("--batch-size", BATCH, "--dense", "fsdp2", "--gather", "fp8", *AUTO, "--min-sqnr-db", 0)
    found["gathered"] = logged(folder, *options, "--out", "eight")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder / "eight" / "checkpoints" / f"step-{STEPS:08d}")
    found["again"] = logged(folder, *options, "--out", "eight")
    return found


@pytest.mark.slow
def test_from_bf16_to_fp8_as_under_ddp(tmp_path):
    """The same effects on KL/H, bit for bit: sampled steps see whole weights. And so the same plan."""
    for found in on_ranks(automatic, 2, tmp_path):
        ddp, fsdp2 = found["ddp"], found["fsdp2"]
        assert fsdp2["effects"] == ddp["effects"]
        assert all("count" in effects for effects in ddp["effects"].values())
        sites = [{n: d["candidate"] for n, d in one["plan"]["decisions"].items()} for one in (ddp, fsdp2)]
        assert sites[0] == sites[1]
        assert fsdp2["losses"] == pytest.approx(ddp["losses"], rel=1e-6)
        assert found["again"]["losses"] == found["gathered"]["losses"][-len(found["again"]["losses"]) :]
        assert len(found["again"]["losses"]) == STEPS - 4


def held_out(text):
    (line,) = HELD_OUT.findall(text)
    return line


@pytest.mark.slow
@pytest.mark.parametrize("step", ["eager", "compile"])
def test_by_torchrun_in_bf16(tmp_path, step):
    arguments = ("--model", "dcnv2", "--rows", ROWS, "--batch-size", BATCH, "--device", "cpu", "--step", step)
    done = test_torchrun.torchrun(tmp_path, "train", *arguments, "--dense", "fsdp2")
    assert done.returncode == 0, done.stderr
    assert len(HELD_OUT.findall(done.stdout)) == 1
    assert "did not run as" not in done.stdout
    assert "UserWarning: FSDP2" not in done.stderr
