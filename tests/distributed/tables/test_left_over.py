import torch
from hypothesis import given
from hypothesis import strategies as st

from loka.distributed.tables.left_over import LeftOver

ROWS = 12


@given(st.lists(st.tuples(st.lists(st.integers(0, ROWS - 1), unique=True), st.booleans()), max_size=12))
def test_it_is_a_dictionary_of_rows(steps):
    left, known = LeftOver(torch.empty(ROWS, 3)), {}
    for step, (ids, cleared) in enumerate(steps):
        rows = torch.arange(3.0) + torch.tensor([100.0 * step + i for i in ids])[:, None]
        left.keep(torch.tensor(ids, dtype=torch.int64), rows)
        known |= dict(zip(ids, rows, strict=True))
        assert sorted(left.ids.tolist()) == sorted(known)
        expected = [known.get(i, torch.zeros(3)) for i in range(ROWS)]
        assert torch.equal(left.of(torch.arange(ROWS)), torch.stack(expected))
        if cleared:
            left.clear()
            known = {}
