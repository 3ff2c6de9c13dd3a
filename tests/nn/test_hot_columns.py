import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import loka
from loka.compiler.joint_sites import unjoined
from loka.core.exceptions import NoKernelFits, NotConverted, ServeRefused
from loka.core.recipe import Gemm, recipe_named
from loka.core.records.drift import drift
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs, run_gemm
from loka.measurement.operands import hot_of_input
from loka.measurement.predicted_kl import depth_kl
from loka.measurement.settings import Settings
from loka.serve.sites import scale_source
from loka.train.automatic.joint_effect import joint_effect

NAMES = ("rowwise_e4m3", "rowwise_e4m3_hot32", "rowwise_e4m3_centred_hot32")
PLAIN, HOT, BOTH = (f"emulated:{name}" for name in NAMES)
TORCH = HOT if torch.__version__ < "2.13" else f"torch:{NAMES[1]}"
PLANTED = torch.arange(1, 96, 3)  # 32 of 96 columns


def rows(count=256, hot=PLANTED):
    x = torch.randn(count, 96)
    x[:, hot] = 8 * x[:, hot] + 4
    return x / 8


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 80), nn.ReLU(), nn.Linear(80, 48), nn.Tanh(), nn.Linear(48, 1))


def probed(hot=PLANTED, mean=0.0):
    model = model_of()
    with loka.Probe(model, every=1) as probe:
        for _ in range(8):
            x = rows(hot=hot)
            x[:, PLANTED - 1] += mean
            nn.functional.softplus(-model(x)).mean().backward()
    return probe.stats()


@pytest.fixture(scope="module")
def case():
    stats, names, fine = probed(), [HOT, PLAIN, TORCH, BOTH], Settings(max_draws=4)
    report = loka.measure(stats, device="cpu", candidates=names, errors_only=True, settings=fine)
    return model_of(), stats, report


def test_the_probe_finds_them(case):
    _, stats, report = case
    for name in (HOT, BOTH):
        columns = hot_of_input(stats.layers["0"], name)
        assert columns.tolist() == PLANTED.tolist() == list(report.hot_columns["0"][name.split(":")[1]])
    assert hot_of_input(stats.layers["0"], PLAIN) is None
    layer = probed(mean=8.0).layers["0"]  # makes others hot, until they are centred
    found = [hot_of_input(layer, name).tolist() for name in (HOT, BOTH)]
    assert found == [(PLANTED - 1).tolist(), PLANTED.tolist()]


@pytest.mark.parametrize("path", ["0", "2"])
def test_what_the_probe_predicts_is_what_it_does(case, path):
    model, stats, report = case
    torch.manual_seed(5)
    x, actual = rows(4096), []
    for name in NAMES:
        plan = loka.plan(report, force={f"{path}/output": f"emulated:{name}", "*": "hp"})
        effect = joint_effect(model, plan, [x], forward=lambda model, x: model(x))
        actual.append(effect.measured.value)
        assert effect.predicted.value == pytest.approx(actual[-1], rel=0.35)
        assert depth_kl(stats.layers[path], recipe_named(name).output) == pytest.approx(actual[-1], rel=0.7)
    assert actual[1] < (0.1 if path == "0" else 0.8) * actual[0]


@pytest.mark.slow
def test_planned_converted_and_back(case, tmp_path):
    model, _, report = case
    at_first = report.sites["0/output"].measurements
    assert at_first[HOT].errors["sqnr_db"].value > at_first[PLAIN].errors["sqnr_db"].value + 6
    assert "_hot32" in loka.plan(report, loka.Budget(ne=1e-3)).decisions["0/output"].candidate
    chosen = {"0/output": TORCH, "2/output": BOTH, "*/output": "hp"}
    report.save(tmp_path / "report")
    loka.plan(loka.Report.load(tmp_path / "report"), force=chosen).save(tmp_path / "plan")
    plan = loka.Plan.load(tmp_path / "plan")
    converted = loka.convert(copy.deepcopy(model), plan)
    x = rows()
    reset_kernel_runs()
    y = converted[0](x)
    assert kernel_runs() == {(TORCH, "output"): 1}
    hot, weight = torch.tensor(plan.hot_columns["0"]), model[0].weight.detach()
    twin = run_gemm(HOT, x, weight, gemm=Gemm.OUTPUT, dtype=torch.float32, hot=hot)
    assert torch.allclose(y, twin + model[0].bias, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu"):
        assert converted(x).dtype is torch.bfloat16
    plain = loka.convert(copy.deepcopy(model), loka.plan(report, force={**chosen, "0/output": PLAIN}))
    grads = []
    for each in (converted, plain):
        given = x.clone().requires_grad_()
        (3 * each[0](given)).sum().backward()
        grads.append((given.grad, each[0].weight.grad))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*grads, strict=True))
    compiled = torch.compile(converted, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), converted(x), rtol=1e-5, atol=1e-6)
    assert f"{HOT} is none of" in unjoined(HOT)


@pytest.mark.parametrize("columns", [(), range(31), (0, *range(31)), range(65, 97), range(-1, 31)])
def test_a_plan_without_its_columns_is_refused(case, columns):
    plan = loka.plan(case[2], force={"0/output": HOT, "*": "hp"})
    model = model_of()
    with pytest.raises(NotConverted, match=f"needs 32 of its 96 columns.* are there among {len(columns)}"):
        loka.convert(model, replace(plan, hot_columns={"0": tuple(columns)}))
    assert "forward" not in model[0].__dict__


def test_refused_where_nothing_tells_and_where_it_is_served(case):
    layer = case[1].layers["0"]
    given = layer.operands["input"]
    tensors = {name: table for name, table in given.tensors.items() if "effect_columns" not in name}
    layer = replace(layer, operands={**layer.operands, "input": replace(given, tensors=tensors)}, effects={})
    stats = replace(case[1], layers={"0": layer})
    report = loka.measure(stats, device="cpu", candidates=[HOT, PLAIN], errors_only=True)
    assert not report.hot_columns
    with pytest.raises(NoKernelFits, match="which columns are hot is not known"):
        loka.plan(report, force={"0/output": HOT})
    with pytest.raises(ServeRefused, match="multiplies residuals of its operands"):
        scale_source(HOT)


def test_columns_that_moved_are_seen(case):
    _, stats, report = case
    for name in (HOT, BOTH):
        plan = loka.plan(report, force={"0/output": name, "*": "hp"})
        assert not drift(plan, probed(), before=stats).layers["0"].unsafe
        moved = drift(plan, probed(PLANTED - 1), before=stats).layers["0"]
        assert any("its hot columns are others now" in reason for reason in moved.unsafe)
