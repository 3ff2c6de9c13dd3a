import copy
import math
from dataclasses import replace

import pytest
import torch
from effect_models import BATCH, PICKED, Fancy, Tokens, learn, model_of, probed, sample
from sites import convert_layers
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import RECIPES, Cast, Format, Granularity, Recipe, recipe_named
from loka.measurement.predicted_kl import depth_kl, joint_kl, predicted_kl
from loka.probe.model_effects.calls import step_seed
from loka.statistics.effect_casts import CASTS


def picks():
    generator = torch.Generator().manual_seed(step_seed(0, 1))
    return torch.randperm(BATCH, generator=generator)[:PICKED]


def actual(model, path, recipe, *inputs):
    """Mean over the picked samples of 1/2 p (1 - p) dz^2, with the site's output GEMM emulated."""
    low = copy.deepcopy(model)
    convert_layers(low, {path: (f"emulated:{recipe}", "hp", "hp")})
    with torch.no_grad():
        z, changed = model(*inputs).view(BATCH, -1), low(*inputs).view(BATCH, -1)
    p = z.sigmoid()
    terms = (0.5 * p * (1 - p) * (changed - z).square()).sum(dim=1)
    return terms[picks()].double().mean().item()


def predicted(stats, path, recipe):
    return stats.layers[path].effects[recipe].loss().value


@pytest.mark.parametrize(
    "recipe", [name for name, found in RECIPES.items() if found.output and not (found.centred or found.hot)]
)
def test_the_prediction_is_what_quantizing_does(recipe):
    """On the same samples only the curvature of the model between site and logit is left out, of the
    order of the relative error of an output, 3 %; it has a random sign in each sample."""
    model, x = model_of(), sample()
    stats = probed(model, x)
    for path in ("0", "2", "4"):
        assert predicted(stats, path, recipe) == pytest.approx(actual(model, path, recipe, x), rel=0.06)


class Mean(nn.Module):
    """One linear map over 7 rows a sample, and their mean: g is the same in all rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.fc = nn.Linear(24, 1)

    def forward(self, x):
        return self.fc(x).mean(dim=1)


@pytest.mark.parametrize("name", [name for name, casts in CASTS.items() if "_row_" not in casts[0].name])
def test_histograms_hold_the_squared_errors_by_sensitivity(name):
    """Exactly, where their formula is taken at its word: 1e-4 is what float32 sums leave."""
    model, x = Mean(), sample(1, BATCH, 7, 24)
    layer = probed(model, x).layers["fc"]
    with torch.no_grad():
        p = model(x).sigmoid()
        weight = model.fc.weight
        rows = x.reshape(-1, 24)
        low = dequantize(quantize(rows, CASTS[name][0])).view_as(x)
        dw = dequantize(quantize(weight, CASTS[name][1])) - weight
        g = (p * (1 - p)).sqrt() / 7  # [B, 1]
        of_input = ((low - x) * weight).square().sum(dim=(1, 2)) * g[:, 0].square()
        of_weight = (g * x.sum(dim=1)).square() @ dw.square().t()
        terms = 0.5 * (of_input + of_weight[:, 0])[picks()].double().mean().item()
    entropy = layer.effects[name].entropy
    # The weight here is one row of 24 numbers: in INT8, whose thresholds lie in bins, 4 % off.
    exact = 0.1 if CASTS[name][0].format.uniform else 1e-4
    assert depth_kl(layer, CASTS[name]) == pytest.approx(terms / entropy, rel=exact)


def test_histograms_predict_what_recipes_do():
    """In the middle. At one site the errors of a weight, one draw for all samples, may add up or
    cancel: within a factor of two here, as that of a square of a few normal numbers."""
    layers = probed(model_of((13, 256, 256, 128, 1), 1), sample(3)).layers
    ratios = [
        depth_kl(layer, casts) / layer.effects[name].kl().value
        for layer in layers.values()
        for name, casts in CASTS.items()
    ]
    assert all(0.5 < ratio < 2 for ratio in ratios)
    assert 0.85 < sorted(ratios)[len(ratios) // 2] < 1.18


def test_a_recipe_that_was_never_tried():
    cast = Cast(Format.E5M2, Granularity.TENSOR)
    recipe = Recipe(name="mine", output=(cast, cast), grad_input=None, grad_weight=None)
    layer = probed(model_of(), sample()).layers["2"]
    found, tried = predicted_kl(layer, recipe), layer.effects["tensorwise_e4m3"].kl()
    assert 3 < found.value / tried.value < 6  # a bit less of mantissa: four times the squared error
    assert found.low < found.value < found.high
    nothing = Recipe(name="none", output=None, grad_input=None, grad_weight=None)
    assert predicted_kl(layer, nothing) is None
    same = replace(recipe, name="other", output=recipe_named("rowwise_e4m3").output)
    assert predicted_kl(layer, same) == layer.effects["rowwise_e4m3"].kl()


def test_several_sites_together():
    """Inputs with a common part: the weights' errors move all logits alike, and sums that leave that
    out are off by half of the effect or more in most models. What is left is chance and curvature."""
    recipe, paths = recipe_named("tensorwise_e4m3"), ("0", "2", "4", "6")
    with_shifts, without_shifts = [], []
    for seed in range(5):
        model, x = model_of((13, 96, 160, 96, 1), seed), 2 + 0.3 * sample(5)
        layers = probed(model, x).layers
        low = copy.deepcopy(model)
        convert_layers(low, dict.fromkeys(paths, (f"emulated:{recipe.name}", "hp", "hp")))
        with torch.no_grad():
            z, changed = model(x), low(x)
        p = z.sigmoid()
        joint = (0.5 * p * (1 - p) * (changed - z).square())[picks()].double().mean().item()
        joint /= layers["0"].effects[recipe.name].entropy
        together = joint_kl(layers, dict.fromkeys(paths, recipe))
        alone = sum(predicted_kl(layers[path], recipe).value for path in paths)
        with_shifts.append(abs(math.log(together / joint)))
        without_shifts.append(abs(math.log(alone / joint)))
    assert max(with_shifts) < 0.15
    assert sorted(without_shifts)[2] > 0.4


@pytest.mark.parametrize(
    ("lay", "dim"),
    [
        (lambda x: x, 1),
        (lambda x: x.transpose(0, 1), 0),
        (lambda x: x.reshape(-1, 24), 1),
        (lambda x: x.transpose(0, 1).reshape(-1, 24), 0),
    ],
    ids=["batch first", "sequence first", "flattened", "flattened sequence first"],
)
def test_rows_of_a_sample_add_up_before_squaring(lay, dim):
    """Adding the rows' squares instead would miss the weight's error, the same in all seven."""
    model, x = Tokens(lay, dim), sample(1, BATCH, 7, 24)
    stats = probed(model, x)
    for recipe in ("tensorwise_e4m3", "rowwise_e4m3"):
        assert predicted(stats, "fc", recipe) == pytest.approx(actual(model, "fc", recipe, x), rel=0.06)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.fc, self.head = nn.Linear(13, 40), nn.Linear(40, 1)

    def forward(self, x):
        return self.head(self.fc(x).tanh() + self.fc(x * 0.9).tanh())


def test_calls_of_one_layer_add_up_before_squaring():
    model, x = Twice(), sample()
    stats = probed(model, x)
    assert predicted(stats, "fc", "rowwise_e4m3") == pytest.approx(actual(model, "fc", "rowwise_e4m3", x), rel=0.06)


def test_tasks_share_one_backward():
    """Random signs: the mean over 4000 samples against the sum over tasks, within five of its
    standard errors (the error of the weight is the same in all samples, the signs are not)."""
    torch.manual_seed(5)
    model, x = nn.Linear(13, 3), sample(2, 4001, 13)
    effect = probed(model, x, effect_step=4000, logits=lambda z: z).layers[""].effects["rowwise_e4m3"]
    cast = recipe_named("rowwise_e4m3").output[0]
    with torch.no_grad():
        p = model(x).sigmoid()
        low = dequantize(quantize(x, cast)) @ dequantize(quantize(model.weight, cast)).t()
        terms = (0.5 * p * (1 - p) * (low - x @ model.weight.t()).square()).sum(dim=1)
    found = effect.loss()
    error = (found.high / found.value - 1) / 1.96
    assert found.value == pytest.approx(terms.mean().item(), rel=5 * error)
    assert error < 0.05
    assert len(effect.probabilities) == 3


def test_probabilities_out_of_a_sigmoid_are_logits():
    model, x = model_of((13, 96, 1)), sample()
    after = nn.Sequential(*model, nn.Sigmoid())
    ours, theirs = probed(model, x).layers["0"], probed(after, x).layers["0"]
    for recipe in CASTS:
        assert theirs.effects[recipe].total == pytest.approx(ours.effects[recipe].total, rel=1e-4)


class Ended(nn.Module):
    """Two tasks behind one body, and `end` of both their logits [B]."""

    def __init__(self, end):
        super().__init__()
        torch.manual_seed(9)
        self.end, self.body = end, nn.Sequential(nn.Linear(13, 40), nn.SiLU())
        self.click, self.buy = nn.Linear(40, 1), nn.Linear(40, 1)

    def forward(self, x):
        h = self.body(x)
        return self.end(self.click(h).squeeze(1), self.buy(h).squeeze(1))


@pytest.mark.parametrize(
    ("end", "logits"),
    [
        (lambda a, b: a.unsqueeze(1).sigmoid().squeeze(-1), lambda a, b: a),
        (lambda a, b: a.sigmoid().double().clamp(1e-6, 1 - 1e-6), lambda a, b: a),
        (lambda a, b: torch.stack([a, b]).sigmoid().t()[:, :1], lambda a, b: a),
    ],
    ids=["squeezed", "cast and clamped", "sliced"],
)
def test_probabilities_are_seen_through_what_moves_them(end, logits):
    """To 1e-3, what float32 leaves of logit(sigmoid(z)); taken for logits they would be 30 times off."""
    found, expected = (probed(Ended(which), sample()).layers["body.0"].effects for which in (end, logits))
    for recipe in CASTS:
        assert found[recipe].total == pytest.approx(expected[recipe].total, rel=1e-3)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda a, b: 0.9 * a.sigmoid(), "between 0 and 1"),
        (lambda a, b: torch.stack([a, b], 1).softmax(1)[:, 1], "between 0 and 1"),
        (lambda a, b: torch.cat([a[:9].sigmoid(), b[9:]]), "some do not"),
        (lambda a, b: torch.stack([a, b], 1), "2 tasks, classes or features"),
    ],
    ids=["scaled", "softmax", "half", "columns"],
)
def test_what_may_be_something_else_is_not_taken_for_logits(end, reason):
    layer = probed(Ended(end), sample()).layers["body.0"]
    assert not layer.effects
    assert reason in layer.no_effect
    assert "logits=" in layer.no_effect
    told = probed(Ended(end), sample(), logits=lambda output: output).layers["body.0"]
    assert told.effects  # where the program says so


def test_heads_that_the_logits_do_not_show_are_not_free():
    layers = probed(Ended(lambda a, b: {"a": a, "b": b}), sample(), logits=lambda out: out["a"]).layers
    assert layers["click"].effects
    assert not layers["buy"].effects
    assert layers["buy"].no_effect == "no gradient of these logits reaches its output"


def test_a_row_that_is_not_finite_costs_itself_alone():
    model, x = model_of((13, 96, 1)), sample()
    x[picks()[7]] = math.nan
    for layer in probed(model, x).layers.values():
        effect = layer.effects["rowwise_e4m3"]
        assert effect.count == PICKED - 1
        assert 0 < effect.loss().value < math.inf
    for layer in probed(model, torch.full_like(x, math.nan)).layers.values():
        assert layer.no_effect == "no sample that was picked has finite logits"


class Normed(nn.Module):
    """A checkpoint recomputes a BatchNorm, and a buffer that forward replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first, self.head = nn.Linear(13, 16), nn.Linear(16, 1)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(()))

    def body(self, h):
        self.seen = self.seen + 1
        return self.norm(h).relu()

    def forward(self, x):
        return self.head(checkpoint(self.body, self.first(x), use_reentrant=False))


def test_buffers_move_as_often_as_without_a_probe():
    plain, watched = Normed(), Normed()
    expected = learn(plain, out=lambda z: z)
    with loka.Probe(watched, every=1) as probe:
        found = learn(watched, out=lambda z: z)
    assert probe.stats().layers["head"].effects
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    state = watched.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())


def test_effects_that_are_no_longer_seen_fade_and_go():
    model, x = model_of((13, 8, 1)), sample(0, 65, 13)
    blind = False

    def logits(output):
        if blind:
            raise KeyError("click")
        return output

    options = {"every": 1, "effect_samples": 128, "effect_step": 64, "logits": logits}
    with loka.Probe(model, **options) as probe:
        for _ in range(3):
            model(x)
        blind = True
        model(x)
    old = probe.stats().layers["0"]
    assert old.effects["rowwise_e4m3"].count == 64
    assert "KeyError" in old.no_effect
    assert "latest" in old.no_effect
    again = probed(model, x, resume=probe.stats(), **options).layers["0"]
    assert not again.effects
    assert again.no_effect.startswith("KeyError")
    blind = False
    fresh = probed(model, x, resume=probe.stats(), **options).layers["0"]
    assert fresh.effects["rowwise_e4m3"].count == 128
    assert not fresh.no_effect


def test_a_models_own_way_to_its_logits():
    stats = probed(Fancy(), sample(), logits=lambda output: output["click"])
    assert stats.layers["body.0"].effects["rowwise_e4m3"].count == PICKED
    reason = probed(Fancy(), sample()).layers["body.0"].no_effect
    assert "returns dict" in reason
    assert "logits=" in reason
