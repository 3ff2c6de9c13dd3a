"""Cross layers in a GEMM's epilogue, and the scales of their rows, against their twins: on a GPU, and in triton's
interpreter, where casts are torch's.

x = p (y + b) + r: a product's sums are off by `accumulation_bound` on a GPU, and by K 2^-24 of sum |a||b| in the
interpreter, times |p|; three more float32 operations round by 2^-24 of what they make, which |p| (|y| + |b|) + |r|
bounds. Its copies are rounded once more: to bfloat16, and to half a step of e4m3 under u.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import with_triton  # noqa: F401
from cases import on_gpu_or_cpu
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.numerics.reference import accumulation_bound, dequantize, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.kernels.edge.twin import row_scale
from loka.kernels.gemm.cross import longest_row
from loka.kernels.gemm.crossed_gemm import gemm_crossed, row_bound, unsupported
from loka.kernels.gemm.triton import crossed

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TENSOR, ROW = (Cast(Format.E4M3, each, power_of_two=True) for each in (Granularity.TENSOR, Granularity.ROW))
CONFIGS = {**crossed.CONFIGS, "plain": replace(crossed.CONFIGS["wide"], tma=False)}
SHAPES = [(1, 16, 16), (70, 208, 192), on_gpu_or_cpu((517, 512, 1008), (130, 144, 208))]  # T, K, N: tails of each
ADDED = ("r", "p", "nothing")


def operands(rows, inner, columns, device="cpu", size=1.0):
    """Rows of zeros, tiny and huge ones, one of p that is NaN, an infinite element of r."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    a, w = quantize(normal(rows, inner) * size, ROW), quantize(normal(columns, inner) / inner**0.5, TENSOR)
    p, r, bias = normal(rows, columns), normal(rows, columns), 0.3 * normal(columns)
    if rows > 60:
        a.data[3], p[5], r[5] = 0, 0, 0
        p[7] *= 1e-20
        p[9] *= 1e12
        p[11, 2], r[13, 4] = torch.nan, torch.inf
    return a, w, bias.bfloat16(), p.bfloat16(), r.bfloat16()


def exact(a, w, bias, p, r, *, fast, device):
    """x float64, and how far from it float32 may be."""
    left, right = dequantize(a).double(), dequantize(w).double()
    y, absolute = left @ right.t(), left.abs() @ right.abs().t()
    lost = a.shape[1] * 2.0**-24 * absolute + 2.0**-24 * y.abs()
    if device.type == "cuda":
        lost = accumulation_bound(a, w, fast=fast, dtype=torch.float32).double()
    b = 0.0 if bias is None else bias.double()
    added = 0.0 if r is None else r.double()
    x = p.double() * (y + b) + added
    size = p.double().abs() * (y.abs() + abs(b)) + abs(added)
    return x, p.double().abs() * lost + 4 * 2.0**-24 * size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "fast", "biased", "added"), [
    ("wide", True, True, "r"), ("narrow", True, False, "p"), ("plain", True, True, "nothing"),
    ("wide", False, True, "p"),
])  # fmt: skip
def test_every_configuration_matches_the_twin(shape, name, fast, biased, added, device):
    a, w, bias, p, r = operands(*shape)
    bias, r = bias if biased else None, {"r": r, "p": p, "nothing": None}[added]
    x, lost = exact(a, w, bias, p, r, fast=fast, device=device)
    scale = row_scale(x.float() * 8)
    there = [each if each is None else each.to(device) for each in (bias, p)]
    beside = there[1] if added == "p" else None if r is None else r.to(device)
    a_there, w_there = (low.data.to(device) for low in (a, w))
    scales = [each.to(device) for each in (a.scale, w.scale.view(1))]
    found = crossed.gemm_crossed_fused(
        a_there, w_there, *scales, *there, beside, scale.to(device), keep=True, fast=fast, config=CONFIGS[name]
    )
    check(found.x.cpu(), found.data.cpu(), x, lost, scale)
    alone = crossed.gemm_crossed_fused(
        a_there, w_there, *scales, *there, beside, scale.to(device), keep=False, fast=fast, config=CONFIGS[name]
    )
    assert alone.x is None
    assert torch.equal(alone.data.view(torch.uint8), found.data.view(torch.uint8))
    twin = gemm_crossed(a.data, w.data, a.scale, w.scale, bias, p, r, scale, keep=True)
    check(twin.x, twin.data, x, lost, scale)


def check(kept, data, x, lost, scale):
    """Both copies of x."""
    finite = x.abs() < 3.38e38
    kept, got = kept.double(), data.double() * scale.double()
    assert torch.equal(kept.isfinite() & finite, finite)
    assert ((kept - x).abs()[finite] <= (lost + 2.0**-8 * x.abs())[finite]).all()
    told = finite & scale.isfinite()
    assert bool(got[~told].isnan().all())
    half = (x.abs() / 16).clamp_min(2.0**-10 * scale.double())
    assert ((got - x).abs()[told] <= (half + 2 * lost)[told]).all()


def test_saturates_and_keeps_what_is_not_finite(device):
    """Where a scale were too small; infinity is NaN, as casts have it that see a whole row."""
    a, w, bias, p, r = operands(70, 32, 48)
    given = [each.to(device) for each in (a.data, w.data, a.scale, w.scale.view(1), bias, p, r)]
    found = crossed.gemm_crossed_fused(*given, torch.full((70, 1), 2.0**-20, device=device), keep=True)
    low, x = found.data.float().cpu(), found.x.float().cpu()
    assert bool(low[11, 2].isnan())
    assert bool(low[13, 4].isnan())
    assert bool((low[9].abs() == 448).any())
    assert torch.equal(low.isnan(), ~x.isfinite())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("biased", "added"), [(True, True), (False, False)])
def test_bounds_match_the_twin(shape, biased, added, device):
    a, w, bias, p, r = operands(*shape)
    arguments = a.data, a.scale, longest_row(w.data, w.scale), bias if biased else None, row_scale(p.float())
    arguments = (*arguments, row_scale(r.float()) if added else None)
    twin = row_bound(*arguments)
    found = crossed.row_bound_fused(*(each if each is None else each.to(device) for each in arguments)).cpu()
    assert found.shape == twin.shape == (shape[0], 1)
    assert torch.equal(found.isnan(), twin.isnan())
    ratio = (found / twin)[twin.isfinite()]
    assert bool(((ratio == 1) | (ratio == 2) | (ratio == 0.5)).all())  # a bound may lie on a power of two
    assert float((ratio == 1).double().mean()) > 0.9


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), rows=st.sampled_from([1, 7]), inner=st.sampled_from([16, 48]),
    columns=st.sampled_from([16, 80]), power=st.integers(-60, 60), other=st.integers(-20, 20),
    spread=st.floats(0.0, 3.0), added=st.sampled_from(ADDED), same_sign=st.booleans(),
)  # fmt: skip
def test_nothing_is_beyond_its_bound(seed, rows, inner, columns, power, other, spread, added, same_sign):
    """Of any magnitudes; also where all products have one sign and p is largest where y is."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        values = torch.randn(*shape, generator=generator) * torch.exp(spread * torch.randn(*shape, generator=generator))
        return values.abs() if same_sign else values

    a, w = quantize(drawn(rows, inner) * 2.0**power, ROW), quantize(drawn(columns, inner), TENSOR)
    bias, p = drawn(columns).bfloat16(), (drawn(rows, columns) * 2.0**other).bfloat16()
    r = {"r": drawn(rows, columns).bfloat16(), "p": p, "nothing": None}[added]
    scale = row_bound(
        a.data,
        a.scale,
        longest_row(w.data, w.scale),
        bias,
        row_scale(p.float()),
        None if r is None else row_scale(r.float()),
    )
    made = gemm_crossed(a.data, w.data, a.scale, w.scale, bias, p, r, scale, keep=True)
    told = made.x.isfinite()
    assert bool((made.x.double().abs() <= 448 * scale.double())[told].all())
    assert torch.equal(made.data.float().isnan(), ~told)


def test_huge_values_have_a_scale():
    """Where the bound overflows and the values do not."""
    a = quantize(torch.full((1, 16), 1e18), ROW)
    w = quantize(torch.full((16, 16), 1e10), TENSOR)
    p = torch.full((1, 16), 1e8).bfloat16()
    scale = row_bound(a.data, a.scale, longest_row(w.data, w.scale), None, row_scale(p.float()), None)
    made = gemm_crossed(a.data, w.data, a.scale, w.scale, None, p, None, scale, keep=True)
    assert bool(made.x.isfinite().all())
    assert bool(((made.data.float() * scale) / made.x.float() - 1).abs().max() < 0.07)


def test_nothing_of_no_rows(device):
    a, w, bias, p, r = operands(1, 16, 16)
    none = [each[:0].to(device) for each in (a.data, a.scale, p, r)]
    w, bias, size = w.data.to(device), bias.to(device), w.scale.view(1).to(device)
    bound = crossed.row_bound_fused(none[0], none[1], size, bias, none[1], None)
    assert bound.shape == (0, 1)
    made = crossed.gemm_crossed_fused(none[0], w, none[1], size, bias, none[2], none[3], bound, keep=True)
    assert (made.x.shape, made.data.shape) == ((0, 16), (0, 16))


def test_what_does_not_fit_is_refused():
    a, w, bias, p, r = operands(4, 16, 16)
    scale = torch.ones(4, 1)
    fits = {
        "a": a.data,
        "w": w.data,
        "scale_a": a.scale,
        "scale_w": w.scale,
        "bias": bias,
        "p": p,
        "r": r,
        "scale": scale,
    }
    gemm_crossed(*fits.values(), keep=False)
    for name, wrong, told in (
        ("a", a.data.float(), "a is torch.float32"), ("w", w.data[:, :8], "w is torch.float8_e4m3fn"),
        ("p", p[:, :8], "p is torch.bfloat16"), ("r", r.float(), "r is torch.float32"), ("bias", bias[:8], "bias is"),
        ("scale", scale[:2], "scale is"), ("scale_a", a.scale.double(), "scale_a is"),
        ("w", w.data.new_empty(16, 32), "fit"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            gemm_crossed(*{**fits, name: wrong}.values(), keep=False)
    assert "N=24 is not a multiple of 16" in unsupported(columns=24, inner=16, target="cpu")
    assert "sm_90" in unsupported(columns=32, inner=16, target="sm_100")


SCRIPT = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from loka.kernels.gemm.triton import crossed

names = crossed._crossed.arg_names

def built(config, added, keep):
    tile = lambda kind, sides: f"tensordesc<{kind}[{sides[0]},{sides[1]}]>"
    part = config.block_m, config.block_n
    types = {
        "a": tile("fp8e4nv", (config.block_m, config.block_k)), "w": tile("fp8e4nv", (config.block_n, config.block_k)),
        "p": tile("bf16", part), "r": tile("bf16", part), "x": tile("bf16", part), "out": tile("fp8e4nv", part),
        **dict.fromkeys(("scale_a_ptr", "scale_w_ptr", "scale_ptr"), "*fp32"), "bias_ptr": "*bf16",
        **dict.fromkeys(("rows", "columns", "inner"), "i32"),
    }
    constants = dict(
        BIAS=True, ADDED=added, KEEP=keep, FAST=True, HARDWARE=True, TMA=True, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=config.group,
    )
    source = ASTSource(
        fn=crossed._crossed,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types.get(name, "")[:1] == "*"},
    )
    kernel = compile(
        source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=config.warps, num_stages=config.stages)
    )
    text = kernel.asm["ptx"]
    return kernel.metadata.shared, "wgmma.mma_async" in text, ".local" in text

cases = [(config, *case) for config in crossed.CONFIGS.values() for case in ((1, True), (2, False))]
print(json.dumps([built(*case) for case in cases]))
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs there")
def test_it_compiles_for_hopper_and_three_fit_on_a_multiprocessor():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for shared, by_tensor_cores, spills in json.loads(done.stdout.splitlines()[-1]):
        assert shared <= 227 * 1024 // 3
        assert by_tensor_cores
        assert not spills
