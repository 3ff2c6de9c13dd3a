import pytest
import torch

from loka.statistics.subspace import leading

RANK = 32


def matrix(name):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(200, 400, dtype=torch.float64, generator=generator)
    columns = torch.arange(1, 401, dtype=torch.float64)
    if name == "decaying":
        return z / columns
    if name == "one direction":
        return z + 1e3 * torch.randn(200, 1, dtype=torch.float64, generator=generator)
    if name == "heavy rows":
        return z * torch.exp(2 * torch.randn(200, 1, dtype=torch.float64, generator=generator))
    if name == "tiny":
        return 1e-18 * z / columns
    return z[:, :3] @ z[:3]  # rank 3


@pytest.mark.parametrize("name", ["decaying", "one direction", "heavy rows", "tiny", "rank 3"])
def test_nearly_as_much_energy_as_the_best(name):
    rows = matrix(name)
    gram = rows @ rows.t()
    found = leading(gram, RANK).t() @ rows
    best = torch.linalg.eigvalsh(gram)[-RANK:].sum()
    assert found.square().sum() >= 0.999 * best  # what the module promises where eigenvalues fall off
    assert found.square().sum() <= best * (1 + 1e-9)  # it is a projection


def test_nothing_gives_nothing():
    assert not leading(torch.zeros(50, 50, dtype=torch.float64), 8).isnan().any()
