import contextlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from loka.core.exceptions import LokaError
from loka.kernels.quantize.weight_copies import quantize_weight
from loka.nn.fp8_weight import Fp8Weight, dequantized, scale_length, transposed
from loka.nn.site import Site

ROWWISE = "emulated:rowwise_e4m3_pow2"
SHAPES = [(48, 32), (33, 20), (1, 130)]


def made(rows, columns, dtype=torch.float32):
    weight = torch.randn(rows, columns) * 2.0 ** -torch.linspace(0, 12, rows)[:, None]
    copies = quantize_weight(weight, transposed=False)
    row = copies.row[:rows, :columns].contiguous()
    scale = copies.scale[:1].repeat(scale_length(rows, columns))
    return Fp8Weight(row, scale, dtype), (row.float() * scale[0]).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_site_gives_what_it_gives_for_the_numbers(shape):
    """Bit for bit: they are FP8 under powers of two already, so quantizing them again rounds nothing."""
    low, numbers = made(*shape)
    found = []
    for weight in (torch.nn.Parameter(low), torch.nn.Parameter(numbers)):
        site = Site("w", (ROWWISE, ROWWISE, ROWWISE), torch.device("cpu"))
        x = torch.randn(24, shape[1], generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = site(x, weight)
        y.square().sum().backward()
        assert type(weight.grad) is torch.Tensor
        assert weight.grad.dtype == weight.dtype
        found.append((y.detach(), x.grad, weight.grad, site.health))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_backward_keeps_the_weight_and_no_copy():
    """FSDP2 frees its bytes between forward and backward."""
    weight = torch.nn.Parameter(made(48, 32)[0])
    site = Site("w", (ROWWISE, ROWWISE, ROWWISE), torch.device("cpu"))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        site(torch.randn(24, 32).requires_grad_(), weight)
    assert any(one is weight or isinstance(one, Fp8Weight) for one in kept)
    assert not any(tuple(one.shape) == (32, 48) for one in kept)


def test_a_scale_of_nan_is_flagged_in_both_gemms():
    low, _ = made(48, 32)
    low.scale.fill_(torch.nan)
    site = Site("w", (ROWWISE, ROWWISE, ROWWISE), torch.device("cpu"))
    x = torch.randn(24, 32).requires_grad_()
    y = site(x, torch.nn.Parameter(low))
    y.sum().backward()
    assert y.isnan().all()
    low.scale.fill_(1.0)
    site(x, torch.nn.Parameter(low)).sum().backward()
    assert site.health[:2, 2].tolist() == [1, 1]


@pytest.mark.parametrize(
    "reads",
    [
        *(lambda w: w + 1, lambda w: w.t(), lambda w: torch.randn(3, 32) @ w.t(), lambda w: w[:2], lambda w: w.add_(1)),
        lambda w: w.as_strided(w.shape, w.stride(), 1),
    ],
)
def test_what_is_no_site_may_not_read_it(reads):
    with pytest.raises(LokaError, match=r"\[48, 32\] that was gathered in FP8"):
        reads(made(48, 32)[0])


@pytest.mark.parametrize("watched", [False, True])
def test_a_gradient_in_high_precision_may_not_either(watched):
    site = Site("w", (ROWWISE, "hp", ROWWISE), torch.device("cpu"))
    y = site(torch.randn(24, 32).requires_grad_(), torch.nn.Parameter(made(48, 32)[0]))
    mode = FlopCounterMode(display=False) if watched else contextlib.nullcontext()
    with mode, pytest.raises(LokaError, match="gathered in FP8"):
        y.sum().backward()


def test_ops_of_compiled_graphs():
    low, numbers = made(33, 20, torch.bfloat16)
    assert torch.equal(dequantized(low.row, low.scale, torch.bfloat16), numbers)
    turned = transposed(low.row, torch.zeros(1))
    assert torch.equal(turned.float(), low.row.float().t())
    assert turned.is_contiguous()
    for op, args in ((dequantized, (low.row, low.scale, torch.bfloat16)), (transposed, (low.row, low.scale))):
        torch.library.opcheck(op, args, test_utils="test_faketensor")
