"""The GEMM with a norm in its epilogue against its twin: on a GPU, and in triton's interpreter, where casts
are torch's.

Three bounds, one on the other. Z as kept lies within half a step (and the 512th to which places in a step are
rounded) of what the kernel had, which lies within `accumulation_bound` of the exact product on a GPU, and in
the interpreter within that of float32 sums, K 2^-24 of sum |a||b|. A root mean square moves by at most that
of what its values move by. And the result is the twin's of a normalized value half a step away, times an
activation's slope, at most 1.5 (hard swish at 3), plus half a step of the dtype that it is in.
"""

from dataclasses import replace

import pytest
import torch
import with_triton  # noqa: F401
from cases import combinations, on_gpu_or_cpu
from sweeps import sweep

from loka.core.exceptions import LokaError
from loka.core.numerics.reference import Quantized, accumulation_bound, dequantize, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.kernels.gemm.epilogue import Activation, Epilogue, Normed, apply_epilogue, restored
from loka.kernels.gemm.normed_gemm import gemm_normed, normed_data, unsupported
from loka.kernels.gemm.triton import gemm as fused
from loka.nn.block_norm import BlockNorm

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TENSOR = Cast(Format.E4M3, Granularity.TENSOR)
ROW = Cast(Format.E4M3, Granularity.ROW, power_of_two=True)
PLAIN = fused.Config(tma=False)
CONFIGS = {**fused.CONFIGS, "plain": PLAIN, "plain, whole": replace(PLAIN, parts=1, flatten=False)}
WITHOUT_Z = {"whole"}  # chosen for serving alone: with Z a tile does not fit into a GPU's shared memory
EXACT = {"exact": None, "exact, wide": fused.EXACT_WIDE}  # None: as the block of the norm allows
SHAPES = [  # M, K, N, block: tails of rows, of K, of columns, several tiles a program
    (1, 16, 64, 64),
    (70, 208, 192, 64),
    on_gpu_or_cpu((150, 400, 384, 128), (150, 272, 256, 128)),
    on_gpu_or_cpu((517, 208, 512, 256), (261, 144, 512, 256)),  # the interpreter has 3 programs
]


def epilogue(block, activation=Activation.HARD_SWISH, eps=1e-6, dtype=torch.float8_e4m3fn):
    return Epilogue(block=block, eps=eps, activation=activation, dtype=dtype)


def operands(rows, inner, columns, device=None, *, by_rows=False):
    """Normal data with rows of zeros, and one whose elements are mostly subnormal under one scale."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=generator)
    w = torch.randn(columns, inner, generator=generator) / inner**0.5
    a[3 % rows] = 0
    a[5 % rows] *= 2.0**-11
    w[9 % columns] = 0
    a, w, given = a.to(device), w.to(device), torch.tensor([2.0**-5], device=device)
    left = quantize(a, ROW) if by_rows else quantize(a, TENSOR, scale=given)
    return left, quantize(w, TENSOR, scale=given / 64)


def run(a, w, of, device, *, keep=True, **options):
    made = fused.gemm_normed_fused(
        a.data.to(device), w.data.to(device), a.scale.view(-1).to(device), w.scale.view(1).to(device), of,
        keep=keep, **options,
    )  # fmt: skip
    assert made.data.dtype == of.dtype
    assert (made.z is not None) == keep
    back = a.data.device
    z = None if made.z is None else type(made.z)(*(part.to(back) for part in made.z))
    return Normed(made.data.to(back), made.inverse_rms.to(back), z)


def _wide(of_blocks, of):
    return of_blocks.double().repeat_interleave(of.block, dim=1)


def check(found, a, w, of, *, fast, device):
    """Z, 1 / rms and the result, each within what the top of the file derives."""
    left, right = dequantize(a).double(), dequantize(w).double()
    exact = left @ right.t()
    if device.type == "cuda":
        lost = accumulation_bound(a, w, fast=fast, dtype=torch.float32).double()
    else:
        lost = a.shape[1] * 2.0**-24 * (left.abs() @ right.abs().t()) + 2.0**-24 * exact.abs()
    z, steps = restored(found.z, of).double(), _wide(found.z.steps, of)
    assert ((z - exact).abs() <= steps * (0.5 + 2**-9) + lost).all()
    blocks = (exact.abs().view(len(exact), -1, of.block).amax(dim=2), lost.view(len(lost), -1, of.block).amax(dim=2))
    some = blocks[0] > blocks[1]
    assert (found.z.steps[some] * 127 >= (blocks[0] - blocks[1])[some]).all()
    assert (found.z.steps[some] * 63.5 <= (blocks[0] + blocks[1])[some]).all()
    rms = (z.view(len(z), -1, of.block).square().mean(dim=2) + of.eps).sqrt()
    apart = (found.inverse_rms.double().reciprocal() - rms).abs()
    assert (apart <= found.z.steps * (0.5 + 2**-9) + 2.0**-20 * rms).all()
    check_data(found.data, found, of)


def check_data(data, found, of):
    inverse = _wide(found.inverse_rms, of)
    v = restored(found.z, of).double() * inverse
    moved = 1.5 * (_wide(found.z.steps, of) * (0.5 + 2**-9) * inverse + 2.0**-20 * v.abs())
    expected = _activated(v, of)
    got = data.double() * of.scale
    assert torch.equal(got.isnan(), expected.isnan())
    limits = torch.finfo(of.dtype)
    largest = torch.maximum(got.abs(), expected.abs())
    half = (largest * limits.eps / 2).clamp_min(of.scale * limits.smallest_normal * limits.eps / 2)
    assert (((got - expected).abs() <= half + moved) | got.isnan()).all()


def _activated(v, of):
    """Of values that are normalized already: as a block of one value that is its own root mean square."""
    names = {
        Activation.NONE: torch.clone, Activation.RELU: torch.relu, Activation.SWISH: torch.nn.functional.silu,
        Activation.HARD_SWISH: torch.nn.functional.hardswish, Activation.GELU: torch.nn.functional.gelu,
    }  # fmt: skip
    return names[of.activation](v)


def with_z(name, options):
    """`options` to keep Z with: all configurations add in the same order."""
    return {**options, "config": CONFIGS["one pipeline"]} if name in WITHOUT_Z else options


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", sweep([*CONFIGS, *EXACT], [*CONFIGS, *EXACT][::2]))
def test_every_configuration_matches_the_twin(name, shape, device):
    rows, inner, columns, block = shape
    fast = name not in EXACT
    a, w = operands(rows, inner, columns)
    of = epilogue(block)
    options = {"config": {**CONFIGS, **EXACT}[name], "fast": fast}
    found = run(a, w, of, device, **with_z(name, options))
    check(found, a, w, of, fast=fast, device=device)
    assert (found.data[3 % rows].float() == 0).all()
    assert (restored(found.z, of)[3 % rows] == 0).all()
    check_data(run(a, w, of, device, keep=False, **options).data, found, of)


@pytest.mark.parametrize(
    ("activation", "block", "by_rows"), combinations(list(Activation), [128, 256], [False, True], together=2), ids=str
)
def test_every_activation_matches_the_twin(activation, block, by_rows, device):
    """With eps of the size of z^2, so that a scale of rows does not cancel."""
    a, w = operands(*on_gpu_or_cpu((150, 208, 512), (70, 144, 256)), by_rows=by_rows)
    of = epilogue(block, activation, eps=0.5)
    found = run(a, w, of, device)
    check(found, a, w, of, fast=True, device=device)
    twin = gemm_normed(a.data, w.data, a.scale.view(-1), w.scale.view(1), of, keep=True)
    torch.testing.assert_close(found.inverse_rms, twin.inverse_rms, rtol=on_gpu_or_cpu(2e-2, 1e-5), atol=0)


@pytest.mark.parametrize("activation", [Activation.RELU, Activation.HARD_SWISH], ids=str)
def test_backward_is_told_of_blocks_that_vanish(activation, device):
    """Of rows far below eps all come out as zeros: 1 / rms is 0 there, and not where Z is zero, nor in 16 bits."""
    a, w = operands(70, 208, 256, by_rows=True)
    scale, of = a.scale.clone(), epilogue(128, activation)
    scale[7], scale[9] = 2.0**-60, 2.0**-16
    a = replace(a, scale=scale)
    found, twin = run(a, w, of, device), gemm_normed(a.data, w.data, scale.view(-1), w.scale.view(1), of, keep=True)
    assert torch.equal(found.inverse_rms == 0, twin.inverse_rms == 0)
    assert (found.inverse_rms == 0).all(dim=1).nonzero().flatten().tolist() == [7]
    assert (found.data[[3, 7]].float() == 0).all()
    assert (found.data[9].float() != 0).any()
    # What a row weighs is its own, and nothing for zeros.
    assert torch.equal(found.z.scales, twin.z.scales)
    assert (found.z.scales[[3, 7]] == 2.0**-60).all()
    assert (found.z.scales[9] > 2.0**-16).all()
    assert found.z.scales.max() <= of.scale
    for kept, other in ((False, of), (True, epilogue(128, activation, dtype=torch.bfloat16))):
        assert (run(a, w, other, device, keep=kept).inverse_rms > 0).all()


@pytest.mark.parametrize(
    ("inner", "dtype", "keep", "name"),
    [
        (384, torch.float8_e4m3fn, True, "short sums"), (400, torch.float8_e4m3fn, True, "one pipeline"),
        (384, torch.bfloat16, True, "one pipeline"), (384, torch.float8_e4m3fn, False, "whole"),
    ],
    ids=str,
)  # fmt: skip
def test_short_sums_that_keep_z_run_two_programs(inner, dtype, keep, name):
    of = epilogue(256, dtype=dtype)
    chosen = fused.choose(rows=131072, columns=256, inner=inner, epilogue=of, fast=True, keep=keep)
    assert chosen == fused.CONFIGS[name]
    few = fused.choose(rows=6000, columns=256, inner=inner, epilogue=of, fast=True, keep=keep)
    assert few == fused.CONFIGS["low, in halves" if keep else "low"]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_result_that_no_gemm_reads_is_in_16_bits(dtype, keep, device):
    """By the configurations that are chosen for many tiles and for few, which bring other tiles of it to memory."""
    for rows, columns in ((150, 256), on_gpu_or_cpu((6400, 512), (70, 512))):
        a, w = operands(rows, 208, columns)
        of, low = epilogue(256, dtype=dtype), epilogue(256)
        found, eight = run(a, w, of, device), run(a, w, low, device)
        check(found, a, w, of, fast=True, device=device)
        assert torch.equal(found.inverse_rms, eight.inverse_rms)
        assert torch.equal(run(a, w, of, device, keep=keep).data, found.data)
        apart = (found.data.float() / low.scale).to(low.dtype).float() - eight.data.float()
        assert (apart.abs() <= eight.data.float().abs() / 8 + 2.0**-9).all()  # rounded twice: to a neighbour
        twin = gemm_normed(a.data, w.data, a.scale.view(-1), w.scale.view(1), of, keep=keep)
        assert twin.data.dtype == dtype


@pytest.mark.parametrize("name", [*CONFIGS, *EXACT])
@pytest.mark.parametrize("block", [64, 256])
def test_small_integers_leave_nothing_to_rounding(name, block, device):
    """Z up to 96 is exact on the way: the results are the twin's, but for ties of the mean."""
    generator = torch.Generator().manual_seed(0)
    a, w = (
        Quantized(
            torch.randint(-1, 2, (side, 96), generator=generator).to(torch.float8_e4m3fn), torch.ones(1, 1), TENSOR
        )
        for side in on_gpu_or_cpu((200, 512), (72, 512))
    )
    of = epilogue(block, Activation.RELU)
    config = {**CONFIGS, **EXACT}[name]
    found = run(a, w, of, device, **with_z(name, {"config": config, "fast": name not in EXACT}))
    twin = gemm_normed(a.data, w.data, torch.ones(1), torch.ones(1), of, keep=True)
    for mine, others in zip(found.z, twin.z, strict=True):
        assert torch.equal(mine, others)
    assert (found.data.float() != twin.data.float()).float().mean() < 1e-3


def test_the_largest_operands_normalize_to_one(device):
    """|Z| = 448 * 448 * K everywhere; its square is far from float32's limit, and y = +-1."""
    signs = torch.where(torch.arange(256) % 3 == 0, -1.0, 1.0)
    a = Quantized(torch.full((70, 400), 448.0).to(torch.float8_e4m3fn), torch.ones(1, 1), TENSOR)
    w = Quantized((signs[:, None] * torch.full((256, 400), 448.0)).to(torch.float8_e4m3fn), torch.ones(1, 1), TENSOR)
    of = epilogue(256, Activation.NONE)
    found = run(a, w, of, device)
    assert torch.equal(found.data.float() * of.scale, signs.expand(70, 256))
    check(found, a, w, of, fast=True, device=device)


@pytest.mark.parametrize(("eps", "dtype"), [(1e-6, torch.bfloat16), (1e-30, torch.float8_e4m3fn)], ids=str)
def test_the_smallest_operands_do_not_vanish(eps, dtype, device):
    """z = K 2^-38: under eps = 1e-6 its norm is z * 1000, of which eight bits leave nothing, under 1e-30 it is 1."""
    tiny = torch.tensor([[2.0**-10]])
    a = Quantized(torch.full((70, 400), 2.0**-9).to(torch.float8_e4m3fn), tiny, TENSOR)
    w = Quantized(torch.full((256, 400), 2.0**-9).to(torch.float8_e4m3fn), tiny, TENSOR)
    of = epilogue(256, Activation.NONE, eps, dtype)
    found = run(a, w, of, device)
    z = 400 * 2.0**-38
    inverse = 1 / (z * z + eps) ** 0.5
    assert ((found.inverse_rms.double() / inverse - 1).abs() <= 2.0**-7).all()
    check(found, a, w, of, fast=True, device=device)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row_or_its_block(bad, device):
    """An infinite scale of a row makes its products infinite, or NaN where they are 0."""
    rows = on_gpu_or_cpu(150, 70)
    a, w = operands(rows, 208, 512, by_rows=True)
    a.scale[7] = bad
    for block in (64, 256):
        found = run(a, w, epilogue(block), device)
        for result in (found.data.float(), found.inverse_rms, found.z.steps, found.z.scales):
            assert result.isnan().any(dim=1).nonzero().tolist() == [[7]]
            assert result[7].isnan().all()
    if bad == torch.inf:
        return
    a, w = operands(rows, 208, 512)
    w.data[300, 100] = torch.nan
    for activation in Activation:
        found = run(a, w, epilogue(64, activation), device, keep=False)
        assert found.data.float().isnan().any(dim=0).nonzero().flatten().tolist() == list(range(256, 320))
        assert found.data.float()[:, 256:320].isnan().all()
        assert found.inverse_rms.isnan().any(dim=0).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("by_rows", [False, True])
def test_the_public_function_runs_on_every_device(by_rows, device_type):
    a, w = operands(150, 208, 512, by_rows=by_rows)
    of, place = epilogue(256), torch.device(device_type)
    data = (a.data.to(place), w.data.to(place), a.scale.view(-1).to(place), w.scale.view(1).to(place))
    found = gemm_normed(*data, of, keep=True)
    z = type(found.z)(*(part.cpu() for part in found.z))
    check(Normed(found.data.cpu(), found.inverse_rms.cpu(), z), a, w, of, fast=True, device=place)


def test_the_twin_is_the_modules_and_the_reference_cast():
    z = torch.randn(70, 512, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.Hardswish()(BlockNorm(512, 128)(z))
    torch.testing.assert_close(apply_epilogue(z, epilogue(128)), expected)
    of = epilogue(128, Activation.NONE)
    cast = quantize(apply_epilogue(z, of), TENSOR, scale=torch.tensor([of.scale])).data
    assert torch.equal(normed_data(z, of).float(), cast.float())


def test_what_is_refused_says_why():
    def reason(of, columns=512, inner=512, target="sm_90"):
        return unsupported(of, columns=columns, inner=inner, target=target)

    assert reason(epilogue(256)) is None
    assert reason(epilogue(256), target="cpu") is None
    assert reason(epilogue(256), columns=384) == "N=384 is not a multiple of the norm's block of 256"
    assert reason(epilogue(96), columns=192) == "the norm's block of 96 is none of 64, 128, 256"
    assert reason(epilogue(64), columns=72) == "N=72 is not a multiple of 16"
    assert reason(epilogue(64), inner=72) == "K=72 is not a multiple of 16"
    assert "sm_100" in (reason(epilogue(256), target="sm_100") or "")


def test_operands_that_do_not_fit_are_refused():
    a, w = operands(70, 208, 512)
    one = torch.ones(1)
    for left, right, scale, of, part in (
        (a.data.float(), w.data, one, epilogue(64), "row-major e4m3"),
        (a.data, w.data.t(), one, epilogue(64), "row-major e4m3"),
        (a.data[:, :192].contiguous(), w.data, one, epilogue(64), "do not fit together"),
        (a.data, w.data, torch.ones(2), epilogue(64), "float32 of 1 or 70"),
        (a.data, w.data, one, epilogue(96), "block of 96"),
    ):
        with pytest.raises((ValueError, LokaError), match=part):
            gemm_normed(left, right, scale, one, of, keep=False)


def test_no_rows_are_no_work(device):
    a, w = operands(1, 208, 512)
    found = run(replace(a, data=a.data[:0]), w, epilogue(256), device)
    assert found.data.shape == found.z.values.shape == (0, 512)
    assert found.inverse_rms.shape == (0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2048, 512, 512), (1001, 608, 768), (4096, 1024, 1024), (6145, 2048, 2048)], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS, *EXACT])
def test_real_sizes(name, shape):
    rows, inner, columns = shape
    fast, device = name not in EXACT, torch.device("cuda")
    config = {**CONFIGS, **EXACT}[name]
    for by_rows in (False, True):
        a, w = operands(rows, inner, columns, device, by_rows=by_rows)
        for block in (64, 128, 256):
            for activation in (Activation.HARD_SWISH, Activation.RELU):
                of = epilogue(block, activation)
                options = {"config": config, "fast": fast}
                found = run(a, w, of, device, **with_z(name, options))
                check(found, a, w, of, fast=fast, device=device)
                check_data(run(a, w, of, device, keep=False, **options).data, found, of)
