"""Spellings of one product by a raw parameter: each is a site, as written and under torch.compile alike."""

import copy

import pytest
import torch
from models import forced_plan
from sweeps import sweep
from torch import nn

import loka

ROWWISE = "emulated:rowwise_e4m3_pow2"
SPELLINGS = {
    "x [B, K], w [K, N], by lists": ((64, 48), (32, 64), lambda x, w: torch.einsum(x, [0, 1], w, [1, 2], [0, 2])),
    "by lists without an output": ((64, 48), (32, 64), lambda x, w: torch.einsum(x, [0, 1], w, [1, 2])),
    "without an output": ((64, 48), (32, 64), lambda x, w: torch.einsum("bi,io", x, w)),
    "any rows": ((48, 64), (4, 8, 64), lambda x, w: torch.einsum("...d,hd->...h", x, w)),
    "the weight first": ((48, 64), (4, 8, 64), lambda x, w: torch.einsum("hd, ...d -> ...h", w, x)),
    "any rows by lists": ((64, 48), (4, 8, 64), lambda x, w: torch.einsum(x, [..., 0], w, [0, 1], [..., 1])),
    "any rows of a weight that has none": ((48, 64), (16, 64), lambda x, w: torch.einsum("...d,...hd->...h", x, w)),
    "experts": ((3, 64, 32), (16, 3, 64), lambda x, w: torch.einsum("...ei,eio->...eo", x, w)),
}


class Product(nn.Module):
    def __init__(self, sides, call):
        super().__init__()
        self.w, self.call = nn.Parameter(torch.randn(sides) / 8), call

    def forward(self, x):
        return self.call(x, self.w)


def trained(model, x):
    y = model(x)
    y.square().sum().backward()
    return y.detach(), model.w.grad


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", sweep(SPELLINGS, list(SPELLINGS)[::3]))
def test_each_runs_in_fp8_however_it_is_run(name):
    torch.manual_seed(0)
    sides, rows, call = SPELLINGS[name]
    plain, x = Product(sides, call), torch.randn(rows)
    with loka.Probe(plain, every=1, effect_samples=0) as probe:
        trained(plain, x)
    plan = forced_plan(probe.stats(), ROWWISE)
    plain.w.grad = None
    eager, compiled = (loka.convert(copy.deepcopy(plain), plan) for _ in range(2))
    truth = trained(plain, x)
    found = trained(eager, x)
    for ours, exact in zip(found, truth, strict=True):
        assert 0.01 < error(ours, exact) < 0.07, "e4m3's error"
    torch._dynamo.reset()
    for again, ours in zip(trained(torch.compile(compiled, backend="aot_eager"), x), found, strict=True):
        torch.testing.assert_close(again, ours, rtol=1e-6, atol=1e-6)
    runs = {site: counts["runs"] for site, counts in loka.health_of(compiled).items()}
    assert set(runs.values()) == {1}


@pytest.mark.parametrize("equation", ["...i,ijk->...k", "ijk,lm->ij", "i,io->o", "ij,jk->iik", "...ij,jk", "ii,ik->k"])
def test_what_torch_refuses_or_reads_otherwise_is_left_to_it(equation):
    model, x = Product((48, 64), lambda x, w: torch.einsum(equation, x, w)), torch.randn(48, 48)
    try:
        expected = model(x)
    except RuntimeError as error:
        expected = error
    with loka.Probe(model, every=1, effect_samples=0):
        if isinstance(expected, RuntimeError):
            with pytest.raises(RuntimeError) as caught:
                model(x)
            assert str(caught.value) == str(expected)
        else:
            assert torch.equal(model(x), expected)


def test_an_input_of_another_dtype_is_named_behind_the_operator_too():
    plain, x = Product((64, 48), lambda x, w: x @ w), torch.randn(32, 64)
    with loka.Probe(plain, every=1, effect_samples=0) as probe:
        trained(plain, x)
    loka.convert(plain, forced_plan(probe.stats(), ROWWISE))
    with pytest.raises(RuntimeError, match=r"w: input is torch\.bfloat16, the weight torch\.float32"):
        plain(x.bfloat16())
