import pytest
import torch
from models import Encoder, odd_mlp
from sites import convert_layers
from torch import nn
from torch.nn.utils import prune

from loka import mods
from loka.core.exceptions import NotConverted
from loka.nn import BlockNorm
from loka.zoo.attention import AttentionPool, SelfAttention, rotate

ALL = [mods.NoBias(), mods.BlockNorm(256), mods.HardSwish()]


def test_all_three_change_what_they_say():
    model = odd_mlp()
    changes = mods.apply(model, ALL)
    assert model[0].bias is None
    assert model[3].bias is None
    assert model[5].bias is not None, "prediction layers keep their bias"
    assert isinstance(model[1], BlockNorm)
    assert isinstance(model[2], nn.Hardswish)
    assert isinstance(model[4], nn.ReLU), "only what is named is replaced"
    assert [(c.mod, c.path) for c in changes.changed] == [
        ("NoBias", "0"),
        ("NoBias", "1"),
        ("NoBias", "3"),
        ("BlockNorm", "1"),
        ("HardSwish", "2"),
    ]
    printed = str(changes)
    assert "LayerNorm(479) -> BlockNorm(479, block=256)" in printed
    assert "kept: a prediction layer with 1 outputs" in printed
    model(torch.randn(3, 13)).sum().backward()


def test_filters_leave_modules_alone():
    model = odd_mlp()
    mods.apply(model, ALL, filter=lambda module, fqn: fqn not in ("0", "1", "2"))
    assert model[0].bias is not None
    assert isinstance(model[1], nn.LayerNorm)
    assert isinstance(model[2], nn.SiLU)
    assert model[3].bias is None


def test_transformer_layers_still_run_in_their_fused_path():
    """Taking linear1.bias from nn.TransformerEncoderLayer would crash its inference."""
    model = Encoder().eval()
    changes = mods.apply(model, ALL)
    assert not changes.changed
    assert all("reads its parameters directly" in c.what or "prediction" in c.what for c in changes.kept)
    with torch.no_grad():
        model(torch.randn(2, 7, 48))


def test_modules_of_a_derived_type_are_said_to_be_kept():
    Norm = type("Norm", (nn.LayerNorm,), {})
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), Norm(32))
    changes = mods.apply(model, ALL)
    assert [(c.mod, c.path) for c in changes.kept] == [("NoBias", "0"), ("NoBias", "1"), ("BlockNorm", "1")]
    assert model[0].bias is not None
    assert type(model[1]) is Norm


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(
    "compute",
    [lambda linear: prune.l1_unstructured(linear, "bias", 0.5), lambda linear: nn.utils.weight_norm(linear, "bias")],
    ids=["pruned", "weight norm"],
)
def test_a_bias_that_is_computed_stays(compute):
    model, x = nn.Sequential(nn.Linear(8, 32)), torch.randn(3, 8)
    compute(model[0])
    expected = model(x)
    changes = mods.apply(model, [mods.NoBias()])
    assert not changes.changed
    assert "its bias is computed" in changes.kept[0].what
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("at", ["1", "2", "3"])
def test_nothing_changes_where_the_filter_raises(at):
    def filter(module, path):
        if path == at:
            raise RuntimeError("mine")
        return True

    model = odd_mlp()
    before, state = list(model), list(model.state_dict())
    with pytest.raises(RuntimeError, match="mine"):
        mods.apply(model, [mods.HardSwish((nn.ReLU,)), *ALL], filter=filter)
    assert all(now is then for now, then in zip(model, before, strict=True))
    assert list(model.state_dict()) == state


def test_a_shared_module_is_replaced_everywhere():
    act = nn.SiLU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    mods.apply(model, [mods.HardSwish()])
    assert isinstance(model[1], nn.Hardswish)
    assert isinstance(model[3], nn.Hardswish)


def test_a_module_with_hooks_stays():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.post_norm = nn.LayerNorm(4), nn.SiLU(), nn.Identity()

    model, seen = Pooled(), []
    for module in model.children():
        module.register_forward_hook(lambda *_: seen.append(1))
    changes = mods.apply(model, [mods.BlockNorm(2), mods.HardSwish(), mods.AttentionNorm()])
    assert not changes.changed
    assert [c.what.count("hooks") for c in changes.kept] == [1, 1, 1]


def test_own_types_can_be_named():
    model = odd_mlp()
    mods.apply(model, [mods.HardSwish(replace=(nn.SiLU, nn.ReLU))])
    assert isinstance(model[4], nn.Hardswish)


def test_an_activation_in_place_stays_in_place():
    """Its result may be dropped, and then one out of place is no activation at all."""

    class Statement(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.act = nn.Linear(8, 16), nn.SiLU(inplace=True)

        def forward(self, x):
            y = self.linear(x)
            self.act(y)
            return y

    model, x = Statement(), torch.randn(3, 8, requires_grad=True)
    mods.apply(model, [mods.HardSwish()])
    expected = nn.functional.hardswish(model.linear(x))
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(
        torch.autograd.grad(model(x).square().sum(), x), torch.autograd.grad(expected.square().sum(), x)
    )
    model = odd_mlp()
    mods.apply(model, [mods.HardSwish()])
    assert not model[2].inplace


def test_training_mode_is_kept_and_converted_models_are_refused():
    model = odd_mlp().eval()
    mods.apply(model, [mods.BlockNorm(128)])
    assert not model[1].training
    convert_layers(model, ("emulated:rowwise_e4m3", "hp", "hp"))
    with pytest.raises(NotConverted, match="revert"):
        mods.apply(model, ALL)


def test_attention_norm_is_frozen_and_by_head():
    pool = AttentionPool(8, heads=2, outputs=3)
    model = nn.ModuleDict({"a": SelfAttention(8, heads=2, rotary=True), "b": pool})
    count = sum(p.numel() for p in model.parameters())
    x = 100 * torch.randn(3, 5, 8)
    q, k, v = model["a"].qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    q, k = (rotate(t / t.square().mean(-1, keepdim=True).sqrt()) for t in (q, k))
    scores = q @ k.transpose(2, 3) / 2
    assert scores.abs().max() <= 2 + 1e-5, "sqrt(d_h)"
    out = model["a"].out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    changes = mods.apply(model, [mods.AttentionNorm()])
    assert len(changes.changed) == 4
    assert sum(p.numel() for p in model.parameters()) == count
    # rms_norm adds float32's epsilon, 1e-7, to a mean of squares of about 1000.
    expected = out / out.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(model["a"](x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model["b"](x).square().mean(-1), torch.ones(3, 3))
    pool = AttentionPool(8, heads=2, outputs=3)
    changes = mods.apply(pool, [mods.AttentionNorm(("post_norm",))], filter=lambda module, path: path == "")
    assert [c.what for c in changes.changed] == ["post_norm -> UnitRMS"]
    changes = mods.apply(Encoder(), [mods.AttentionNorm()])
    assert not changes.changed
    assert {c.what for c in changes.kept} == {"it has no place for a norm"}
