"""What `torchrun -m loka train` adds to a command: the process group, and the model on every rank.

Each rank trains the whole model on rows of its own, in torch's DistributedDataParallel; rank 0 speaks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loka.core.exchange import ranks_of

TABLES = (nn.Embedding, nn.EmbeddingBag)


@contextmanager
def process_group(device: str) -> Iterator[str]:
    """Within it the ranks that torchrun started are one group; yields the device of this one.

    A group that is there already is used, and left. Without torchrun, or alone under it, nothing happens.
    Other ranks than the first say nothing but errors.
    """
    started = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if started:
        if device == "cuda":  # the one GPU of this rank; "cuda:1" would be one for all
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        with ExitStack() as held:
            if rank_and_ranks()[0]:
                held.enter_context(redirect_stdout(held.enter_context(open(os.devnull, "w"))))
            yield device
    finally:
        if started:
            dist.destroy_process_group()


def rank_and_ranks() -> tuple[int, int]:
    return (dist.get_rank(), ranks_of()) if ranks_of() > 1 else (0, 1)


def replicated(model: nn.Module, device: str) -> nn.Module:
    """The model in DistributedDataParallel; alone, as it is.

    NCCL adds dense gradients only, so there tables get those, and Adam.
    """
    if ranks_of() == 1:
        return model
    if device.startswith("cuda"):
        for module in model.modules():
            if isinstance(module, TABLES):
                module.sparse = False
    return DistributedDataParallel(model.to(device))
