"""Steps of TorchRec's DLRM_DCN through its pipeline: the dense part compiled in bf16, against FP8 by LoKA.

    torchrun --nproc-per-node 2 benchmarks/distributed/torchrec_steps.py --batch-size 64 --shrink 8 \\
        --narrowest 64 --rounds 6 --device cpu --out runs/tiny.jsonl

MLPerf's dense sizes, 26 tables of 10,000 rows of 128 with one id a bag, in DistributedModelParallel by
TorchRec's planner; row-wise AdaGrad, Adam for the dense part; TrainPipelineSparseDist from pinned batches.
All is compiled as one but for the tables, which Dynamo leaves to Python; in arms without `_whole` bottom, cross and
top each by itself, which is slower in bf16 too. CUDA graphs by `--step graph`. Times are those of steps.py;
`groups_us` splits rank 0's.
"""

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from shared import CANDIDATES, Arms, Made, options, parsed, planned

import loka
from loka.cli.torchrun import process_group
from loka.core.compiling import compile_in_place
from loka.core.exchange import ranks_of
from loka.distributed.tables.embedding_bags import torchrec
from loka.distributed.tables.sharded_tables import EXCHANGES, shard_tables
from loka.measurement.settings import COARSE
from loka.train import TrainConfig
from loka.train.optim import build_optimizers
from loka.train.steps.blocks import compiled

WHOLE = "_whole"
ARMS = ("bf16", "loka", "bf16_whole", "loka_whole")
FIELDS, DENSE, ROWS = [f"f{i}" for i in range(26)], 13, 10_000


def dlrm(told: argparse.Namespace, device: torch.device) -> Any:
    dim, *sizes = (size // told.shrink for size in (128, 512, 256, 128, 1024, 1024, 512, 256, 512))
    config, models = torchrec().EmbeddingBagConfig, torchrec("torchrec.models.dlrm")
    sides = {"embedding_dim": dim, "num_embeddings": ROWS}
    tables = [config(name=f"t_{f}", feature_names=[f], **sides) for f in FIELDS]
    torch.manual_seed(0)
    bags = torchrec().EmbeddingBagCollection(tables=tables, device=device)
    return models.DLRMTrain(models.DLRM_DCN(bags, DENSE, sizes[:3], [*sizes[3:7], 1], 3, sizes[7], dense_device=device))


def batches(size: int, *, pinned: bool) -> list[Any]:
    generator, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(8):
        ids = (torch.rand(len(FIELDS) * size, generator=generator) ** 3 * ROWS).long()
        ones = torch.ones(len(ids), dtype=torch.int32)
        sparse = torchrec().KeyedJaggedTensor.from_lengths_sync(FIELDS, ids, ones)
        labels = (torch.rand(size, generator=generator) < 0.2).float()
        dense = torch.randn(size, DENSE, generator=generator)
        batch = torchrec("torchrec.datasets.utils").Batch(dense, sparse, labels)
        found.append(batch.pin_memory() if pinned else batch)
    return found


def probed(told: argparse.Namespace, device: torch.device) -> loka.Stats:
    """Of two steps without wrappers: the cross layers are raw parameters, which Probe finds."""
    model, some = dlrm(told, device).to(device), batches(told.batch_size, pinned=False)
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        for batch in some[:2]:
            with torch.autocast(device.type, torch.bfloat16):
                loss, _ = model(batch.to(device))
            loss.backward()
    return probe.stats()


def plan_of(told: argparse.Namespace, device: torch.device) -> loka.Plan:
    stats = probed(told, device)
    if not told.measured:
        return planned(stats.model, told, device)
    report = loka.measure(stats, device=device, candidates=CANDIDATES, settings=COARSE)
    return loka.agree(loka.plan(report, loka.Budget(ne=None, min_speedup=1.0)))


def by_rows(model: torch.nn.Module, device: torch.device) -> Any:
    """Every table cut over all ranks."""
    sharding = torchrec("torchrec.distributed.sharding_plan")
    ((path, bags),) = [(n, m) for n, m in model.named_modules() if isinstance(m, torchrec().EmbeddingBagCollection)]
    where = {table.name: sharding.row_wise(compute_kernel="fused") for table in bags.embedding_bag_configs()}
    sides = {"local_size": ranks_of(), "world_size": ranks_of(), "device_type": device.type}
    placed = sharding.construct_module_sharding_plan(bags, where, **sides)
    return torchrec("torchrec.distributed.types").ShardingPlan({path: placed})


def made(name: str, told: argparse.Namespace) -> Made:
    device, size = torch.device(told.device), told.batch_size
    plan = plan_of(told, device) if name.startswith("loka") else None
    model = dlrm(told, device)
    placement = by_rows(model, device) if told.tables == "row_wise" else None
    model = shard_tables(model, device=device, batch_size=size, lr=0.02, exchange=told.qcomm, placement=placement)
    optimizers = build_optimizers(model, TrainConfig(batch_size=size, sparse_lr=0.02)).values()
    if plan:
        loka.convert(model, plan)
    replayed = told.step == "graph" and device.type == "cuda"

    def forward(batch: Any) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return model(batch)

    both = SimpleNamespace(
        zero_grad=lambda: [optimizer.zero_grad() for optimizer in optimizers],
        step=lambda: [optimizer.step() for optimizer in optimizers],
    )
    pipeline = torchrec("torchrec.distributed").TrainPipelineSparseDist(model, both, device, custom_model_fwd=forward)

    def more() -> dict[str, Any]:
        found: dict[str, Any] = {"pipelined": len(pipeline._pipelined_modules), "step": told.step}
        found["placed"] = sorted({w.sharding_type for p in model.plan.plan.values() for w in p.values()})
        if plan:
            how = told.plan or ("measured" if told.measured else "by hand")
            found |= {"plan": str(how), "applied": len(loka.regions(model).applied)}
            found["sites"] = sum(d.candidate != "hp" for d in plan.decisions.values())
        return found

    feed = itertools.cycle(batches(size, pinned=device.type == "cuda"))
    if told.step != "eager":
        inner = next(m for m in model.modules() if type(m).__name__ == "DLRM_DCN")
        if name.endswith(WHOLE):
            torch._dynamo.config.optimize_ddp = False  # DMP wraps the dense part in DDP: its buckets would cut it
            pipeline.progress(feed)  # it rewrites the model, by a trace that meets nothing compiled
            inner.sparse_arch.forward = torch._dynamo.disable(inner.sparse_arch.forward)
            compile_in_place(inner, replayed=replayed)
        else:
            compiled(inner, replayed=replayed)

    def step() -> None:
        if replayed:
            torch.compiler.cudagraph_mark_step_begin()
        pipeline.progress(feed)

    return step, more


def main() -> None:
    parser = options()
    parser.add_argument("--shrink", type=int, default=1, help="divides all widths")
    parser.add_argument("--measured", action="store_true", help="plan by probe and measure, on all ranks at once")
    parser.add_argument("--baseline", choices=ARMS, default="bf16_whole")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["loka_whole"], help="against the baseline")
    parser.add_argument("--qcomm", choices=EXCHANGES, default="fp32", help="of embeddings and their gradients")
    parser.add_argument("--tables", choices=["planner", "row_wise"], default="planner", help="where they lie")
    told = parsed(parser)
    with process_group(told.device, of_one=True) as told.device:
        key = f"DLRM_DCN / {told.shrink} {told.tables} {told.qcomm}"
        Arms(key, told, partial(made, told=told)).run(told.baseline, told.arms)


if __name__ == "__main__":
    main()
