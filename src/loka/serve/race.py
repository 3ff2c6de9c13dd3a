"""Which sites each bucket runs in FP8, decided by timing whole graphs against each other.

The times in a plan are of layers in cells of their own. What a site saves inside a whole graph differs from that, most
of all at few rows: on an H200 Wukong gained 1.16x at 512 rows by a plan made at 2048 rows, and nothing by its own
(benchmarks/serve/README.md).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from loka.core.exceptions import ServeRefused
from loka.core.records.plan import Plan
from loka.core.timing import TIE
from loka.nn.unwrap import device_of
from loka.serve.build import frozen_tree, share
from loka.serve.graphs import Capturer
from loka.serve.run import Runner
from loka.serve.sites import FrozenWeight, frozen_sites


def fastest(
    precise: nn.Module,
    plan: Plan,
    weights: Mapping[str, FrozenWeight],
    scales: Mapping[str, torch.Tensor],
    in_hp: Sequence[Sequence[str]],
    run: Runner,
    buckets: Sequence[int],
    *,
    graphs: bool,
) -> tuple[tuple[str, ...], ...]:
    """For each bucket, the sites that run in high precision when its graph is fastest.

    The candidates are what the plan of any bucket has in high precision, and all sites in high precision. Among times
    within the noise the one with the fewest sites in FP8 wins, because eight bits that save no time only cost accuracy.

    Args:
        in_hp: for each bucket, the sites that its plan has in high precision.
        graphs: whether the server will have graphs.

    Raises ServeRefused without graphs, and what `Capturer.times` raises.
    """
    if not graphs:
        raise ServeRefused(
            "race=True times CUDA graphs, and this server has none", way_out="leave it out, or graphs=True on CUDA"
        )
    tree = frozen_tree(share(precise), plan, weights, scales, (), {})
    sites = frozen_sites(tree)
    different = {tuple(sorted(names)) for names in (*in_hp, sites)}
    choices = sorted(different, key=lambda names: (-len(names), names))
    times: dict[tuple[str, ...], dict[int, float]] = {}
    for choice in choices:
        for name, site in sites.items():
            site.in_hp = frozenset(buckets if name in choice else ())
        capturer = Capturer(
            tree, run=run, buckets=buckets, orders={}, device=device_of(precise), errors=None, written=None
        )
        times[choice] = capturer.times(tree)
    found = []
    for bucket in buckets:
        least = min(taken[bucket] for taken in times.values())
        found.append(next(choice for choice in choices if times[choice][bucket] <= least * (1 + TIE)))
    return tuple(found)
