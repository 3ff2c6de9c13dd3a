"""The adapters against stand-ins for their libraries: arguments, layouts and numbers, on a CPU.

test_agreement.py compares every candidate with the reference on a GPU, where the real libraries are.
"""

import functools
import pickle
from dataclasses import replace

import pytest
import torch
from fake_cublaslt import fake_cublaslt
from fake_libraries import fake_deep_gemm, fake_fbgemm, fake_torchao
from sweeps import sweep

from loka.core.exceptions import LokaError
from loka.core.numerics.reference import Quantized, accumulation_bound, dequantize, quantize, scaled_mm
from loka.core.problem import Problem, dtype_name
from loka.core.recipe import Gemm, Granularity
from loka.kernels.gemm import layouts, libraries
from loka.kernels.gemm.adapters import cublaslt, deep_gemm, torch_scaled, torchao_scaled
from loka.kernels.gemm.aten import aten_gemm
from loka.kernels.gemm.registry import KERNELS, all_candidates, candidate_named
from loka.kernels.gemm.run import run_gemm

ADAPTED = [c for c in all_candidates() if c.kernel.library in (*libraries.ADAPTED, "cublaslt")]
LAYOUTS = ["plain", "gpu", "strange"]


@pytest.fixture
def fakes(monkeypatch):
    fbgemm_calls = []
    deep_calls = []
    fake_torchao(monkeypatch)
    kept = fake_fbgemm(monkeypatch, fbgemm_calls)
    fake_deep_gemm(monkeypatch, deep_calls)
    lt = fake_cublaslt(monkeypatch)
    monkeypatch.setattr(cublaslt, "_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    cached_answers = (cublaslt._plan, cublaslt._handle, cublaslt.lt.why_missing, libraries.why_missing)
    for cached in cached_answers:
        cached.cache_clear()
    yield {"fbgemm": fbgemm_calls, "deep_gemm": deep_calls, "cublaslt": lt}
    for cached in cached_answers:
        cached.cache_clear()
    assert not lt.objects, "cuBLASLt's objects outlive their plans"
    kept._destroy()


def lay(scale, cast, kind):
    """The same scales as the GPU quantizer stores them, or with strides nobody would choose."""
    rows, columns = scale.shape
    if kind == "strange":
        memory = torch.full((3 * rows + 1, 2 * columns + 1), torch.nan)
        placed = memory[1::3, 1::2]
    elif kind == "gpu" and cast.granularity is Granularity.GROUP_1X128:
        placed = torch.full((columns, -(-rows // 4) * 4), torch.nan).t()[:rows]
    elif kind == "gpu" and cast.granularity is Granularity.BLOCK_128X128:
        placed = torch.full((rows, -(-columns // 4) * 4), torch.nan)[:, :columns]
    else:
        return scale
    return placed.copy_(scale)


def operands(candidate, gemm, sides, kind):
    """Magnitudes differ by row and by column, so a scale in the wrong place shows."""
    generator = torch.Generator().manual_seed(sum(sides))
    casts = candidate.recipe.casts(gemm)
    made = []
    for cast, rows in zip(casts, sides[:2], strict=True):
        hp = torch.randn(rows, sides[2], generator=generator)
        hp *= torch.logspace(-3, 2, rows)[:, None] * torch.logspace(1, -2, sides[2])
        quantized = quantize(hp, cast)
        made.append(Quantized(quantized.data, lay(quantized.scale, cast, kind), cast))
    return made


def problem_of(gemm, sides, dtype, target="sm_90"):
    m, n, k = sides
    return Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype_name(dtype), target=target)


@pytest.mark.parametrize("kind", sweep(LAYOUTS, ("strange",)))
@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("candidate", sweep(ADAPTED, ADAPTED[::2]), ids=lambda c: c.name)
def test_numbers_are_those_of_the_reference(candidate, gemm, kind, fakes):
    ran = 0
    # K of 3 groups is no multiple of the 4 that scales are padded to; a side of 1 has free strides.
    for sides in ((20, 48, 384), (4, 16, 128), (300, 272, 640), (256, 512, 512)):
        for dtype in (torch.bfloat16, torch.float32):
            problem = problem_of(gemm, sides, dtype)
            if candidate.illegal(problem):
                continue
            assert candidate.kernel.missing() is None
            problem = candidate.padded(problem)
            a, b = operands(candidate, gemm, (problem.m, problem.n, problem.k), kind)
            out = candidate.run(a, b, dtype)
            assert out.dtype == dtype
            assert out.is_contiguous()
            expected = scaled_mm(a, b, dtype=torch.float32)
            absolute = dequantize(a).abs() @ dequantize(b).abs().t()
            rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
            rounding += candidate.kernel.rounding(problem, candidate.recipe)
            # float32 sums in another order, and torchao's scales inverted twice.
            bound = problem.k * 2.0**-23 * absolute + rounding * expected.abs()
            assert ((out.float() - expected).abs() <= bound).all()
            ran += 1
    if not ran:
        problem = problem_of(gemm, (256, 512, 512), torch.bfloat16)
        assert candidate.illegal(problem)
        assert gemm in (Gemm.OUTPUT, Gemm.GRAD_WEIGHT)


def test_each_kernel_calls_what_its_name_says(fakes):
    def run(name, gemm):
        candidate = candidate_named(name)
        candidate.run(*operands(candidate, gemm, (64, 32, 256), "gpu"), torch.bfloat16)

    for name in ("fbgemm", "fbgemm_fast"):
        run(f"{name}:rowwise_e4m3", Gemm.OUTPUT)
    for name in ("fbgemm:tensorwise_e4m3", "fbgemm_fast:tensorwise_e4m3", "fbgemm:blockwise_e4m3"):
        run(name, Gemm.OUTPUT)
    run("fbgemm:block128_e4m3", Gemm.GRAD_WEIGHT)
    assert fakes["fbgemm"] == [
        *(("f8f8bf16_rowwise", fast) for fast in (False, True)),
        ("f8f8bf16", False),
        ("f8f8bf16", True),
        ("f8f8bf16_groupwise", None),
        ("f8f8bf16_blockwise", None),
    ]
    for gemm in Gemm:
        run("deep_gemm:blockwise_e4m3", gemm)
    assert fakes["deep_gemm"] == [((1, 128, 128), "nk"), ((1, 128, 128), "nk"), ((1, 1, 128), "mn")]


def test_cublaslt_takes_the_algorithm_asked_for(fakes):
    lt, kernel = fakes["cublaslt"], KERNELS["cublaslt_fast"]
    candidate = candidate_named("cublaslt_fast:rowwise_e4m3")
    problem = problem_of(Gemm.OUTPUT, (16, 32, 250), torch.bfloat16)
    assert kernel.algorithms(problem, candidate.recipe) == 2  # one of three fails cuBLASLt's own check
    a, b = operands(candidate, Gemm.OUTPUT, (16, 32, 256), "gpu")
    for index in (0, 1, 7):  # beyond the last: the last
        kernel.run(a, b, torch.bfloat16, algorithm=index)
    assert lt.calls == [(40, True, 0), (42, True, 128), (42, True, 128)]
    before, plans = lt.searches, cublaslt._plan.cache_info().currsize
    for _ in range(5):
        KERNELS["cublaslt"].run(a, b, torch.bfloat16)
        assert lt.calls[-1] == (40, False, 0)
    new = cublaslt._plan.cache_info().currsize - plans  # more than one where memory is aligned by luck
    assert 1 <= new <= 4
    assert lt.searches == before + new, "a search for each key, and no other"


@pytest.mark.parametrize("recipe", ["tensorwise_e4m3", "rowwise_e4m3"])
def test_calls_of_one_plan_read_their_own_scales(fakes, recipe):
    """The descriptor of a plan holds the addresses of the call before, which come again or do not."""
    candidate = candidate_named(f"cublaslt:{recipe}")
    a, b = operands(candidate, Gemm.OUTPUT, (16, 32, 256), "gpu")
    scaled = [(replace(a, scale=a.scale * 2.0**i), replace(b, scale=b.scale * 4.0**i)) for i in range(4)]
    expected = scaled_mm(a, b, dtype=torch.float32)
    for index in (0, 1, 1, 0, 2, 3, 3, 1, 0, 2, 2, 0):  # memory of results is aligned by luck: few plans, many calls
        first, second = scaled[index]
        for low_a, low_b, factor in ((first, second, 8.0**index), (first, b, 2.0**index), (a, second, 4.0**index)):
            out = candidate.run(low_a, low_b, torch.float32)
            torch.testing.assert_close(out, expected * factor)  # by powers of two; sums in another order


@pytest.mark.parametrize(("workspace", "found"), [(0, [0, 1]), (2, [0, 1]), (1024, [0]), (1 << 20, [0])])
def test_algorithms_that_cut_sums_are_told_by_their_workspace(fakes, workspace, found):
    """Counters of tiles take some bytes, parts of sums a tile's at least."""
    fakes["cublaslt"].workspace = workspace  # twice that of the second of two
    problem = problem_of(Gemm.OUTPUT, (16, 32, 256), torch.bfloat16)
    assert cublaslt.uncut(problem, candidate_named("cublaslt_fast:tensorwise_e4m3").recipe, fast=True) == found


def test_one_scale_needs_no_scale_mode(fakes):
    """Before CUDA 12.8 cuBLASLt refuses that attribute."""
    fakes["cublaslt"].unknown = (cublaslt.lt.Desc.A_SCALE_MODE, cublaslt.lt.Desc.B_SCALE_MODE)
    for name, runs in (("cublaslt:tensorwise_e4m3", True), ("cublaslt:rowwise_e4m3", False)):
        candidate = candidate_named(name)
        given = operands(candidate, Gemm.OUTPUT, (16, 32, 256), "plain")
        if runs:
            assert candidate.run(*given, torch.bfloat16).shape == (16, 32)
        else:
            with pytest.raises(RuntimeError, match="INVALID_VALUE"):
                candidate.run(*given, torch.bfloat16)


def test_cublaslt_without_an_algorithm_says_so(fakes):
    fakes["cublaslt"].found = 0
    candidate = candidate_named("cublaslt:tensorwise_e4m3")
    problem = problem_of(Gemm.OUTPUT, (16, 32, 256), torch.bfloat16)
    assert candidate.kernel.algorithms(problem, candidate.recipe) == 1
    with pytest.raises(LokaError, match="NOT_SUPPORTED"):
        candidate.run(*operands(candidate, Gemm.OUTPUT, (16, 32, 256), "plain"), torch.bfloat16)


def test_right_layouts_are_not_copied():
    group = torch.arange(40.0).view(2, 20).t()  # [20, 2], column-major
    assert layouts.column_major(group) is group
    block = torch.arange(12.0).view(3, 4)[:, :3]  # rows padded to 4
    assert layouts.padded_rows(block).data_ptr() == block.data_ptr()
    assert layouts.row_major(block).data_ptr() != block.data_ptr()
    one = torch.arange(8.0).view(2, 4)[:1, :3]  # one row: its stride of 4 says nothing
    assert layouts.row_major(one).data_ptr() == one.data_ptr()
    assert layouts.row_major(one).stride() == (3, 1)
    shifted = torch.arange(41.0)[1:].view(2, 20).t()  # 4 bytes past an aligned address
    assert layouts.column_major(shifted).data_ptr() % 16 == 0
    assert torch.equal(layouts.column_major(shifted), shifted)
    assert layouts.vector(group[:, :1]).data_ptr() == group.data_ptr()


def test_torch_takes_scales_of_blocks_with_their_padding(monkeypatch):
    """Of others it makes wrong numbers without a word (pytorch/ao#4209)."""
    taken = []
    monkeypatch.setattr(torch_scaled, "scaled_mm", lambda *given, **_: taken.append((given[2], given[4])))
    candidate = candidate_named("torch:blockwise_e4m3")
    for gemm, stride in ((Gemm.OUTPUT, 4), (Gemm.GRAD_WEIGHT, 256)):
        a, b = operands(candidate, gemm, (20, 256, 384), "plain")
        candidate.run(a, b, torch.bfloat16)
        scale_a, scale_b = taken.pop()
        assert torch.equal(scale_a, a.scale)
        assert torch.equal(scale_b[:3] if gemm is Gemm.OUTPUT else scale_b.t(), b.scale.t())
        assert (scale_a.stride(), scale_b.stride()) == ((1, 20), (1, stride))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch has rowwise FP8 on the CPU from 2.13 on")
@pytest.mark.parametrize("called", [torch_scaled.TORCH.run, functools.partial(aten_gemm, "torch")], ids=["run", "aten"])
@pytest.mark.parametrize("rows", [1, 32])
def test_on_a_cpu_one_scale_for_all_goes_as_row_scales(rows, called, monkeypatch):
    """Which are a thousand times faster where the CPU has AMX, with the results of `torch._scaled_mm` elsewhere."""
    a, b = operands(candidate_named("torch:tensorwise_e4m3"), Gemm.OUTPUT, (rows, 48, 64), "plain")
    given, multiply = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: (given.append(args), multiply(*args, **kwargs))[1])
    found = called(a, b, torch.float32)
    assert [tuple(scale.shape) for scale in given[0][2:4]] == [(rows, 1), (1, 48)]
    torch.testing.assert_close(found, scaled_mm(a, b, dtype=torch.float32))


def test_scales_begin_at_16_bytes_and_padding_lies_in_memory():
    odd = torch.arange(38.0).view(2, 19).t()
    assert layouts.column_major(odd).stride() == (1, 20)
    assert torch.equal(layouts.column_major(odd), odd)
    tight = torch.arange(19.0)[8:].as_strided((3, 3), (4, 1))  # memory ends with its last scale
    assert layouts.padded_rows(tight).shape == (3, 4)
    assert torch.equal(layouts.padded_rows(tight)[:, :3], tight)
    memory = torch.arange(24.0)  # whose last 8 are scales of which a kernel reads 16
    assert torchao_scaled._readable(memory[:8, None], 16, (1, 16)).data_ptr() == memory.data_ptr()
    grown = torchao_scaled._readable(memory[16:, None], 16, (1, 16))
    assert grown.untyped_storage().nbytes() == 4 * 16
    assert torch.equal(grown, memory[16:, None])


OUTPUT, GRAD_INPUT, GRAD_WEIGHT = Gemm
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("name", "gemm", "sides", "dtype", "target", "reason"),
    [
        ("fbgemm:rowwise_e4m3", OUTPUT, (64, 64, 600), BF16, "sm_90", "K=600 is not a multiple"),
        ("fbgemm:rowwise_e4m3", OUTPUT, (64, 600, 64), BF16, "sm_90", "N=600 is not a multiple"),
        ("fbgemm:rowwise_e4m3", OUTPUT, (63, 64, 64), BF16, "sm_90", None),
        ("fbgemm:rowwise_e4m3", OUTPUT, (64, 64, 64), FP32, "sm_90", "writes bfloat16 only"),
        ("fbgemm:rowwise_e4m3", GRAD_WEIGHT, (64, 64, 64), FP32, "sm_90", None),
        ("fbgemm:rowwise_e4m3", GRAD_WEIGHT, (64, 64, 64), FP16, "sm_90", "bfloat16 only"),
        ("fbgemm:rowwise_e4m3", OUTPUT, (64, 64, 64), BF16, "sm_100", "built for sm_90"),
        ("fbgemm:rowwise_e4m3", OUTPUT, (64, 64, 64), BF16, "cpu", "needs a CUDA GPU of sm_90"),
        ("fbgemm:blockwise_e4m3", OUTPUT, (62, 64, 128), BF16, "sm_90", "M=62 is not a multiple"),
        ("fbgemm:blockwise_e4m3", GRAD_WEIGHT, (64, 64, 128), BF16, "sm_90", "two operands with"),
        ("fbgemm:block128_e4m3", OUTPUT, (62, 64, 64), BF16, "sm_90", "K=64 is not a multiple"),
        ("deep_gemm:blockwise_e4m3", OUTPUT, (63, 64, 128), BF16, "sm_90", None),
        ("deep_gemm:blockwise_e4m3", OUTPUT, (64, 64, 600), BF16, "sm_90", "K=600"),
        ("deep_gemm:blockwise_e4m3", OUTPUT, (64, 64, 128), BF16, "sm_100", "built for sm_90"),
        ("deep_gemm:blockwise_e4m3", GRAD_INPUT, (64, 64, 128), FP32, "sm_90", "bfloat16 only"),
        ("deep_gemm:blockwise_e4m3", GRAD_WEIGHT, (64, 64, 128), FP32, "sm_90", None),
        ("deep_gemm:blockwise_e4m3", GRAD_WEIGHT, (32, 64, 128), FP32, "sm_90", "M=32"),
        ("cublaslt:tensorwise_e5m2", GRAD_INPUT, (63, 64, 64), FP32, "sm_89", None),
        ("cublaslt:rowwise_e4m3", OUTPUT, (64, 64, 64), FP16, "sm_89", "on sm_90"),
        ("cublaslt:rowwise_e4m3", OUTPUT, (64, 64, 64), FP16, "sm_90", None),
        ("cublaslt:rowwise_e4m3", OUTPUT, (64, 64, 64), torch.float64, "sm_90", "float64 results"),
        ("cublaslt:rowwise_e4m3", OUTPUT, (64, 64, 64), FP16, "cpu", "needs a CUDA GPU"),
        ("cublaslt:tensorwise_e4m3", OUTPUT, (64, 64, 64), FP16, "sm_80", "no FP8 tensor cores"),
        ("cublaslt:blockwise_e4m3", GRAD_WEIGHT, (62, 64, 128), FP32, "sm_90", "M=62"),
        ("cublaslt:blockwise_e4m3", OUTPUT, (64, 64, 128), FP16, "sm_90", "float16 results"),
        ("torchao:rowwise_e4m3", OUTPUT, (64, 64, 64), FP32, "sm_90", "writes bfloat16 only"),
        ("torchao:tensorwise_e5m2", GRAD_WEIGHT, (64, 64, 64), FP32, "sm_89", None),
        ("torchao:tensorwise_e4m3", OUTPUT, (64, 64, 64), BF16, "cpu", "needs a CUDA GPU"),
        ("torchao_block:blockwise_e4m3", OUTPUT, (63, 65, 128), BF16, "sm_90", None),
        ("torchao_block:blockwise_e4m3", OUTPUT, (63, 65, 120), BF16, "sm_90", "K=120"),
    ],
)
def test_legality_without_the_library(name, gemm, sides, dtype, target, reason):
    candidate = candidate_named(name)
    said = candidate.kernel.unsupported(problem_of(gemm, sides, dtype, target), candidate.recipe)
    assert said is None if reason is None else reason in (said or ""), said


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=lambda kernel: kernel.name)
def test_kernels_are_pickled(kernel):
    candidate = next(c for c in all_candidates() if c.kernel is kernel)
    problem = problem_of(Gemm.GRAD_INPUT, (33, 479, 13), torch.bfloat16)
    padded = pickle.loads(pickle.dumps(kernel)).multiples(problem, candidate.recipe)
    assert padded == kernel.multiples(problem, candidate.recipe)


@pytest.mark.parametrize("candidate", ADAPTED, ids=lambda c: c.name)
def test_padding_cures_sides_on_hopper(candidate):
    for gemm in Gemm:
        if not candidate.illegal(problem_of(gemm, (256, 256, 256), torch.bfloat16)):
            assert candidate.illegal(problem_of(gemm, (33, 479, 13), torch.bfloat16)) is None


@pytest.mark.parametrize("name", ["fbgemm", "deep_gemm"])
def test_e5m2_is_refused_where_bytes_would_be_misread(name):
    recipe = candidate_named("cublaslt:tensorwise_e5m2").recipe
    problem = problem_of(Gemm.GRAD_INPUT, (128, 128, 128), torch.bfloat16)
    assert KERNELS[name].unsupported(problem, recipe) == "takes e4m3 operands only"


@pytest.mark.slow  # five processes
def test_precompile_compiles_each_kernel_once(monkeypatch):
    """In processes of their own, which have no DeepGEMM here: what they cannot compile stays to do."""
    monkeypatch.setattr(deep_gemm, "_compiled", set())
    bf16 = torch.bfloat16
    asked = [problem_of(Gemm.OUTPUT, (64, 64, k), bf16) for k in (128, 120, 256)]
    asked.append(problem_of(Gemm.OUTPUT, (64, 64, 128), bf16, "sm_80"))
    done = []
    deep_gemm.precompile(asked[:2], lambda: done.append(1))  # a process takes seconds to start
    assert len(done) == 2
    assert not deep_gemm._compiled
    stand_in = "lambda p, d: None if p.k < 256 else 'no'"
    script = f"from loka.kernels.gemm.adapters import deep_gemm; deep_gemm._compile = {stand_in}"
    real = deep_gemm.subprocess.Popen
    started = []

    def popen(command, **options):
        started.append(command[-1])
        return real([*command[:-1], f"{script}; {command[-1]}"], **options)

    monkeypatch.setattr(deep_gemm.subprocess, "Popen", popen)
    deep_gemm.precompile(asked, lambda: done.append(1))
    assert len(done) == 6
    assert {problem.k for problem in deep_gemm._compiled} == {128}, "K=120 is padded to 128: the same kernel"
    started.clear()
    deep_gemm.precompile(asked, lambda: done.append(1))
    assert len(started) == 1, "only what is not compiled yet"


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", list(Gemm))
@pytest.mark.parametrize("candidate", [c for c in ADAPTED if c.kernel.library == "cublaslt"], ids=lambda c: c.name)
def test_every_algorithm_of_cublaslt_agrees(candidate, gemm):
    if reason := candidate.kernel.missing():
        pytest.skip(reason)
    for m, n, k in ((256, 512, 1024), (4096, 256, 384), (96, 64, 8192)):
        problem = problem_of(gemm, (m, n, k), torch.bfloat16)
        if reason := candidate.unsupported(problem):
            pytest.skip(reason)
        generator = torch.Generator().manual_seed(m)
        a, b = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
        casts = candidate.recipe.casts(gemm)
        qa, qb = quantize(a, casts[0]), quantize(b, casts[1])
        expected = scaled_mm(qa, qb, dtype=torch.float32)
        bound = accumulation_bound(qa, qb, fast=candidate.kernel.fast, dtype=torch.bfloat16)
        for index in range(candidate.kernel.algorithms(problem, candidate.recipe)):
            out = run_gemm(f"{candidate.name}@{index}", a.cuda(), b.cuda(), gemm=gemm, dtype=torch.bfloat16)
            share = ((out.cpu().float() - expected).abs() / (bound + 1e-37)).max().item()
            assert share <= 1, f"algorithm {index} of {problem}: off by {share:.2f} of the bound"
