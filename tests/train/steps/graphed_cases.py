import copy
import importlib

import torch
from torch import nn

from loka.nn.block_norm import BlockNorm
from loka.train import graphed

module = importlib.import_module("loka.train.steps.graphed")


CPU = torch.device("cpu")


def small(device=CPU, dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 32, bias=False), BlockNorm(32, 16), nn.Hardswish(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(32, 1)).to(device)


def batches(*sizes, device=CPU):
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in sizes:
        x = torch.randn(size, 6, generator=generator)
        found.append((x.to(device), (x.sum(1) > 0).float().to(device)))
    return found


def step_of(model, optimizer):
    def step(x, label):
        for parameter in model.parameters():
            # On a GPU this would wait for it, which a capture forbids.
            assert x.is_cuda or parameter.grad is None or parameter.grad.isfinite().all()
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), label)
        loss.backward()
        optimizer.step()
        return loss

    return step


def graph_of(model, optimizer, data, warmup=2):
    return graphed(step_of(model, optimizer), *data[0], model=model, optimizers=optimizer, warmup=warmup)


def twins(fake):
    """Two models of the same weights, an optimizer for each, and what stands in for the first one's capture."""
    model, twin = small(), small()
    optimizer, other = sgd(model), sgd(twin)
    return model, twin, optimizer, other, fake(model, optimizer)


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class Fake:
    """Stands in for `record`; `error` is raised at the end of the capture."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.error = None
        self.captures = 0

    def __call__(self, function, device, stream):
        self.captures += 1
        self.function = function
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        saved = [(t, t.detach().clone()) for t in (*self.model.parameters(), *tensors)]
        self.groups = self._groups()
        self.result = function()
        self.gradients = {p: p.grad for g in self.optimizer.param_groups for p in g["params"]}
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
            for never_computed in (*_tensors(self.result), *self.gradients.values()):
                if never_computed is not None:
                    never_computed.fill_(float("nan"))
        if self.error is not None:
            raise self.error
        return copy.copy(self), self.result

    def replay(self):
        attributes, groups = {p: p.grad for p in self.gradients}, self._groups()
        self._set(self.groups)
        for parameter in self.gradients:
            parameter.grad = None
        for result, computed in zip(_tensors(self.result), _tensors(self.function()), strict=True):
            result.copy_(computed)
        for parameter, recorded in self.gradients.items():
            if recorded is not None:
                recorded.copy_(parameter.grad)
            parameter.grad = attributes[parameter]
        self._set(groups)

    def _groups(self):
        return [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]

    def _set(self, groups):
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(values)


def _tensors(result):
    return result if isinstance(result, tuple) else (result,)


def plain(model, optimizer, data):
    step = step_of(model, optimizer)
    return [step(*batch).detach() for batch in data]


def assert_same_training(model, twin):
    """To the bit: the same operations on the same values."""
    for (name, weight), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(weight, expected), name
        assert torch.equal(weight.grad, expected.grad), f"gradient of {name}"


def adam(model, **options):
    # eps far above rounding: at the usual 1e-8, the sign of a gradient of noise is a whole update.
    return torch.optim.Adam(model.parameters(), capturable=True, eps=1e-3, **{"lr": 0.01, **options})
