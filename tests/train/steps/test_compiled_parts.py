from dataclasses import replace

import pytest
import torch
from fp8_run import AUTO
from small_run import RandomRows
from sweeps import sweep
from torch import nn
from torch._dynamo.utils import counters

import loka
from loka.train import TrainConfig, train
from loka.train.automatic.auto import Auto
from loka.train.steps.blocks import compiled, compiled_parts, left_as_written, uncompiled

ROWS = RandomRows(64 * 4)
CONFIG = TrainConfig(batch_size=64, precision="fp32")


class Flat(nn.Module):
    """Its layers are its own children, as people write small models; `beside`: and one block."""

    def __init__(self, beside=0, *, sparse=False):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 8, sparse=sparse) for size in ROWS.vocab_sizes)
        width = 4 + 8 * len(ROWS.vocab_sizes)
        self.block = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) if beside else nn.Identity()
        self.first, self.second = nn.Linear(width, 32), nn.Linear(32, 32 * max(beside, 1))
        self.logit = nn.Linear(32 * max(beside, 1), 1)

    def forward(self, dense, sparse):
        rows = [table(ids) for table, ids in zip(self.tables, sparse.unbind(1), strict=True)]
        x = self.block(torch.cat([dense, *rows], dim=1))
        return self.logit(torch.relu(self.second(torch.relu(self.first(x))))).squeeze(1)


def flat(beside=0, **options):
    torch.manual_seed(0)
    return Flat(beside, **options)


@pytest.mark.parametrize("beside", sweep([0, 40], [40]))
def test_a_model_without_blocks_is_compiled_as_one(beside, without_inductor):
    """It was compiled not at all, or but for a block, and nothing said so."""
    written, model = flat(beside), flat(beside)
    assert compiled_parts(model) == [model]
    train(written, ROWS, config=CONFIG)
    torch._dynamo.reset(), counters.clear()
    result = train(model, ROWS, config=replace(CONFIG, step="compile"))
    assert result.step_reason is None
    assert counters["frames"]["ok"] > 0
    assert counters["stats"]["calls_captured"] >= 6  # cat, three layers, two activations
    # Adam moves a weight by the rate whatever the size of its gradient, so rounding decides where that is nearly 0.
    pairs = zip(written.parameters(), model.parameters(), strict=True)
    apart = torch.cat([(a - b).abs().flatten() for a, b in pairs])
    assert (apart < 1e-5).double().mean() > 0.99
    assert model._compiled_call_impl is None  # it is as it was


@pytest.mark.slow
def test_hooks_on_a_model_that_is_compiled_as_one_run_as_written(without_inductor):
    """A Probe's was traced, and refused; one that keeps what it sees broke the compiled call."""
    model, seen = flat(), []
    model.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    torch._dynamo.reset(), counters.clear()
    with loka.Probe(model, every=2) as probe:
        result = train(model, ROWS, config=replace(CONFIG, step="compile"))
    assert result.step_reason is None
    assert counters["stats"]["unique_graphs"] == 1
    assert probe.stats().sampled_steps >= 2
    assert set(probe.stats().layers) == {"first", "second", "logit"}
    assert {output.shape for output in seen} == {(64,)}
    assert model.forward.__func__ is Flat.forward
    auto = Auto(replace(AUTO, least_steps=1, most_steps=2, every=1))
    result = train(flat(), ROWS, config=replace(CONFIG, step="compile"), callback=auto)
    assert auto.phase == "fp8"
    assert result.step_reason is None


def test_what_was_compiled_is_given_back_whatever_its_tables_are_now():
    model = flat(sparse=True)
    for table in model.tables:
        table.weight.requires_grad_(False)
    compiled(model)
    for table in model.tables:
        table.weight.requires_grad_(True)
    assert model._compiled_call_impl is not None
    assert uncompiled(model)._compiled_call_impl is None


@pytest.mark.parametrize("beside", [0, 40])
def test_layers_beside_sparse_tables_are_said_to_run_as_written(beside, without_inductor):
    """Inductor takes no sparse gradients. The same layers in a module of their own are a block."""
    model = flat(beside, sparse=True)
    assert compiled_parts(model) == [model.block] * bool(beside)
    result = train(model, ROWS, config=replace(CONFIG, step="compile"))
    assert "most of its layers run as written" in result.step_reason
    assert "tables with sparse gradients: put them into a module" in result.step_reason
    result = train(model, ROWS, config=replace(CONFIG, step="graph"))
    assert "need a CUDA device" in result.step_reason
    assert "most of its layers run as written" in result.step_reason


def test_blocks_that_hold_most_are_compiled_one_by_one():
    model = nn.Sequential()
    model.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
    model.logit = nn.Linear(32, 1)
    model.table = nn.Embedding(10, 8, sparse=True)
    assert compiled_parts(model) == list(model.body)
    assert left_as_written(model) is None
