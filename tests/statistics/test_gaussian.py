import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.statistics import gaussian
from loka.statistics.draw import sampler


def stream(parts, *, full, rank):
    learnt = gaussian.gaussian_of(parts[0], full_covariance=full, rank=rank)
    for part in parts[1:]:
        learnt = gaussian.merge(learnt, gaussian.gaussian_of(part, full_covariance=full, rank=rank), rank=rank)
    return learnt


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(lambda s: sum(s) >= 2),
    features=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    offset=st.floats(-100, 100),
)
def test_batched_welford_equals_the_whole(sizes, features, seed, offset):
    rows = torch.randn(sum(sizes), features, generator=torch.Generator().manual_seed(seed)) + offset
    learnt = stream(list(rows.split(sizes)), full=64, rank=8)
    assert learnt.count == sum(sizes)
    centred = rows.double() - rows.double().mean(0)
    # float32 sums of numbers near `offset`: relative rounding 2^-24 of offset^2 per row.
    slack = 1e-3 + 1e-6 * offset**2
    torch.testing.assert_close(learnt.mean.double(), rows.double().mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(learnt.scatter.double(), centred.t() @ centred, rtol=1e-3, atol=slack * 10)
    torch.testing.assert_close(learnt.square, learnt.scatter.diagonal(), rtol=1e-3, atol=slack)


def test_kurtosis_of_batches_that_drift():
    parts = [torch.randn(400, 5, generator=torch.Generator().manual_seed(k)) + k for k in range(20)]
    centred = torch.cat(parts).double() - torch.cat(parts).double().mean(0)
    expected = (centred**4).mean() / (centred**2).mean() ** 2
    found = gaussian.to_distribution(stream(parts, full=64, rank=8)).numbers["kurtosis"]
    assert abs(found / expected - 1) < 0.02, f"{found} for {expected}"


def test_low_rank_keeps_the_large_directions_and_the_exact_diagonal():
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(5, 300, generator=generator)
    parts = [
        torch.randn(80, 5, generator=generator) @ basis + 0.05 * torch.randn(80, 300, generator=generator)
        for _ in range(6)
    ]
    learnt = stream(parts, full=64, rank=8)
    rows = torch.cat(parts)
    centred = rows - rows.mean(0)
    assert learnt.scatter is None
    assert learnt.factor.shape == (8, 300)
    torch.testing.assert_close(learnt.square, centred.square().sum(0), rtol=1e-3, atol=1e-2)
    scatter = centred.t() @ centred
    kept = learnt.factor.t() @ learnt.factor
    off = ~torch.eye(300, dtype=torch.bool)
    assert (kept - scatter)[off].norm() < 0.05 * scatter[off].norm()


@pytest.mark.parametrize("count", [5, 4000])
@pytest.mark.parametrize("full", [1, 64])
def test_draws_have_the_learnt_moments(full, count):
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(20, 20, generator=generator)
    rows = torch.randn(count, 20, generator=generator) @ mixing + 3
    learnt = stream(list(rows.split(500)), full=full, rank=20)
    draw = sampler(gaussian.to_distribution(learnt), torch.device("cpu"))
    drawn = draw(20_000, torch.Generator().manual_seed(2))
    # Standard error of a covariance of 20,000 draws is about 1 / sqrt(20,000) = 0.7 %.
    assert (drawn.T.cov() - rows.T.cov()).norm() < 0.05 * rows.T.cov().norm()
    torch.testing.assert_close(drawn.mean(0), rows.mean(0), rtol=0, atol=0.2)


def test_bad_rows_are_counted_and_left_out():
    rows = torch.randn(10, 3)
    rows[2, 1] = float("nan")
    rows[5, 0] = float("inf")
    learnt = gaussian.gaussian_of(rows, full_covariance=8, rank=2)
    assert (learnt.count, learnt.nonfinite_rows) == (8, 2)
    assert torch.isfinite(learnt.mean).all()
    empty = gaussian.gaussian_of(rows[2:3], full_covariance=8, rank=2)
    both = gaussian.merge(learnt, empty, rank=2)
    assert (both.count, both.nonfinite_rows) == (8, 3)


def test_round_trip_through_the_record():
    learnt = gaussian.gaussian_of(torch.randn(30, 5), full_covariance=8, rank=2)
    again = gaussian.from_distribution(gaussian.to_distribution(learnt))
    merged, expected = (gaussian.merge(g, learnt, rank=2) for g in (again, learnt))
    assert torch.equal(merged.scatter, expected.scatter)
    assert merged.zeros == expected.zeros


def test_different_widths_do_not_merge():
    a = gaussian.gaussian_of(torch.randn(4, 3), full_covariance=8, rank=2)
    b = gaussian.gaussian_of(torch.randn(4, 2), full_covariance=8, rank=2)
    with pytest.raises(ValueError, match="3 and 2 features"):
        gaussian.merge(a, b, rank=2)
