import pytest
import torch

from loka.statistics import matrix_normal
from loka.statistics.draw import sampler


def test_one_snapshot_draws_the_weight_itself():
    weight = torch.randn(6, 4)
    learnt = matrix_normal.first_snapshot(weight, full_covariance=64)
    draw = sampler(matrix_normal.to_distribution(learnt), torch.device("cpu"))
    assert torch.equal(draw(0, torch.Generator()), weight)


@pytest.mark.parametrize("full", [2, 64])
def test_an_update_is_that_of_its_formula(full):
    m, w = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    u, v = torch.rand(5, generator=torch.Generator().manual_seed(1)) + 0.5, torch.linspace(0.1, 3, 9)
    kept = (u, v) if full == 2 else (u.diag(), v.diag())
    found = matrix_normal.update(matrix_normal.MatrixNormal(snapshots=3, mean=m, rows=kept[0], columns=kept[1]), w)
    moved = w - m
    rows = 0.95 * u.diag() + 0.05 * moved @ (1 / v).diag() @ moved.t() / 9
    columns = 0.95 * v.diag() + 0.05 * moved.t() @ (1 / u).diag() @ moved / 5
    scale = rows.trace() / 5
    for one, expected in ((found.rows, rows / scale), (found.columns, columns * scale)):
        torch.testing.assert_close(one, expected.diagonal() if full == 2 else expected, rtol=1e-4, atol=1e-5)


def test_many_rows_of_few_columns_stay_factorable():
    """U of 479 rows has rank 13 only; float32 left it indefinite beyond the paper's eps."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(479, 13, generator=generator)
    learnt = matrix_normal.first_snapshot(weight, full_covariance=512)
    for _ in range(20):
        weight = weight + 0.01 * torch.randn(479, 13, generator=generator)
        learnt = matrix_normal.update(learnt, weight)
    assert torch.isfinite(learnt.rows).all()
    assert torch.isfinite(learnt.columns).all()


def test_a_still_or_broken_weight_changes_nothing():
    weight = torch.randn(5, 6)
    learnt = matrix_normal.first_snapshot(weight, full_covariance=64)
    still = matrix_normal.update(learnt, weight)
    assert still.snapshots == 2
    assert (still.columns == 0).all()
    broken = matrix_normal.update(still, torch.full((5, 6), float("nan")))
    assert broken.snapshots == 2
    assert torch.equal(broken.mean, weight)
