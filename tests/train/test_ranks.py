import itertools
from datetime import timedelta

import pytest
import torch.distributed as dist

from loka.train import ranks
from loka.train.ranks import RankFailed, by_the_first, together

PATIENCE = 0.3


@pytest.fixture
def store(monkeypatch):
    made = dist.HashStore()
    made.set_timeout(timedelta(seconds=PATIENCE))
    monkeypatch.setattr(ranks, "ranks_of", lambda: 2)
    monkeypatch.setattr(ranks, "_numbers", itertools.count())
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: made)
    return made


def test_rank_0_may_take_longer_than_a_collective_waits(store):
    beats = itertools.count(1)

    def idle():
        store.add("loka/first/0/alive", 1)
        if next(beats) * ranks._PAUSE > 2 * PATIENCE:
            store.set("loka/first/0", '{"said": "the plan"}')

    assert by_the_first(lambda alive: "not asked", idle=idle) == "the plan"
    assert next(beats) > 2 * PATIENCE / ranks._PAUSE


def test_rank_0_that_is_silent_is_given_up(store):
    with pytest.raises(RankFailed, match="rank 0 was not heard of for"):
        by_the_first(lambda alive: "not asked", idle=lambda: None)


def test_alone_it_is_a_call():
    assert by_the_first(lambda alive: f"said {alive()}", idle=lambda: None) == "said None"
    assert together(lambda: 3) == (3, ["3"])
