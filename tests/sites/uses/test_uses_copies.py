"""Ways to call, copy, load and update a converted model: eager results, and every site counted.

Each fails where a site is bound to the module, parameter or process that it was made in.
"""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from forced import plan_of, planned, ran, runs
from foreign.spec import call, train_step
from oracle import assert_close, assert_same_gradients, by_hand, gradients, multiply
from small_towers import BOTH_WAYS, batch, pair, tower
from sweeps import sweep
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

import loka
from loka.core.exceptions import NotConverted

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]
ROWS = 32
NAMES = (
    "relu_tower", "slices", "functions", "used_twice", "experts_bmm", "experts_einsum", "encoder_batch_first",
    "cross_attention", "lora_parameters", "deepctr_xdeepfm", "deepctr_dcn_mix", "checkpoint_function",
    "torchrec_dlrm_dcn", "hf_gpt2_lm",
)  # fmt: skip
EACH = pytest.mark.parametrize("name", NAMES)


def _expected(known, state):
    model = known.foreign.build()
    model.load_state_dict(state)
    loka.convert(model, known.plan)
    return train_step(known.foreign, model, ROWS), gradients(model)


def _check(known, model):
    loss, expected = _expected(known, model.state_dict())
    model.zero_grad()
    assert_close(train_step(known.foreign, model, ROWS), loss)
    assert_same_gradients(model, expected)
    assert ran(model) == known.fp8


def _moved(known):
    return {
        name: 3 * value if value.is_floating_point() and "running" not in name else value
        for name, value in known.foreign.build().state_dict().items()
    }


@pytest.mark.parametrize("name", sweep(NAMES, NAMES[::3]))
def test_deepcopy(name):
    """The copy runs its own weights and counts its own runs."""
    known = planned(name)
    model = known.converted()
    train_step(known.foreign, model, ROWS)
    clone, before = copy.deepcopy(model), runs(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _check(known, clone)
    assert runs(model) == before


@pytest.mark.parametrize("name", sweep(NAMES, NAMES[1::3]))
def test_pickle(name):
    known = planned(name)
    if not known.foreign.pickles:
        pytest.skip("torch cannot pickle this model")
    _check(known, pickle.loads(pickle.dumps(known.converted())))
    buffer = io.BytesIO()
    torch.save(known.converted(), buffer)
    buffer.seek(0)
    _check(known, torch.load(buffer, weights_only=False))


@EACH
def test_functional_call(name):
    """With other parameters than the model's: outputs, and gradients of those that were given."""
    known = planned(name)
    model, inputs = known.converted(), known.foreign.inputs(ROWS)
    given = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    result = functional_call(model, given, args, kwargs)
    loss = known.foreign.loss(result)
    expected, grads = _expected(known, known.foreign.build().state_dict())
    assert_close(loss, expected)
    if "checkpoint" in name:
        return  # torch computes it again in backward with the model's own parameters
    loss.backward()
    for parameter, gradient in grads.items():
        assert_close(given[parameter].grad, gradient, what=parameter)
    if name != "used_twice":  # after a call torch leaves what was given in a module with two names
        assert all(parameter.grad is None for parameter in model.parameters())
    assert ran(model) == known.fp8


FEW = ("slices", "experts_einsum", "encoder_batch_first", "torchrec_dlrm_dcn")


@pytest.mark.parametrize("name", sweep(NAMES, FEW))
@pytest.mark.parametrize("how", ["load_state_dict", "assign", "data", "data in place", "AveragedModel"])
def test_other_weights(name, how):
    known = planned(name)
    model, state = known.converted(), _moved(known)
    train_step(known.foreign, model, ROWS)
    if how == "load_state_dict":
        model.load_state_dict(state)
    elif how == "assign":
        made = {}  # tied parameters stay tied
        for n, parameter in model.named_parameters(remove_duplicate=False):
            if parameter not in made:
                made[parameter] = nn.Parameter(state[n].clone(), requires_grad=parameter.requires_grad)
            state[n] = made[parameter]
        model.load_state_dict(state, assign=True)
    elif how == "AveragedModel":
        source = known.converted()
        source.load_state_dict(state)
        average = AveragedModel(model, use_buffers=True)
        average.update_parameters(source)
        model = average.module
    else:
        for n, parameter in model.named_parameters():
            if how == "data":
                parameter.data = state[n].clone()
            else:
                parameter.data.copy_(state[n])
    _check(known, model)


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("name", ["slices", "experts_einsum", "encoder_batch_first", "deepctr_xdeepfm"])
def test_distributed_checkpoint(name, tmp_path):
    """Keys are the plain model's, in both directions: saved converted and loaded plain, and the reverse."""
    known = planned(name)
    plain = known.foreign.build()
    plain.load_state_dict(_moved(known))
    dcp.save(plain.state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)
    model = known.converted()
    assert list(model.state_dict()) == list(plain.state_dict())
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    model.load_state_dict(state)
    _check(known, model)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "converted", no_dist=True)
    again = known.foreign.build().state_dict()
    dcp.load(again, checkpoint_id=tmp_path / "converted", no_dist=True)
    assert all(torch.equal(again[key], value) for key, value in plain.state_dict().items())


@EACH
def test_accumulation(name):
    """Two backward passes add up, and each site ran twice as often."""
    known = planned(name)
    model = known.converted()
    train_step(known.foreign, model, ROWS)
    once, first = runs(model), gradients(model)
    train_step(known.foreign, model, ROWS)
    for parameter, gradient in gradients(model).items():
        assert_close(gradient, 2 * first[parameter], what=parameter)
    assert runs(model) == {site: 2 * count for site, count in once.items()}


def test_double_use_of_a_module_and_of_a_parameter():
    """Each use is a run of its own: a layer that is called three times, and one parameter in two GEMMs."""
    known = planned("used_twice")
    model = known.converted()
    train_step(known.foreign, model, ROWS)
    assert runs(model)["shared/output"] == 3
    assert runs(model)["shared/grad_weight"] == 3
    tied = planned("autoencoder_tied")
    model = tied.converted()
    train_step(tied.foreign, model, ROWS)
    outputs = [site for site in runs(model) if site.endswith("/output")]
    assert len(outputs) == 2
    assert all(runs(model)[site] == 1 for site in outputs)


@BOTH_WAYS
@pytest.mark.parametrize("backward_inside", sweep([False, True], [True]), ids=["backward outside", "backward inside"])
def test_autocast_over_float32_weights(backward_inside, compiled):
    """bf16 activations, float32 weights quantized from what is stored, float32 gradients: as by hand."""
    found, expected = pair()
    model = torch.compile(found, backend="aot_eager") if compiled else found
    for each in (model, expected):
        with torch.autocast("cpu", torch.bfloat16):
            y = each(batch().requires_grad_())
            if backward_inside:
                y.float().square().mean().backward()
        if not backward_inside:
            y.float().square().mean().backward()
        assert y.dtype is torch.bfloat16
    assert all(parameter.grad.dtype is torch.float32 for parameter in found.parameters())
    # Where bf16 rounds between layers a last bit differs between compiled code and not.
    assert_same_gradients(found, gradients(expected), bound=2e-2 if compiled else 2e-3)
    assert ran(found) == {f"{place}/{gemm}" for place in (0, 2, 4, 6) for gemm in _GEMMS}


_GEMMS = ("output", "grad_input", "grad_weight")


class Raw(nn.Module):
    """A slice, a matmul and stacked experts, with the multiplication to be chosen."""

    def __init__(self, by_hand):
        super().__init__()
        torch.manual_seed(0)
        self.by_hand = by_hand
        self.w = nn.Parameter(torch.randn(64, 64) / 8)
        self.experts = nn.Parameter(torch.randn(3, 32, 32) / 6)

    def forward(self, x):
        half = self.w[:32]
        if not self.by_hand:
            return torch.einsum("bi,eio->beo", torch.relu(x @ half.t()), self.experts).sum(dim=1)
        hidden = torch.relu(multiply(x, half))
        flat = multiply(hidden, self.experts.permute(0, 2, 1).reshape(96, 32))
        return flat.view(-1, 3, 32).sum(dim=1)


def test_autocast_over_raw_float32_parameters():
    plan = plan_of(Raw(False), batch().requires_grad_())
    found, expected = loka.convert(Raw(False), plan), Raw(True)
    for model in (found, expected):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch().requires_grad_())
        assert y.dtype is torch.bfloat16
        y.float().square().mean().backward()
    assert_same_gradients(found, gradients(expected))
    assert all(runs(found).values())


def test_modules_moved_into_another_model():
    """A converted part that another model takes over goes on, under its new path's names or its own."""
    found, expected = pair()
    taken = nn.ModuleDict({"tower": nn.Sequential(*list(found)[:4])})
    y = taken["tower"](batch())
    assert_close(y, expected[:4](batch()))
    assert sum(runs(taken).values()) == 2


def test_replicas_of_data_parallel_are_refused():
    """torch.nn.parallel.replicate calls this method of each module, at every forward; the replicas trained nothing."""
    model = pair()[0]
    with pytest.raises(NotConverted, match="DistributedDataParallel"):
        copy.deepcopy(model)[0]._replicate_for_data_parallel()
    replica = loka.revert(model)[0]._replicate_for_data_parallel()
    assert type(replica) is nn.Linear


def test_a_plain_copy_of_weights_is_no_site():
    """`by_hand` and `tower` share no state with what is converted; else every test here compares equals."""
    found, expected = pair()
    with torch.no_grad():
        found[0].weight.zero_()
    assert expected[0].weight.any()
    assert type(by_hand(tower())[0]) is not type(found[0])
    assert call(expected, (batch(),)).shape == (128, 1)
