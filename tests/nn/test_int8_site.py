import copy

import pytest
import torch
from torch import nn

import loka
from loka.core.recipe import Gemm
from loka.kernels.gemm.run import kernel_runs, reset_kernel_runs, run_gemm
from loka.nn.site import health_of

INT8, FP8 = "emulated:int8_row", "emulated:rowwise_e4m3"


def probed(steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 1))
    x = torch.randn(256, 24)
    with loka.Probe(model, every=1) as probe:
        for _ in range(steps):
            model.zero_grad()
            nn.functional.softplus(-model(torch.randn(256, 24))).mean().backward()
    model.zero_grad()
    return model, probe, x


@pytest.fixture(scope="module")
def case():
    model, probe, x = probed()
    settings = loka.measurement.settings.Settings(max_draws=4)
    names = [INT8, FP8, "torch_int8:int8_row"]
    report = loka.measure(probe.stats(), device="cpu", candidates=names, errors_only=True, settings=settings)
    return model, report, x


def test_the_budget_mixes_types_by_site(case):
    """Nothing is timed here: INT8 wins `output` by its KL/H; gradients, which have none, are in e4m3."""
    _, report, _ = case
    plan = loka.plan(report, loka.Budget(ne=1e-3))
    chosen = {name: decision.candidate for name, decision in plan.decisions.items()}
    assert chosen["2/output"] in (INT8, "torch_int8:int8_row")
    assert chosen["2/grad_input"] == chosen["2/grad_weight"] == FP8
    assert "costs more: KL/H" in plan.decisions["2/output"].rejected[FP8]
    assert plan.decisions["2/grad_input"].rejected[INT8] == "int8_row does not define grad_input"
    assert "FP8 or INT8" in plan.summary()
    assert plan.output_recipes == {"0": "int8_row", "2": "int8_row"}
    assert plan.kl is not None
    back = loka.plan(report, loka.Budget(ne=1e-3), force={"*/output": FP8})  # the same report: nothing probed
    assert back.decisions["2/output"].candidate == FP8
    assert back.kl.value > 2 * plan.kl.value


@pytest.mark.parametrize("int8", [INT8, "torch_int8:int8_row"])
def test_forward_is_int8_and_backward_is_that_of_fp8(case, int8):
    model, report, x = case
    force = {"*/output": int8, "4": "hp", "*": FP8}
    mixed = loka.convert(copy.deepcopy(model), loka.plan(report, force={"4": "hp", **force}))
    reset_kernel_runs()
    y = mixed[0](x)
    twin = run_gemm(INT8, x, model[0].weight, gemm=Gemm.OUTPUT, dtype=torch.float32) + model[0].bias
    assert torch.equal(y, twin)
    dy = torch.randn(256, 64)
    y.backward(dy)
    grad = run_gemm(FP8, dy.t(), x.t(), gemm=Gemm.GRAD_WEIGHT, dtype=torch.float32)
    assert torch.equal(mixed[0].weight.grad, grad)
    assert kernel_runs()[int8, "output"] >= 1
    assert kernel_runs()[FP8, "grad_weight"] >= 1
    bad = x.clone()
    bad[3, 4] = torch.nan
    with torch.no_grad():
        assert bool(mixed[0](bad)[3].isnan().all())
    assert health_of(mixed)["0/output"]["bad_a"]


def test_compiled_beside_fp8_that_no_region_writes_it_runs_by_itself_and_says_why(case):
    model, report, x = case
    plan = loka.plan(report, force={"4": "hp", "*/output": INT8, "*": FP8})
    eager = loka.convert(copy.deepcopy(model), plan)
    converted = loka.convert(copy.deepcopy(model), plan)
    eager(x).sum().backward()
    torch.compile(converted, fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert torch.allclose(converted[2].weight.grad, eager[2].weight.grad, rtol=1e-5, atol=1e-7)
    assert loka.compiler.joint_sites.unjoined(INT8) is None
    assert "rowwise_e4m3 is none of" in str(loka.compiler.joint_sites.unjoined(FP8))
    assert not loka.regions(converted).applied
