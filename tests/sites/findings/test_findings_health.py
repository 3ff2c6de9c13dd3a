import itertools

import pytest
import torch
from forced import plan_of, planned, ran
from foreign.flops import count_flops
from foreign.spec import call, train_step
from small_towers import batch, pair, tower
from sweeps import sweep
from torch import nn

import loka
from loka.core.exceptions import NonFinite
from loka.nn import reset_health

BAD = list(itertools.product((float("nan"), float("inf"), -float("inf")), (False, True)))


@pytest.mark.parametrize(("value", "compiled"), sweep(BAD, (*BAD[::2], BAD[1])))
def test_s5_in_the_input_a_weight_and_a_gradient(value, compiled):
    """The site where it came in is named first, each later one after it, and none before it."""
    found, _ = pair()
    call = torch.compile(found, backend="aot_eager") if compiled else found
    call(batch()).square().mean().backward()
    loka.check_finite(found)

    bad = batch()
    bad[5, 7] = value
    assert not call(bad).isfinite().all()
    with pytest.raises(NonFinite, match="the first is 0/output") as caught:
        loka.check_finite(found)
    assert "0/output: non-finite input" in str(caught.value)

    reset_health(found)
    loka.check_finite(found)
    with torch.no_grad():
        kept = found[4].weight[3, 2].clone()
        found[4].weight[3, 2] = value
    assert not call(batch()).isfinite().all()
    with pytest.raises(NonFinite, match="the first is 4/output") as caught:
        loka.check_finite(found)
    assert "4/output: non-finite weight" in str(caught.value)
    assert "2/output" not in str(caught.value)

    reset_health(found)
    with torch.no_grad():
        found[4].weight[3, 2] = kept
    y = call(batch())
    gradient = torch.zeros_like(y)
    gradient[0] = value
    y.backward(gradient)
    with pytest.raises(NonFinite) as caught:
        loka.check_finite(found)
    for gemm in ("grad_input", "grad_weight"):
        assert f"6/{gemm}: non-finite grad_output" in str(caught.value)
    assert "/output: " not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    sweep(
        ["hf_gpt2_lm", "experts_einsum", "experts_bmm", "encoder_batch_first", "deepctr_xdeepfm", "slices"],
        ["experts_einsum", "experts_bmm", "encoder_batch_first", "slices"],
    ),
)
def test_s5_in_weights_that_are_no_linear_layers(name):
    """Each parameter that sites multiply by, in turn: some site names its weight."""
    known = planned(name)
    model = known.converted()
    counted = count_flops(known.foreign.build(), lambda: None)
    assert not counted.by_parameter
    train_step(known.foreign, model)
    loka.check_finite(model)
    plain = known.foreign.build()
    used = count_flops(plain, lambda: call(plain, known.foreign.inputs(32))).by_parameter
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for parameter in used:
        reset_health(model)
        names = {name for name, other in parameters.items() if other is parameters[parameter]}  # tied ones too
        weight = parameters[parameter].data
        kept = weight.clone()
        weight.view(-1)[0] = float("nan")
        call(model, known.foreign.inputs(32))
        weight.copy_(kept)
        with pytest.raises(NonFinite) as caught:
            loka.check_finite(model)
        lines = [line for line in str(caught.value).splitlines() if "weight" in line.partition(": ")[2]]
        assert any(name.removesuffix(".weight") in line for line in lines for name in names), lines


S6 = {
    "hf_gpt2_lm": 0.9, "deepctr_xdeepfm": 0.9, "fuxictr_xdeepfm": 0.9, "deepctr_dcn_matrix": 0.9,
    "torchrec_dlrm_dcn": 0.9, "slices": 0.99, "functions": 0.99, "lstm_tower": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("name", sweep(S6, list(S6)[1::2]))
def test_s6_gemms_that_are_no_linear_layers(name):
    """Sites that are no nn.Linear's are seen, run, and count; the rest is accounted for to the last FLOP."""
    known = planned(name)
    coverage, foreign = known.stats.coverage, known.foreign
    linears = {path for path, module in foreign.build().named_modules() if type(module) is nn.Linear}
    beside = {path for path in coverage.sites if path not in linears}
    assert bool(beside) == (name != "lstm_tower")
    sites = sum(map(coverage.of_site, coverage.sites))
    assert sites / coverage.total >= S6[name]
    assert coverage.seen >= (0.99 if S6[name] else 0.0)
    model = known.converted()
    train_step(foreign, model)
    assert {site.rpartition("/")[0] for site in ran(model)} >= beside
    plain = foreign.build()
    with torch.no_grad():
        counted = count_flops(plain, lambda: call(plain, foreign.inputs(32)))
    forward = sum(gemms["output"] for gemms in coverage.sites.values())
    named = sum(counted.by_parameter[parameter] for parameter in foreign.not_sites)
    assert forward == pytest.approx(counted.with_parameter - named, rel=0.01)


def test_s6_health_is_empty_for_nothing_that_is_planned():
    plan = plan_of(tower(), batch())
    assert set(loka.health_of(loka.convert(tower(), plan))) == set(plan.decisions)
