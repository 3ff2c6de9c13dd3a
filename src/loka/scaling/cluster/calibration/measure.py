"""`loka scale calibrate`: the ranks that torchrun started measure the links between them.

agree     every rank says what it is and what it can hold; where they differ, nothing runs
measure   groups of 2, 4, ... ranks of a node, all of a node, all of all nodes (rounds.py)
fit       on every rank, from rank 0's numbers: all ranks make the same network, or none does (fit.py)
check     what the forecast says of sizes that were held out
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from loka.core.device import Fingerprint, fingerprint
from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.exchange import broadcast, gather, ranks_of
from loka.core.records.network import Calibration, Link, Network, Quantity
from loka.core.storage.codec import decode, encode
from loka.core.timing import first_line
from loka.scaling.cluster.calibration.fit import Sample, checked, fitted_network, spread
from loka.scaling.cluster.calibration.rounds import Buffers, memory_gbps, timed, whole

SIZES = tuple((64 << 10) << step for step in range(13))
"""Bytes, 64 KB to 256 MB. Every second one is held out of the fit."""

_FEWEST = 5  # sizes: three to fit a line of two numbers, two to check it
_PART = 4  # of the free memory; two buffers and what a backend holds have to fit
_APART = 1.25  # times as long as the fastest rank; beyond, a rank is named
_TORCHRUN = "torchrun --nproc-per-node 2 -m loka scale calibrate --out network.json"


def calibrate(
    device: torch.device | str,
    *,
    base: Network | None = None,
    most_bytes: int = SIZES[-1],
    seconds: float = 8.0,
) -> Network:
    """The network of this process group, on all of its ranks. A collective of all of them.

    Args:
        device: this rank's; "cpu" over gloo.
        base: what is not measured is taken from it: links between nodes, the ranks of a node, where a part
            of one is measured, and the share of elementwise bytes.
        most_bytes: of the largest message; less where memory is short.
        seconds: that the rounds of a group should take; the fewest rounds may take longer.

    Raises:
        LokaError: one rank alone; ranks that disagree, each of which is named; too few sizes; a rank whose
            memory is short; times that do not grow with bytes.
    """
    if ranks_of() < 2:
        raise LokaError("one rank has nobody to send to, so no link can be measured", way_out=_TORCHRUN)
    device = torch.device(device)
    inner, most = _agreed(device, base, most_bytes)
    sizes = [size for size in SIZES if size <= most]
    if len(sizes) < _FEWEST:
        raise LokaError(
            f"messages of up to {most} bytes are {len(sizes)} sizes, and a fit and its check take {_FEWEST}",
            way_out=f"--max-mb {SIZES[_FEWEST - 1] >> 20} or more; free memory for twice as much",
        )
    buffers = _buffers(sizes[-1], device)
    memory = _slowest_memory(buffers)
    ranks = dist.get_world_size()
    samples, notes = _measured(buffers, sizes, inner=inner, ranks=ranks, seconds=seconds)
    if most < min(most_bytes, SIZES[-1]):
        notes.append(f"messages of up to {sizes[-1] >> 20} MB, as a rank's memory allows")
    fitted, held_out = (
        [one for one in samples if one.size in {whole(size, one.ranks) for size in part}]
        for part in (sizes[::2], sizes[1::2])
    )
    template = _template(device, base, inner=inner, ranks=ranks, memory=memory)
    found = fitted_network(template, fitted, ranks_in_node=inner)
    low, high = spread(found, held_out)
    notes.append(
        f"held-out sizes took {low:.2f} to {high:.2f} times what is told, by the intervals of medians"
    )
    how = Calibration(
        machine=fingerprint(device),
        backend=_backend(),
        ranks=ranks,
        nodes=ranks // inner,
        sizes=tuple(sizes[::2]),
        held_out=tuple(sizes[1::2]),
        collectives=checked(found, fitted, held_out),
        notes=tuple(notes),
    )
    return replace(found, measured=how)


def _backend() -> str:
    """With NCCL's version, and what it was told by variables."""
    name = str(dist.get_backend())
    if name != "nccl":
        return name
    version = ".".join(str(part) for part in torch.cuda.nccl.version())
    told = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")]
    return " ".join((name, version, *told))


def _agreed(device: torch.device, base: Network | None, most_bytes: int) -> tuple[int, int]:
    """Ranks of a node and bytes of the largest message, after all ranks said the same of themselves."""
    ranks = dist.get_world_size()
    mine = {
        "machine": encode(fingerprint(device)),
        "ranks of its node": int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
        "--max-mb in bytes": most_bytes,
        "--base": None if base is None else encode(base),
        "backend": _backend(),
        "free": _free_bytes(device),
    }
    every = [json.loads(text) for text in gather(json.dumps(mine).encode(), None)]
    lines = []
    for rank, other in enumerate(every[1:], 1):
        here, there = (decode(Fingerprint, one["machine"]) for one in (every[0], other))
        lines += [f"rank {rank}: {line}" for line in here.differences(there)]
        lines += [
            f"rank {rank}: {name}: {every[0][name]} here, {other[name]} there"
            for name in ("ranks of its node", "--max-mb in bytes", "--base", "backend")
            if every[0][name] != other[name]
        ]
    if lines:
        raise LokaError(
            "ranks disagree, and one network file cannot tell of all of them; here is rank 0",
            why=[line[:200] for line in lines],
            way_out="start all ranks on machines alike, with the same software and options",
        )
    inner = int(every[0]["ranks of its node"])
    if inner < 1 or ranks % inner:
        raise LokaError(
            f"{ranks} ranks in nodes of {inner} (LOCAL_WORLD_SIZE)",
            way_out="as many ranks on every node, as torchrun starts them",
        )
    return inner, min(most_bytes, *(one["free"] // _PART for one in every))


def _free_bytes(device: torch.device) -> int:
    """For this rank; ranks of a node share the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(pages) // int(os.environ.get("LOCAL_WORLD_SIZE", ranks_of()))


def _buffers(size: int, device: torch.device) -> Buffers:
    """On every rank, or none."""
    made, failed = None, ""
    try:
        made = Buffers(size, device)
    except RuntimeError as error:  # torch's for memory
        failed = first_line(error)
    every = [text.decode() for text in gather((failed or "-").encode(), None)]
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(every) if text != "-"]
    if lines or made is None:
        raise LokaError(f"two buffers of {size >> 20} MB do not fit", why=lines, way_out="a smaller --max-mb")
    return made


def _slowest_memory(buffers: Buffers) -> Estimate:
    """Of all ranks, which wait for the slowest."""
    every = gather(json.dumps(encode(memory_gbps(buffers))).encode(), None)
    found = [decode(Estimate, json.loads(one)) for one in every]
    return Estimate(*(min(getattr(one, end) for one in found) for end in ("value", "low", "high")))


def _groups(inner: int, ranks: int) -> list[list[int]]:
    """Of the first node 2, 4, ... and all of its ranks, then all."""
    few = [list(range(count)) for count in (1 << step for step in range(1, 16)) if count < inner]
    return [*few, *([list(range(inner))] if 1 < inner < ranks else []), list(range(ranks))]


def _measured(
    buffers: Buffers, sizes: Sequence[int], *, inner: int, ranks: int, seconds: float
) -> tuple[list[Sample], list[str]]:
    """Rank 0's, which is in every group, on all ranks."""
    samples: list[Sample] = []
    slow: dict[int, float] = {}
    for members in _groups(inner, ranks):
        group = dist.new_group(members)  # on every rank, whether it is in it or not
        if dist.get_rank() in members:
            found, behind = timed(buffers, sizes, group, seconds=seconds)
            nodes = max(len(members) // inner, 1)
            samples += [
                Sample(op=op, size=size, nodes=nodes, inner=len(members) // nodes, us=us)
                for (op, size), us in found.items()
            ]
            for rank, times in zip(members, behind, strict=True):
                slow[rank] = max(slow.get(rank, 1.0), times)
            dist.destroy_process_group(group)
        gather(b"-", None)  # the others wait for those who measured
    hosts = [text.decode() for text in gather(socket.gethostname().encode(), None)]
    notes = [
        f"rank {rank} on {hosts[rank]} took {times:.2f} times as long as the fastest rank of its group"
        for rank, times in sorted(slow.items())
        if times > _APART
    ]
    told: Any = json.loads(broadcast(json.dumps([encode(samples), notes]).encode(), None))
    return list(decode(tuple[Sample, ...], told[0])), list(told[1])


def _template(
    device: torch.device, base: Network | None, *, inner: int, ranks: int, memory: Estimate
) -> Network:
    """What is not of links. Raises LokaError where `base` has other nodes than those that were measured."""
    nodes = ranks // inner
    if base is not None and (base.gpus_per_node < inner or (nodes > 1 and base.gpus_per_node != inner)):
        raise LokaError(
            f"--base has nodes of {base.gpus_per_node} GPUs, and {nodes} of {inner} ranks were measured",
            way_out="a file of this cluster; or leave --base out",
        )
    unknown = Quantity(value=1.0, low=1.0, high=1.0, origin="assumed", comment="to be measured")
    nothing = Link(alpha_us=unknown, bandwidth_gbps=unknown)
    name = fingerprint(device).device
    per_node = base.gpus_per_node if base is not None else inner
    share = Quantity(
        value=0.6,
        low=0.25,
        high=1.0,
        origin="assumed",
        comment="1 is eager code; how much torch.compile leaves of the bytes depends on the model: a guess",
    )
    return Network(
        name=f"{name}, {per_node} a node, {inner} of them measured on {nodes} node(s)",
        gpus_per_node=per_node,
        inside=nothing,
        between=base.between if base is not None else None,
        launch_us=unknown,
        memory_gbps=Quantity(
            value=memory.value,
            low=memory.low,
            high=memory.high,
            origin="measured",
            comment="a copy, a product and a sum in bf16 of the largest buffers, on the slowest rank",
        ),
        elementwise_share=base.elementwise_share if base is not None else share,
        comment=f"`loka scale calibrate` on {ranks} ranks; its alphas and bandwidths are taken to hold for "
        "other numbers of GPUs",
    )
