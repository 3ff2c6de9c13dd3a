import copy

import pytest
import torch
from sites import convert_layer, convert_layers
from torch import nn

from loka.core.exceptions import NoKernelFits, NonFinite, NotConverted, UnknownName
from loka.graph.attach import attach, detach
from loka.nn import check_finite, health_of, reset_health, signature, sites_of
from loka.nn.attention import AttentionForward, packed_keys

ROW = "emulated:rowwise_e4m3"


def test_restoring_leaves_nothing_behind():
    plain = nn.Linear(6, 4)
    before = set(vars(plain)), set(plain._buffers), len(plain._forward_pre_hooks)
    keys = list(plain.state_dict())
    linear = convert_layer(plain, (ROW, ROW, ROW))
    assert list(linear.state_dict()) == keys
    clone = copy.deepcopy(linear)
    for one in (linear, clone):
        detach(one)
        assert type(one) is nn.Linear
        assert (set(vars(one)), set(one._buffers), len(one._forward_pre_hooks)) == before
        one(torch.randn(2, 6))


def test_what_cannot_be_converted_is_refused():
    plain = nn.Linear(4, 4)
    with pytest.raises(UnknownName, match="rowwise_e9m9"):
        convert_layer(plain, ("torch:rowwise_e9m9", "hp", "hp"))
    assert "forward" not in vars(plain)
    linear = convert_layer(nn.Linear(4, 4), (ROW, ROW, ROW))
    with pytest.raises(NotConverted, match="converted already"):
        convert_layer(linear, (ROW, ROW, ROW))
    with pytest.raises(NotConverted, match="has no module 'there'"):
        attach(nn.Sequential(plain), {"there": signature(plain).layers[""]}, {"there": (ROW, ROW, ROW)})
    assert "forward" not in vars(plain)


def test_a_subclass_that_inherits_the_forward_is_a_site():
    class Same(nn.Linear):
        pass

    same = convert_layer(Same(4, 4), (ROW, ROW, ROW))
    same(torch.randn(2, 4))
    assert health_of(same)["it/output"]["runs"] == 1
    assert type(same) is Same


def test_a_kernel_that_cannot_run_raises_and_never_falls_back():
    linear = convert_layer(nn.Linear(16, 16), ("torch:blockwise_e4m3", "hp", "hp"))
    with pytest.raises(NoKernelFits, match="torch has no blockwise kernel on the CPU") as caught:
        linear(torch.randn(4, 16))
    assert "emulated:blockwise_e4m3" in str(caught.value)


@pytest.mark.parametrize("apart", [False, True])
def test_transformer_inference_does_not_pass_the_sites_by(apart):
    """nn.TransformerEncoderLayer's fused path reads linear1.weight itself, in eval mode."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    names = (ROW, "hp", "hp")
    if apart:
        for path in ("linear1", "linear2"):
            convert_layers(getattr(layer, path), names)
    else:
        convert_layers(layer, dict.fromkeys(("linear1", "linear2"), names))
    with torch.no_grad():
        layer(torch.randn(2, 5, 32))
    assert {site: c["runs"] for site, c in health_of(layer).items()} == {"linear1/output": 1, "linear2/output": 1}
    assert set(sites_of(layer)) == {"linear1", "linear2"}


def test_padded_sequences_in_transformer_inference():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x, mask = torch.randn(3, 6, 32), torch.zeros(3, 6, dtype=torch.bool)
    mask[1:, 4:] = True
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=mask)
        convert_layers(model, {f"layers.{index}.linear1": (ROW, "hp", "hp") for index in range(2)})
        fp8 = model(x, src_key_padding_mask=mask)
    assert health_of(model)["layers.1.linear1/output"]["runs"] == 1
    # 28 dB of noise in one of the four linear maps of each layer: well under 10 % after the norms.
    assert (fp8 - plain)[~mask].norm() < 0.1 * plain[~mask].norm()
    assert not torch.equal(fp8, plain)


@pytest.mark.parametrize("own", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_attention_goes_by_the_causal_hint_where_torch_does(own):
    """Under the hint torch hands no mask on, so that keys behind the last position are never seen, nor what the mask
    lets through; with padding or weights wanted it goes by the mask."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, batch_first=True, **own)
    if attention.bias_k is not None:
        nn.init.normal_(attention.bias_k), nn.init.normal_(attention.bias_v)
    x, all_seen, padding = torch.randn(3, 6, 32), torch.zeros(6, 6), torch.zeros(3, 6)
    for given in ({"need_weights": False}, {}, {"need_weights": False, "key_padding_mask": padding}):
        expected, _ = attention(x, x, x, attn_mask=all_seen, is_causal=True, **given)
        found, _ = AttentionForward(attention, {})(x, x, x, attn_mask=all_seen, is_causal=True, **given)
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("planned", "inputs", "parts"),
    [
        ("self", "qqq", [0]),
        ("self", "qkv", [0, 0, 0]),
        ("kv", "qkk", [0, 1]),
        ("kv", "qkv", [0, 1, 1]),
        ("apart", "qqq", [0, 1, 2]),
    ],
)
def test_a_projection_goes_by_the_site_of_the_view_around_its_weight(planned, inputs, parts):
    torch.manual_seed(0)
    attention, keys, ran = nn.MultiheadAttention(8, 2), packed_keys(8)[planned], []
    nn.init.normal_(attention.in_proj_bias)
    sites = {key: lambda x, weight, key=key: ran.append(key) or x @ weight.t() for key in keys}
    given = {name: torch.randn(3, 1, 8) for name in "qkv"}
    found, _ = AttentionForward(attention, sites)(*(given[name] for name in inputs))
    assert ran == [keys[part] for part in parts]
    torch.testing.assert_close(found, attention(*(given[name] for name in inputs))[0])


def converted_mlp(*, inplace=False):
    model = nn.Sequential(nn.Linear(13, 32, bias=False), nn.ReLU(inplace=inplace), nn.Linear(32, 16))
    convert_layers(model, (ROW, ROW, ROW))
    return model


@pytest.mark.parametrize("between", ["a second view", "an evaluation", "a reset"])
def test_compiled_backward_after_other_calls(between):
    """The counters are not part of autograd's graph: they may change before backward."""
    torch._dynamo.reset()
    model = converted_mlp()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 13)
    loss = compiled(x).sum()
    if between == "a second view":
        loss = loss + compiled(2 * x).sum()
    elif between == "an evaluation":
        with torch.no_grad():
            model(x)
    else:
        reset_health(model)
    loss.backward()
    assert health_of(model)["0/grad_weight"]["runs"] == (2 if between == "a second view" else 1)


@pytest.mark.parametrize("shape", [(8, 13), (2, 4, 13)])
def test_in_place_activations_after_a_layer_without_bias(shape):
    model = converted_mlp(inplace=True)
    model(torch.randn(shape)).sum().backward()


def test_wrong_inputs_are_refused_as_nn_linear_does():
    linear = convert_layer(nn.Linear(16, 8), (ROW, ROW, ROW))
    with pytest.raises(ValueError, match="it: input has 12 features, the weight takes 16"):
        linear(torch.randn(4, 12))
    for wrong in (torch.ones(4, 16, dtype=torch.int64), torch.randn(4, 16).bfloat16()):
        with pytest.raises(RuntimeError, match=r"the weight torch\.float32"):
            linear(wrong)
    with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
        linear(torch.randn(4, 16).double())


def test_converted_in_inference_mode_then_trained():
    model = nn.Linear(16, 8)
    with torch.inference_mode():
        convert_layer(model, (ROW, ROW, ROW))
        model(torch.randn(2, 16))
    model(torch.randn(2, 16)).sum().backward()
    assert health_of(model)["it/output"]["runs"] == 2


def test_towers_converted_one_by_one_are_all_seen():
    towers = nn.ModuleDict({"a": converted_mlp(), "b": converted_mlp()})
    assert list(sites_of(towers)) == ["a.0", "a.2", "b.0", "b.2"]
    towers["a"](torch.full((2, 13), float("nan")))
    with pytest.raises(NonFinite, match=r"the first is a\.0/output"):
        check_finite(towers)


def test_counters_move_with_the_model_and_are_no_buffers(device):
    """DistributedDataParallel broadcasts buffers, and would erase a rank's NaN flag."""
    model = converted_mlp()
    assert not list(model.buffers())
    model(torch.randn(2, 13))
    model.to(device, torch.bfloat16)
    model(torch.randn(2, 13).to(device, torch.bfloat16))
    health = sites_of(model)["0"].health
    assert (health.dtype, health.device.type) == (torch.int64, device.type)
    assert health_of(model)["0/output"]["runs"] == 2


def test_a_model_converted_before_it_has_memory_counts_from_zero():
    """As FSDP2 builds them: on the meta device. The counters come with the first call, inference too."""
    with torch.device("meta"):
        model = converted_mlp()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    with torch.inference_mode():
        model(torch.randn(2, 13))
    model(torch.randn(2, 13)).sum().backward()
    assert health_of(model)["0/output"]["runs"] == 2
    check_finite(model)


def test_a_model_converted_before_it_has_memory_keeps_its_centre_and_its_hot_columns():
    with torch.device("meta"):
        layer = nn.Linear(80, 16)
        of_plan = {"centres": {"": [1.0] * 80}, "hot_columns": {"": list(range(32))}}
        attach(layer, signature(layer).layers, {"": ("emulated:rowwise_e4m3_centred_hot32", "hp", "hp")}, **of_plan)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(4, 80) + 1
    plain = x @ layer.weight.t() + layer.bias
    assert (layer(x) - plain).norm() < 0.05 * plain.norm()
