"""From times of collectives to the numbers of a network file.

    time(S) = fixed + bytes of a GPU over its link / bandwidth           a line for each collective

The line has the least sum of squared relative errors. Sizes span four orders of magnitude: absolute errors
would leave `fixed` to the noise of the largest. Relative ones are weighted least squares with weights
1 / time^2, which are linear and have one answer; those of logarithms would have to be searched for, and agree
with them to second order.

`fixed` is a launch and hops, and the hops of a group are known (collectives.py). Groups of several sizes tell
the two apart; groups of one size do not, and then the split is NCCL's own tuner's.

An end of an interval is where the line, with all numbers at that end, lies below or above every time that was
fitted. So it holds what alpha and beta leave out: NCCL changes protocols and algorithms with the size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.records.network import SAME, Fitted, Link, Network, Own, Quantity
from loka.scaling.cluster.collectives import End, Op, Wire, latency, volumes, wire_us

_SPLIT = Estimate(1.9 / 8.4, 0.6 / 14.0, 3.4 / 6.6)
"""A hop inside a node over a launch, in NCCL's tuner (src/graph/tuning.cc: hwLat, baseLat; Simple, and the
least and most of LL, LL128 and Simple)."""
_SPLIT_BETWEEN = Estimate(4.0 / 8.4, 2.7 / 14.0, 14.0 / 6.6)
"""The same of a hop between nodes."""
_LEAST = 0.01  # us; what is below cannot be seen, and numbers of a network are above 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Microseconds of one collective of `size` bytes on `nodes` nodes of `inner` ranks each: the median of
    rounds, in each of which the slowest rank counts, with its interval."""

    op: Op
    size: int
    nodes: int
    inner: int
    us: Estimate

    @property
    def ranks(self) -> int:
        return self.nodes * self.inner

    @property
    def group(self) -> tuple[int, int]:
        return self.nodes, self.inner

    def told(self, network: Network) -> float:
        return wire_us(Wire(self.op, self.size), self.ranks, network)


@dataclass(frozen=True)
class _Line:
    """`fixed` us, and `each` us a byte."""

    op: Op
    nodes: int
    inner: int
    fixed: float
    each: float

    def hops(self, *, between: bool) -> float:
        """As many alphas."""
        return latency(self.op, self.nodes, self.inner, (0.0, 1.0) if between else (1.0, 0.0))


def relative_line(x: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(a, b) with the least sum of ((a + b x) / time - 1)^2, a >= 0; b may be of either sign."""
    weights = [1 / time**2 for time in times]
    total, first = sum(weights), sum(w * v for w, v in zip(weights, x, strict=True))
    second = sum(w * v * v for w, v in zip(weights, x, strict=True))
    right = sum(1 / time for time in times)
    sloped = sum(v / time for v, time in zip(x, times, strict=True))
    determinant = total * second - first**2
    if determinant > 1e-9 * total * second:
        a = (right * second - first * sloped) / determinant
        if a >= 0:
            return a, (total * sloped - first * right) / determinant
    return 0.0, sloped / second


def fitted_network(template: Network, samples: Sequence[Sample], *, ranks_in_node: int) -> Network:
    """`template` with what `samples` say of its links: of one node or more, where there are several.

    Args:
        template: everything that they do not say, such as the memory's bandwidth.
        samples: of a node's groups of two ranks or more, and of all nodes together.
        ranks_in_node: of the largest group of a node.

    Raises:
        LokaError: times that do not grow with bytes.
    """
    lines = _lines(samples)
    alone = [line for line in lines if line.nodes == 1]
    across = [line for line in lines if line.nodes > 1]
    if not alone:
        return _over_cards(template, across, samples)
    whole = [line for line in alone if line.inner == ranks_in_node]
    launch, alpha, split = _hop(alone, between=False)
    where = f"{ranks_in_node} ranks of a node"
    several = len({line.inner for line in alone}) > 1
    told = [launch + line.hops(between=False) * alpha for line in whole]
    found = replace(
        template,
        inside=_link(whole, told, alpha, where, _SEVERAL if several else _SPLIT_SAID),
        launch_us=_exactly(launch, _LAUNCH + where),
    )
    found = _widened(found, [sample for sample in samples if sample.nodes == 1], split)
    return _with_cards(found, across, samples) if across else found


_LAUNCH = "what collectives take besides hops and bytes; "
_SEVERAL = "what is fixed, by the hops of groups of 2 and more; "
_SPLIT_SAID = "launch and hops were measured together, and are split as NCCL's own tuner has them; "


def _link(
    lines: Sequence[_Line], told: Sequence[float], alpha: float, where: str, of_alpha: str, bound: str = ""
) -> Link:
    """`told`: what alpha and launch say that each line's fixed time is."""
    bandwidth = _middle([1e-3 / line.each for line in lines])
    own: dict[str, Own] = {
        line.op: Own(latency=max(line.fixed, _LEAST) / fixed, bandwidth=1e-3 / line.each / bandwidth)
        for line, fixed in zip(lines, told, strict=True)
    }
    return Link(
        alpha_us=_exactly(alpha, of_alpha + where),
        bandwidth_gbps=_exactly(bandwidth, f"middle of what collectives reached; {where}{bound}"),
        own=own,
    )


def _lines(samples: Sequence[Sample]) -> list[_Line]:
    found = []
    for op, nodes, inner in dict.fromkeys((one.op, *one.group) for one in samples):
        mine = [one for one in samples if (one.op, *one.group) == (op, nodes, inner)]
        moved = [volumes(op, one.size, nodes, inner)[int(nodes > 1)] for one in mine]
        fixed, each = relative_line(moved, [one.us.value for one in mine])
        if each <= 0:
            raise LokaError(
                f"{op} on {nodes * inner} ranks takes no longer for more bytes, so its bandwidth is not told",
                why=[f"{one.size} bytes: {one.us.value:.1f} us" for one in mine],
                way_out="a larger --max-mb, on a machine that does nothing else",
            )
        found.append(_Line(op, nodes, inner, fixed, each))
    return found


_RATIOS = (-4.0, 2.0)  # hop over launch, logarithms between which it is searched for


def _hop(lines: Sequence[_Line], *, between: bool) -> tuple[float, float, Estimate | None]:
    """Launch and alpha; and, where groups of one size do not tell them apart, what their ratio is taken for.

    fixed = share of the collective * (launch + hops * alpha): groups of several sizes tell alpha / launch by
    how each collective's own time grows, with the least sum of squared errors of logarithms.
    """
    split = None
    if len({line.inner for line in lines}) > 1:
        ratio = _searched(lambda one: sum(e * e for e in _growth(lines, one, between=between)))
    else:
        split = _SPLIT_BETWEEN if between else _SPLIT
        ratio = split.value
    launch = _middle([max(one.fixed, _LEAST) / (1 + one.hops(between=between) * ratio) for one in lines])
    return launch, launch * ratio, split


def _searched(error: Callable[[float], float]) -> float:
    """Where the error is least, on a grid and on a finer one around its best; to 0.1 %."""
    at, half = sum(_RATIOS) / 2, (_RATIOS[1] - _RATIOS[0]) / 2
    for _ in range(3):
        at = min((at + half * step / 20 for step in range(-20, 21)), key=lambda log: error(10**log))
        half /= 10
    return float(10**at)


def _growth(lines: Sequence[_Line], ratio: float, *, between: bool) -> list[float]:
    """Log of each line's launch over the middle of its collective's."""
    logs = [math.log(max(one.fixed, _LEAST) / (1 + one.hops(between=between) * ratio)) for one in lines]
    errors = []
    for op in {one.op for one in lines}:
        mine = [log for one, log in zip(lines, logs, strict=True) if one.op == op]
        errors += [log - sum(mine) / len(mine) for log in mine]
    return errors


def _with_cards(network: Network, lines: Sequence[_Line], samples: Sequence[Sample]) -> Network:
    """With the link between nodes, of which all nodes together tell, launch and hops inside being known."""
    launch, inside = network.launch_us.value, network.inside.alpha_us.value
    known = [launch + line.hops(between=False) * inside for line in lines]
    shares = [line.hops(between=True) / max(line.fixed, _LEAST) for line in lines]
    rest = [1 - one / max(line.fixed, _LEAST) for one, line in zip(known, lines, strict=True)]
    alpha = sum(s * r for s, r in zip(shares, rest, strict=True)) / sum(s * s for s in shares)
    alpha = max(alpha, _LEAST)
    where = f"{lines[0].nodes} nodes of {lines[0].inner} ranks"
    told = [one + line.hops(between=True) * alpha for one, line in zip(known, lines, strict=True)]
    limited = any(_inside_limits(network, line) for line in lines)
    bound = "; a lower bound, as links inside a node were no faster" if limited else ""
    link = _link(lines, told, alpha, where, "what is fixed besides launch and hops inside a node; ", bound)
    return _widened(replace(network, between=link), [one for one in samples if one.nodes > 1], None)


def _inside_limits(network: Network, line: _Line) -> bool:
    inside, between = volumes(line.op, 1.0, line.nodes, line.inner)
    own = network.inside.own.get(line.op, SAME).bandwidth
    return inside / (network.inside.bandwidth_gbps.value * own) > 0.9e3 * between * line.each


def _over_cards(template: Network, lines: Sequence[_Line], samples: Sequence[Sample]) -> Network:
    """Of nodes of one rank each, where no link inside a node is used."""
    launch, alpha, split = _hop(lines, between=True)
    nothing = "one rank a node: nothing goes over it"
    idle = Quantity(value=1.0, low=1.0, high=1.0, origin="assumed", comment=nothing)
    where = f"{lines[0].nodes} nodes of a rank each"
    told = [launch + line.hops(between=True) * alpha for line in lines]
    found = replace(
        template,
        inside=Link(alpha_us=idle, bandwidth_gbps=idle),
        between=_link(lines, told, alpha, where, _SPLIT_SAID),
        launch_us=_exactly(launch, _LAUNCH + where),
    )
    return _widened(found, samples, split)


def spread(network: Network, samples: Sequence[Sample]) -> tuple[float, float]:
    """Measured time over told time, the least and the most at the ends of the medians' intervals."""
    ratios = [(one.us.low / told, one.us.high / told) for one in samples for told in (one.told(network),)]
    return min(low for low, _ in ratios), max(high for _, high in ratios)


def _widened(network: Network, samples: Sequence[Sample], split: Estimate | None) -> Network:
    """With the ends that `samples` ask for: of the link that they go over last, of the launch where it was
    fitted with that link, and of what else they go over where that is not enough."""
    low, high = spread(network, samples)
    low, high = min(low, 1.0), max(high, 1.0)
    nodes = samples[0].nodes
    found = _with_link(network, nodes, _wide(network.link(nodes), low, high, split))
    if nodes == 1 or split is not None:
        return replace(found, launch_us=_scaled(network.launch_us, low, high))
    if all(_covered(found, one) for one in samples):
        return found
    found = _with_link(found, 1, _wide(found.inside, low, high, None))
    return replace(found, launch_us=_scaled(found.launch_us, low, high))


def _with_link(network: Network, nodes: int, link: Link) -> Network:
    return replace(network, between=link) if nodes > 1 else replace(network, inside=link)


def _wide(link: Link, low: float, high: float, split: Estimate | None) -> Link:
    alpha = _scaled(link.alpha_us, low, high)
    if split is not None:
        alpha = _scaled(alpha, low * split.low / split.value, high * split.high / split.value)
        alpha = replace(alpha, origin="assumed")
    return replace(link, alpha_us=alpha, bandwidth_gbps=_scaled(link.bandwidth_gbps, 1 / high, 1 / low))


def _covered(network: Network, sample: Sample) -> bool:
    fast: dict[str, End] = {n: "high" if "bandwidth" in n else "low" for n in network.quantities}
    slow: dict[str, End] = {n: "low" if "bandwidth" in n else "high" for n in network.quantities}
    wire = Wire(sample.op, sample.size)
    least, most = (wire_us(wire, sample.ranks, network, ends) for ends in (fast, slow))
    return least <= sample.us.low and sample.us.high <= most


def checked(network: Network, fitted: Sequence[Sample], held_out: Sequence[Sample]) -> tuple[Fitted, ...]:
    """Of each collective and group: what was fitted, and how far what is told lies from what was not."""
    rows = []
    for line in _lines(fitted):
        mine = [one for one in fitted if (one.op, *one.group) == (line.op, line.nodes, line.inner)]
        other = [one for one in held_out if (one.op, *one.group) == (line.op, line.nodes, line.inner)]
        errors = {one.size: abs(one.told(network) / one.us.value - 1) for one in other}
        low, high = spread(network, mine)
        at = max(errors, key=lambda size: errors[size])
        rows.append(
            Fitted(
                op=line.op,
                ranks=line.nodes * line.inner,
                fixed_us=line.fixed,
                gbps=1e-3 / line.each,
                low=low,
                high=high,
                error=errors[at],
                at=at,
            )
        )
    return tuple(rows)


def _middle(values: Sequence[float]) -> float:
    """The geometric mean: shares are over it."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


_Origin = Literal["measured", "assumed"]


def _exactly(value: float, comment: str, origin: _Origin = "measured") -> Quantity:
    return Quantity(value=value, low=value, high=value, origin=origin, comment=comment)


def _scaled(quantity: Quantity, low: float, high: float) -> Quantity:
    """With ends at least so far from the value."""
    value = quantity.value
    return replace(quantity, low=min(quantity.low, value * low), high=max(quantity.high, value * high))
