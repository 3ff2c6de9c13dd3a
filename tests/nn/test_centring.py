"""Centred recipes: a vector from the probe's means is taken off the input and put back; measured, planned,
converted, watched."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import loka
from loka.core.exceptions import NoKernelFits, NotConverted
from loka.core.numerics.centring import centre_of, centre_of_rows, restore, subtract
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import Gemm, recipe_named
from loka.core.records.drift import drift
from loka.kernels.gemm.run import run_gemm
from loka.measurement.predicted_kl import depth_kl
from loka.measurement.settings import Settings

CENTRED, PLAIN, FP8 = "emulated:int8_row_centred", "emulated:int8_row", "emulated:rowwise_e4m3"
OFFSET = torch.where(torch.arange(24) % 3 == 0, 5.0, 0.0)


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 1))


def rows(count=256, offset=OFFSET):
    return torch.randn(count, 24) + offset


def probed(model, offset=OFFSET, steps=4):
    with loka.Probe(model, every=1) as probe:
        for _ in range(steps):
            nn.functional.softplus(-model(rows(offset=offset))).mean().backward()
    model.zero_grad()
    return probe.stats()


@pytest.fixture(scope="module")
def case():
    model = model_of()
    stats = probed(model)
    names = [CENTRED, PLAIN, FP8, "emulated:rowwise_e4m3_centred", "torch_int8:int8_row_centred"]
    fine = Settings(max_draws=4)
    report = loka.measure(stats, device="cpu", candidates=names, errors_only=True, settings=fine)
    return model, stats, report


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    giant=st.booleans(),
    constant=st.booleans(),
    zeros=st.floats(0, 1),
    bad=st.sampled_from([0.0, float("nan"), float("inf")]),
)
def test_it_changes_nothing_but_what_is_quantized(seed, giant, constant, zeros, bad):
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 24, generator=drawn) + OFFSET
    x *= torch.rand(40, 24, generator=drawn) >= zeros
    if constant:
        x[:, 5] = -7.0
    if giant:
        x[:, 3] *= 1e6
    if bad:
        x[2, 1] = bad
    weight = torch.randn(16, 24, generator=drawn)
    m = centre_of_rows(x)
    assert bool(m.isfinite().all())
    good = [row for row in range(40) if row != 2]
    if constant:
        assert m[5].item() == pytest.approx(-7.0)  # a column without deviation is all mean
    back = restore(subtract(x, m) @ weight.t(), m, weight)
    size = (x.abs() + m.abs()) @ weight.abs().t()
    assert bool(((back - x @ weight.t()).abs() <= 1e-5 * size)[good].all())
    found = run_gemm(PLAIN, x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32, centre=m)
    assert bool(found[good].isfinite().all())
    assert bool(found[2].isnan().all()) == bool(bad)
    step = [(values[good].abs().amax(dim=1, keepdim=True) / 127).square().sum() for values in (subtract(x, m), x)]
    if zeros == 0 and not giant:  # means of 5 to 7 dominate rows of deviation 1
        assert step[0] < step[1]


def test_a_column_counts_by_mean_over_deviation():
    mean = torch.tensor([0.0, 0.4, -0.6, 3.0, float("nan"), 1.0])
    variance = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, float("inf")])
    assert centre_of(mean, variance).tolist() == pytest.approx([0, 0, -0.6, 3.0, 0, 0])


def test_what_the_probe_predicts_is_what_it_does(case):
    model, stats, _ = case
    layer = stats.layers["0"]
    weight, bias = model[0].weight.detach(), model[0].bias.detach()
    torch.manual_seed(5)
    x = rows(4096)
    with torch.no_grad():
        z = model(x).double()
        q = float(z.sigmoid().mean())
        entropy = -(q * torch.tensor(q).log() + (1 - q) * torch.tensor(1 - q).log()).item()
        for name in ("int8_row", "int8_row_centred", "rowwise_e4m3", "rowwise_e4m3_centred"):
            recipe = recipe_named(name)
            m = centre_of_rows(x) if recipe.centred else None
            y = run_gemm(f"emulated:{name}", x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32, centre=m) + bias
            low = model[1:](y).double()
            p = z.sigmoid()
            actual = (0.5 * p * (1 - p) * (low - z).square()).mean().item() / entropy
            by_pass, by_depth = layer.effects[name].kl(), depth_kl(layer, recipe.output)
            assert by_pass.value == pytest.approx(actual, rel=0.35)
            # Histograms take errors of a weight for independent. Where means dominate, each sample sums up
            # the same ones: one draw, a factor of 2.5 here. Centred there is no such sum.
            assert by_depth == pytest.approx(actual, rel=0.35 if recipe.centred else 0.7)
    assert layer.effects["int8_row_centred"].kl().value < 0.5 * layer.effects["int8_row"].kl().value


def test_planned_converted_and_back(case, tmp_path):
    model, _, report = case
    at_first = report.sites["0/output"].measurements
    assert at_first[CENTRED].errors["sqnr_db"].value > at_first[PLAIN].errors["sqnr_db"].value + 3
    plan = loka.plan(report, loka.Budget(ne=1e-3))
    assert plan.decisions["0/output"].candidate in (CENTRED, "torch_int8:int8_row_centred")
    assert len(plan.centres["0"]) == 24
    report.save(tmp_path / "report.json")
    assert loka.Report.load(tmp_path / "report.json").centres == report.centres
    plan.save(tmp_path / "plan.json")
    plan = loka.Plan.load(tmp_path / "plan.json")
    converted = loka.convert(copy.deepcopy(model), plan)
    x = rows().requires_grad_()
    y = converted[0](x)
    m = torch.tensor(plan.centres["0"])
    low_x = dequantize(quantize(x.detach() - m, recipe_named("int8_row").output[0]))
    low_w = dequantize(quantize(model[0].weight.detach(), recipe_named("int8_row").output[1]))
    expected = low_x @ low_w.t() + m @ model[0].weight.detach().t() + model[0].bias.detach()
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    dy = torch.randn(256, 64)
    y.backward(dy)
    exact = dy.t() @ x.detach()  # with respect to m W^T too: dy^T (x - m) + (sum of dy) m^T
    assert (converted[0].weight.grad - exact).norm() < 0.04 * exact.norm()
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), converted(x), rtol=1e-5, atol=1e-6)
    reverted = loka.revert(converted)
    assert torch.equal(reverted[0](x), model[0](x))


def test_without_means_there_is_nothing_to_centre(case):
    model = model_of()
    stats = probed(model, torch.zeros(24))
    report = loka.measure(stats, device="cpu", candidates=[CENTRED, PLAIN], errors_only=True)
    assert "nothing to centre" in report.sites["0/output"].measurements[CENTRED].unsupported
    assert "0" not in report.centres
    with pytest.raises(NoKernelFits, match="nothing to centre"):
        loka.plan(report, force={"0/output": CENTRED})
    plan = loka.plan(case[2], force={"0/output": CENTRED})
    whole = plan.centres["0"]
    for wrong, there in ((), 0), ((*whole[1:], torch.nan), 23), ((*whole[1:], 1e39), 23), ((*whole, torch.nan), 24):
        told = f"24 numbers to take off.* {len(wrong)} are there, {there} of them finite"
        with pytest.raises(NotConverted, match=told):
            loka.convert(model_of(), replace(plan, centres={"0": wrong}))


def test_means_that_moved_are_seen(case):
    model, stats, report = case
    plan = loka.plan(report, force={"0/output": CENTRED, "*": "hp"})
    assert not drift(plan, probed(copy.deepcopy(model)), before=stats).layers["0"].unsafe
    moved = drift(plan, probed(copy.deepcopy(model), 0.3 * OFFSET), before=stats).layers["0"]
    assert any("means moved from those" in reason for reason in moved.unsafe)
