"""The GEMM with a cross layer in its epilogue against its twin: on a GPU, and in triton's interpreter.

There casts are torch's and so FP8 is compared to the step. The bound of x' = x_0 (u + b) + x is that of u
times |x_0|, and a rounding each of the product's sum, of x' in float32 and of x' as it is written. u lies
within `accumulation_bound` of the exact product on a GPU, and in the interpreter within that of
float32 sums, K 2^-24 of sum |a||w|. What is written in FP8 is compared with the exact x' in the same
way: a bound to both sides, cast, holds what may come out, for rounding and saturation are monotonic.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from cases import combinations, on_gpu_or_cpu

from loka.core.problem import round_up
from loka.core.producer import cast_given
from loka.core.recipe import Cast, Format, Granularity
from loka.core.reference import Quantized, accumulation_bound, quantize
from loka.kernels.gemm_cross import gemm_cast, gemm_cross, unsupported

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
fused = pytest.importorskip("loka.kernels.triton.gemm_cross")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

E4M3 = Cast(Format.E4M3, Granularity.TENSOR)

CONFIGS = {
    "fast": fused.BEST,
    "exact": fused.BEST,
    "wide, two programs": fused.Config(block_n=128, stages=1, per_sm=2),
}
SHAPES = [  # M, features, K: tails of all sides, rows that a descriptor cannot describe, full rank
    (1, 16, 16),
    (70, 100, 20),
    (37, 37, 130),
    (1, 1, 16),
    on_gpu_or_cpu((300, 1000, 96), (130, 300, 144)),
    (129, 208, 208),
    pytest.param((8192, 3456, 512), marks=pytest.mark.gpu),
    pytest.param((2048, 3456, 512), marks=pytest.mark.gpu),
    pytest.param((512, 3456, 512), marks=pytest.mark.gpu),
    pytest.param((8192, 1000, 96), marks=pytest.mark.gpu),
    pytest.param((2047, 3456, 1024), marks=pytest.mark.gpu),
]
SCALE_OUT = 2.0**-6  # 7 is the largest number: something saturates


class Layer:
    """Normal data of a cross layer, quantized and padded as the fused path has it; a row of zeros, one
    mostly subnormal in FP8, and features without weights."""

    def __init__(self, rows: int, features: int, inner: int, device: torch.device, *, bias: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        a, w = normal(rows, inner), normal(features, inner) / inner**0.5
        if rows > 5:
            a[3], a[5] = 0, a[5] * 2.0**-11
        if features > 9:
            w[9] = 0
        deep, wide = round_up(inner, 16), round_up(features, 16)
        given = torch.tensor([2.0**-5], device=device)
        self.a = quantize(a.to(device), E4M3, scale=given, padded=(rows, deep))
        self.w = quantize(w.to(device), E4M3, scale=given / 64, padded=(wide, deep))
        self.x0, self.x = (normal(rows, features).bfloat16().to(device) for _ in range(2))
        self.bias = normal(features).bfloat16().to(device) if bias else None

    def run(self, run: object, *, scale_out: float | None = SCALE_OUT, joint: bool = False, **how: object):
        given = None if scale_out is None else torch.tensor([scale_out], device=self.x.device)
        scales = self.a.scale.view(1), self.w.scale.view(1)
        x = self.x0 if joint else self.x
        return run(self.a.data, self.w.data, *scales, self.bias, self.x0, x, scale_out=given, **how)

    def exact(self, *, fast: bool, joint: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """x' [M, N] in float64, and how far float32 may be from it."""
        left, right = self.a.data.double() * self.a.scale, self.w.data.double() * self.w.scale
        u, size = left @ right.t(), left.abs() @ right.abs().t()
        features = self.x.shape[1]
        if u.is_cuda:
            wrong = accumulation_bound(self.a, self.w, fast=fast, dtype=torch.float32).double()
        else:
            wrong = left.shape[1] * 2.0**-24 * size
        u, wrong = u[:, :features], wrong[:, :features]
        shift = 0.0 if self.bias is None else self.bias.double()
        x0, x = self.x0.double(), (self.x0 if joint else self.x).double()
        value = x0 * (u + shift) + x
        rounding = 2.0**-24 * (x0.abs() * (u + shift).abs() * 2 + value.abs())
        return value, wrong * x0.abs() + rounding


@functools.cache
def of_shape(shape: tuple[int, int, int], device: torch.device) -> Layer:
    """One for all configurations: drawing a large one takes longer than all that is done with it."""
    return Layer(*shape, device, bias=True)


def check(layer: Layer, got: object, *, fast: bool, scale_out: float | None, joint: bool = False) -> None:
    value, bound = layer.exact(fast=fast, joint=joint)
    assert got.hp.dtype == torch.bfloat16
    assert got.hp.shape == value.shape
    assert got.hp.is_contiguous()
    assert ((got.hp.double() - value).abs() <= bound + 2.0**-8 * (value.abs() + bound)).all()
    assert (got.row is None) == (scale_out is None)
    if got.row is None or scale_out is None:
        return
    rows, features = value.shape
    assert got.row.dtype == Format.E4M3.dtype
    assert got.row.shape == (rows, round_up(features, 16))
    assert got.row.is_contiguous()
    assert (got.row.view(torch.uint8)[:, features:] == 0).all(), "padding is zero to the bit"
    given = torch.tensor([scale_out], device=value.device)
    low, high = (cast_given(side.float(), given).float() for side in (value - bound, value + bound))
    found = got.row[:, :features].float()
    # In float32 the bounds are rounded, too, by less than what they leave to the kernel.
    assert ((low <= found) & (found <= high)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_matches_the_exact_result(
    name: str, shape: tuple[int, int, int], device: torch.device
) -> None:
    layer, fast = of_shape(shape, device), name != "exact"
    got = layer.run(fused.gemm_cross_fused, fast=fast, config=CONFIGS[name])
    check(layer, got, fast=fast, scale_out=SCALE_OUT)


@pytest.mark.parametrize(
    ("bias", "joint", "scale_out", "fast", "features"),
    combinations(
        [False, True],
        [False, True],
        [SCALE_OUT, 2.0**-60, 2.0**60, None],
        [False, True],
        [100, 96],
        together=2,
    ),
    ids=str,
)
def test_every_kind_of_layer_matches_its_twin(
    bias: bool, joint: bool, scale_out: float | None, fast: bool, features: int, device: torch.device
) -> None:
    """Also the last of a stack, which writes no FP8, and scales that all saturates or vanishes under."""
    layer = Layer(70, features, 48, device, bias=bias)
    how = {"scale_out": scale_out, "joint": joint, "fast": fast}
    for run in (fused.gemm_cross_fused, gemm_cross):
        check(layer, layer.run(run, **how), **how)


@pytest.mark.parametrize("name", CONFIGS)
def test_small_integers_leave_nothing_to_rounding(name: str, device: torch.device) -> None:
    """The result is the twin's, bit for bit: every sum and product is exact in every format on the way."""
    generator = torch.Generator().manual_seed(0)

    def whole(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float().to(device)

    layer = Layer(70, 136, 144, device, bias=True)
    for side, rows in (("a", 70), ("w", 144)):
        values = whole(1, rows, 144).to(Format.E4M3.dtype)
        if side == "w":
            values.view(torch.uint8)[136:] = 0
        setattr(layer, side, Quantized(values, torch.ones(1, 1, device=device), E4M3))
    layer.x0, layer.x, layer.bias = whole(1, 70, 136).bfloat16(), whole(4, 70, 136).bfloat16(), whole(3, 136)
    fast = name != "exact"
    got = layer.run(fused.gemm_cross_fused, scale_out=1.0, fast=fast, config=CONFIGS[name])
    u = (layer.a.data.float() @ layer.w.data.float().t())[:, :136]
    value = layer.x0.float() * (u + layer.bias) + layer.x.float()
    assert torch.equal(got.hp.float(), value)
    wanted = cast_given(value, torch.ones(1, device=device))
    assert torch.equal(got.row[:, :136].float(), wanted.float())


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_not_finite_shows_where_it_is(name: str, device: torch.device) -> None:
    """NaN in a row of A is in all of x' and none of its padding; infinity is NaN in FP8, where saturation
    would hide it; other rows stay as they are."""
    layer = Layer(70, 100, 48, device, bias=True)
    fast = name != "exact"
    before = layer.run(fused.gemm_cross_fused, fast=fast, config=CONFIGS[name])
    layer.a.data.view(torch.uint8)[7, 5] = 0x7F
    layer.x0[11, 4], layer.x[12, 6], layer.x[13, 8] = torch.inf, torch.nan, -torch.inf
    for run in ({"config": CONFIGS[name]}, {}):
        got = layer.run(fused.gemm_cross_fused if run else gemm_cross, fast=fast, **run)
        bad = torch.zeros(70, 100, dtype=torch.bool, device=device)
        bad[7] = bad[11, 4] = bad[12, 6] = bad[13, 8] = True
        assert torch.equal(~got.hp.isfinite(), bad)
        assert torch.equal(got.row[:, :100].float().isnan(), bad)
        assert (got.row.view(torch.uint8)[:, 100:] == 0).all()
        if run:
            assert torch.equal(got.hp[~bad], before.hp[~bad])


def test_the_largest_numbers_saturate(device: torch.device) -> None:
    layer = Layer(70, 96, 48, device, bias=False)
    layer.x[3, 4], layer.x[5, 6] = 1e30, -1e30
    got = layer.run(fused.gemm_cross_fused)
    assert got.row[3, 4].float() == 448
    assert got.row[5, 6].float() == -448
    check(layer, got, fast=True, scale_out=SCALE_OUT)


def test_operands_may_be_slices(device: torch.device) -> None:
    """With rows that lie 16 bytes apart in multiples, and such that do not."""
    for wide, first in ((160, 16), (151, 3)):
        large, other = (Layer(37, size, 48, device, bias=False) for size in (wide, wide + 16))
        layer = Layer(37, 100, 48, device, bias=True)
        layer.x0, layer.x = large.x0[:, first : first + 100], other.x[:, first : first + 100]
        for config in CONFIGS.values():
            check(layer, layer.run(fused.gemm_cross_fused, config=config), fast=True, scale_out=SCALE_OUT)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("scale_out", [SCALE_OUT, 2.0**-11], ids=["", "saturates"])
@pytest.mark.parametrize(
    "shape", [(70, 100, 48), pytest.param((8192, 512, 3456), marks=pytest.mark.gpu)], ids=str
)
def test_a_gemm_may_cast_its_result(
    shape: tuple[int, int, int], scale_out: float, fast: bool, device: torch.device
) -> None:
    """v in FP8: x' with x_0 of ones and x of zeros. NaN in a row of A is in all of it."""
    layer = Layer(*shape, device, bias=False)
    layer.x0, layer.x = torch.ones_like(layer.x0), torch.zeros_like(layer.x)
    given = torch.tensor([scale_out], device=device)
    value, bound = layer.exact(fast=fast)
    low, high = (cast_given(side.float(), given).float() for side in (value - bound, value + bound))
    scales = layer.a.scale.view(1) / given, layer.w.scale.view(1)
    got = gemm_cast(layer.a.data, layer.w.data, *scales, fast=fast)
    assert got.shape == (shape[0], round_up(shape[1], 16))
    found = got[:, : shape[1]].float()
    assert ((low <= found) & (found <= high)).all()
    assert (got.view(torch.uint8)[:, shape[1] :] == 0).all()
    assert (found.abs().max() == 448) == (scale_out != SCALE_OUT)
    layer.a.data.view(torch.uint8)[7, 5] = 0x7F
    assert gemm_cast(layer.a.data, layer.w.data, *scales, fast=fast)[7].float().isnan().all()


def test_what_cannot_run_is_refused() -> None:
    layer = Layer(37, 100, 48, torch.device("cpu"), bias=True)
    assert unsupported(torch.bfloat16, "sm_90", 1024) is None
    assert "1040" in (unsupported(torch.bfloat16, "sm_90", 1040) or "")
    assert unsupported(torch.bfloat16, "sm_100", 512) is not None
    layer.x0, layer.x = layer.x0.float(), layer.x.float()
    with pytest.raises(ValueError, match="bfloat16"):
        layer.run(gemm_cross)
    layer.x = layer.x[:, :90]
    with pytest.raises(ValueError, match="do not fit together"):
        layer.run(gemm_cross)
    layer = Layer(37, 100, 48, torch.device("cpu"), bias=True)
    layer.a = replace(layer.a, data=layer.a.data.float())
    with pytest.raises(ValueError, match="row-major e4m3"):
        layer.run(gemm_cross)
    layer = Layer(37, 100, 48, torch.device("cpu"), bias=True)
    layer.bias = layer.bias[:50]
    with pytest.raises(ValueError, match="bias"):
        layer.run(gemm_cross)
