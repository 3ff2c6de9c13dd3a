"""Towers by hand, and the shapes that an output can have: a tensor, a dict, a dataclass, features."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from foreign.spec import floats, of_logits, per_row

WIDTHS = (32, 64, 64, 32)
FLOPS = 32 * 64 + 64 * 64 + 64 * 32 + 32  # multiplications of one row


class ReluTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(32, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 32)
        self.out = nn.Linear(32, 1)

    def features(self, x):
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return torch.relu(self.fc3(x))

    def forward(self, x):
        return self.out(self.features(x))


class BatchNormTower(nn.Module):
    """Linear, BatchNorm1d, ReLU three times, then one logit as [B]."""

    def __init__(self):
        super().__init__()
        layers = []
        for fan_in, fan_out in pairwise(WIDTHS):
            layers += [nn.Linear(fan_in, fan_out, bias=False), nn.BatchNorm1d(fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.out = nn.Linear(WIDTHS[-1], 1)

    def forward(self, x):
        return self.out(self.layers(x)).squeeze(-1)


class DictTower(ReluTower):
    def forward(self, x):
        features = self.features(x)
        return {"features": features, "logits": self.out(features)}


@dataclass
class Scored:
    features: torch.Tensor
    logits: torch.Tensor


class DataclassTower(DictTower):
    """It returns a dataclass with `.logits`, which pytree does not know."""

    def forward(self, x):
        return Scored(**super().forward(x))


class FeaturesOfFour(nn.Module):
    """It returns hidden features, [B, 4], for a head that lives elsewhere: they are not four logits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4), nn.ReLU()
        )

    def forward(self, x):
        return self.layers(x)


class TwoTasks(nn.Module):
    """It returns the tuple (click, buy) of two heads, [B] each, over one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
        self.click = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        self.buy = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        shared = self.trunk(x)
        return self.click(shared).squeeze(-1), self.buy(shared).squeeze(-1)


MODELS = [
    per_row("relu_tower", ReluTower, floats(32), FLOPS),
    per_row("batchnorm_tower", BatchNormTower, floats(32), FLOPS),
    per_row("dict_tower", DictTower, floats(32), FLOPS, logits=lambda output: output["logits"]),
    per_row(
        "dataclass_tower",
        DataclassTower,
        floats(32),
        FLOPS,
        logits=lambda output: output.logits,
        export_strict=False,
        export_non_strict=False,
    ),
    per_row(
        "features_of_four",
        FeaturesOfFour,
        floats(32),
        32 * 64 + 64 * 64 + 64 * 4,
        loss=lambda output: output.square().mean(),
        logits=None,
        notes="[B, 4] is hidden features: forward returns no logits.",
    ),
    per_row(
        "two_tasks",
        TwoTasks,
        floats(32),
        32 * 64 + 2 * (64 * 32 + 32),
        loss=lambda output: of_logits()(output[0]) + of_logits()(output[1]),
        logits=lambda output: torch.stack(output, dim=-1),
    ),
]
