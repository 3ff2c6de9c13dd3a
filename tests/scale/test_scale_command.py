import pytest
import torch
from command_line import loka as run
from networks import EXAMPLE, with_module
from torch import nn

import loka
from loka.core.exceptions import LokaError, UnknownName
from loka.core.records.scale import Scale
from loka.scaling.inputs import fake_mode

MODELS = """
import torch
from torch import nn

def tower(rows, width=2048):
    layers = [nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)]
    return nn.Sequential(*layers), torch.randn(rows, 512)

def build():
    return tower(4)

def sized(batch_size):
    assert batch_size != 4
    return tower(batch_size)

def stuck(batch_size):
    return tower(2048)

def model():
    return tower(4)[0]

def batch():
    return tower(4)[1]

def numbers():  # refuses to be built without numbers
    made = tower(4)
    assert made[1].sum().item() == made[1].sum().item()
    return made

def clicks(dense_features, vocab_sizes):
    class Clicks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(dense_features, 64)
        def forward(self, dense, sparse):
            return self.layer(dense)[:, 0]
    return Clicks()

def broken():
    raise RuntimeError("no such table")

def nothing():
    return 3

def without_sites():
    return nn.Sequential(nn.ReLU(), nn.LayerNorm(8)), torch.randn(4, 8)
"""


@pytest.fixture
def folder(tmp_path):
    yield from with_module(tmp_path, "my_scaled_models", MODELS)


def tower():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1))


def test_the_function_answers_in_words():
    found = loka.scale(tower(), torch.randn(4, 512), gpu="H200", batch_size=8192)
    counts = found.counts()
    assert sum(counts.values()) == 2 + 3 + 3  # the first layer's input wants no gradient
    assert counts["yes"] + counts["perhaps"] == 3
    assert counts["unknown"] == 0
    speedup = found.speedup
    assert 1 <= speedup.low < speedup.value < speedup.high
    text = str(found)
    assert "8192x2048x2048" in text
    assert "interpolated" in text
    assert f"{speedup.value:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}]" in found.verdict()
    assert f"of {sum(counts.values())} sites" in found.verdict()
    for told in ("no promise", "embeddings", "prediction layer", "float32", "taken to have 8192", "NVIDIA H200"):
        assert told in text, told


def test_total_is_that_of_all_layers_at_once():
    found = loka.scale(tower(), torch.randn(4, 512), batch_size=8192)
    left = sum(layer.bf16.value / layer.speedup.low for layer in found.known if layer.speedup)
    low = found.bf16.value / left
    assert found.speedup.low == pytest.approx(low)
    assert found.bf16.value == pytest.approx(
        sum(s.bf16.value for x in found.layers for s in x.gemms.values() if s.bf16)
    )


def test_torch_alone_is_never_taken_for_faster_where_both_were_measured():
    model = nn.Sequential(nn.Linear(2048, 5120), nn.Linear(5120, 2048)).bfloat16()
    x = torch.randn(4, 2048, dtype=torch.bfloat16).requires_grad_()
    every, torchs = (loka.scale(model, x, batch_size=6144, kernels=kernels) for kernels in ("all", "torch"))
    assert every.layers[0].origin == torchs.layers[0].origin == "measured"
    assert torchs.layers[0].speedup.value <= every.layers[0].speedup.value * 1.01


def test_a_model_that_nobody_knows_the_shapes_of():
    found = loka.scale(tower(), torch.randn(4, 512), batch_size=16)
    assert found.speedup is None
    assert found.unknown_share == 1
    assert "is not known" in found.verdict()
    assert "loka measure" in found.verdict()
    assert "x [" not in str(found).split("For reference")[0]  # not a single speed-up


def test_part_of_the_sites_unknown_is_said():
    with fake_mode():
        model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 400_000))
    found = loka.scale(model, torch.randn(4, 2048), batch_size=8192)
    assert 0.9 < found.unknown_share < 1
    assert "of unknown time and not in it" in found.verdict()
    assert "2 interpolated, 3 unknown" in found.verdict()


def test_weights_that_nobody_measured_are_told():
    found = loka.scale(tower().half(), torch.randn(4, 512).half(), batch_size=8192)
    assert any("weights are in float16, and taken to be as fast as" in note for note in found.notes)


def test_saving_and_loading(tmp_path):
    found = loka.scale(tower(), torch.randn(4, 512), batch_size=8192)
    found.save(tmp_path / "scale.json")
    assert Scale.load(tmp_path / "scale.json") == found


def test_the_command_on_a_model_of_ones_own(folder):
    text = run("scale", "my_scaled_models:build", "--out", "scale.json", cwd=folder)
    saved = Scale.load(folder / "scale.json")
    assert saved.batch_size == 8192
    assert saved.verdict() in text
    assert "what checkpoints of activations compute again" in text
    for arguments in (
        ("my_scaled_models:sized",),
        ("my_scaled_models:numbers",),
        ("my_scaled_models:model", "--inputs", "my_scaled_models:batch"),
    ):
        run("scale", *arguments, "--out", "other.json", cwd=folder)
        other = Scale.load(folder / "other.json")
        assert (other.layers, other.batch_size) == (saved.layers, 8192), arguments


def test_a_batch_that_has_other_rows_than_it_was_made_with_is_told(folder):
    told = "made with batch_size=8192, and its first tensor has 2048 rows"
    assert told in run("scale", "my_scaled_models:stuck", cwd=folder)
    tables = ("--network", EXAMPLE, "--table", "4x1000x64")
    assert told in run("scale", "my_scaled_models:stuck", *tables, cwd=folder, fails=2)


def test_the_command_on_factories_and_the_zoo(folder):
    assert "8192x64x13" in run("scale", "my_scaled_models:clicks", cwd=folder)
    text = run("scale", "dcnv2:mlperf", "--batch-size", 2048, "--out", "zoo.json", cwd=folder)
    saved = Scale.load(folder / "zoo.json")
    assert saved.model == "DCNv2"
    assert "cross.0.v and 2 alike" in text
    assert {layer.rows for layer in saved.layers} == {2048}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("my_scaled_models:build", "--gpu", "b200"), ("one of h200", "loka bench gemm", "loka measure")),
        (("my_scaled_models:build", "--batch-size", "0"), ("a step of 0 rows", "8192")),
        (("my_scaled_models:build", "--kernels", "mine"), ("all, torch",)),
        (("my_scaled_models:none",), ("cannot find", "(model, batch)")),
        (("no_such_module:build",), ("cannot find", "no_such_module")),
        (("wukongs",), ("no model is called", "wukong:2gf")),
        (("wukong:99gf",), ("no size",)),
        (("my_scaled_models:broken",), ("cannot build", "no such table", "(model, batch)")),
        (("my_scaled_models:nothing",), ("returned a int", "(model, batch)")),
        (("my_scaled_models:model",), ("returned a Sequential", "--inputs")),
        (("my_scaled_models:without_sites",), ("has no sites", "nn.Linear")),
        (("my_scaled_models:build", "--data", "/no.csv", "--schema", "/no.json"), ("--data, --schema", "brings its")),
        (("wukong:small", "--inputs", "my_scaled_models:batch"), ("--inputs with wukong:small", "rows of --data")),
    ],
)
def test_errors_name_the_way_out(folder, arguments, told):
    text = run("scale", *arguments, cwd=folder, fails=2)
    assert "Traceback" not in text
    assert "Way out" in text
    for part in told:
        assert part in text, text


def test_errors_of_the_function():
    x = torch.randn(4, 512)
    with pytest.raises(UnknownName, match="one of h200"):
        loka.scale(tower(), x, gpu="mi300")
    with pytest.raises(UnknownName, match="all, torch"):
        loka.scale(tower(), x, kernels="fastest")
    with pytest.raises(LokaError, match="a step of -1 rows"):
        loka.scale(tower(), x, batch_size=-1)
    with pytest.raises(LokaError, match="no sites"):
        loka.scale(nn.ReLU(), x)
