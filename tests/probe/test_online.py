import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from models import Encoder, odd_mlp, stats_of, train_steps
from probed_models import probed
from torch import nn

import loka
from loka.core.error import sqnr_db
from loka.core.exceptions import LokaError
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import RECIPES, Gemm
from loka.measurement.operands import draw_operands
from loka.probe import Probe
from loka.probe.merging import merge_stats
from loka.statistics.depths import operand_errors
from loka.statistics.draw import samplers


def test_training_with_a_probe_gives_the_same_bits():
    torch.manual_seed(0)
    plain = odd_mlp()
    watched = copy.deepcopy(plain)
    train_steps(plain, 6)
    stats = probed(watched, 6)
    assert stats.layers["0"].effects  # the extra backward was one of the things that changed nothing
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())


def test_what_is_learnt():
    stats = probed(odd_mlp())
    assert (stats.steps, stats.sampled_steps) == (8, 4)
    first, last = stats.layers["0"], stats.layers["5"]
    assert (first.rows, first.calls, first.dtype, first.weight_dtype) == (40, 4, "bfloat16", "float32")
    assert not first.needs_input_grad
    assert last.needs_input_grad
    assert list(stats.layers) == ["0", "3", "5"]
    assert first.operands["input"].tensors["mean"].shape == (13,)
    assert first.operands["input"].numbers["count"] == 160
    assert first.operands["grad_output"].tensors["mean"].shape == (479,)
    assert stats.layers["3"].operands["input"].tensors["scatter"].shape == (479, 479)
    assert stats.layers["5"].operands["input"].tensors["factor"].shape == (64, 1000)


def test_amax_is_that_of_all_rows():
    model, x = nn.Linear(4, 1), torch.ones(4096, 4)
    x[0], x[1] = -9, torch.nan
    with loka.Probe(model, every=1, rows=8) as probe:
        model(x).sum().backward()
    assert probe.stats().layers[""].operands["input"].tensors["amax"] == 9


def test_depth_histograms_are_kept(tmp_path):
    """Their error of an operand is that of quantizing it, here of one batch, taken whole."""
    torch.manual_seed(0)
    model, x = odd_mlp(), torch.randn(40, 13).exp()
    stats_of(model, x, torch.sum, depth_rows=1000).save(tmp_path)
    layer = loka.Stats.load(tmp_path).layers["0"]
    assert {"depth_row", "depth_row_transposed"} <= set(layer.operands["grad_output"].tensors)
    for name in ("tensorwise_e4m3", "rowwise_e4m3", "blockwise_e4m3"):
        recipe = RECIPES[name]
        found = operand_errors(layer, Gemm.OUTPUT, recipe)
        for operand, tensor, cast in zip(("input", "weight"), (x, model[0].weight), recipe.output, strict=True):
            low = dequantize(quantize(tensor.detach(), cast))
            assert found[operand].sqnr_db == pytest.approx(sqnr_db(low, tensor.detach()), abs=0.01)


def test_an_in_place_op_behind_a_layer_hides_nothing():
    """F.linear of [B, n, d] returns a view, whose graph node an in-place op replaces."""
    model = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 1), nn.Flatten(0))
    for x in (torch.randn(6, 8, 13), torch.randn(48, 13)):
        found = []
        for model[1].inplace in (False, True):
            found.append(stats_of(model, x, lambda z: nn.functional.softplus(z).mean()))
        assert found[0].layers["0"].effects
        assert found[0].digest() == found[1].digest()


def test_layers_that_are_not_called_say_so():
    stats = probed(Encoder(), 2)
    assert "encoder.layers.0.linear1" in stats.layers
    attention = "encoder.layers.0.self_attn"
    assert {f"{attention}.in_proj_weight", f"{attention}.out_proj"} <= set(stats.layers)
    assert not stats.skipped

    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(13, 1), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    assert "never called" in probed(Spare(), 2).skipped["spare"]


def test_keyword_inputs_and_frozen_weights():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(13, 1)
            self.fc.weight.requires_grad_(False)

        def forward(self, x):
            return self.fc(input=x)

    stats = probed(Keyword(), 2)
    assert not stats.layers["fc"].needs_weight_grad
    report = loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"])
    assert list(report.sites) == ["fc/output"]
    assert "frozen" in report.skipped["fc/grad_weight"]


def test_nothing_sampled_is_nothing_to_measure():
    with loka.Probe(odd_mlp()) as probe:
        pass
    with pytest.raises(LokaError, match="gradients enabled"):
        loka.measure(probe.stats(), device="cpu")


def test_evaluation_and_unsampled_steps_are_not_counted():
    model = odd_mlp()
    with loka.Probe(model, every=3) as probe:
        train_steps(model, 2)
        with torch.no_grad():
            model(torch.randn(4, 13))
    assert (probe.stats().steps, probe.stats().sampled_steps) == (2, 1)


@pytest.mark.slow
def test_compiled_models_are_probed_and_stay_compiled():
    torch._dynamo.reset()
    model = odd_mlp()
    compiled = torch.compile(model, backend="eager")
    with loka.Probe(compiled, every=2) as probe:
        train_steps(model, 4, call=compiled)
    assert set(probe.stats().layers) == {"0", "3", "5"}
    assert probe.stats().sampled_steps == 2
    assert list(probe.stats().model.layers) == ["0", "3", "5"]


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.fails = nn.Linear(8, 16), nn.Linear(16, 1), True

    def forward(self, x):
        h = self.first(x)
        if self.fails:
            raise torch.OutOfMemoryError("of the program's own")
        return self.last(h)


@pytest.mark.parametrize("wrap", [False, True])
def test_what_a_sampled_step_raises_comes_through(wrap):
    """And its activations are let go of, hooks too, and the next sampled step is whole."""
    model = Failing()
    called = torch.compile(model, backend="eager") if wrap else model
    with loka.Probe(called, every=1) as probe:
        x = torch.randn(4, 8)
        given = weakref.ref(x)
        with pytest.raises(torch.OutOfMemoryError, match="of the program's own"):
            called(x)
        del x
        gc.collect()
        assert given() is None
        assert not any(m._forward_hooks for m in (model.first, model.last))
        model.fails = False
        called(torch.randn(4, 8)).sum().backward()
    stats = probe.stats()
    assert stats.sampled_steps == 2
    assert all(layer.effects["rowwise_e4m3"].count == 3 for layer in stats.layers.values())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (called, *model.modules()))


def test_a_linear_as_the_root_may_fail():
    model = nn.Linear(8, 1)
    with loka.Probe(model, every=1) as probe:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(4, 7))
        model(torch.randn(4, 8))
    assert probe.stats().layers[""].calls == 1
    assert not model._forward_hooks


def test_leaving_lets_go_of_a_step_that_never_ended():
    """What is no Exception, Ctrl-C say, runs no hook at the end of a forward."""
    model = Failing()
    model.first.register_forward_hook(lambda module, args, output: (_ for _ in ()).throw(KeyboardInterrupt))
    x = torch.randn(4, 8)
    given = weakref.ref(x)
    with pytest.raises(KeyboardInterrupt), loka.Probe(model, every=1) as probe:
        model(x)
    del x
    gc.collect()
    assert given() is None
    assert probe.stats().sampled_steps == 1


def test_a_model_without_parameters_to_multiply_by_is_refused():
    with pytest.raises(LokaError, match="no GEMM with a parameter"):
        loka.Probe(nn.Sequential(nn.BatchNorm1d(3)))


@pytest.mark.slow
def test_nested_probes_leave_the_compiler_on():
    torch._dynamo.reset()
    model = odd_mlp()
    with loka.Probe(model, every=1), loka.Probe(model, every=1):
        train_steps(model, 1)
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    compiled(torch.randn(2, 4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    inside = odd_mlp()
    inside.compile()
    with pytest.raises(LokaError, match="in place"), loka.Probe(inside):
        pass


def test_a_probe_opened_twice_is_refused():
    model = odd_mlp()
    with loka.Probe(model, every=1) as probe, pytest.raises(LokaError, match="open already"), probe:
        pass
    assert not model._forward_pre_hooks


def test_a_module_inside_of_compiled_code_is_refused():
    """It ended in an error of Dynamo's own: what a probe does to see a step cannot be traced."""
    model, x = odd_mlp(), torch.randn(4, 13)
    compiled = torch.compile(model, backend="eager")
    with (
        pytest.raises(LokaError, match=r"inside of what torch.compile(.|\n)*Probe\(compiled\)"),
        loka.Probe(model, every=1),
    ):
        compiled(x)
    with loka.Probe(compiled, every=1) as probe:
        compiled(x).sum().backward()
    assert set(probe.stats().layers)


def test_a_root_that_is_a_linear_and_hooks_of_the_user():
    model = nn.Linear(13, 1)
    model.register_forward_hook(lambda module, args, output: output * 1.0)
    stats = probed(model, 2)
    assert list(stats.layers) == [""]
    assert stats.layers[""].operands["grad_output"].numbers["count"] == 40


def test_batches_without_a_finite_row_give_no_sites():
    model = nn.Sequential(nn.Linear(13, 16), nn.Linear(16, 1))
    stats = stats_of(model, torch.full((4, 13), float("nan")), torch.sum)
    report = loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"])
    assert not report.sites
    assert "no finite row" in report.skipped["0/output"]


def test_rows_that_are_in_no_statistic_are_told():
    model, x = nn.Sequential(nn.Linear(32, 48)), torch.randn(64, 32)
    x[3, 5], x[7] = float("inf"), float("nan")
    stats = stats_of(model, x, torch.sum)
    told = "2 of 64 rows of input hold NaN or infinity: no statistic has them"
    assert stats.left_out() == {"0": told}
    assert f"0: {told}" in loka.measure(stats, device="cpu", errors_only=True).notes
    assert stats_of(model, torch.randn(64, 32), torch.sum).left_out() == {}


@pytest.mark.parametrize(("input", "gradient", "told"), [(0.0, 1.0, 3), (1.0, 0.0, 2), (1.0, 1.0, 0)])
def test_operands_of_zeros_say_nothing_of_others(input, gradient, told):
    """Quantized without an error, they looked like the safest of all."""
    model = nn.Sequential(nn.Linear(32, 48))
    with loka.Probe(model, every=1) as probe:
        (gradient * model(input * torch.randn(64, 32).requires_grad_())).square().sum().backward()
    report = loka.measure(probe.stats(), device="cpu", errors_only=True)
    assert len(report.sites) == 3 - told
    assert sum("that was probed was zero" in reason for reason in report.skipped.values()) == told


@pytest.mark.parametrize("size", [1e-24, 1e19])
def test_values_whose_squares_are_no_float32_numbers_are_not_measured(size):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        (model(torch.randn(64, 16)).square() * size).sum().backward()
    report = loka.measure(probe.stats(), device="cpu", candidates=["emulated:rowwise_e4m3"])
    assert not report.sites
    assert "squares of grad_output" in report.skipped["1/grad_weight"]


def test_as_many_steps_as_the_overhead_allows():
    """Here a sampled step costs tens of plain ones: the two on trust, and then none for long."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(13, 37), nn.ReLU(), nn.Linear(37, 1))
    watched = copy.deepcopy(plain)
    train_steps(plain, 80)
    with loka.Probe(watched, every="auto", overhead=0.01) as probe:
        assert probe.overhead is None
        train_steps(watched, 80)
    assert (probe.stats().steps, probe.stats().sampled_steps) == (80, 2)
    assert probe.overhead > 0.01
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    with pytest.raises(ValueError, match="overhead is 2"):
        loka.Probe(watched, every="auto", overhead=2)


def test_an_evaluation_between_steps_is_not_taken_for_training():
    model = nn.Sequential(nn.Linear(13, 16), nn.Linear(16, 1))
    with loka.Probe(model, every=10) as probe:
        for step in range(30):
            train_steps(model, 1)
            if step % 10 == 0:  # in each sampled step, and as long as ten of them
                with torch.no_grad():
                    model(torch.randn(4, 13))
    assert probe.overhead is None  # no sampled step could be timed


def test_steps_that_call_no_model_are_counted_where_they_are_told():
    """As replays of a graph are."""
    model = odd_mlp()
    sampled = []
    with loka.Probe(model, every=4) as probe:
        for step in range(10):
            if probe.next_step():
                sampled.append(step)
                model(torch.randn(3, 13)).sum().backward()
                model(torch.randn(3, 13)).sum().backward()  # the same step: it is not sampled again
    assert sampled == [0, 4, 8]
    stats = probe.stats()
    assert (stats.steps, stats.sampled_steps, stats.layers["0"].calls) == (10, 3, 3)


def test_a_graph_that_is_being_recorded_is_left_alone(monkeypatch):
    monkeypatch.setattr("loka.probe.online.capturing", lambda: True)
    assert probed(odd_mlp(), 2).steps == 0


def test_draws_keep_the_tails_that_a_probe_saw():
    """Half of the inputs are zero and the rest log-normal; gradients go with the inputs they belong to."""
    torch.manual_seed(0)
    model = nn.Linear(24, 8)
    with Probe(model, every=1, effect_samples=0) as probe:
        for _ in range(12):
            x = torch.randn(256, 24).exp() * (torch.rand(256, 24) < 0.5)
            (model(x) * x[:, :8]).sum().backward()  # the gradient at the output is the input itself
    layer = probe.stats().layers[""]
    device, generator = torch.device("cpu"), torch.Generator().manual_seed(1)
    draws = {}
    for keep in (True, False):
        drawn = draw_operands(layer, samplers(layer.operands, device, keep_tails=keep), 2048, generator)
        zeros = (drawn["input"] == 0).float().mean().item()
        together = (drawn["input"][:, :8] * drawn["grad_output"]).mean().item()
        draws[keep] = zeros, together
    assert draws[True][0] == pytest.approx(0.5, abs=0.03)  # of 3072 x 24 elements
    assert draws[False][0] < 0.01
    apart = layer.operands["input"].tensors["mean"].square().mean().item()
    assert draws[True][1] > 2 * apart, "E[x g] = E[x^2], which is more than E[x] E[g]"
    assert draws[False][1] == pytest.approx(apart, rel=0.2)


def test_layers_over_tokens_are_told(tmp_path):
    """X as it lies, taken across, as a weight in front of it; and keys that were copied into rows."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.over = nn.Linear(8, 8), nn.Linear(6, 4, bias=False)
            self.front, self.copied = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 4)

        def forward(self, x):
            over = self.over(self.rows(x).transpose(1, 2)).transpose(1, 2)
            copied = self.copied(x.transpose(1, 2).contiguous()).transpose(1, 2)
            return over + torch.matmul(self.front, x) + copied

    model = Mixed()
    stats_of(model, torch.randn(5, 6, 8), torch.sum, effect_samples=0).save(tmp_path / "stats")
    found = loka.Stats.load(tmp_path / "stats")
    assert {path: layer.over_tokens for path, layer in found.layers.items()} == {
        "rows": False,
        "over": True,
        "front": True,
        "copied": False,
    }
    with loka.Probe(model, every=1, effect_samples=0, resume=found) as probe:
        pass  # no step of its own
    assert probe.stats().layers["over"].over_tokens
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(torch.randn(5, 6, 8)).sum().backward()
    other = {"over": replace(probe.stats().layers["over"], over_tokens=False)}
    merged = merge_stats([replace(found, layers={"over": found.layers["over"]}), replace(probe.stats(), layers=other)])
    assert merged.layers["over"].over_tokens


def test_a_model_without_values_is_refused():
    model = odd_mlp().to("meta")
    with pytest.raises(LokaError, match="ran on the meta device"), Probe(model, every=1):
        model(torch.empty(4, 13, device="meta"))
