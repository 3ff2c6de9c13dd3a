"""Training steps on several GPUs: compiled bf16 against LoKA, by DDP and FSDP2, gathers bf16 and FP8.

    torchrun --nproc-per-node 2 benchmarks/distributed/steps.py --arms ddp_loka --out runs/steps.jsonl
    torchrun --nproc-per-node 2 benchmarks/distributed/steps.py --model wukong:small --narrowest 16 \\
        --batch-size 64 --rounds 6 --device cpu --out runs/tiny.jsonl

An arm with `_graph` behind its name, or any by `--step graph`, captures its steps whole, collectives included; tables
of FSDP2 stay beside. With `_blocks` each compiled block is graphs of its own (DDP). A step of Wukong is that
of `loka train`, optimizers and metrics included; of the tower, six layers of 2048, forward, backward and
AdamW. One synthetic batch of each rank. The plan is --plan, or by hand: layers with
both sides of --narrowest and more. Each arm takes turns with bf16 of its engine, rounds of four steps, the
slowest rank of each; medians and 95 % intervals. `comm_us`: rank 0's time in NCCL's kernels a step, by
torch.profiler, waiting for the other rank included; `exposed_us`: of it with no other kernel beside it.
"""

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from shared import Arms, Made, Tower, options, parsed, planned, ran, replicated, tell, trained

import loka
from loka import mods
from loka.cli.inputs import model_builder
from loka.cli.models import MODS
from loka.cli.torchrun import over_ranks, process_group
from loka.core.exchange import ranks_of
from loka.data import SyntheticClicks
from loka.distributed import choose_gather, fp8_all_gather
from loka.graph.attach import attach
from loka.nn.linears import signature
from loka.train import TrainConfig
from loka.train.run import Run

GRAPH, BLOCKS = "_graph", "_blocks"
ENGINES = {"ddp": ("ddp_loka", "ddp_rowwise"), "fsdp2": ("fsdp2_loka_fp8", "fsdp2_loka", "fsdp2_loka_auto")}
ARMS = tuple(
    arm
    for engine, loka in ENGINES.items()
    for name in (f"{engine}_bf16", *loka)
    for arm in (name, name + GRAPH, name + BLOCKS)
)


def as_told(name: str, told: Namespace) -> tuple[str, Any]:
    """An arm without its suffix, and how its steps run."""
    bare = name.removesuffix(BLOCKS).removesuffix(GRAPH)
    return bare, told.step if bare == name else "graph"


def zoo(name: str, told: Namespace) -> Made:
    device, size, ranks = torch.device(told.device), told.batch_size, ranks_of()
    rows = SyntheticClicks(rows=size * ranks, seed=0, shard=dist.get_rank(), shards=ranks)
    torch.manual_seed(0)
    with device:
        model = model_builder(told.model)(rows)
    mods.apply(model, MODS)
    plan = planned(signature(model), told, device) if "loka" in name else None
    whole = not name.endswith(BLOCKS)
    name, mode = as_told(name, told)
    config = TrainConfig(batch_size=size, device=told.device, step=mode, capture_collectives=mode == "graph" and whole)
    model = over_ranks(model, config, engine="torch", dense=name.partition("_")[0], exchange="fp32")
    gathering = None
    if plan:
        loka.convert(model, plan)
    if plan and name.endswith(("fp8", "auto")):
        units = choose_gather(model, plan).taken if name.endswith("auto") else None
        gathering = fp8_all_gather(model, plan, units=units)
    run = Run(model, config, steps=100_000, say=tell)
    batch = next(iter(rows.batches(size))).to(device)

    def more() -> dict[str, Any]:
        found: dict[str, Any] = {"step": run.step_reason or mode}
        if plan:
            found |= {"plan": str(told.plan or "by hand"), "applied": len(loka.regions(model).applied)}
            found["sites"] = sum(d.candidate != "hp" for d in plan.decisions.values())
        if gathering:
            found["gathered"] = round(gathering.wire_bytes / gathering.wire_bytes_in_bf16, 3)
        return found

    return partial(run.learn, batch), more


def tower(name: str, told: Namespace) -> Made:
    device = torch.device(told.device)
    name, mode = as_told(name, told)
    told = Namespace(**{**vars(told), "step": mode})  # of this arm alone
    torch.manual_seed(0)
    model = Tower(told.width, 6).to(device)
    layers = signature(model)
    if name == "ddp_loka":
        loka.convert(model, planned(layers, told, device))
    elif name == "ddp_rowwise":
        attach(model, layers.layers, dict.fromkeys(layers.layers, ("torch:rowwise_e4m3",) * 3))
    if told.step != "eager":
        model.compile()
    x = torch.randn(told.batch_size, told.width, device=device)
    step = trained(model, replicated(model, told), x, graph=told.step == "graph")
    return step, lambda: {"step": ran(step, told)}


def main() -> None:
    parser = options()
    parser.add_argument("--model", default="wukong:2gf", help="or tower")
    parser.add_argument("--width", type=int, default=2048, help="of the tower")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["ddp_loka", "fsdp2_loka_fp8", "fsdp2_loka"])
    told = parsed(parser)
    with process_group(told.device, of_one=True) as told.device:
        make = partial(tower if told.model == "tower" else zoo, told=told)
        for engine in ("ddp", "fsdp2"):
            names = [name for name in told.arms if name.startswith(engine)]
            if names:
                Arms(told.model, told, make).run(f"{engine}_bf16", names)


if __name__ == "__main__":
    main()
