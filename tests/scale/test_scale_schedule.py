from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from networks import network

from loka.core.exceptions import LokaError
from loka.scaling.cluster.collectives import HOPS, Wire, check_groups, check_ranks, spread, wire_us
from loka.scaling.cluster.schedule import Blocking, Compute, Copied, Gather, Join, Reduce, Replicate, schedule


def test_ddp_hides_buckets_behind_backward():
    """Backward 10, 10, 10; a bucket of 15 after each of the first two, of 4 after the last.

    wire: 10 to 25, 25 to 40, 40 to 44; compute ends at 30, the optimizer of 1 starts at 44.
    """
    items = [
        Compute(10), Reduce(15, waits=False), Compute(10), Reduce(15, waits=False), Compute(10),
        Reduce(4, waits=False), Join(), Compute(1),
    ]  # fmt: skip
    line = schedule(items)
    assert (line.total, line.compute, line.wire, line.exposed) == (45, 31, 34, 14)


def test_a_hook_that_waits_hides_nothing():
    items = [Compute(10), Blocking(15), Compute(10), Blocking(15), Compute(10), Blocking(4), Join()]
    assert schedule(items).total == 64


def test_fsdp2_gathers_ahead_in_forward():
    """Units of 10 with gathers of 6: the first is exposed, the second runs at once behind it, the third from
    the first's copy-out on, at 6, when the wire is free at 12. compute: 6 to 16, to 26, to 36."""
    unit = [Gather(6, backward=False), Copied(), Compute(10)]
    assert schedule(unit * 3).total == 36


def test_fsdp2_gathers_no_more_than_one_unit_ahead_in_forward():
    """The third gather waits for the copy-out of the first unit, which waited 50 for its own gather."""
    items = [
        Gather(50, backward=False), Copied(), Compute(1),
        Gather(1, backward=False), Copied(), Compute(100),
        Gather(1, backward=False), Copied(), Compute(1),
        Gather(80, backward=False), Copied(), Compute(1),
    ]  # fmt: skip
    # gathers: 0-50, 50-51, from 50 on: 51-52, from the second copy-out, 51, on: 52-132.
    # compute: 50-51, 51-151, 151-152, and the last, which came at 132, 152-153.
    assert schedule(items).total == 153


def test_fsdp2_backward_gathers_one_unit_ahead_and_reduces_one_at_a_time():
    """Two units; gathers take 8, computing 10, reductions 12.

    gather 1: 0-8, gather 0 from 8 on: 8-16; compute 1: 8-18; reduction 1: 18-30; compute 0: 18-28; then
    compute waits for reduction 1, to 30, and reduction 0 takes 30-42.
    """
    items = [
        Gather(8, backward=True), Copied(), Gather(8, backward=True), Compute(10), Reduce(12, waits=True),
        Copied(), Compute(10), Reduce(12, waits=True), Join(),
    ]  # fmt: skip
    line = schedule(items)
    assert (line.total, line.exposed) == (42, 22)


def test_fsdp2_does_not_wait_for_ids_of_tables():
    """They travel from 8 to 18, a reduction behind them to 21, beside computing of 30: all hidden."""
    items = [Compute(8), Reduce(10, waits=False), Reduce(3, waits=True), Compute(30), Join()]
    assert schedule(items).total == 38


@pytest.mark.parametrize(("apart", "total"), [(True, 63), (False, 75)])
def test_hsdp_all_reduces_shards_beside_gathers_where_links_are_its_own(apart, total):
    """The backward above with all-reduces of 20 and 1 behind its reductions, and an optimizer of 12.

    apart: 30-50, and behind the second reduction, 30-42, and the first all-reduce, 50-51. Else the wire has
    the first all-reduce to 50, the second reduction to 62, its all-reduce to 63.
    """
    items = [
        Gather(8, backward=True), Copied(), Gather(8, backward=True), Compute(10), Reduce(12, waits=True),
        Replicate(20, apart), Copied(), Compute(10), Reduce(12, waits=True), Replicate(1, apart), Join(),
        Compute(12),
    ]  # fmt: skip
    assert schedule(items).total == total
    assert schedule([Reduce(1, waits=True), Replicate(9, apart), Blocking(2)]).total == 12


def test_a_copy_out_needs_a_gather():
    with pytest.raises(ValueError, match="was not gathered"):
        schedule([Copied()])


_us = st.floats(min_value=0, max_value=1e4)


@st.composite
def _steps(draw):
    items = []
    for _ in range(draw(st.integers(1, 8))):
        items += [Gather(draw(_us), backward=draw(st.booleans())), Copied(), Compute(draw(_us))]
        items.append(draw(st.sampled_from([Reduce(draw(_us), True), Reduce(draw(_us), False), Blocking(draw(_us))])))
        items += [Replicate(draw(_us), draw(st.booleans()))] * draw(st.integers(0, 1))
    return [*items, Join()]


@given(items=_steps(), at=st.integers(0, 31), longer=_us)
def test_a_step_never_gets_shorter_when_something_takes_longer(items, at, longer):
    timed = [place for place, item in enumerate(items) if hasattr(item, "us")]
    place = timed[at % len(timed)]
    slower = [*items]
    slower[place] = replace(items[place], us=items[place].us + longer)
    assert schedule(slower).total >= schedule(items).total


@given(items=_steps())
def test_a_step_lies_between_its_longest_stream_and_both_one_behind_the_other(items):
    line = schedule(items)
    beside = sum(item.us for item in items if isinstance(item, Replicate) and item.apart)
    assert line.total >= max(line.compute, line.wire - beside, beside) * (1 - 1e-12)
    assert line.total <= (line.compute + line.wire) * (1 + 1e-12)


def test_collectives_by_hand():
    """Nodes of 4; inside alpha 2, 100 GB/s; between alpha 5, 10 GB/s a GPU; a launch takes 1 us."""
    found = network(inside=(2, 100), between=(5, 10), per_node=4)
    size = 8e6
    # 4 ranks: 3 hops, 6e6 bytes at 100 GB/s = 60 us.
    assert wire_us(Wire("all_gather", size), 4, found) == pytest.approx(1 + 6 + 60)
    # 8 ranks in 2 nodes: 6 hops inside, 1 between; 7e6 at 100 = 70, 4e6 over four cards of 10 = 100.
    assert wire_us(Wire("reduce_scatter", size), 8, found) == pytest.approx(1 + 12 + 5 + 100)
    # Twice the bytes; a ring's 2 x 17 us of hops, a tree's 2 x (3 x 2 + 1 x 5) = 22.
    assert wire_us(Wire("all_reduce", size), 8, found) == pytest.approx(1 + 22 + 200)
    # To the other node go 8e6 x 4 / 8 by a GPU's own card: 400 us.
    assert wire_us(Wire("all_to_all", size), 8, found) == pytest.approx(1 + 17 + 400)
    # Codecs read and write 1e6 bytes at 1000 GB/s: 1 us.
    assert wire_us(Wire("all_gather", size, 1e6), 4, found) == pytest.approx(1 + 6 + 60 + 1)
    # At best, log2 of 8: two hops inside, one between.
    assert wire_us(Wire("all_gather", size), 8, found, {HOPS: "low"}) == pytest.approx(1 + 4 + 5 + 100)


def test_collectives_of_groups_by_hand():
    """Nodes of 4, of which 4 groups of 8 take two each: in a group 6 hops inside, 1 between, as of 8 ranks.
    Replicas are 4 ranks of 4 nodes, each with its own card: 2 x 2 hops of a tree, twice 3 / 4 of bytes."""
    found = network(inside=(2, 100), between=(5, 10), per_node=4)
    size = 8e6
    assert wire_us(Wire("all_gather", size, ranks=8), 32, found) == wire_us(Wire("all_gather", size), 8, found)
    assert wire_us(Wire("all_reduce", size, ranks=4, stride=8), 32, found) == pytest.approx(1 + 20 + 1200)
    meshes = ((16, 2), (32, 1), (2, 1), (8, 4), (4, 8))  # of 16 replicas of groups of 2, two are in a node
    assert [spread(*one, 4) for one in meshes] == [(8, 2), (8, 4), (1, 2), (8, 1), (4, 1)]


@pytest.mark.parametrize("group", [-4, 0, 1, 3, 6, 16, 32])
def test_groups_that_do_not_fit(group):
    """6 parts nodes of 4 unevenly, 16 is no part of 24, and 32 has no replicas; 12 has, on 24."""
    with pytest.raises(LokaError, match=f"--group {group} on 8, 24 GPUs") as found:
        check_groups([2, group], [8, 24], network(per_node=4), option="--group")
    assert "one of 2, 4, 8, 12" in str(found.value)


@given(
    op=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]),
    nodes=st.integers(1, 64),
    size=st.floats(1, 1e9),
    more=st.floats(1, 10),
)
def test_collectives_never_fall_with_size_alpha_or_hops_and_never_grow_with_bandwidth(op, nodes, size, more):
    ranks, plain = 4 * nodes, network(inside=(2, 100), between=(5, 10), per_node=4)
    wire = Wire(op, size)
    us = wire_us(wire, ranks, plain)
    assert wire_us(Wire(op, size * more), ranks, plain) >= us
    for slower in (
        network(inside=(2 * more, 100), between=(5, 10), per_node=4),
        network(inside=(2, 100), between=(5 * more, 10), per_node=4),
        network(inside=(2, 100 / more), between=(5, 10), per_node=4),
        network(inside=(2, 100), between=(5, 10 / more), per_node=4),
    ):
        assert wire_us(wire, ranks, slower) >= us
    assert wire_us(wire, ranks, plain, {HOPS: "low"}) <= us
    assert wire_us(wire, ranks, plain, {HOPS: "high"}) >= us


@pytest.mark.parametrize("ranks", [0, 1, 6, 10])
def test_gpus_that_fill_no_nodes(ranks):
    with pytest.raises(LokaError, match="multiple of 4"):
        check_ranks(ranks, network(per_node=4))


def test_part_of_a_node():
    check_ranks(3, network(per_node=4))
    check_ranks(8, network(per_node=4))
