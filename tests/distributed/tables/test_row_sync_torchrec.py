"""TorchRec's sharded tables, trained by fbgemm's fused row-wise AdaGrad, kept together by row_sync.

DMPCollection runs on GPUs alone; here its groups are made by hand, of ranks of one gloo world.
"""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from loka.distributed import row_sync

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

ROWS, WIDTH, BATCH = 60, 8, 32
NAMES = ("a", "b", "c")


class Model(nn.Module):
    """Tables of three features, two of which share one; a layer with fixed weights behind them."""

    def __init__(self):
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        shared = EmbeddingBagConfig(name="t0", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=["a", "b"])
        alone = EmbeddingBagConfig(name="t1", embedding_dim=WIDTH, num_embeddings=2 * ROWS, feature_names=["c"])
        self.tables = EmbeddingBagCollection(tables=[shared, alone])
        self.top = nn.Linear(WIDTH * len(NAMES), 1).requires_grad_(False)

    def forward(self, features, labels):
        logits = self.top(self.tables(features).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)


def rows(step, part):
    from torchrec import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(NAMES), BATCH), generator=generator)
    bags = [[torch.randint(0, ROWS, (int(n),), generator=generator) for n in key] for key in lengths]
    labels = torch.randint(0, 2, (BATCH,), generator=generator).float()
    values = torch.cat([bag for key in bags for bag in key[part]])
    return KeyedJaggedTensor.from_lengths_sync(list(NAMES), values, lengths[:, part].flatten()), labels[part]


def grid(size):
    """Groups that hold the tables, `size` ranks each, as DMPCollection makes them."""
    step = dist.get_world_size() // size
    sides = [[step * r + g for r in range(size)] for g in range(step)]
    return DeviceMesh("cpu", sides, mesh_dim_names=("replicate", "shard"))


def sharded(mesh, how, options):
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv2D, ShardingPlan
    from torchrec.optim import RowWiseAdagrad
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), options)
    group = mesh.get_group("shard")
    world = dist.get_world_size(group)
    where = {
        name: row_wise() if how == "rows" else table_wise(rank=place % world) for place, name in enumerate(("t0", "t1"))
    }
    sides = {"local_size": world, "world_size": world, "device_type": "cpu"}
    placed = construct_module_sharding_plan(model.tables, where, **sides)
    for sharding in placed.values():  # as DMPCollection does: from ranks of the group to those of the world
        sharding.ranks = [dist.get_global_rank(group, r) for r in sharding.ranks]
        for shard in sharding.sharding_spec.shards:
            shard.placement._rank = dist.get_global_rank(group, shard.placement.rank())
    env = ShardingEnv2D(
        global_pg=dist.group.WORLD, sharding_pg=group, replica_pg=mesh.get_group("replicate"), device_mesh=mesh
    )
    return DistributedModelParallel(
        model,
        env=env,
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": placed}),
        sharders=[EmbeddingBagCollectionSharder()],
        init_data_parallel=False,
    )


def batched(model):
    from loka.distributed.tables.lookups import lookups_of

    return list({id(one.module): one.module for one in lookups_of(model)}.values())


def start(model):
    """The same rows on every replica: sharding draws them anew."""
    for one in batched(model):
        for table in one.split_embedding_weights():
            generator = torch.Generator().manual_seed(len(table))
            table.copy_(torch.randn(table.shape, generator=generator) * 0.1)


def told(model):
    return {
        "weights": [w.tolist() for one in batched(model) for w in one.split_embedding_weights()],
        "momentum": [m.tolist() for one in batched(model) for (m,) in one.split_optimizer_states()],
    }


def two_replicas_of_two_shards(rank, folder):
    """Ranks 0 and 2 hold the tables, 1 and 3 hold them too; each rank has a quarter of the rows."""
    mesh = grid(2)
    part = slice(rank * BATCH // 4, (rank + 1) * BATCH // 4)
    found = {}
    for how in ("tables", "rows"):
        torch.manual_seed(0)
        model = sharded(mesh, how, {"lr": 0.1, "eps": 1e-8})
        start(model)
        sync = row_sync(model, mesh.get_group("replicate"), every=4, staleness=2)
        first = told(model)
        for step in range(13):
            model(*rows(step, part)).backward()
            sync.step()
        sync.flush()
        found[how] = {**told(model), "first": first["weights"], "traffic": vars(sync.traffic)}
    return found


@pytest.mark.slow
def test_replicas_of_sharded_tables_agree_to_the_bit(tmp_path):
    answers = on_ranks(two_replicas_of_two_shards, 4, tmp_path)
    for how in ("tables", "rows"):
        for shard in (0, 2):
            mine, other = answers[shard][how], answers[shard + 1][how]
            assert mine["weights"] == other["weights"] != mine["first"]
            assert mine["momentum"] == other["momentum"]
            assert mine["traffic"]["received"] > 0
    assert answers[0]["rows"]["weights"] != answers[2]["rows"]["weights"], "shards of a table are its parts"


def by_replicas(rank, folder):
    """Two replicas of half of the rows each, and one group with all of them."""
    mesh = grid(1)
    found = {}
    half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
    for name, part, every in (("one", slice(None), 1), ("two", half, 1), ("seldom", half, 8)):
        torch.manual_seed(0)
        model = sharded(mesh, "tables", {"lr": 0.02, "eps": 1e-8})
        start(model)
        sync = row_sync(model, every=every, codec="fp32", one_group=True)
        for step in range(80 if name != "one" or rank == 0 else 0):  # each by itself
            model(*rows(step, part)).backward()
            if name != "one":
                sync.step()
        found[name] = told(model)
    return found


def test_replicas_are_one_group(tmp_path):
    """80 steps of rates that V's roundings (2^-24 of it, 1e-5 where differences of it are small) change; every eight
    steps replicas go their own ways in between."""
    found = on_ranks(by_replicas, 2, tmp_path)[0]
    for place in range(2):
        one, two = (torch.tensor(found[name]["weights"][place]) for name in ("one", "two"))
        assert (one - two).abs().max() < 1e-3 * 0.02 * 80
    v = {name: torch.cat([torch.tensor(x) for x in found[name]["momentum"]]) for name in found}
    torch.testing.assert_close(v["two"], v["one"], rtol=1e-3, atol=1e-9)
    assert abs(float(v["seldom"].sum() / v["one"].sum()) - 1) < 0.1


@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 4, 8)])
def test_tables_of_one_width_are_one(widths):
    """Features of table 0, 2, 0 and 1, in bags; indices that are none are row 0 of their table, as fbgemm has it."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    from loka.distributed.tables.lookups import lookups_of

    sizes, tables = (5, 7, 4), (0, 2, 0, 1)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(n, d, EmbeddingLocation.HOST, ComputeDevice.CPU) for n, d in zip(sizes, widths, strict=True)],
        feature_table_map=list(tables),
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.5,
        eps=1e-3,
    )
    found = lookups_of(nn.ModuleList([module]))
    assert len(found) == (1 if len(set(widths)) == 1 else 3)
    bags = [[[1, 4]], [[3, 9]], [[], [0]][1:], [[6, -1]]]  # by feature, of a batch of one
    indices = torch.tensor([i for bag in bags for i in bag[0]] + [2])  # the last is in no bag
    offsets = torch.tensor([0, 2, 4, 5, 7])
    expected = {0: {1, 4, 0}, 1: {6, 0}, 2: {3, 0}}
    for place, one in enumerate(found):
        weight, momentum = one.tensors()
        whole = [t for t in range(3) if len(found) == 1 or t == place]
        begins = dict(zip(whole, torch.tensor([0] + [sizes[t] for t in whole]).cumsum(0).tolist(), strict=False))
        assert set(one.ids(((indices, offsets), {})).tolist()) == {begins[t] + i for t in whole for i in expected[t]}
        assert set(one.ids(((indices,), {"offsets": offsets})).tolist()) == set(
            one.ids(((indices, offsets), {})).tolist()
        )
        for t in whole:
            rows = slice(begins[t], begins[t] + sizes[t])
            weight[rows], momentum[rows] = float(t), float(10 + t)
        assert (one.adagrad().lr, one.adagrad().eps) == (0.5, 1e-3)
    for t, (weight, (state,)) in enumerate(
        zip(module.split_embedding_weights(), module.split_optimizer_states(), strict=True)
    ):
        assert (weight == t).all(), "written through"
        assert (state == 10 + t).all()
