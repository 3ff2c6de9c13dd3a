"""The Triton producers against their twin: within one FP8 step where float32 rounds another way.

Twin and kernel sum a row in different orders and share factors differently, so that their float32
values differ by a few units in the last place. FP8 then differs only where such values lie on both
sides of a rounding boundary: less than 1 in 1000 on a GPU. The interpreter's own cast is off by a
step and forgets carries besides, and casts NaN to a number (tests/kernels/test_triton_quantize.py).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases import combinations, on_gpu_or_cpu

from loka.core import producer as twin
from loka.core.chain import Activation, Epilogue, Norm, constant_scale
from loka.core.producer import NO_PARAMETERS, Parameters, Rounded
from loka.core.recipe import Format

triton = pytest.importorskip("triton", reason="needs triton (its interpreter on a CPU)")
fused = pytest.importorskip("loka.kernels.triton.producer")
units_module = pytest.importorskip("loka.kernels.triton.units")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

HARD_SWISH = Activation.HARD_SWISH
NORMS = [
    Epilogue(),
    Epilogue(norm=Norm.BLOCK, block=64, eps=1e-6),
    Epilogue(norm=Norm.RMS, eps=1e-6),
    Epilogue(norm=Norm.LAYER, eps=1e-5),
]
ROWS = on_gpu_or_cpu(37, 21)  # on a CPU one program of backward by rows; test_odd_shapes has several


def named(value: object) -> str:
    return value.norm if isinstance(value, Epilogue) else str(value)


@dataclass
class Case:
    """A link's tensors."""

    z: torch.Tensor
    grad: torch.Tensor
    epilogue: Epilogue
    parameters: Parameters

    @property
    def sides(self) -> tuple[int, int]:
        rows, features = self.z.shape
        return -(-features // 16) * 16, -(-rows // 16) * 16


def case(
    rows: int, features: int, epilogue: Epilogue, device: torch.device, *, parameters: bool = False
) -> Case:
    generator = torch.Generator().manual_seed(rows * 10007 + features)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    z = (2 * normal(rows, features)).bfloat16()
    grad = (1e-3 * normal(rows, features) * normal(rows, 1)).bfloat16()
    found = NO_PARAMETERS
    if parameters:
        elementwise = epilogue.norm in (Norm.RMS, Norm.LAYER)
        epilogue = replace(epilogue, gamma=elementwise, beta=epilogue.norm is Norm.LAYER)
        found = Parameters(
            bias=normal(features).to(device),
            gamma=(normal(features) + 1).to(device) if epilogue.gamma else None,
            beta=normal(features).to(device) if epilogue.beta else None,
        )
    return Case(z.to(device), grad.to(device), epilogue, found)


def power(exponent: int, device: torch.device) -> torch.Tensor:
    return torch.full((1,), 2.0**exponent, device=device)


def at_kinks(values: torch.Tensor) -> int:
    """Elements whose slope may be that of a kink's other side: a normalized value lies within 2^-22
    of ReLU's with a probability of 1e-7, so that millions of elements have a few of them."""
    return int(2e-6 * values.numel())


def check_low(got: torch.Tensor, expected: torch.Tensor, inner: tuple[int, int]) -> None:
    """FP8 tensors of one shape; beyond `inner` lies padding, which is zero to the bit."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    raw = got.view(torch.uint8)
    assert (raw[inner[0] :] == 0).all()
    assert (raw[:, inner[1] :] == 0).all()
    format = Format.E4M3 if got.dtype == Format.E4M3.dtype else Format.E5M2
    x, y = got.float(), expected.float()
    if got.is_cuda:
        assert torch.equal(x.isnan(), y.isnan())
    known = ~y.isnan()
    step = torch.maximum(y.abs() * 2.0**-format.mantissa, torch.tensor(format.smallest_subnormal))
    near = (x - y).abs() <= step * 1.001
    if got.is_cuda:
        assert (~near[known]).sum().item() <= at_kinks(x)
        assert (x != y)[known].sum().item() <= 2 + 1e-3 * x.numel()
        return
    lost_carry = ((2 * x - y).abs() <= step * 1.001) & (torch.frexp(x)[0].abs() == 0.5)
    assert bool((near | lost_carry)[known].all())
    assert (lost_carry & ~near).float().mean() < 0.05


def check_seen(got: torch.Tensor, expected: torch.Tensor, cancelled: float = 1e-6) -> None:
    """Bits of a maximum: the float32 values differ by rounding, that of `cancelled` where a norm cancels."""
    x, y = (t.view(torch.float32).item() for t in (got, expected))
    assert x == pytest.approx(y, rel=1e-4, abs=cancelled)


def check_forward(c: Case, scale: torch.Tensor) -> None:
    rows, features = c.z.shape
    device = c.z.device
    notes = [
        (torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int64, device=device))
        for _ in range(2)
    ]
    options = {"scale": scale, "columns": c.sides[0]}
    expected = twin.produce(c.z, c.epilogue, c.parameters, seen=notes[0][0], counts=notes[0][1], **options)
    got = fused.produce_fused(c.z, c.epilogue, c.parameters, seen=notes[1][0], counts=notes[1][1], **options)
    check_low(got, expected, (rows, features))
    check_seen(notes[1][0], notes[0][0])
    # a value at the very boundary may count on one side only
    assert (notes[0][1] - notes[1][1]).abs().max() <= 2 + 1e-3 * features
    plain = fused.produce_fused(c.z, c.epilogue, c.parameters, scale=None, columns=features)
    high = twin.produce(c.z, c.epilogue, c.parameters, scale=None, columns=features)
    assert plain.dtype == c.z.dtype
    torch.testing.assert_close(plain.float(), high.float(), rtol=2.0**-7, atol=1e-6)  # one bfloat16 step


def check_backward(c: Case, grad_scale: torch.Tensor, *, kept: Rounded | None = None, **over: Any) -> None:
    """`kept`: what backward starts from instead of the case's Z."""
    z = c.z if kept is None else kept
    rows, features = c.z.shape
    device = c.z.device
    largest = torch.zeros(1, dtype=torch.int32, device=device)
    units, _ = twin.row_units(c.grad, largest)
    options: dict[str, Any] = {
        "sides": c.sides,
        "units": units,
        "largest": largest,
        "real": True,
        "grad_scale": grad_scale,
        "row": True,
        "turned": True,
        "hp": True,
        "activation_scale": power(-4, device),
        **over,
    }
    notes = [
        (torch.zeros(1, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int64, device=device))
        for _ in range(2)
    ]
    expected = twin.derive(
        c.grad, z, c.epilogue, c.parameters, seen=notes[0][0], counts=notes[0][1], **options
    )
    got = fused.derive_fused(
        c.grad, z, c.epilogue, c.parameters, seen=notes[1][0], counts=notes[1][1], **options
    )
    assert got.row is not None
    assert got.turned is not None
    assert got.activation is not None
    assert expected.row is not None
    assert expected.turned is not None
    assert expected.activation is not None
    check_low(got.row, expected.row, (rows, features))
    check_low(got.turned, expected.turned, (features, rows))
    check_low(got.activation, expected.activation, (features, rows))
    assert torch.equal(got.turned_scale, expected.turned_scale)
    assert torch.equal(got.activation_scale, expected.activation_scale)
    # terms in units, at most 1.5 / std each, of which a norm over one feature leaves nothing
    check_seen(notes[1][0], notes[0][0], max(1e-6, 2.0**-22 * inverse_std(c).max().item()))
    # Hard swish is flat at -1.5, which many bfloat16 are exactly: there the twin's slope is zero, the
    # kernel's is float32's rounding of it, and what comes of that counts as rounded to zero.
    flat = int((expected.row.view(torch.uint8)[:, :features] & 0x7F == 0).logical_and(c.grad != 0).sum())
    saturated, underflowed = (notes[0][1] - notes[1][1]).abs().tolist()
    assert saturated <= 2
    # GELU's 1 + erf cancels in the tail of a normal distribution, where 1 in a million lies.
    edge = 2 + 1e-3 * features + 2e-6 * c.z.numel()
    assert underflowed <= edge + flat * (c.epilogue.activation is Activation.HARD_SWISH)
    assert got.hp is not None
    assert expected.hp is not None
    assert got.hp.dtype == c.grad.dtype
    # one bfloat16 step, and float32's rounding of the row's largest where a norm cancels
    floor = 1e-5 * expected.hp.float().abs().amax(1, keepdim=True)
    cancelled = (2.0**-22 * inverse_std(c)).clamp_min(1e-6).to(c.grad.device).view(-1, 1)
    floor = floor + cancelled * c.grad.float().abs().amax(1, keepdim=True)
    off = (got.hp.float() - expected.hp.float()).abs()
    far = off > 2.0**-7 * expected.hp.float().abs() + floor
    assert far.sum().item() <= at_kinks(off)
    check_sums(c, got, expected, units)


def inverse_std(c: Case) -> torch.Tensor:
    """1 / std of every row's norm, the largest of its blocks; 1 without a norm. [T]"""
    if c.epilogue.norm is Norm.NONE:
        return torch.ones(1)
    shown = c.z.float() if c.parameters.bias is None else c.z.float() + c.parameters.bias
    variance = shown.square().mean(1)
    if c.epilogue.norm is Norm.LAYER:
        variance = shown.var(1, correction=0)
    if c.epilogue.norm is Norm.BLOCK:
        blocks = shown.split(c.epilogue.block, dim=1)
        variance = torch.stack([block.square().mean(1) for block in blocks]).amin(0)
    return (variance + c.epilogue.eps).rsqrt()


def check_sums(c: Case, got: Any, expected: Any, units: torch.Tensor) -> None:
    """Column sums of T terms, each with the rounding of a row's sum of N: at most (T + N) 2^-22 of
    the sum of what bounds the terms. |act'| <= 1.5, |normal| <= sqrt(N), 1 / std is in the values."""
    rows, features = c.z.shape
    share = (rows + features) * 2.0**-22
    top = c.grad.float().abs().amax(1)
    normal = math.sqrt(features)
    gamma = 1.0 if c.parameters.gamma is None else c.parameters.gamma.abs().max().item()
    inverse = inverse_std(c)
    bounds = {
        "bias": (1.5 * gamma * top * inverse.to(top.device) * (2 + normal)).sum(),
        "gamma": (1.5 * top * normal).sum(),
        "beta": (1.5 * top).sum(),
    }
    for name, bound in bounds.items():
        x, y = getattr(got, name), getattr(expected, name)
        assert (x is None) == (y is None)
        if y is not None:
            assert x.dtype == torch.float32
            assert (x - y).abs().max() <= share * bound


@pytest.mark.parametrize(
    ("norm", "activation", "parameters"),
    combinations(NORMS, list(Activation), [False, True], together=2),
    ids=named,
)
def test_every_epilogue_forward(
    norm: Epilogue, activation: Activation, parameters: bool, device: torch.device
) -> None:
    epilogue = replace(norm, activation=activation)
    check_forward(case(ROWS, 100, epilogue, device, parameters=parameters), power(-5, device))


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("activation", list(Activation), ids=named)
@pytest.mark.parametrize("norm", NORMS, ids=named)
def test_every_epilogue_backward(
    norm: Epilogue, activation: Activation, parameters: bool, device: torch.device
) -> None:
    """All on a CPU, too: without parameters some activations go into the factors of rows."""
    epilogue = replace(norm, activation=activation)
    check_backward(case(ROWS, 100, epilogue, device, parameters=parameters), power(-8, device))


ODD_SHAPES = on_gpu_or_cpu(
    [(1, 1), (9, 600), (5, 300), (70, 17), (16, 256), (32, 512)],
    [(1, 1), (5, 600), (5, 300), (40, 17), (16, 256), (32, 512)],
)


@pytest.mark.parametrize("norm", NORMS, ids=named)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_odd_shapes(norm: Epilogue, shape: tuple[int, int], device: torch.device) -> None:
    """Wider than a tile; blocks that divide nothing; and tiles that need no masks."""
    epilogue = replace(norm, activation=HARD_SWISH, block=100 if norm.norm is Norm.BLOCK else 0)
    check_forward(case(*shape, epilogue, device), power(-5, device))
    check_backward(case(*shape, epilogue, device), power(-8, device))
    check_backward(case(*shape, epilogue, device, parameters=True), power(-8, device), unit_in_turned=True)


@pytest.mark.parametrize("norm", NORMS, ids=named)
def test_e5m2_and_gradients_in_units(norm: Epilogue, device: torch.device) -> None:
    c = case(ROWS, 100, replace(norm, activation=HARD_SWISH), device)
    check_backward(c, power(-8, device), format=Format.E5M2)
    check_backward(c, power(-17, device), real=False)
    check_backward(c, power(-17, device), real=False, units=None, largest=None)


@pytest.mark.parametrize("norm", NORMS, ids=named)
@pytest.mark.parametrize("features", [100, 600])
def test_zero_huge_and_tiny_rows(norm: Epilogue, features: int, device: torch.device) -> None:
    """1e30 squared is no float32: a norm makes zeros of it, here as in PyTorch."""
    c = case(on_gpu_or_cpu(23, 13), features, replace(norm, activation=HARD_SWISH), device)
    c.z[3], c.z[5], c.z[7] = 0, c.z[5] * 1e30, c.z[7] * 1e-30
    c.grad[9], c.grad[11] = 0, c.grad[11] * 1e-30
    if norm.norm is Norm.NONE:
        c.z[5] = 0  # beyond any scale that suits the others
    check_forward(c, power(-5, device))
    check_backward(c, power(-8, device))


@pytest.mark.parametrize(
    ("bad", "norm", "where", "features"),
    combinations([math.nan, math.inf, -math.inf], NORMS, ["z", "grad"], [100, 600], together=3),
    ids=named,
)
def test_what_is_not_finite_stays_in_its_row(
    bad: float, norm: Epilogue, where: str, features: int, device: torch.device
) -> None:
    epilogue = replace(norm, activation=HARD_SWISH, block=64 if norm.norm is Norm.BLOCK else 0)
    c = case(ROWS, features, epilogue, device)
    getattr(c, where)[13, 70] = bad
    block = {Norm.NONE: slice(70, 71), Norm.BLOCK: slice(64, min(128, features))}
    hit = block.get(norm.norm, slice(0, features))
    seen = torch.zeros(1, dtype=torch.int32, device=device)
    clean = torch.ones(ROWS, dtype=torch.bool, device=device)
    clean[13] = False
    if where == "z":
        high = fused.produce_fused(c.z, epilogue, NO_PARAMETERS, scale=None, columns=features)
        assert high[clean].isfinite().all()
        low = fused.produce_fused(
            c.z, epilogue, NO_PARAMETERS, scale=power(-4, device), columns=c.sides[0], seen=seen
        )
        # the activation of -infinity is 0 times infinity
        assert not high[13, 70].isfinite()
        if norm.norm is not Norm.NONE:
            assert high[13, hit].isnan().any()
        assert not seen.view(torch.float32).isfinite().item()
        if device.type == "cuda":
            assert low.float().isnan()[13, 70]
            assert low.float().isfinite()[clean].all()
    seen.zero_()
    out = fused.derive_fused(
        c.grad, c.z, epilogue, NO_PARAMETERS, sides=c.sides, grad_scale=power(-17, device), row=True,
        turned=True, hp=True, activation_scale=power(-4, device), seen=seen,
    )  # fmt: skip
    assert out.hp is not None
    assert out.hp[clean].isfinite().all()
    surfaces = where == "grad" or norm.norm is not Norm.NONE
    if surfaces:
        assert not out.hp[13, 70].isfinite()
        assert not seen.view(torch.float32).isfinite().item()
    if device.type == "cuda":
        for name in ("row", "turned", "activation"):
            tensor = getattr(out, name).float()
            rows = tensor if name == "row" else tensor.t()[:ROWS]
            assert rows[clean][:, :features].isfinite().all(), name
            if (where == "z") if name == "activation" else surfaces:
                assert rows[13, 70].isnan(), name


@pytest.mark.parametrize("norm", NORMS, ids=named)
def test_delayed_scales_saturate_and_count(norm: Epilogue, device: torch.device) -> None:
    """A scale far too small for most, and one far too large for some."""
    c = case(on_gpu_or_cpu(64, 16), 256, replace(norm, activation=HARD_SWISH), device)
    for exponent in (-9, 9):
        check_forward(c, power(exponent, device))
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        low = fused.produce_fused(
            c.z, c.epilogue, NO_PARAMETERS, scale=power(exponent, device), columns=256, counts=counts
        )
        assert low.float().abs().max() <= 448
        assert counts[0 if exponent < 0 else 1] > 100
    check_backward(c, power(-12, device))
    check_backward(c, power(4, device))


@pytest.mark.parametrize("shape", [(37, 100), (1, 1), (5, 2000)])
def test_units_are_exact(shape: tuple[int, int], device: torch.device) -> None:
    grad = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(device)
    grad[0] = 0
    if shape[0] > 4:
        grad[1], grad[2], grad[3], grad[4] = 0.25, grad[2] * 1e-44, grad[3] * 1e37, -8
    factors = (power(3, device), power(-5, device))
    notes = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
    expected = twin.row_units(grad, notes[0], factors=factors)
    got = units_module.row_units_fused(grad, notes[1], factors=factors)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(*notes)
    assert (torch.frexp(got[0])[0][got[0] != 0] == 0.5).all()  # powers of two
    if shape[0] > 4:
        assert got[0][:2].tolist() == [0.0, 0.25]
        assert got[0][4].item() == 8.0
        grad[2, 7] = math.nan
        notes[1].zero_()
        units, _ = units_module.row_units_fused(grad, notes[1])
        assert units.isnan().nonzero().tolist() == [[2]]
        assert notes[1].view(torch.float32).isnan().item()


@pytest.mark.parametrize("norm", NORMS, ids=named)
def test_a_unit_changes_sides_without_changing_a_bit(norm: Epilogue, device: torch.device) -> None:
    c = case(ROWS, 100, replace(norm, activation=HARD_SWISH), device)
    largest = torch.zeros(1, dtype=torch.int32, device=device)
    units, _ = units_module.row_units_fused(c.grad, largest)
    top = units.max()
    common = {"sides": c.sides, "row": True, "turned": True, "activation_scale": power(-4, device)}

    def derived(grad: torch.Tensor, **options: Any) -> Any:
        return fused.derive_fused(grad, c.z, c.epilogue, NO_PARAMETERS, **common, **options)

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8)

    scale = power(-8, device)
    real = derived(c.grad, units=units, largest=largest, real=True, grad_scale=scale)
    ahead = derived(c.grad / units.view(-1, 1), units=units, largest=largest, grad_scale=scale)
    for name in ("row", "turned", "activation"):
        assert torch.equal(bits(getattr(real, name)), bits(getattr(ahead, name)))
    # one unit for all rows is a part of the tensor scale
    same = torch.full_like(units, top.item())
    given = derived(c.grad, units=same, largest=largest, real=True, grad_scale=scale, unit_in_turned=True)
    without = derived(c.grad, grad_scale=scale * top)
    for name in ("row", "turned", "activation"):
        assert torch.equal(bits(getattr(given, name)), bits(getattr(without, name)))
    assert torch.equal(given.turned_scale, without.turned_scale)


def test_without_z_the_gradient_is_only_cast(device: torch.device) -> None:
    c = case(37, 100, Epilogue(), device, parameters=True)
    options = {"sides": c.sides, "grad_scale": power(-17, device), "row": True, "turned": True, "hp": True}
    got = fused.derive_fused(c.grad, None, Epilogue(), c.parameters, **options)
    expected = twin.derive(c.grad, None, Epilogue(), c.parameters, **options)
    check_low(got.row, expected.row, (37, 100))
    check_low(got.turned, expected.turned, (100, 37))
    assert torch.equal(got.hp, c.grad)
    bound = 37 * 2.0**-23 * c.grad.float().abs().sum(0)  # a sum of 37 terms
    assert bool(((got.bias - expected.bias).abs() <= bound).all())


@pytest.mark.parametrize("b", [16, 64, 100])
def test_constant_scales_never_saturate(b: int, device: torch.device) -> None:
    """One-hot rows reach the bound sqrt(b): the norm is the only thing that holds them."""
    z = torch.zeros(24, 200, dtype=torch.bfloat16, device=device)
    z[torch.arange(24), torch.arange(24)] = 10.0 ** torch.arange(-6, 18, device=device).bfloat16()
    z[5] = 3.0
    for activation in Activation:
        epilogue = Epilogue(norm=Norm.BLOCK, block=b, eps=1e-6, activation=activation)
        bound = epilogue.bound(200)
        assert bound is not None
        scale = torch.full((1,), constant_scale(bound, 448.0), device=device)
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        seen = torch.zeros(1, dtype=torch.int32, device=device)
        fused.produce_fused(z, epilogue, NO_PARAMETERS, scale=scale, columns=208, counts=counts, seen=seen)
        assert counts[0].item() == 0
        top = seen.view(torch.float32).item()
        assert top <= bound * (1 + 1e-6)
        assert top >= 0.99 * bound or activation in (Activation.SWISH, Activation.GELU)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize(
    ("features", "norm", "derives"), [(512, 2, 1), (600, 2, 2), (600, 1, 1), (600, 0, 1)]
)
def test_launches(
    features: int, norm: int, derives: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {"_produce": fused, "_row_units": units_module, "_row_sums": fused, "_derive": fused}
    counted = {name: Counted(getattr(home, name)) for name, home in homes.items()}
    for name, kernel in counted.items():
        monkeypatch.setattr(homes[name], name, kernel)
    c = case(16, features, replace(NORMS[norm], activation=HARD_SWISH), device)
    fused.produce_fused(c.z, c.epilogue, NO_PARAMETERS, scale=power(-4, device), columns=c.sides[0])
    assert counted["_produce"].launches == 1
    units_module.row_units_fused(c.grad, torch.zeros(1, dtype=torch.int32, device=device))
    assert counted["_row_units"].launches == 1
    fused.derive_fused(
        c.grad, c.z, c.epilogue, NO_PARAMETERS, sides=c.sides, grad_scale=power(-8, device), row=True,
        turned=True, activation_scale=power(-4, device),
    )  # fmt: skip
    assert counted["_row_sums"].launches + counted["_derive"].launches == derives


BLOCK_256 = Epilogue(norm=Norm.BLOCK, block=256, eps=1e-6)
SIZES = [(8192, 1024), (4096, 2048), (1000, 1003), (333, 300), (4097, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SIZES)
def test_real_sizes(shape: tuple[int, int]) -> None:
    device = torch.device("cuda")
    for norm, activation in itertools.product([*NORMS, BLOCK_256], Activation):
        c = case(*shape, replace(norm, activation=activation), device)
        check_forward(c, power(-5, device))
        check_backward(c, power(-8, device))
        check_backward(
            case(*shape, replace(norm, activation=activation), device, parameters=True),
            power(-8, device),
            unit_in_turned=True,
        )
