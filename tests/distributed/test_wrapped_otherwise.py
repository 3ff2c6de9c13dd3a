"""What an outside check found of meshes, hooks and forwards that no other test has."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from models import forced_plan, stats_of
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

import loka
from loka.core.exceptions import LokaError, PlanMismatch
from loka.distributed import GradientWire, choose_gradients, fp8_all_gather, send_gradients
from loka.train import TrainConfig
from loka.train.average import as_averaged, averaged_weights

POW2 = "emulated:rowwise_e4m3_pow2"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(a, b) for a, b in ((32, 64), (64, 48), (48, 16)))
            self.norm = nn.LayerNorm(16)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def rows(step, rank=0):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, x):
    return (model(x).float() * torch.linspace(-1, 2, 16)).sum(dim=1).square().mean()  # the norm's sum is constant


def sharded(plan=None, *, gathered=True, mesh=None):
    model = Net() if plan is None else loka.convert(Net(), plan)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    if plan is not None and gathered:
        fp8_all_gather(model, plan)
    return model


def of(model):
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).tolist()


def told(call):
    try:
        call()
    except LokaError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def evaluated_elsewhere(model, x):
    """A forward of other weights, that are gone again behind it."""
    model.reshard()
    mine = [p.to_local().detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().data.mul_(-0.4)  # which no version counts
        model(x)
        model.reshard()
        for p, kept in zip(model.parameters(), mine, strict=True):
            p.to_local().data.copy_(kept)


def swapped(model, x, *, pending=1, evaluated=True):
    """Gradients of the last of some forwards, the others' dropped, behind which one came of other weights."""
    losses = [loss_of(model, x * (1 + at)) for at in range(pending)]
    for loss in losses[:-1]:
        loss.backward()
        model.zero_grad()
    if evaluated:
        evaluated_elsewhere(model, x)
    losses[-1].backward()
    return of(model)


def interrupted(model, rank):
    """Losses of four steps, of which an interrupt ends the second's first forward."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []

    def stop(*args):
        raise KeyboardInterrupt

    for step in range(4):
        if step == 1:
            handle = model.norm.register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                model(rows(9, rank))
            handle.remove()
            for unit in (*model.blocks, model):
                unit.reshard()
        loss = loss_of(model, rows(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Own(DefaultReduceScatter):
    pass


class Complex(nn.Linear):
    def __init__(self):
        super().__init__(4, 4, dtype=torch.complex64)


@dataclass
class TwoRanks:
    plan: object

    def __call__(self, rank, folder):
        x, found = rows(0, rank), {}
        found["swapped"] = [
            [swapped(sharded(self.plan), x, pending=pending, evaluated=evaluated) for evaluated in (True, False)]
            for pending in (1, 2)
        ]
        found["interrupted"] = [interrupted(sharded(self.plan, gathered=how), rank) for how in (True, False)]
        mine = sharded()
        for unit in (*mine.blocks, mine):
            unit.set_custom_reduce_scatter(Own())
        found["own"] = told(lambda: send_gradients(mine, GradientWire()))
        twice = sharded()
        send_gradients(twice, GradientWire())
        found["twice"] = told(lambda: send_gradients(twice, GradientWire(scatter="int8")))
        found["complex"] = told(lambda: send_gradients(DistributedDataParallel(Complex()), GradientWire()))
        alone = sharded()

        def step(number):
            loss_of(alone, rows(number, rank)).backward()
            alone.zero_grad()

        found["vectors"] = sorted(choose_gradients(alone, step).taken)
        found["averaged"] = self.averaged(rank)
        return found

    def averaged(self, rank):
        model = sharded(self.plan)
        config = TrainConfig(batch_size=16, average="tail")
        average = averaged_weights(model, config, 4)
        copy.deepcopy(next(model.parameters()))
        average.update_parameters(type(average.module)(model))
        before = [p.full_tensor().clone() for p in model.parameters()]
        with as_averaged(model, average, config=config), torch.no_grad():
            model(rows(1, rank))  # leaves the root gathered
        return all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    plan = forced_plan(stats_of(Net(), rows(0), lambda y: y.square().sum()), POW2)
    return on_ranks(TwoRanks(plan), 2, tmp_path_factory.mktemp("two"))


def test_backward_takes_the_weights_of_its_own_forward(two):
    """It took the bytes of those that were there in between: half of the gradients was wrong."""
    for rank in two:
        for found, expected in rank["swapped"]:
            assert found == expected
            assert sum(map(abs, found)) > 1


def test_an_interrupted_forward_freezes_no_weights(two):
    """torch calls no hook behind it, and no later forward was taken for the outermost one."""
    for rank in two:
        by_eight_bits, by_torch = rank["interrupted"]
        assert by_eight_bits == pytest.approx(by_torch, rel=1e-5)  # sites run in eight bits in both
        assert len(set(by_torch)) == 4


def test_what_somebody_else_reduces_is_refused(two):
    for rank in two:
        assert "reduce-scatter of their own\n  (root)" in rank["own"]
        assert "reduce-scatter of their own" in rank["twice"]
        assert "weight in complex64" in rank["complex"]


def test_units_of_vectors_alone_do_not_stop_the_gate(two):
    assert two[0]["vectors"] == two[1]["vectors"]


def test_means_of_weights_that_are_gathered_in_eight_bits(two):
    assert all(rank["averaged"] for rank in two)


def four_ranks(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {
        "codecs": told(lambda: send_gradients(sharded(mesh=mesh), GradientWire(scatter=("int8", "bf16")[rank // 2])))
    }
    wide = sharded(mesh=mesh)
    if rank == 3:
        wide.extra = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    return {**found, "one": told(lambda: send_gradients(wide, GradientWire()))}


def test_all_ranks_of_a_mesh_agree_or_none_is_hooked(tmp_path):
    """Shards agreed among themselves: replicas sent by other codecs, or waited for each other."""
    for rank in on_ranks(four_ranks, 4, tmp_path):
        assert rank["codecs"].startswith(PlanMismatch.__name__)
        assert "rank 0: int8, bf16" in rank["codecs"]
        assert "rank 3: bf16, bf16" in rank["codecs"]
        assert "extra in float64" in rank["one"]
