"""Gathers that no forward of a module asked for, and weights that stay gathered: two ranks over gloo, FP8 gathers
against FSDP2's own of the same sites."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from gather_jobs import shard
from ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from towers import loss_of, plan_of, rows, tower, width

import loka
from loka.core.exceptions import LokaError, NoKernelFits
from loka.distributed import fp8_all_gather, replicated_tables, shard_dense
from loka.nn.fsdp_units import units_of

STEPS, RATE = 5, 0.03  # weights pass powers of two by it, and so scales change

# Eight roundings of float32 in a loss near 1, doubled by each of five steps at most.
ROUNDING = 2**5 * 8 * 2**-24


def sides():
    return tower(32, 64, 64, 16)


class Scored(nn.Sequential):
    def loss(self, x, target):
        return nn.functional.mse_loss(self.forward(x).sum(-1), target)


def scored():
    return Scored(*sides())


@dataclass(frozen=True)
class Job:
    plan: loka.Plan
    of_scored: loka.Plan

    def __call__(self, rank, folder):
        ways = {"unshard": self.unshard, "async": self.asynchronously, "method": self.method}
        found = {
            f"{name}, {units}": [
                self.losses(way, units, fp8=fp8) for fp8 in (False, True) if name != "method" or units == "root"
            ]
            for name, way in ways.items()
            for units in ("root", "layer")
        }
        return {name: both for name, both in found.items() if both} | {
            "kept": [self.kept(fp8=fp8) for fp8 in (False, True)],
            "removed": self.removed(),
            "extra": self.extra(rank),
            "compiled": self.compiled(),
            "refused": [self.tables_in_a_unit(), self.tensor_parallel()],
        }

    def made(self, make, plan, units, *, fp8):
        model = shard(loka.convert(make(), plan), units)
        return model, fp8_all_gather(model, plan) if fp8 else None

    def losses(self, way, units, *, fp8):
        make, plan = (scored, self.of_scored) if way == self.method else (sides, self.plan)
        model, _ = self.made(make, plan, units, fp8=fp8)
        if make is scored:
            register_fsdp_forward_method(model, "loss")
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        found = []
        for step in range(STEPS):
            loss = way(model, *rows(step, dist.get_rank(), width(model)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def unshard(self, model, x, target):
        for unit in units_of(model).values():
            unit.unshard()
        return loss_of(model, x, target)

    def asynchronously(self, model, x, target):
        handles = [unit.unshard(async_op=True) for unit in units_of(model).values()]
        for handle in handles:
            handle.wait()
        return loss_of(model, x, target)

    def method(self, model, x, target):
        return model.loss(x, target)

    @torch.no_grad()
    def kept(self, *, fp8):
        """Its root stays gathered behind a forward without backward, whatever is written to shards meanwhile."""
        model, _ = self.made(sides, self.plan, "root", fp8=fp8)
        x, shards = rows(0, 0, width(model))[0], list(model.parameters())
        before = model(x)
        for parameter in shards:
            parameter.to_local().data.mul_(1.9)
        stale = model(x)
        model.reshard()
        return [y.sum().item() for y in (before, stale, model(x))]

    @torch.no_grad()
    def removed(self):
        model, gathering = self.made(sides, self.plan, "root", fp8=True)
        x = rows(0, 0, width(model))[0]
        model(x)
        gathering.remove()
        loka.revert(model)
        torch.testing.assert_close(model(x), sides()(x))
        return True

    @torch.no_grad()
    def extra(self, rank):
        """As FSDP2's own, an evaluation of more batches on one rank gathers nothing."""
        model, _ = self.made(sides, self.plan, "root", fp8=True)
        for step in range(2 + rank):
            model(rows(step, rank, width(model))[0])
        dist.barrier()
        return True

    def compiled(self):
        """A unit that is a wrapper."""
        inner = nn.Sequential(nn.EmbeddingBag(50, 8, mode="sum", sparse=True), nn.Linear(8, 4))
        model = shard_dense(torch.compile(inner, backend="eager"), [], device="cpu", gather_in=None)
        assert isinstance(model, FSDPModule)
        return [list(units_of(model)), len(replicated_tables(model))]

    def tables_in_a_unit(self):
        model = nn.Sequential(nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 4)), nn.Linear(4, 1))
        with pytest.raises(LokaError, match="tables with sparse gradients") as caught:
            shard_dense(model, [model[0]], device="cpu", gather_in=None)
        return caught.value.why

    def tensor_parallel(self):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        model = parallelize_module(sides(), mesh, {"2": ColwiseParallel()})
        with pytest.raises(NoKernelFits, match="DTensors") as caught:
            loka.convert(model, self.plan)
        return caught.value.why


@pytest.mark.slow
def test_weights_and_scales_of_one_time(tmp_path):
    found = on_ranks(Job(plan_of(sides), plan_of(scored)), 2, tmp_path)
    for rank in found:
        for name in ("unshard, root", "unshard, layer", "async, root", "async, layer", "method, root"):
            own, fp8 = rank[name]
            assert fp8 == pytest.approx(own, rel=ROUNDING), name
            assert max(own) > 1.01 * min(own), "it learns"
        own, fp8 = rank["kept"]
        assert fp8 == pytest.approx(own, rel=ROUNDING)
        assert own[0] == own[1] != own[2]
        assert rank["removed"]
        assert rank["extra"]
        assert rank["compiled"] == [[""], 1]
        assert rank["refused"] == [("0",), ("2.weight", "2.bias")]
