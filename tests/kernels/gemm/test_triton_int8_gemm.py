from dataclasses import replace

import pytest
import torch
import with_triton  # noqa: F401
from cases import on_gpu_or_cpu

from loka.core.numerics.reference import Quantized, quantize, scaled_mm
from loka.core.problem import Problem, target_of
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.kernels.gemm.registry import candidate_named
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs, run_gemm
from loka.kernels.gemm.triton import int8_gemm as kernel
from loka.kernels.quantize import quantizer

pytestmark = pytest.mark.usefixtures("poisoned_memory")

INT8 = Cast(Format.INT8, Granularity.ROW)
SMALL = kernel.Config(block_m=64, block_n=64, block_k=64, stages=2)
CONFIGS = {
    "halves": SMALL,
    "whole": replace(SMALL, parts=1),
    "one pipeline": replace(SMALL, parts=1, flatten=True, per_sm=1),
    **on_gpu_or_cpu(dict(zip(("square", "wide", "low", "narrow"), kernel.CONFIGS, strict=True)), {}),
}
SHAPES = [(16, 16, 16), (144, 112, 80), (33, 79, 208), (200, 256, 64)]  # tails of rows, columns, a step


def operands(m, n, k, device):
    """Rows that differ by 10^12, one of zeros in each, one with NaN."""
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    a *= 10.0 ** torch.linspace(-6, 6, m).view(-1, 1)
    a[3], b[9], a[5, 2] = 0, 0, torch.nan
    return quantize(a.to(device), INT8), quantize(b.to(device), INT8)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_twin(shape, config, device):
    a, b = operands(*shape, device)
    for dtype in (torch.bfloat16, torch.float32) if config != "wide" else (torch.bfloat16,):
        out = kernel.int8_gemm(a.data, b.data, a.scale, b.scale, dtype, config=CONFIGS[config])
        twin = scaled_mm(a, b, dtype=dtype)
        assert out.dtype == dtype
        assert torch.equal(out.isnan(), twin.isnan())
        assert torch.equal(out.nan_to_num(0.0), twin.nan_to_num(0.0))
        assert out[5].isnan().all()


def test_the_largest_sum_there_can_be_is_exact(device):
    """K = 131,072 of 127 * 127, the bound of core/recipe.Format.max_terms: 2^31 less 34 million."""
    k = 131_072
    a = Quantized(torch.full((16, k), 127, dtype=torch.int8, device=device), torch.ones(16, 1, device=device), INT8)
    b = Quantized(-a.data, a.scale, INT8)
    config = on_gpu_or_cpu(None, replace(SMALL, block_k=8192))
    out = kernel.int8_gemm(a.data, b.data, a.scale, b.scale, torch.float32, config=config)
    assert torch.equal(out, torch.full_like(out, -127.0 * 127.0 * k))


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ((8192, 1024, 1024), kernel.SQUARE),
        ((65536, 512, 512), kernel.WIDE),
        ((8192, 3072, 768), kernel.SQUARE),
        ((2048, 1024, 1024), kernel.LOW),
        ((64, 2048, 2048), kernel.NARROW),
    ],
    ids=str,
)
def test_layouts_are_those_that_were_fastest(sides, expected):
    assert kernel.choose(*sides) is expected


def test_where_it_runs_and_where_it_says_why_not():
    candidate = candidate_named("loka_int8:int8_row")

    def reason(k=64, target="sm_90", gemm=Gemm.OUTPUT):
        return candidate.illegal(Problem(gemm=gemm, m=64, n=50, k=k, dtype="bfloat16", target=target))

    assert reason() is None
    assert reason(k=50) is None, "K is padded"
    assert reason(k=131_088) == "K=131088: int32 is sure to hold a sum of 131072 products of INT8, no more"
    assert reason(target="sm_103") == "is built for the INT8 tensor cores of sm_90, not for sm_103"
    assert "needs a CUDA GPU" in str(reason(target="cpu"))
    assert reason(gemm=Gemm.GRAD_WEIGHT) == "int8_row does not define grad_weight"


@pytest.mark.gpu
def test_a_layer_by_it_runs_no_other_kernel(monkeypatch):
    device = torch.device("cuda")
    monkeypatch.setattr(quantizer, "_reference", lambda *a, **k: pytest.fail("quantized by the reference"))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(300, 208, generator=generator, device=device, dtype=torch.bfloat16)
    w = torch.randn(72, 208, generator=generator, device=device)
    reset_kernel_runs()
    out = run_gemm("loka_int8:int8_row", x, w, gemm=Gemm.OUTPUT, dtype=torch.bfloat16)
    assert kernel_runs() == {("loka_int8:int8_row", "output"): 1}
    assert torch.equal(out, scaled_mm(quantize(x, INT8), quantize(w, INT8), dtype=torch.bfloat16))
    assert target_of(device) == "sm_90"
