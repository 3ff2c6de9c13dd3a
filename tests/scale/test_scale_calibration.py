import itertools
import math
import random
from dataclasses import replace
from unittest import mock

import pytest
from command_line import loka as run
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import EXAMPLE, network
from ranks import on_ranks

from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.records.network import OPS, Network, Own
from loka.scaling.cluster import calibrate as measure
from loka.scaling.cluster import rounds
from loka.scaling.cluster.alpha_beta import Sample, checked, fitted_network, relative_line
from loka.scaling.cluster.calibrate import SIZES, calibrate
from loka.scaling.cluster.collectives import Wire, wire_us

GROUPS = {"pair": [(1, 2)], "node": [(1, 2), (1, 4), (1, 8)], "nodes": [(1, 2), (1, 4), (4, 4)]}
GROUPS["cards"] = [(4, 1)]


def true(name):
    found = network(inside=(2, 300), between=(5, 40), per_node=GROUPS[name][-1][1], launch=9)
    own = {op: Own(latency=1 + 0.1 * place, bandwidth=1 / (1 + 0.2 * place)) for place, op in enumerate(OPS)}
    return replace(found, inside=replace(found.inside, own=own), between=replace(found.between, own=own))


def samples(name, sizes=SIZES[::2], noise=lambda: 1.0):
    found = []
    for nodes, inner in GROUPS[name]:
        for op in OPS:
            for size in sizes:
                us = wire_us(Wire(op, size), nodes * inner, true(name)) * noise()
                ends = Estimate(us, us * 0.99, us * 1.01)
                found.append(Sample(op=op, size=size, nodes=nodes, inner=inner, us=ends))
    return found


def fitted(name, given_):
    return fitted_network(network(per_node=GROUPS[name][-1][1]), given_)


@pytest.mark.parametrize("name", GROUPS)
def test_times_of_a_known_network_are_told_again(name):
    """At sizes held out; and, where groups tell hops from launches, at other numbers of GPUs."""
    found = fitted(name, samples(name))
    for row in checked(found, samples(name), samples(name, SIZES[1::2])):
        assert row.error < (0.02 if name == "nodes" else 1e-6), row
    link = found.inside if name == "pair" else found.between
    if name in ("node", "nodes"):
        for op in OPS:
            told, is_so = (wire_us(Wire(op, 1 << 24), 6 if name == "node" else 64, n) for n in (found, true(name)))
            assert told == pytest.approx(is_so, rel=0.1)
    else:
        assert (link.alpha_us.origin, link.bandwidth_gbps.origin) == ("assumed", "measured")
        assert link.alpha_us.high > 2 * link.alpha_us.value


@settings(max_examples=25)
@given(seed=st.integers(0, 1 << 20), name=st.sampled_from(sorted(GROUPS)))
def test_every_fitted_time_lies_between_the_ends(seed, name):
    drawn = random.Random(seed)
    given_ = samples(name, noise=lambda: drawn.lognormvariate(0, 0.3))
    found = fitted(name, given_)
    fast = {n: "high" if "bandwidth" in n else "low" for n in found.quantities}
    slow = {n: "low" if "bandwidth" in n else "high" for n in found.quantities}
    for one in given_:
        least, most = (wire_us(Wire(one.op, one.size), one.nodes * one.inner, found, e) for e in (fast, slow))
        assert least <= one.us.low * (1 + 1e-9)
        assert most >= one.us.high * (1 - 1e-9)


def test_a_protocol_that_changes_with_the_size_is_told_as_it_was_measured():
    """As NCCL's: from 2 MB on another one, of more latency and bandwidth. A line misses both."""

    def changed(one):
        us = one.us.value if one.size < 2 << 20 else 0.5 * one.us.value + 12
        return replace(one, us=Estimate(us, us * 0.99, us * 1.01))

    fitting, held_out = ([changed(one) for one in samples("pair", sizes)] for sizes in (SIZES[::2], SIZES[1::2]))
    found = fitted_network(network(per_node=2), fitting, held_out)
    as_a_line = replace(
        found, inside=replace(found.inside, own={op: replace(own, carried=()) for op, own in found.inside.own.items()})
    )
    for one in fitting:  # what is fixed is fitted, so the smallest need not be as they were
        assert one.predicted(found) == pytest.approx(one.us.value, rel=1e-6 if one.size >= 1 << 20 else 0.15)
    beyond = [one for one in held_out if one.size >= 8 << 20]
    worst, of_lines = (max(abs(one.predicted(net) / one.us.value - 1) for one in beyond) for net in (found, as_a_line))
    assert worst < 1e-6 < 0.1 < of_lines, (worst, of_lines)
    for one in held_out:  # the ends hold what was not fitted too
        ends = [{n: e[("bandwidth" in n)] for n in found.quantities} for e in (("low", "high"), ("high", "low"))]
        least, most = (wire_us(Wire(one.op, one.size), 2, found, e) for e in ends)
        assert least <= one.us.low * (1 + 1e-9)
        assert most >= one.us.high * (1 - 1e-9)


NODE, PAIR = [(1, 2), (1, 4), (1, 8), (2, 8)], [(1, 2), (2, 2)]


def pairs(inside, between):
    return network(inside=(2, inside), between=(5, between), per_node=2, launch=9)


def fitted_over(groups, net, noise):
    drawn, halves = random.Random(0), []
    for sizes in (SIZES[::2], SIZES[1::2]):
        halves.append([])
        for (nodes, inner), op, size in itertools.product(groups, OPS, sizes):
            us = wire_us(Wire(op, size), nodes * inner, net) * drawn.lognormvariate(0, noise)
            halves[-1].append(Sample(op=op, size=size, nodes=nodes, inner=inner, us=Estimate(us, us, us)))
    return fitted_network(network(per_node=net.gpus_per_node), *halves)


def check_ends(found, net, groups, rel):
    """That times on more nodes lie between the ends, and within `rel` of what `found` says."""
    fast, slow = ({n: e["bandwidth" in n] for n in found.quantities} for e in (("low", "high"), ("high", "low")))
    for nodes, op in itertools.product((1, 2, 4, 16, 64), OPS):
        wire, ranks = Wire(op, 1 << 30), nodes * groups[-1][0] * net.gpus_per_node
        low, us, high = (wire_us(wire, ranks, n, ends) for n, ends in ((found, fast), (net, {}), (found, slow)))
        assert low * (1 - 1e-9) <= us <= high * (1 + 1e-9), (op, ranks)
        assert wire_us(wire, ranks, found) == pytest.approx(us, rel=rel), (op, ranks)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize(
    ("groups", "net", "least"),
    [
        (NODE, Network.load(EXAMPLE), 340 / 15),  # a ring sends 15/16 at 340 GB/s inside, 1/16 at 44 between
        (PAIR, pairs(200, 80), 200 / 3),  # 3/4 at 200, 1/4 at 80
        (PAIR, pairs(200, 20), 20),  # 1/4 at 20 takes longer
    ],
)
def test_collectives_that_the_link_inside_holds_up_do_not_fix_the_one_between(groups, net, least, noise):
    found, is_so = fitted_over(groups, net, noise), net.between.bandwidth_gbps.value
    bandwidth = found.between.bandwidth_gbps
    assert bandwidth.value == pytest.approx(is_so, rel=2 * noise or 1e-6)
    assert bandwidth.low == pytest.approx(least, rel=3 * noise or 1e-6)
    assert ("holds up all_gather, reduce_scatter, all_reduce, which" in str(bandwidth)) == (least < is_so)
    check_ends(found, net, groups, rel=3 * noise or 0.01)


def test_sizes_that_the_link_inside_holds_up_do_not_fix_the_one_between():
    """Of a protocol that is slow inside a node: 20 GB/s up to 4 MB, which then takes as long as 71 MB at 340."""
    net = Network.load(EXAMPLE)
    slow = tuple((float(size), max(min(size, 4 << 20) / 20e3, size / 340e3)) for size in SIZES)
    inside = {op: Own(latency=1.0, bandwidth=1.0, carried=slow) for op in OPS}
    found = fitted_over(NODE, replace(net, inside=replace(net.inside, own=inside)), 0.0).between
    assert found.bandwidth_gbps.value == pytest.approx(44, rel=0.01)
    points = dict(found.own["all_to_all"].carried)
    for moved in (2 << 20, 8 << 20):  # of 4 MB 7/16 inside: 92 us there, 48 between
        assert points[moved] == pytest.approx(moved / 44e3, rel=0.01)


def test_where_the_link_inside_holds_up_all_the_one_between_has_no_upper_end():
    """All-to-all too: a quarter at 20 GB/s inside, a half at 450 between, and not even at 40."""
    net = pairs(20, 450)
    for noise in (0.0, 0.05):
        found = fitted_over(PAIR, net, noise)
        bandwidth = found.between.bandwidth_gbps
        assert bandwidth.value == pytest.approx(40, rel=2 * noise or 1e-6)
        assert bandwidth.high >= 1000 * bandwidth.value
        assert "assumed: at least; the link inside holds up every collective, so high is open" in str(bandwidth)
        check_ends(found, net, PAIR, rel=math.inf)


def test_the_line_has_the_least_relative_error():
    pairs = ((1.0, 9.0), (10.0, 20.0), (100.0, 330.0), (1000.0, 1500.0))
    a, b = relative_line(*zip(*pairs, strict=True))
    near = ((1, 1), (1.01, 1), (0.99, 1), (1, 1.01), (1, 0.99))
    errors = [sum(((a * f + b * g * x) / t - 1) ** 2 for x, t in pairs) for f, g in near]
    assert min(errors) == errors[0] < min(errors[1:])
    assert relative_line([1, 10, 100], [0.9, 10, 101])[0] == 0  # a line through them would begin below
    falling = [replace(one, us=Estimate(9 - one.size / SIZES[-1], 1, 9)) for one in samples("pair")]
    with pytest.raises(LokaError, match="takes no longer for more bytes"):
        fitted("pair", falling)


def test_a_late_host_costs_that_timing_on_every_rank():
    nan, points = float("nan"), [("all_reduce", 1 << 20)]
    one, other = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, nan], [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 1.0]
    found, behind = rounds.over_ranks(points, [[one], [other]])
    assert found[points[0]].value == 7  # of the slower rank, of the six rounds that both have
    assert behind == pytest.approx([1, 2])
    with pytest.raises(LokaError, match="waited for its host in 2 of 7"):
        rounds.over_ranks(points, [[one], [[nan, *other[1:]]]])


SMALL = tuple(1 << step for step in (10, 12, 14, 17, 20))


def quick(**named):
    """Times of small messages on a busy machine may fall with their size, which is refused on all ranks."""
    for _ in range(5):
        try:
            return calibrate("cpu", seconds=0.1, **named)
        except LokaError as error:
            if "takes no longer" not in str(error):
                raise
    raise AssertionError("five times in a row")


def job(rank, folder):
    with (
        mock.patch.object(measure, "SIZES", SMALL),
        mock.patch.object(rounds, "_BACK_TO_BACK", 1.0),  # one call at a time
        mock.patch("loka.cli.commands.scale.calibrate", lambda device, **named: quick(**named)),
    ):
        text = run("scale", "calibrate", "--out", "net.json", "--max-mb", 1, "--device", "cpu", cwd=folder)
        based = quick(base=Network.load(EXAMPLE)).gpus_per_node
        with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "1"}):
            cards = quick().gpus_per_node
    found = {"text": text, "nodes": (based, cards)}
    asked = {
        "apart": {"most_bytes": 1 << (20 + rank)},
        "small": {"most_bytes": 1 << 19},
        "base": {"most_bytes": 1 << 20, "base": network(per_node=1)},
    }
    for name, options in asked.items():
        with pytest.raises(LokaError) as raised:
            quick(**options)
        found[name] = str(raised.value)
    return found


REFUSED = {
    "apart": "rank 1: --max-mb: 2, and 1 on rank 0",
    "small": "--max-mb 1 or more",
    "base": "nodes of 1 GPUs, and 1 of 2 ranks are here",
}


@pytest.mark.slow
def test_two_ranks_write_what_a_forecast_reads_or_refuse_together(tmp_path):
    told = on_ranks(job, 2, tmp_path)
    for name, text in REFUSED.items():
        assert all(text in rank[name] for rank in told), name
    assert [rank["nodes"] for rank in told] == [(8, 1), (8, 1)]
    found = Network.load(tmp_path / "net.json")
    how = found.measured
    assert {(one.op, one.ranks) for one in how.collectives} == {(op, 2) for op in OPS}
    assert (how.backend, how.ranks, how.nodes, how.machine.device) == ("gloo", 2, 1, "cpu")
    assert how.sizes == SMALL
    assert found.inside.bandwidth_gbps.origin == found.memory_gbps.origin == "measured"
    assert f"{100 * how.worst.error:.1f} %" in told[0]["text"]
    assert told[1]["text"] == ""
    ask = ("scale", "dcnv2", "--network", "net.json")
    text = run(*ask, cwd=tmp_path)
    assert "links were measured on cpu, and GEMMs on NVIDIA H200" in text
    assert "measured: middle of what collectives reached; 1 node(s), 2 ranks each" in text
    assert "nothing of links between nodes" in run(*ask, "--gpus", 8, cwd=tmp_path, fails=2)


def test_one_rank_is_refused_with_the_command(tmp_path):
    text = run("scale", "calibrate", "--out", "net.json", "--device", "cpu", cwd=tmp_path, fails=2)
    assert "torchrun --nproc-per-node 2 -m loka scale calibrate" in text
    assert not (tmp_path / "net.json").exists()
