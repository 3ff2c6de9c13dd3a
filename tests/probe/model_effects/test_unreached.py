"""Sites that the logits do not reach: cat and stack send them gradients of 0, where a dict sends none."""

from dataclasses import replace

import pytest
import torch
from effect_models import PICKED, probed, sample
from torch import nn
from torch.nn import functional

import loka
from loka.core.numerics.effect import OLD
from loka.probe import renew_effects

REASON = "no gradient of these logits reaches its output"
RECIPE = "rowwise_e4m3"
JOINS = {"cat": lambda a, b: torch.cat([a, b], 1), "stack": lambda a, b: torch.stack([a, b], 1).squeeze(2)}


class Towers(nn.Module):
    def __init__(self, join=JOINS["cat"]):
        super().__init__()
        torch.manual_seed(0)
        self.join, self.body = join, nn.Sequential(nn.Linear(13, 32), nn.SiLU())
        self.click, self.buy = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.join(self.click(h), self.buy(h))


class Expert(nn.Module):
    """An expert that only rows with a positive first feature go to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.expert = nn.Linear(13, 1), nn.Linear(13, 1)

    def forward(self, x):
        return self.body(x) + torch.where(x[:, :1] > 0, self.expert(x), 0)


def first(output):
    return output[:, 0]


def dark(x):
    """The same rows, none of which goes to the expert."""
    return torch.cat([-x[:, :1].abs() - 0.1, x[:, 1:]], 1)


def steps_of(model, *batches, **options):
    with loka.Probe(model, every=1, effect_step=PICKED, **options) as probe:
        for x in batches:
            model(x)
    return probe.stats()


@pytest.mark.parametrize("join", JOINS.values(), ids=JOINS)
def test_a_tower_that_the_logits_leave_out_is_not_free(join):
    model = Towers(join)
    stats = probed(model, sample(), logits=first, steps=2)
    fresh = renew_effects(model, stats, [sample(1), sample(2)], logits=first)
    for layers in (stats.layers, fresh.layers):
        assert layers["click"].effects[RECIPE].total > 0
        assert not layers["buy"].effects
        assert layers["buy"].no_effect == REASON
        assert not any(name.startswith("effect_") for name in layers["buy"].operands["weight"].tensors)
    report = loka.measure(fresh, device="cpu", candidates=[f"emulated:{RECIPE}"])
    plan = loka.plan(report, loka.Budget(ne=1.0, min_sqnr_db=None, keep_prediction=False))
    assert set(plan.output_recipes) == {"body.0", "click"}
    assert any("buy" in note and REASON in note for note in plan.notes)


def test_the_gradient_of_training_leaves_it_out_too():
    """Where the output shows no logits, two columns here."""
    model = Towers()
    with loka.Probe(model, every=1, base_rate=0.3) as probe:
        x = sample()
        functional.binary_cross_entropy_with_logits(model(x)[:, 0], (x[:, 0] > 0).float()).backward()
    layers = probe.stats().layers
    assert layers["click"].effects[RECIPE].total > 0
    assert not layers["buy"].effects
    assert layers["buy"].no_effect == REASON


def test_of_tasks_all_are_asked_together():
    model = Towers()
    stats = probed(model, sample(), logits=first)
    found = renew_effects(model, stats, [sample(1), sample(2)], tasks=("click", "buy"))
    for path in ("click", "buy"):
        assert found.layers[path].effects[RECIPE].total > 0
        other = "buy" if path == "click" else "click"
        assert found.layers[path].effects_by_part[other][RECIPE].total == 0


def test_a_step_whose_rows_pass_a_site_by_counts_as_zeros():
    model, x = Expert(), sample()
    alone = steps_of(model, x).layers["expert"].effects[RECIPE]
    after = steps_of(model, x, dark(x)).layers["expert"]
    assert after.effects[RECIPE].count == 2 * PICKED
    assert after.effects[RECIPE].total == alone.total > 0
    assert not after.no_effect
    before = steps_of(model, dark(x), x).layers["expert"]
    assert before.effects[RECIPE].count == 2 * PICKED
    assert before.effects[RECIPE].total > 0
    never = steps_of(model, dark(x), dark(x)).layers["expert"]
    assert not never.effects
    assert never.no_effect == REASON


def test_of_fresh_rows_too():
    model = Expert()
    stats = probed(model, sample())
    lit, without = sample(1), dark(sample(2))
    alone = renew_effects(model, stats, [lit], per_batch=PICKED).layers["expert"].effects[RECIPE]
    for part in ([lit, without], [without, lit]):
        found = renew_effects(model, stats, part, per_batch=PICKED).layers["expert"]
        assert found.effects[RECIPE].count == 2 * PICKED
        assert found.effects[RECIPE].total == pytest.approx(alone.total, rel=0.5)
        assert not found.no_effect
    none = renew_effects(model, steps_of(model, dark(sample())), [without]).layers["expert"]
    assert not none.effects
    assert none.no_effect == REASON


def test_what_earlier_versions_took_for_free_is_not_after_a_resume():
    model = Towers()
    stats = probed(model, sample(), logits=lambda output: output)
    free = {name: replace(e, total=0.0, squares=0.0, cubes=0.0) for name, e in stats.layers["buy"].effects.items()}
    old = replace(stats, layers={**stats.layers, "buy": replace(stats.layers["buy"], effects=free)})
    for probe in (loka.Probe(model, resume=old, logits=first), loka.Probe(model, resume=old, every=1, logits=first)):
        with probe:
            model(sample(3))
        assert not probe.stats().layers["buy"].effects


def test_renewed_effects_of_a_layer_that_mixes_rows_in_training_fade():
    """A BatchNorm mixes no rows in eval mode, by which they were renewed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    batches = torch.randn(4, 256, 13)
    renewed = renew_effects(model, probed(model, batches[0]), batches)
    count = renewed.layers["0"].effects[RECIPE].count
    layer = probed(model, batches[0], resume=renewed, effect_step=64).layers["0"]
    assert layer.effects[RECIPE].count == count - 64
    assert layer.no_effect.startswith(f"{OLD}its rows mix samples")
