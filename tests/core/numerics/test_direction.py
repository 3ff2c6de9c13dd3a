import math

import pytest
import torch

from loka.core.error import estimate_jackknife
from loka.core.numerics.direction import SIDE, Fold, Turn, angle_of, shrink_bias_variance


def turns(errors, gradients, *, mean_row=False):
    fold = Fold(*errors.shape[1:], mean_row=mean_row, device=errors.device)
    return [
        Turn(
            energy=float(error.square().sum()),
            cross=float((error * gradient).sum()),
            signal=float(gradient.square().sum()),
            error=fold(error),
            gradient=fold(gradient),
        )
        for error, gradient in zip(errors, gradients, strict=True)
    ]


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mean_row", [False, True])
def test_what_was_planted_is_found(mean_row):
    """Gradients of independent elements of size 1, errors of 2 % along them, 0.05 of a fixed vector (rows
    alike where rows are examples) and 0.1 of noise: E = R C, bias 0.05^2, variance 0.1^2."""
    count, rows, columns = 8, 100, 120
    gradients = drawn(count, rows, columns, seed=0)
    fixed = drawn(1 if mean_row else rows, columns, seed=1)
    fixed = (fixed / fixed.square().mean().sqrt()).expand(rows, columns)
    errors = -0.02 * gradients + 0.05 * fixed + 0.1 * drawn(count, rows, columns, seed=2)
    found = shrink_bias_variance(turns(errors, gradients, mean_row=mean_row))
    # Four standard errors. <D, G> adds 96,000 products of sd 0.11. The bias is off by twice the product of
    # fixed part and mean noise, 2 x 0.05 x 0.1 / sqrt(96000), and the variance by that and sqrt(2 / 96000).
    wanted = {"shrink": (-0.02, 1.4e-3), "bias": (0.0025, 1.3e-4), "variance": (0.01, 3.2e-4)}
    for name, (value, within) in wanted.items():
        assert found[name].value == pytest.approx(value, abs=within), name
        assert found[name].low < found[name].value < found[name].high
        assert found[name].high - found[name].low < 4 * within


def test_the_parts_make_the_whole():
    """mean |D|^2 / E = s^2 + bias + variance, whatever the draws."""
    gradients, errors = 1 + drawn(5, 9, 7, seed=3), 0.3 * drawn(5, 9, 7, seed=4) + 0.1
    drawn_turns = turns(errors, gradients)
    found = shrink_bias_variance(drawn_turns)
    parts = found["shrink"].value ** 2 + found["bias"].value + found["variance"].value
    assert parts == pytest.approx(float(errors.square().sum() / gradients.square().sum()), rel=1e-6)
    turned = (errors - found["shrink"].value * gradients).flatten(1)
    products = turned @ turned.t()
    pairs = (products.sum() - products.trace()) / (5 * 4)
    assert found["bias"].value == pytest.approx(float(pairs / (gradients.square().sum() / 5)), rel=1e-4)
    rest = [shrink_bias_variance(drawn_turns[:t] + drawn_turns[t + 1 :]) for t in range(5)]
    for name, estimate in found.items():
        expected = estimate_jackknife(estimate.value, [each[name].value for each in rest])
        assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high), rel=1e-6)


def test_rows_that_differ_are_no_bias():
    """Every row of a grad_input has an error of its own that all draws share: another example is in it."""
    fixed = drawn(64, 80, seed=5)
    gradients = drawn(4, 64, 80, seed=6)
    errors = (0.1 * (fixed - fixed.mean(dim=0))).expand(4, -1, -1)
    found = shrink_bias_variance(turns(errors, gradients, mean_row=True))
    assert abs(found["bias"].value) < 1e-5  # s G / sqrt(64): shrink is about 0.1 / sqrt(5120)
    assert shrink_bias_variance(turns(errors, gradients))["bias"].value == pytest.approx(0.01, rel=0.1)


def test_no_bias_is_zero_on_average_and_the_interval_says_so():
    """Four draws, as few as are taken. A jackknife of products is wide rather than narrow."""
    repeats, values, hits, shrinks = 300, [], 0, 0
    for seed in range(repeats):
        gradients = drawn(4, 12, 10, seed=10 + seed)
        errors = 0.04 * drawn(4, 12, 10, seed=1000 + seed) - 0.01 * gradients
        found = shrink_bias_variance(turns(errors, gradients))
        values.append(found["bias"].value)
        hits += found["bias"].low <= 0 <= found["bias"].high
        shrinks += found["shrink"].low <= -0.01 <= found["shrink"].high
    mean = sum(values) / repeats
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (repeats - 1))
    assert abs(mean) < 4 * spread / math.sqrt(repeats)
    assert hits / repeats >= 0.93
    assert shrinks / repeats == pytest.approx(0.95, abs=0.05)  # 4 standard errors of a proportion


def test_a_fold_keeps_products():
    """To a relative sqrt(2 / SIDE) a side for a vector with itself; near zero for independent ones."""
    a, b = drawn(1000, 700, seed=7), drawn(1000, 700, seed=8)
    fold = Fold(1000, 700, mean_row=False, device=a.device)
    assert fold(a).shape == (SIDE * SIDE,)
    norm = float(a.square().sum())
    assert float(fold(a).square().sum()) == pytest.approx(norm, rel=0.05)  # independent elements: 2 / SIDE
    assert abs(float(fold(a) @ fold(b))) < 5 * norm / SIDE
    assert torch.allclose(fold(a + 2 * b), fold(a) + 2 * fold(b), atol=1e-3)
    same = drawn(1000, 1, seed=9).expand(1000, 700)  # of rank one, where signs of sides are worst
    product = float(fold(same).square().sum()) / float(same.square().sum())
    assert abs(product - 1) < 4 * math.sqrt(4 / SIDE)


def test_short_sides_are_kept_as_they_are():
    a = drawn(SIDE, 3, seed=0)
    assert torch.equal(Fold(SIDE, 3, mean_row=False, device=a.device)(a).view(3, SIDE).t(), a)


def test_angles():
    gradient = torch.tensor([3.0, 0.0])
    turned = 2.0 * torch.tensor([math.cos(0.2), math.sin(0.2)])
    error = turned - gradient
    numbers = (float(error @ error), float(error @ gradient), 9.0)
    assert angle_of(*numbers) == pytest.approx(0.2, rel=1e-6)
    assert angle_of(0.0, 0.0, 9.0) == 0
    assert angle_of(36.0, -18.0, 9.0) == pytest.approx(math.pi)
    assert math.isnan(angle_of(9.0, -9.0, 9.0)), "nothing is left of the gradient"
    assert math.isnan(angle_of(1.0, 0.0, 0.0)), "no direction to turn from"
    assert math.isnan(angle_of(math.nan, math.nan, 9.0))


def test_one_draw_tells_no_bias():
    found = shrink_bias_variance(turns(drawn(1, 4, 4, seed=1), drawn(1, 4, 4, seed=2)))
    assert math.isnan(found["bias"].value)
    assert (found["shrink"].low, found["shrink"].high) == (-math.inf, math.inf)


def test_a_nan_is_not_hidden():
    errors = drawn(4, 4, 4, seed=1)
    errors[2, 0, 0] = math.nan
    found = shrink_bias_variance(turns(errors, drawn(4, 4, 4, seed=2)))
    assert all(math.isnan(estimate.value) for estimate in found.values())
    exact = shrink_bias_variance(turns(torch.zeros(4, 4, 4), drawn(4, 4, 4, seed=2)))
    assert {estimate.value for estimate in exact.values()} == {0.0}
