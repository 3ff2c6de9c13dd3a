"""What `torchrun -m loka train` adds to a command: the process group, and the model over its ranks.

Each rank trains on rows of its own, in torch's DistributedDataParallel or FSDP2, or with tables sharded by
TorchRec; rank 0 speaks.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loka.core.exceptions import LokaError, UnknownName
from loka.core.exchange import rank_of, ranks_of
from loka.core.recording import capture_stream, synced
from loka.distributed import shard_dense
from loka.distributed.tables.lookups import TABLES
from loka.distributed.tables.sharded_tables import EXCHANGES, shard_tables
from loka.train import TrainConfig
from loka.train.checkpointing.identity import layout
from loka.train.ranks import require_alike_told
from loka.train.steps.blocks import blocks_of
from loka.train.steps.graphed import release_collectives

DENSE = ("ddp", "fsdp2")
ENGINES = ("torch", "torchrec")


@contextmanager
def process_group(device: str, *, of_one: bool = False) -> Iterator[str]:
    """Inside, the ranks that torchrun started are one process group; yields the device of this rank.

    A group that exists already is used and left as it is. Without torchrun, or with a single rank, there is no group,
    or with `of_one` a group of this process alone. Ranks other than the first say nothing but errors.
    """
    several = under_torchrun()
    started = not dist.is_initialized() and (several or of_one)
    if started:
        if device == "cuda":  # the one GPU of this rank; "cuda:1" would be one for all
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            torch.cuda.set_device(device)
        backend = "nccl" if device.startswith("cuda") else "gloo"
        if several:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ExitStack() as held:
            if rank_and_ranks()[0]:
                held.enter_context(redirect_stdout(held.enter_context(open(os.devnull, "w"))))
            yield device
    finally:
        if started:
            release_collectives()
            dist.destroy_process_group()


def under_torchrun() -> bool:
    """Whether torchrun started several ranks, this process among them."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def require_alone(command: str) -> None:
    """Raises LokaError under torchrun: each rank would do all of it, and write to one folder."""
    if under_torchrun():
        raise LokaError(
            f"loka {command} runs in one process only",
            why=["of all commands only loka train shares its work out to ranks"],
            way_out=f"start loka {command} without torchrun",
        )


def require_same_options(context: typer.Context) -> None:
    """Raises LokaError on all ranks where their options differ; of a path, which may be another on each machine, where
    it is given on some alone. A collective.
    """
    given = {name: "a path" if isinstance(value, Path) else value for name, value in context.params.items()}
    options = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    require_alike_told(options, way_out="start all ranks by one command; paths alone may differ")


def rank_and_ranks() -> tuple[int, int]:
    return rank_of(), ranks_of()


def check_engine(engine: str, dense: str, exchange: str, config: TrainConfig, *, planned: bool) -> None:
    """Raises LokaError where `--engine`, `--dense`, `--qcomm`, `--gather` or `--gradients` has an unknown value, or
    does not fit the others or the number of ranks."""
    for option, value, names in (("engine", engine, ENGINES), ("dense", dense, DENSE), ("qcomm", exchange, EXCHANGES)):
        if value not in names:
            raise UnknownName(f"--{option} {value!r} is not known", way_out=f"one of {', '.join(names)}")
    if engine == "torchrec" and dense == "fsdp2":
        raise LokaError(
            "--engine torchrec keeps the dense part whole on every rank, and --dense fsdp2 shards it",
            why=["TorchRec's DistributedModelParallel wraps it in DistributedDataParallel"],
            way_out="leave --dense out to shard tables, or --engine to shard the dense part",
        )
    if engine == "torch" and exchange != "fp32":
        raise LokaError(
            f"--qcomm {exchange} is for TorchRec's exchange of embeddings, and no other engine exchanges them",
            way_out="add --engine torchrec, or leave --qcomm out",
        )
    if dense == "fsdp2" and ranks_of() == 1:
        raise LokaError(
            "--dense fsdp2 shards over several ranks, and this is one",
            way_out="torchrun --nproc-per-node 4 -m loka train ...; leave --dense out to train alone",
        )
    if config.gradients != "hp" and (ranks_of() == 1 or engine == "torchrec"):
        raise LokaError(
            f"--gradients {config.gradients} needs several ranks, and --engine torch",
            way_out="torchrun --nproc-per-node 4 -m loka train ... without --engine, or leave --gradients out",
        )
    if config.gather == "hp":
        return
    if dense != "fsdp2":
        raise LokaError(
            f"--gather {config.gather} is for FSDP2; nothing else gathers weights",
            way_out="add --dense fsdp2, or leave --gather out",
        )
    if not planned:
        raise LokaError(
            f"--gather {config.gather} gathers the weights of FP8 sites, and no plan says which these are",
            way_out="add --plan or --auto, or leave --gather out",
        )


def over_ranks(model: nn.Module, config: TrainConfig, *, engine: str, dense: str, exchange: str) -> nn.Module:
    """The model as the ranks train it, on the config's device; alone, as it is, but for TorchRec's tables.

    torchrec tables sharded, all else whole on every rank
    ddp      whole on every rank. NCCL adds dense gradients only, so there tables get those, and Adam
    fsdp2    tables whole on every rank, all else sharded, a unit for each block that holds no table
    """
    if engine == "torchrec":
        sides = {"device": config.device, "batch_size": config.batch_size}
        return shard_tables(model, **sides, lr=config.sparse_lr, exchange=exchange)  # type: ignore[arg-type]
    if ranks_of() == 1:
        return model
    if dense == "fsdp2":
        # A model that ends in squeeze(1): the loop writes to no logits.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)
        gather_in = torch.bfloat16 if config.precision == "bf16" else None
        return shard_dense(model, list(blocks_of(model)), device=config.device, gather_in=gather_in)
    stream = None
    if config.device.startswith("cuda"):
        if config.step == "graph" and config.capture_collectives:
            stream = capture_stream(torch.device(config.device))
        for module in model.modules():
            if isinstance(module, TABLES):
                module.sparse = False
    # Other machines may have other code; torch names no weight, and not always the rank.
    require_alike_told({"model": layout(model)}, way_out="build one model on all ranks, by the same code")
    with synced(stream):
        # Gradients lie in what is sent: nothing is copied back.
        return DistributedDataParallel(model.to(config.device), gradient_as_bucket_view=True)


@contextmanager
def naming_unused(model: nn.Module) -> Iterator[None]:
    """Inside, DistributedDataParallel's error about parameters without a gradient names these parameters."""
    try:
        yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
        listed = str(error).rpartition("did not receive grad for rank")[2].partition(":")[2]
        numbers = [int(word) for word in listed.split() if word.isdigit()]
        raise LokaError(
            "some parameters got no gradient in a step, for which DistributedDataParallel waits",
            why=[trained[number] for number in numbers if number < len(trained)],
            way_out="freeze them (requires_grad_(False)), leave them out of the model, or --dense fsdp2",
        ) from error
