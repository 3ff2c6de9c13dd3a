"""The cross layers' Triton kernels against their twins: FP8 results within the interpreter's faults.

The interpreter's own cast to FP8 may be off by one step, forgets the carry where rounding carries into
the next power of two (124.7 gives 64), and casts NaN to a number (triton 3.9). On a GPU
x_0 (u + b) + x is one rounding instead of two, which moves a value across a rounding boundary of FP8
now and then: one step too.
"""

from __future__ import annotations

import pytest
import torch
from cases import on_gpu_or_cpu

from loka.core import cross as twin
from loka.core.producer import row_units
from loka.core.recipe import Format

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
fused = pytest.importorskip("loka.kernels.triton.cross")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES = [  # even tiles, then rows and features that leave a rest, then MLPerf's width
    (64, 128),
    (37, 100),
    on_gpu_or_cpu((70, 300), (40, 300)),
    (1, 16),
    pytest.param(1024, 3456, marks=pytest.mark.gpu),
    pytest.param(1000, 3456, marks=pytest.mark.gpu),
]


def check_fp8(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype == Format.E4M3.dtype
    assert got.shape == expected.shape
    assert got.is_contiguous()
    low, right = got.cpu().float(), expected.float()
    if got.is_cuda:
        assert torch.equal(low.isnan(), right.isnan())
    low, right = (values.where(right.isfinite(), 0.0) for values in (low, right))  # NaN: see above
    step = torch.maximum(right.abs() * 2.0**-3, torch.tensor(Format.E4M3.smallest_subnormal))
    near = (low - right).abs() <= step * 1.001
    lost_carry = torch.isclose(low * 2, right) & (torch.frexp(right)[0].abs() == 0.5)
    if got.is_cuda:
        lost_carry.zero_()
    assert bool((near | lost_carry).all())
    assert (low != right).float().mean() < (1e-3 if got.is_cuda else 0.1)


def check_hp(got: torch.Tensor | None, expected: torch.Tensor | None, *, steps: float = 1.0) -> None:
    """Within `steps` rounding steps of the dtype, of the largest value: sums of products cancel."""
    assert (got is None) == (expected is None)
    if got is None or expected is None:
        return
    assert got.dtype == expected.dtype
    assert torch.equal(got.cpu().isnan(), expected.isnan())
    tolerance = steps * torch.finfo(got.dtype).eps * expected.nan_to_num(0, 0, 0).abs().amax()
    difference = (got.cpu() - expected).float()
    assert bool((difference.nan_to_num(0, 0, 0).abs() <= tolerance).all())


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def padded(rows: int, features: int) -> tuple[int, int]:
    return -(-features // 16) * 16, -(-rows // 16) * 16


def bookkeeping(device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    return {
        "seen": torch.zeros(1, dtype=torch.int32, device=device),
        "counts": torch.zeros(2, dtype=torch.int64, device=device),
    }


def check_bookkeeping(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """`seen` up to the rounding of one product; counts exactly: no value lies on a boundary here."""
    torch.testing.assert_close(
        got["seen"].cpu().view(torch.float32), expected["seen"].view(torch.float32), rtol=1e-6, atol=0
    )
    assert torch.equal(got["counts"].cpu(), expected["counts"])
    assert expected["counts"][0] > 0, "the scale was chosen so that something saturates"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "features"), SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_produce_matches_the_twin(
    rows: int, features: int, bias: bool, dtype: torch.dtype, device: torch.device
) -> None:
    u, x0, x = (normal(rows, features, seed=seed, dtype=dtype) for seed in range(3))
    b = normal(features, seed=3, dtype=dtype) if bias else None
    scale = torch.tensor([2.0**-8])  # 1.75 saturates
    right, ours = bookkeeping(), bookkeeping(device)
    options = {"sides": padded(rows, features), "turned": True}
    expected = twin.cross_produce(u, b, x0, x, scale=scale, **options, **right)
    got = fused.cross_produce_fused(
        u.to(device),
        None if b is None else b.to(device),
        x0.to(device),
        x.to(device),
        scale=scale.to(device),
        **options,
        **ours,
    )
    check_hp(got.hp, expected.hp)
    check_fp8(got.row, expected.row)
    check_fp8(got.turned, expected.turned)
    check_bookkeeping(ours, right)


def test_produce_writes_only_what_is_asked(device: torch.device) -> None:
    """The last layer of a stack has no FP8 copy, and inference no transposed one."""
    u, x0, x = (normal(37, 100, seed=seed).to(device) for seed in range(3))
    plain = fused.cross_produce_fused(u, None, x0, x, sides=(112, 48), turned=True)
    assert plain.row is None
    assert plain.turned is None
    check_hp(plain.hp, twin.cross_produce(u.cpu(), None, x0.cpu(), x.cpu(), sides=(112, 48)).hp)
    scale = torch.ones(1, device=device)
    low = fused.cross_produce_fused(u, None, x0, x, scale=scale, sides=(112, 48))
    assert low.turned is None
    check_fp8(
        low.row, twin.cross_produce(u.cpu(), None, x0.cpu(), x.cpu(), scale=scale.cpu(), sides=(112, 48)).row
    )


def test_operands_may_be_slices(device: torch.device) -> None:
    wide = [normal(37, 150, seed=seed).to(device) for seed in range(3)]
    u, x0, x = (tensor[:, 16:116] for tensor in wide)
    got = fused.cross_produce_fused(u, None, x0, x, sides=(112, 48))
    check_hp(got.hp, twin.cross_produce(u.cpu(), None, x0.cpu(), x.cpu(), sides=(112, 48)).hp)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "features"), SIZES)
def test_derive_matches_the_twin(
    rows: int, features: int, bias: bool, inner: bool, device: torch.device
) -> None:
    grad = normal(rows, features, seed=0) * torch.logspace(-9, 3, rows)[:, None].bfloat16()
    grad[rows // 2 : rows // 2 + (rows > 1)] = 0  # a row without a gradient
    x0 = normal(rows, features, seed=1)
    largest = torch.zeros(1, dtype=torch.int32)
    units, _ = row_units(grad, largest)
    t = normal(rows, features, seed=2) * (units > 0).bfloat16()[:, None] if inner else None
    scale = torch.tensor([2.0**-9])
    right, ours = bookkeeping(), bookkeeping(device)
    options = {"sides": padded(rows, features), "bias": bias}
    expected = twin.cross_derive(
        grad, t, x0, units=units, largest=largest, grad_scale=scale, **options, **right
    )
    got = fused.cross_derive_fused(
        grad.to(device),
        None if t is None else t.to(device),
        x0.to(device),
        units=units.to(device),
        largest=largest.to(device),
        grad_scale=scale.to(device),
        **options,
        **ours,
    )
    check_hp(got.grad, expected.grad)
    check_fp8(got.row, expected.row)
    check_fp8(got.turned, expected.turned)
    assert torch.equal(got.turned_scale.cpu(), expected.turned_scale)
    check_hp(got.bias, expected.bias, steps=rows)
    check_bookkeeping(ours, right)


def test_derive_of_an_infinity_or_nan_shows_it(device: torch.device) -> None:
    """Saturation would turn an infinity into 448 and hide it; other rows stay as they are."""
    grad, x0 = normal(37, 100, seed=0), normal(37, 100, seed=1)
    x0[3, 5], x0[4, 6] = torch.inf, torch.nan
    largest = torch.zeros(1, dtype=torch.int32)
    units, _ = row_units(grad, largest)
    options = {"grad_scale": torch.tensor([2.0**-6]), "sides": (112, 48)}
    expected = twin.cross_derive(grad, None, x0, units=units, largest=largest, **options)
    seen = torch.zeros(1, dtype=torch.int32, device=device)
    options |= {"grad_scale": torch.tensor([2.0**-6], device=device), "seen": seen}
    got = fused.cross_derive_fused(
        grad.to(device), None, x0.to(device), units=units.to(device), largest=largest.to(device), **options
    )
    for low, right in ((got.row, expected.row), (got.turned, expected.turned)):
        check_fp8(low, right)
        assert right.float().isnan().sum() == 2
    assert seen.item() >= 0x7F800000


def test_derive_of_a_bad_gradient_spoils_the_weights_gradient(device: torch.device) -> None:
    """A row that is not finite has no unit: its row is NaN, and so is the scale of all of du^T."""
    grad, x0 = normal(37, 100, seed=0), normal(37, 100, seed=1)
    grad[3, 5] = torch.inf
    largest = torch.zeros(1, dtype=torch.int32)
    units, _ = row_units(grad, largest)
    for run, place in ((twin.cross_derive, "cpu"), (fused.cross_derive_fused, device)):
        got = run(
            grad.to(place),
            None,
            x0.to(place),
            units=units.to(place),
            largest=largest.to(place),
            grad_scale=torch.tensor([2.0**-6], device=place),
            sides=(112, 48),
        )
        assert got.turned_scale.isnan().all()
        assert got.row.float()[:3].isfinite().all()
        if got.row.is_cuda or run is twin.cross_derive:  # the interpreter casts NaN to a number
            assert got.row.float()[3, :100].isnan().all()


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6])  # six need two launches
def test_gather_matches_the_twin(layers: int, joint: bool, device: torch.device) -> None:
    rows, features = (64, 128) if layers == 3 else (37, 100)
    grads = [normal(rows, features, seed=seed) for seed in range(layers)]
    outers = [normal(rows, features, seed=10 + seed) for seed in range(layers)]
    biases = [normal(features, seed=20 + seed) if seed % 2 else None for seed in range(layers)]
    inner, units = normal(rows, features, seed=30), torch.logspace(-3, 2, rows, base=2).round()
    dx0, dx = twin.cross_gather(grads, outers, biases, inner, units=units, joint=joint)
    got, got_x = fused.cross_gather_fused(
        [grad.to(device) for grad in grads],
        [outer.to(device) for outer in outers],
        [None if bias is None else bias.to(device) for bias in biases],
        inner.to(device),
        units=units.to(device),
        joint=joint,
    )
    check_hp(got, dx0, steps=2)  # one more rounding to bfloat16 between two launches
    check_hp(got_x, dx)
