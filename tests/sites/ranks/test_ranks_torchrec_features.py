"""What of TorchRec was tried around converted layers: kinds of sharding, codecs of its exchange, checkpoints.

Losses by plan are compared with those of tables that lie whole on one rank each, in the same run. The table
in docs/torchrec.md is of this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign import dlrm
from rank_models import LR, STEPS, forced, planned, probed, runs
from ranks import on_ranks
from test_ranks_torchrec import ROUNDING, ROWS, TABLES, build, by_hand, dense, half
from torch import nn

import loka
from loka.core.records.plan import Plan

pytest.importorskip("torchrec")
pytest.importorskip("fbgemm_gpu")

SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")
CODECS = ("fp16", "bf16", "fp8", "int8")


def sharded(model: nn.Module, kind: str, codec: str = "", fused: Any = torch.optim.SGD) -> nn.Module:
    """DLRMTrain in DistributedModelParallel, its tables trained in their backward."""
    from torchrec.distributed import DistributedModelParallel, sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    tables, ranks = model.get_submodule(TABLES), dist.get_world_size()
    if kind != "data_parallel":  # whose tables the dense optimizer trains
        apply_optimizer_in_backward(fused, tables.parameters(), {"lr": LR})
    place = {
        "table_wise": lambda i: sharding_plan.table_wise(rank=i % ranks),
        "row_wise": lambda i: sharding_plan.row_wise(),
        "column_wise": lambda i: sharding_plan.column_wise(ranks=list(range(ranks))),
        "data_parallel": lambda i: sharding_plan.data_parallel(),
    }[kind]
    where = {f"t{i}": place(i) for i in range(3)}
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
        plan=ShardingPlan({TABLES: sharding_plan.construct_module_sharding_plan(tables, where, **sides)}),
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


@dataclass(frozen=True)
class Tried:
    plan: Plan

    def __call__(self, rank: int, folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in (*SHARDINGS, *CODECS):
            kind, codec = (name, "") if name in SHARDINGS else ("table_wise", name)
            try:
                torch.manual_seed(0)
                model = loka.convert(sharded(build(), kind, codec), self.plan)
                trained = list(model.parameters()) if kind == "data_parallel" else dense(model)
                losses = by_hand(model, torch.optim.SGD(trained, LR), [[half(rank)]] * STEPS)
                found[name] = {"losses": [loss for (loss,) in losses], "runs": runs(model)}
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {error}"}
        return found


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = build()
    (batch,) = dlrm.batch(ROWS)
    return forced(probed(model, lambda step: model(batch)[0]))


@pytest.fixture(scope="module")
def tried(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(Tried(plan), 2, tmp_path_factory.mktemp("tried"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHARDINGS, *CODECS])
def test_converted_layers_run_behind_any_tables(tried: list[dict[str, Any]], plan: Plan, name: str) -> None:
    """What exchanges in 16 or 8 bits moves losses by what its rounding does to embeddings of 0.1."""
    atol = {"fp16": 1e-3, "bf16": 1e-3, "int8": 1e-2}.get(name, ROUNDING)
    for rank in tried:
        if name == "fp8":
            assert rank[name] == {"failed": "RuntimeError: fp8 is not supported by CPU"}, "TorchRec's own"
            continue
        assert "failed" not in rank[name]
        assert rank[name]["runs"] == dict.fromkeys(planned(plan), STEPS)
        assert rank[name]["losses"] == pytest.approx(rank["table_wise"]["losses"], abs=atol, rel=0)


@dataclass(frozen=True)
class Saved:
    """Trains, saves by DCP, goes on; `go_on` loads instead of training first."""

    plan: Plan
    folder: Path
    go_on: bool

    def __call__(self, rank: int, folder: Path) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp
        from torchrec.optim import RowWiseAdagrad

        torch.manual_seed(1 if self.go_on else 0)  # weights that a load has to replace
        model = loka.convert(sharded(build(), "row_wise", fused=RowWiseAdagrad), self.plan)
        rows = [half(r) for r in range(2)] if dist.get_world_size() == 1 else [half(rank)]
        optimizer = torch.optim.SGD(dense(model), LR)
        tables = model.fused_optimizer
        state = {"model": model.state_dict(), "tables": tables.state_dict()}
        if self.go_on:
            dcp.load(state, checkpoint_id=self.folder / "dcp")
            model.load_state_dict(state["model"])
            tables.load_state_dict(state["tables"])
        else:
            by_hand(model, optimizer, [rows] * STEPS)
            state = {"model": model.state_dict(), "tables": tables.state_dict()}
            dcp.save(state, checkpoint_id=self.folder / "dcp")
        now = gathered({**model.state_dict(), **momenta(tables)})
        told = {name: tensor.tolist() for name, tensor in now.items()}
        losses = by_hand(model, optimizer, [rows] * STEPS)
        return {"state": told, "losses": losses, "runs": runs(model)}


def momenta(tables: Any) -> dict[str, Any]:
    state = tables.state_dict()["state"]
    return {f"{name}/{key}": value for name, values in state.items() for key, value in values.items()}


def gathered(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0; nothing of tables elsewhere."""
    found = {}
    for name, tensor in state.items():
        if not hasattr(tensor, "local_shards"):
            found[name] = tensor if torch.is_tensor(tensor) else torch.tensor(tensor)
            continue
        whole = torch.empty(tensor.size()) if dist.get_rank() == 0 else None
        tensor.gather(0, whole)
        if whole is not None:
            found[name] = whole
    return found


def test_a_checkpoint_of_two_ranks_goes_on_on_two_and_on_one(plan: Plan, tmp_path: Path) -> None:
    """State to the bit on either, and the same losses behind it on two. The plan comes with it as a file."""
    plan.save(tmp_path / "plan.json")
    before = on_ranks(Saved(plan, tmp_path, go_on=False), 2, tmp_path)
    loaded = Plan.load(tmp_path / "plan.json")
    two = on_ranks(Saved(loaded, tmp_path, go_on=True), 2, tmp_path)
    (one,) = on_ranks(Saved(loaded, tmp_path, go_on=True), 1, tmp_path)
    assert any("momentum" in name or "exp" in name for name in before[0]["state"]), sorted(before[0]["state"])
    assert two[0]["state"] == before[0]["state"] == one["state"]
    assert [rank["losses"] for rank in two] == [rank["losses"] for rank in before]
    assert one["runs"] == dict.fromkeys(planned(plan), 2 * STEPS)
