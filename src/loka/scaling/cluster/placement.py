"""Where tables lie, and what the GPU that has the most of each has to do.

size        table-wise: the largest first, each to the GPU that holds the fewest bytes so far
rows        row-wise: each table cut over all GPUs
torchrec    EmbeddingShardingPlanner's table-, row- and column-wise shards, by the network's links
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from loka.core.exceptions import LokaError, first_line
from loka.core.records.network import Network
from loka.distributed.tables.embedding_bags import quiet, torchrec

Placer = Literal["size", "rows", "torchrec"]
PLACERS: tuple[Placer, ...] = get_args(Placer)
_Shapes = Sequence[tuple[int, int]]

_FREE = 0.15  # of a GPU's memory, which the planner leaves to all that is no table
MOST = 256
"""GPUs that the planner is asked for: 26 tables took it 7 s on a busy core, and 21 to 39 s for 1024."""


@dataclass(frozen=True)
class Load:
    """Each of the GPU that has the most: bytes of `weights` and row-wise `momentum`; columns `read` for an id
    of each table, sent `pooled`, and `summed` over ranks; `lists` of all ids of a table."""

    how: str
    weights: float
    momentum: float
    read: float
    pooled: float
    summed: float
    lists: float


def by_size(shapes: _Shapes, ranks: int) -> Load:
    gpus = [(0, gpu) for gpu in range(min(ranks, len(shapes)))]
    shards = []
    for rows, width in sorted(shapes, key=lambda shape: -shape[0] * (shape[1] + 1)):
        size, gpu = heapq.heappop(gpus)
        heapq.heappush(gpus, (size + rows * (width + 1), gpu))
        shards.append((gpu, rows, width, 1.0))
    return _load(shards, "table-wise, the largest first to the GPU with the fewest bytes")


def by_rows(shapes: _Shapes, ranks: int) -> Load:
    one = [(0, math.ceil(rows / ranks), width, 1 / ranks) for rows, width in shapes]  # all GPUs are alike
    return _load(one, "row-wise, each table cut over all GPUs")


def by_torchrec(
    shapes: _Shapes, ranks: int, local: int, *, ids: float, batch_size: int, network: Network, capacity: float
) -> Load:
    """`local`: ranks in a node; `capacity`: bytes of a GPU. Raises MissingLibrary, and LokaError for more
    than MOST ranks, a GPU of unknown memory or tables without a place there."""
    library, planner = torchrec(), torchrec("torchrec.distributed.planner")
    types = torchrec("torchrec.distributed.planner.types")
    free = torchrec("torchrec.distributed.planner.storage_reservations").FixedPercentageStorageReservation
    sharder = torchrec("torchrec.distributed.embeddingbag").EmbeddingBagCollectionSharder()
    if ranks > MOST or not capacity:
        raise LokaError(
            f"TorchRec's planner is not asked for {ranks} GPUs of {capacity / 1e9:.0f} GB",
            way_out=f"--gpus up to {MOST}, --table-group of so many, or --tables-by size",
        )
    configs = [
        library.EmbeddingBagConfig(name=f"t{i}", num_embeddings=n, embedding_dim=d, feature_names=[f"f{i}"])
        for i, (n, d) in enumerate(shapes)
    ]
    kinds, per_ms = ["table_wise", "row_wise", "column_wise"], 1e6  # bytes of a GB/s
    allowed = types.ParameterConstraints(kinds, compute_kernels=["fused"], pooling_factors=[ids])
    with quiet():
        asked = planner.EmbeddingShardingPlanner(
            topology=planner.Topology(
                world_size=ranks,
                compute_device="cuda",
                hbm_cap=int(capacity),
                local_world_size=local,
                hbm_mem_bw=network.memory_gbps.value * per_ms,
                intra_host_bw=network.inside.bandwidth_gbps.value * per_ms,
                inter_host_bw=(network.between or network.inside).bandwidth_gbps.value * per_ms,
            ),
            batch_size=batch_size,
            constraints={config.name: allowed for config in configs},
            storage_reservation=free(_FREE),
            debug=False,
            stats=[],
        )
        try:
            found = asked.plan(library.EmbeddingBagCollection(tables=configs, device="meta"), [sharder])
        except (types.PlannerError, RuntimeError) as error:
            raise LokaError(
                f"TorchRec's planner finds no place for the tables on {ranks} GPUs",
                why=[first_line(error)],
                way_out="more GPUs, or --tables-by size, which shows what lacks",
            ) from error
    (placed,) = found.plan.values()
    shards = [
        (part.placement.rank(), *part.shard_sizes, part.shard_sizes[0] / config.num_embeddings)
        for config in configs
        for part in placed[config.name].sharding_spec.shards
    ]
    many = Counter(one.sharding_type for one in placed.values())
    counts = ", ".join(f"{many[kind]} {kind}" for kind in kinds if many[kind])
    return _load(shards, f"by TorchRec's planner, {counts}, {100 * _FREE:.0f} % of memory left free")


def _load(shards: Iterable[tuple[int, int, int, float]], how: str) -> Load:
    gpus: dict[int, list[float]] = defaultdict(lambda: [0.0] * 6)
    for gpu, rows, width, part in shards:
        out = (width, 0) if part == 1 else (0, width)
        parts = (4 * rows * width, 4 * rows, width * part, *out, part)
        gpus[gpu] = [one + more for one, more in zip(gpus[gpu], parts, strict=True)]
    return Load(how, *map(max, zip(*gpus.values(), strict=True)))
