import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn

import loka
from loka.probe.sampling_schedule import Auto

WORLD = 3
PLAIN = 0.010


def by_scripted_clock(rank, steps=12_000):
    """A sample costs 5, 25 or 45 plain steps, so that alone the ranks would sample other steps."""
    cadence, taken = Auto(overhead=0.01), []
    for step in range(steps):
        due = cadence.due(step)
        taken += [step] if due else []
        cadence.costs.took(step, PLAIN * (6 + 20 * rank if due else 1))
    return taken


def resumed_on_rank_0(rank):
    """Which counts its steps from 700 on, the others from 0. By the number of the call."""
    start = 0 if rank else 700
    cadence, taken = Auto(overhead=0.01, start=start), []
    for step in range(start, start + 600):
        taken += [step - start] if cadence.due(step) else []
        cadence.costs.took(step, PLAIN)
        if step % 100 == 0:
            dist.barrier()  # as training would: nobody is far ahead of rank 0
    return taken


def by_the_clock(rank):
    net, taken = nn.Linear(8, 1), []
    with loka.Probe(net, every="auto", overhead=0.3) as probe:
        for step in range(300):
            taken += [step] if probe.next_step() else []
            net(torch.randn(4, 8)).sum().backward()
            time.sleep(0.001 * rank)
    return taken


def without_rank_0(rank):
    """The others ask in vain, for the half second that this store waits, and then go on alone."""
    dist.barrier()
    taken = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if rank != 0:
            dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=0.5))
            taken = by_scripted_clock(rank, 5000)
    dist.barrier()
    return taken, [str(one.message) for one in told]


def one_rank(rank, folder):
    found = {"scripted": by_scripted_clock(rank), "resumed": resumed_on_rank_0(rank)}
    found["probe"] = by_the_clock(rank)
    return {**found, "alone": without_rank_0(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(one_rank, WORLD, tmp_path_factory.mktemp("ranks"))


def test_all_ranks_sample_the_steps_of_rank_0(ranks):
    alone = [by_scripted_clock(rank) for rank in range(WORLD)]  # here is no process group
    assert len({tuple(steps) for steps in alone}) == WORLD
    for rank in ranks:
        assert rank["scripted"] == alone[0]


def test_steps_are_counted_from_where_a_run_goes_on(ranks):
    """Rank 0 waits a little, being resumed, and its gaps are a quarter of 750 and more."""
    for rank in ranks:
        assert rank["resumed"] == [50, 237, 471]


def test_so_do_real_probes(ranks):
    assert ranks[0]["probe"] == ranks[1]["probe"] == ranks[2]["probe"]
    assert ranks[0]["probe"][:2] == [0, 50]


def test_a_rank_that_is_not_answered_goes_on_alone(ranks):
    for rank in (1, 2):
        taken, told = ranks[rank]["alone"]
        assert taken == by_scripted_clock(rank, 5000)
        (message,) = told
        assert "own clock" in message
        assert "rank 0 did not say" in message
        assert "Way out: let rank 0" in message
