"""A model that was trained under a probe."""

from models import train_steps
from torch import nn

import loka


def probed(model: nn.Module, steps: int = 8, **options: object) -> loka.Stats:
    with loka.Probe(model, every=2, **options) as probe:
        train_steps(model, steps)
    return probe.stats()
