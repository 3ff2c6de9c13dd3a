"""The fused GEMM against its twin: on a GPU, and in triton's interpreter, where casts are torch's.

Two bounds. Z lies within `accumulation_bound` of the exact product on a GPU; in the interpreter
within that of float32 sums, K 2^-24 of sum |a||b|, and bfloat16's rounding. The result is compared
with the twin of the Z that the kernel kept. That Z is rounded to bfloat16 where the kernel's was
not, which moves a normalized value by 2^-8 of itself and as much again through its block's mean;
an activation multiplies that by its slope, at most 1.5 (hard swish at 3); and a rounding that
falls the other way is one step of the format.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import combinations, on_gpu_or_cpu

from loka.core.exceptions import LokaError
from loka.core.numerics.reference import Quantized, accumulation_bound, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.kernels.gemm.epilogue import Activation, Epilogue, Norm
from loka.kernels.gemm.fused_gemm import gemm_produce, produce, unsupported
from loka.nn.block_norm import BlockNorm

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
fused = pytest.importorskip("loka.kernels.gemm.triton.gemm")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

E4M3 = Cast(Format.E4M3, Granularity.TENSOR)
SCALE_OUT = 2.0**-4  # a block of 256 bounds values by 16, which becomes 256
PLAIN = fused.Config(tma=False)
CONFIGS = {**fused.CONFIGS, "plain": PLAIN, "plain, whole": replace(PLAIN, parts=1, flatten=False)}
WITHOUT_Z = {"whole"}  # chosen for serving alone: with Z a tile does not fit into a GPU's shared memory
EXACT = {"exact": None, "exact, wide": fused.EXACT_WIDE}  # None: as the block of the norm allows
SHAPES = [  # M, K, N, block: tails of rows, of K, of columns, several tiles a program
    (1, 16, 64, 64),
    (70, 208, 192, 64),
    on_gpu_or_cpu((150, 400, 384, 128), (150, 272, 256, 128)),
    on_gpu_or_cpu((517, 208, 512, 256), (261, 144, 512, 256)),  # the interpreter has 3 programs
    (129, 96, 256, 0),
    (33, 272, 80, 0),
]


def epilogue(block: int, activation: Activation = Activation.HARD_SWISH, eps: float = 1e-6) -> Epilogue:
    if not block:
        return Epilogue(activation=activation)
    return Epilogue(norm=Norm.BLOCK, block=block, eps=eps, activation=activation)


def operands(
    rows: int, inner: int, columns: int, device: torch.device | None = None
) -> tuple[Quantized, Quantized]:
    """Normal data with rows of zeros, and one whose elements are mostly subnormal."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(rows, inner, generator=generator)
    w = torch.randn(columns, inner, generator=generator) / inner**0.5
    a[3 % rows] = 0
    a[5 % rows] *= 2.0**-11
    w[9 % columns] = 0
    a, w, given = a.to(device), w.to(device), torch.tensor([2.0**-5], device=device)
    return quantize(a, E4M3, scale=given), quantize(w, E4M3, scale=given / 64)


def run(
    a: Quantized,
    w: Quantized,
    of: Epilogue,
    device: torch.device,
    *,
    scale_out: float | None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, z = fused.gemm_produce_fused(
        a.data.to(device),
        w.data.to(device),
        a.scale.view(1).to(device),
        w.scale.view(1).to(device),
        of,
        scale_out=None if scale_out is None else torch.tensor([scale_out], device=device),
        **options,
    )
    assert out.dtype == (torch.bfloat16 if scale_out is None else torch.float8_e4m3fn)
    return out.to(a.data.device), None if z is None else z.to(a.data.device)


def check_z(z: torch.Tensor, a: Quantized, w: Quantized, *, fast: bool, device: torch.device) -> None:
    assert z.dtype == torch.bfloat16
    left, right = a.data.double() * a.scale, w.data.double() * w.scale
    exact = left @ right.t()
    if device.type == "cuda":
        bound = accumulation_bound(a, w, fast=fast, dtype=torch.bfloat16).double()
    else:
        bound = a.shape[1] * 2.0**-24 * (left.abs() @ right.abs().t()) + 2.0**-8 * exact.abs()
    assert ((z.double() - exact).abs() <= bound).all()


def check_out(out: torch.Tensor, z: torch.Tensor, of: Epilogue, *, scale_out: float | None) -> None:
    """`out` is the twin of `z`, within what the top of the file derives."""
    given = None if scale_out is None else torch.tensor([scale_out], device=out.device)
    twin = produce(z, of, scale_out=given).float()
    scale = scale_out or 1.0
    got, expected = out.float() * scale, twin * scale
    assert torch.equal(got.isnan(), expected.isnan())
    normalized = produce(z, replace(of, activation=Activation.NONE), scale_out=None).float()
    if scale_out is None:
        step = (expected.abs() * 2.0**-7).clamp_min(2.0**-20)
    else:
        step = (expected.abs() * 2.0**-3).clamp_min(2.0**-9 * scale)
    bound = step + 1.5 * 2.0**-7 * normalized.abs()
    near = (got - expected).abs() <= bound
    assert (near | got.isnan() | (got == expected)).all()


def with_z(name: str, options: dict[str, object]) -> dict[str, object]:
    """`options` to keep Z with: all configurations add in the same order."""
    return {**options, "config": CONFIGS["one pipeline"]} if name in WITHOUT_Z else options


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [*CONFIGS, *EXACT])
def test_every_configuration_matches_the_twin(
    name: str, shape: tuple[int, int, int, int], device: torch.device
) -> None:
    rows, inner, columns, block = shape
    fast = name not in EXACT
    a, w = operands(rows, inner, columns)
    of = epilogue(block)
    options = {"config": {**CONFIGS, **EXACT}[name], "fast": fast}
    out, z = run(a, w, of, device, scale_out=SCALE_OUT, keep=True, **with_z(name, options))
    check_z(z, a, w, fast=fast, device=device)
    check_out(out, z, of, scale_out=SCALE_OUT)
    assert (out[3 % rows].float() == 0).all()
    alone, nothing = run(a, w, of, device, scale_out=SCALE_OUT, keep=False, **options)
    assert nothing is None
    check_out(alone, z, of, scale_out=SCALE_OUT)


@pytest.mark.parametrize(
    ("activation", "block", "scale_out", "keep"),
    combinations(list(Activation), [0, 128, 256], [SCALE_OUT, None], [False, True], together=2),
    ids=str,
)
def test_every_activation_matches_the_twin(
    activation: Activation, block: int, scale_out: float | None, keep: bool, device: torch.device
) -> None:
    a, w = operands(*on_gpu_or_cpu((150, 208, 512), (70, 144, 256)))
    a = replace(a, scale=a.scale * 4)  # values on both sides of every bend
    of = epilogue(block, activation)
    _, z = run(a, w, of, device, scale_out=scale_out, keep=True)
    out, kept = run(a, w, of, device, scale_out=scale_out, keep=keep)
    assert (kept is not None) == keep
    check_out(out, z, of, scale_out=scale_out)


@pytest.mark.parametrize("name", [*CONFIGS, *EXACT])
@pytest.mark.parametrize("block", [0, 64, 256])
def test_small_integers_leave_nothing_to_rounding(name: str, block: int, device: torch.device) -> None:
    """Z up to 96 is exact in every format on the way: the result is the twin's, but for ties of the mean."""
    generator = torch.Generator().manual_seed(0)
    a, w = (
        Quantized(
            torch.randint(-1, 2, (side, 96), generator=generator).to(torch.float8_e4m3fn),
            torch.ones(1, 1),
            E4M3,
        )
        for side in on_gpu_or_cpu((200, 512), (72, 512))
    )
    of = epilogue(block, Activation.RELU)
    config = {**CONFIGS, **EXACT}[name]
    options = with_z(name, {"config": config, "fast": name not in EXACT})
    out, z = run(a, w, of, device, scale_out=SCALE_OUT, keep=True, **options)
    assert torch.equal(z.float(), a.data.float() @ w.data.float().t())
    twin = produce(z, of, scale_out=torch.tensor([SCALE_OUT]))
    assert (out.float() != twin.float()).float().mean() < 1e-3


def test_the_largest_operands_normalize_to_one(device: torch.device) -> None:
    """|Z| = 448 * 448 * K everywhere; its square is far from float32's limit, and y = +-1."""
    signs = torch.where(torch.arange(256) % 3 == 0, -1.0, 1.0)
    a = Quantized(torch.full((70, 400), 448.0).to(torch.float8_e4m3fn), torch.ones(1, 1), E4M3)
    w = Quantized(
        (signs[:, None] * torch.full((256, 400), 448.0)).to(torch.float8_e4m3fn), torch.ones(1, 1), E4M3
    )
    out, z = run(a, w, epilogue(256, Activation.NONE), device, scale_out=SCALE_OUT, keep=True)
    assert torch.equal(out.float() * SCALE_OUT, signs.expand(70, 256))
    check_z(z, a, w, fast=True, device=device)


@pytest.mark.parametrize("eps", [1e-6, 1e-30])
def test_the_smallest_operands_do_not_vanish(eps: float, device: torch.device) -> None:
    """z = K 2^-38: under eps = 1e-6 its norm is z * 1000, under 1e-30 it is 1."""
    tiny = torch.tensor([[2.0**-10]])
    a = Quantized(torch.full((70, 400), 2.0**-9).to(torch.float8_e4m3fn), tiny, E4M3)
    w = Quantized(torch.full((256, 400), 2.0**-9).to(torch.float8_e4m3fn), tiny, E4M3)
    out, _ = run(a, w, epilogue(256, Activation.NONE, eps), device, scale_out=None, keep=False)
    z = 400 * 2.0**-38
    expected = z / (z * z + eps) ** 0.5
    assert ((out.double() - expected).abs() <= 2.0**-7 * expected).all()


def test_a_nan_stays_in_its_row_or_its_block(device: torch.device) -> None:
    rows = on_gpu_or_cpu(150, 70)
    a, w = operands(rows, 208, 512)
    a.data[7, 100] = torch.nan
    for block in (0, 256):
        for scale_out in (SCALE_OUT, None):
            out, z = run(a, w, epilogue(block), device, scale_out=scale_out, keep=True)
            for result in (out.float(), z.float()):
                assert result.isnan().any(dim=1).nonzero().tolist() == [[7]]
                assert result[7].isnan().all()
    a, w = operands(rows, 208, 512)
    w.data[300, 100] = torch.nan
    for activation in Activation:
        for block, hit in ((0, [300]), (64, list(range(256, 320)))):
            out, _ = run(a, w, epilogue(block, activation), device, scale_out=SCALE_OUT, keep=False)
            assert out.float().isnan().any(dim=0).nonzero().flatten().tolist() == hit
            assert out.float()[:, hit].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, and what is tested
def test_without_a_norm_large_values_saturate_and_infinity_shows(device: torch.device) -> None:
    a, w = operands(70, 208, 192)
    of = epilogue(0, Activation.RELU)
    out, z = run(a, w, of, device, scale_out=2.0**-12, keep=True)
    assert out.float().max() == 448
    assert (out.float()[z.float() > 448 * 2.0**-12] == 448).all()
    check_out(out, z, of, scale_out=2.0**-12)
    flat = torch.where(a.data.float() != 0, 448.0, 0.0).to(torch.float8_e4m3fn)
    infinite = replace(a, data=flat, scale=torch.full((1, 1), 2.0**127))
    positive = replace(w, data=torch.full_like(w.data.float(), 448.0).to(torch.float8_e4m3fn))
    out, z = run(infinite, positive, of, device, scale_out=1.0, keep=True)
    assert 60 < z.isinf().any(dim=1).sum() < 70  # but for rows of zeros
    assert torch.equal(out.float().isnan(), z.isinf())


@pytest.mark.parametrize("device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_public_function_runs_on_every_device(device_type: str) -> None:
    a, w = operands(150, 208, 512)
    of = epilogue(256)
    place = torch.device(device_type)
    given = torch.tensor([SCALE_OUT])
    out, z = gemm_produce(
        a.data.to(place),
        w.data.to(place),
        a.scale.view(1).to(place),
        w.scale.view(1).to(place),
        of,
        scale_out=given.to(place),
        keep=True,
    )
    check_z(z.cpu(), a, w, fast=True, device=place)
    check_out(out.cpu(), z.cpu(), of, scale_out=SCALE_OUT)


def test_the_twin_is_the_modules_and_the_reference_cast() -> None:
    z = torch.randn(70, 512, generator=torch.Generator().manual_seed(0))
    given = torch.tensor([SCALE_OUT])
    out = produce(z, epilogue(128), scale_out=given)
    expected = torch.nn.Hardswish()(BlockNorm(512, 128)(z))
    assert torch.equal(out.float(), quantize(expected, E4M3, scale=given).data.float())


def test_what_is_refused_says_why() -> None:
    def reason(of: Epilogue, columns: int = 512, inner: int = 512, target: str = "sm_90") -> str | None:
        return unsupported(of, columns=columns, inner=inner, target=target)

    assert reason(epilogue(256)) is None
    assert reason(epilogue(256), target="cpu") is None
    assert reason(epilogue(0), columns=80, inner=16) is None
    assert reason(epilogue(256), columns=384) == "N=384 is not a multiple of the norm's block of 256"
    assert reason(epilogue(96), columns=192) == "the norm's block of 96 is none of 64, 128, 256"
    assert reason(epilogue(0), columns=72) == "N=72 is not a multiple of 16"
    assert reason(epilogue(0), inner=72) == "K=72 is not a multiple of 16"
    assert "elementwise" in (reason(replace(epilogue(256), gamma=True)) or "")
    assert "layer" in (reason(Epilogue(norm=Norm.LAYER)) or "")
    assert "sm_100" in (reason(epilogue(256), target="sm_100") or "")


def test_operands_that_do_not_fit_are_refused() -> None:
    a, w = operands(70, 208, 512)
    one = torch.ones(1)
    arguments = {"scale_out": None, "keep": False}
    for left, right, scale, of, part in (
        (a.data.float(), w.data, one, epilogue(0), "row-major e4m3"),
        (a.data, w.data.t(), one, epilogue(0), "row-major e4m3"),
        (a.data[:, :192].contiguous(), w.data, one, epilogue(0), "do not fit together"),
        (a.data, w.data, torch.ones(2), epilogue(0), "float32 \\[1\\]"),
        (a.data, w.data, one, epilogue(96), "block of 96"),
    ):
        with pytest.raises((ValueError, LokaError), match=part):
            gemm_produce(left, right, scale, one, of, **arguments)


def test_no_rows_are_no_work(device: torch.device) -> None:
    a, w = operands(1, 208, 512)
    out, z = run(replace(a, data=a.data[:0]), w, epilogue(256), device, scale_out=SCALE_OUT, keep=True)
    assert out.shape == z.shape == (0, 512)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(2048, 512, 512), (1001, 608, 768), (4096, 1024, 1024), (6145, 2048, 2048)], ids=str
)
@pytest.mark.parametrize("name", [*CONFIGS, *EXACT])
def test_real_sizes(name: str, shape: tuple[int, int, int]) -> None:
    rows, inner, columns = shape
    fast = name not in EXACT
    a, w = operands(rows, inner, columns, torch.device("cuda"))
    config = {**CONFIGS, **EXACT}[name]
    for block in (0, 64, 128, 256):
        for activation in (Activation.HARD_SWISH, Activation.RELU):
            of = epilogue(block, activation)
            options = {"config": config, "fast": fast, "scale_out": SCALE_OUT}
            out, z = run(a, w, of, torch.device("cuda"), keep=True, **with_z(name, options))
            check_z(z, a, w, fast=fast, device=torch.device("cuda"))
            check_out(out, z, of, scale_out=SCALE_OUT)
            alone, _ = run(a, w, of, torch.device("cuda"), keep=False, **options)
            check_out(alone, z, of, scale_out=SCALE_OUT)
