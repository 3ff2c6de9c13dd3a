import copy
import gc
import re
import weakref
from dataclasses import replace

import pytest
import torch
from effect_models import BATCH, Fancy, Tokens, learn, model_of, probed, sample
from models import odd_mlp, train_steps
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import loka
from loka.core.numerics.effect import NO_PROMISE
from loka.core.recipe import recipe_named
from loka.measurement.predicted_kl import predicted_kl
from loka.probe import renew_effects
from loka.probe.model_effects.sample_rows import batch_of


@pytest.mark.parametrize("half", [False, True])
def test_training_gives_the_same_bits_through_dropout_and_checkpoints(half):
    def out(output):
        assert isinstance(output, dict)
        return output["click"]

    plain = learn(Fancy(), out=out, half=half)
    model = Fancy()
    with loka.Probe(model, every=1, logits=out) as probe:
        watched = learn(model, out=out, half=half)
    assert probe.stats().layers["body.3"].effects
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.parametrize(("scale", "known"), [(1.0, True), (1e6, False)])
def test_saturated_steps_promise_nothing(scale, known):
    """Of samples of which one or none is near the boundary the second order told 1e-6 where quantizing cost 1e-2."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1))
    with loka.Probe(model, every=1) as probe:
        for _ in range(4):
            z = model(scale * torch.randn(256, 32))
            functional.binary_cross_entropy_with_logits(z, torch.zeros_like(z)).backward()
    layer = probe.stats().layers["0"]
    assert bool(layer.effects) == known
    assert ("the logits are saturated" in layer.no_effect) == (not known)


def test_rows_that_saturate_take_the_old_effects_away():
    """Those stayed, of a model before, and a plan by them lost 50 times its budget. The last batch has one row, which
    tells nothing: that is no reason to forget what the others said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 1))
    with loka.Probe(model, every=1) as probe:
        functional.softplus(model(torch.randn(256, 32))).mean().backward()
    stats = probe.stats()
    assert stats.layers["0"].effects
    many, one = 1e6 * torch.randn(256, 32), torch.randn(1, 32)
    for batches in ([many], [many, one]):
        for layer in renew_effects(model, stats, batches, base_rate=0.3).layers.values():
            assert not layer.effects
            assert layer.no_effect.startswith(f"{NO_PROMISE}the logits are saturated")
    (kept, _) = renew_effects(model, stats, [one], base_rate=0.3).layers.values()
    assert kept.effects == stats.layers["0"].effects


@pytest.mark.slow
def test_nothing_else_that_is_learnt_changes():
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


def without(stats):
    layers = {}
    for path, layer in stats.layers.items():
        operands = {}
        for name, operand in layer.operands.items():
            tensors = {n: t for n, t in operand.tensors.items() if not n.startswith("effect_")}
            operands[name] = replace(operand, tensors=tensors)
        layers[path] = replace(layer, effects={}, no_effect="", operands=operands)
    return replace(stats, layers=layers)


class Recomputed(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        torch.manual_seed(4)
        self.checkpointed = checkpointed
        self.first, self.body, self.head = nn.Linear(13, 13), nn.Linear(13, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x)
        return self.head(checkpoint(self.body, x, use_reentrant=True) if self.checkpointed else self.body(x))


def test_effects_inside_and_before_a_reentrant_checkpoint():
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

    def __init__(self, end, features=1):
        super().__init__()
        self.end, self.fc = end, nn.Linear(13, features)

    def forward(self, x):
        return self.end(self.fc(x))


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(13, 1)
        self.fc.register_full_backward_hook(lambda module, given, got: None)

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize(
    ("model", "path", "reason"),
    [
        (Fixed(lambda z: z.detach()), "fc", "no gradient"),
        (Fixed(lambda z: (z, 1)), "fc", "returns tuple"),
        (Fixed(lambda z: z + z.roll(1, dims=0)), "fc", "mix samples"),
        (Fixed(lambda z: z[:7]), "fc", "do not split"),
        (Fixed(lambda z: z, 40), "fc", r"\(300, 40\)"),
        (Hooked(), "fc", "backward hooks"),
        (Fixed(lambda z: z.sum()), "fc", "rows"),
    ],
    ids=["detached", "tuple", "mixed", "fewer", "wide", "hooks", "scalar"],
)
def test_where_nothing_can_be_said_the_record_says_why(model, path, reason):
    layer = probed(model, sample().requires_grad_()).layers[path]
    assert not layer.effects
    assert re.search(reason, layer.no_effect), layer.no_effect
    assert predicted_kl(layer, recipe_named("rowwise_e4m3")) is None


def test_a_failing_way_to_the_logits_does_not_stop_training():
    def broken(output):
        raise KeyError("click")

    model = model_of((13, 8, 1))
    with loka.Probe(model, every=1, logits=broken) as probe:
        model(sample()).sum().backward()
    assert "KeyError" in probe.stats().layers["0"].no_effect
    assert probe.stats().layers["0"].operands["grad_output"].numbers["count"] == BATCH


def learn_own_predictions(z):
    labels = torch.bernoulli(z.detach().sigmoid(), generator=torch.Generator().manual_seed(0))
    functional.binary_cross_entropy_with_logits(z, labels).backward()


def test_the_gradient_of_training_stands_in_where_there_are_no_logits():
    """With labels drawn from the predictions, E[(p - y)^2] = p (1 - p): both measure the same. 4096
    samples of terms with a CV of about 3 leave 5 % each, and four of those together are 28 %."""
    model = Fixed(lambda z: (z, "no logits"))
    x = sample(8, 4097, 13)
    exact = probed(model, x, logits=lambda output: output[0], effect_step=4096).layers["fc"]
    with loka.Probe(model, every=1, base_rate=0.4, effect_step=4096) as probe:
        learn_own_predictions(model(x)[0])
    fisher = probe.stats().layers["fc"]
    for recipe in ("tensorwise_e4m3", "rowwise_e4m3"):
        ratio = fisher.effects[recipe].loss().value / exact.effects[recipe].loss().value
        assert 0.78 < ratio < 1.28
    assert fisher.effects["rowwise_e4m3"].entropy == pytest.approx(0.6730, abs=1e-4)  # of 0.4


def test_the_gradient_of_training_with_default_settings():
    """It reaches all rows, so shapes alone tell whose they are. The same graph, labels and samples as
    the logits themselves show, but for (p - y)^2 against p (1 - p): within a factor of two here."""
    model, x = Tokens(lambda x: x, 1), sample(1, BATCH, 7, 24)
    exact = probed(model, x).layers["fc"]
    with loka.Probe(model, every=1, base_rate=0.5, logits=lambda output: None) as probe:
        learn_own_predictions(model(x))
    fisher = probe.stats().layers["fc"]
    assert not fisher.no_effect
    assert fisher.effects["rowwise_e4m3"].count == 64
    ratio = fisher.effects["rowwise_e4m3"].loss().value / exact.effects["rowwise_e4m3"].loss().value
    assert 0.5 < ratio < 2


def test_two_calls_before_a_backward_keep_their_own_samples():
    """Gradients are told apart by the call, so both weigh in: as if each had its backward at once."""

    def run(together):
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
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(24, 1)

    def forward(self, rows, users):
        return self.fc(rows).sum() / len(users)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [((7, 7, 24), "input of (7, 7) rows does not tell"), ((35, 24), "arguments do not tell the size")],
    ids=["as many rows as samples", "flattened"],
)
def test_a_shape_that_does_not_tell_whose_rows_they_are(shape, reason):
    model = Total()
    with loka.Probe(model, every=1, base_rate=0.5) as probe:
        model(sample(0, *shape), torch.zeros(7)).backward()
    assert reason in probe.stats().layers["fc"].no_effect


def test_the_size_of_a_batch_is_the_side_that_most_arguments_have():
    """Wherever the others stand: values and offsets of a sparse feature, a flag, nothing at all."""
    dense, labels, values, offsets = (torch.zeros(*shape) for shape in ((6, 3), (6,), (40,), (7,)))
    assert batch_of(((dense,), {})) == 6
    assert batch_of(((dense, labels, values, offsets), {})) == 6
    assert batch_of(((values,), {"ids": [labels, offsets], "dense": {"x": dense}})) == 6
    assert batch_of(((torch.zeros(()), dense), {})) == 6
    assert batch_of(((dense, offsets), {})) == 0
    assert batch_of(((3, "x"), {})) == 0


def test_a_head_that_starts_at_zero_is_known_once_it_moved():
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


def test_a_known_base_rate_is_what_ne_is_relative_to():
    model, x = model_of((13, 8, 1)), sample()
    plain = probed(model, x).layers["0"].effects["rowwise_e4m3"]
    known = probed(model, x, base_rate=0.03).layers["0"].effects["rowwise_e4m3"]
    assert known.entropy == pytest.approx(0.13474, abs=1e-5)  # of 0.03
    assert known.loss() == plain.loss()
    with pytest.raises(ValueError, match="base_rate"):
        probed(model, x, base_rate=1.0)


def test_the_latest_samples_count():
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


def test_saved_loaded_and_gone_on_with(tmp_path):
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


def test_two_probes_do_not_take_each_others_gradients_for_training():
    model, x = model_of((13, 8, 1)), sample()
    with loka.Probe(model, every=1) as first, loka.Probe(model, every=1) as second:
        model(x).sum().backward()
    for probe in (first, second):
        assert probe.stats().layers["0"].effects
        assert probe.stats().layers["0"].operands["grad_output"].numbers["count"] == BATCH


def test_a_step_keeps_nothing_alive():
    """Neither inputs nor the graph: a circle through autograd's nodes would never be collected."""
    model = model_of((13, 8, 1))
    seen = []
    model[2].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(args[0])))
    freed = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            weakref.finalize(ctx, freed.append, 1)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    for base_rate in (None, 0.3):
        with loka.Probe(model, every=1, base_rate=base_rate):
            model(Told.apply(sample().requires_grad_())).sum().backward()
    gc.collect()
    assert freed == [1, 1]
    assert all(found() is None for found in seen)


def test_wrapped_in_distributed_data_parallel(tmp_path):
    """The extra backward wakes no reducer, in the first step of a static graph either."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
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


class Request(nn.Module):
    """The first row of a batch is the request's, by which all its rows are scored."""

    def __init__(self):
        super().__init__()
        self.request, self.item, self.top = nn.Linear(13, 8), nn.Linear(13, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.top(torch.relu(self.request(x)[:1] + self.item(x)))


def test_rows_that_mix_in_some_batch_have_no_effect_at_all():
    """Where the first row was among the samples that are picked, nothing showed that it is all samples' row: of three
    renewals one told a fifth of what the layer costs, another 1.8 times as much, and none a word."""
    torch.manual_seed(0)
    model, batches = Request(), torch.randn(8, 256, 13)
    with loka.Probe(model, every=1, effect_step=192) as probe:
        for x in batches:
            functional.softplus(-model(x)).mean().backward()
    renewed = [renew_effects(model, probe.stats(), batches, seed=seed) for seed in range(3)]
    resumed = loka.Probe(model, resume=probe.stats()).stats()
    for stats in (probe.stats(), resumed, *renewed):
        assert "its rows mix samples" in stats.layers["request"].no_effect
        assert not stats.layers["request"].effects
        assert stats.layers["item"].effects
