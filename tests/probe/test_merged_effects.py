"""Effects by means and hot columns of a part are not those of the merged statistics, which a plan is made from."""

import itertools
from dataclasses import replace

import pytest
import torch
from models import odd_mlp
from probed_models import probed
from ranks import on_ranks
from torch import nn

import loka
from loka.core.exceptions import PlanMismatch
from loka.core.numerics.effect import NO_PROMISE, OTHER_PARTS
from loka.core.recipe import RECIPES
from loka.core.records.drift import drift
from loka.core.records.parts import Part
from loka.core.records.stats_bytes import from_bytes, to_bytes
from loka.measurement.predicted_kl import predicted_kl
from loka.probe import gather_renewed, gather_stats, merge_stats, renew_effects
from loka.statistics.effect_casts import CASTS, LEARNING
from loka.statistics.effect_depths import is_centred
from loka.train.automatic.joint_effect import joint_effect

K, WORLD = 64, 2
PLAIN = "int8_row"
LEARNT = ("int8_row_centred", "rowwise_e4m3_centred", "rowwise_e4m3_hot32", "rowwise_e4m3_centred_hot32")
SHARE = 0.3


def tower():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 96), nn.ReLU(), nn.Linear(96, 1))
    with torch.no_grad():
        model[0].weight[:, 20:60] *= 0.1
        model[2].weight *= 5
    return model


def rows(part, seed, count=256):
    """Of one half of the traffic: 40 columns stand 20 deviations apart in the other."""
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(10 * seed + part))
    x[:, 20:60] += 2 + 20 * part
    return x


def window(model, part, seed, *, renewed=False, steps=6):
    with loka.Probe(model, every=1, seed=part) as probe:
        for step in range(steps):
            nn.functional.softplus(-model(rows(part, seed + step))).mean().backward()
    return fresh(model, probe.stats(), part) if renewed else probe.stats()


def fresh(model, stats, part):
    return renew_effects(model, stats, [rows(part, 500 + at) for at in range(6)], base_rate=SHARE)


def one_rank(rank, folder):
    model = tower()
    own = window(model, rank, 0)
    found = gather_renewed(own, lambda stats: fresh(model, stats, rank))
    nothing = gather_renewed(own, lambda stats: stats)  # no row is left to renew from
    own_means = gather_stats(fresh(model, own, rank))
    every = {"shared": found, "own": own_means, "before": gather_stats(own), "none": nothing}
    return {name: to_bytes(stats) for name, stats in every.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    found = on_ranks(one_rank, WORLD, tmp_path_factory.mktemp("ranks"))
    assert found[0] == found[1], "the same bytes on every rank"
    return {name: from_bytes(stats) for name, stats in found[0].items()}


def really(model, stats, recipe):
    names = ["hp", f"emulated:{recipe}"]
    report = loka.measure(stats, device="cpu", candidates=names, errors_only=True)
    plan = loka.plan(report, force={"0/output": names[1], "*": "hp"})
    held = [torch.cat([rows(part, 900 + at) for part in range(WORLD)]) for at in range(8)]
    return joint_effect(model, plan, held, forward=lambda model, x: model(x), base_rate=SHARE).measured.value


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [PLAIN, *LEARNT])
def test_ranks_that_renew_by_what_they_share_tell_what_the_plan_loses(ranks, recipe):
    told = predicted_kl(ranks["shared"].layers["0"], RECIPES[recipe]).value
    assert 1 / 1.5 < told / really(tower(), ranks["shared"], recipe) < 1.5


def test_their_statistics_are_those_before_and_their_effects_of_all_rows(ranks):
    shared, before = ranks["shared"], ranks["before"]
    assert (shared.steps, shared.sampled_steps) == (before.steps, before.sampled_steps)
    for path, layer in shared.layers.items():
        assert not layer.no_effect
        assert {effect.count for effect in layer.effects.values()} == {WORLD * 6 * 192}
        for operand, found in before.layers[path].operands.items():
            same = [name for name in found.tensors if not name.startswith("effect_depth_")]
            assert all(torch.equal(layer.operands[operand].tensors[name], found.tensors[name]) for name in same)


def test_where_nothing_was_renewed_effects_count_once(ranks):
    for path, layer in ranks["before"].layers.items():
        assert ranks["none"].layers[path].effects == layer.effects
        assert ranks["none"].layers[path].no_effect == layer.no_effect
        assert CASTS.keys() - LEARNING <= layer.effects.keys()


@pytest.mark.parametrize("which", ["own", "before"])
def test_effects_by_each_part_s_own_means_go(ranks, which):
    """They were 20 to 45 times too small."""
    layer = ranks[which].layers["0"]
    assert layer.no_effect == OTHER_PARTS
    assert layer.effects.keys() == CASTS.keys() - LEARNING
    assert not any(is_centred(name) for found in layer.operands.values() for name in found.tensors)
    assert all(predicted_kl(layer, RECIPES[recipe]) is None for recipe in LEARNT)
    assert 1 / 1.5 < predicted_kl(layer, RECIPES[PLAIN]).value / really(tower(), ranks[which], PLAIN) < 1.5


def test_a_plan_says_why_and_drift_knows_the_others():
    model = tower()
    both = merge_stats([window(model, part, 0, renewed=True) for part in range(WORLD)])
    names = ["hp", *(f"emulated:{recipe}" for recipe in (PLAIN, *LEARNT))]
    report = loka.measure(both, device="cpu", candidates=names, errors_only=True)
    plan = loka.plan(report, loka.Budget(ne=1.0, min_sqnr_db=None))
    assert plan.decisions["0/output"].candidate == f"emulated:{PLAIN}"
    assert "KL/H is not known" in plan.decisions["0/output"].rejected["emulated:int8_row_centred"]
    assert any(OTHER_PARTS in note for note in plan.notes)
    assert not drift(plan, both).unknown
    centred = loka.plan(report, force={"0/output": "emulated:int8_row_centred", "*": "hp"})
    assert OTHER_PARTS in drift(centred, both).layers["0"].unknown


def test_merged_then_renewed_knows_them():
    model = tower()
    both = merge_stats([window(model, part, 0) for part in range(WORLD)])
    mixed = [torch.cat([rows(part, 500 + at) for part in range(WORLD)]) for at in range(6)]
    found = renew_effects(model, both, mixed, base_rate=SHARE)
    for recipe in LEARNT:
        told = predicted_kl(found.layers["0"], RECIPES[recipe]).value
        assert 1 / 1.5 < told / really(model, found, recipe) < 1.5


def test_effects_by_the_same_means_and_columns_stay():
    """Nothing to centre, and of fewer columns than a hot recipe takes there is one choice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 1))
    parts = []
    for seed in range(2):
        with loka.Probe(model, every=1, seed=seed) as probe:
            model(torch.randn(512, 24)).sum().backward()
        parts.append(probe.stats())
    layer = merge_stats(parts).layers["0"]
    assert layer.effects.keys() == CASTS.keys()
    assert not layer.no_effect


def test_effects_that_a_part_lost_stay_lost_in_any_order():
    """One window of few rows has means of its own. Merged first, it took its neighbour's effects of centred recipes
    along; the third window's stayed, of a third of the rows, where another order left none."""
    torch.manual_seed(0)
    model, parts = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 1)), []
    for seed, (size, mean) in enumerate([(32, 1.0), (512, 0.0), (512, 0.0)]):
        with loka.Probe(model, every=1, seed=seed) as probe:
            model(torch.randn(size, 24) + mean).sum().backward()
        parts.append(probe.stats())
    for order in itertools.permutations(parts):
        layer = merge_stats(order).layers["0"]
        assert layer.effects.keys() == {name for name, (left, _) in CASTS.items() if not left.centred}
        assert layer.no_effect.startswith(OTHER_PARTS)


def test_a_part_that_refuses_any_promise_refuses_it_of_both():
    """The other's effects were said to be those of all rows."""
    model = tower()
    good = window(model, 0, 0, renewed=True)
    good = replace(good, parts={"click": Part(task="click")}, alike={"0": {"2": 0.5}})
    with torch.no_grad():
        model[2].weight *= 1e6
    refused = window(model, 1, 50)
    assert all(layer.no_effect.startswith(NO_PROMISE) and not layer.effects for layer in refused.layers.values())
    third = window(tower(), 0, 90)
    for parts in ([good, refused], [refused, good], [good, refused, third]):
        both = merge_stats(parts)
        assert not both.parts
        assert not both.alike
        for layer in both.layers.values():
            assert not layer.effects
            assert layer.no_effect.startswith(f"{NO_PROMISE}the logits are saturated")
            assert layer.no_effect.count("leave it out, or renew_effects after merging") == 1


@pytest.mark.parametrize("order", [1, -1])
def test_statistics_for_inference_do_not_merge_with_those_of_training(order):
    """The gradients' GEMMs were measured on the rows of requests and, where inference came first, without the time that
    quantizing weights takes."""
    models = odd_mlp(), odd_mlp()
    training, later = (probed(model, 1) for model in models)
    with pytest.raises(PlanMismatch, match=r"quantizes its weight (once|in each call)"):
        merge_stats([training, later.for_inference(batch=4)][::order])
    both = merge_stats([training.for_inference(), later.for_inference()])
    assert all(layer.kept_weight for layer in both.layers.values())
