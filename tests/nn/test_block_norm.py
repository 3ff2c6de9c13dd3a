import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from loka.nn import BlockNorm, HardSwish


@settings(max_examples=80)
@given(
    features=st.integers(1, 700),
    block=st.sampled_from([1, 16, 100, 256]),
    seed=st.integers(0, 10**6),
    exponent=st.integers(-12, 12),
    spike=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_bound_is_a_theorem(features, block, seed, exponent, spike, dtype):
    """|BlockNorm(x)| <= sqrt(block), and HardSwish keeps it: FP8 needs no amax after them."""
    x = torch.randn(3, features, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    if spike:
        x[:, features // 2] *= 1e9
    y = BlockNorm(features, block)(x.to(dtype))
    assert y.dtype == dtype
    bound = math.sqrt(block) * (1 + 2.0**-20)  # float32 arithmetic; 16 itself is exact in bf16
    if dtype == torch.bfloat16:
        bound = torch.tensor(bound).bfloat16().item()
    assert y.abs().max().item() <= bound
    assert HardSwish()(y.float()).abs().max().item() <= bound


@pytest.mark.parametrize("features", [256, 512, 479, 300, 1000, 7])
def test_equals_rms_norm_block_by_block(features):
    x = torch.randn(4, 2, features, requires_grad=True)
    y = BlockNorm(features, 256)(x)
    parts = [part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() for part in x.split(256, dim=-1)]
    torch.testing.assert_close(y, torch.cat(parts, dim=-1))
    (grad,) = torch.autograd.grad(y.square().sum() + y.sum(), x, retain_graph=True)
    expected = torch.cat(parts, dim=-1)
    (wanted,) = torch.autograd.grad(expected.square().sum() + expected.sum(), x)
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-4)


def test_zero_rows_stay_zero_and_nan_surfaces():
    norm = BlockNorm(300)
    x = torch.zeros(2, 300)
    assert (norm(x) == 0).all()
    x[1, 299] = float("nan")
    assert torch.isnan(norm(x)[1, 256:]).all()
    assert (norm(x)[0] == 0).all()


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="got an input with 5 features"):
        BlockNorm(6)(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="positive sizes"):
        BlockNorm(0)
    assert isinstance(HardSwish(), nn.Hardswish)
