import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import ROW, plan_of
from torch import nn

import loka
from loka.serve import freeze
from loka.serve.sites import observing
from loka.serve.watch.monitor import EVERY, WINDOW, apart
from loka.serve.watch.own_rows import RowOrder, own_rows, row_orders

TOKENS = 10


class Attended(nn.Module):
    """[B, 10, 16] -> [B]. torch multiplies by `in_proj_weight` with the batch behind the tokens."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.each = nn.Linear(16, 32)
        self.mixed, self.logit = nn.Linear(TOKENS * 16, 16), nn.Linear(32 + 16, 1)

    def forward(self, x):
        each = self.each(self.attention(x, x, x)[0]).mean(1)
        mixed = self.mixed(x.flip(0).flatten(1)) * 0.0  # of other rows
        return self.logit(torch.cat([each, mixed], dim=1)).squeeze(1)


def served(**options):
    torch.manual_seed(0)
    model = Attended().eval()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(histories(8)).sum().backward()
    model.zero_grad()
    wanted = dict.fromkeys(("attention.in_proj_weight", "each", "mixed"), ROW)
    stats = probe.stats().model
    plan = plan_of(stats, wanted)
    return freeze(model, plan, calibration=[histories(40, seed) for seed in range(3)], **options)


def histories(rows, seed=0):
    return torch.randn(rows, TOKENS, 16, generator=torch.Generator().manual_seed(seed))


def test_the_order_of_each_site_is_found():
    orders = served()._orders
    assert orders == {
        "attention.in_proj_weight": RowOrder.BATCH_LAST,
        "each": RowOrder.BATCH_FIRST,
        "mixed": None,  # flipped, a batch begins with what pads
    }


def test_another_default_device_is_no_matter():
    server, request = served(buckets=(16,)), histories(3)
    expected = server(request).output
    with torch.device("meta"):
        for _ in range(2 * EVERY):
            assert torch.equal(server(request).output, expected)
        (drawn,) = server.card.form.check_rows(server.device, 300)
    assert torch.equal(drawn[256:], drawn[:44])


@pytest.mark.parametrize("buckets", [(64,), (17,)])
def test_late_tokens_are_looked_at_where_the_batch_lies_last(buckets):
    server = served(buckets=buckets)
    for turn in range(WINDOW * EVERY):
        x = histories(17, turn)
        x[:, 3:] *= 1000
        server(x)
    assert ("attention.in_proj_weight", "shift") in {(alarm.site, alarm.kind) for alarm in server.alarms()}


def test_nan_in_a_late_token_is_named_where_it_comes_first():
    server = served(buckets=(64,))
    x = histories(8)  # of 80 rows all are looked at
    x[5, 4] = torch.nan
    for _ in range(EVERY * 2):
        server(x)
    assert [(alarm.site, alarm.kind) for alarm in server.alarms()] == [("attention.in_proj_weight", "nonfinite")]


@given(
    st.integers(1, 40),
    st.integers(0, 30),
    st.integers(1, 12),
    st.sampled_from([RowOrder.BATCH_FIRST, RowOrder.BATCH_LAST]),
)
def test_own_rows_are_those_of_the_requests_rows(count, pads, tokens, order):
    padded = count + pads
    seen = padded * tokens
    batch_row = torch.arange(seen) // tokens if order is RowOrder.BATCH_FIRST else torch.arange(seen) % padded
    for step in (1, apart(seen)):
        looked_at = batch_row[::step]
        own = looked_at[own_rows(order, seen, count=count, padded=padded, apart=step)]
        assert torch.equal(own, looked_at[looked_at < count])
    assert len(batch_row[own_rows(None, seen, count=count, padded=padded)]) == seen
    assert own_rows(order, 2 * padded + 1, count=count, padded=2 * padded) == slice(None), "rows chosen by data"


def test_a_site_that_sees_rows_in_two_orders_has_none():
    def call(given):
        first, last = given[0].flatten(0, 1), given[0].transpose(0, 1).flatten(0, 1)
        for name, seen in (("both", first), ("both", last), ("last", last)):
            observing()(name, seen)

    assert row_orders(call, [torch.randn(4, 3, 2)], 4) == {"both": None, "last": RowOrder.BATCH_LAST}
