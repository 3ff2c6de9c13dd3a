"""What forward keeps in FP8 instead of Z, and backward from it: kernels against their twins.

Kept are y = norm(Z) in e4m3 under a constant scale and 1 / rms. Twin and kernel sum a row's squares in
another order, so that y differs by float32's rounding and its FP8 by a step where that lies on a
boundary: less than 1 in 1000. Both backwards then read the same bytes. In the interpreter
these are cast by torch, so that NaN and rounding are right there, too.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from cases import on_gpu_or_cpu
from test_triton_gemm import CONFIGS, EXACT, SCALE_OUT, operands
from test_triton_gemm import epilogue as block_norm
from test_triton_producer import Case, case, check_backward, check_low, power

from loka.core import producer as twin
from loka.core.chain import Activation, Epilogue, Norm
from loka.core.chain_recipe import Y8_NOISE
from loka.core.producer import NO_PARAMETERS, Normal, empty_normal, normal_scale
from loka.core.recipe import Format
from loka.kernels.producer import keeps_normal

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
fused = pytest.importorskip("loka.kernels.triton.producer")
gemm = pytest.importorskip("loka.kernels.triton.gemm")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = on_gpu_or_cpu(
    [(1, 64, 64), (37, 100, 32), (70, 300, 100), (32, 512, 256), (4097, 1024, 256), (8192, 512, 256)],
    [(1, 64, 64), (21, 100, 32), (13, 300, 100), (32, 512, 256)],
)


def of_block(block: int, activation: Activation = Activation.HARD_SWISH) -> Epilogue:
    return Epilogue(norm=Norm.BLOCK, block=block, eps=1e-6, activation=activation)


def check_normal(got: Normal, expected: Normal, scale: float) -> None:
    assert got.values.dtype == Format.E4M3.dtype
    assert got.inverse.dtype == torch.float32
    torch.testing.assert_close(got.inverse, expected.inverse, rtol=1e-5, atol=0, equal_nan=True)
    x, y = got.values.float(), expected.values.float()
    assert torch.equal(x.isnan(), y.isnan())
    known = ~y.isnan()
    step = torch.maximum(y.abs() * 2.0**-3, torch.tensor(Format.E4M3.smallest_subnormal))
    assert ((x - y).abs() <= step)[known].all()
    assert (x != y)[known].sum().item() <= 2 + 1e-3 * x.numel()
    assert x[known].abs().max() <= 448


def kept_by_both(c: Case, *, scale: torch.Tensor | None) -> tuple[Normal, Normal]:
    rows, features = c.z.shape
    both = [empty_normal(rows, features, c.epilogue, c.z.device) for _ in range(2)]
    columns = c.sides[0] if scale is not None else features
    expected = twin.produce(c.z, c.epilogue, NO_PARAMETERS, scale=scale, columns=columns, into=both[0])
    got = fused.produce_fused(c.z, c.epilogue, NO_PARAMETERS, scale=scale, columns=columns, into=both[1])
    if scale is not None:
        check_low(got, expected, (rows, features))
    else:
        torch.testing.assert_close(got.float(), expected.float(), rtol=2.0**-7, atol=1e-6, equal_nan=True)
    return both[0], both[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_produce_keeps_what_its_twin_keeps(shape: tuple[int, int, int], device: torch.device) -> None:
    rows, features, block = shape
    c = case(rows, features, of_block(block), device)
    for scale in (power(-4, device), None):
        expected, got = kept_by_both(c, scale=scale)
        assert got.inverse.shape == (rows, -(-features // block))
        check_normal(got, expected, normal_scale(c.epilogue, features))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, and what is tested
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_zero_huge_tiny_and_broken_rows(device: torch.device) -> None:
    """1e30 squared is no float32: the norm makes zeros of it. A NaN and an infinity make their block NaN, and
    no gradient of another row; what saturates nowhere needs no clamp."""
    c = case(13, 128, of_block(64), device)
    c.z[3], c.z[5], c.z[7] = 0, c.z[5] * 1e30, c.z[7] * 1e-30
    c.z[9, 70], c.z[11, 5] = math.nan, math.inf
    c.z[2] = 0
    c.z[2, 17] = 1e4  # all of a block's energy in one value: the bound sqrt(64) itself
    expected, got = kept_by_both(c, scale=None)
    check_normal(got, expected, normal_scale(c.epilogue, 128))
    assert got.values[2, 17].float() * normal_scale(c.epilogue, 128) == 8
    assert (got.values.float()[[3, 5]] == 0).all()
    for row, block in ((9, slice(64, 128)), (11, slice(0, 64))):
        nan = got.values.float()[row].isnan()
        assert nan.any()
        assert not nan[[i for i in range(128) if not block.start <= i < block.stop]].any()
    made = fused.derive_fused(
        c.grad, got, c.epilogue, NO_PARAMETERS, sides=c.sides, grad_scale=power(-17, device), hp=True
    )
    assert made.hp is not None
    exact = twin.derive(
        c.grad, got, c.epilogue, NO_PARAMETERS, sides=c.sides, grad_scale=power(-17, device), hp=True
    ).hp
    broken = made.hp.isnan().any(1).nonzero().flatten().tolist()
    assert broken == exact.isnan().any(1).nonzero().flatten().tolist() == [9, 11]
    assert (made.hp[5] == 0).all()


EVERY = [(Activation.HARD_SWISH, shape) for shape in SHAPES]
EVERY += [(activation, SHAPES[1]) for activation in Activation if activation is not Activation.HARD_SWISH]


@pytest.mark.parametrize(("activation", "shape"), EVERY, ids=str)
def test_derive_from_what_was_kept(
    activation: Activation, shape: tuple[int, int, int], device: torch.device
) -> None:
    rows, features, block = shape
    c = case(rows, features, of_block(block, activation), device)
    kept = empty_normal(rows, features, c.epilogue, device)
    twin.keep_normal(c.z, c.epilogue, kept)
    check_backward(c, power(-8, device), kept=kept)


@pytest.mark.parametrize("over", [{"real": False}, {"unit_in_turned": True}], ids=str)
def test_derive_in_its_other_modes(over: dict[str, object], device: torch.device) -> None:
    c = case(16, 256, of_block(64), device)
    kept = empty_normal(16, 256, c.epilogue, device)
    twin.keep_normal(c.z, c.epilogue, kept)
    check_backward(c, power(-17 if "real" in over else -8, device), kept=kept, **over)


def test_derive_is_right_to_the_rounding_of_y() -> None:
    """Against autograd through norm and activation in float64. y is off by 2^-4 of itself at most, in
    energy by 10^-3.15 (31.5 dB). core/chain_recipe.py says what share of it the slope and the value of hard
    swish have; the norm's projection has 2 / 64 more. 1.1: the scatter of 51200 elements."""
    c = case(200, 256, of_block(64), torch.device("cpu"))
    kept = empty_normal(200, 256, c.epilogue, torch.device("cpu"))
    twin.keep_normal(c.z, c.epilogue, kept)
    z = c.z.double().requires_grad_()
    blocks = z.view(200, 4, 64)
    y = (blocks * (blocks.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).view(200, 256)
    torch.nn.functional.hardswish(y).backward(c.grad.double())
    found, out, _, _ = twin.differentiate(c.grad, kept, c.epilogue, NO_PARAMETERS)
    noise = ((found - z.grad).square().sum() / z.grad.square().sum()).item()
    assert noise < 10**-3.15 * 1.1 * (Y8_NOISE[Activation.HARD_SWISH].slope + 2 / 64)
    exact = torch.nn.functional.hardswish(y.detach())
    off = (out - exact).square().sum() / exact.square().sum()
    assert off < 10**-3.15 * 1.1 * Y8_NOISE[Activation.HARD_SWISH].value


@pytest.mark.parametrize("activation", list(Activation))
def test_the_noise_that_plans_count_with_is_what_is_there(activation: Activation) -> None:
    """Of normal values, in units of a rounding's energy. 2e6 of them have 400 at hard swish's kink."""
    y = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0))
    low = y.mul(16).to(Format.E4M3.dtype).float() / 16

    def activated(values: torch.Tensor) -> list[torch.Tensor]:
        leaf = values.clone().requires_grad_()
        functions = torch.nn.functional
        function = {
            Activation.NONE: torch.clone,
            Activation.HARD_SWISH: functions.hardswish,
            Activation.RELU: functions.relu,
            Activation.SWISH: functions.silu,
            Activation.GELU: functions.gelu,
        }[activation]
        out = function(leaf)
        return [torch.autograd.grad(out.sum(), leaf)[0], out.detach()]

    found = [
        float((x - z).square().sum() / z.square().sum()) / 10**-3.15
        for x, z in zip(activated(low), activated(y), strict=True)
    ]
    assert found == pytest.approx(list(Y8_NOISE[activation]), rel=0.1, abs=0.05)


GEMM_SHAPES = on_gpu_or_cpu(
    [(1, 16, 64, 64), (70, 208, 192, 64), (150, 144, 384, 128), (517, 208, 512, 256)],
    [(70, 80, 192, 64), (3, 48, 384, 128), (70, 48, 256, 256)],
)


@pytest.mark.parametrize("name", [*CONFIGS, *EXACT])
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_the_gemm_keeps_what_its_z_implies(
    name: str, shape: tuple[int, int, int, int], device: torch.device
) -> None:
    """The twin of Z that was rounded to bfloat16, which the kernel's was not: 2^-8 of y and as much through
    its mean, which flips 1 FP8 rounding of 16 at most. Out of the same launch come the same results."""
    rows, inner, columns, block = shape
    if name in ("whole", "loading warps") and device.type == "cuda":
        pytest.skip("no configuration that keeps anything is chosen there")
    a, w = (t for t in operands(rows, inner, columns))
    of = block_norm(block)
    options = {"config": {**CONFIGS, **EXACT}[name], "fast": name not in EXACT}
    data = [t.to(device) for t in (a.data, w.data, a.scale.view(1), w.scale.view(1))]
    given = torch.tensor([SCALE_OUT], device=device)
    kept = empty_normal(rows, columns, of, device)
    out, z = gemm.gemm_produce_fused(*data, of, scale_out=given, keep=True, **options)
    again, nothing = gemm.gemm_produce_fused(*data, of, scale_out=given, keep=False, into=kept, **options)
    assert nothing is None
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    expected = empty_normal(rows, columns, of, device)
    twin.keep_normal(z, of, expected)
    torch.testing.assert_close(kept.inverse, expected.inverse, rtol=2.0**-8, atol=0)
    scale = normal_scale(of, columns)
    x, y = kept.values.float() * scale, expected.values.float() * scale
    step = torch.maximum(y.abs() * 2.0**-3, torch.tensor(scale * Format.E4M3.smallest_subnormal))
    assert ((x - y).abs() <= step).all()
    assert (x != y).float().mean() < 0.1
    assert (x[3 % rows] == 0).all()


def test_a_nan_in_the_gemm_is_kept(device: torch.device) -> None:
    a, w = operands(70, 144, 256)
    a.data[7, 100] = torch.nan
    kept = empty_normal(70, 256, block_norm(64), device)
    data = [t.to(device) for t in (a.data, w.data, a.scale.view(1), w.scale.view(1))]
    gemm.gemm_produce_fused(*data, block_norm(64), scale_out=None, keep=False, into=kept)
    for tensor in (kept.values.float(), kept.inverse):
        assert tensor.isnan().any(1).nonzero().tolist() == [[7]]
        assert tensor[7].isnan().all()


def test_where_it_can_be_kept() -> None:
    assert keeps_normal(of_block(256), 1024)
    assert keeps_normal(of_block(2048), 512)  # one block of 512
    assert not keeps_normal(of_block(1024), 2048)
    assert not keeps_normal(replace(of_block(256), gamma=True), 1024)
    for norm in (Norm.NONE, Norm.RMS, Norm.LAYER):
        assert not keeps_normal(Epilogue(norm=norm, eps=1e-6), 256)
