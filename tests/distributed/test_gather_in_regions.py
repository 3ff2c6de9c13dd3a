from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from gather_jobs import NAMES, shard, trained
from joint import JointBackend
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from towers import LR, STEPS, alone, joinable, plan_of, rows, uneven

import loka
from loka.compiler.gemms import region_gemm
from loka.distributed import fp8_all_gather
from loka.kernels.quantize.fp8_weights import fp8_weights
from loka.nn.fp8_weight import dequantized, transposed

UNITS = ("root", "group")


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


@dataclass(frozen=True)
class Exact:
    plan: loka.Plan
    joined: loka.Plan

    def __call__(self, rank, folder):
        model = shard(loka.convert(uneven(), self.plan))
        fp8_all_gather(model, self.plan)
        found = {"uneven": trained(model, rank), "checkpointed": self.checkpointed(rank)}
        for units in UNITS:
            found[units] = self.compiled(rank, units)
        return found

    def checkpointed(self, rank):
        """Units run again in backward, where scales stay those of the forward."""
        model = shard(loka.convert(uneven(), self.plan))
        fp8_all_gather(model, self.plan)
        agreed = []
        real = dist.all_reduce
        dist.all_reduce = lambda *args, **options: (agreed.append(args[0].numel()), real(*args, **options))[1]
        try:
            losses = trained(Checkpointed(model), rank)
        finally:
            dist.all_reduce = real
        return {"losses": losses, "agreed": agreed}

    def compiled(self, rank, units):
        torch._dynamo.reset()
        model = shard(loka.convert(joinable(), self.joined), units)
        gathering = fp8_all_gather(model, self.joined)
        backend = JointBackend()
        losses = stepped(model, torch.compile(model, backend=backend), [rank])
        return {
            "losses": [loss for (loss,) in losses],
            "apart": backend.apart,
            "gemms": backend.count(region_gemm),
            "quantized": backend.count(fp8_weights) + backend.count(dequantized),
            "in forward": sum(transposed in {n.target for n in g.nodes} for g in backend.graphs if is_forward(g)),
            "transposed": backend.count(transposed),
            "in fp8": gathering.in_fp8,
            "regions": [sorted(region) for region in loka.regions(model).applied],
        }


def is_forward(graph):
    return not any("tangents" in str(node.target) for node in graph.nodes if node.op == "placeholder")


def stepped(model, called, ranks):
    """Losses [STEPS][ranks] under autocast; an update has the mean gradient of the ranks in this process."""
    optimizer = torch.optim.Adam(model.parameters(), LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = []
        for rank in ranks:
            x, y = rows(step, rank, 64)
            with torch.autocast("cpu", torch.bfloat16):
                out = called(x)
            loss = torch.nn.functional.mse_loss(out.float().sum(-1), y)
            loss.backward()
            found.append(loss.item())
        for parameter in model.parameters():
            parameter.grad /= len(ranks)
        optimizer.step()
        losses.append(found)
    return losses


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(Exact(plan_of(uneven), plan_of(joinable)), 2, tmp_path_factory.mktemp("two"))


def test_two_ranks_equal_one_process_at_every_step(two):
    losses = alone(loka.convert(uneven(), plan_of(uneven)), NAMES, 2)
    for rank, found in enumerate(two):
        assert found["uneven"] == [each[rank] for each in losses]


def test_one_all_reduce_for_all_weights_and_none_in_backward(two):
    for found in two:
        assert found["checkpointed"]["losses"] == found["uneven"]
        assert found["checkpointed"]["agreed"] == [len(NAMES)] * STEPS


def test_regions_read_the_gathered_bytes(two):
    """A unit for the model: one region, nothing quantized in the graph, transposes made in backward; and the
    losses of one process whose regions quantize their weights themselves, bit for bit."""
    model = loka.convert(joinable(), plan_of(joinable))
    losses = stepped(model, torch.compile(model, backend=JointBackend()), [0, 1])
    torch._dynamo.reset()
    for rank, found in enumerate(two):
        root = found["root"]
        assert root["in fp8"] == tuple(f"layers.{n}.weight" for n in range(3))
        assert root["regions"] == [["layers.0", "layers.1", "layers.2"]]
        assert (root["quantized"], root["transposed"], root["in forward"]) == (0, 2, 0)
        assert not root["apart"]
        assert root["losses"] == [each[rank] for each in losses]


def test_a_unit_of_several_modules_cuts_regions(two):
    """FSDP2 stands before each of them, and Dynamo compiles what is between: what the docs say of units."""
    for found in two:
        assert found["group"]["regions"] == [["layers.0"], ["layers.1"], ["layers.2"]]
        assert found["group"]["quantized"] == 0
        assert found["group"]["losses"] == pytest.approx(found["root"]["losses"], rel=0.1)
