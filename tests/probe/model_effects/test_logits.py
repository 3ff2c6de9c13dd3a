import re
import warnings
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from foreign.registry import FOREIGN
from foreign.spec import call
from models import stats_of
from torch import nn

import loka
from loka.probe import renew_effects
from loka.probe.model_effects.logits import NoEffect, logits_of

Output = namedtuple("Output", "loss logits")


def column():
    return torch.linspace(-2, 2, 5, requires_grad=True)[:, None] * 1.0


@pytest.mark.parametrize(
    "named",
    [lambda z: z, lambda z: {"loss": z.sum(), "logits": z}, lambda z: Output(z.sum(), z), lambda z: z[:, 0]],
    ids=["tensor", "dict", "attribute", "vector"],
)
def test_what_an_output_calls_its_logits(named):
    z = column()
    assert torch.equal(logits_of(named(z), None), z)


@pytest.mark.parametrize(
    "named", [lambda z: z, lambda z: {"logits": z}, lambda z: Output(z.sum(), z)], ids=["tensor", "dict", "attribute"]
)
def test_several_columns_are_refused_unless_the_program_says_what_they_are(named):
    """Four hidden features look as four logits do."""
    z = torch.randn(5, 4, requires_grad=True) * 1.0
    with pytest.raises(NoEffect, match=r"\(5, 4\), which may be 4 tasks, classes or features: pass logits="):
        logits_of(named(z), None)
    assert torch.equal(logits_of(z, lambda output: output), z)


def train_output(loss_fn):
    z, labels = column()[:, 0], torch.tensor([0.0, 1, 0, 1, 1])
    loss = loss_fn(z, labels)
    return z, (loss, (loss.detach(), z.detach(), labels))


def test_logits_behind_a_loss():
    z, output = train_output(F.binary_cross_entropy_with_logits)
    found = logits_of(output, None)
    assert torch.equal(found[:, 0], z)
    assert found.requires_grad


def test_another_loss_is_said():
    _, output = train_output(lambda z, y: (z - y).square().mean())
    with pytest.raises(NoEffect, match="the loss is not their cross-entropy: pass base_rate="):
        logits_of(output, None)
    with pytest.raises(NoEffect, match="returns tuple"):
        logits_of((column(), column()), None)


def test_dlrm_train_has_the_effects_of_the_model_inside():
    pytest.importorskip("torchrec")
    found = []
    for name in ("torchrec_dlrm_dcn", "torchrec_dlrm_train"):
        foreign = FOREIGN[name]
        model = foreign.build()
        with loka.Probe(model, every=1) as probe:
            foreign.loss(call(model, foreign.inputs(32))).backward()
        layers = probe.stats().layers
        found.append({path.removeprefix("model."): layer.effects for path, layer in layers.items()})
    inside, outside = found
    assert len(inside) == 9
    assert all(effects["rowwise_e4m3"].total > 0 for effects in inside.values())
    assert outside == inside


def test_batch_norm_is_named_where_it_mixes_samples():
    """The layer behind the last one has effects. With running statistics none mixes anything."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(13, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
    )
    x = torch.randn(300, 13)  # far more than the 64 rows whose gradient is asked for
    layers = stats_of(model, x, torch.sum).layers
    for path in ("0", "3"):
        assert re.search(r"mix samples.*BatchNorm takes its statistics over the batch \(1, 4\)", layers[path].no_effect)
    assert layers["5"].effects
    with loka.Probe(model.eval(), every=1) as probe:
        model(x).sum().backward()
    assert {layer.no_effect for layer in probe.stats().layers.values()} == {""}


def test_batches_that_are_left_out_are_told_and_none_is_once_others_showed_logits():
    """Outputs that all lie between 0 and 1 may be probabilities, until some do not. What is then missing is no sample
    of all rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with loka.Probe(model, every=1) as probe:
        model(torch.randn(32, 4)).sum().backward()
    within = 0.1 + 0.01 * torch.randn(8, 4)
    model[2].bias.data += 0.5 - model(within).mean().item()
    wide = 9 * torch.randn(32, 4)
    # A row of each batch is left out.
    with pytest.warns(UserWarning, match="1 of 3 batches tell no effects, which are of the others alone: all outputs"):
        renewed = renew_effects(model, probe.stats(), [within, wide, within])
    assert renewed.layers["0"].effects["rowwise_e4m3"].count == 38
    for rows, given in (([wide, within], {}), ([within, wide], {"logits": lambda z: z})):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert renew_effects(model, probe.stats(), rows, **given).layers["0"].effects["rowwise_e4m3"].count == 38
