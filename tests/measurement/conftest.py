import pytest
import torch
from models import odd_mlp, train_steps

import loka


@pytest.fixture(scope="module")
def stats():
    torch.manual_seed(0)
    model = odd_mlp()
    with loka.Probe(model, every=2) as probe:
        train_steps(model, 6)
    return probe.stats()
