import copy
import itertools
from dataclasses import replace

import pytest
import torch
from models import odd_mlp
from planted import registered
from sites import convert_layer, convert_layers
from torch import nn

from loka.core.exceptions import NotConverted
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import RECIPES, Gemm
from loka.kernels.gemm import registry
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs, run_gemm
from loka.kernels.quantize import quantizer
from loka.nn import health_of, reset_health, site_gemms, site_ops
from loka.nn.site import OPERAND_NAMES
from loka.nn.site_ops import layer_pass, site_backward, site_forward

CPU_CANDIDATES = [
    "emulated:tensorwise_e4m3",
    "emulated:rowwise_e4m3",
    "emulated:rowwise_e4m3_pow2",
    "emulated:blockwise_e4m3",
    "torch:tensorwise_e4m3",
]

ROW = "emulated:rowwise_e4m3"


def fake_quantized(hp, gemm, side, candidate):
    casts = RECIPES[candidate.partition(":")[2]].casts(gemm)
    return dequantize(quantize(hp, casts[side]))


@pytest.mark.parametrize("candidate", CPU_CANDIDATES)
@pytest.mark.parametrize(("rows", "fan_in", "fan_out"), [(33, 13, 479), (1, 479, 1000), (64, 1000, 16)])
def test_forward_and_both_gradients_match_the_twin(candidate, rows, fan_in, fan_out, device):
    torch.manual_seed(0)
    linear = convert_layer(nn.Linear(fan_in, fan_out).to(device), (candidate, candidate, candidate))
    x = torch.randn(rows, fan_in)
    placed = x.to(device).requires_grad_()
    y = linear(placed)
    grad = torch.randn(rows, fan_out)
    y.backward(grad.to(device))
    weight, bias = linear.weight.detach().cpu(), linear.bias.detach().cpu()
    output = fake_quantized(x, Gemm.OUTPUT, 0, candidate) @ fake_quantized(weight, Gemm.OUTPUT, 1, candidate).t()
    grad_input = (
        fake_quantized(grad, Gemm.GRAD_INPUT, 0, candidate)
        @ fake_quantized(weight.t(), Gemm.GRAD_INPUT, 1, candidate).t()
    )
    grad_weight = (
        fake_quantized(grad.t(), Gemm.GRAD_WEIGHT, 0, candidate)
        @ fake_quantized(x.t(), Gemm.GRAD_WEIGHT, 1, candidate).t()
    )
    # The same float32 products in another order, or Hopper's 13-bit sums (core/numerics/reference.py).
    loose = device.type == "cuda" and candidate.startswith("torch")
    tolerance = {"rtol": 2e-3, "atol": 2e-2} if loose else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(y.cpu(), output + bias, **tolerance)
    torch.testing.assert_close(placed.grad.cpu(), grad_input, **tolerance)
    torch.testing.assert_close(linear.weight.grad.cpu(), grad_weight, **tolerance)
    torch.testing.assert_close(linear.bias.grad.cpu(), grad.sum(dim=0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [33, 1])
@pytest.mark.parametrize("fan_out", [32, 30])
def test_a_part_of_an_output_is_written_in_place(rows, fan_out):
    """By a kernel that pads all sides: autograd lets nobody write in a view that a function of ours returns."""
    padding = replace(registry.KERNELS["emulated"], name="padding", multiples=lambda problem, recipe: (16, 16, 16))
    with registered(padding):
        linear = convert_layer(nn.Linear(16, fan_out, bias=False), ("padding:rowwise_e4m3",) * 3)
        x = torch.randn(rows, 16, requires_grad=True)
        whole, part = linear(x), linear(x)
        part[:, :16].mul_(-1.0)
        sign = torch.ones(fan_out).index_fill_(0, torch.arange(16), -1.0)
        assert torch.equal(part, whole * sign)
        assert torch.equal(torch.autograd.grad(part.sum(), x)[0], torch.autograd.grad((whole * sign).sum(), x)[0])


def test_each_gemm_runs_its_own_candidate():
    linear = convert_layer(nn.Linear(20, 30), ("emulated:rowwise_e4m3", "hp", "torch:tensorwise_e4m3"))
    reset_kernel_runs()
    linear(torch.randn(8, 20, requires_grad=True)).sum().backward()
    assert kernel_runs() == {
        ("emulated:rowwise_e4m3", "output"): 1,
        ("hp", "grad_input"): 1,
        ("torch:tensorwise_e4m3", "grad_weight"): 1,
    }
    assert {site: counts["runs"] for site, counts in health_of(linear).items()} == {"it/output": 1, "it/grad_weight": 1}


@pytest.mark.parametrize("output", ["hp", ROW])
@pytest.mark.parametrize("spoilt", ["input", "weight", "grad_output"])
def test_flags_name_the_operand_of_each_gemm_and_stay(spoilt, output, device):
    linear = convert_layer(nn.Linear(24, 8, bias=False).to(device), (output, ROW, ROW))
    for bad in (torch.nan, 1.0):
        x, grad = torch.randn(4, 24, device=device), torch.randn(4, 8, device=device)
        {"input": x, "weight": linear.weight.data, "grad_output": grad}[spoilt][0, 0] = bad
        linear(x.requires_grad_()).backward(grad)
    for site, seen in health_of(linear).items():
        operands = OPERAND_NAMES[Gemm(site.removeprefix("it/"))]
        assert [seen["bad_a"], seen["bad_b"]] == [name == spoilt for name in operands], site


def test_hp_gemms_equal_a_plain_linear_bit_for_bit():
    plain = nn.Linear(50, 70, bias=False)
    mixed = convert_layer(copy.deepcopy(plain), ("hp", "hp", ROW))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(9, 50)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            left, right = plain(a), mixed(b)
        assert torch.equal(left, right)
        left.sum().backward()
        right.sum().backward()
        assert torch.equal(a.grad, b.grad)


def test_leading_dimensions_autocast_and_dtypes():
    linear = convert_layer(nn.Linear(24, 40), (ROW, ROW, ROW))
    x = torch.randn(2, 3, 5, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.shape == (2, 3, 5, 40)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert linear.weight.grad.dtype == torch.float32
    assert linear(torch.randn(0, 24)).shape == (0, 40)


def test_frozen_weight_and_input_without_gradient():
    linear = convert_layer(nn.Linear(24, 40), (ROW, ROW, ROW))
    linear.weight.requires_grad_(False)
    x = torch.randn(8, 24, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None
    assert linear.weight.grad is None
    assert health_of(linear)["it/grad_weight"]["runs"] == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break_and_gives_the_same(backend):
    torch._dynamo.reset()
    model = odd_mlp()
    convert_layers(model, (ROW, "torch:tensorwise_e4m3", "emulated:blockwise_e4m3"))
    x = torch.randn(16, 13)
    eager = model(x)
    eager.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    reset_health(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)(x)
    compiled.sum().backward()
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        # A value on a rounding boundary may fall to the other side when Inductor fuses the norm.
        assert (parameter.grad - expected).norm() <= 0.02 * expected.norm() + 1e-6
    assert all(counts["runs"] == 1 for site, counts in health_of(model).items() if site != "0/grad_input")


BLOCK = "emulated:blockwise_e4m3"


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("gradients", [("hp", "hp"), (ROW, "hp"), ("hp", ROW)])
def test_a_second_derivative_is_right_or_refused(gradients, direct, monkeypatch):
    monkeypatch.setattr(site_gemms, "_direct", lambda *_: direct)  # else by the ops
    linear, x = nn.Linear(24, 8, bias=False), torch.randn(5, 24, requires_grad=True)
    y = convert_layer(linear, (ROW, *gradients))(x).sum()
    if gradients == ("hp", "hp"):
        torch.autograd.grad(y, x, create_graph=True)[0].square().sum().backward()
        torch.testing.assert_close(linear.weight.grad, 10 * linear.weight.sum(dim=0).expand(8, 24))
    else:
        with pytest.raises(NotConverted, match=r"it: no second derivative"):
            torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize("names", [(ROW, BLOCK, ROW), (ROW, "hp", BLOCK), ("hp", ROW, ROW)])
@pytest.mark.parametrize("rows", [5, 0])
def test_custom_ops_keep_their_contract(names, rows):
    health = torch.zeros(3, 3, dtype=torch.int64)
    x, weight, dy = torch.randn(rows, 7), torch.randn(3, 7), torch.randn(rows, 3)
    # Not test_schema: the ops write their counters unseen, on purpose (nn/site_ops.py).
    checks = {"test_utils": ("test_faketensor",)}
    kept = (names[2] != "hp", names[1] != "hp")
    torch.library.opcheck(site_forward, (x, weight, health, "it", *names, *kept, False), **checks)
    _, low_x, x_scale, low_weight, weight_scale = site_forward(x, weight, health, "it", *names, *kept, False)
    operands = (low_x if x_scale.numel() else x, x_scale, low_weight if weight_scale.numel() else weight, weight_scale)
    for wanted in ((True, True), (True, False), (False, True)):
        arguments = (dy, *operands, health, "it", *names[1:], *wanted, 7, torch.float32)
        torch.library.opcheck(site_backward, arguments, **checks)


@pytest.mark.parametrize("names", list(itertools.product(["hp", ROW, BLOCK], repeat=3)), ids=str)
def test_sharing_a_quantization_changes_nothing(names, device):
    """All mixtures of precisions: the layer gives bit for bit what its three GEMMs give alone."""
    torch.manual_seed(0)
    x, weight, dy = torch.randn(33, 130), torch.randn(48, 130), torch.randn(33, 48)
    x, weight, dy = (tensor.to(device) for tensor in (x.bfloat16(), weight, dy.bfloat16()))
    health = torch.zeros(3, 3, dtype=torch.int64, device=device)
    y, dx, dw = layer_pass(x, weight, dy, health, names)
    alone = (
        run_gemm(names[0], x, weight, gemm=Gemm.OUTPUT, dtype=x.dtype),
        run_gemm(names[1], dy, weight.t(), gemm=Gemm.GRAD_INPUT, dtype=x.dtype),
        run_gemm(names[2], dy.t(), x.t(), gemm=Gemm.GRAD_WEIGHT, dtype=weight.dtype),
    )
    for got, expected in zip((y, dx, dw), alone, strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    assert health[:, 0].tolist() == [int(name != "hp") for name in names]
    assert (health[:, 1:] == 0).all()


@pytest.mark.parametrize("name", [ROW, BLOCK, "torch:tensorwise_e4m3"])
def test_autocast_does_not_reach_into_the_gemms(name):
    """A float32 weight gradient stays one, whether or not backward runs inside autocast."""
    x, weight, dy = torch.randn(32, 48).bfloat16(), torch.randn(64, 48), torch.randn(32, 64).bfloat16()
    health = torch.zeros(3, 3, dtype=torch.int64)
    outside = layer_pass(x, weight, dy, health, (name, name, name))
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer_pass(x, weight, dy, health, (name, name, name))
    for first, second in zip(outside, inside, strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(inside[2], inside[2].bfloat16().float())


def gemms_behind(output):
    """The node of SiteGemms that is nearest to `output` in autograd's graph."""
    nodes = [output.grad_fn]
    for node in nodes:
        if node.name() == "SiteGemmsBackward":
            return node
        nodes += [before for before, _ in node.next_functions if before is not None]
    raise AssertionError("no site is behind this tensor")


def test_a_frozen_layer_keeps_no_input(device):
    linear = convert_layer(nn.Linear(24, 40, bias=False).to(device), (ROW, ROW, ROW))
    linear.weight.requires_grad_(False)
    x = torch.randn(64, 24, requires_grad=True, device=device)
    y = linear(x)
    saved = gemms_behind(y).saved_tensors
    assert max(tensor.numel() for tensor in saved) == 24 * 40, "the weight in FP8, and nothing of x"
    y.sum().backward()
    assert x.grad is not None


def test_each_tensor_is_read_once(monkeypatch):
    calls = []
    real = quantizer.quantize_pairs

    def counted(operands, **more):
        calls.extend((tuple(hp.shape), row is not None, column is not None) for hp, row, column in operands)
        return real(operands, **more)

    monkeypatch.setattr(quantizer, "quantize_pairs", counted)
    monkeypatch.setattr(site_ops, "quantize_pairs", counted)
    linear = convert_layer(nn.Linear(24, 40), (ROW, ROW, BLOCK))
    x = torch.randn(8, 24, requires_grad=True)
    y = linear(x)
    saved = {tensor.dtype for tensor in gemms_behind(y).saved_tensors}
    assert saved == {torch.float8_e4m3fn, torch.float32}
    y.sum().backward()
    assert calls == [((8, 24), True, True), ((40, 24), True, True), ((8, 40), True, True)]
    calls.clear()
    with torch.no_grad():
        linear(x)
    assert calls == [((8, 24), True, False), ((40, 24), True, False)]
