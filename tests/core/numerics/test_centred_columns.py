import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.core.numerics.centring import centre_of, centre_of_rows, restore, subtract


@settings(max_examples=40)
@given(mean=st.floats(-10, 10), deviation=st.floats(0.01, 10), seed=st.integers(0, 99))
def test_a_column_is_centred_if_its_mean_exceeds_half_a_deviation(mean, deviation, seed):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed)) * deviation + mean
    means, deviations = x.double().mean(0), x.double().std(0, correction=0)
    clear = (means.abs() / deviations - 0.5).abs() > 1e-3
    expected = means.where(means.abs() > 0.5 * deviations, 0.0).float()
    torch.testing.assert_close(centre_of_rows(x)[clear], expected[clear], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_left_out(bad):
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)) / 10 + 0.1
    spoilt = torch.cat([x, x[:1]])
    spoilt[-1, 2] = bad
    torch.testing.assert_close(centre_of_rows(spoilt), centre_of_rows(x))
    assert centre_of_rows(spoilt[-1:]).tolist() == [0, 0, 0, 0]


def test_what_is_not_known_is_not_taken_off():
    mean, variance = torch.tensor([math.nan, math.inf, 2.0, 2.0]), torch.tensor([1.0, 1.0, math.nan, 1.0])
    assert centre_of(mean, variance).tolist() == [0, 0, 0, 2]


@given(st.integers(0, 99))
def test_the_product_with_what_was_taken_off_is_given_back(seed):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(5, 8, generator=generator) + 1 for _ in range(2))
    centre = centre_of_rows(x)
    y = subtract(x, centre) @ weight.t()
    torch.testing.assert_close(restore(y, centre, weight), x @ weight.t(), rtol=1e-5, atol=1e-4)
    assert restore(y.bfloat16(), centre, weight).dtype is subtract(x.bfloat16(), centre).dtype is torch.bfloat16
