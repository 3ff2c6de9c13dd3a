import pytest
import torch
from forced import force, probe
from models import stats_of
from oracle import ROW
from small_towers import batch, pair, tower
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_a_compiled_transform_is_refused(transform):
    """Dynamo sees no transform where it asks for one: gradients and tangents were zeros."""
    model, x = pair()[0], batch()
    if transform == "jvp":
        model.requires_grad_(False)
    compiled = torch.compile(lambda x: TRANSFORMS[transform](model, x), backend="aot_eager")
    with pytest.raises(Exception, match=r"do not run inside torch\.func"):  # in Dynamo's own
        compiled(x)


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(grad):
    """Casts took tangents for numbers of the primal's size: at 100 times that they were 33 dB off."""
    model, x = pair()[0], batch()
    refused = pytest.raises(NotConverted, match="forward-mode AD")
    with refused, torch.set_grad_enabled(grad), forward_ad.dual_level():
        model(forward_ad.make_dual(x, torch.randn_like(x)))


def test_batched_gradients_are_refused():
    model, x = pair()[0], batch().requires_grad_()
    y = model(x)
    with pytest.raises(NotConverted, match="vmap"):
        torch.autograd.grad(y, x, torch.randn(3, *y.shape), is_grads_batched=True)


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_gradient_penalties_in_hp_may_be_looked_at():
    model, x = tower(), batch().requires_grad_()
    stats = probe(model, lambda: model(x).square().mean().backward())
    loka.convert(model, force(stats, "hp", **{"*/output": ROW}))

    def penalty():
        model.zero_grad()
        torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum().backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    exact = penalty()
    with Looking():
        assert all(map(torch.equal, penalty(), exact))


def test_torch_jit_trace_is_refused():
    """It ended in an AssertionError over sizes that are tensors there."""
    model = pair()[0]
    with pytest.raises(NotConverted, match=r"torch\.jit\.trace[\s\S]*torch\.export"), torch.no_grad():
        torch.jit.trace(model, (batch(),))
    torch.jit.trace(loka.revert(model), (batch(),))


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


class Transforming(nn.Module):
    def __init__(self):
        super().__init__()
        self.mapped, self.derived, self.plain = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)
        self.raw = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        x = torch.vmap(self.mapped)(x.view(2, -1, 32)).flatten(0, 1)
        x = torch.vmap(lambda row: row @ self.raw)(x)
        return self.plain(torch.func.grad(lambda y: self.derived(y).sin().sum())(x))


def test_layers_inside_of_a_models_own_transforms_stay_in_hp_by_name():
    """A sampled step ended in vmap's error over `.item()`, or planned a layer that raises at each call of the plan."""
    torch.manual_seed(0)
    model, x = Transforming(), torch.randn(8, 32)
    plain = model(x)
    stats = probe(model, lambda: model(x).sin().sum().backward())
    assert list(stats.layers) == ["plain"]
    assert all("torch.func" in stats.skipped[name] for name in ("mapped", "derived", "raw"))
    plan = force(stats)
    assert {decision.path for decision in plan.decisions.values()} == {"plain"}
    assert any("derived stays in hp" in note for note in plan.notes)
    found = loka.convert(model, plan)(x)
    assert 0 < (found - plain).norm() < 0.1 * plain.norm()


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


class SparseFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_inputs_stay_in_hp_by_name(layout):
    """Of multi-hot rows. A sampled step ended in torch's error over `reshape`, a planned layer in one over `amax`."""
    torch.manual_seed(0)
    model, x = SparseFirst(), torch.randn(8, 64).relu()
    sparse = x.to_sparse(layout=layout)
    stats = probe(model, lambda: model(sparse).sin().sum().backward())
    assert list(stats.layers) == ["second"]
    assert "sparse" in stats.skipped["first"]
    plain = model(sparse)
    found = loka.convert(model, force(stats))(sparse)
    assert 0 < (found - plain).norm() < 0.1 * plain.norm()
    loka.revert(model)
    loka.convert(model, force(probe(model, lambda: model(x).sin().sum().backward())))
    with pytest.raises(NotConverted, match=r"first: its input is sparse[\s\S]*to_dense"):
        model(sparse)


def test_a_layer_without_inputs_is_skipped_by_name():
    """torch makes an empty sum of it."""
    model = nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 1))
    stats = stats_of(model, torch.randn(8, 0), torch.sum)
    assert list(stats.layers) == ["1"]
    assert "an empty weight (4, 0)" in stats.skipped["0"]
