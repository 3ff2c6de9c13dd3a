"""Every kernel agrees with the emulated one, for all three GEMMs and nasty operands.

On a CPU the bound is that of float32 summation in another order; on a GPU it is
`accumulation_bound`, derived from how Hopper's tensor cores add.
"""

import math

import pytest
import torch
from sweeps import sweep

from loka.core.numerics.reference import accumulation_bound, dequantize, quantize, scaled_mm
from loka.core.problem import Problem, dtype_name, target_of
from loka.core.recipe import Gemm
from loka.kernels.gemm.registry import all_candidates, candidate_named
from loka.kernels.gemm.run import into_of, run_gemm, scaled_gemm
from loka.kernels.quantize.quantizer import quantize_operand

REAL = [c.name for c in all_candidates() if not c.kernel.emulates]
KINDS = ("normal", "zero rows", "1e-9", "1e30", "mixed rows", "all zero")  # mixed are of 1e-9 to 1e9
SHAPES = [(64, 32, 48), (33, 479, 13), (1, 1000, 479), (257, 130, 300), (96, 64, 640)]


def operands(kind, m, n, k, dtype):
    generator = torch.Generator().manual_seed(m * n + k)
    a, b = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    if kind == "zero rows":
        a[: (m + 1) // 2] = 0
        b[::3] = 0
    elif kind == "1e-9":
        a *= 1e-9
    elif kind == "1e30":
        a *= 1e30
    elif kind == "mixed rows":
        a *= torch.logspace(-9, 9, m).unsqueeze(1)
    elif kind == "all zero":
        a.zero_()
    return a.to(dtype), b.to(dtype)


def supported(name, gemm, shape, dtype, device):
    m, n, k = shape
    problem = Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype_name(dtype), target=target_of(device))
    return candidate_named(name).unsupported(problem) is None


@pytest.mark.parametrize("kind", sweep(KINDS, ("mixed rows", "1e30", "all zero")))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("name", REAL)
def test_agrees_with_the_reference(name, gemm, dtype, kind, device):
    candidate = candidate_named(name)
    casts = candidate.recipe.casts(gemm)
    ran = 0
    for shape in SHAPES:
        if not supported(name, gemm, shape, dtype, device):
            continue
        a, b = operands(kind, *shape, dtype)
        out = run_gemm(name, a.to(device), b.to(device), gemm=gemm, dtype=dtype)
        assert out.shape == (shape[0], shape[1])
        assert out.dtype == dtype
        qa, qb = quantize(a, casts[0]), quantize(b, casts[1])
        expected = scaled_mm(qa, qb, dtype=torch.float32)
        if device.type == "cpu":
            absolute = dequantize(qa).abs() @ dequantize(qb).abs().t()
            unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
            bound = shape[2] * 2.0**-23 * absolute + unit * expected.abs()
        else:
            bound = accumulation_bound(qa, qb, fast=candidate.kernel.fast, dtype=dtype)
            problem = Problem(gemm=gemm, m=shape[0], n=shape[1], k=shape[2], dtype=dtype_name(dtype), target="sm_90")
            bound += candidate.kernel.rounding(problem, candidate.recipe) * expected.abs()
        gap = (out.cpu().float() - expected).abs()
        share = (gap / (bound + 1e-37)).max().item()
        assert share <= 1, f"{shape}: off by {share:.2f} of the bound"
        ran += 1
    if not ran:
        pytest.skip(f"{name} does not run {gemm} in {dtype} on {device}")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("name", [c.name for c in all_candidates()])
def test_non_finite_surfaces_and_is_flagged(name, gemm, bad, device):
    if not supported(name, gemm, (32, 48, 64), torch.bfloat16, device):
        pytest.skip(f"{name} does not run {gemm} on {device}")
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    a[5, 7] = bad
    for first, second, slot in ((a, b, 1), (b[:32], a.repeat(2, 1)[:48], 2)):
        health = torch.zeros(3, dtype=torch.int64, device=device)
        out = run_gemm(name, first.to(device), second.to(device), gemm=gemm, dtype=torch.bfloat16, health=health)
        hit = out[5] if slot == 1 else out[:, 5]
        assert not torch.isfinite(hit).any()
        flags = health.tolist()
        assert flags[0] == 1
        assert [bool(f) for f in flags[1:]] == [slot == 1, slot == 2]


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 16, 0)])
def test_empty_problems_give_zeros(shape, device):
    m, n, k = shape
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    out = run_gemm("torch:rowwise_e4m3", a, b, gemm=Gemm.OUTPUT, dtype=torch.bfloat16)
    assert out.shape == (m, n)
    assert (out == 0).all()


@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("name", [c.name for c in all_candidates() if c.kernel.into(c.recipe)])
def test_what_writes_into_given_memory_writes_what_run_returns(name, gemm, device):
    """Bit for bit, over whatever lay there."""
    ran, fits = 0, lambda shape: supported(name, gemm, shape, torch.bfloat16, device)
    for m, n, k in filter(fits, SHAPES):
        a, b = operands("mixed rows", m, n, k, torch.bfloat16)
        problem = Problem(gemm=gemm, m=m, n=n, k=k, dtype="bfloat16", target=target_of(device))
        run = scaled_gemm(name, problem)
        if (into := into_of(run)) is None:
            continue
        low = [
            quantize_operand(x.to(device), cast, padded=padded, health=None, slot=slot)
            for x, cast, padded, slot in zip((a, b), run.casts, (run.padded_a, run.padded_b), (1, 2), strict=True)
        ]
        out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device=device)
        into(*low, out)
        assert torch.equal(out, run(*low))
        ran += 1
    assert ran or not any(map(fits, SHAPES))
