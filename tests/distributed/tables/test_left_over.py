import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from loka.distributed.tables.changed_rows import Table
from loka.distributed.tables.left_over import LeftOver
from loka.distributed.tables.lookups import Lookup
from loka.distributed.tables.row_codes import byte_counts, codec_of, decode_rows, encode_rows

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


def test_a_row_left_over_is_sent_once_and_none_stays_behind_an_exact_exchange():
    weight = torch.zeros(6, 4)
    lookup = Lookup(name="w", tensors=lambda: (weight,), module=nn.Identity(), ids=None, adagrad=None)
    table = Table(lookup=lookup, seen=torch.zeros(6, dtype=torch.bool), left=LeftOver(weight))
    table.note(torch.tensor([3, 1, 9, -1]))  # 9 and -1 are no rows of it: row 0's
    weight[[1, 3]] = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
    received = torch.zeros(6, 4)
    for exact, sent in ((False, [0, 1, 3]), (True, [0, 1, 3]), (True, [])):
        codec = codec_of(table, "e4m3", exact=exact)
        taken = table.take(table.left.ids if exact else table.left.ids[:0])
        assert taken.ids.tolist() == sent
        parts = encode_rows(table, taken, codec, exact=exact)
        assert [len(part) for part in parts] == byte_counts(table, len(sent), codec)
        ids, (changed,) = decode_rows(table, parts, len(sent), codec)
        received[ids] += changed
        assert torch.equal(received, weight) == exact
