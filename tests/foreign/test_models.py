import ast
import copy
import math
import pickle
from pathlib import Path

import pytest
import torch

from .flags import why_not
from .flops import count_flops
from .registry import FOREIGN
from .spec import call, train_step

ROWS = 32
# In transformers 5 it has another name, and is what users call.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
RECOMPUTED = [name for name in FOREIGN if "checkpoint" in name]


@pytest.fixture(params=FOREIGN)
def foreign(request):
    entry = FOREIGN[request.param]
    entry.skip_without_libraries()
    return entry


def test_a_step_trains_every_parameter(foreign):
    model = foreign.build()
    assert model.training
    loss = train_step(foreign, model, ROWS)
    assert math.isfinite(loss)
    without = [name for name, p in model.named_parameters() if p.grad is None]
    assert without == [name for name, _ in model.named_parameters() if name in foreign.without_gradient]
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-3 * parameter.grad
    assert foreign.loss(call(model, foreign.inputs(ROWS))) < loss


def test_a_build_is_repeatable_and_leaves_the_random_state(foreign):
    state = torch.random.get_rng_state()
    first, second = foreign.build().state_dict(), foreign.build().state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_flops_are_those_derived_by_hand(foreign):
    """Under autograd, without it, and in inference mode, where aten arrives in larger pieces."""
    model = foreign.build()
    expected = foreign.parameter_gemm_flops(ROWS)
    inputs = foreign.inputs(ROWS)
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            counted = count_flops(model, lambda: call(model, inputs))
        assert counted.with_parameter == expected
        assert counted.with_parameter == sum(counted.by_parameter.values())
        assert not counted.unaccounted
        assert set(foreign.not_sites) <= set(counted.by_parameter)


def test_copies_and_pickles(foreign):
    model = foreign.build()
    loss = train_step(foreign, foreign.build(), ROWS)
    assert foreign.deepcopies
    torch.testing.assert_close(train_step(foreign, copy.deepcopy(model), ROWS), loss, rtol=0, atol=0)
    if foreign.pickles:
        restored = pickle.loads(pickle.dumps(model))
        torch.testing.assert_close(train_step(foreign, restored, ROWS), loss, rtol=0, atol=0)
    else:
        with pytest.raises((AttributeError, RuntimeError, pickle.PicklingError)):
            pickle.dumps(model)


def test_logits_are_where_the_entry_says(foreign):
    output = call(foreign.build(), foreign.inputs(ROWS))
    if foreign.logits is not None:
        logits = foreign.logits(output)
        assert logits.shape[0] == ROWS
        assert logits.is_floating_point()


@pytest.mark.parametrize("name", RECOMPUTED)
def test_checkpoints_compute_again_in_backward(name):
    """Without checkpoints a step reads parameters in two GEMMs at most: output and grad_input."""
    foreign = FOREIGN[name]
    foreign.skip_without_libraries()
    model = foreign.build()
    step = count_flops(model, lambda: train_step(foreign, model, ROWS))
    forward = count_flops(model, lambda: call(model, foreign.inputs(ROWS)))
    assert 2 * forward.with_parameter < step.with_parameter <= 3 * forward.with_parameter


def test_no_model_imports_loka():
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "loka" for name in names), path


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("functions", "fullgraph"),
        ("functions", "export_non_strict"),
        ("lstm_tower", "fullgraph"),
        ("dataclass_tower", "export_non_strict"),
        ("checkpoint_function", "fullgraph"),
        ("checkpoint_function", "export_strict"),
        ("torchrec_dlrm_train", "export_non_strict"),
    ],
)
def test_flags_on_a_few_models(name, flag):
    """All of them take minutes: `python -m foreign.flags`."""
    foreign = FOREIGN[name]
    foreign.skip_without_libraries()
    assert (why_not(foreign, flag) is None) == getattr(foreign, flag)
