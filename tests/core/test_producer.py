"""The twin of the producers against autograd, and the bound on which constant scales rest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core import producer
from loka.core.chain import Activation, Epilogue, Norm, constant_scale
from loka.core.producer import NO_PARAMETERS, Parameters
from loka.core.recipe import Format

E4M3_MAX = 448.0
NORMS = [
    Epilogue(norm=Norm.BLOCK, block=24, eps=1e-6),
    Epilogue(norm=Norm.RMS, eps=1e-6),
    Epilogue(norm=Norm.LAYER, eps=1e-5),
    Epilogue(),
]


def notes() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)


@st.composite
def rows_of_any_kind(draw: st.DrawFn) -> torch.Tensor:
    """Gaussian, constant, one-hot and zero rows, each at a scale of its own from 1e-20 to 1e20."""
    rows, features = draw(st.integers(1, 6)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    z = torch.randn(rows, features, generator=generator)
    for row in range(rows):
        kind = draw(st.sampled_from(["gaussian", "constant", "one-hot", "zero"]))
        if kind != "gaussian":
            z[row] = float(kind == "constant")
        if kind == "one-hot":
            z[row, draw(st.integers(0, features - 1))] = draw(st.sampled_from([-1.0, 1.0]))
        z[row] *= 10.0 ** draw(st.floats(-20, 20))
    return z


@given(z=rows_of_any_kind(), b=st.integers(1, 80), activation=st.sampled_from(Activation))
@settings(max_examples=150, deadline=None)
def test_a_block_norm_bounds_what_follows(z: torch.Tensor, b: int, activation: Activation) -> None:
    """|x| <= sqrt(b) up to float32's rounding of the norm, so the constant scale never saturates."""
    epilogue = Epilogue(norm=Norm.BLOCK, block=b, eps=1e-6, activation=activation)
    values = producer.apply_epilogue(z, epilogue, NO_PARAMETERS)
    assert values.isfinite().all()
    assert values.abs().max().item() <= math.sqrt(b) * (1 + 1e-6)
    scale = torch.tensor([constant_scale(math.sqrt(b), E4M3_MAX)])
    seen, counts = notes()
    low = producer.produce(
        z, epilogue, NO_PARAMETERS, scale=scale, columns=z.shape[1], seen=seen, counts=counts
    )
    assert counts[0].item() == 0
    assert seen.view(torch.float32).item() == values.abs().max().item()
    # half a step of e4m3: 2^-4 of a value, or half the smallest subnormal
    floor = scale * Format.E4M3.smallest_subnormal / 2
    assert bool(((low.float() * scale - values).abs() <= values.abs() * 2.0**-4 + floor).all())


@pytest.mark.parametrize("parameters", [False, True])
@pytest.mark.parametrize("norm", NORMS, ids=lambda e: e.norm.value)
@pytest.mark.parametrize("activation", list(Activation), ids=str)
def test_backward_is_autograd(norm: Epilogue, activation: Activation, parameters: bool) -> None:
    torch.manual_seed(0)
    epilogue = replace(norm, activation=activation)
    rows, features = 11, 48
    z = torch.randn(rows, features, dtype=torch.float32, requires_grad=True)
    grad = torch.randn(rows, features) * torch.rand(rows, 1) * 1e-3
    grad[4] = 0
    leaves = [torch.randn(features, requires_grad=True) if parameters else None for _ in range(3)]
    a = producer.apply_epilogue(z, epilogue, Parameters(*leaves))
    a.backward(grad)
    largest = torch.zeros(1, dtype=torch.int32)
    units, _ = producer.row_units(grad, largest)
    for real in (True, False):
        found = producer.derive(
            grad if real else grad * torch.where(units == 0, 0, units.reciprocal()).view(-1, 1),
            z.detach(), epilogue, Parameters(*(None if p is None else p.detach() for p in leaves)),
            sides=(48, 16), units=units, largest=largest, real=real, grad_scale=torch.tensor([2.0**-6]),
            row=True, turned=True, unit_in_turned=True, activation_scale=torch.tensor([2.0**-4]), hp=True,
        )  # fmt: skip
        # units are powers of two: the gradient is the same to float32's rounding of one backward
        torch.testing.assert_close(found.hp, z.grad, rtol=1e-4, atol=1e-9)
        for got, leaf in zip((found.bias, found.gamma, found.beta), leaves, strict=True):
            assert (got is None) == (leaf is None)
            if leaf is not None:
                torch.testing.assert_close(got, leaf.grad, rtol=1e-4, atol=1e-7)
        assert found.row is not None
        assert found.turned is not None
        assert found.turned_scale is not None
        assert found.activation is not None
        assert found.activation_scale is not None
        assert z.grad is not None
        back = found.row.float() * 2.0**-6 * units.view(-1, 1)
        turned = found.turned.float().t() * found.turned_scale
        shown = found.activation.float().t() * found.activation_scale
        for got, true, floor in (
            (back, z.grad, 2.0**-16 * units.view(-1, 1)),
            (turned[:rows], z.grad, 2.0**-10 * found.turned_scale),
            (shown[:rows], a.detach() * units.view(-1, 1), 2.0**-10 * found.activation_scale),
        ):
            assert bool(((got - true).abs() <= true.abs() * 2.0**-4 + floor + 1e-9).all())
        assert (turned[rows:] == 0).all()
        assert (shown[rows:] == 0).all()


def test_units_are_the_powers_of_two_above() -> None:
    grad = torch.zeros(7, 3)
    grad[1:, 1] = torch.tensor([1.0, -1.0001, 0.75, 1e-44, math.nan, math.inf])
    largest = torch.zeros(1, dtype=torch.int32)
    units, row_scale = producer.row_units(grad[:5], largest, factors=(torch.tensor([4.0]),))
    assert units.tolist() == [0.0, 1.0, 2.0, 1.0, producer.SMALLEST_UNIT]
    assert row_scale.flatten().tolist() == [4 * unit for unit in units.tolist()]
    assert producer.largest_unit(largest).item() == 2.0
    units, _ = producer.row_units(grad, largest)
    assert units[5:].isnan().all()
    assert producer.largest_unit(largest).isnan().item()
    assert producer.largest_unit(torch.zeros(1, dtype=torch.int32)).item() == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_becomes_nan_in_its_place(bad: float) -> None:
    z = torch.randn(5, 20)
    z[2, 3] = bad
    seen, counts = notes()
    low = producer.produce(
        z, Epilogue(), NO_PARAMETERS, scale=torch.ones(1), columns=32, seen=seen, counts=counts
    )
    assert low.float().isnan().nonzero().tolist() == [[2, 3]]
    assert not seen.view(torch.float32).isfinite().item()
    assert (low.view(torch.uint8)[:, 20:] == 0).all()


def test_notes_count_both_ends_and_accumulate() -> None:
    z = torch.tensor([[500.0, -449.0, 448.0, 2.0**-10, 2.0**-9, 0.0]])
    seen, counts = notes()
    for _ in range(2):
        producer.produce(
            z, Epilogue(), NO_PARAMETERS, scale=torch.ones(1), columns=6, seen=seen, counts=counts
        )
    assert counts.tolist() == [4, 2]
    assert seen.view(torch.float32).item() == 500.0
