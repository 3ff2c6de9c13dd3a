import copy

import torch
from models import Encoder, odd_mlp
from torch import nn

import loka
from loka.nn import find_linears, signature, unwrap


def test_every_linear_is_found_and_the_rest_explained():
    found, skipped = find_linears(Encoder())
    assert list(found) == [
        "encoder.layers.0.linear1",
        "encoder.layers.0.linear2",
        "encoder.layers.1.linear1",
        "encoder.layers.1.linear2",
        "head",
    ]
    assert not skipped, "attention's projections are sites that a trace finds"


def test_subclasses_count_where_they_run_the_forward_of_nn_linear():
    class Same(nn.Linear):
        pass

    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    found, skipped = find_linears(nn.ModuleDict({"same": Same(4, 4), "scaled": Scaled(4, 4)}))
    assert list(found) == ["same"]
    assert skipped == {"scaled": "Scaled is a subclass of nn.Linear and computes otherwise"}


def test_filter_shared_modules_and_float64():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(4, 2), "d": nn.Linear(3, 3).double()})
    found, skipped = find_linears(model, filter=lambda module, fqn: fqn != "c")
    assert list(found) == ["a"]
    assert skipped["c"] == "left out by the filter"
    assert "float64" in skipped["d"]


def test_wrappers_do_not_change_names():
    model = odd_mlp()
    compiled = torch.compile(model, backend="eager")  # not called: importing inductor takes seconds
    assert unwrap(compiled) is model
    assert signature(compiled) == signature(model)


def test_looking_at_a_spectral_norm_leaves_its_buffers():
    """In training each read of the weight is a step of its power iteration."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(64, 96)), nn.ReLU(), nn.Linear(96, 32))
    x, name = torch.randn(32, 64), "emulated:rowwise_e4m3_pow2"
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(x).square().mean().backward()
    report = loka.measure(probe.stats(), device="cpu", candidates=[name], errors_only=True)
    plan = loka.plan(report, force={"*": name})
    assert {decision.rpartition("/")[0] for decision in plan.decisions} == {"0", "2"}  # and no power iteration
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loka.convert(model, plan)
    loka.revert(model)
    with loka.Probe(model):
        pass
    signature(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    loka.convert(model, plan)
    reads = copy.deepcopy(model)  # a forward steps once, as without sites
    loka.revert(reads)
    for each in (model, reads):
        each(x)
    for key, value in model.state_dict().items():
        assert torch.equal(value, reads.state_dict()[key])


def test_signature_differences_are_listed():
    first, second = signature(odd_mlp()), signature(nn.Sequential(nn.Linear(13, 480), nn.Linear(4, 4)))
    lines = first.differences(second)
    assert "0 is 13 -> 479, bias in this model, 13 -> 480, bias there" in lines
    assert "3 (479 -> 1000, bias) is in this model only" in lines
    assert "1 (4 -> 4, bias) is missing in this model" in lines
    assert not first.differences(first)
