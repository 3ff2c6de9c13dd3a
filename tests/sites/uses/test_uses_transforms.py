"""Ways to call a model that are refused by name, and those beside them that work."""

import pytest
import torch
from models import stats_of
from small_towers import batch, pair, tower
from torch import nn

import loka
from loka.core.exceptions import LokaError, NotConverted


def _grad(model, x):
    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    return torch.func.grad(loss)(dict(model.named_parameters()))


TRANSFORMS = {
    "vmap": lambda model, x: torch.func.vmap(model)(torch.stack([x, x])),
    "grad": _grad,
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[:2]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_is_refused_by_name(transform):
    """torch's own error speaks of autograd.Function and setup_context, which no user of LoKA wrote."""
    model, _ = pair()
    TRANSFORMS[transform](tower(), batch())
    with pytest.raises(NotConverted, match=r"do not run inside torch\.func[\s\S]*loka\.revert"):
        TRANSFORMS[transform](model, batch())
    TRANSFORMS[transform](loka.revert(model), batch())


def test_symbolic_tracing_works():
    model, _ = pair()
    x = batch()
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_a_sampled_step_inside_vmap_is_refused_by_name():
    model, x = tower(), batch()
    with loka.Probe(model, every=2), pytest.raises(LokaError, match=r"inside torch\.func\.vmap"):
        torch.func.vmap(model)(torch.stack([x, x]))
    with loka.Probe(model, every=2) as probe:
        model(x).sum().backward()
        torch.func.vmap(model)(torch.stack([x, x]))  # not sampled: nothing is attached
    assert probe.stats().sampled_steps == 1


def test_nested_tensors_are_taken_row_by_row():
    model, _ = pair()
    parts = [batch()[:3], batch()[3:8]]
    expected = torch.cat([model(part) for part in parts])
    for layout in (torch.jagged, torch.strided):
        found = model(torch.nested.nested_tensor(parts, layout=layout))
        assert torch.allclose(torch.cat([*found.unbind()]), expected, rtol=0.1, atol=0.05)
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    model(jagged).values().sum().backward()
    assert jagged.grad is not None


def test_a_layer_without_inputs_is_skipped_by_name():
    """torch makes an empty sum of it."""
    model = nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 1))
    stats = stats_of(model, torch.randn(8, 0), torch.sum)
    assert list(stats.layers) == ["1"]
    assert "an empty weight (4, 0)" in stats.skipped["0"]
