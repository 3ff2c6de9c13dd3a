"""From times of collectives to the numbers of a network file.

    time = fixed + bytes of a GPU over its link / bandwidth           a line for each collective and group

A line has the least sum of squared relative errors: sizes span four orders of magnitude, and absolute errors
would leave `fixed` to the noise of the largest. `fixed` is a launch and hops, whose number is known
(collectives.py). Groups of several sizes tell the two apart; of one size, the split is NCCL's own tuner's.
What is beyond `fixed` is no line: NCCL changes its protocol with the size. Of the largest group it is kept as it was
measured, size by size (`Own.carried`). At the ends of intervals every time that was measured lies between.

Between nodes, a collective takes as long as the slower of two links (collectives.py). Where its time is what the link
inside explains, as a ring's on few nodes of many GPUs, it says only what the other link reaches at least.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from loka.core.error import Estimate, exactly
from loka.core.exceptions import LokaError
from loka.core.records.network import Fitted, Link, Network, Op, Own, Quantity
from loka.scaling.cluster.collectives import Wire, carried_us, latency, volumes, wire_us

_SPLITS = (Estimate(1.9 / 8.4, 0.6 / 14.0, 3.4 / 6.6), Estimate(4.0 / 8.4, 2.7 / 14.0, 14.0 / 6.6))
"""A hop over a launch, inside a node and between nodes, in src/graph/tuning.cc of NCCL (hwLat, baseLat): of
Simple, then the ends of LL, LL128 and Simple."""
_BEYOND = 1.15  # times what the link inside explains: of sizes to 1 GB with 5 % noise, no slope of 1050 was as far off
_OPEN = 1000.0  # times the lower end; a file has no open intervals
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

    def predicted(self, network: Network) -> float:
        """Microseconds that `network` says of this collective."""
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
    """`network` with the link that `samples` crossed, all inside of a node or all between nodes.

    `known`: launch and the link inside were fitted before, so that only what is fixed beyond them is a hop's. Else the
    two are told apart by groups of several sizes, or, with one size, split as NCCL's tuner splits them.
    """
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
    reached = {line: _reached(line, samples, network.inside if known else None) for line in whole}
    bandwidth = _bandwidth(reached, where)
    own: dict[str, Own] = {}
    for line, found in reached.items():
        said = launch + (line.latency(inside, alpha) if outer else line.latency(alpha, 0))
        gbps = found.gbps if found.points else max(found.gbps, bandwidth.value)
        own[line.op] = Own(
            latency=max(line.fixed, _LEAST) / said, bandwidth=gbps / bandwidth.value, carried=found.points
        )
    link = Link(alpha_us=quantity_of(exactly(alpha), how + where), bandwidth_gbps=bandwidth, own=own)
    fitted = replace(network, between=link) if outer else replace(network, inside=link)
    if not known:
        fitted = replace(fitted, launch_us=quantity_of(exactly(launch), f"besides hops and bytes; {where}"))
    return _widened(fitted, [*samples, *held_out], link, split)


@dataclass(frozen=True)
class _Reached:
    """GB/s of a collective over a link, and what bytes take there as `Own.carried` has it. No points: the link inside
    explains its times, and `gbps` is a lower bound."""

    gbps: float
    points: tuple[tuple[float, float], ...]


def _reached(line: _Line, samples: Sequence[Sample], inside: Link | None) -> _Reached:
    """`inside`: the link whose bytes may take longer; None for itself, and where no times of it are known. Only sizes
    whose time exceeds what it explains give the bandwidth, and none where their slope does not: noise lifts some sizes
    alone. At the other sizes bytes over this link take no longer than was measured."""
    mine = sorted((one for one in samples if one.key == (line.op, line.nodes, line.inner)), key=lambda one: one.size)
    by_link = [volumes(one.op, one.size, one.nodes, one.inner) for one in mine]
    moved = [volume[int(line.nodes > 1)] for volume in by_link]
    carried = [one.us.value - line.fixed for one in mine]
    excess = [math.inf] * len(mine)
    if inside is not None:
        gbps = inside.bandwidth_gbps.value
        explained = [carried_us(line.op, volume[0], inside, gbps) for volume in by_link]
        excess = [us - _BEYOND * other for us, other in zip(carried, explained, strict=True)]
    weights = [size / one.us.value**2 for size, one in zip(moved, mine, strict=True)]
    if sum(weight * us for weight, us in zip(weights, excess, strict=True)) <= 0:
        return _Reached(line.gbps, ())
    slopes = [(w * size, w * us) for w, size, us, more in zip(weights, moved, carried, excess, strict=True) if more > 0]
    us_a_byte = sum(us for _, us in slopes) / sum(size for size, _ in slopes)
    points: dict[float, float] = {}
    most = 0.0
    for size, us, more in zip(moved, carried, excess, strict=True):  # more bytes never take less
        most = max(most, us if more > 0 else min(us, us_a_byte * size))
        points[size] = most
    return _Reached(1e-3 / us_a_byte, tuple(points.items()))


def _bandwidth(reached: Mapping[_Line, _Reached], where: str) -> Quantity:
    """The middle of what shows it, with ends that hold what the others may have; a lower bound where nothing does."""
    shown = {line: one.gbps for line, one in reached.items() if one.points}
    held_up = {line: one.gbps for line, one in reached.items() if not one.points}
    if not held_up:
        return quantity_of(exactly(_middle([*shown.values()])), f"middle of what collectives reached; {where}")
    if not shown:
        least = max(held_up.values())
        comment = f"at least; the link inside holds up every collective, so high is open, {_OPEN:g} times as much; "
        return quantity_of(Estimate(least, least, least * _OPEN), comment + where, "assumed")
    value = _middle([*shown.values()])
    least_of = {line: min(gbps, value) for line, gbps in held_up.items()}
    # Of a ring n nodes send (n - 1) / n as much between them as any number does.
    high = max(value, *(gbps * line.nodes / (line.nodes - 1) for line, gbps in least_of.items()))
    by, others = (", ".join(line.op for line in lines) for lines in (shown, held_up))
    comment = (
        f"middle of what {by} reached; the link inside holds up {others}, which are taken to reach as much: at least "
        "low, and from high on it holds them up on any number of nodes; "
    )
    return quantity_of(Estimate(value, min(least_of.values()), high), comment + where)


def _lines(samples: Sequence[Sample]) -> list[_Line]:
    found = []
    for key in dict.fromkeys(one.key for one in samples):
        mine = [one for one in samples if one.key == key]
        op, nodes, inner = key
        moved = [volumes(op, one.size, nodes, inner)[int(nodes > 1)] for one in mine]
        fixed, each = relative_line(moved, [one.us.value for one in mine])
        if each <= 0:
            times = [f"{one.size} bytes: {one.us.value:.1f} us" for one in mine]
            way_out = "a larger --max-mb, on a machine that does nothing else"
            raise LokaError(f"{op} takes no longer for more bytes", why=times, way_out=way_out)
        found.append(_Line(op, nodes, inner, fixed, 1e-3 / each))
    return found


def _widened(network: Network, samples: Sequence[Sample], link: Link, split: Estimate | None) -> Network:
    low = min(one.us.low / one.predicted(network) for one in samples)
    high = max(one.us.high / one.predicted(network) for one in samples)
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
        error, at = max((abs(one.predicted(network) / one.us.value - 1), one.size) for one in mine)
        ranks = line.nodes * line.inner
        rows.append(Fitted(op=line.op, ranks=ranks, fixed_us=line.fixed, gbps=line.gbps, error=error, at=at))
    return tuple(rows)


def _middle(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(fmean(map(math.log, values)))


def quantity_of(ends: Estimate, comment: str, origin: Literal["measured", "assumed"] = "measured") -> Quantity:
    """A number of a network file with its ends, where it comes from, and what to say of it."""
    return Quantity(value=ends.value, low=ends.low, high=ends.high, origin=origin, comment=comment)


def _scaled(quantity: Quantity, low: float, high: float) -> Quantity:
    value = quantity.value
    return replace(quantity, low=min(quantity.low, value * low), high=max(quantity.high, value * high))
