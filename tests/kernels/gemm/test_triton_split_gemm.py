"""The split GEMM against the reference: on a GPU, and in triton's interpreter, where casts are torch's.

On a GPU results lie within `accumulation_bound` of the exact product. The interpreter's sums are
float32 in another order, so there the bound is K 2^-24 of sum |a||b| and the result's rounding, which
is what is left of `accumulation_bound` without the tensor cores' register.
"""

from dataclasses import replace

import pytest
import torch
import with_triton  # noqa: F401
from cases import combinations, on_gpu_or_cpu
from sweeps import sweep

from loka.core.exceptions import NoKernelFits
from loka.core.numerics.reference import Quantized, accumulation_bound, quantize, scaled_mm
from loka.core.problem import Problem, dtype_name
from loka.core.recipe import Cast, Format, Gemm, Granularity
from loka.kernels.gemm import run as run_module
from loka.kernels.gemm.registry import KERNELS, all_candidates, candidate_named
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs, run_gemm
from loka.kernels.gemm.triton import split_gemm as split

pytestmark = pytest.mark.usefixtures("poisoned_memory")

E4M3 = Cast(Format.E4M3, Granularity.TENSOR)
E5M2 = Cast(Format.E5M2, Granularity.TENSOR)
DTYPES = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
# Small tiles have many steps and chunks at little cost.
# A GPU promotes after 128 of K and takes no shorter step for it.
STEP = on_gpu_or_cpu(128, 32)
SMALL = split.Config(block_m=64, block_n=64, block_k=STEP, stages=2, warps=4)
CONFIGS = {
    "rule": SMALL,
    "ranges": replace(SMALL, interleave=False),
    "one program a tile": replace(SMALL, splits=1),
    "three": replace(SMALL, splits=3),
    "three ranges": replace(SMALL, splits=3, interleave=False),
    "even": replace(SMALL, splits=0),
    "even, two rounds": replace(SMALL, splits=0, per_sm=2),
    "more than steps": replace(SMALL, splits=1000),
    "whole": replace(SMALL, splits=0, parts=1),
    "many to add": replace(SMALL, splits=13),
}
SHAPES = on_gpu_or_cpu(  # M, N, K: tails of rows, columns, a step; one tile and several; sides of no multiple
    [(16, 16, 16), (48, 80, 208), (144, 112, 1040), (272, 176, 416), (33, 79, 608), (16, 48, 4112)],
    # A sixth of the steps, for 5 programs: ranges that end within tiles, and meet three of them.
    [(16, 16, 16), (48, 80, 208), (80, 112, 400), (208, 80, 208), (33, 79, 352), (16, 48, 656)],
)
FEW_TILES = on_gpu_or_cpu((144, 112, 720), (80, 112, 368))  # several of rows and of columns, with tails


def operands(m, n, k, device, cast_a=E4M3):
    """Normal data, a row of zeros in each, and columns of K that differ by up to 2^9."""
    generator = torch.Generator().manual_seed(m + n + k)
    a, b = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    a *= torch.exp2(torch.arange(k) % 10 - 9.0)
    a[3], b[9] = 0, 0
    return quantize(a.to(device), cast_a), quantize(b.to(device), E4M3)


def run(a, b, dtype, *, fast, config=None):
    out = split.split_gemm(a.data, b.data, a.scale, b.scale, dtype, fast=fast, config=config)
    assert out.dtype == dtype
    assert out.shape == (a.shape[0], b.shape[0])
    return out


def check(out, a, b, *, fast):
    left, right = a.data.double() * a.scale.double(), b.data.double() * b.scale.double()
    exact = left @ right.t()
    if out.is_cuda:
        bound = accumulation_bound(a, b, fast=fast, dtype=out.dtype).double()
    else:
        bound = a.shape[1] * 2.0**-24 * (left.abs() @ right.abs().t()) + DTYPES[out.dtype] * exact.abs()
    assert ((out.double() - exact).abs() <= bound).all()
    assert (out[3] == 0).all()
    assert (out[:, 9] == 0).all()


CUTS = combinations(list(CONFIGS), [False, True], SHAPES, together=2)


@pytest.mark.parametrize(("name", "fast", "shape"), sweep(CUTS, CUTS[::4]), ids=str)
def test_every_cut_matches_the_reference(name, fast, shape, device):
    a, b = operands(*shape, device)
    out = run(a, b, torch.float32, fast=fast, config=CONFIGS[name])
    check(out, a, b, fast=fast)
    again = run(a, b, torch.float32, fast=fast, config=CONFIGS[name])
    assert torch.equal(out, again), "sums are added in a fixed order"


@pytest.mark.parametrize("cast", [E4M3, E5M2], ids=lambda cast: cast.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", sweep([0, 1, 3], [0, 3]))
def test_every_dtype_and_format(splits, dtype, cast, device):
    a, b = operands(*FEW_TILES, device, cast)
    for fast in (False, True):
        check(run(a, b, dtype, fast=fast, config=replace(SMALL, splits=splits)), a, b, fast=fast)


@pytest.mark.parametrize(
    ("name", "recipe", "shape"),
    combinations(
        ["loka_split", "loka_split_fast"],
        ["tensorwise_e4m3", "tensorwise_e5m2"],
        on_gpu_or_cpu([(144, 272, 1040), (300, 80, 528)], [(144, 272, 400), (300, 80, 272)]),
        together=2,
    ),
    ids=str,
)
def test_every_algorithm_matches_the_reference(name, recipe, shape, device):
    kernel = KERNELS[name]
    m, n, k = shape
    candidate = candidate_named(f"{name}:{recipe}")
    problem = Problem(gemm=Gemm.GRAD_WEIGHT, m=m, n=n, k=k, dtype="bfloat16", target="sm_90")
    count = kernel.algorithms(problem, candidate.recipe)
    assert count >= 2
    a, b = operands(*shape, device, candidate.recipe.grad_weight[0])
    for algorithm in range(count):
        out = replace(candidate, algorithm=algorithm).run(a, b, torch.bfloat16)
        check(out, a, b, fast=kernel.fast)


@pytest.mark.slow
def test_small_integers_leave_nothing_to_rounding(device):
    """Products of -1, 0 and 1 sum exactly in every register on the way, so no step is lost or doubled."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-1, 2, (side, on_gpu_or_cpu(656, 336)), generator=generator).to(torch.float8_e4m3fn).to(device)
        for side in (80, 112)
    )
    one = torch.ones(1, 1, device=device)
    expected = (a.double() @ b.double().t()).float()
    for config in CONFIGS.values():
        for fast in (False, True):
            out = split.split_gemm(a, b, one, one * 0.5, torch.float32, fast=fast, config=config)
            assert torch.equal(out, expected * 0.5)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_a_nan_stays_in_its_row_or_its_column(splits, device):
    config = replace(SMALL, splits=splits)
    for side, dim in ((0, 1), (1, 0)):
        pair = operands(*FEW_TILES, device)
        pair[side].data[70, 333] = torch.nan
        out = run(*pair, torch.bfloat16, fast=True, config=config)
        assert out.isnan().any(dim=dim).nonzero().tolist() == [[70]]
        assert out.isnan().all(dim=dim).nonzero().tolist() == [[70]]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, and what is tested
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_the_largest_and_the_smallest_operands(splits, device):
    """448 * 448 * K is far from float32's limit; the scales then take it beyond, or near zero."""
    config = replace(SMALL, splits=splits)
    inner = on_gpu_or_cpu(1024, 256)
    data = torch.full((80, inner), 448.0, device=device).to(torch.float8_e4m3fn)
    for power in (-60, 0, 40):
        scale = torch.full((1, 1), 2.0**power, device=device)
        full = Quantized(data, scale, E4M3)
        out = run(full, full, torch.float32, fast=False, config=config)
        expected = 448.0 * 448 * inner * 2.0 ** (2 * power)
        # 8 mantissa bits squared: a sum of 32 fits the register of 14 bits but for what is cut off.
        assert ((out.double() - expected).abs() <= 33 * 2.0**-13 * expected).all()
    huge = Quantized(data, torch.full((1, 1), 2.0**60, device=device), E4M3)
    assert run(huge, huge, torch.float32, fast=True, config=config).isinf().all()
    assert run(huge, huge, torch.bfloat16, fast=True, config=config).isinf().all()
    one = Quantized(data, torch.ones(1, 1, device=device), E4M3)
    assert run(one, one, torch.float16, fast=True, config=config).isinf().all(), "65504 is its largest"


def test_zeros_and_nothing(device):
    zero = quantize(torch.zeros(80, 208, device=device), E4M3)
    assert (run(zero, zero, torch.bfloat16, fast=True) == 0).all()
    for m, n, k in ((0, 16, 32), (16, 0, 32), (16, 32, 0)):
        a, b = (torch.zeros(side, k, dtype=torch.float8_e4m3fn, device=device) for side in (m, n))
        one = torch.ones(1, 1, device=device)
        out = split.split_gemm(a, b, one, one, torch.bfloat16, fast=True)
        assert out.shape == (m, n)
        assert (out == 0).all()


@pytest.mark.parametrize(
    ("sides", "fast", "splits"),
    [
        ((512, 512, 65536), True, 16),  # 8 tiles, 128 of 132 multiprocessors
        ((512, 512, 65536), False, 8),
        ((1024, 1024, 8192), True, 4),
        ((512, 512, 2048), True, 4),  # shares of four steps, though more programs would fit
        ((2048, 2048, 6144), True, 1),  # 128 tiles fill the machine: one launch
        ((3456, 512, 8192), True, 0),  # 54 tiles: two each leave 24 multiprocessors idle
        ((4096, 4096, 256), True, 1),  # too short to cut
        ((64, 64, 128), False, 1),
    ],
    ids=str,
)
def test_the_rule_fills_132_multiprocessors(sides, fast, splits):
    m, n, k = sides
    config = split.choose(m, n, fast=fast)
    tiles = split._tiles(m, n, config.block_m, config.block_n)
    assert split.cut(tiles, -(-k // config.block_k), 132) == splits


def test_a_tile_is_turned_where_that_pads_less():
    def tile(m, n):
        config = split.choose(m, n, fast=True)
        return config.block_m, config.block_n

    assert tile(3456, 512) == (128, 256)
    assert tile(512, 3456) == (256, 128)
    assert tile(128, 128) == (128, 128)
    assert split.choose(512, 512, fast=True, algorithm=99) == split.FAST[-1]


def test_it_is_listed_for_weight_gradients_only():
    names = {each.name for each in all_candidates() if each.kernel.name.startswith("loka_split")}
    assert names == {
        f"{kernel}:{recipe}"
        for kernel in ("loka_split", "loka_split_fast")
        for recipe in ("tensorwise_e4m3", "tensorwise_e5m2")
    }
    assert KERNELS["loka_split_fast"].fast
    assert not KERNELS["loka_split"].fast

    def reason(gemm=Gemm.GRAD_WEIGHT, k=4096, dtype="bfloat16", target="sm_90"):
        problem = Problem(gemm=gemm, m=33, n=479, k=k, dtype=dtype, target=target)
        kernel = KERNELS["loka_split"]
        return kernel.unsupported(problem, candidate_named("loka_split:tensorwise_e4m3").recipe)

    assert reason() is None
    assert reason(dtype="float32") is None
    assert reason(target="sm_100") is None
    assert reason(k=4100) == "K=4100 is not a multiple of 16"
    assert "not for output" in (reason(Gemm.OUTPUT) or "")
    assert "not for grad_input" in (reason(Gemm.GRAD_INPUT) or "")
    assert "float64" in (reason(dtype="float64") or "")
    assert "sm_90" in (reason(target="cpu") or "")
    assert "sm_89" in (reason(target="sm_89") or "")
    assert "shared memory" in (reason(target="sm_120") or "")
    odd = Problem(gemm=Gemm.GRAD_WEIGHT, m=33, n=479, k=4100, dtype="bfloat16", target="sm_90")
    assert candidate_named("loka_split:tensorwise_e5m2").illegal(odd) is None, "padding cures K"


@pytest.mark.parametrize("name", ["loka_split:tensorwise_e4m3", "loka_split_fast:tensorwise_e5m2"])
def test_run_gemm_launches_and_counts_it(name, device, monkeypatch):
    if device.type == "cpu":
        with pytest.raises(NoKernelFits):
            run_gemm(name, torch.ones(16, 16), torch.ones(16, 16), gemm=Gemm.GRAD_WEIGHT, dtype=torch.float32)
        monkeypatch.setattr(run_module, "target_of", lambda device: "sm_90")
    launched = []
    launch = split._launch
    monkeypatch.setattr(split, "_launch", lambda *a: launched.append(a[5]) or launch(*a))
    generator = torch.Generator().manual_seed(0)
    gradient, x = (torch.randn(1000, side, generator=generator).to(device) for side in (80, 48))
    reset_kernel_runs()
    out = run_gemm(name, gradient.t(), x.t(), gemm=Gemm.GRAD_WEIGHT, dtype=torch.bfloat16)
    assert kernel_runs() == {(name, "grad_weight"): 1}
    candidate = candidate_named(name)
    assert launched == [candidate.kernel.fast]
    casts = candidate.recipe.grad_weight
    a, b = quantize(gradient.t(), casts[0]), quantize(x.t(), casts[1])
    expected = scaled_mm(a, b, dtype=torch.float32)
    bound = accumulation_bound(a, b, fast=candidate.kernel.fast, dtype=torch.bfloat16)
    assert ((out.float() - expected).abs() <= bound).all()


@pytest.mark.gpu
@pytest.mark.parametrize("cast", [E4M3, E5M2], ids=lambda cast: cast.name)
@pytest.mark.parametrize("shape", [(512, 512, 65536), (3456, 512, 8192), (1040, 528, 6160)], ids=str)
@pytest.mark.parametrize("name", ["loka_split", "loka_split_fast"])
def test_real_sizes(name, shape, cast):
    fast = KERNELS[name].fast
    a, b = operands(*shape, torch.device("cuda"), cast)
    # The bound of fast accumulation is wide for a K of 65536; sums of -1, 0 and 1 are exact below 2^13.
    few_a, few_b = (replace(of, data=torch.randint(-1, 2, of.shape, device="cuda").to(of.data.dtype)) for of in (a, b))
    sums = (few_a.data.double() @ few_b.data.double().t()) * a.scale.double() * b.scale.double()
    for config in split.FAST if fast else split.EXACT:
        for splits in (None, 0, 1, 5):
            forced = replace(config, splits=splits)
            out = run(a, b, torch.bfloat16, fast=fast, config=forced)
            check(out, a, b, fast=fast)
            assert torch.equal(out, run(a, b, torch.bfloat16, fast=fast, config=forced))
            exact = run(few_a, few_b, torch.float32, fast=fast, config=forced)
            assert ((exact.double() - sums).abs() <= 2.0**-22 * sums.abs()).all(), "the scales round twice"


@pytest.mark.gpu
def test_it_can_be_captured():
    """A graph's replay reads new operands and writes the same result as a call."""
    a, b = operands(512, 512, 8192, torch.device("cuda"))
    run(a, b, torch.bfloat16, fast=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(a, b, torch.bfloat16, fast=True)
    a.data.copy_(a.data.flip(1))
    graph.replay()
    assert torch.equal(out, run(a, b, torch.bfloat16, fast=True))
    assert dtype_name(out.dtype) == "bfloat16"
