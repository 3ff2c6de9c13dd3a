"""`loka scale calibrate`: the ranks that torchrun started measure the links between them.

Groups of 2, 4, ... ranks of the first node, all of it, then all nodes are timed (rounds.py), and every rank
fits rank 0's numbers (alpha_beta.py): all make one network, or none does.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from loka.core.device import fingerprint
from loka.core.error import Estimate, exactly
from loka.core.exceptions import LokaError
from loka.core.exchange import broadcast_json, gather_json, ranks_of
from loka.core.records.network import Calibration, Link, Network
from loka.core.storage.codec import decode, encode
from loka.scaling.cluster.alpha_beta import Sample, checked, fitted_network, quantity_of
from loka.scaling.cluster.rounds import Buffers, memory_gbps, timed, whole

SIZES = tuple((64 << 10) << step for step in range(15))
"""Bytes, 64 KB to 1 GB. Every second one is held out of the fit."""

_FEWEST = 5  # sizes: three for a line, two to check it
_PART = 4  # of the free memory
_APART = 1.25  # times as long as the fastest rank; beyond, a rank is named
_TORCHRUN = "torchrun --nproc-per-node 2 -m loka scale calibrate --out network.json"


def calibrate(
    device: torch.device | str, *, base: Network | None = None, most_bytes: int = SIZES[-1], seconds: float = 8.0
) -> Network:
    """The network of this process group; a collective of all of its ranks.

    Args:
        device: this rank's; "cpu" over gloo.
        base: has what is not measured: links between nodes, GPUs of a node, share of elementwise bytes.
        most_bytes: of the largest message, or less.
        seconds: that the rounds of a group should take.

    Raises:
        LokaError: one rank; ranks that disagree, by name; too little memory; times that do not grow.
    """
    ranks, device = ranks_of(), torch.device(device)
    if ranks < 2:
        raise LokaError("one rank has nobody to send to, so no link can be measured", way_out=_TORCHRUN)
    inner, most = _agreed(device, base, most_bytes)
    sizes = [size for size in SIZES if size <= most]
    if len(sizes) < _FEWEST:
        way_out = f"--max-mb {SIZES[_FEWEST - 1] >> 20} or more; free memory for {_PART} times as much"
        raise LokaError(
            f"up to {most} bytes there are {len(sizes)} sizes to measure, and it takes {_FEWEST}", way_out=way_out
        )
    buffers = Buffers(sizes[-1], device)
    found = [decode(Estimate, one) for one in gather_json(encode(memory_gbps(buffers)))]
    memory = min(found, key=lambda one: one.value)  # of the slowest rank, for which the others wait
    samples, notes = _measured(buffers, sizes, inner=inner, ranks=ranks, seconds=seconds)
    fitted, held_out = (
        [one for one in samples if one.size in {whole(size, one.nodes * one.inner) for size in part}]
        for part in (sizes[::2], sizes[1::2])
    )
    network = fitted_network(_template(base, inner=inner, nodes=ranks // inner, memory=memory), fitted, held_out)
    machine = fingerprint(device)
    how = Calibration(
        machine=machine,
        backend=_backend(),
        ranks=ranks,
        nodes=ranks // inner,
        sizes=tuple(sizes),
        collectives=checked(network, fitted, held_out),
        notes=tuple(notes),
    )
    return replace(network, name=f"{machine.device}, {network.gpus_per_node} a node, measured", measured=how)


def _backend() -> str:
    name = str(dist.get_backend())
    if name != "nccl":
        return name
    settings = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")]
    return " ".join((name, ".".join(map(str, torch.cuda.nccl.version())), *settings))


def _agreed(device: torch.device, base: Network | None, most_bytes: int) -> tuple[int, int]:
    """Ranks of a node, and bytes of the largest buffers, which have to fit on every rank.

    Raises LokaError, on all ranks, where they differ in hardware, software or options, or do not fill nodes.
    """
    ranks = ranks_of()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    said: dict[str, Any] = {**encode(fingerprint(device)), "ranks of its node": local}
    said |= {"--max-mb": most_bytes >> 20, "backend": _backend(), "--base": base and encode(base)}
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(local, 1)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    every = gather_json([said, free])
    first = every[0][0]
    lines = [
        f"rank {rank}: {key}: {there[key]}, and {first[key]} on rank 0"[:200]
        for rank, (there, _) in enumerate(every)
        for key in first
        if there[key] != first[key]
    ]
    if lines:
        way_out = "start all ranks on machines alike, with the same software and options"
        raise LokaError("the ranks differ, and a network file describes equal ones", why=lines, way_out=way_out)
    if local < 1 or ranks % local:
        raise LokaError(
            f"{ranks} ranks do not fill nodes of {local} ranks", way_out="start as many ranks on every node"
        )
    nodes, each = ranks // local, base.gpus_per_node if base else local
    if each < local or (nodes > 1 and each != local):
        what = f"--base has nodes of {each} GPUs, and {nodes} of {local} ranks are here"
        raise LokaError(what, way_out="give a file of this cluster, or leave --base out")
    return local, min(most_bytes, *(least // _PART for _, least in every))


def _measured(
    buffers: Buffers, sizes: Sequence[int], *, inner: int, ranks: int, seconds: float
) -> tuple[list[Sample], list[str]]:
    """Times of all collectives in groups of 2, 4, .. ranks, a whole node and all ranks, on every rank alike.

    Returns also notes of ranks that were slower than the others. `inner`: ranks of a node; `seconds`: for each group.
    """
    samples: list[Sample] = []
    slow: dict[int, float] = {}
    counts = [1 << step for step in range(1, 16) if 1 << step < inner]
    for count in dict.fromkeys((*counts, *([inner] if inner > 1 else []), ranks)):
        group = dist.new_group(list(range(count)))  # on every rank
        if dist.get_rank() < count:
            times, behind = timed(buffers, sizes, group, seconds=seconds)
            nodes = max(count // inner, 1)
            samples += [
                Sample(op=op, size=size, nodes=nodes, inner=count // nodes, us=us) for (op, size), us in times.items()
            ]
            slow |= {rank: max(slow.get(rank, 1.0), ratio) for rank, ratio in enumerate(behind)}
            dist.destroy_process_group(group)
        gather_json("")  # the others wait for those who measured
    hosts = gather_json(socket.gethostname())
    notes = [
        f"rank {rank} on {hosts[rank]} took {ratio:.2f} times as long as the fastest rank"
        for rank, ratio in slow.items()
        if ratio > _APART
    ]
    found, notes = broadcast_json([encode(samples), notes])
    return list(decode(tuple[Sample, ...], found)), notes


def _template(base: Network | None, *, inner: int, nodes: int, memory: Estimate) -> Network:
    idle = quantity_of(exactly(1.0), "one rank a node: nothing goes over it", "assumed")
    share = "1 is eager code; what torch.compile leaves depends on the model: a guess"
    return Network(
        name="",
        gpus_per_node=base.gpus_per_node if base else inner,
        inside=Link(alpha_us=idle, bandwidth_gbps=idle),
        between=base.between if base else None,
        launch_us=idle,
        memory_gbps=quantity_of(memory, "a copy, a product and a sum of the largest buffers, on the slowest rank"),
        elementwise_share=base.elementwise_share if base else quantity_of(Estimate(0.6, 0.25, 1), share, "assumed"),
        comment=f"{inner} ranks of {nodes} node(s) were measured, and are taken to tell of other numbers",
    )
