"""Which modules mods find, by which paths, and which another cannot replace."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from loka import mods
from loka.nn import BlockNorm
from loka.nn.linears import find_linears
from loka.zoo.attention import SelfAttention

REPLACING = [mods.BlockNorm(16), mods.HardSwish()]


def compiled(module):
    return torch.compile(module, backend="eager")


def paths(changes):
    return [(c.mod, c.path) for c in changes]


@pytest.mark.parametrize("activation", [nn.GELU, nn.ReLU])
def test_inference_of_a_transformer_layer_has_the_activation_of_training(activation):
    """Its fused path goes by what the layer was built with: eval under no_grad computed another activation."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0, activation=activation())
    model, x = nn.Sequential(layer), torch.randn(2, 5, 32)
    changes = mods.apply(model, [mods.HardSwish(replace=(nn.SiLU, activation))])
    assert paths(changes.kept) == [("HardSwish", "0.activation")]
    assert "fused path" in changes.kept[0].what
    trained = model(x)
    with torch.no_grad():
        # float32 sums of 64 terms of about 1 in another order.
        torch.testing.assert_close(model.eval()(x), trained, rtol=1e-4, atol=1e-5)


def test_the_norm_around_transformer_layers_changes():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model, x = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32)), torch.randn(2, 5, 32)
    changes = mods.apply(model, [mods.NoBias(), *REPLACING])
    assert paths(changes.changed) == [("NoBias", "norm"), ("BlockNorm", "norm")]
    trained = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [nn.LayerNorm(300), nn.SiLU(), compiled(nn.LayerNorm(300))], ids=type)
def test_a_model_that_is_one_module_stays(model):
    changes = mods.apply(model, REPLACING)
    assert not changes.changed
    (kept,) = changes.kept
    assert "put it into an nn.Sequential" in kept.what


def test_a_leaf_that_is_compiled_by_itself_stays():
    """The compiled call holds the old module, whatever is put into the wrapper."""
    norm, act = nn.LayerNorm(32), nn.SiLU()
    model = nn.Sequential(nn.Linear(8, 32), compiled(norm), compiled(act))
    changes = mods.apply(model, REPLACING)
    assert not changes.changed
    assert paths(changes.kept) == [("BlockNorm", "1"), ("HardSwish", "2")]
    assert all("apply mods before" in c.what for c in changes.kept)
    assert model[1]._orig_mod is norm


def test_a_leaf_inside_activation_checkpointing_is_replaced():
    model, x = nn.Sequential(nn.Linear(8, 32), checkpoint_wrapper(nn.LayerNorm(32))), torch.randn(3, 8)
    changes = mods.apply(model, REPLACING)
    assert paths(changes.changed) == [("BlockNorm", "1")]
    torch.testing.assert_close(model(x), BlockNorm(32, 16)(model[0](x)))


class Elsewhere(nn.Module):
    """Runs its activation by an attribute that is no registered module."""

    def __init__(self, hold):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 16), nn.SiLU()
        self.elsewhere, self.call = hold(self.act)

    def forward(self, x):
        return self.call(self.elsewhere)(self.linear(x))


class Hidden(nn.Module):
    """Registers `act`, and is registered nowhere."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x)


@pytest.mark.parametrize(
    "hold",
    [
        lambda act: ([act], lambda held: held[0]),
        lambda act: ({"a": (1, act)}, lambda held: held["a"][1]),
        lambda act: (act.forward, lambda held: held),
        lambda act: ([Hidden(act)], lambda held: held[0]),
    ],
    ids=["list", "tuple of a dict", "bound method", "module in a list"],
)
def test_a_module_that_a_plain_attribute_holds_too_stays(hold):
    model, x = nn.Sequential(Elsewhere(hold)), torch.randn(3, 8)
    changes = mods.apply(model, [mods.HardSwish()])
    assert not changes.changed
    assert "0.elsewhere holds it too" in changes.kept[0].what
    assert type(model[0].act) is nn.SiLU
    torch.testing.assert_close(model(x), nn.functional.silu(model[0].linear(x)))


def test_a_place_that_a_plain_attribute_holds_too_stays():
    attention = SelfAttention(8, heads=2, rotary=False)
    attention.hooked_up = [attention.post_norm]
    changes = mods.apply(attention, [mods.AttentionNorm()])
    assert [c.what for c in changes.changed] == ["qk_norm -> UnitRMS"]
    assert "hooked_up holds it too" in changes.kept[0].what
    assert type(attention.post_norm) is nn.Identity


@pytest.mark.parametrize("wrap", [compiled, checkpoint_wrapper])
def test_paths_are_those_of_sites(wrap):
    """A filter by a plan's paths matched nothing in blocks that are compiled or checkpointed."""
    block = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.SiLU())
    model = nn.Sequential(wrap(block), nn.Linear(32, 16))
    sites = set(find_linears(model)[0])
    changes = mods.apply(model, [mods.NoBias()], filter=lambda module, path: path in sites)
    assert paths(changes.changed) == [("NoBias", "0.0"), ("NoBias", "1")]
    assert paths(mods.apply(model, REPLACING).changed) == [("BlockNorm", "0.1"), ("HardSwish", "0.2")]
    x = torch.randn(3, 8)
    normed = BlockNorm(32, 16)(nn.functional.linear(x, block[0].weight))
    torch.testing.assert_close(model(x), model[1](nn.functional.hardswish(normed)))


def test_attention_in_a_wrapper_gets_its_norm():
    """The wrapper has the attributes of what it wraps, and was given the norm."""
    attention = SelfAttention(8, heads=2, rotary=False)
    model = nn.ModuleDict({"a": checkpoint_wrapper(attention)})
    changes = mods.apply(model, [mods.AttentionNorm(("post_norm",))])
    assert [(c.path, c.what) for c in changes.changed] == [("a", "post_norm -> UnitRMS")]
    assert type(attention.post_norm) is not nn.Identity


def shared():
    norm, act = nn.LayerNorm(32), nn.SiLU()
    return nn.ModuleDict({name: nn.Sequential(nn.Linear(8, 32), norm, act) for name in "ab"})


@pytest.mark.parametrize(("taken", "left"), ["ab", "ba"])
def test_a_shared_module_that_the_filter_takes_by_one_path_stays(taken, left):
    model = shared()
    all_mods = [mods.NoBias(), *REPLACING]
    changes = mods.apply(model, all_mods, filter=lambda module, path: path.startswith(taken))
    assert paths(changes.changed) == [("NoBias", f"{taken}.0")]
    assert paths(changes.kept) == [("NoBias", f"{taken}.1"), ("BlockNorm", f"{taken}.1"), ("HardSwish", f"{taken}.2")]
    assert f"one module with {left}.1, which the filter leaves out" in changes.kept[0].what
    assert model["b"][1].bias is not None
    assert type(model["b"][2]) is nn.SiLU


def test_all_paths_of_a_shared_module_are_told():
    model, asked = shared(), []
    changes = mods.apply(model, REPLACING, filter=lambda module, path: not asked.append(path))
    assert asked == ["a.1", "b.1", "a.2", "b.2"]
    assert paths(changes.changed) == [("BlockNorm", "a.1"), ("HardSwish", "a.2")]
    assert [c.what.partition(", also at ")[2] for c in changes.changed] == ["b.1", "b.2"]
    assert model["a"][1] is model["b"][1]
