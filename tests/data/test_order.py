import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loka.data.order import Shuffle, order_of


def rows_in(order, group_rows):
    """The row numbers of the whole store in the order in which a rank reads them."""
    begins = np.cumsum(group_rows) - group_rows
    parts = []
    for window in range(len(order.window) - 1):
        rows = np.concatenate([np.arange(begins[g] + a, begins[g] + b) for g, a, b in order.pieces(window)])
        chosen = order.rows(window)
        parts.append(rows if chosen is None else rows[chosen])
        assert len(rows) == order.start[window + 1] - order.start[window]
    return np.concatenate([np.empty(0, np.int64), *parts])


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    world=st.integers(1, 4),
    window_rows=st.integers(1, 30),
    seed=st.none() | st.integers(0, 3),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_ranks_share_the_rows_out(sizes, world, window_rows, seed, cut):
    group_rows = np.array(sizes)
    total = sum(sizes)
    first, last = sorted(round(share * total) for share in cut)
    shuffles = [Shuffle(seed=seed, rank=rank, world=world, window_rows=window_rows) for rank in range(world)]
    read = [rows_in(order_of(group_rows, first=first, last=last, shuffle=shuffle), group_rows) for shuffle in shuffles]
    assert [len(rows) for rows in read] == [(last - first) // world] * world
    together = np.concatenate(read)
    assert len(set(together.tolist())) == len(together)
    assert set(together.tolist()) <= set(range(first, last))
    if seed is None:  # as stored, and only the tail left out
        assert together.tolist() == list(range(first, first + len(together)))


def test_epochs_and_seeds_and_ranks_have_orders_of_their_own():
    group_rows = np.full(20, 10)

    def read(**changes):
        shuffle = Shuffle(**{"seed": 0, "window_rows": 40, **changes})
        return rows_in(order_of(group_rows, first=0, last=200, shuffle=shuffle), group_rows).tolist()

    assert read() == read()
    orders = [read(), read(epoch=1), read(seed=1), read(seed=1, epoch=1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(200)) for order in orders)
    assert read(world=2, rank=0) + read(world=2, rank=1) != read()


def test_a_window_mixes_rows_of_all_its_groups():
    group_rows = np.full(400, 50)
    shuffle = Shuffle(seed=0, window_rows=1000)
    order = order_of(group_rows, first=0, last=20_000, shuffle=shuffle)
    rows = rows_in(order, group_rows)
    groups = rows // 50
    # 20 of 400 groups in a window, drawn from all over the store: among any 100 rows about 20 of them.
    assert all(len(set(groups[at : at + 100].tolist())) > 15 for at in range(0, 20_000, 1000))
    # A fair order puts a row's neighbour anywhere in the window: rank correlation about 0 +- 1/sqrt(20000).
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.1
    assert abs(np.corrcoef(rows, np.arange(20_000))[0, 1]) < 5 / np.sqrt(400)  # groups are what moves


def test_the_window_of_a_position_is_found():
    order = order_of(np.full(7, 10), first=3, last=65, shuffle=Shuffle(seed=0, window_rows=15))
    found = [order.window_of(position) for position in range(62)]
    assert found == sorted(found)
    starts = order.start.tolist()
    assert all(starts[window] <= position < starts[window + 1] for position, window in enumerate(found))
    assert order.window_of(62) == len(starts) - 1


@pytest.mark.parametrize("wrong", [{"rank": 2, "world": 2}, {"epoch": -1}, {"seed": -1}, {"window_rows": 0}])
def test_senseless_orders_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Shuffle(**wrong)
