"""Two-dimensional sparse parallelism: two groups of ranks with the same tables, against one group of all.

    torchrun --nproc-per-node 4 benchmarks/distributed/two_d.py --out runs/two_d.jsonl
    torchrun --nproc-per-node 4 --no-python python -O benchmarks/distributed/two_d.py --device cpu --steps 30 \\
        --rows 64 --held-out 2000 --seeds 1 --narrowest 16 --out runs/two_d.jsonl       # DMPCollection asserts CUDA

The zoo's small DLRM, its wide layers in FP8 by hand, Adam and the row-wise AdaGrad of fbgemm; synthetic rows, a
quarter of each batch to a rank, the same in all arms, rates constant.

    one           DistributedModelParallel over all ranks
    two, c = 2    DMPCollection, groups of half the ranks, means of whole tables every --every steps; momentum-scaled
                  AdaGrad, by the rate sqrt(c) lr and sqrt(c) eps
    two, c = 1    the same without it
    rows          changed rows in e4m3 by `row_sync(one_group=True)` every --every steps, at the rate of one group
    rows 1        the same every step; rows 4: every fourth

A line of JSON for each seed and arm: NE of the held-out rows, and momentum V over c, summed over rows of all
tables, over that of `one`; the same of rows that were looked up so often in a batch of all ranks (`v_ratio_by`: up
to which mean number), and their share of all lookups. `--larger` multiplies the sizes of tables: ids are rarer in
larger ones. At the end means over seeds, and NE against `one` with Student's 95 % interval.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from shared import append, options, planned, tell, within

import loka
from loka.cli.inputs import model_builder
from loka.cli.torchrun import process_group
from loka.core.error import estimate_mean
from loka.core.exchange import ranks_of
from loka.data import SyntheticClicks
from loka.data.generated.synthetic import VOCAB_SIZES
from loka.distributed import row_sync
from loka.distributed.tables.embedding_bags import quiet, torchrec, with_embedding_bags
from loka.distributed.tables.lookups import lookups_of
from loka.nn.linears import signature
from loka.nn.unwrap import unwrap

ARMS = {"one": 1.0, "two, c = 2": 2.0, "two, c = 1": 1.0, "rows": 1.0, "rows 1": 1.0, "rows 4": 1.0}
LR, EPS = 0.02, 1e-8
UP_TO = (0.1, 1.0, 10.0, 100.0, math.inf)


def _of_cpus(collection: Any) -> Any:
    """DMPCollection names a CPU as if it had a number, which sharded tensors refuse."""

    class OfCpus(collection):  # type: ignore[misc]
        def _remap_sharding_plan(self, plan: Any, *args: Any, **kwargs: Any) -> None:
            super()._remap_sharding_plan(plan, *args, **kwargs)
            for table in (one for placed in plan.plan.values() for one in placed.values()):
                for shard in table.sharding_spec.shards:
                    shard.placement = type(shard.placement)(f"rank:{shard.placement.rank()}/cpu")

    return OfCpus


def tables_of(model: nn.Module) -> list[Any]:
    return list({id(one.module): one.module for one in lookups_of(model)}.values())


def built(told: Any, name: str, seed: int, device: torch.device) -> tuple[nn.Module, loka.Plan]:
    """Tables lie whole on ranks in turn, with the same values in every arm."""
    ranks = ranks_of()
    group = ranks if name == "one" else ranks // 2
    torch.manual_seed(seed)
    model = model_builder("dlrm")(SyntheticClicks(rows=1, seed=0, vocab_sizes=sizes(told)))
    plan = planned(signature(model), told, device)
    with_embedding_bags(model)
    sharding, library = torchrec("torchrec.distributed.sharding_plan"), torchrec("torchrec.distributed")
    ((path, bags),) = [(n, m) for n, m in model.named_modules() if type(m).__name__ == "EmbeddingBagCollection"]
    configs = bags.embedding_bag_configs()
    where = {
        one.name: sharding.table_wise(rank=place % group, compute_kernel="fused") for place, one in enumerate(configs)
    }
    sides = {"local_size": group, "world_size": group, "device_type": device.type}
    placed = torchrec("torchrec.distributed.types").ShardingPlan(
        {path: sharding.construct_module_sharding_plan(bags, where, **sides)}
    )
    optimizer = torchrec("fbgemm_gpu.split_embedding_configs").EmbOptimType.EXACT_ROWWISE_ADAGRAD
    scale = ARMS[name] ** 0.5
    fused = {"optimizer": optimizer, "learning_rate": LR * scale, "eps": EPS * scale}
    sharder = torchrec("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder(fused_params=fused)
    given: dict[str, Any] = {"device": device, "plan": placed, "sharders": [sharder]}
    with quiet():
        if name == "one":
            wrapped = library.DistributedModelParallel(model, **given)
        else:
            collection = torchrec("torchrec.distributed.model_parallel").DMPCollection
            collection = _of_cpus(collection) if device.type == "cpu" else collection
            wrapped = collection(
                model, world_size=ranks, sharding_group_size=group, global_pg=dist.group.WORLD, **given
            )
    for one in tables_of(wrapped):
        for table in one.split_embedding_weights():
            generator = torch.Generator().manual_seed(seed * 1_000_003 + len(table))
            table.copy_(torch.randn(table.shape, generator=generator) * 0.05)
    return wrapped, plan


def momentum(model: nn.Module, counts: list[torch.Tensor]) -> list[float]:
    """V of all rows, then of those that were looked up up to `UP_TO` times a batch; the sum over replicas."""
    mine = torch.zeros(1 + len(UP_TO), dtype=torch.float64)
    for one in tables_of(model):
        for table, (m,) in zip(one.split_embedding_weights(), one.split_optimizer_states(), strict=True):
            (count,) = (each for each in counts if len(each) == len(table))
            mine[0] += m.double().sum().cpu()
            of = torch.bucketize(count, torch.tensor(UP_TO, dtype=torch.float64))
            mine[1:].index_add_(0, of, m.flatten().double().cpu())
    return _summed(mine, model)


def counted(told: Any, seed: int) -> list[torch.Tensor]:
    """How often each id is looked up in a batch of all ranks, by table."""
    sums = [torch.zeros(size, dtype=torch.float64) for size in sizes(told)]
    for batch in batches(told, seed, held_out=False):
        for place, total in enumerate(sums):
            total += torch.bincount(batch.sparse[:, place], minlength=len(total))
    for total in sums:
        on = total.to(told.device)
        dist.all_reduce(on)
        total.copy_(on)
    return [total / told.steps for total in sums]


def sizes(told: Any) -> tuple[int, ...]:
    """No two alike: tables are told apart by them."""
    return tuple(told.larger * size + place for place, size in enumerate(VOCAB_SIZES))


def _summed(mine: torch.Tensor, model: nn.Module) -> list[float]:
    found = mine.double().to(next(model.parameters()).device)
    dist.all_reduce(found)
    return found.tolist()


def batches(told: Any, seed: int, *, held_out: bool) -> Iterator[Any]:
    """Of one world: the first to train on, those behind them to judge by."""
    first = told.steps * told.rows * ranks_of()
    shard: dict[str, Any] = {"shard": dist.get_rank(), "shards": ranks_of(), "vocab_sizes": sizes(told)}
    every = SyntheticClicks(rows=first + told.held_out, seed=seed, **shard)
    if held_out:
        return every.batches(told.rows, start=told.steps)
    return itertools.islice(every.batches(told.rows), told.steps)


def ne(model: nn.Module, told: Any, seed: int, device: torch.device) -> float:
    """Of `told.held_out` rows, by the labels: log loss over the entropy of their mean."""
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        for batch in batches(told, seed, held_out=True):
            batch = batch.to(device)
            logits = model(batch.dense, batch.sparse).float()
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label, reduction="sum")
            sums += torch.tensor([loss.item(), batch.label.sum().item(), len(logits)], dtype=torch.float64)
    loss, positives, count = _summed(sums, model)
    rate = positives / count
    return loss / count / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def trained(told: Any, name: str, seed: int, device: torch.device, counts: list[torch.Tensor]) -> dict[str, Any]:
    model, plan = built(told, name, seed, device)
    loka.convert(model, plan)
    inside = {id(p) for one in tables_of(model) for p in one.parameters()}
    dense = [p for p in unwrap(model).parameters() if id(p) not in inside and p.requires_grad]
    optimizer = torch.optim.Adam(dense, lr=1e-3)
    sync, replicas = None, 1 if name == "one" else 2
    if name.startswith("rows"):
        every = int(name.removeprefix("rows") or told.every)
        replicate = model._ctxs[0].device_mesh.get_group("replicate")
        sync = row_sync(model, replicate, every=every, one_group=True)
    for step, batch in enumerate(batches(told, seed, held_out=False)):
        batch = batch.to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(batch.dense, batch.sparse)
        label = torch.randint_like(batch.label, 2) if told.noise else batch.label
        nn.functional.binary_cross_entropy_with_logits(logits.float(), label).backward()
        optimizer.step()
        if sync:
            sync.step()
        elif replicas > 1 and (step + 1) % told.every == 0:
            model.sync()
    if sync:
        sync.flush()
    elif replicas > 1:
        model.sync()
    v = [each / replicas / ARMS[name] for each in momentum(model, counts)]
    found: dict[str, Any] = {"v": v, "ne": ne(model, told, seed, device)}
    if sync:
        found["traffic"] = str(sync.traffic)
    return found | {"fp8": sum(d.candidate != "hp" for d in plan.decisions.values())}


def main() -> None:
    parser = options()
    parser.set_defaults(narrowest=64)
    parser.add_argument("--rows", type=int, default=2048, help="of a rank in a step")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--held-out", type=int, default=1 << 19)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--noise", action="store_true", help="labels that no row tells, half of them 1")
    parser.add_argument("--larger", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="`one` first")
    told = parser.parse_args()
    told.batch_size = told.rows
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in told.arms}
    with process_group(told.device) as told.device:
        for seed in range(told.first_seed, told.first_seed + told.seeds):
            counts = counted(told, seed)
            share = torch.zeros(len(UP_TO), dtype=torch.float64)
            for count in counts:
                share.index_add_(0, torch.bucketize(count, torch.tensor(UP_TO, dtype=torch.float64)), count)
            for name in told.arms:
                within(told.seconds)
                one = trained(told, name, seed, torch.device(told.device), counts)
                found[name].append(one)
                by = [v / w if w else None for v, w in zip(one["v"], found["one"][-1]["v"], strict=True)]
                one["v_ratio"], one["v_ratio_by"] = by[0], dict(zip(map(str, UP_TO), by[1:], strict=True))
                one["lookups_by"] = (share / share.sum()).tolist()
                one["ne_percent"] = 100 * (one["ne"] / found["one"][-1]["ne"] - 1)
                line = {"cell": f"2D of {ranks_of()} {told.device} seed {seed} {name}", "steps": told.steps, **one}
                tell(json.dumps(line))
                if dist.get_rank() == 0:
                    append(told.out, line)
        for name, runs in found.items() if told.seeds > 1 else ():
            ratio, percent = (estimate_mean([run[what] for run in runs]) for what in ("v_ratio", "ne_percent"))
            tell(f"{name}: V over c, of one group's: {ratio}; NE beside it: {percent} %")


if __name__ == "__main__":
    main()
