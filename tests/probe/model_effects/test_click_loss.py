from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from foreign.registry import FOREIGN
from foreign.spec import train_step
from torch import nn

import loka
from loka.measurement import Settings
from loka.probe import merge_stats, renew_effects
from loka.probe.model_effects.click_loss import NOT_CLICKS
from loka.probe.model_effects.logits import NoEffect, logits_of

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
bce = F.binary_cross_entropy_with_logits


def tower(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), *last)


def probed(model, loss, *, rows=64, autocast=False, **more):
    with loka.Probe(model, every=1, **more) as probe:
        for x in torch.randn(2, rows, 16, generator=torch.Generator().manual_seed(1)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(x)[:, 0]
            loss(output.float(), (x[:, 0] > 0.5).float()).backward()
    return probe.stats()


def report(stats):
    quick = Settings(rows=32, min_draws=2, max_draws=2)
    return loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"], settings=quick)


OF_CLICKS = {
    "mean": bce,
    "scaled sum": lambda z, y: 65536.0 * bce(z, y, reduction="sum"),
    "some rows left out": lambda z, y: bce(z[::3], y[::3]),
    "all of one kind": lambda z, y: bce(z, torch.zeros_like(y)),
    "softplus by hand": lambda z, y: (F.softplus(z) - z * y).mean(),
}
OF_NONE = {
    "regression": lambda z, y: F.mse_loss(z, 3 * y),
    "policy ratio": lambda z, y: -(torch.linspace(-1, 1, len(z)) * (z - z.detach()).exp()).mean(),
    "any sum": lambda z, y: z.sum(),
    "rows that weigh": lambda z, y: bce(z, y, weight=torch.linspace(0.1, 2, len(z))),
    "soft labels": lambda z, y: bce(z, 0.3 + 0.4 * torch.rand(len(z))),
}


@pytest.mark.parametrize("name", OF_CLICKS)
@pytest.mark.parametrize("autocast", [False, True])
def test_labels_of_clicks_send_a_gradient_of_one_constant(name, autocast):
    assert not probed(tower(), OF_CLICKS[name], autocast=autocast).not_clicks


@pytest.mark.parametrize("name", OF_NONE)
def test_another_loss_is_told_in_the_plan(name):
    found = report(probed(tower(), OF_NONE[name]))
    assert NOT_CLICKS in str(found)
    assert NOT_CLICKS in loka.plan(found, loka.Budget(ne=1e-3)).notes
    assert NOT_CLICKS not in loka.plan(found, loka.Budget()).notes  # which limits no KL/H
    assert not probed(tower(), OF_NONE[name], logits=lambda output: output).not_clicks
    assert not probed(tower(), OF_NONE[name], rows=7).not_clicks, "too few rows tell nothing"


def test_probabilities_are_judged_by_their_logits():
    model = tower(nn.Sigmoid())
    with torch.no_grad():
        model[2].weight *= 20  # so that p (1 - p) differs from row to row
    assert not probed(model, F.binary_cross_entropy).not_clicks
    assert probed(model, lambda p, y: F.mse_loss(p, torch.rand(len(p)))).not_clicks


def test_rows_whose_gradient_is_rounded_away_say_nothing():
    model = tower()
    with torch.no_grad():
        model[2].bias += 15  # p - 1 is of the size of float32's rounding
    assert not probed(model, bce).not_clicks


def test_one_step_that_tells_is_kept_through_files_merging_and_resuming(tmp_path):
    other, clicks = probed(tower(), F.mse_loss), probed(tower(), bce)
    other.save(tmp_path)
    assert loka.Stats.load(tmp_path).not_clicks == NOT_CLICKS
    assert merge_stats([clicks, other]).not_clicks == NOT_CLICKS
    assert probed(tower(), bce, resume=other).not_clicks == NOT_CLICKS
    assert not probed(tower(), bce, resume=clicks).not_clicks
    rows = [(torch.randn(64, 16),)]
    assert renew_effects(tower(), other, rows).not_clicks
    assert not renew_effects(tower(), other, rows, logits=lambda output: output).not_clicks


def test_a_second_probe_takes_no_extra_backward_for_training():
    model = tower()
    with loka.Probe(model, every=1) as one:
        probed(model, bce)
    assert not one.stats().not_clicks


def test_log_probabilities_and_losses_are_no_logits():
    z, labels = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 1, 2, 0, 1])
    chosen = z.log_softmax(1).gather(1, labels[:, None])
    losses = F.cross_entropy(z, labels, reduction="none"), bce(z, torch.rand(5, 3), reduction="none").mean(1)
    for output in (chosen, chosen[:, 0] * torch.rand(5), -chosen, *losses):
        with pytest.raises(NoEffect, match=r"(Softmax|Loss|Logits) of something, no logits of clicks.*ne=None"):
            logits_of(output, None)
    log_odds = z.log_softmax(1)[:, 1] - z.log_softmax(1)[:, 0]
    assert torch.equal(logits_of(log_odds, None)[:, 0], log_odds)
    assert torch.equal(logits_of(chosen, lambda output: output), chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dit", "actor"])
def test_a_model_without_clicks_is_planned_on_error_alone_and_says_why(name):
    """Every GEMM with a parameter is named; under a limit on KL/H no `output` runs in FP8."""
    FOREIGN[name].skip_without_libraries()
    model = FOREIGN[name].build()
    with loka.Probe(model, every=1) as probe:
        train_step(FOREIGN[name], model)
    stats = probe.stats()
    outputs = {f"{path}/output" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {f"{path}/output" for path in stats.layers} == outputs
    assert stats.coverage.seen == 1.0
    found = report(stats)
    assert all(site in str(found) for site in outputs)
    limited, free = (loka.plan(found, loka.Budget(ne=ne, min_sqnr_db=None)) for ne in (1e-4, None))
    assert {limited.decisions[site].candidate for site in outputs} == {"hp"}
    assert "logits of clicks" in str(limited)
    assert "plan with ne=None" in str(limited)
    assert "hp" not in {free.decisions[site].candidate for site in outputs}
