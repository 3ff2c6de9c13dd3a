"""One plan for all ranks: rank 0's.

Ranks that plan for themselves differ, because their clocks do: what is a tie on one is won on another, and
data-parallel replicas would then compute different things. So rank 0's plan is sent to the others, after
every rank has shown that it fits them. What is sent is JSON in byte tensors; nothing is unpickled.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from loka.core.device import Fingerprint, fingerprint
from loka.core.exceptions import PlanMismatch
from loka.core.plan import Plan
from loka.core.signature import ModelSignature


def agree(plan: Plan, *, group: dist.ProcessGroup | None = None) -> Plan:
    """Rank 0's plan, on every rank of `group` (the default group). A collective: all ranks call it.

    Every rank's plan must be for the same model as rank 0's, measured on the same kind of machine, and
    every rank must run on such a machine itself. Works over gloo and nccl. Without an initialised process
    group it returns `plan` unchanged.

    Raises:
        PlanMismatch: a rank differs; on all ranks, with the ranks and their differences.
        ValueError: this process is not in `group`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return plan
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the group, so it cannot agree with it")
    claims = [json.loads(text) for text in _gather(_encode(_claim(plan)), group)]
    differences = [
        f"rank {_global_rank(group, rank)}: {line}"
        for rank, claim in enumerate(claims)
        for line in _differences(claim, claims[0])
    ]
    if differences:
        raise PlanMismatch(
            f"the ranks cannot share the plan of rank {_global_rank(group, 0)}",
            why=differences,
            way_out="give every rank the same model with the same mods, the same GPU, driver and library "
            "versions, and a plan measured there",
        )
    return Plan.from_json(json.loads(_broadcast(_encode(plan.to_json()), group)))


def _claim(plan: Plan) -> dict[str, Any]:
    """What this rank plans for, and what it is."""
    on_gpu = plan.machine.target != "cpu" and torch.cuda.is_available()
    here = fingerprint(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
    return {"model": plan.model.to_json(), "planned": plan.machine.to_json(), "here": here.to_json()}


def _differences(claim: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """One line for each way in which a rank does not fit the plan of the first."""
    model, planned = ModelSignature.from_json(first["model"]), Fingerprint.from_json(first["planned"])
    lines = [f"model: {line}" for line in ModelSignature.from_json(claim["model"]).differences(model)]
    elsewhere = Fingerprint.from_json(claim["planned"]).differences(planned)
    lines += [f"its plan was measured elsewhere: {line}" for line in elsewhere]
    lines += [f"machine: {line}" for line in Fingerprint.from_json(claim["here"]).differences(planned)]
    return lines


def _encode(content: dict[str, Any]) -> bytes:
    return json.dumps(content, allow_nan=False).encode()  # in order: that of the model's layers


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _gather(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, on every rank."""
    device, world = _device(group), dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([len(data)], device=device), group=group)
    sizes = [int(length) for length in lengths]
    mine = _bytes(data.ljust(max(sizes), b" "), device)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine, group=group)
    return [part.cpu().numpy().tobytes()[:size] for part, size in zip(parts, sizes, strict=True)]


def _broadcast(data: bytes, group: dist.ProcessGroup | None) -> bytes:
    """The first rank's bytes, on every rank."""
    device, first = _device(group), _global_rank(group, 0)
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, src=first, group=group)
    sent = _bytes(data, device) if dist.get_rank(group) == 0 else None
    if sent is None:
        sent = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(sent, src=first, group=group)
    return sent.cpu().numpy().tobytes()


def _bytes(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """nccl moves what lies on the rank's GPU, gloo what lies on the CPU."""
    backends = dist.get_backend_config(group)
    if "cpu:" in backends or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
