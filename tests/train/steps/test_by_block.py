import copy

import pytest
import torch
from small_run import IDS, RandomRows
from torch import nn

from loka.compiler.joint_sites import IN_REGIONS
from loka.core.compiling import compile_in_place
from loka.graph.attach import attach
from loka.nn.linears import signature
from loka.nn.site import health_of, sites_of
from loka.train import TrainConfig, train
from loka.train.loop import evaluate
from loka.train.steps.extent import extent_of
from loka.train.steps.graphed import GATHERS

ROWS = RandomRows(64 * 8 + 10)  # the last batch is short, and runs eagerly
EMULATED = ("emulated:rowwise_e4m3_pow2",) * 3


class Foreign(nn.Module):
    """No `front`: its tables cannot be put beside a graph of all else."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(IDS, 8, sparse=True)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(n, 64), nn.LayerNorm(64), nn.SiLU()) for n in (32, 64))
        self.top = nn.Sequential(nn.Linear(64, 1))

    def forward(self, dense, sparse):
        x = torch.cat([dense, self.table(sparse).flatten(1)], dim=1)
        x = nn.functional.pad(x, (0, 32 - x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.top(x).squeeze(1)


def trained(step, model, device):
    model, between = copy.deepcopy(model).to(device), []
    layers = {path: layer for path, layer in signature(model).layers.items() if path.startswith("blocks")}
    attach(model, layers, dict.fromkeys(layers, EMULATED if device == "cpu" else IN_REGIONS))

    def look(done):
        if done == 5:
            between.append(evaluate(model, ROWS, batch_size=64, device=device, precision="bf16")[0])

    config = TrainConfig(batch_size=64, precision="bf16", step=step, device=device)
    result = train(model, ROWS, config=config, on_step=look)
    weights = torch.cat([weight.detach().flatten().cpu() for weight in model.parameters()])
    return weights, torch.as_tensor(between[0]), result.step_reason


def trains_alike(device):
    torch.manual_seed(0)
    model = Foreign()
    (exact, logits, _), (found, others, reason) = (trained(step, model, device) for step in ("compile", "graph"))
    assert "Foreign has no `front`" in reason
    assert reason.endswith("what is compiled of them is CUDA graphs of its own")
    if device == "cpu" and torch.__version__ >= "2.13":  # 2.11 adds up otherwise where graphs are asked for
        assert torch.equal(found, exact)
        assert torch.equal(others, logits)
        return
    # The same kernels, but for the autotuner's choices: those round otherwise, and Adam's first steps move a weight
    # by the rate (1e-3) whatever its gradient, whose sign rounding decides near 0.
    assert ((found - exact).abs() < 1e-4).double().mean() > 0.9
    assert (others - logits).square().mean().sqrt() < 0.03 * logits.std()


@pytest.mark.slow  # it takes half a minute; on a GPU its twin runs
def test_a_step_by_block_trains_alike_on_a_cpu(monkeypatch):
    """Inductor makes no graphs there: what is left is all that LoKA does for them."""
    monkeypatch.setattr("loka.train.steps.extent.has_graphs", lambda device: True)
    trains_alike("cpu")


def test_graphs_keep_the_addresses_that_ops_write_to_without_saying_so():
    """Of other inputs torch's graphs take copies: what was counted there would be lost."""
    model = Foreign()
    attach(model, layers := {"blocks.1.0": signature(model).layers["blocks.1.0"]}, dict.fromkeys(layers, EMULATED))
    block = compile_in_place(model.blocks[1], replayed=True)
    block(torch.randn(16, 64, requires_grad=True)).sum().backward()
    (site,) = sites_of(model).values()
    assert site.health._dynamo_static_input_type is not None
    assert [counts["runs"] for counts in health_of(model).values()] == [1, 1, 1]


def test_fsdp2_replays_no_blocks(monkeypatch):
    for name in ("has_graphs", "is_sharded"):
        monkeypatch.setattr(f"loka.train.steps.extent.{name}", lambda asked: True)
    found = extent_of(Foreign(), ["dense", "sparse"], TrainConfig(batch_size=64, step="graph"))
    assert not found.by_block
    assert found.reason == GATHERS


@pytest.mark.gpu
def test_a_step_by_block_trains_alike(monkeypatch):
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import CUDAGraphNode

    replays, run = [], CUDAGraphNode.run
    monkeypatch.setattr(CUDAGraphNode, "run", lambda node, inputs: replays.append(node) or run(node, inputs))
    counters.clear()
    trains_alike("cuda")
    assert not counters["inductor"]["cudagraph_skips"]
    assert len(set(replays)) >= 6, "three blocks forward and backward"
