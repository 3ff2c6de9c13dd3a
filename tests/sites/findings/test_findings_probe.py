import pytest
import torch
import torch.distributed as dist
from forced import force, plan_of, probe, ran
from foreign.models.experts import Einsum
from foreign.spec import floats
from oracle import assert_close, by_hand
from small_towers import batch, tower
from sweeps import sweep
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import loka
from loka.core.exceptions import NotConverted


def _step(model):
    model(batch().requires_grad_()).square().mean().backward()


def test_d2_a_probe_made_before_the_model_is_converted():
    """Once it recorded garbage, or nothing and said that the layers were never called."""
    plan, model = plan_of(tower(), batch()), tower()
    early = loka.Probe(model, every=1)
    loka.convert(model, plan)
    with pytest.raises(NotConverted, match="runs by a plan"):
        early.__enter__()
    with pytest.raises(NotConverted, match=r"loka\.revert"):
        loka.Probe(model)
    loka.revert(model)
    assert set(probe(model, lambda: _step(model)).layers) == {"0", "2", "4", "6"}


def test_d2_converted_while_a_probe_is_open():
    """Steps between sampled ones run on, the next sampled one says what is wrong, what was learnt stays, and
    no mode or hook is left on."""
    plan, model = plan_of(tower(), batch()), tower()
    with loka.Probe(model, every=2, effect_samples=0) as probing:
        _step(model)
        before = probing.stats()
        loka.convert(model, plan)
        _step(model)
        with pytest.raises(NotConverted, match="runs by a plan"):
            _step(model)
        after = probing.stats()
        assert after.layers == before.layers
        assert after.sampled_steps == before.sampled_steps == 1
    assert torch._C._len_torch_function_stack() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert_close(model(batch()), by_hand(tower())(batch()))
    loka.revert(model)
    torch.testing.assert_close(model(batch()), tower()(batch()), rtol=0, atol=0)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Nested(nn.Module):
    """Experts by einsum and a tower, one of them compiled inside."""

    def __init__(self, compiled):
        super().__init__()
        torch.manual_seed(0)
        experts = Einsum()
        self.experts = torch.compile(experts, backend="eager") if compiled else experts
        self.top = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.top(self.experts(x))


def _ddp(model):
    return DistributedDataParallel(model)


def _compiled(model):
    return torch.compile(model, backend="eager")


WRAPPERS = {
    "compiled": lambda: _compiled(Nested(False)),
    "DDP": lambda: _ddp(Nested(False)),
    "DDP of compiled": lambda: _ddp(_compiled(Nested(False))),
    "compiled DDP": lambda: _compiled(_ddp(Nested(False))),
    "averaged": lambda: AveragedModel(Nested(False)),
    "compiled inside": lambda: Nested(True),
    "all": lambda: _compiled(_ddp(Nested(True))),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wrapper", sweep(WRAPPERS, ("DDP", "averaged")))
def test_r10_plans_through_wrappers_have_the_bare_models_names(wrapper, one_rank):
    """A prefix (`_orig_mod.`, `module.`) in one name makes the plan fit nothing else."""
    (x,) = floats(32)(24)

    def step(model):
        return lambda: model(x).square().mean().backward()

    bare, wrapped = Nested(False), WRAPPERS[wrapper]()
    expected, found = force(probe(bare, step(bare))), force(probe(wrapped, step(wrapped)))
    assert list(found.decisions) == list(expected.decisions)
    assert found.model.layers == expected.model.layers
    assert found.coverage == expected.coverage
    reference = loka.convert(Nested(False), expected)
    for model in (loka.convert(Nested(False), found), loka.convert(WRAPPERS[wrapper](), expected)):
        assert_close(model(x), reference(x))
        assert ran(model) == {name for name in found.decisions if name.endswith("/output")}
        assert_close(loka.revert(model)(x), Nested(False)(x), bound=1e-6)
