"""Finds which sites make a region, and inserts the ops that record what ran (notes.py)."""

from torch.fx import Node

from loka.compiler.edges.matrix import Low
from loka.compiler.emit import Emitter
from loka.compiler.gemms import TOKEN, Weight, region_gemm
from loka.compiler.joint_sites import JointSite
from loka.compiler.normed import normed_gemm
from loka.compiler.notes import FINITE, SCALES, note_sites
from loka.core.recipe import Gemm
from loka.kernels.quantize.side import BAD_A, BAD_B, health_index


def mark_runs(
    emitter: Emitter,
    sites: list[JointSite],
    low: dict[Node, Low],
    weights: dict[Node, Weight],
    scales: dict[Node, Node],
    last: tuple[Node, Node | None],
    record: str,
) -> None:
    """Records that the sites ran, and which operands were not finite, in forward and in backward.

    `low`: the quantized inputs, and `scales`: r, both by the node of a site, the latter for sites with a backward.
    `last`: the last GEMM of forward, one with a norm in its epilogue perhaps, and that of backward.
    """
    forward = [
        entry
        for site in sites
        for entry in (
            (site.health, low[site.node].finite, health_index(Gemm.OUTPUT, BAD_A), _shown(low[site.node])),
            (site.health, weights[site.node].row_scale, health_index(Gemm.OUTPUT, BAD_B), 0),
        )
    ]
    _noted(emitter, last[0], forward, record)
    backward = []
    for site in sites:
        if site.node not in scales:
            continue
        r = scales[site.node]
        if site.wants_input:
            backward += [
                (site.health, r, health_index(Gemm.GRAD_INPUT, BAD_A), 0),
                (site.health, weights[site.node].column_scale, health_index(Gemm.GRAD_INPUT, BAD_B), 0),
            ]
        if site.wants_weight:
            backward += [
                (site.health, r, health_index(Gemm.GRAD_WEIGHT, BAD_A), 0),
                (site.health, low[site.node].finite, health_index(Gemm.GRAD_WEIGHT, BAD_B), 0),
            ]
    if last[1] is not None:
        _noted(emitter, last[1], backward, record)


def _noted(emitter: Emitter, gemm: Node, entries: list[tuple[Node, Node, int, int]], record: str) -> None:
    healths, scales, places, shown = (list(each) for each in zip(*entries, strict=True))
    with emitter.like(gemm):
        gemm.update_arg(TOKEN, emitter.call(note_sites, healths, scales, places, shown, record))


def _shown(low: Low) -> int:
    """Behind a norm in a GEMM's own kernel the one scale is known, and rows have an inverse rms."""
    return SCALES if low.finite is low.scale else FINITE


def connected(sites: list[JointSite]) -> list[list[str]]:
    """The regions: groups of sites whose values reach each other without passing through another site."""
    by_y = {site.y: site for site in sites}
    regions: list[list[JointSite]] = []
    for site in sites:
        makers = [by_y[maker] for maker in makers_of(site.x, set(by_y))]
        same_input = [other for other in sites if other.x is site.x and other is not site]
        near = {s.node for s in (*makers, *same_input)}
        touching = [region for region in regions if any(s.node in near for s in region)]
        merged = [s for region in touching for s in region] + [site]
        regions = [region for region in regions if region not in touching] + [merged]
    return [[site.name for site in region] for region in regions]


def makers_of(x: Node, outputs: set[Node]) -> list[Node]:
    """Those of the nodes `outputs` that x is computed from without another of them in between, the latest first."""
    found, seen, waiting = set(), set(), [x]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in outputs:
            found.add(node)
        elif node.target not in (region_gemm, normed_gemm):
            waiting += node.all_input_nodes
    return sorted(found, reverse=True)
