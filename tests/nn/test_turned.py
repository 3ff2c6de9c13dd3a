"""TurnedLinear: the plain layer's results on a transposed view, which it reads as it lies."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loka.core.exceptions import NotConverted
from loka.nn.linears import find_linears, signature
from loka.nn.turned import TurnedLinear, lies_turned, restore_turned, turn_linear, turned_linears


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def both(
    in_features: int, out_features: int, bias: bool, device: torch.device
) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(in_features, out_features, bias=bias, device=device)
    turned = copy.deepcopy(plain)
    turn_linear(turned, path="turned")
    assert isinstance(turned, TurnedLinear)
    return plain, turned


def compare(plain: nn.Linear, turned: nn.Linear, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Outputs and every gradient, within what the order of sums can change: K terms, in `dtype`."""
    results = []
    for layer in (plain, turned):
        x = tokens.clone().requires_grad_()
        layer.zero_grad()
        out = layer(x.mT)
        assert out.shape == (*tokens.shape[:-2], tokens.shape[-1], layer.out_features)
        out.float().sin().sum().backward()
        results.append([out, x.grad, *(parameter.grad for parameter in layer.parameters())])
    terms = max(tokens.numel() // tokens.shape[-2], tokens.shape[-2], plain.out_features)
    bound = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}[dtype] * terms**0.5
    for x, y in zip(*results, strict=True):
        assert x.dtype == y.dtype
        assert (x.float() - y.float()).abs().max() <= bound * (1 + x.float().abs().max())
    return results[1][0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 6), (3, 2, 16, 8), (1, 3, 2), (2, 33, 5), (40, 27, 32)])
def test_the_plain_layer(shape: tuple[int, ...], bias: bool, device: torch.device) -> None:
    plain, turned = both(shape[-2], 9, bias, device)
    tokens = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    tokens.view(-1)[0] = 0
    assert lies_turned(tokens.mT)
    out = compare(plain, turned, tokens, torch.float32)
    assert out.mT.is_contiguous(), "what transposes back gets memory in order"
    with torch.autocast(device.type, torch.bfloat16):
        assert compare(plain, turned, tokens, torch.bfloat16).dtype == torch.bfloat16
    half_plain, half_turned = plain.bfloat16(), turned.bfloat16()
    compare(half_plain, half_turned, tokens.bfloat16(), torch.bfloat16)


def test_a_slice_of_tokens_is_read_without_a_copy(device: torch.device) -> None:
    plain, turned = both(4, 3, False, device)
    whole = torch.randn(6, 10, 8, device=device)
    part = whole[:, 2:6]
    assert lies_turned(part.mT)
    assert torch.allclose(plain(part.mT), turned(part.mT), atol=1e-6)


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_layout_gives_the_same(order: list[int], sides: list[int]) -> None:
    """Whatever is no transposed view goes the plain way; both ways give the plain layer's result."""
    x = torch.randn(sides, generator=torch.Generator().manual_seed(2)).permute(order)
    plain, turned = both(x.shape[-1], 3, True, torch.device("cpu"))
    assert torch.allclose(plain(x), turned(x), atol=1e-5)
    if lies_turned(x):
        assert x.mT.reshape(-1, *x.mT.shape[-2:]).data_ptr() == x.data_ptr(), "read as it lies"


def test_what_does_not_lie_turned() -> None:
    tokens = torch.randn(4, 6, 8)
    assert not lies_turned(tokens)
    assert not lies_turned(tokens[0].t())  # one matrix is a GEMM of its own
    assert not lies_turned(tokens.expand(4, 6, 8)[:, :, ::2].mT)


def test_an_input_of_another_dtype_is_refused_as_ever(device: torch.device) -> None:
    plain, turned = both(6, 4, True, device)
    tokens = torch.randn(3, 6, 5, device=device, dtype=torch.float64)
    for layer in (plain, turned):
        with pytest.raises(RuntimeError, match="type"):
            layer(tokens.mT)


@pytest.mark.parametrize("features", [20, 24])  # rows in need of padding, and not
def test_gradients_of_gradients_and_function_transforms(features: int, device: torch.device) -> None:
    """Float32 sums of 20 terms in another order, a few times over."""
    plain, turned = both(features, 5, True, device)
    tokens = torch.randn(6, features, 7, device=device, requires_grad=True)
    for layer in (plain, turned):
        (grad,) = torch.autograd.grad(layer(tokens.mT).tanh().sum(), tokens, create_graph=True)
        grad.square().sum().backward()
    for x, y in zip(plain.parameters(), turned.parameters(), strict=True):
        assert torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    several = torch.randn(3, 6, features, 7, device=device)
    x, y = (
        torch.func.vmap(torch.func.grad(lambda t, m=m: m(t.mT).tanh().sum()))(several)
        for m in (plain, turned)
    )
    assert torch.allclose(x, y, atol=1e-4)


def test_nan_and_infinity_stay_in_their_tokens(device: torch.device) -> None:
    plain, turned = both(6, 4, True, device)
    tokens = torch.randn(3, 6, 5, device=device)
    tokens[1, 2, 3], tokens[2, 0, 0] = float("nan"), float("inf")
    x, y = plain(tokens.mT), turned(tokens.mT)
    assert torch.equal(x.isfinite(), y.isfinite())
    assert torch.allclose(x[x.isfinite()], y[y.isfinite()], atol=1e-5)


def test_it_is_the_same_module() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    before, keys, shape = model[0], list(model.state_dict()), signature(model)
    turn_linear(model[0], path="0")
    assert model[0] is before
    assert list(model.state_dict()) == keys
    assert signature(model) == shape
    assert list(find_linears(model)[0]) == ["0"]
    with pytest.raises(NotConverted, match="TurnedLinear"):
        turn_linear(model[0], path="0")
    (found,) = turned_linears(model).values()
    restore_turned(found)
    assert type(model[0]) is nn.Linear


def test_under_compile_it_stays_one_graph(device: torch.device) -> None:
    plain, turned = both(6, 4, True, device)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = turned

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.map(x.transpose(1, 2)).transpose(1, 2)

    model = torch.compile(Tokens(), backend="aot_eager", fullgraph=True)
    tokens = torch.randn(3, 6, 5, device=device)
    assert torch.allclose(model(tokens), plain(tokens.mT).mT, atol=1e-5)
