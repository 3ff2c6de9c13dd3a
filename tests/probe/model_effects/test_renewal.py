import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from models import stats_of
from sites import convert_layers
from torch import nn
from torch.nn import functional

import loka
from loka.core.exceptions import DataRefused, NotConverted, PlanMismatch
from loka.core.numerics.effect import NO_PROMISE, OLD, Effect
from loka.core.numerics.label_rate import LabelRate
from loka.core.recipe import RECIPES
from loka.core.storage.codec import decode, encode
from loka.measurement.predicted_kl import depth_kl, predicted_kl
from loka.probe import renew_effects
from loka.probe.model_effects.error_projection import effects_of
from loka.probe.model_effects.movement import Horizon, added_variance
from loka.statistics.effect_casts import CASTS
from loka.train.automatic.joint_effect import emulated

RECIPE = "rowwise_e4m3"
BATCH = 96
ROWS = 8 * (BATCH - 1)  # fewer than the default takes; a row of each batch is left out


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2))
        self.stacked = nn.Parameter(torch.randn(2, 32, 32) * 0.2)
        self.twice = nn.Linear(32, 32)
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        x = self.first(x)
        for weight in self.stacked:
            x = torch.tanh(functional.linear(x, weight))
        return self.out(self.twice(torch.relu(self.twice(x))))


def batches(count=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, BATCH, 8, generator=generator))


@pytest.fixture(scope="module")
def once_trained():
    torch.manual_seed(0)
    model = Foreign()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with loka.Probe(model, every=2, logits=lambda z: z) as probe:
        for x in batches(20, seed=0):
            labels = (x[:, :1] > 1).float()
            functional.binary_cross_entropy_with_logits(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    return (model, probe.stats()), torch.get_rng_state()


@pytest.fixture
def trained(once_trained):
    found, random = copy.deepcopy(once_trained)
    torch.set_rng_state(random)
    return found


def renewed(model, stats, **options):
    return renew_effects(model, stats, batches(), **{"logits": lambda z: z, **options})


def test_a_frozen_base_of_adapters_has_effects_as_if_it_were_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))
    plain = renew_effects(model, stats_of(model, batches()[0]), batches()).layers["0"].effects
    model[0].requires_grad_(False)
    found = renew_effects(model, stats_of(model, batches()[0]), batches()).layers["0"]
    assert found.effects == plain
    assert not found.no_effect
    assert not model[0].weight.requires_grad
    with torch.inference_mode():
        loaded = nn.Parameter(model[0].weight.clone(), requires_grad=False)
    model[0].weight = loaded  # of inference, which takes no gradient; the bias does
    assert renew_effects(model, stats_of(model, batches()[0]), batches()).layers["0"].effects == plain


def test_every_site_has_effects_of_the_model_as_it_is(trained):
    """Also before a BatchNorm, which in training mixes rows; against what emulating the site does."""
    model, stats = trained
    assert not stats.layers["first.0"].effects, "in training its rows mix"
    found = renewed(model, stats)
    assert set(found.layers) == {"first.0", "stacked.unbind(0)[0]", "stacked.unbind(0)[1]", "twice", "out"}
    model.eval()
    rows = torch.cat(batches(64, seed=5))
    with torch.no_grad():
        z = model(rows).double()
        for path, layer in found.layers.items():
            assert not layer.no_effect
            with emulated(model, {path: f"emulated:{RECIPE}"}, found.model.layers):
                low = model(rows).double()
            kl = (z.sigmoid() * (z - low) + functional.softplus(low) - functional.softplus(z)).mean()
            loss = layer.effects[RECIPE].loss()
            assert layer.effects[RECIPE].count == ROWS
            assert loss.value == pytest.approx(kl.item(), rel=0.3), path
            by_depth = depth_kl(layer, CASTS[RECIPE])
            assert 0.4 < by_depth / layer.effects[RECIPE].kl().value < 2.5  # independent errors, docs/ne.md


@pytest.mark.slow
def test_fading_samples_are_of_models_that_are_gone(trained):
    """A change of the model shows in full, not in the share of the samples that are new."""
    model, stats = trained
    before = renewed(model, stats).layers["out"].effects[RECIPE].loss()
    with torch.no_grad():
        model.out.weight.mul_(0.01)  # and all errors at the logit by as much, which are squared
    after = renewed(model, stats).layers["out"].effects[RECIPE].loss()
    assert after.value < 0.01 * before.value
    again = renewed(model, renewed(model, stats)).layers["out"]
    assert again.effects == renewed(model, stats).layers["out"].effects
    tables = [
        found.operands["input"].tensors["effect_depth_row"] for found in (again, renewed(model, stats).layers["out"])
    ]
    assert torch.equal(*tables), "histograms are replaced too, not added"


def test_nothing_of_the_model_changes(trained):
    model, stats = trained
    model(batches()[0]).sum().backward()
    kept = copy.deepcopy(model.state_dict())
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.first[3].eval()
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()

    def drawing(model, x):
        torch.rand(3)
        model.first[1].num_batches_tracked += 1
        return model(x)

    renewed(model, stats, forward=drawing)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_no_more_batches_are_read_than_the_samples_take(trained):
    model, stats = trained
    endless = itertools.count()
    found = renew_effects(
        model, stats, (batches(1, seed=next(endless))[0] for _ in itertools.count()), samples=100, per_batch=40
    )
    assert next(endless) == 3
    assert found.layers["out"].effects[RECIPE].count == 100


def test_clusters_of_equal_rows_count_once():
    """m rows, each four times: the interval is that of m rows, up to its t."""
    torch.manual_seed(0)
    s = torch.randn(128, 3).exp()
    p = torch.full((128, 1), 0.3)
    (alone,), (copied,) = (
        effects_of([s], p, None),
        effects_of([s.repeat(4, 1)], p.repeat(4, 1), None, torch.arange(128).repeat(4)),
    )
    for one, four in zip(alone, copied, strict=True):
        assert four.loss().value == pytest.approx(one.loss().value)
        assert four.sampling_variance == pytest.approx(one.sampling_variance, rel=0.02)
    (independent,) = effects_of([s.repeat(4, 1)], p.repeat(4, 1), None)
    assert independent[0].sampling_variance < alone[0].sampling_variance / 3


def test_clusters_reach_over_batches(trained):
    model, stats = trained
    x = batches(1)[0]
    same = [x] * 8  # the same users in every batch
    wide = renew_effects(model, stats, same, clusters=lambda batch: torch.arange(BATCH))
    narrow = renew_effects(model, stats, same)
    wide, narrow = (found.layers["out"].effects[RECIPE] for found in (wide, narrow))
    assert wide.samples <= BATCH
    assert wide.kl().high / wide.kl().value > 1.5 * narrow.kl().high / narrow.kl().value - 0.5


def test_clusters_and_weights_that_fit_no_rows(trained):
    """Fractions were all one cluster, and a column of weights was multiplied with all terms."""
    for given in (torch.rand(BATCH), torch.arange(2 * BATCH), None):
        with pytest.raises(DataRefused, match=r"clusters are (fractions|of type NoneType|\[\d+\] for \d+ rows)"):
            renew_effects(*trained, batches(1), clusters=lambda batch, given=given: given)
    with pytest.raises(DataRefused, match=r"weights are \[\d+, 1\] for \d+ rows"):
        renew_effects(*trained, batches(1), weights=lambda batch: torch.ones(BATCH, 1))


def effect(value, *, noise=0.0):
    terms = [value * (1 + noise), value * (1 - noise)] * 128
    return Effect.of(terms, [[0.3]] * len(terms))


def test_movement_widens_by_what_sites_moved_over_the_same_ratio_of_steps():
    earlier = {f"{at}": {RECIPE: effect(1.0)} for at in range(5)}
    now = {f"{at}": {RECIPE: effect(math.exp(0.1 * at))} for at in range(5)}
    horizon = Horizon(earlier=100, now=200, until=400)
    found = added_variance(earlier, now, horizon)
    assert found["0"] == pytest.approx(0.2**2 / 0.455), "one that stood still is one of the middle"
    assert found["4"] == pytest.approx(0.4**2)
    twice = added_variance(earlier, now, replace(horizon, until=800))
    assert twice["4"] == pytest.approx(2 * found["4"])
    assert set(added_variance(earlier, now, replace(horizon, until=200)).values()) == {0.0}


def test_scatter_of_rows_is_no_movement():
    earlier = {"a": {RECIPE: effect(1.0, noise=0.9)}}
    now = {"a": {RECIPE: effect(1.02, noise=0.9)}}
    assert added_variance(earlier, now, Horizon(earlier=1, now=2, until=9)) == {"a": 0.0}
    assert added_variance({}, now, Horizon(earlier=1, now=2, until=9))["a"] > 0, "unknown is not none"


@pytest.mark.slow
def test_a_horizon_widens_the_stated_interval(trained):
    model, stats = trained
    horizon = Horizon.of_probe(stats, until=40)
    assert horizon.now == 20
    assert 0 < horizon.earlier < 20
    still, ahead = renewed(model, stats), renewed(model, stats, horizon=horizon)
    for path in still.layers:
        a, b = (predicted_kl(found.layers[path], RECIPES[RECIPE]) for found in (still, ahead))
        assert b.value == a.value
        assert b.low < a.low
        assert b.high > a.high


def test_the_age_of_fading_samples():
    """Of 8 steps' worth of samples, weighing 1, 7/8, ..: seven sampled steps on average."""
    fading = Effect(count=512, spread=64 / (1 - (7 / 8) ** 2), total=1, squares=1, probabilities=(0.1,))
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(70, 4))
    (layer,) = probe.stats().layers.values()
    stats = replace(probe.stats(), steps=1000, sampled_steps=100, layers={"": replace(layer, effects={RECIPE: fading})})
    assert Horizon.of_probe(stats, until=1).earlier == pytest.approx(1000 - 7 * 10)


@pytest.mark.parametrize(
    ("bias", "rate", "word"),
    [
        (60.0, 0.3, "saturated"),
        pytest.param(-60.0, LabelRate(positives=300, rows=1000), "saturated", marks=pytest.mark.slow),
        (-20.0, None, "base_rate"),
        (0.0, LabelRate(positives=0, rows=1000), "all 1000 labels are negative"),
        pytest.param(0.0, LabelRate(positives=1000, rows=1000), "all 1000 labels are positive", marks=pytest.mark.slow),
        pytest.param(0.0, LabelRate(positives=3, rows=1000), "3 positive labels of 1000", marks=pytest.mark.slow),
        (0.0, LabelRate(positives=0, rows=0), "no labels"),
    ],
)
def test_no_promise(trained, bias, rate, word):
    """Before, such models were told that FP8 is free."""
    model, stats = trained
    if bias:
        with torch.no_grad():
            model.out.bias.fill_(bias)
    for layer in renewed(model, stats, base_rate=rate).layers.values():
        assert not layer.effects
        assert layer.no_effect.startswith(NO_PROMISE)
        assert word in layer.no_effect
        assert not [n for d in layer.operands.values() for n in d.tensors if n.startswith("effect_")]


def test_copies_of_a_row_promise_nothing(trained):
    copies = renew_effects(*trained, [batches(1)[0][:1].expand(BATCH, -1)], logits=lambda z: z)
    assert all("rows have the same logits" in layer.no_effect for layer in copies.layers.values())


@pytest.mark.slow
def test_h_is_that_of_the_labels_and_its_error_widens(trained):
    model, stats = trained
    known = renewed(model, stats, base_rate=0.01).layers["out"].effects[RECIPE]
    counted = renewed(model, stats, base_rate=LabelRate(positives=20, rows=2000)).layers["out"].effects[RECIPE]
    assert counted.kl().value == pytest.approx(known.kl().value)
    assert counted.kl().high > 1.1 * known.kl().high
    assert counted.log_variance == pytest.approx((math.log(99) * 0.01 / counted.entropy) ** 2 * 0.99 / 20)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.out(torch.relu(self.inner(x)))


def test_each_task_has_its_own_rate():
    torch.manual_seed(0)
    model = Tasks()
    stats = stats_of(model, batches(1)[0], torch.sum, logits=lambda z: z)
    click, buy = LabelRate(positives=600, rows=2000), LabelRate(positives=20, rows=2000)

    def known(rate):
        return renewed(model, stats, base_rate=rate).layers["out"].effects[RECIPE]

    def entropy(q):
        return -q * math.log(q) - (1 - q) * math.log1p(-q)

    own, both = known((click, buy)), known(click)
    assert own.entropy == pytest.approx(entropy(0.3) + entropy(0.01))
    assert both.entropy == pytest.approx(2 * entropy(0.3)), "one rate is that of both"
    assert own.loss().value == both.loss().value
    parts = [(entropy(rate.share), rate.log_variance) for rate in (click, buy)]
    wanted = sum(h**2 * v for h, v in parts) / sum(h for h, _ in parts) ** 2
    assert own.log_variance == pytest.approx(wanted)
    assert known((click, 0.01)).entropy == pytest.approx(own.entropy)
    none = renewed(model, stats, base_rate=(click, LabelRate(positives=0, rows=2000)))
    assert "task 1: all 2000 labels are negative" in none.layers["out"].no_effect
    with pytest.raises(ValueError, match="3 shares, and the logits are of 2 tasks"):
        known((0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match="share of labels"):
        known((0.1, 1.5))


@pytest.mark.slow
def test_the_rate_is_that_of_the_renewed_model(trained):
    """One of before is of a model that is gone."""
    model, stats = trained
    assert renewed(model, replace(stats, final_rate=0.0)).final_rate is None
    assert renewed(model, stats, final_rate=0.25).final_rate == 0.25


def test_rows_weigh_as_in_the_loss(trained):
    """A row that weighs twice is as two rows of one cluster; a constant factor changes nothing."""
    torch.manual_seed(0)
    s, signs = torch.randn(400, 3).exp(), torch.ones(400, 1)
    p = torch.rand(400, 1)
    twice = torch.arange(400) % 3 == 0
    weights = torch.where(twice, 2.0, 1.0).double()
    at = torch.cat([torch.arange(400), torch.arange(400)[twice]])
    (weighed,) = effects_of([s], p, signs, weighing=weights / weights.mean())
    (copied,) = effects_of([s[at]], p[at], signs[at], at)
    for one, other in zip(weighed, copied, strict=True):
        assert one.loss().value == pytest.approx(other.loss().value)
        assert one.entropy == pytest.approx(other.entropy)
        assert one.common() == pytest.approx(other.common())
        assert one.skewness == pytest.approx(other.skewness)
        assert one.sampling_variance == pytest.approx(other.sampling_variance, rel=0.02)
    one, other = (effects_of([s[at]], p[at], signs[at], None, weights[at])[0][0] for at in (twice, ~twice))
    assert one.merge(other).kl().high == pytest.approx(weighed[0].kl().high, rel=1e-3)
    model, stats = trained
    plain = renewed(model, stats).layers["out"].effects[RECIPE]
    alike = renewed(model, stats, weights=lambda x: torch.full((len(x),), 3.0)).layers["out"].effects[RECIPE]
    few = renewed(model, stats, weights=lambda x: (x[:, 0] > 0).float()).layers["out"].effects[RECIPE]
    assert alike.kl().high == pytest.approx(plain.kl().high)
    assert few.samples < 0.65 * plain.samples
    for bad in (-1.0, math.nan, 0.0):
        with pytest.raises(ValueError, match="weights of rows"):
            renewed(model, stats, weights=lambda x, bad=bad: torch.full((len(x),), bad))


def test_what_tells_nothing_leaves_the_old_effects(trained):
    model, stats = trained
    found = renew_effects(model, stats, batches(), forward=lambda model, x: {"no": model(x)})
    assert found.layers["out"].effects == stats.layers["out"].effects
    assert found.layers["out"].no_effect.startswith(OLD)
    assert "not logits" in found.layers["out"].no_effect
    assert not found.layers["first.0"].effects
    empty = renew_effects(model, stats, [])
    assert "no rows" in empty.layers["out"].no_effect


def test_records_keep_the_widening(trained):
    model, stats = trained
    wide = renewed(model, stats, base_rate=LabelRate(positives=20, rows=2000)).layers["out"].effects[RECIPE]
    assert decode(Effect, encode(wide)) == wide
    assert "log_variance" not in encode(effect(1.0)), "records without it are as they were"
    merged = wide.merge(replace(wide, log_variance=0.0))
    assert merged.log_variance == pytest.approx(wide.log_variance / 2)


def test_refusals(trained):
    model, stats = trained
    with pytest.raises(PlanMismatch):
        renew_effects(nn.Linear(3, 1), stats, batches())
    with pytest.raises(ValueError, match="base_rate"):
        renewed(model, stats, base_rate=1.5)
    with pytest.raises(ValueError, match="samples"):
        renewed(model, stats, samples=0)
    with pytest.raises(ValueError, match="order of time"):
        Horizon(earlier=3, now=2, until=4)
    convert_layers(model, {"out": (f"emulated:{RECIPE}", "hp", "hp")})
    with pytest.raises(NotConverted, match="revert"):
        renewed(model, stats)


def test_a_parameter_of_the_root_is_seen_in_every_sampled_step(trained):
    """Its views were named in the first one only, so its effects were those of the youngest model."""
    _, stats = trained
    assert stats.layers["stacked.unbind(0)[1]"].calls == stats.sampled_steps == 10
