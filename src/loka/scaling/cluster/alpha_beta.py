"""From times of collectives to the numbers of a network file.

    time = fixed + bytes of a GPU over its link / bandwidth           a line for each collective and group

A line has the least sum of squared relative errors: sizes span four orders of magnitude, and absolute errors
would leave `fixed` to the noise of the largest. `fixed` is a launch and hops, whose number is known
(collectives.py). Groups of several sizes tell the two apart; of one size, the split is NCCL's own tuner's.
What is beyond `fixed` is no line: NCCL changes its protocol with the size. Of the largest group it is kept as it was
measured, size by size (`Own.carried`). At the ends of intervals every time that was measured lies between.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.records.network import Fitted, Link, Network, Op, Own, Quantity
from loka.scaling.cluster.collectives import Wire, latency, volumes, wire_us

_SPLITS = (Estimate(1.9 / 8.4, 0.6 / 14.0, 3.4 / 6.6), Estimate(4.0 / 8.4, 2.7 / 14.0, 14.0 / 6.6))
"""A hop over a launch, inside a node and between nodes, in src/graph/tuning.cc of NCCL (hwLat, baseLat): of
Simple, then the ends of LL, LL128 and Simple."""
_LEAST = 0.01  # us; less cannot be seen, and numbers of a network are above 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Microseconds of a collective on `nodes` nodes of `inner` ranks each: a median, with its interval."""

    op: Op
    size: int
    nodes: int
    inner: int
    us: Estimate

    @property
    def key(self) -> tuple[Op, int, int]:
        return self.op, self.nodes, self.inner

    def told(self, network: Network) -> float:
        return wire_us(Wire(self.op, self.size), self.nodes * self.inner, network)


@dataclass(frozen=True)
class _Line:
    op: Op
    nodes: int
    inner: int
    fixed: float
    gbps: float

    def latency(self, inside: float, between: float) -> float:
        return latency(self.op, self.nodes, self.inner, (inside, between))


def relative_line(x: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """(a, b) with the least sum of ((a + b x) / time - 1)^2, a >= 0; b may be of either sign."""
    ones, scaled = [1 / time for time in times], [v / time for v, time in zip(x, times, strict=True)]
    total, second = sum(one * one for one in ones), sum(one * one for one in scaled)
    first = sum(one * other for one, other in zip(ones, scaled, strict=True))
    right, sloped = sum(ones), sum(scaled)
    determinant = total * second - first**2
    a = (right * second - first * sloped) / determinant
    return (a, (total * sloped - first * right) / determinant) if a >= 0 else (0.0, sloped / second)


def fitted_network(template: Network, samples: Sequence[Sample], held_out: Sequence[Sample] = ()) -> Network:
    """`template` with what `samples` say of launch and links, and ends that hold `held_out` too. Raises LokaError for
    times that do not grow."""

    def fitted(network: Network, *, several: bool, known: bool) -> Network:
        mine, others = ([one for one in part if (one.nodes > 1) is several] for part in (samples, held_out))
        return _fitted(network, mine, others, known=known) if mine else network

    alone = fitted(template, several=False, known=False)
    return fitted(alone, several=True, known=any(one.nodes == 1 for one in samples))


def _fitted(network: Network, samples: Sequence[Sample], held_out: Sequence[Sample], *, known: bool) -> Network:
    lines = _lines(samples)
    outer = lines[0].nodes > 1
    size = max(line.inner for line in lines)
    whole = [line for line in lines if line.inner == size]
    where = f"{lines[0].nodes} node(s), {size} ranks each"
    hops = [line.latency(not outer, outer) for line in lines]
    fixed = [max(line.fixed, _LEAST) for line in lines]
    inside, launch, split = 0.0, network.launch_us.value, None
    if known:
        inside, how = network.inside.alpha_us.value, "what is fixed besides a launch and hops inside; "
        rest = [one - launch - line.latency(inside, 0) for one, line in zip(fixed, lines, strict=True)]
        alpha = max(fmean(one / count for one, count in zip(rest, hops, strict=True)), _LEAST)
    elif len(whole) < len(lines):
        how, each = "what is fixed, by hops of groups of 2 and more; ", []
        for op in {line.op for line in lines}:
            mine = [place for place, line in enumerate(lines) if line.op == op]
            each.append(relative_line([hops[p] for p in mine], [fixed[p] for p in mine]))
        launch, alpha = (max(fmean(part), _LEAST) for part in zip(*each, strict=True))
    else:
        how, split = "launch and hops together, split as NCCL's own tuner has them; ", _SPLITS[outer]
        launch = _middle([one / (1 + n * split.value) for one, n in zip(fixed, hops, strict=True)])
        alpha = launch * split.value
    bandwidth = _middle([line.gbps for line in whole])
    own: dict[str, Own] = {}
    for line in whole:
        said = launch + (line.latency(inside, alpha) if outer else line.latency(alpha, 0))
        own[line.op] = Own(
            latency=max(line.fixed, _LEAST) / said,
            bandwidth=line.gbps / bandwidth,
            carried=_carried(line, [one for one in samples if one.key == (line.op, line.nodes, line.inner)]),
        )
    link = Link(
        alpha_us=_exactly(alpha, how + where),
        bandwidth_gbps=_exactly(bandwidth, f"middle of what collectives reached; {where}"),
        own=own,
    )
    found = replace(network, between=link) if outer else replace(network, inside=link)
    if not known:
        found = replace(found, launch_us=_exactly(launch, f"besides hops and bytes; {where}"))
    return _widened(found, [*samples, *held_out], link, split)


def _carried(line: _Line, samples: Sequence[Sample]) -> tuple[tuple[float, float], ...]:
    """What bytes take beyond what is fixed, by what was measured; more of them never less."""
    known = {volumes(one.op, one.size, one.nodes, one.inner)[int(line.nodes > 1)]: one.us.value for one in samples}
    found, most = [], 0.0
    for moved, us in sorted(known.items()):
        most = max(most, us - max(line.fixed, _LEAST))
        found.append((moved, most))
    return tuple(found) if most > 0 else ()


def _lines(samples: Sequence[Sample]) -> list[_Line]:
    found = []
    for key in dict.fromkeys(one.key for one in samples):
        mine = [one for one in samples if one.key == key]
        op, nodes, inner = key
        moved = [volumes(op, one.size, nodes, inner)[int(nodes > 1)] for one in mine]
        fixed, each = relative_line(moved, [one.us.value for one in mine])
        if each <= 0:
            told_by = [f"{one.size} bytes: {one.us.value:.1f} us" for one in mine]
            way_out = "a larger --max-mb, on a machine that does nothing else"
            raise LokaError(f"{op} takes no longer for more bytes", why=told_by, way_out=way_out)
        found.append(_Line(op, nodes, inner, fixed, 1e-3 / each))
    return found


def _widened(network: Network, samples: Sequence[Sample], link: Link, split: Estimate | None) -> Network:
    low = min(one.us.low / one.told(network) for one in samples)
    high = max(one.us.high / one.told(network) for one in samples)
    wide = _wide(link, low, high)
    if split is not None:
        alpha = _scaled(wide.alpha_us, low * split.low / split.value, high * split.high / split.value)
        wide = replace(wide, alpha_us=replace(alpha, origin="assumed"))
    found = replace(network, launch_us=_scaled(network.launch_us, low, high))
    if samples[0].nodes == 1:
        return replace(found, inside=wide)
    return replace(found, between=wide, inside=_wide(network.inside, low, high))


def _wide(link: Link, low: float, high: float) -> Link:
    gbps = _scaled(link.bandwidth_gbps, 1 / high, 1 / low)
    return replace(link, alpha_us=_scaled(link.alpha_us, low, high), bandwidth_gbps=gbps)


def checked(network: Network, fitted: Sequence[Sample], held_out: Sequence[Sample]) -> tuple[Fitted, ...]:
    """And how far what is told is from what was held out."""
    rows = []
    for line in _lines(fitted):
        mine = [one for one in held_out if one.key == (line.op, line.nodes, line.inner)]
        error, at = max((abs(one.told(network) / one.us.value - 1), one.size) for one in mine)
        ranks = line.nodes * line.inner
        rows.append(Fitted(op=line.op, ranks=ranks, fixed_us=line.fixed, gbps=line.gbps, error=error, at=at))
    return tuple(rows)


def _middle(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(fmean(map(math.log, values)))


def told(ends: Estimate, comment: str, origin: Literal["measured", "assumed"] = "measured") -> Quantity:
    return Quantity(value=ends.value, low=ends.low, high=ends.high, origin=origin, comment=comment)


def _exactly(value: float, comment: str) -> Quantity:
    return told(Estimate(value, value, value), comment)


def _scaled(quantity: Quantity, low: float, high: float) -> Quantity:
    value = quantity.value
    return replace(quantity, low=min(quantity.low, value * low), high=max(quantity.high, value * high))
