"""One plan for all ranks: rank 0's.

Ranks that plan for themselves differ, because their clocks do: what is a tie on one is won on another, and
data-parallel replicas would then compute different things. So rank 0's plan is sent to the others, after
every rank has shown that it fits them. What is sent is JSON in byte tensors; nothing is unpickled.
"""

from typing import Any

import torch
import torch.distributed as dist

from loka.core.device import Fingerprint, fingerprint
from loka.core.exceptions import PlanMismatch
from loka.core.exchange import broadcast_json, gather_json, global_rank, has_group, ranks_of
from loka.core.records.plan import Plan
from loka.core.signature import ModelSignature
from loka.core.storage.codec import decode, encode


def agree(plan: Plan, *, group: dist.ProcessGroup | None = None) -> Plan:
    """Rank 0's plan, on every rank of `group` (the default group). A collective: all ranks call it.

    Every rank's plan must be for the same model as rank 0's, measured on the same kind of machine, and
    every rank must run on such a machine itself. Works over gloo and nccl. Without an initialised process
    group it returns `plan` unchanged.

    Raises:
        PlanMismatch: a rank differs; on all ranks, with the ranks and their differences.
        ValueError: this process is not in `group`.
    """
    if not has_group():
        return plan
    ranks_of(group)  # raises outside of it
    claims = gather_json(_claim(plan), group)
    differences = [
        f"rank {global_rank(group, rank)}: {line}"
        for rank, claim in enumerate(claims)
        for line in _differences(claim, claims[0])
    ]
    if differences:
        raise PlanMismatch(
            f"the ranks cannot share the plan of rank {global_rank(group, 0)}",
            why=differences,
            way_out="give every rank the same model with the same mods, the same GPU and library "
            "versions, and a plan measured there",
        )
    return Plan.from_json(broadcast_json(plan.to_json(), group))


def _claim(plan: Plan) -> dict[str, Any]:
    on_gpu = plan.machine.target != "cpu" and torch.cuda.is_available()
    here = fingerprint(torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu")
    return {"model": encode(plan.model), "planned": encode(plan.machine), "here": encode(here)}


def _differences(claim: dict[str, Any], first: dict[str, Any]) -> list[str]:
    model, planned = decode(ModelSignature, first["model"]), decode(Fingerprint, first["planned"])
    lines = [f"model: {line}" for line in decode(ModelSignature, claim["model"]).differences(model)]
    elsewhere = decode(Fingerprint, claim["planned"]).differences(planned, driver=False)
    lines += [f"its plan was measured elsewhere: {line}" for line in elsewhere]
    here = decode(Fingerprint, claim["here"])
    lines += [f"machine: {line}" for line in here.differences(planned, driver=False)]
    return lines
