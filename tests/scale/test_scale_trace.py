import pytest
import torch
from foreign.registry import FOREIGN
from foreign.spec import call
from models import stats_of
from torch import nn

import loka
from loka.core.exceptions import LokaError, NotConverted
from loka.scaling.inputs import fake_mode
from loka.scaling.trace import trace

ROWS = 32


def probed(name):
    foreign = FOREIGN[name]
    model = foreign.build()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        foreign.loss(call(model, foreign.inputs(ROWS))).backward()
    found = probe.stats().coverage
    assert found is not None
    return found


@pytest.mark.parametrize(
    "name", ["relu_tower", "experts_einsum", "lstm_tower", "lora_merged", "checkpoint_modules", "shared_attention"]
)
def test_sites_and_flops_are_those_of_probe(name):
    foreign, expected = FOREIGN[name], probed(name)
    found = trace(foreign.build(), foreign.inputs(ROWS), batch_size=None)
    assert found.coverage.sites == expected.sites
    assert sorted(map(str, found.coverage.uncovered)) == sorted(map(str, expected.uncovered))
    assert found.coverage.total == expected.total
    assert not found.notes


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.Linear(32, 1))

    def forward(self, x):
        return self.tower(x)


@pytest.mark.parametrize("look", [lambda model, x: loka.scale(model, x), lambda model, x: loka.Probe(model, every=1)])
def test_lazy_modules_are_named_before_their_first_forward(look):
    """It was torch's ValueError, of a tensor without a name."""
    model, x = Lazy(), torch.randn(ROWS, 16)
    with pytest.raises(LokaError, match="no shape before a first forward") as caught:
        look(model, x)
    assert caught.value.why == ("tower.0: LazyLinear", "tower.1: LazyBatchNorm1d")
    model(x)
    look(model, x)


def test_a_batch_of_few_rows_stands_for_a_large_one():
    foreign = FOREIGN["encoder_batch_first"]
    few = trace(foreign.build(), foreign.inputs(4), batch_size=ROWS)
    whole = trace(foreign.build(), foreign.inputs(ROWS), batch_size=None)
    assert few.calls == whole.calls
    assert few.coverage == whole.coverage


class LooksAtValues(nn.Module):
    """Its forward asks for a number, which fake tensors have not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.layer = nn.Linear(16, 32)

    def forward(self, x):
        scale = 2.0 if x.max().item() > 0 else 1.0
        return self.layer(self.norm(x) * scale)


def test_code_that_looks_at_values_runs_on_few_rows_and_is_carried_on():
    model = LooksAtValues()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = trace(model, torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), batch_size=4096)
    (only,) = found.calls
    assert (only.rows, only.in_features, only.out_features) == (4096, 16, 32)
    assert found.coverage.sites == {
        "layer": dict.fromkeys(("output", "grad_input", "grad_weight"), 2.0 * 4096 * 16 * 32)
    }
    assert "carried on" in found.notes[0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


class LongestOf(LooksAtValues):
    def forward(self, x):
        width = int(x[:, 0].max()) if self.training else len(x) + int(x.sum() * 0)
        return self.layer(x[:, None].expand(-1, width, -1))


@pytest.mark.parametrize("longest", [True, False])
def test_what_grows_by_no_line_of_the_rows_is_refused(longest):
    x = 1 + torch.arange(640.0).view(40, 16) / 16
    with pytest.raises(LokaError, match=r"(?s)few rows do not tell of 4096.*give a batch of 4096 rows"):
        trace(LongestOf().train(longest), x, batch_size=4096)
    assert trace(LongestOf().train(longest), x, batch_size=40).calls[0].rows == 40 * 40


def test_attention_on_a_cpu_counts():
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(6, 9, 16)
    found = trace(model, {"query": x, "key": x, "value": x, "need_weights": False}, batch_size=None)
    assert found.coverage.uncovered[0].flops == 3 * 2 * (2 * 6 * 9 * 9 * 16)  # two, and in backward four


def test_the_model_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trace(model, torch.randn(4, 8), batch_size=512)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model[0].weight.device.type == "cpu"
    assert type(model[0].weight) is nn.Parameter


def test_a_model_larger_than_memory():
    with fake_mode():
        model = nn.Sequential(*(nn.Linear(1 << 18, 1 << 18, bias=False) for _ in range(16)))
        x = torch.empty(4, 1 << 18)
    found = trace(model, x, batch_size=8192)
    assert {call.rows for call in found.calls} == {8192}
    assert len(found.calls) == 16


def test_which_gemms_run():
    """The first layer's input wants no gradient, a frozen weight none of its own."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 48), nn.Linear(48, 16))
    model[1].weight.requires_grad_(False)
    found = trace(model, torch.randn(4, 16), batch_size=None)
    assert [tuple(map(str, call.gemms)) for call in found.calls] == [
        ("output", "grad_weight"),
        ("output", "grad_input"),
        ("output", "grad_input", "grad_weight"),
    ]


def test_what_does_not_run_is_told():
    with pytest.raises(LokaError, match=r"Sequential does not run.*mat1 and mat2|a tuple of arguments"):
        trace(nn.Sequential(nn.Linear(16, 32)), torch.randn(4, 17), batch_size=None)
    with pytest.raises(LokaError, match="no tensor with rows"):
        trace(nn.Linear(16, 32), (3, "text"), batch_size=None)


def test_a_converted_model_is_refused():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    stats = stats_of(model, torch.randn(64, 16), torch.sum, effect_samples=0)
    report = loka.measure(stats, device="cpu", candidates=["emulated:tensorwise_e4m3"])
    loka.convert(model, loka.plan(report, force={"*": "emulated:tensorwise_e4m3"}))
    with pytest.raises(NotConverted, match="revert"):
        loka.scale(model, torch.randn(64, 16))


class Routed(nn.Module):
    """Experts of rows that their gate picks; none picks `experts.1`."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x, mask=None):
        return torch.cat([self.experts[0](x), self.experts[1](x[:0])])


def test_an_expert_that_no_row_reaches_is_told_and_left_out():
    """It was a ValueError of a logarithm."""
    found = loka.scale(Routed(), torch.randn(16, 64), batch_size=2048)
    assert [layer.path for layer in found.layers] == ["experts.0"]
    assert "no row reaches experts.1 in a call, which is left out" in found.notes
    with pytest.raises(LokaError, match="no row of the batch reaches a site of Routed") as caught:
        loka.scale(Routed(), torch.randn(0, 64))
    assert caught.value.why == ("experts.0 is called with no rows", "experts.1 is called with no rows")


def test_tensors_of_other_heights_are_told():
    found = loka.scale(Routed(), (torch.randn(16, 64), torch.ones(5)), batch_size=2048)
    told = "the batch has 16 rows; each tensor of it with 16 rows was taken to have 2048"
    assert f"{told}, and those with 5 rows to stay as they are" in found.notes
