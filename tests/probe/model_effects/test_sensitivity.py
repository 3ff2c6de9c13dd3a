from __future__ import annotations

import copy
import gc
import itertools
import math
import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import odd_mlp, train_steps
from sites import convert_layers
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.numerics.reference import dequantize, quantize
from loka.core.recipe import RECIPES, Cast, Format, Granularity, Recipe, recipe_named
from loka.measurement.predicted_kl import depth_kl, joint_kl, predicted_kl
from loka.probe.model_effects.sample_rows import batch_of
from loka.probe.model_effects.sensitivity import step_seed
from loka.statistics.effect_casts import CASTS

BATCH, PICKED = 300, 256


def model_of(sides: tuple[int, ...] = (13, 96, 160, 1), seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(sides):
        layers += [nn.Linear(i, o), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def sample(seed: int = 0, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape or (BATCH, 13), generator=generator)
    return x * x.abs()  # heavier tails, so that recipes differ


def probed(model: nn.Module, *inputs: torch.Tensor, steps: int = 1, **options: object) -> loka.Stats:
    options = {"every": 1, "effect_step": PICKED, **options}
    with loka.Probe(model, **options) as probe:
        for _ in range(steps):
            model(*inputs)
    return probe.stats()


def picks() -> torch.Tensor:
    generator = torch.Generator().manual_seed(step_seed(0, 1))
    return torch.randperm(BATCH, generator=generator)[:PICKED]


def actual(model: nn.Module, path: str, recipe: str, *inputs: torch.Tensor) -> float:
    """Mean over the picked samples of 1/2 p (1 - p) dz^2, with the site's output GEMM emulated."""
    low = copy.deepcopy(model)
    convert_layers(low, {path: (f"emulated:{recipe}", "hp", "hp")})
    with torch.no_grad():
        z, changed = model(*inputs).view(BATCH, -1), low(*inputs).view(BATCH, -1)
    p = z.sigmoid()
    terms = (0.5 * p * (1 - p) * (changed - z).square()).sum(dim=1)
    return terms[picks()].double().mean().item()


def predicted(stats: loka.Stats, path: str, recipe: str) -> float:
    return stats.layers[path].effects[recipe].loss().value


@pytest.mark.parametrize(
    "recipe", [name for name, found in RECIPES.items() if found.output and not found.centred]
)
def test_the_prediction_is_what_quantizing_does(recipe: str) -> None:
    """On the same samples only the curvature of the model between site and logit is left out, of the
    order of the relative error of an output, 3 %; it has a random sign in each sample."""
    model, x = model_of(), sample()
    stats = probed(model, x)
    for path in ("0", "2", "4"):
        assert predicted(stats, path, recipe) == pytest.approx(actual(model, path, recipe, x), rel=0.06)


class Mean(nn.Module):
    """One linear map over 7 rows a sample, and their mean: g is the same in all rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fc = nn.Linear(24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).mean(dim=1)


@pytest.mark.parametrize("name", [name for name, casts in CASTS.items() if not casts[0].centred])
def test_histograms_hold_the_squared_errors_by_sensitivity(name: str) -> None:
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


def test_histograms_predict_what_recipes_do() -> None:
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


def test_a_recipe_that_was_never_tried() -> None:
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


def test_several_sites_together() -> None:
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


class Tokens(nn.Module):
    """Samples with several rows each, laid out in three ways."""

    def __init__(self, lay: Callable[[torch.Tensor], torch.Tensor], dim: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lay, self.dim = lay, dim
        self.fc, self.head = nn.Linear(24, 40), nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(self.lay(x)).tanh()
        if h.ndim == 2:
            h = h.view((BATCH, 7, 40) if self.dim == 1 else (7, BATCH, 40))
        return self.head(h.mean(dim=self.dim)).squeeze(1)


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
def test_rows_of_a_sample_add_up_before_squaring(
    lay: Callable[[torch.Tensor], torch.Tensor], dim: int
) -> None:
    """Adding the rows' squares instead would miss the weight's error, the same in all seven."""
    model, x = Tokens(lay, dim), sample(1, BATCH, 7, 24)
    stats = probed(model, x)
    for recipe in ("tensorwise_e4m3", "rowwise_e4m3"):
        assert predicted(stats, "fc", recipe) == pytest.approx(actual(model, "fc", recipe, x), rel=0.06)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.fc, self.head = nn.Linear(13, 40), nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(x).tanh() + self.fc(x * 0.9).tanh())


def test_calls_of_one_layer_add_up_before_squaring() -> None:
    model, x = Twice(), sample()
    stats = probed(model, x)
    assert predicted(stats, "fc", "rowwise_e4m3") == pytest.approx(
        actual(model, "fc", "rowwise_e4m3", x), rel=0.06
    )


def test_work_in_place_behind_a_layer_changes_nothing() -> None:
    plain = model_of((13, 96, 1))
    plain[1] = nn.ReLU()
    in_place = copy.deepcopy(plain)
    in_place[1] = nn.ReLU(inplace=True)
    x = sample()
    assert probed(plain, x).layers["0"].effects == probed(in_place, x).layers["0"].effects


def test_tasks_share_one_backward() -> None:
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


def test_probabilities_out_of_a_sigmoid_are_logits() -> None:
    model, x = model_of((13, 96, 1)), sample()
    after = nn.Sequential(*model, nn.Sigmoid())
    ours, theirs = probed(model, x).layers["0"], probed(after, x).layers["0"]
    for recipe in CASTS:
        assert theirs.effects[recipe].total == pytest.approx(ours.effects[recipe].total, rel=1e-4)


class Ended(nn.Module):
    """Two tasks behind one body, and `end` of both their logits [B]."""

    def __init__(self, end: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.end, self.body = end, nn.Sequential(nn.Linear(13, 40), nn.SiLU())
        self.click, self.buy = nn.Linear(40, 1), nn.Linear(40, 1)

    def forward(self, x: torch.Tensor) -> object:
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
def test_probabilities_are_seen_through_what_moves_them(
    end: Callable[[torch.Tensor, torch.Tensor], object],
    logits: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
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
def test_what_may_be_something_else_is_not_taken_for_logits(
    end: Callable[[torch.Tensor, torch.Tensor], object], reason: str
) -> None:
    layer = probed(Ended(end), sample()).layers["body.0"]
    assert not layer.effects
    assert reason in layer.no_effect
    assert "logits=" in layer.no_effect
    told = probed(Ended(end), sample(), logits=lambda output: output).layers["body.0"]
    assert told.effects  # where the program says so


def test_heads_that_the_logits_do_not_show_are_not_free() -> None:
    layers = probed(Ended(lambda a, b: {"a": a, "b": b}), sample(), logits=lambda out: out["a"]).layers
    assert layers["click"].effects
    assert not layers["buy"].effects
    assert layers["buy"].no_effect == "its output does not reach these logits"


def test_a_row_that_is_not_finite_costs_itself_alone() -> None:
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

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.head = nn.Linear(13, 16), nn.Linear(16, 1)
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.zeros(()))

    def body(self, h: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.norm(h).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, self.first(x), use_reentrant=False))


def test_buffers_move_as_often_as_without_a_probe() -> None:
    plain, watched = Normed(), Normed()
    expected = learn(plain, out=lambda z: z)
    with loka.Probe(watched, every=1) as probe:
        found = learn(watched, out=lambda z: z)
    assert probe.stats().layers["first"].effects
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    state = watched.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in plain.state_dict().items())


def test_effects_that_are_no_longer_seen_fade_and_go() -> None:
    model, x = model_of((13, 8, 1)), sample(0, 65, 13)
    blind = False

    def logits(output: torch.Tensor) -> torch.Tensor:
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


class Fancy(nn.Module):
    """Returns no logits as such; its dropout draws random numbers in training, and in recomputing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.body = nn.Sequential(nn.Linear(13, 64), nn.Dropout(0.2), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"click": checkpoint(self.body, x, use_reentrant=False, preserve_rng_state=False)}


def test_a_models_own_way_to_its_logits() -> None:
    stats = probed(Fancy(), sample(), logits=lambda output: output["click"])
    assert stats.layers["body.0"].effects["rowwise_e4m3"].count == PICKED
    reason = probed(Fancy(), sample()).layers["body.0"].no_effect
    assert "returns dict" in reason
    assert "logits=" in reason


def learn(
    model: nn.Module, *, out: Callable[[object], torch.Tensor], half: bool = False
) -> list[torch.Tensor]:
    torch.manual_seed(7)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(4):
        x = sample(step, 40, 13)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            z = out(model(x))
        assert all(weight.grad is None for weight in model.parameters())
        functional.binary_cross_entropy_with_logits(z.float().flatten(), (x[:, 0] > 0).float()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize("half", [False, True])
def test_training_gives_the_same_bits_through_dropout_and_checkpoints(half: bool) -> None:
    def out(output: object) -> torch.Tensor:
        assert isinstance(output, dict)
        return output["click"]

    plain = learn(Fancy(), out=out, half=half)
    model = Fancy()
    with loka.Probe(model, every=1, logits=out) as probe:
        watched = learn(model, out=out, half=half)
    assert probe.stats().layers["body.3"].effects
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_nothing_else_that_is_learnt_changes() -> None:
    torch.manual_seed(0)
    models = [odd_mlp()]
    models.append(copy.deepcopy(models[0]))
    records = []
    for model, samples in zip(models, (512, 0), strict=True):
        with loka.Probe(model, every=2, effect_samples=samples) as probe:
            train_steps(model, 6)
        records.append(probe.stats())
    assert records[0].layers["0"].effects
    assert not records[1].layers["0"].effects
    assert without(records[0]).digest() == records[1].digest()


def without(stats: loka.Stats) -> loka.Stats:
    layers = {}
    for path, layer in stats.layers.items():
        operands = {}
        for name, operand in layer.operands.items():
            tensors = {n: t for n, t in operand.tensors.items() if not n.startswith("effect_")}
            operands[name] = replace(operand, tensors=tensors)
        layers[path] = replace(layer, effects={}, no_effect="", operands=operands)
    return replace(stats, layers=layers)


class Recomputed(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.checkpointed = checkpointed
        self.first, self.body, self.head = nn.Linear(13, 13), nn.Linear(13, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(checkpoint(self.body, x, use_reentrant=True) if self.checkpointed else self.body(x))


def test_effects_inside_and_before_a_reentrant_checkpoint() -> None:
    """In a sampled step there is a graph inside, so the extra backward goes through it."""
    plain, recomputed = (
        probed(Recomputed(checkpointed), sample().requires_grad_()).layers for checkpointed in (False, True)
    )
    assert plain.keys() == recomputed.keys() == {"first", "body", "head"}
    for path in plain:
        assert plain[path].effects
        assert plain[path].effects == recomputed[path].effects


class Fixed(nn.Module):
    """Ends without a gradient, or in something wide, or in rows that mix samples."""

    def __init__(self, end: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.end, self.fc = end, nn.Linear(13, 1)

    def forward(self, x: torch.Tensor) -> object:
        return self.end(self.fc(x))


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(13, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(13, 1)
        self.fc.register_full_backward_hook(lambda module, given, got: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@pytest.mark.parametrize(
    ("model", "path", "reason"),
    [
        (Fixed(lambda z: z.detach()), "fc", "no gradient"),
        (Fixed(lambda z: (z, 1)), "fc", "returns tuple"),
        (Fixed(lambda z: z + z.roll(1, dims=0)), "fc", "mix samples"),
        (Fixed(lambda z: z[:7]), "fc", "do not split"),
        (Wide(), "fc", r"\(300, 40\)"),
        (Hooked(), "fc", "backward hooks"),
        (Fixed(lambda z: z.sum()), "fc", "rows"),
    ],
    ids=["detached", "tuple", "mixed", "fewer", "wide", "hooks", "scalar"],
)
def test_where_nothing_can_be_said_the_record_says_why(model: nn.Module, path: str, reason: str) -> None:
    layer = probed(model, sample().requires_grad_()).layers[path]
    assert not layer.effects
    assert re.search(reason, layer.no_effect), layer.no_effect
    assert predicted_kl(layer, recipe_named("rowwise_e4m3")) is None


def test_a_failing_way_to_the_logits_does_not_stop_training() -> None:
    def broken(output: object) -> torch.Tensor:
        raise KeyError("click")

    model = model_of((13, 8, 1))
    with loka.Probe(model, every=1, logits=broken) as probe:
        model(sample()).sum().backward()
    assert "KeyError" in probe.stats().layers["0"].no_effect
    assert probe.stats().layers["0"].operands["grad_output"].numbers["count"] == BATCH


def test_the_gradient_of_training_stands_in_where_there_are_no_logits() -> None:
    """With labels drawn from the predictions, E[(p - y)^2] = p (1 - p): both measure the same. 4096
    samples of terms with a CV of about 3 leave 5 % each, and four of those together are 28 %."""
    model = Fixed(lambda z: (z, "no logits"))
    x = sample(8, 4097, 13)
    exact = probed(model, x, logits=lambda output: output[0], effect_step=4096).layers["fc"]
    with loka.Probe(model, every=1, base_rate=0.4, effect_step=4096) as probe:
        z = model(x)[0]
        labels = torch.bernoulli(z.detach().sigmoid(), generator=torch.Generator().manual_seed(0))
        functional.binary_cross_entropy_with_logits(z, labels).backward()
    fisher = probe.stats().layers["fc"]
    for recipe in ("tensorwise_e4m3", "rowwise_e4m3"):
        ratio = fisher.effects[recipe].loss().value / exact.effects[recipe].loss().value
        assert 0.78 < ratio < 1.28
    assert fisher.effects["rowwise_e4m3"].entropy == pytest.approx(0.6730, abs=1e-4)  # of 0.4


def test_the_gradient_of_training_with_default_settings() -> None:
    """It reaches all rows, so shapes alone tell whose they are. The same graph, labels and samples as
    the logits themselves show, but for (p - y)^2 against p (1 - p): within a factor of two here."""
    model, x = Tokens(lambda x: x, 1), sample(1, BATCH, 7, 24)
    exact = probed(model, x).layers["fc"]
    with loka.Probe(model, every=1, base_rate=0.5, logits=lambda output: None) as probe:
        z = model(x)
        labels = torch.bernoulli(z.detach().sigmoid(), generator=torch.Generator().manual_seed(0))
        functional.binary_cross_entropy_with_logits(z, labels).backward()
    fisher = probe.stats().layers["fc"]
    assert not fisher.no_effect
    assert fisher.effects["rowwise_e4m3"].count == 64
    ratio = fisher.effects["rowwise_e4m3"].loss().value / exact.effects["rowwise_e4m3"].loss().value
    assert 0.5 < ratio < 2


def test_two_calls_before_a_backward_keep_their_own_samples() -> None:
    """Gradients are told apart by the call, so both weigh in: as if each had its backward at once."""

    def run(together: bool) -> loka.Stats:
        model = nn.Linear(13, 1)
        nn.init.ones_(model.weight), nn.init.zeros_(model.bias)
        with loka.Probe(model, every=1, base_rate=0.5, effect_step=8, logits=lambda output: None) as probe:
            losses = []
            for seed, rows in ((0, 40), (1, 24)):
                losses.append(functional.softplus(model(sample(seed, rows, 13))).mean())
                if not together:
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
        return probe.stats()

    one, two = (run(together).layers[""].effects for together in (False, True))
    assert one["rowwise_e4m3"].count == 16
    assert two == one


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(24, 1)

    def forward(self, rows: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
        return self.fc(rows).sum() / len(users)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((7, 7, 24), "input of (7, 7) rows does not tell"), ((35, 24), "arguments do not tell the size")],
    ids=["as many rows as samples", "flattened"],
)
def test_a_shape_that_does_not_tell_whose_rows_they_are(shape: tuple[int, ...], reason: str) -> None:
    model = Total()
    with loka.Probe(model, every=1, base_rate=0.5) as probe:
        model(sample(0, *shape), torch.zeros(7)).backward()
    assert reason in probe.stats().layers["fc"].no_effect


def test_the_size_of_a_batch_is_the_side_that_most_arguments_have() -> None:
    """Wherever the others stand: values and offsets of a sparse feature, a flag, nothing at all."""
    dense, labels, values, offsets = (torch.zeros(*shape) for shape in ((6, 3), (6,), (40,), (7,)))
    assert batch_of(((dense,), {})) == 6
    assert batch_of(((dense, labels, values, offsets), {})) == 6
    assert batch_of(((values,), {"ids": [labels, offsets], "dense": {"x": dense}})) == 6
    assert batch_of(((torch.zeros(()), dense), {})) == 6
    assert batch_of(((dense, offsets), {})) == 0
    assert batch_of(((3, "x"), {})) == 0


def test_a_head_that_starts_at_zero_is_known_once_it_moved() -> None:
    model = model_of((13, 8, 1))
    nn.init.zeros_(model[-1].weight), nn.init.zeros_(model[-1].bias)
    with loka.Probe(model, every=1) as probe:
        model(sample())
        layer = probe.stats().layers["0"]
        assert not layer.effects
        assert "starts at zero" in layer.no_effect
        assert "a later sampled step tells" in layer.no_effect
        nn.init.ones_(model[-1].weight)
        model(sample())
    layer = probe.stats().layers["0"]
    assert layer.effects["rowwise_e4m3"].total > 0
    assert not layer.no_effect


def test_a_known_base_rate_is_what_ne_is_relative_to() -> None:
    model, x = model_of((13, 8, 1)), sample()
    plain = probed(model, x).layers["0"].effects["rowwise_e4m3"]
    known = probed(model, x, base_rate=0.03).layers["0"].effects["rowwise_e4m3"]
    assert known.entropy == pytest.approx(0.13474, abs=1e-5)  # of 0.03
    assert known.loss() == plain.loss()
    with pytest.raises(ValueError, match="base_rate"):
        probed(model, x, base_rate=1.0)


def test_the_latest_samples_count() -> None:
    """Weights sum up to `effect_samples`; what was learnt of earlier weights of the model goes."""
    model, x = model_of((13, 8, 1)), sample(0, 65, 13)
    with loka.Probe(model, every=1, effect_samples=128, effect_step=64) as probe:
        with torch.no_grad():
            model[2].weight.mul_(100)  # the first samples are far more sensitive
        for _ in range(3):
            model(x)
        early = probe.stats().layers["0"].effects["rowwise_e4m3"]
        with torch.no_grad():
            model[2].weight.div_(100)
        for _ in range(20):
            model(x)
    late = probe.stats().layers["0"].effects["rowwise_e4m3"]
    assert early.count == late.count == 128
    assert 128 < early.samples < 192  # three steps of 64, the first one faded
    assert late.samples == pytest.approx(128**2 / (64 / (1 - 0.25)), rel=1e-3)  # of weights 1, 1/2, 1/4 ..
    assert late.loss().value < early.loss().value / 100


def test_saved_loaded_and_gone_on_with(tmp_path: Path) -> None:
    model, x = model_of((13, 8, 1)), sample(0, 65, 13)
    half = probed(model, x, steps=2)
    half.save(tmp_path)
    loaded = loka.Stats.load(tmp_path)
    assert loaded.digest() == half.digest()
    assert loaded.layers["0"].effects == half.layers["0"].effects
    both = probed(model, x, steps=2, resume=loaded)
    assert both.layers["0"].effects["rowwise_e4m3"].count == 4 * 64
    whole = probed(model, x, steps=4)
    assert both.layers["0"].effects == whole.layers["0"].effects
    for operand in ("input", "weight"):
        for name, tensor in whole.layers["0"].operands[operand].tensors.items():
            torch.testing.assert_close(both.layers["0"].operands[operand].tensors[name], tensor)
    without(half).save(tmp_path / "old")
    assert "effects" not in (tmp_path / "old" / "stats.json").read_text()
    assert loka.Stats.load(tmp_path / "old").digest() == without(half).digest()


def test_two_probes_do_not_take_each_others_gradients_for_training() -> None:
    model, x = model_of((13, 8, 1)), sample()
    with loka.Probe(model, every=1) as first, loka.Probe(model, every=1) as second:
        model(x).sum().backward()
    for probe in (first, second):
        assert probe.stats().layers["0"].effects
        assert probe.stats().layers["0"].operands["grad_output"].numbers["count"] == BATCH


def test_a_step_keeps_nothing_alive() -> None:
    """Neither inputs nor the graph: a circle through autograd's nodes would never be collected."""
    model = model_of((13, 8, 1))
    seen: list[weakref.ref[torch.Tensor]] = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(args[0])))
    freed: list[int] = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            weakref.finalize(ctx, freed.append, 1)
            return x * 1

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad

    for base_rate in (None, 0.3):
        with loka.Probe(model, every=1, base_rate=base_rate):
            model(Told.apply(sample().requires_grad_())).sum().backward()
    gc.collect()
    assert freed == [1, 1]
    assert all(found() is None for found in seen)


def test_wrapped_in_distributed_data_parallel(tmp_path: Path) -> None:
    """The extra backward wakes no reducer, in the first step of a static graph either."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        plain, watched = model_of((13, 8, 1)), model_of((13, 8, 1))
        wrapped = nn.parallel.DistributedDataParallel(watched, static_graph=True)
        expected = learn(plain, out=lambda z: z)
        with loka.Probe(wrapped, every=1) as probe:
            learn(wrapped, out=lambda z: z)
        effects = probe.stats().layers["0"].effects
        # Its reducer would else end the group's threads while it holds the interpreter, and wait for ever.
        del wrapped, probe
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()
    assert effects["rowwise_e4m3"].count == 4 * 39
    assert all(torch.equal(a, b) for a, b in zip(expected, watched.parameters(), strict=True))
