"""S1, S7, S8: a converted model that is called in part, or changed, computes what its modules say.

A form of conversion that is gone computed several modules in the first one, and failed each of these in
silence. Any hand-over between modules, or anything kept from when the model was converted, makes them
fail again.
"""

import random

import pytest
import torch
from forced import force, plan_of, probe, ran, runs
from oracle import assert_close, assert_same_gradients, by_hand, gradients, off
from small_towers import BOTH_WAYS, EAGER_FIRST, batch, pair, tower
from sweeps import sweep
from torch import nn

import loka


def _reading_hook(model):
    """The output of an inner module is what a hook is given, and what it returns is what goes on."""
    model[2].register_forward_hook(lambda module, args, output: output + args[0].mean())
    return model


def _set(model, place, module):
    model[place] = module
    return model


def _without(model, first, last):
    del model[first:last]
    return model


def _another_head(model):
    head = nn.Linear(64, 8)
    with torch.no_grad():
        head.weight.copy_(model[0].weight[:8])
        head.bias.zero_()
    return _set(model, len(model) - 1, head)


CHANGES = {
    "first two modules": lambda model: model[:2],
    "without the first": lambda model: model[1:],
    "one inner layer": lambda model: model[2],
    "middle": lambda model: model[2:5],
    "inner layer is Identity": lambda model: _set(model, 2, nn.Identity()),
    "two members deleted": lambda model: _without(model, 2, 4),
    "last member replaced": _another_head,
    "activation replaced": lambda model: _set(model, 3, nn.Tanh()),
    "layers swapped": lambda model: nn.Sequential(*model[2:4], *model[:2], model[6]),
    "reading hook": _reading_hook,
}


EAGER, COMPILED = ([(change, compiled) for change in CHANGES] for compiled in (False, True))


@pytest.mark.parametrize(("change", "compiled"), sweep(EAGER + COMPILED, EAGER[::3] + COMPILED[::8]))
def test_s1_in_part_and_with_members_changed(change, compiled):
    found, expected = pair()
    part, wanted = CHANGES[change](found), CHANGES[change](expected)
    call = torch.compile(part, backend="aot_eager") if compiled else part
    x, y = batch().requires_grad_(), batch().requires_grad_()
    result, oracle = call(x), wanted(y)
    assert_close(result, oracle)
    result.square().mean().backward()
    oracle.square().mean().backward()
    assert_close(x.grad, y.grad, what="input")
    assert_same_gradients(part, gradients(wanted))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_s1_early_exit(layers):
    """Whoever leaves the loop after some modules gets these modules' result, and no site beyond them runs."""
    found, expected = pair()
    x, y = batch(), batch()
    for place in range(2 * layers):
        x, y = found[place](x), expected[place](y)
    assert_close(x, y)
    assert ran(found) == {f"{place}/output" for place in range(0, 2 * layers, 2)}


class LayerDrop(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks[place : place + 2] for place in range(0, 6, 2))
        self.head = blocks[6]

    def forward(self, x, kept):
        for block, keep in zip(self.blocks, kept, strict=True):
            x = block(x) if keep else x
        return self.head(x)


def test_s1_layer_drop():
    """In 20 steps with other blocks each time, outputs and gradients are the oracle's."""
    plain, expected = LayerDrop(tower()), LayerDrop(tower())
    whole = [True] * 3
    stats = probe(plain, lambda: plain(batch(), whole).square().mean().backward())
    found = loka.convert(LayerDrop(tower()), force(stats))
    by_hand(expected)
    drawn = random.Random(0)
    for step in range(20):
        kept = [drawn.random() < 0.5 for _ in range(3)]
        found.zero_grad()
        expected.zero_grad()
        result, oracle = found(batch(seed=step), kept), expected(batch(seed=step), kept)
        assert_close(result, oracle)
        result.square().mean().backward()
        oracle.square().mean().backward()
        assert_same_gradients(found, gradients(expected))


def changed(compiled, options, kind, attribute, value):
    found, expected = pair(**options)
    call = torch.compile(found, backend="aot_eager") if compiled else found
    before = call(batch())
    after = []
    for model in (found, expected):
        for module in model:
            if isinstance(module, kind):
                setattr(module, attribute, value)
        torch.manual_seed(3)
        after.append((call if model is found else model)(batch()))
    assert off(after[0], before) > 0.1
    assert_close(*after)
    return found, call, before


@EAGER_FIRST
def test_s1_norm_with_another_eps(compiled):
    changed(compiled, {"norm": True}, nn.LayerNorm, "eps", 10.0)


@EAGER_FIRST
def test_s7_dropout_whose_probability_changes(compiled):
    """From 0 to 0.5: half of each inner output is zero, and the oracle draws the same ones from one seed."""
    found, call, before = changed(compiled, {"dropout": 0.0}, nn.Dropout, "p", 0.5)
    found.eval()
    assert_close(call(batch()), before)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.top = tower()

    def forward(self, x):
        crossed = x * self.first(x) + x
        crossed = x * self.second(crossed) + crossed
        return self.top(crossed), crossed


def _inner():
    torch.manual_seed(0)
    return Inner()


@pytest.mark.slow
@BOTH_WAYS
def test_s8_inner_outputs_of_a_served_model(compiled):
    plain, expected = _inner(), by_hand(_inner()).eval()
    stats = probe(plain, lambda: plain(batch())[0].square().mean().backward())
    found = loka.convert(_inner(), force(stats)).eval()
    call = torch.compile(found, backend="aot_eager") if compiled else found
    with torch.inference_mode():
        for rows in (128, 1, 37):
            for result, oracle in zip(call(batch(rows)), expected(batch(rows)), strict=True):
                assert_close(result, oracle)
    assert {name.partition("/")[0] for name in ran(found)} == {"first", "second"} | {
        f"top.{place}" for place in (0, 2, 4, 6)
    }
    assert set(runs(found).values()) == {0, 3}, "backward did not run, everything else three times"


def test_the_bound_sees_one_site_in_high_precision():
    """Else none of these tests could fail: a site that does not run is further off than the tolerance."""
    plan = plan_of(tower(), batch())
    for place in (0, 2, 4, 6):
        one = by_hand(tower())
        one[place].__class__ = nn.Linear
        with pytest.raises(AssertionError, match="off by"):
            assert_close(loka.convert(tower(), plan)(batch()), one(batch()))
