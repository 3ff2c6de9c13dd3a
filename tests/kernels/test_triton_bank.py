"""The bank's and the book's kernels against their twins: bit for bit on a GPU.

In the interpreter weights that FP8 holds exactly are compared bit for bit; others within the
faults of the interpreter's cast, which tests/kernels/test_triton_quantize.py describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from loka.core.problem import round_up
from loka.kernels import book

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
fused = pytest.importorskip("loka.kernels.triton.bank")

FMAX = 448.0


def buffers(slots: int, units: int = 0, *, margin: Sequence[int] = (), largest: float = FMAX) -> book.Scales:
    bits = torch.full((slots,), largest).view(torch.int32)
    margins = torch.tensor(list(margin) or [0] * slots, dtype=torch.int32)
    return book.Scales(
        history=torch.zeros(slots, 16),
        cursor=torch.zeros(slots, dtype=torch.int32),
        scale=torch.ones(4 * slots),
        seen=torch.zeros(4 * slots, dtype=torch.int32),
        counters=torch.zeros(slots, 2, dtype=torch.int64),
        rules=torch.stack((bits, margins), dim=1),
        units=torch.zeros(4 * units, dtype=torch.int32),
    )


def copied(scales: book.Scales, device: torch.device) -> book.Scales:
    return book.Scales(**{name: buffer.clone().to(device) for name, buffer in vars(scales).items()})


def entries(weights: Sequence[torch.Tensor], device: torch.device) -> list[book.Entry]:
    """Copies full of NaN: what a kernel forgets to write shows."""
    made = []
    for slot, weight in enumerate(weights):
        rows, columns = (round_up(side, 16) for side in weight.shape)
        place = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=device)
        place.copy_(weight)
        poison = torch.full((rows * columns,), 0x7F, dtype=torch.uint8, device=device)
        row = poison.clone().view(rows, columns).view(torch.float8_e4m3fn)
        turned = poison.clone().view(columns, rows).view(torch.float8_e4m3fn)
        made.append(book.Entry(place, row, turned, slot))
    return made


def representable(rows: int, columns: int, dtype: torch.dtype, *, exponent: int, seed: int) -> torch.Tensor:
    """Values of e4m3 times 2^exponent, NaN left out; 448 and both zeros among them."""
    bits = torch.randint(0, 256, (rows, columns), generator=torch.Generator().manual_seed(seed))
    values = bits.to(torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(nan=448.0)
    values.view(-1)[0] = 448.0
    values.view(-1)[-1] = -0.0 if rows * columns > 1 else 448.0
    return (values * 2.0**exponent).to(dtype)


def run_both(
    weights: Sequence[torch.Tensor], scales: book.Scales, device: torch.device
) -> tuple[list[book.Entry], book.Scales, list[book.Entry], book.Scales]:
    placed, on_device = entries(weights, device), copied(scales, device)
    for dtype in dict.fromkeys(weight.dtype for weight in weights):
        table = fused.build_table([entry for entry in placed if entry.weight.dtype == dtype])
        fused.quantize_bank_fused(table, on_device, counting=True)
    twin, twin_scales = entries(weights, torch.device("cpu")), copied(scales, torch.device("cpu"))
    for batch in book.batches(twin):
        book.quantize_bank(batch, twin_scales, counting=True)
    return placed, on_device, twin, twin_scales


def same_buffers(got: book.Scales, expected: book.Scales) -> None:
    for name, buffer in vars(expected).items():
        assert torch.equal(getattr(got, name).cpu().view(torch.uint8), buffer.view(torch.uint8)), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().view(torch.uint8)


def test_exact_weights_match_the_twin_bit_for_bit(device: torch.device) -> None:
    """Odd sizes, 1x1, more than a tile, transposed strides, all dtypes, each with its own scale."""
    shapes = [(1, 1), (17, 33), (70, 150), (64, 64), (128, 72), (3, 200), (65, 16)]
    weights, exponents = [], []
    for place, (rows, columns) in enumerate(shapes):
        dtype = (torch.bfloat16, torch.float32)[place % 2]
        exponent = place - 3
        weights.append(representable(rows, columns, dtype, exponent=exponent, seed=place))
        exponents.append(exponent)
    turned = representable(40, 90, torch.bfloat16, exponent=-5, seed=20).t()  # [90, 40], columns lie in rows
    sliced = representable(30, 64, torch.float32, exponent=2, seed=21)[::2, 1:51]
    half = representable(20, 48, torch.float16, exponent=-2, seed=22)
    weights += [turned, sliced, half]
    exponents += [-5, 2, -2]
    scales = buffers(len(weights))
    scales.scale[::4] = torch.tensor([2.0**exponent for exponent in exponents])
    placed, on_device, twin, twin_scales = run_both(weights, scales, device)
    for got, expected, weight in zip(placed, twin, weights, strict=True):
        assert torch.equal(as_bytes(got.row), as_bytes(expected.row))
        assert torch.equal(as_bytes(got.turned), as_bytes(expected.turned))
        # and the twin is what it should be: the weight itself, its transpose, zeros around
        rows, columns = weight.shape
        scale = scales.scale[4 * got.slot]
        whole = expected.row.float() * scale
        assert torch.equal(whole[:rows, :columns], weight.float())
        assert torch.equal(whole.count_nonzero(), weight.count_nonzero())
        assert torch.equal(as_bytes(expected.turned), as_bytes(expected.row).t())
    same_buffers(on_device, twin_scales)
    assert not on_device.counters.any()  # exact: nothing saturated, nothing became zero
    seen = on_device.seen.cpu()[::4].view(torch.float32)
    assert seen.tolist() == [weight.abs().max().item() for weight in weights]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_rounded_weights_match_the_twin(dtype: torch.dtype, transposed: bool, device: torch.device) -> None:
    """Normal weights with huge, tiny and zero rows under a scale that saturates some and loses some."""
    weight = torch.randn(70, 152, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[5] *= 1e20
    weight[7] *= 1e-20
    weight = weight.to(dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    scales = buffers(1)
    scales.scale[0] = 2.0**-8
    placed, on_device, twin, twin_scales = run_both([weight], scales, device)
    same_buffers(on_device, twin_scales)
    value = weight.float() * 2.0**8
    saturated, underflowed = on_device.counters[0].tolist()
    assert saturated == (value.abs() > FMAX).sum().item() >= 152
    assert underflowed == ((value.abs() <= 2.0**-10) & (value != 0)).sum().item() >= 152
    assert torch.equal(as_bytes(placed[0].turned), as_bytes(placed[0].row).t())
    got, expected = placed[0].row.cpu().float(), twin[0].row.float()
    assert (got[70:] == 0).all()
    assert got[:, 152:].numel() == 8 * 80
    assert (got[:, 152:] == 0).all()
    if device.type == "cuda":
        assert torch.equal(as_bytes(placed[0].row), as_bytes(twin[0].row))
        return
    off_by_a_step = (got - expected).abs() <= (expected.abs() * 2.0**-3).clamp_min(2.0**-9) * 1.001
    lost_carry = (torch.frexp(expected)[0].abs() == 0.5) & (got * 2 == expected)
    assert bool((off_by_a_step | lost_carry).all())
    assert (lost_carry & ~off_by_a_step).float().mean() < 0.05


def test_nan_and_infinity_become_nan_and_are_seen(device: torch.device) -> None:
    weight = representable(20, 20, torch.bfloat16, exponent=0, seed=1)
    weight[2, 3], weight[5, 1] = math.nan, math.inf
    placed, on_device, twin, twin_scales = run_both([weight], buffers(1), device)
    expected = torch.zeros(32, 32, dtype=torch.bool)
    expected[2, 3] = expected[5, 1] = True
    # The interpreter casts NaN to a number (triton 3.9).
    for entry in (*placed, *twin) if device.type == "cuda" else twin:
        assert torch.equal(entry.row.cpu().float().isnan(), expected)
        assert torch.equal(entry.turned.cpu().float().isnan(), expected.t())
    same = as_bytes(placed[0].row) == as_bytes(twin[0].row)
    assert bool((same | expected).all())
    for scales in (on_device, twin_scales):
        assert scales.seen[0].item() > 0x7F800000  # NaN's bits lie above infinity's
        assert not scales.counters.any()


def test_what_counts_as_lost(device: torch.device) -> None:
    """Half of the smallest subnormal is a tie, which goes to zero; 448 is the last that fits."""
    above = 2.0**-10 * (1 + 2.0**-7)
    weight = torch.tensor([[2.0**-10, -(2.0**-10), above, 0.0, -0.0, 448.0, -450.0, 1e30]])
    _, on_device, twin, twin_scales = run_both([weight], buffers(1), device)
    assert twin[0].row.float()[0, :8].tolist() == [0.0, 0.0, 2.0**-9, 0.0, 0.0, 448.0, -448.0, 448.0]
    assert on_device.counters.tolist() == twin_scales.counters.tolist() == [[2, 2]]


def test_seen_is_raised_not_replaced(device: torch.device) -> None:
    weights = [representable(8, 8, torch.bfloat16, exponent=0, seed=place) for place in range(2)]
    scales = buffers(2)
    scales.seen[0] = torch.tensor(1000.0).view(torch.int32)
    scales.seen[4] = torch.tensor(1.0).view(torch.int32)
    _, on_device, _, twin_scales = run_both(weights, scales, device)
    for got in (on_device, twin_scales):
        assert got.seen.cpu()[::4].view(torch.float32).tolist() == [1000.0, 448.0]


@pytest.mark.usefixtures("overflow_is_an_error")
def test_a_weight_may_span_more_than_32_bits(device: torch.device) -> None:
    """Two rows 2^31 elements apart; of the 4 GiB between them a CPU never touches a page."""
    stride = 2**31 + 24
    memory = torch.empty(stride + 16, dtype=torch.bfloat16, device=device)
    weight = memory.as_strided((2, 16), (stride, 1))
    values = torch.arange(32.0).view(2, 16) % 16 - torch.tensor([[0.0], [15.0]])  # exact in e4m3
    weight.copy_(values)
    entry = entries([torch.empty(2, 16, dtype=torch.bfloat16)], device)[0]
    entry = book.Entry(weight, entry.row, entry.turned, 0)
    fused.quantize_bank_fused(fused.build_table([entry]), copied(buffers(1), device))
    assert torch.equal(entry.row[:2].cpu().float(), values)
    assert torch.equal(entry.turned[:, :2].cpu().float(), values.t())


@dataclass
class Ring:
    """The update by Python floats: what the bits must amount to."""

    margin: int
    kept: list[float] = field(default_factory=list)
    scale: float = 1.0

    def push(self, amax: float) -> None:
        if amax == 0 or not math.isfinite(amax):
            return
        self.kept = [*self.kept, amax][-16:]
        mantissa, exponent = math.frexp(max(self.kept) * 2.0**self.margin / FMAX)
        exponent = exponent - 1 if mantissa == 0.5 else exponent
        self.scale = 2.0 ** min(max(exponent, -100), 100)


def test_updates_match_the_twin_and_plain_arithmetic(device: torch.device) -> None:
    """50 updates of 37 slots (more than a program has), 70 units, margins, and every awkward maximum."""
    slots, units = 37, 70
    margins = [place % 5 - 1 for place in range(slots)]
    generator = torch.Generator().manual_seed(0)
    twin = buffers(slots, units, margin=margins)
    got = copied(twin, device)
    rings = [Ring(margin) for margin in margins]
    awkward = [0.0, math.nan, math.inf, 1e-45, 1.1754944e-38, 3.4e38, 448.0, 448.00003, 447.99997, 1.0, 7 / 4]
    for step in range(50):
        amax = torch.randn(slots, generator=generator).exp() * 2.0 ** (step % 7)
        for place, value in enumerate(awkward):
            amax[(3 * place + step) % slots] = value
        for scales in (twin, got):
            scales.seen[::4] = amax.to(scales.seen.device).view(torch.int32)
            scales.units.fill_(step + 1)
        fused.update_scales_fused(got, book.LIMIT)
        book.update_scales(twin)
        same_buffers(got, twin)
        assert not got.seen.any()
        assert not got.units.any()
        for ring, value in zip(rings, amax.tolist(), strict=True):
            ring.push(value)
        assert twin.scale[::4].tolist() == [ring.scale for ring in rings]


def test_unused_places_between_scales_are_left_alone(device: torch.device) -> None:
    """A slot has 16 bytes, of which 4 are a scale: an update keeps to them."""
    scales = copied(buffers(3), device)
    scales.scale[1::4] = 7.0
    scales.seen[::4] = torch.tensor(100.0, device=device).view(torch.int32)
    fused.update_scales_fused(scales, book.LIMIT)
    assert scales.scale.tolist() == [0.25, 7.0, 1.0, 1.0] * 3
