"""What forward keeps in eight bits instead of Z, and backward from it: kernels against their twins.

Steps are powers of two and a value's place in one is rounded to a 256th of it, so that kernel and twin
keep the same bytes of the same Z, and backward starts from the same values.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import on_gpu_or_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_gemm import CONFIGS, EXACT, SCALE_OUT, operands
from test_triton_gemm import epilogue as block_norm
from test_triton_producer import Case, case, check_backward, check_low, power

from loka.core import producer as twin
from loka.core.chain import Activation, Epilogue, Norm
from loka.core.chain_recipe import Z8_NOISE
from loka.core.producer import NO_PARAMETERS, Rounded, empty_rounded, keep_rounded, restored

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


ROWWISE = [Epilogue(norm=norm, eps=1e-6, activation=Activation.SWISH) for norm in (Norm.RMS, Norm.LAYER)]


def kept(z: torch.Tensor, epilogue: Epilogue) -> Rounded:
    into = empty_rounded(*z.shape, epilogue, z.device)
    keep_rounded(z, epilogue, into)
    return into


def assert_same(got: Rounded, expected: Rounded) -> None:
    torch.testing.assert_close(got.steps, expected.steps, rtol=0, atol=0, equal_nan=True)
    counts = -(-got.values.shape[1] // got.steps.shape[1])
    known = (~expected.steps.isnan() & (expected.steps > 0)).repeat_interleave(counts, dim=1)
    known = known[:, : got.values.shape[1]]
    assert torch.equal(got.values[known], expected.values[known])


@settings(max_examples=60, deadline=None)
@given(st.integers(-90, 100), st.integers(0, 2**32 - 1), st.sampled_from([1, 16, 100]))
def test_restored_within_half_a_step_and_with_its_sign(exponent: int, seed: int, features: int) -> None:
    """Half a step, and a 512th for the rounding to 256ths; the largest of a block has 63.5 to 127 steps, in
    the range of steps that are not the least."""
    z = torch.randn(3, features, generator=torch.Generator().manual_seed(seed)).double().mul(2.0**exponent)
    z = z.float()
    z[1] = 0
    found = kept(z, of_block(16))
    close = restored(found, of_block(16))
    steps = found.steps.repeat_interleave(16, dim=1)[:, :features]
    assert ((close - z).abs() <= steps * (0.5 + 2**-9)).all()
    clear = z.abs() > steps / 512  # a 512th above zero is rounded to it
    assert torch.equal(close.sign()[clear], z.sign()[clear])
    assert (close[1] == 0).all(), "a block of zeros"
    for place, block in enumerate(z.split(16, dim=1)):
        largest, step = block.abs().amax(dim=1), found.steps[:, place]
        some = largest > 0
        assert (step[some] * 127 >= largest[some]).all()
        assert (step[some] * 63.5 < largest[some]).all()
        assert (torch.frexp(step[some])[0] == 0.5).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_produce_keeps_what_its_twin_keeps(shape: tuple[int, int, int], device: torch.device) -> None:
    rows, features, block = shape
    check_produced(case(rows, features, of_block(block), device))


@pytest.mark.parametrize("epilogue", ROWWISE, ids=str)
@pytest.mark.parametrize("features", [100, 600])
def test_produce_keeps_it_behind_other_norms(epilogue: Epilogue, features: int, device: torch.device) -> None:
    """With a bias, gamma and beta: what is kept is the GEMM's result, without them."""
    c = case(9, features, epilogue, device, parameters=True)
    check_produced(c)
    check_backward(c, power(-8, device), kept=kept(c.z, c.epilogue))


def check_produced(c: Case) -> None:
    rows, features = c.z.shape
    for scale in (power(-4, c.z.device), None):
        columns = c.sides[0] if scale is not None else features
        into = empty_rounded(rows, features, c.epilogue, c.z.device)
        given_scale = {"scale": scale, "columns": columns}
        expected = twin.produce(c.z, c.epilogue, c.parameters, **given_scale)
        got = fused.produce_fused(c.z, c.epilogue, c.parameters, **given_scale, into=into)
        assert_same(into, kept(c.z, c.epilogue))
        if scale is not None:
            check_low(got, expected, (rows, features))
        else:
            torch.testing.assert_close(got.float(), expected.float(), rtol=2.0**-7, atol=1e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, and what is tested
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_zero_huge_tiny_and_broken_rows(device: torch.device) -> None:
    """A NaN and an infinity make their block NaN, and no gradient of another row; zeros stay zeros."""
    c = case(13, 128, of_block(64), device)
    c.z[3], c.z[5], c.z[7] = 0, c.z[5] * 1e30, c.z[7] * 1e-30
    c.z[9, 70], c.z[11, 5] = math.nan, math.inf
    c.z[2] = 0
    c.z[2, 17] = 1e4  # all of a block's energy in one value
    into = empty_rounded(13, 128, c.epilogue, device)
    fused.produce_fused(c.z, c.epilogue, NO_PARAMETERS, scale=None, columns=128, into=into)
    assert_same(into, kept(c.z, c.epilogue))
    close = restored(into, c.epilogue)
    assert (close[3] == 0).all()
    assert close[2, 17].item() == pytest.approx(c.z[2, 17].item(), rel=0.5 / 63.5)
    for row, block in ((9, slice(64, 128)), (11, slice(0, 64))):
        outside = [i for i in range(128) if not block.start <= i < block.stop]
        assert close[row, block].isnan().all()
        assert not close[row, outside].isnan().any()
    options = {"sides": c.sides, "grad_scale": power(-17, device), "hp": True}
    made = fused.derive_fused(c.grad, into, c.epilogue, NO_PARAMETERS, **options).hp
    exact = twin.derive(c.grad, into, c.epilogue, NO_PARAMETERS, **options).hp
    broken = made.isnan().any(1).nonzero().flatten().tolist()
    assert broken == exact.isnan().any(1).nonzero().flatten().tolist()
    assert {9, 11} <= set(broken) <= {5, 9, 11}  # the squares of 1e30 are no float32


EVERY = [(Activation.HARD_SWISH, shape) for shape in SHAPES]
EVERY += [(activation, SHAPES[1]) for activation in Activation if activation is not Activation.HARD_SWISH]


@pytest.mark.parametrize(("activation", "shape"), EVERY, ids=str)
def test_derive_from_what_was_kept(
    activation: Activation, shape: tuple[int, int, int], device: torch.device
) -> None:
    rows, features, block = shape
    c = case(rows, features, of_block(block, activation), device)
    check_backward(c, power(-8, device), kept=kept(c.z, c.epilogue))


@pytest.mark.parametrize("over", [{"real": False}, {"unit_in_turned": True}], ids=str)
def test_derive_in_its_other_modes(over: dict[str, object], device: torch.device) -> None:
    c = case(16, 256, of_block(64), device)
    check_backward(c, power(-17 if "real" in over else -8, device), kept=kept(c.z, c.epilogue), **over)


def test_derive_is_right_to_the_rounding_of_z() -> None:
    """Against autograd through norm and activation in float64. Of 64 normal values a few in 100 blocks have
    one above 4 rms: three in four have the step that `Z8_NOISE` is of, or half of it. The norm's projection
    has 2 / 64 of the noise more, and y itself one in the mean along which it projects."""
    c = case(200, 256, of_block(64), torch.device("cpu"))
    into = kept(c.z, c.epilogue)
    z = c.z.double().requires_grad_()
    blocks = z.view(200, 4, 64)
    y = (blocks * (blocks.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).view(200, 256)
    torch.nn.functional.hardswish(y).backward(c.grad.double())
    found, out, _, _ = twin.differentiate(c.grad, into, c.epilogue, NO_PARAMETERS)
    noise = ((found - z.grad).square().sum() / z.grad.square().sum()).item()
    told = Z8_NOISE[Activation.HARD_SWISH]
    assert 0 < noise < 10**-3.15 * (told.slope + 4 / 64)
    exact = torch.nn.functional.hardswish(y.detach())
    off = (out - exact).square().sum() / exact.square().sum()
    assert 0.15 * told.value < off / 10**-3.15 < told.value


def test_a_column_of_zeros_has_no_gradient_behind_relu() -> None:
    """As in PyTorch, where ReLU's slope at zero is zero: weights that were pruned stay so."""
    c = case(40, 128, of_block(64, Activation.RELU), torch.device("cpu"))
    c.z[:, ::16] = 0
    found, _, _, _ = twin.differentiate(c.grad, kept(c.z, c.epilogue), c.epilogue, NO_PARAMETERS)
    exact, _, _, _ = twin.differentiate(c.grad, c.z, c.epilogue, NO_PARAMETERS)
    noise = (found - exact).square().sum() / exact.square().sum()
    assert noise < 10**-3.15 * (Z8_NOISE[Activation.RELU].slope + 4 / 64)


@pytest.mark.parametrize("activation", list(Activation))
def test_the_noise_that_plans_count_with_is_what_is_there(activation: Activation) -> None:
    """Of normal values under steps of 2^-4, which one of 6 in each block asks for."""
    y = torch.randn(8000, 256, generator=torch.Generator().manual_seed(0))
    y[:, 0] = 6
    low = restored(kept(y, of_block(256)), of_block(256))[:, 1:]
    y = y[:, 1:]

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
    assert found == pytest.approx(list(Z8_NOISE[activation]), rel=0.1, abs=0.02)


GEMM_SHAPES = on_gpu_or_cpu(
    [(1, 16, 64, 64), (70, 208, 192, 64), (150, 144, 384, 128), (517, 208, 512, 256)],
    [(70, 80, 192, 64), (3, 48, 384, 128), (70, 48, 256, 256)],
)


@pytest.mark.parametrize("name", [*CONFIGS, *EXACT])
@pytest.mark.parametrize("shape", GEMM_SHAPES, ids=str)
def test_the_gemm_keeps_what_its_z_implies(
    name: str, shape: tuple[int, int, int, int], device: torch.device
) -> None:
    """Its bytes are of float32, Z is rounded to bfloat16: a half-step of both apart, and a step where the
    largest of a block lies at a power of two. Out of the same launch come the same results."""
    rows, inner, columns, block = shape
    if name in ("whole", "loading warps") and device.type == "cuda":
        pytest.skip("no configuration that keeps anything is chosen there")
    a, w = (t for t in operands(rows, inner, columns))
    of = block_norm(block)
    options = {"config": {**CONFIGS, **EXACT}[name], "fast": name not in EXACT}
    data = [t.to(device) for t in (a.data, w.data, a.scale.view(1), w.scale.view(1))]
    scale_out = torch.tensor([SCALE_OUT], device=device)
    into = empty_rounded(rows, columns, of, device)
    out, z = gemm.gemm_produce_fused(*data, of, scale_out=scale_out, keep=True, **options)
    again, nothing = gemm.gemm_produce_fused(*data, of, scale_out=scale_out, keep=False, into=into, **options)
    assert nothing is None
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    steps = into.steps.repeat_interleave(block, dim=1)
    close = restored(into, of)
    apart = (close - z.float()).abs()
    assert (apart <= steps * (0.5 + 2**-8) + z.float().abs() * 2.0**-8).all()
    largest = z.float().abs().view(rows, -1, block).amax(dim=2)
    some = largest > 0
    assert (into.steps[some] * 127 >= largest[some] * (1 - 2**-8)).all()
    assert (into.steps[some] * 63.5 <= largest[some] * (1 + 2**-8)).all()
    assert (close[3 % rows] == 0).all()


def test_a_nan_in_the_gemm_is_kept(device: torch.device) -> None:
    a, w = operands(70, 144, 256)
    a.data[7, 100] = torch.nan
    into = empty_rounded(70, 256, block_norm(64), device)
    data = [t.to(device) for t in (a.data, w.data, a.scale.view(1), w.scale.view(1))]
    gemm.gemm_produce_fused(*data, block_norm(64), scale_out=None, keep=False, into=into)
    assert into.steps.isnan().any(1).nonzero().tolist() == [[7]]
    assert into.steps[7].isnan().all()
