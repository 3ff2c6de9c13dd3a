"""Mods make another model: a user's factory gets them only where --mods says so, and commands tell of them."""

import importlib
import re
import sys

import pytest
import torch
from command_line import loka
from models import forced_plan
from torch import nn

import loka as library
from loka.cli.inputs import open_data
from loka.cli.models import MODS, takes_mods
from loka.core.records.scale import Scale
from loka.train import TrainConfig, evaluate, quality, train
from loka.train.checkpointing.checkpoint import load_one

FEW = ("--rows", 600, "--batch-size", 64)
# Without biases and norms the mods leave all keys and shapes: nothing but the layout tells the models apart.
MODEL = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, dense_features, vocab_sizes):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 4, sparse=True) for size in vocab_sizes)
        wide = dense_features + 4 * len(vocab_sizes)
        self.mlp = nn.Sequential(nn.Linear(wide, 32, bias=False), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, dense, sparse):
        rows = [table(sparse[:, column]) for column, table in enumerate(self.tables)]
        return self.mlp(torch.cat([dense, *rows], dim=1)).squeeze(1)

class Normed(Own):
    def __init__(self, dense_features, vocab_sizes):
        super().__init__(dense_features, vocab_sizes)
        wide = self.mlp[0].in_features
        self.mlp = nn.Sequential(nn.Linear(wide, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 1))
"""
TOLD, NOT_TOLD = "mods: 1 modules changed, 1 kept, by NoBias, BlockNorm, HardSwish", "modules changed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of the user's model as it is, plain/, and with mods, modded/."""
    folder = tmp_path_factory.mktemp("mods")
    (folder / "silu.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "silu", raising=False)
        plain = loka("train", "--model", "silu:Own", *FEW, "--lr", 0.01, "--checkpoints", "plain", cwd=folder)
        modded = loka("train", "--model", "silu:Own", *FEW, "--mods", "--checkpoints", "modded", cwd=folder)
        (folder / "said.txt").write_text(plain)
        assert NOT_TOLD not in plain
        assert TOLD in modded
        yield folder


def built(name="Own"):
    rows = open_data(None, rows=600, seed=0)
    torch.manual_seed(0)
    return getattr(importlib.import_module("silu"), name)(rows.train.dense_features, rows.train.vocab_sizes), rows


def saved_plan(folder, name):
    model, rows = built(name)
    with library.Probe(model, every=1, effect_samples=0) as probe:
        train(model, rows.train, config=TrainConfig(batch_size=64, max_rows=128))
    forced_plan(probe.stats(), "emulated:rowwise_e4m3").save(folder / f"{name}.json")


def test_without_an_option_the_zoo_gets_mods_and_a_factory_none():
    assert takes_mods("wukong:2gf", None)
    assert not takes_mods("silu:Own", None)
    for name in ("wukong", "silu:Own"):
        assert takes_mods(name, True)
        assert not takes_mods(name, False)


def test_what_is_trained_is_what_the_factory_builds(folder):
    """The checkpoint's keys fit the user's class either way; the number has to as well."""
    model, rows = built()
    model.load_state_dict(load_one(folder / "plain").state["model"])
    found = quality(*evaluate(model, rows.test, batch_size=64, precision="bf16"))
    said = re.search(r"held out: ne (\S+) ", (folder / "said.txt").read_text())
    assert said[1] == f"{found.ne:.5f}"


def test_a_checkpoint_of_another_model_is_refused(folder):
    own = ("--model", "silu:Own", *FEW[:2])
    saved_plan(folder, "Own")
    freeze = ("serve", "freeze", *own, "--plan", "Own.json", "--calibration-rows", 64, "--out")
    for run, as_it_was, other in (("plain", "--no-mods", "--mods"), ("modded", "--mods", "--no-mods")):
        for command in (("probe", *own, "--batch-size", 8, "--out", f"stats_{run}"), (*freeze, f"server_{run}")):
            text = loka(*command, "--checkpoint", run, other, cwd=folder, fails=2)
            assert "trained another model than this Own" in text
            assert "model.layout: " in text
            assert "its --model, and --mods or --no-mods" in text
            assert not (folder / f"server_{run}").exists()
        assert "no weight moved" in loka(
            "probe", *own, "--batch-size", 8, "--out", "stats", "--checkpoint", run, as_it_was, cwd=folder
        )
    again = loka(
        "train", *own, "--batch-size", 64, "--mods", "--lr", 0.01, "--checkpoints", "plain", cwd=folder, fails=2
    )
    assert "belongs to another run" in again
    assert "its --model, and --mods or --no-mods" in again


@pytest.mark.parametrize(("run", "asked"), [("plain", ()), ("modded", ("--mods",))])
def test_serving_takes_the_model_that_was_trained(run, asked, folder):
    saved_plan(folder, "Own")
    own = ("--model", "silu:Own", *FEW[:2], *asked)
    given = ("--plan", "Own.json", "--checkpoint", run, "--calibration-rows", 64)
    text = loka("serve", "freeze", *own, *given, "--out", f"server_of_{run}", cwd=folder)
    assert (TOLD in text) == bool(asked)
    text = loka("serve", "check", f"server_of_{run}", *own, cwd=folder)
    assert "120 rows answered, 0 of them" in text
    assert (TOLD in text) == bool(asked)


def test_a_plan_of_another_model_is_refused_before_anything_trains(folder):
    """The control of every pair had been trained by then."""
    saved_plan(folder, "Normed")
    command = ("validate", "--model", "silu:Normed", *FEW, "--arm", "naive", "--arm", "Normed.json", "--pairs", 1)
    text = loka(*command, "--mods", "--out", "refused", cwd=folder, fails=2)
    assert "PlanMismatch" in text
    assert "its --model, and --mods or --no-mods" in text
    assert "seed 0" not in text
    assert not [path for path in (folder / "refused").rglob("*") if path.is_file()]
    assert "pair 1 of 1" in loka(*command, "--segment", "none", "--out", "judged", cwd=folder, fails=4)


@pytest.mark.slow
def test_commands_tell_what_mods_changed(tmp_path):
    few = ("--model", "dlrm", *FEW)
    told = re.compile(r"^(note: )?mods: \d+ modules changed, 1 kept, by NoBias, BlockNorm, HardSwish$", re.M)
    validate = ("validate", *few, "--arm", "naive", "--pairs", 1, "--segment", "none")
    for command, status in ((("train", *few), False), (validate, 4), (("scale", "dlrm"), False)):
        assert len(told.findall(loka(*command, cwd=tmp_path, fails=status))) == 1, command
    assert not told.search(loka("train", *few, "--no-mods", cwd=tmp_path))


@pytest.mark.slow
def test_scale_tells_of_the_model_that_is_trained(folder):
    """Mods of the zoo's models are told of, and a factory's model is as it is."""

    def scaled(*arguments):
        loka("scale", *arguments, "--batch-size", 64, "--out", "scale.json", cwd=folder)
        return Scale.load(folder / "scale.json")

    assert not any(NOT_TOLD in note for note in scaled("silu:Own").notes)
    assert TOLD in scaled("silu:Own", "--mods").notes
    assert any(NOT_TOLD in note for note in scaled("dlrm").notes)
    assert not any(NOT_TOLD in note for note in scaled("dlrm", "--no-mods").notes)


def test_mods_leave_the_keys_of_this_model():
    """Else the tests above would say less than they mean."""
    scope = {}
    exec(MODEL, scope)
    before, after = (scope["Own"](3, [5]) for _ in range(2))
    library.mods.apply(after, MODS)
    assert before.state_dict().keys() == after.state_dict().keys()
    assert not any(isinstance(module, nn.SiLU) for module in after.modules())
