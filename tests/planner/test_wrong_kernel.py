from dataclasses import replace

import pytest
import torch
from models import odd_mlp, stats_of
from planted import broken, plant  # noqa: F401  (a fixture)

import loka
from loka.core.exceptions import WrongResults
from loka.kernels.gemm.adapters.emulated import EMULATED
from loka.measurement import Settings
from loka.nn import sites_of

WRONG = broken(EMULATED, lambda a, b: (replace(a, scale=a.scale.roll(1, dims=0)), b), name="planted")
RIGHT, PLANTED = "emulated:rowwise_e4m3", "planted:rowwise_e4m3"


def measured(model, *names):
    stats = stats_of(model, torch.randn(64, 13))
    return loka.measure(stats, device="cpu", candidates=list(names), settings=Settings(max_draws=4))


def test_measure_reports_the_evidence_and_plan_never_chooses_it(plant):  # noqa: F811
    plant(WRONG)
    report = measured(odd_mlp(), PLANTED, RIGHT)
    for site in report.sites.values():
        assert "self-check: M=" in site.measurements[PLANTED].unsupported
        assert not site.measurements[PLANTED].errors
    for budget in (loka.Budget(), loka.Budget(min_sqnr_db=None, keep_prediction=False)):
        decisions = loka.plan(report, budget).decisions.values()
        assert RIGHT in {decision.candidate for decision in decisions}
        assert all(decision.candidate != PLANTED for decision in decisions)
        assert any("outside the bound" in decision.rejected.get(PLANTED, "") for decision in decisions)


def test_convert_refuses_a_wrong_kernel_and_changes_nothing(plant):  # noqa: F811
    torch.manual_seed(0)
    model = odd_mlp()
    report = measured(model, RIGHT)
    plant(WRONG)
    plan = loka.plan(report, force={"3/*": PLANTED})
    with pytest.raises(WrongResults) as caught:
        loka.convert(model, plan)
    message = str(caught.value)
    assert len(caught.value.why) == 3
    assert "planted:rowwise_e4m3 for grad_input on cpu (planned at 3/grad_input): M=132" in message
    assert "each row is off by a factor of its own: scales of A" in message
    assert "Way out: plan again with those sites forced to 'hp'" in message
    assert not sites_of(model)
    plant(replace(EMULATED, name="planted"))
    assert loka.convert(model, plan) is model
