import copy
import dataclasses

import pytest
import torch
from forced import plan_of, planned, ran, runs
from foreign.spec import train_step
from oracle import assert_close, by_hand
from small_towers import batch, pair, tower
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import loka
from loka.core.exceptions import LokaError, NoKernelFits, NotConverted, UnknownName


def _steps(model, count=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(count):
        model(batch(seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("parametrization", [weight_norm, spectral_norm])
def test_r1_parametrized_after_convert(parametrization):
    """Its class is another one by then. The site goes on, by the weight that is computed; after revert the
    parametrization is there, trains, and gives what it gives without LoKA."""
    found, plain = pair()[0], tower()
    for model in (found, plain):
        torch.manual_seed(0)
        parametrization(model[2])
    expected = copy.deepcopy(plain)
    with torch.no_grad():
        found.eval(), plain.eval()
        by_hand_weight = copy.deepcopy(plain[2].weight)
        oracle = by_hand(tower())
        oracle[2].weight.copy_(by_hand_weight)
        assert_close(found(batch()), oracle(batch()))
        found.train(), plain.train()
    assert ran(found) >= {"2/output"}
    _steps(found)
    loka.revert(found)
    assert parametrize.is_parametrized(found[2], "weight")
    assert type(found[2]) is not nn.Linear
    found.load_state_dict(expected.state_dict())
    _steps(found)
    _steps(expected)
    torch.testing.assert_close(found(batch()), expected(batch()), rtol=0, atol=0)
    parametrize.remove_parametrizations(found[2], "weight")
    assert type(found[2]) is nn.Linear
    found(batch())


class Loud(nn.Linear):
    def extra_repr(self):
        return f"loud, {super().extra_repr()}"


def test_r1_a_class_that_changed_meanwhile():
    found, expected = pair()
    found[2].__class__ = Loud
    assert_close(found(batch()), expected(batch()))
    loka.revert(found)
    assert type(found[2]) is Loud
    torch.testing.assert_close(found(batch()), tower()(batch()), rtol=0, atol=0)


def test_r1_hooks_and_attributes_of_others_stay():
    found, _ = pair()
    seen = []
    found[2].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    found[2].note = "theirs"
    found(batch())
    loka.revert(found)
    found(batch())
    assert len(seen) == 2
    assert found[2].note == "theirs"
    assert not any("loka" in name or name == "forward" for module in found for name in vars(module))


def _replaced(model):
    before = model[2].forward
    model[2].forward = lambda x: 2 * before(x)
    return model[2].forward


def test_r1_forward_replaced_after_convert_is_not_thrown_away():
    """Revert refuses, names the module, and does nothing; when the other's wrapper is gone it goes
    through.
    """
    found, _ = pair()
    site = found[2].forward
    theirs = _replaced(found)
    with pytest.raises(NotConverted, match="2: forward is now"):
        loka.revert(found)
    assert found[2].forward is theirs
    assert loka.health_of(found).keys() == {f"{n}/{g}" for n in (0, 2, 4, 6) for g in _GEMMS}
    found[2].forward = site
    loka.revert(found)
    torch.testing.assert_close(found(batch()), tower()(batch()), rtol=0, atol=0)


_GEMMS = ("output", "grad_input", "grad_weight")


def test_r1_forward_deleted_after_convert_is_named():
    """Whoever deletes the attribute takes the site away, and hears of it at revert."""
    found, _ = pair()
    del found[2].forward
    with pytest.raises(NotConverted, match="its sites do not run"):
        loka.revert(found)


def test_r1_forward_replaced_before_convert_comes_back():
    """What stood on the instance before goes on computing: its own GEMM is the site."""
    plan = plan_of(tower(), batch())
    model = tower()
    own = model[2].forward
    model[2].forward = lambda x: own(x) + 1.0
    theirs = model[2].forward
    loka.convert(model, plan)
    expected = by_hand(tower())
    expected[2].register_forward_hook(lambda module, args, output: output + 1.0)
    assert_close(model(batch()), expected(batch()))
    assert "2/output" in ran(model)
    loka.revert(model)
    assert model[2].forward is theirs


@pytest.mark.parametrize("name", ["experts_einsum", "encoder_batch_first", "hf_gpt2_lm", "torchrec_dlrm_dcn"])
def test_r1_revert_is_exact_everywhere(name):
    """After a step converted, and the old weights: outputs, gradients and attributes are those of before."""
    known = planned(name)
    plain, model = known.foreign.build(), known.converted()
    keys = {path: set(vars(module)) for path, module in plain.named_modules()}
    train_step(known.foreign, model)
    loka.revert(model)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == keys
    assert all(
        not module._forward_pre_hooks or plain.get_submodule(path)._forward_pre_hooks
        for path, module in model.named_modules()
    )
    model.zero_grad()
    loss, expected = train_step(known.foreign, model), train_step(known.foreign, plain)
    assert torch.equal(loss, expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


def _with(plan, site, candidate):
    changed = dataclasses.replace(plan.decisions[site], candidate=candidate)
    return dataclasses.replace(plan, decisions={**plan.decisions, site: changed})


@pytest.mark.parametrize(
    ("candidate", "error"),
    [
        ("torch:blockwise_e4m3", NoKernelFits),  # has no kernel on the CPU
        ("deep_gemm:blockwise_e4m3", LokaError),  # needs a GPU
        ("emulated:rowwise_e9m9", UnknownName),
        ("nobody:rowwise_e4m3", UnknownName),
    ],
)
@pytest.mark.parametrize("name", ["experts_einsum", "encoder_batch_first", "relu_tower"])
def test_r2_an_impossible_candidate_is_refused_before_anything_changes(name, candidate, error):
    """At the last site of the plan, so that every other one would have been converted by then."""
    known = planned(name)
    site = [site for site in known.plan.decisions if site.endswith("/output")][-1]
    model, plain = known.foreign.build(), known.foreign.build()
    with pytest.raises(error):
        loka.convert(model, _with(known.plan, site, candidate))
    assert not runs(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert {p: set(vars(m)) for p, m in model.named_modules()} == {p: set(vars(m)) for p, m in plain.named_modules()}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert torch.equal(train_step(known.foreign, model), train_step(known.foreign, plain))
    loka.convert(model, known.plan)


def test_r2_a_plan_of_a_site_that_is_gone_is_refused_before_anything_changes():
    """The owner of raw parameters is there, one of its parameters is not."""
    known = planned("experts_einsum")
    model = known.foreign.build()
    del model.w2
    with pytest.raises(LokaError, match="w2"):
        loka.convert(model, known.plan)
    assert not any("forward" in vars(module) for module in model.modules())
