"""FP8 copies of lists of weights: the twin against plain arithmetic, the kernels against the twin.

On a GPU kernels and twin are bit-equal. In the interpreter they are for weights that FP8 holds exactly, and
others lie within the faults of the interpreter's cast, which tests/kernels/quantize/test_triton_quantize.py
describes.
"""

import math

import pytest
import torch
from cases import on_gpu_or_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from loka.core.numerics.reference import quantize
from loka.core.problem import FLOATS
from loka.kernels.quantize import int8_weights as int8_module
from loka.kernels.quantize.fp8_weights import GROUP, cast_rows, fp8_weights, groups_of, room_for_rows
from loka.kernels.quantize.weight_copies import Copies, quantize_weight, unwritten

NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # by their bytes


@pytest.fixture
def fused(poisoned_memory):
    pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
    return pytest.importorskip("loka.kernels.quantize.triton.fp8_weights")


def as_bytes(tensor):
    return tensor.cpu().view(torch.uint8)


def same(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.is_contiguous()
        assert torch.equal(as_bytes(one), as_bytes(other))


def in_threes(tensors):
    return [Copies(*tensors[begin : begin + 3]) for begin in range(0, len(tensors), 3)]


LAYOUTS = {
    "contiguous": lambda weight: weight,
    "transposed": lambda weight: weight.t().contiguous().t(),
    "sliced": lambda weight: torch.stack((weight, weight), dim=2).flatten(1)[:, ::2],
    "wide": lambda weight: torch.cat((weight, torch.full_like(weight, 7.0)), dim=1)[:, : weight.shape[1]],
    "shifted": lambda weight: torch.cat((weight.new_zeros(1), weight.flatten()))[1:].view(weight.shape),
    "repeated": lambda weight: weight[:1].expand(weight.shape),
    "repeated transposed": lambda weight: weight[:, :1].expand(weight.shape),
    "repeated sliced": lambda weight: torch.stack((weight[:1], 8 * weight[:1]), 2)[:, :, 0].expand(weight.shape),
}


def representable(rows, columns, dtype, *, exponent, seed):
    """Values of e4m3 of up to 256, times 2^exponent; 256 and both zeros among them."""
    numbers = NUMBERS[NUMBERS.abs() <= 256]
    picks = torch.randint(len(numbers), (rows, columns), generator=torch.Generator().manual_seed(seed))
    values = numbers[picks]
    values.view(-1)[-1] = -0.0
    values.view(-1)[0] = 256.0
    return (values * 2.0**exponent).to(dtype)


def moved(weight, device):
    if device == weight.device:
        return weight
    memory = torch.empty(0, dtype=weight.dtype).set_(weight.untyped_storage())
    return memory.to(device).as_strided(weight.shape, weight.stride(), weight.storage_offset())


def run_fused(fused, weights, transposed, device):
    copies = [
        Copies(*(each.to(device) for each in unwritten(weight, transposed=turn)))
        for weight, turn in zip(weights, transposed, strict=True)
    ]
    fused.quantize_weights_fused([moved(weight, device) for weight in weights], copies)
    return copies


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    dtype=st.sampled_from(FLOATS),
    layout=st.sampled_from(sorted(LAYOUTS)),
    size=st.integers(-150, 128),
    transposed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_the_twin_is_plain_arithmetic(shape, dtype, layout, size, transposed, seed):
    """Of sizes from beyond the smallest number of a dtype to beyond its largest."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    limit = torch.finfo(dtype).max
    weight = LAYOUTS[layout]((values * 2.0**size).clamp(-limit, limit).to(dtype))
    row, column, scale = in_threes(fp8_weights([weight], [transposed]))[0]
    sides = tuple(-(-side // 16) * 16 for side in shape)
    assert row.shape == sides
    assert column.shape == (sides[::-1] if transposed else (0,))
    assert row.is_contiguous()
    assert column.is_contiguous()
    assert scale.tolist() == [scale[0].item()] * max(sides)
    # The least power of two that brings the weight to 256 or below.
    largest = weight.double().abs().max().item()
    mantissa, exponent = math.frexp(largest)
    exponent -= mantissa == 0.5  # 2^exponent is not below
    assert scale[0].item() == 2.0 ** (max(exponent - 8, -100) if largest else -100)
    # The nearest number of e4m3, of two the one with an even byte.
    wanted = weight.double() / scale[0].item()
    data = as_bytes(row)
    got = NUMBERS[data.long()][: shape[0], : shape[1]]
    near = (wanted.flatten()[:, None] - NUMBERS[None, :]).abs().nan_to_num(nan=math.inf)
    assert torch.equal((got - wanted).abs().flatten(), near.amin(dim=1))
    # Both zeros are nearest to zero, hence sets of numbers and not of bytes.
    tied = [len(set(NUMBERS[one == one.min()].tolist())) > 1 for one in near]
    assert not (data[: shape[0], : shape[1]].flatten()[torch.tensor(tied)] % 2).any()
    assert torch.equal(got.signbit()[got == 0], wanted.signbit()[got == 0])
    assert data.count_nonzero() == data[: shape[0], : shape[1]].count_nonzero()
    if transposed:
        assert torch.equal(as_bytes(column), data.t())


@pytest.mark.parametrize("dtype", sweep(FLOATS, FLOATS[:1]), ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, "a NaN with a sign"], ids=str)
def test_what_is_not_finite_makes_all_of_its_weight_nan(bad, dtype, fused, device):
    """Wherever it lies; and no weight beside it is touched."""
    weights = [representable(20, 70, dtype, exponent=0, seed=place) for place in range(3)]
    number = -torch.tensor(math.nan) if isinstance(bad, str) else torch.tensor(bad)
    weights[1][19, 69] = number.to(dtype)
    twins = [quantize_weight(weight, transposed=True) for weight in weights]
    assert twins[1].scale.isnan().all()
    assert (as_bytes(twins[1].row) == 0x7F).all()
    assert (as_bytes(twins[1].column) == 0x7F).all()
    for got, twin in zip(run_fused(fused, weights, [True] * 3, device), twins, strict=True):
        same(got, twin)
    for twin in (twins[0], twins[2]):
        assert twin.row.float().isfinite().all()


@pytest.mark.parametrize("dtype", sweep(FLOATS, [torch.bfloat16]), ids=str)
def test_exact_weights_match_the_twin_bit_for_bit(dtype, fused, device):
    shapes = [(13, 1), (1, 13), (1, 1), (70, 150), (64, 128), (3, 200), (65, 16)]
    weights = [representable(*shape, dtype, exponent=i - 3, seed=i) for i, shape in enumerate(shapes)]
    for place, layout in enumerate(LAYOUTS.values()):
        weights.append(layout(representable(72, 136, dtype, exponent=-place, seed=place)))
    weights.append(torch.zeros(5, 5, dtype=dtype))
    assert len(weights) == GROUP
    for transposed in on_gpu_or_cpu((True, False), (True,)):
        wanted = [transposed ^ (place % 3 == 0) for place in range(GROUP)]
        got = run_fused(fused, weights, wanted, device)
        for one, weight, turn in zip(got, weights, wanted, strict=True):
            twin = quantize_weight(weight, transposed=turn)
            same(one, twin)
            whole = twin.row.float() * twin.scale[0]  # and the twin is the weight itself
            assert torch.equal(whole[: weight.shape[0], : weight.shape[1]], weight.float())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_rounded_weights_match_the_twin(dtype, layout, fused, device):
    weight = torch.randn(70, 152, generator=torch.Generator().manual_seed(0))
    weight[3], weight[5], weight[:, 7] = 0, weight[5] * 2.0**10, weight[:, 7] * 2.0**-10
    weight = LAYOUTS[layout](weight.to(dtype))
    got, twin = run_fused(fused, [weight], [True], device)[0], quantize_weight(weight, transposed=True)
    assert torch.equal(got.scale.cpu(), twin.scale)
    assert torch.equal(as_bytes(got.column), as_bytes(got.row).t())
    if device.type == "cuda":
        same(got, twin)
        return
    found, expected = got.row.float(), twin.row.float()
    off_by_a_step = (found - expected).abs() <= (expected.abs() * 2.0**-3).clamp_min(2.0**-9) * 1.001
    lost_carry = (torch.frexp(expected)[0].abs() == 0.5) & (found * 2 == expected)
    assert bool((off_by_a_step | lost_carry).all())
    assert (lost_carry & ~off_by_a_step).float().mean() < 0.05


def test_scales_match_the_twin_at_every_edge(fused, device):
    """Powers of two and their neighbours, where the exponent steps; subnormals, limits, and zero."""
    edges = [2.0**-149, 2.0**-126, 2.0**-92, 2.0**-91, 1.0, 3.0, 256.0, 448.0, 2.0**120, 2.0**127]
    numbers = torch.tensor([0.0, *edges])
    numbers = torch.cat([numbers.nextafter(torch.tensor(way)) for way in (-1.0, 0.0, math.inf)] + [numbers])
    numbers = torch.cat((numbers, torch.tensor([torch.finfo(torch.float32).max])))
    for weights in (-numbers).view(-1, 1, 1).split(GROUP):
        copies = run_fused(fused, list(weights), [False] * len(weights), device)
        for got, weight in zip(copies, weights, strict=True):
            twin = quantize_weight(weight, transposed=False)
            assert torch.equal(as_bytes(got.scale), as_bytes(twin.scale))


@pytest.mark.parametrize("layout", sweep(("contiguous", "transposed", "wide", "shifted"), ("shifted",)))
def test_the_largest_element_may_lie_anywhere(layout, fused, device, monkeypatch):
    """Four programs take several tiles each, the last one less than a whole tile."""
    monkeypatch.setattr(fused, "_PARTIALS", 4)
    rows, columns = on_gpu_or_cpu((150, 333), (90, 300))
    last = rows * columns - 1
    for place in (0, 1, 4095, 4096, 2 * 4096, last // 4096 * 4096 - 1, last // 4096 * 4096, last):
        weight = torch.ones(rows, columns)
        weight.view(-1)[place] = -1024.0
        weight = LAYOUTS[layout](weight)
        got = run_fused(fused, [weight.new_full((3, 3), 7.0), weight], [False, False], device)[1]
        same(got, quantize_weight(weight, transposed=False))
        assert got.scale[0].item() == 4.0


@pytest.mark.usefixtures("overflow_is_an_error")
def test_a_weight_may_span_more_than_32_bits(fused, device):
    """Rows 2^29 elements apart; of the 5 GiB between them a CPU never touches a page."""
    stride = 2**29 + 8
    memory = torch.empty_strided((5 * stride,), (1,), dtype=torch.bfloat16, device=device)
    weight = memory.as_strided((5, 16), (stride, 1))
    weight.copy_(representable(5, 16, torch.bfloat16, exponent=1, seed=0))
    copies = Copies(*(each.to(device) for each in unwritten(weight, transposed=True)))
    fused.quantize_weights_fused([weight], [copies])
    same(copies, quantize_weight(weight.cpu(), transposed=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_by_a_maximum_that_is_known(dtype, fused, device):
    """As of a shard: the scale is that of the whole weight, of which another rank may hold the largest."""
    sides = ((9, 64), (70, 32), (1, 16))
    whole = [representable(*each, dtype, exponent=2, seed=each[0]) for each in sides]
    whole = [weight.where(weight.abs() >= 1, 0.0) for weight in whole]  # an eighth of all others is representable too
    shards = [weight[: len(weight) // 2 + 1].contiguous() for weight in whole]
    shards[1] = torch.cat((shards[1], shards[1]), dim=1)[:, :32]  # with a gap behind each row
    largest = torch.full((5,), math.nan)
    places = (3, 1, 4)
    for weight, place in zip(whole, places, strict=True):
        largest[place] = 8 * weight.float().abs().amax()
    largest[4] = math.inf
    given = [moved(shard, device) for shard in shards], [room_for_rows(shard.to(device)) for shard in shards]
    scales = [torch.full((-(-max(shard.shape) // 16) * 16,), 7.0, device=device) for shard in shards]
    fused.cast_rows_fused(*given, scales, largest.to(device), places)
    for shard, got, scale, place in zip(shards, given[1], scales, places, strict=True):
        step = 2.0 ** math.ceil(math.log2(largest[place])) / 256 if largest[place] < math.inf else math.nan
        expected = (shard.float() / step).to(torch.float8_e4m3fn)
        assert torch.equal(as_bytes(got), as_bytes(expected))
        assert scale.cpu().nan_to_num(nan=-1.0).tolist() == [step if step == step else -1.0] * len(scale)
        again = [room_for_rows(shard.to(device))]
        cast_rows([shard.to(device)], again, [scale], largest.to(device), [place])
        assert torch.equal(as_bytes(again[0]), as_bytes(expected))


def launches_of(monkeypatch, device, name):
    """The shapes of the weights of each launch of a kernel from then on; a CPU launches none."""
    if device.type != "cuda":
        return []
    from loka.kernels.quantize.triton import fp8_weights as kernels

    launched, run = [], getattr(kernels, name)

    def noted(weights, *rest):
        launched.append([tuple(weight.shape) for weight in weights])
        run(weights, *rest)

    monkeypatch.setattr(kernels, name, noted)
    return launched


def test_rows_whose_sides_fit_no_kernel_are_the_twin_s(device, monkeypatch):
    weights = [torch.randn(5, 10, device=device), torch.randn(4, 32, device=device), torch.randn(0, 16, device=device)]
    rows, scales = [room_for_rows(weight) for weight in weights], [torch.empty(32, device=device) for _ in weights]
    launched = launches_of(monkeypatch, device, "cast_rows_fused")
    cast_rows(weights, rows, scales, torch.tensor([4.0, 8.0, 1.0], device=device), (0, 1, 2))
    assert launched == ([[(4, 32)]] if device.type == "cuda" else [])
    for weight, row, step in zip(weights, rows, (4 / 256, 8 / 256, 1.0), strict=True):
        assert torch.equal(as_bytes(row), as_bytes((weight / step).to(torch.float8_e4m3fn)))


def test_a_weight_without_elements_has_copies(device):
    """They are padding alone, and its scale is that of zeros."""
    weights = [torch.ones(shape, device=device) for shape in ((0, 20), (4, 4), (20, 0), (0, 0))]
    got = in_threes(fp8_weights(weights, [True] * 4))
    assert [tuple(each.row.shape) for each in got] == [(0, 32), (16, 16), (32, 0), (0, 0)]
    assert [tuple(each.column.shape) for each in got] == [(32, 0), (16, 16), (0, 32), (0, 0)]
    assert [each.scale.tolist() for each in got] == [[2.0**-100] * 32, [2.0**-8] * 16, [2.0**-100] * 32, []]


def test_a_launch_serves_a_group_of_one_dtype(device, monkeypatch):
    weights = [torch.full((2, 2), 1.0 + place, device=device) for place in range(GROUP + 1)]
    weights[3:3] = [torch.full((2, 2), 100.0, dtype=torch.bfloat16, device=device)] * 2
    weights.append(torch.empty(0, 3, device=device))
    assert len(groups_of(weights)) == 3
    launched = launches_of(monkeypatch, device, "quantize_weights_fused")
    got = in_threes(fp8_weights(weights, [False] * len(weights)))
    assert len(launched) == (3 if device.type == "cuda" else 0)
    for one, weight in zip(got, weights, strict=True):
        same(one, quantize_weight(weight.cpu(), transposed=False))


def test_results_share_no_memory():
    weight = torch.randn(16, 16)
    got = fp8_weights([weight, weight, weight.t()], [True, False, True])
    storages = {tensor.untyped_storage().data_ptr() for tensor in got if tensor.numel()}
    assert len(storages) == 8
    assert weight.untyped_storage().data_ptr() not in storages
    torch.library.opcheck(fp8_weights, ([weight, weight[:5, 3:].t()], [True, False]))


@pytest.mark.parametrize(
    ("weights", "transposed", "reason"),
    [
        ([torch.ones(2, 2)], [True, False], "1 weights, but 2 values"),
        ([torch.ones(2, 2), torch.ones(2)], [True, False], r"weight 1 has shape \(2,\)"),
        ([torch.ones(2, 2, dtype=torch.float64)], [True], "weight 0 is torch.float64"),
        ([torch.ones(2, 2), torch.ones(2, 2, device="meta")], [True, True], "weight 1 is on meta"),
    ],
)
def test_what_the_op_refuses(weights, transposed, reason):
    with pytest.raises(ValueError, match=reason):
        fp8_weights(weights, transposed)


def test_a_compiled_graph_has_it_whole_with_symbolic_sizes():
    """As a graph uses it: slices of one scale for rows, columns and the tensor."""

    def low(first, second):
        row, column, scale, other, _, other_scale = fp8_weights([first, second.t()], [True, False])
        rows, columns = row.shape
        return [
            row.float() * scale[:rows, None],
            column.float() * scale[:columns, None],
            other.float() * other_scale[:1],
        ]

    compiled = torch.compile(low, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for shapes in (((20, 50), (30, 7)), ((50, 20), (64, 64)), ((33, 90), (5, 300))):
            weights = [torch.randn(*shape) for shape in shapes]
            for got, expected in zip(compiled(*weights), low(*weights), strict=True):
                assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FLOATS, None], ids=str)
def test_many_weights_on_the_gpu(dtype):
    """Bit for bit; None: every dtype in one list."""
    shapes = [(1, 8192), (4097, 3), (1000, 1003), (16, 16), (80, 2064), (512, 3456), (3456, 512), (2048, 2048)]
    weights = []
    for place, (shape, layout) in enumerate((s, layout) for s in shapes for layout in sorted(LAYOUTS)):
        weight = torch.randn(*shape) * torch.exp(2 * torch.randn(*shape)) * 2.0 ** (place % 20 - 10)
        weights.append(LAYOUTS[layout](weight.to(dtype or FLOATS[place % 3])))
    wanted = [place % 3 != 1 for place in range(len(weights))]
    got = in_threes(fp8_weights([moved(weight, torch.device("cuda")) for weight in weights], wanted))
    for one, weight, turn in zip(got, weights, wanted, strict=True):
        same(one, quantize_weight(weight, transposed=turn))


@pytest.mark.gpu
def test_a_graph_follows_weights_that_change_in_place():
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(64, 64), (100, 30), (512, 1024), (256, 13)] * 5
    weights = [
        torch.randn(*shape, device="cuda", generator=generator, dtype=FLOATS[place % 3])
        for place, shape in enumerate(shapes)
    ]
    wanted = [place % 2 == 0 for place in range(len(weights))]
    fp8_weights(weights, wanted)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_weights(weights, wanted)
    for step in range(3):
        for weight in weights:
            weight.normal_(generator=generator).mul_(10.0 ** (step - 1))
        weights[step][0, 0] = math.nan
        graph.replay()
        for one, weight, turn in zip(in_threes(out), weights, wanted, strict=True):
            same(one, quantize_weight(weight.cpu(), transposed=turn))
            assert torch.equal(one.row.float().isnan(), weight.isnan().any().expand(one.row.shape))


@pytest.mark.parametrize("first", [3, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_integers_of_several_weights_are_the_twin_s(dtype, first, device):
    """By one launch: ragged sides, gaps behind rows, which may begin at 16 bytes; zeros, huge, tiny, not finite."""
    triton_weights = pytest.importorskip("loka.kernels.quantize.triton.int8_weights")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, k, generator=generator).to(dtype) for n, k in ((33, 40), (1, 16), (16, 1100))]
    weights.append(torch.randn(20, 64, generator=generator).to(dtype)[:, first:50])
    weights[0][5], weights[0][7, 3] = 0, torch.nan
    weights[2][3] *= torch.finfo(dtype).max / weights[2][3].abs().max()
    weights[2][4] *= 1e-36
    weights = [weight.to(device) for weight in weights]
    copies = [int8_module._unwritten(weight) for weight in weights]
    triton_weights.quantize_rows_fused(weights, copies)
    for weight, (row, scale) in zip(weights, copies, strict=True):
        twin = quantize(weight, int8_module.CAST, padded=tuple(row.shape))
        assert torch.equal(scale.nan_to_num(), twin.scale.view(-1).nan_to_num())
        assert torch.equal(row, twin.data)


def test_an_op_gives_the_integers_of_weights_that_lie_in_any_way(device):
    weights = [torch.randn(48, 32), torch.randn(64, 32).t(), torch.randn(16, 8).expand(2, 16, 8)[0]]
    found = int8_module.int8_weights([weight.to(device) for weight in weights])
    for weight, row, scale in zip(weights, found[::2], found[1::2], strict=True):
        twin = quantize(weight, int8_module.CAST, padded=tuple(row.shape))
        assert torch.equal(row.cpu(), twin.data)
        assert torch.equal(scale.cpu(), twin.scale.view(-1))
