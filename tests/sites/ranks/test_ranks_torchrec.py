"""TorchRec's DistributedModelParallel around DLRMTrain of DLRM_DCN on two ranks, and its training pipelines.

Tables lie whole on either rank and learn by SGD in their backward, dense parameters are DDP's. Each rank has
half of the rows, so one process that takes the halves in turn does the same sums (test_ranks_fsdp2.py).
"""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from foreign.models import dlrm
from rank_models import LR, STEPS, forced, left, planned, probed, runs
from ranks import on_ranks
from test_ranks_probe import told
from torch import nn

import loka
from loka.core.records.plan import Plan

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

ROWS = 32
ROUNDING = 8 * 0.7 * 2**-24  # of float32, in losses near 0.7
ORDERS = ("convert first", "wrap first")
WAYS = ("by hand", "TrainPipelineBase", "TrainPipelineSparseDist")
TABLES = "model.sparse_arch.embedding_bag_collection"


def build(name="torchrec_dlrm_train"):
    (entry,) = (foreign for foreign in dlrm.MODELS if foreign.name == name)
    return entry.build()


class Bare(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.held = model

    def forward(self, batch):
        logits = self.held(batch.dense_features, batch.sparse_features).squeeze(-1)
        return (nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float()),)


def half(rank):
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    (batch,) = dlrm.batch(ROWS)
    mine = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    bags = [batch.sparse_features[key].to_dense()[mine] for key in dlrm.NAMES]
    lengths = torch.tensor([len(bag) for bags_of_key in bags for bag in bags_of_key])
    values = torch.cat([bag for bags_of_key in bags for bag in bags_of_key])
    sparse = KeyedJaggedTensor.from_lengths_sync(dlrm.NAMES, values, lengths)
    return Batch(batch.dense_features[mine], sparse, batch.labels[mine])


def sharded(model, kind="table_wise", codec="", path=TABLES):
    """The same model and weights in DistributedModelParallel, its tables trained by SGD in their backward."""
    from torchrec.distributed import DistributedModelParallel, sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    tables, ranks = model.get_submodule(path), dist.get_world_size()
    if kind != "data_parallel":  # whose tables the dense optimizer trains
        apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": LR})
    place = {
        "table_wise": lambda i: sharding_plan.table_wise(rank=i % ranks),
        "row_wise": lambda i: sharding_plan.row_wise(),
        "column_wise": lambda i: sharding_plan.column_wise(ranks=list(range(ranks))),
        "data_parallel": lambda i: sharding_plan.data_parallel(),
    }[kind]
    where = {f"t{i}": place(i) for i in range(dlrm.FEATURES)}
    sides = {"local_size": ranks, "world_size": ranks, "device_type": "cpu"}
    registry = None
    if codec:
        both = {"forward_precision": CommType(codec), "backward_precision": CommType(codec)}
        rows = {"fp8_quantize_dim": dlrm.DIM} if codec == "fp8" else {}  # a scale for each looked-up row
        registry = get_qcomm_codecs_registry(QCommsConfig(**both, **rows), device=torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=ShardingPlan({path: sharding_plan.construct_module_sharding_plan(tables, where, **sides)}),
        sharders=[EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)],
    )
    for name, tensor in wrapped.state_dict().items():  # sharding draws tables anew
        if not hasattr(tensor, "local_shards"):
            tensor.copy_(before[name])
            continue
        for shard in tensor.local_shards():
            begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            part = tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))
            shard.tensor.copy_(before[name][part])
    return wrapped


def dense(model):
    return [parameter for name, parameter in model.named_parameters() if "embedding_bags" not in name]


@dataclass(frozen=True)
class Job:
    plan: Plan

    def __call__(self, rank, folder):
        found = {f"{order}, {way}": self.trained(rank, order, way) for order in ORDERS for way in WAYS}
        for order in ORDERS:
            found[f"{order}, DLRM_DCN"] = self.bare(rank, order)
        wrapped = sharded(build())
        batch = half(rank)
        stats = probed(wrapped, lambda step: wrapped(batch)[0])
        return {**found, "probed": told(stats)}

    def bare(self, rank, order):
        """DLRM_DCN by itself, with a plan of its own that was probed within DMP."""
        path = TABLES.removeprefix("model.")
        wrapped = sharded(build("torchrec_dlrm_dcn"), path=path)
        batch = half(rank)
        plan = forced(probed(wrapped, lambda step: Bare(wrapped)(batch)[0]))
        model = build("torchrec_dlrm_dcn")
        model = sharded(loka.convert(model, plan) if order == "convert first" else model, path=path)
        model = model if order == "convert first" else loka.convert(model, plan)
        losses = by_hand(Bare(model), torch.optim.SGD(dense(model), LR), [[batch]] * STEPS)
        return {"losses": [loss for (loss,) in losses], "runs": runs(model), "left": left(loka.revert(model))}

    def trained(self, rank, order, way):
        from torchrec.distributed import train_pipeline

        if order == "convert first":
            model = sharded(loka.convert(build(), self.plan))
        else:
            model = loka.convert(sharded(build()), self.plan)
        optimizer = torch.optim.SGD(dense(model), LR)
        found = {}
        if way == "by hand":
            losses = by_hand(model, optimizer, [[half(rank)]] * STEPS)
        else:
            pipeline = getattr(train_pipeline, way)(model, optimizer, torch.device("cpu"))
            batches = iter([half(rank) for _ in range(STEPS)])
            losses = [[pipeline.progress(batches)[0].item()] for _ in range(STEPS)]
            found["pipelined"] = len(getattr(pipeline, "_pipelined_modules", ()))
        found |= {"losses": [loss for (loss,) in losses], "runs": runs(model)}
        loka.revert(model)
        return {**found, "left": left(model)}


def by_hand(model, optimizer, steps):
    losses = []
    for parts in steps:
        optimizer.zero_grad()
        found = [model(part)[0] for part in parts]
        (sum(found) / len(found)).backward()
        optimizer.step()
        losses.append([loss.item() for loss in found])
    return losses


@pytest.fixture(scope="module")
def stats():
    model = build()
    (batch,) = dlrm.batch(ROWS)
    return probed(model, lambda step: model(batch)[0])


@pytest.fixture(scope="module")
def plan(stats):
    return forced(stats)


@pytest.fixture(scope="module")
def ranks(plan, tmp_path_factory):
    return on_ranks(Job(plan), 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(plan):
    """Losses [STEPS][2] of one process. Its tables learn by the same SGD."""
    model = loka.convert(build(), plan)
    return by_hand(model, torch.optim.SGD(model.parameters(), LR), [[half(0), half(1)]] * STEPS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS)
def test_two_ranks_train_as_one_process(ranks, alone, plan, order, way):
    for rank in range(2):
        found = ranks[rank][f"{order}, {way}"]
        assert found["losses"] == pytest.approx([both[rank] for both in alone], abs=ROUNDING, rel=0)
        assert found["runs"] == dict.fromkeys(planned(plan), STEPS)
        assert not found["left"]
        if way == "TrainPipelineSparseDist":
            assert found["pipelined"] == 1, "its tables are looked up ahead"


@pytest.mark.parametrize("order", ORDERS)
def test_dlrm_dcn_by_itself_with_a_plan_from_within(ranks, alone, plan, order):
    """Its names are those of DLRMTrain without `model`, its losses the same."""
    for rank in range(2):
        found = ranks[rank][f"{order}, DLRM_DCN"]
        assert found["losses"] == pytest.approx([both[rank] for both in alone], abs=ROUNDING, rel=0)
        assert found["runs"] == {site.removeprefix("model."): STEPS for site in planned(plan)}
        assert not found["left"]


def test_a_probe_through_the_wrapper_has_the_bare_names(ranks, stats):
    assert stats.coverage.seen == 1
    assert {layer.no_effect for layer in stats.layers.values()} == {""}
    for rank in ranks:
        found = rank["probed"]
        assert found["signature"] == stats.model
        assert found["names"] == set(stats.layers)
        assert found["seen"] == 1
        assert found["reasons"] == {""}
        assert found["effects"]
