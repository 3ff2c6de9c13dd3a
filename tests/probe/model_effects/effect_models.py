"""Models whose effects are known, samples of them, and what a probe of them predicts."""

import itertools

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import loka

BATCH, PICKED = 300, 256


def model_of(sides=(13, 96, 160, 1), seed=0):
    torch.manual_seed(seed)
    layers = []
    for i, o in itertools.pairwise(sides):
        layers += [nn.Linear(i, o), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def sample(seed=0, *shape):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape or (BATCH, 13), generator=generator)
    return x * x.abs()  # heavier tails, so that recipes differ


def probed(model, *inputs, steps=1, **options):
    options = {"every": 1, "effect_step": PICKED, **options}
    with loka.Probe(model, **options) as probe:
        for _ in range(steps):
            model(*inputs)
    return probe.stats()


class Tokens(nn.Module):
    """Samples with several rows each, laid out in three ways."""

    def __init__(self, lay, dim):
        super().__init__()
        torch.manual_seed(3)
        self.lay, self.dim = lay, dim
        self.fc, self.head = nn.Linear(24, 40), nn.Linear(40, 1)

    def forward(self, x):
        h = self.fc(self.lay(x)).tanh()
        if h.ndim == 2:
            h = h.view((BATCH, 7, 40) if self.dim == 1 else (7, BATCH, 40))
        return self.head(h.mean(dim=self.dim)).squeeze(1)


class Fancy(nn.Module):
    """Returns no logits as such; its dropout draws random numbers in training, and in recomputing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.body = nn.Sequential(nn.Linear(13, 64), nn.Dropout(0.2), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x):
        return {"click": checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)}


def learn(model, *, out, half=False):
    torch.manual_seed(7)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(4):
        x = sample(step, 40, 13)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            z = out(model(x))
        assert all(weight.grad is None for weight in model.parameters())
        functional.binary_cross_entropy_with_logits(z.float().flatten(), (x[:, 0] > 0).float()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [weight.detach().clone() for weight in model.parameters()]
