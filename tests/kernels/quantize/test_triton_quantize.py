"""The Triton quantizer against its twin: bit for bit on a GPU, and in the interpreter within its faults.

The interpreter's own cast to FP8 differs from the hardware's: it may be off by one step, and
where rounding carries into the next power of two it forgets the carry (124.7 gives 64, not
128; triton 3.9). Both are allowed here and nothing else.
"""

import pytest
import torch
import with_triton  # noqa: F401
from cases import combinations, on_gpu_or_cpu
from sweeps import sweep

from loka.core.numerics.hot_columns import append
from loka.core.numerics.reference import Quantized, dequantize, expand_scale, quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.kernels.quantize import quantizer
from loka.kernels.quantize.side import Side
from loka.kernels.quantize.triton import quantize as fused
from loka.kernels.quantize.triton.residuals import append_residuals_fused

pytestmark = pytest.mark.usefixtures("poisoned_memory")


FP8 = (Format.E4M3, Format.E5M2)
INT8 = Cast(Format.INT8, Granularity.ROW)
CASTS = [Cast(f, g, p) for f in FP8 for g in Granularity for p in (False, True)]
E4M3 = {granularity: Cast(Format.E4M3, granularity) for granularity in Granularity}


def pair_fused(hp, *, row, column, given=None, health=None):
    return fused.quantize_fused(((hp, row, column),), given=given, health=health)[0]


def check(out, twin, inner):
    """`out` is `twin` on a GPU, and within the interpreter's faults on a CPU; `inner` is not padding."""
    cast = twin.cast
    assert out.cast == cast
    assert out.shape == twin.shape
    assert out.data.is_contiguous()
    assert torch.equal(out.scale.cpu(), twin.scale)
    got, expected = dequantize(out).cpu(), dequantize(twin)
    assert (got[inner[0] :] == 0).all()
    assert (got[:, inner[1] :] == 0).all()
    if out.data.is_cuda or cast.format.uniform:  # integers need no cast of the interpreter's
        assert torch.equal(out.data.cpu(), twin.data) if cast.format.uniform else torch.equal(got, expected)
        return
    step = expected.abs() * 2.0**-cast.format.mantissa
    floor = expand_scale(twin.scale, cast, *twin.shape) * cast.format.smallest_subnormal
    off_by_a_step = (got - expected).abs() <= torch.maximum(step, floor) * 1.001
    mantissa, _ = torch.frexp(twin.data.float())
    lost_carry = (mantissa.abs() == 0.5) & torch.isclose(got * 2, expected)
    assert bool((off_by_a_step | lost_carry).all())
    assert lost_carry.logical_and(~off_by_a_step).float().mean() < 0.05


def check_pair(hp, row, column, padded, device, given=None):
    placed = hp.to(device)
    assert hp.stride() == placed.stride()
    turned = (padded[1], padded[0])
    sides = (Side(cast=row, padded=padded) if row else None, Side(cast=column, padded=turned) if column else None)
    scale = given.to(device) if given is not None else None
    out_row, out_column = pair_fused(placed, row=sides[0], column=sides[1], given=scale)
    assert (out_row is None) == (row is None)
    assert (out_column is None) == (column is None)
    if row:
        check(out_row, quantize(hp, row, padded=padded, scale=given), tuple(hp.shape))
    if column:
        check(out_column, quantize(hp.t(), column, padded=turned, scale=given), tuple(hp.t().shape))


def nasty(rows, columns, dtype, *, transposed):
    hp = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    hp[7 % rows] = 0
    hp[9 % rows] *= 1e-9
    hp[11 % rows] *= 1e20
    hp[:, 3 % columns] = 0
    hp = hp.to(dtype)
    return hp.t().contiguous().t() if transposed else hp


COPIES = combinations(
    list(FP8), list(Granularity), [False, True], [False, True], [torch.bfloat16, torch.float32], together=3
)


@pytest.mark.parametrize(
    ("format", "granularity", "power_of_two", "transposed", "dtype"), sweep(COPIES, COPIES[::4]), ids=str
)
def test_one_copy_matches_the_twin(format, granularity, power_of_two, transposed, dtype, device):
    cast = Cast(format, granularity, power_of_two)
    hp = nasty(70, 150, dtype, transposed=transposed)
    check_pair(hp, cast, None, (80, 256), device)
    check_pair(hp, None, cast, (70, 150), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_integers_are_the_twin_s_to_the_last_bit(dtype, transposed, device):
    """By themselves, and beside an e4m3 transpose for `grad_weight`, as a site quantizes its input."""
    hp = nasty(70, 150, dtype, transposed=transposed)
    hp[15] = torch.arange(150) / 2 * (127 / 74.5)  # ends of steps: halves go to the even
    check_pair(hp, INT8, Cast(Format.E4M3, Granularity.ROW, power_of_two=True), (80, 160), device)
    hp[13] *= torch.finfo(dtype).max / hp[13].abs().max()
    check_pair(hp, INT8, None, (80, 256), device)
    check_pair(hp, None, INT8, (70, 150), device)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # numpy's, and what is tested
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_residuals_of_hot_columns(transposed, second, device):
    """Behind the columns of a wider row copy, beside a transpose, as a site quantizes its input."""
    dtype = torch.bfloat16 if second else torch.float32
    hp = nasty(70, 150, dtype, transposed=transposed)
    hp[15, 3], hp[16, 5] = float("nan"), float("inf")
    row, column = Side(cast=E4M3[Granularity.ROW], padded=(80, 224)), Side(cast=INT8, padded=(150, 70))
    out, _ = pair_fused(hp.to(device), row=row, column=column)
    columns = torch.arange(1, 150, 4)[:32]
    twin = Quantized(out.data.cpu().clone(), out.scale.cpu(), out.cast)
    append(twin, hp, columns, second=second)
    append_residuals_fused(out, hp.to(device), columns.to(device), second=second)
    values = slice(150, 182) if second else slice(182, 214)
    assert torch.equal(out.data.cpu()[:, values].view(torch.uint8), twin.data[:, values].view(torch.uint8))
    bad = out.scale.isfinite().logical_not().view(-1).cpu()
    assert bad.nonzero().flatten().tolist() == [15, 16]
    both = [Quantized(q.data.cpu()[~bad], q.scale.cpu()[~bad], q.cast) for q in (out, twin)]
    check(*both, (68, 214))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_scale_of_its_row(bad, device):
    hp = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    hp[5, 9] = bad
    health = torch.zeros(3, dtype=torch.int64, device=device)
    side = Side(cast=INT8, padded=(32, 64), flag=1, count=0)
    found, _ = pair_fused(hp.to(device), row=side, column=None, health=health)
    finite = found.scale.cpu().isfinite().view(-1)
    assert finite.tolist() == [row != 5 for row in range(32)]
    assert torch.equal(found.data.cpu()[finite], quantize(hp, INT8).data[finite])
    assert health.tolist() == [1, 1, 0]


PAIRS = [
    *combinations(list(Granularity), list(Granularity), [False, True], list(FP8), together=2),
    # Equal casts, whatever the combinations chose: one launch makes both copies.
    *((same, same, False, Format.E4M3) for same in Granularity),
]


@pytest.mark.parametrize(("row", "column", "transposed", "format"), sweep(dict.fromkeys(PAIRS), PAIRS[::3]), ids=str)
def test_a_pair_matches_two_twins(row, column, transposed, format, device):
    hp = nasty(*on_gpu_or_cpu((150, 300), (150, 70)), torch.bfloat16, transposed=transposed)
    padded = on_gpu_or_cpu((160, 384), (160, 128)) if format is Format.E5M2 else tuple(hp.shape)
    check_pair(hp, E4M3[row], Cast(format, column), padded, device)


def test_copies_may_be_padded_differently(device):
    hp = nasty(70, 150, torch.bfloat16, transposed=False)
    for row, column in ((Granularity.TENSOR, Granularity.ROW), (Granularity.GROUP_1X128,) * 2):
        sides = (Side(cast=E4M3[row], padded=(72, 512)), Side(cast=E4M3[column], padded=(160, 384)))
        first, second = pair_fused(hp.to(device), row=sides[0], column=sides[1])
        check(first, quantize(hp, E4M3[row], padded=(72, 512)), (70, 150))
        check(second, quantize(hp.t(), E4M3[column], padded=(160, 384)), (150, 70))


@pytest.mark.parametrize("cast", [c for c in CASTS if c.granularity is Granularity.TENSOR], ids=str)
def test_a_given_scale_saturates(cast, device):
    hp = torch.randn(70, 150, generator=torch.Generator().manual_seed(0))
    given = hp.abs().amax().view(1) / cast.format.max / 2
    check_pair(hp, cast, cast, (80, 256), device, given=given)
    side = Side(cast=cast, padded=(70, 150))
    out, _ = pair_fused(hp.to(device), row=side, column=None, given=given.to(device))
    assert out.data.float().abs().max().item() == cast.format.max


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_given_scale_hides_nothing(bad, device):
    hp = torch.randn(70, 150)
    hp[40, 130] = bad
    cast = E4M3[Granularity.TENSOR]
    row = Side(cast=cast, padded=(70, 150), flag=1, count=0)
    column = Side(cast=cast, padded=(150, 70), flag=5, count=3)
    given = torch.full((1,), 0.01)
    for run in (pair_fused, quantizer.quantize_pair):
        place = device if run is pair_fused else torch.device("cpu")
        health = torch.zeros(9, dtype=torch.int64, device=place)
        first, second = run(hp.to(place), row=row, column=column, given=given.to(place), health=health)
        assert [place for place, count in enumerate(health.tolist()) if count] == [0, 1, 3, 5]
        if run is pair_fused and device.type == "cpu":
            continue  # the interpreter casts NaN to a number (triton 3.9)
        assert torch.isnan(first.data.float()).nonzero().tolist() == [[40, 130]]
        assert torch.isnan(second.data.float()).nonzero().tolist() == [[130, 40]]


ODD = [(1, 1), (1, 8192), (4097, 3), (1000, 1003), (65, 129)]
EVEN = [(16, 16), (48, 80), (80, 2064), (2048, 512), (8192, 480), (512, 3456), (2048, 2048)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ODD + EVEN)
def test_many_shapes_on_the_gpu(shape):
    """Bit for bit, for all pairs of casts. Multiples of 16 take the launch that serves both copies."""
    hp = torch.randn(*shape) * torch.exp(2 * torch.randn(*shape))
    padded = (-(-shape[0] // 16) * 16, -(-shape[1] // 128) * 128)
    for cast in CASTS:
        check_pair(hp, cast, None, padded, torch.device("cuda"))
        check_pair(hp, None, cast, padded, torch.device("cuda"))
        for other in E4M3.values():
            check_pair(hp.bfloat16(), other, cast, padded, torch.device("cuda"))


@pytest.mark.parametrize("granularity", list(Granularity), ids=str)
@pytest.mark.parametrize("transposed", sweep([False, True], [True]))
def test_nan_stays_and_raises_the_flag(granularity, transposed, device):
    hp = torch.randn(40, 200, device=device)
    hp = hp.t().contiguous().t() if transposed else hp
    row = Side(cast=E4M3[granularity], padded=(48, 256), flag=2)
    column = Side(cast=E4M3[granularity], padded=(256, 48), flag=7, count=6)
    health = torch.zeros(3, 3, dtype=torch.int64, device=device)
    pair_fused(hp, row=row, column=column, health=health)
    assert health.tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0]]
    hp[3, 3] = float("nan")
    for sides in ((row, None), (None, column), (row, column)):
        health.zero_()
        first, second = pair_fused(hp, row=sides[0], column=sides[1], health=health)
        if first:
            assert torch.isnan(dequantize(first)[3, :128]).all()
        if second:
            assert torch.isnan(dequantize(second)[3, :40]).all()
        if first and granularity is Granularity.ROW:
            assert torch.isfinite(dequantize(first)[4:]).all()
        one = int(second is not None)
        assert health.flatten().tolist() == [0, 0, int(first is not None), 0, 0, 0, one, one, 0]


@pytest.mark.parametrize(
    ("granularity", "transposed", "places"),
    [
        (Granularity.ROW, False, (0, 4095, 4096, 8999)),  # a program takes steps along a long row
        *(
            (granularity, True, on_gpu_or_cpu((0, 4095, 4096, 8999), (0, 63, 64, 299)))  # and tiles
            for granularity in (Granularity.ROW, Granularity.TENSOR)
        ),
    ],
    ids=str,
)
def test_the_largest_element_may_lie_anywhere(granularity, transposed, places, device):
    columns = places[-1] + 1
    side = Side(cast=E4M3[granularity], padded=(16, -(-columns // 16) * 16))
    for place in places:
        hp = torch.ones(columns, 8, device=device).t()
        hp = hp if transposed else hp.contiguous()
        hp[7, place] = 1000.0
        out, _ = pair_fused(hp, row=side, column=None)
        assert out.scale.max().item() == pytest.approx(1000 / 448)
        assert dequantize(out)[7, place].item() == pytest.approx(1000.0)


@pytest.mark.gpu
def test_scales_lie_as_the_libraries_read_them():
    """1x128 column-major with rows padded to 4; 128x128 with columns padded to 4
    (kernels/gemm/layouts.py)."""
    hp = torch.randn(90, 640, device="cuda")
    group = Side(cast=E4M3[Granularity.GROUP_1X128], padded=(90, 640))
    block = Side(cast=E4M3[Granularity.BLOCK_128X128], padded=(640, 256))
    first, second = pair_fused(hp, row=group, column=block)
    assert (first.scale.shape, first.scale.stride()) == ((90, 5), (1, 92))
    assert (second.scale.shape, second.scale.stride()) == ((5, 2), (4, 1))
    beyond = second.scale.as_strided((5, 4), (4, 1))[:, 2:]
    assert (beyond == 0).all()


@pytest.mark.parametrize("format", list(FP8), ids=str)
def test_the_largest_numbers_have_the_scales_of_the_twin(format, device):
    hp = torch.tensor([[2.9e38], [2.99e38], [3.3e38], [-3.4e38], [1e30]]).expand(5, 16).contiguous()
    cast = Cast(format, Granularity.ROW, power_of_two=True)
    side = Side(cast=cast, padded=(5, 16))
    row, _ = pair_fused(hp.to(device), row=side, column=None)
    twin = quantize(hp, cast)
    assert torch.equal(row.scale.cpu(), twin.scale)
    assert torch.isfinite(dequantize(row)).all()
