"""Bytes between the ranks of a process group, over gloo and nccl. Nothing is pickled.

All functions are collectives or pairs: the ranks that they name call them together, in the same order. The exception is
`follow`, which goes through the store that the ranks met at, so that the first rank never waits.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from loka.core.exceptions import LokaError, PlanMismatch


def has_group() -> bool:
    """Whether there is an initialised process group."""
    return dist.is_available() and dist.is_initialized()


def ranks_of(group: dist.ProcessGroup | None = None) -> int:
    """How many ranks `group` (the default one) has; 1 without an initialised process group.

    Raises ValueError where this process is not in `group`.
    """
    if not has_group():
        return 1
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the group")
    return dist.get_world_size(group)


def rank_of() -> int:
    """This process's rank in the world; 0 without an initialised process group."""
    return dist.get_rank() if ranks_of() > 1 else 0


def global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """The rank in the world of `rank` in `group`."""
    return rank if group is None else dist.get_global_rank(group, rank)


def gather(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, on every rank."""
    device, world = _device(group), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    sizes = [int(length) for length in lengths]
    mine = _bytes(data.ljust(max(*sizes, 1), b" "), device)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine, group=group)
    return [part.cpu().numpy().tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's JSON value, on every rank."""
    return [json.loads(text) for text in gather(json.dumps(value).encode(), group)]


def same_on_all(mine: str | LokaError, group: dist.ProcessGroup | None, *, what: str, way_out: str) -> None:
    """Compares what each rank has, its error included, before the ranks act on it. Raises PlanMismatch on all ranks
    where they differ, and `mine` where all ranks have that error.
    """
    found = gather(str(mine).encode(), group) if ranks_of(group) > 1 else []
    if len(set(found)) > 1:
        why = [f"rank {global_rank(group, rank)}: {text.decode()}" for rank, text in enumerate(found)]
        raise PlanMismatch(what, why=why, way_out=way_out)
    if isinstance(mine, LokaError):
        raise mine


def broadcast(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """The first rank's bytes, on every rank; what the others pass is ignored."""
    device, first = _device(group), global_rank(group, 0)
    mine = dist.get_rank(group) == 0
    length = torch.tensor([len(data) if mine else 0], device=device)
    dist.broadcast(length, src=first, group=group)
    if not int(length):
        return b""
    sent = _bytes(data, device) if mine else torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(sent, src=first, group=group)
    return sent.cpu().numpy().tobytes()


def broadcast_json(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """The first rank's JSON value, on every rank."""
    return json.loads(broadcast(json.dumps(value).encode(), group))


def follow(key: str, decide: Callable[[], str]) -> str:
    """What rank 0 of the world decides under `key`, on every rank that asks; in a single process, what it decides
    itself.

    Rank 0 leaves its decision at the store and goes on. The others wait for it there, no longer than the timeout that
    the process group was made with. Rank 0 waits for no rank that does not ask, and nothing waits for a device.

    Raises LokaError where rank 0 did not decide in time.
    """
    if ranks_of() == 1:
        return decide()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        decided = decide()
        store.set(key, decided)
        return decided
    try:
        return bytes(store.get(key)).decode()
    except RuntimeError as error:  # DistStoreError is one
        raise LokaError(
            f"rank 0 did not say {key} in time",
            why=[str(error).splitlines()[0]],
            way_out="let rank 0 do what this rank does, as often and in the same order",
        ) from error


def send(data: bytes, to: int, group: dist.ProcessGroup | None) -> None:
    device, target = _device(group), global_rank(group, to)
    dist.send(torch.tensor([len(data)], device=device), dst=target, group=group)
    dist.send(_bytes(data, device), dst=target, group=group)


def receive(sender: int, group: dist.ProcessGroup | None) -> bytes:
    device, source = _device(group), global_rank(group, sender)
    length = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(length, src=source, group=group)
    sent = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.recv(sent, src=source, group=group)
    return sent.cpu().numpy().tobytes()


def _bytes(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    backends = dist.get_backend_config(group)
    if "cpu:" in backends or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
