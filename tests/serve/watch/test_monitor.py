import logging
import math
import statistics
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import BOTH, ROW, TENSOR, frozen, plan_for, rows, tower
from torch import nn

from loka.kernels.edge.twin import row_scale
from loka.serve import freeze
from loka.serve.watch.monitor import (
    EVERY,
    WINDOW,
    Looks,
    Monitor,
    Range,
    apart,
    is_looked_at,
    look,
    look_of_scales,
    looks_of,
    octaves_of,
    range_of,
)


def first_alarm(candidate, scale, count):
    """After how many batches whose inputs are `scale` times as large, behind 200 healthy ones."""
    torch.manual_seed(0)
    layers = nn.Linear(24, 37, bias=False), nn.LayerNorm(37), nn.ReLU(), nn.Linear(37, 16)
    model = nn.Sequential(*layers).eval()
    generator = torch.Generator().manual_seed(1)
    plan = plan_for(model, {"0": candidate, "3": candidate})
    server = freeze(model, plan, calibration=[torch.randn(160, 24, generator=generator)])
    for _ in range(200):
        server(torch.randn(count, 24, generator=generator))
    assert server.alarms() == ()
    for batch in range(1, 101):
        server(torch.randn(count, 24, generator=generator) * scale)
        if server.alarms():
            return batch, server.alarms()
    return 101, ()


@pytest.mark.parametrize("count", [1, 33])
@pytest.mark.parametrize("scale", [20.0, 1 / 20])
def test_a_shift_of_twenty_times_is_named_within_a_hundred_batches(scale, count):
    batch, (alarm,) = first_alarm(ROW, scale, count)
    assert batch < EVERY * (WINDOW // 2 + 2)
    assert (alarm.site, alarm.kind) == ("0", "shift")  # behind the norm nothing has moved
    assert scale / 2 < float(alarm.text.split()[2]) < scale * 2


def test_saturation_of_a_static_scale_is_named():
    batch, (alarm,) = first_alarm(TENSOR, 20.0, 16)
    assert batch < 2 * EVERY
    assert (alarm.site, alarm.kind) == ("0", "saturation")


def looked(octaves):
    """Of rows whose largest magnitude has these octaves."""
    return octaves_of(torch.exp2(torch.from_numpy(octaves))).tolist()


@pytest.mark.parametrize("spread", [pytest.param(0.1, marks=pytest.mark.slow), 1.0, 2.0])
def test_no_alarm_in_a_million_healthy_batches_and_one_on_a_shift(spread):
    """Batches of one row, the hardest: log-normal maxima whose deviation is up to 2 octaves."""
    generator = np.random.default_rng(0)
    known = range_of(torch.exp2(torch.from_numpy(generator.normal(3.0, spread, 4096))), ceiling=None)
    sites = [f"site {number}" for number in range(125)]
    monitor = Monitor(dict.fromkeys(sites, known))
    for _ in range(1_000_000 // EVERY // len(sites)):
        healthy = looked(generator.normal(3.0, spread, len(sites)))
        monitor.note((sites, looks(healthy)))
    assert monitor.alarms() == ()
    one = Monitor({"site": known})
    for median in healthy[-WINDOW:] + looked(generator.normal(3.0 + math.log2(20), spread, 100 // EVERY)):
        one.note((["site"], looks([median])))
    assert known.blind == (not one.alarms())
    assert known.blind == (spread == 2.0)  # 2.58 * 2 octaves hide a shift of 4.3, and it says so


def test_a_row_is_beyond_the_limit_once_in_a_hundred():
    draws = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1.7
    known = range_of(torch.exp2(draws), ceiling=None)
    octaves = octaves_of(torch.exp2(draws))
    assert float(((octaves - known.median).abs() > known.limit).double().mean()) < 0.01
    assert abs(known.limit - 2.576 * 1.7) <= 0.75, "octaves are whole"
    assert range_of(torch.tensor([0.0, 1.75, 1.75]), None) == Range(median=-7.5, limit=2.0, ceiling=None, zeros=True)
    assert not range_of(torch.tensor([1.75, 1.75]), None).zeros
    assert range_of(448 * torch.tensor([1.0, 1.0, 64.0]), None).limit == 5.5 + 0.25


def looks(octaves, rows=1, saturated=0):
    """Of sites that see as much."""
    nothing = np.zeros(len(octaves), dtype=int)
    return Looks(np.array(octaves), rows, nothing + saturated, nothing)


def seen(rows, ceiling):
    """The octave, rows, those beyond the ceiling, and those that are not finite."""
    found = looks_of(look(rows).unsqueeze(0), [ceiling])
    return found.octaves.tolist(), found.rows, int(found.saturated[0]), int(found.nonfinite[0])


def test_looks():
    rows_seen = torch.tensor([[0.0, 0.0], [1.0, -4.0], [torch.nan, 1.0], [2.0, 0.0], [-torch.inf, 1.0]])
    assert seen(rows_seen, 3.0) == ([-7.0], 5, 1, 2)
    many = torch.ones(1000, 2)
    many[::9] = 2.0
    assert seen(many, 1.5) == ([-7.0], 112, 112, 0)
    assert seen(torch.zeros(3, 2), None) == ([-math.inf], 3, 0, 0)
    (octave,), *others = seen(torch.tensor([[0.0, 0.0], [math.nan, 0.0]]), None)
    assert math.isnan(octave)
    assert others == [2, 0, 1]


@given(st.floats(2.0**-50, 2.0**100, width=32))
def test_a_row_and_its_scale_are_of_one_octave(largest):
    rows = torch.tensor([[largest, -largest / 3]])
    of_row, of_scale = look(rows), look_of_scales(row_scale(rows).view(-1))
    assert torch.equal(octaves_of(of_row), octaves_of(of_scale))
    assert 2.0 ** octaves_of(of_row).item() >= largest / 448 > 2.0 ** (octaves_of(of_row).item() - 1)


@given(st.integers(1, 4000), st.integers(1, 64))
def test_each_token_of_a_batch_has_its_turn(batch, tokens):
    step = apart(batch * tokens)
    seen = torch.arange(0, batch * tokens, step)
    assert min(16, batch * tokens) <= len(seen) <= 128
    assert len((seen % tokens).unique()) >= min(tokens, len(seen))


AMAX = st.sampled_from([0.0, 1e-30, 0.7, 2.0, 3.0, 500.0, math.inf, math.nan])


@given(st.lists(st.lists(AMAX, min_size=5, max_size=5)))
def test_sites_at_once_are_as_one_by_one(rows):
    ceilings = [None if place % 2 else 2.0 for place in range(len(rows))]
    found = looks_of(torch.tensor(rows).view(-1, 5), ceilings)
    assert found.rows == 5
    each = zip(found.octaves, found.saturated, found.nonfinite, strict=True)
    for amax, ceiling, (octave, saturated, nonfinite) in zip(rows, ceilings, each, strict=True):
        finite = [x for x in amax if math.isfinite(x)]
        positive = sorted(octaves_of(torch.tensor([x for x in finite if x > 0])).tolist())
        if positive:
            assert octave == positive[(len(positive) - 1) // 2]
        else:
            assert octave == -math.inf if amax == [0.0] * 5 else math.isnan(octave)
        assert saturated == (0 if ceiling is None else sum(x > ceiling for x in finite))
        assert nonfinite == 5 - len(finite)


def test_of_sites_that_see_nan_at_once_the_first_is_named():
    """Whatever came together because as many rows of it were looked at."""
    monitor = Monitor(dict.fromkeys(("a", "b", "c"), Range(median=-8.0, limit=2.0, ceiling=None)))
    bad = torch.tensor([[1.0, math.nan]])
    monitor.look_at((["a", "c"], torch.cat([torch.ones(1, 2), bad])), (["b"], bad))
    assert [alarm.site for alarm in monitor.alarms()] == ["b"]


def test_a_site_that_ran_twice_in_a_batch_is_looked_at_twice():
    monitor = Monitor(dict.fromkeys(("a", "b"), Range(median=0.5, limit=2.0, ceiling=None)))
    for _ in range(WINDOW // 2):
        monitor.note((["a", "b", "a"], looks([8.0, 8.0, 8.0])))
    assert [(alarm.site, alarm.batch) for alarm in monitor.alarms()] == [("a", WINDOW)]


def test_scales_of_zeros_and_of_what_is_not_finite():
    rows = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 0.0], [0.0, 448.0]])
    found = look_of_scales(row_scale(rows).view(-1))
    assert found[[0, 3]].tolist() == [0.0, 448.0]
    assert found[1:3].isnan().all()


def test_an_alarm_is_raised_once_and_nan_at_its_first_site(caplog):
    model = tower()
    server = frozen(model, BOTH)
    dense, ids = rows(16)
    dense[4, 4] = torch.nan
    for _ in range(3 * EVERY):
        server((dense, ids))
    (alarm,) = server.alarms()
    assert (alarm.site, alarm.kind, alarm.text) == ("first", "nonfinite", "1 of 16 rows hold NaN or infinity")
    assert len(caplog.records) == 1
    assert "first" in caplog.text


@given(st.lists(st.integers(-4, 4), min_size=WINDOW, max_size=4 * WINDOW), st.sampled_from([2.0, 2.5, 3.0]))
def test_a_shift_is_raised_when_the_median_is_beyond_the_limit(octaves, limit):
    monitor = Monitor({"site": Range(median=0.5, limit=limit, ceiling=None)})
    for at, octave in enumerate(octaves, 1):
        monitor.note((["site"], looks([float(octave)])))
        beyond = (abs(statistics.median(octaves[end - WINDOW : end]) - 0.5) > limit for end in range(WINDOW, at + 1))
        assert any(beyond) == bool(monitor.alarms())


def test_the_last_looks_tell_how_far_a_shift_went():
    """Wherever in the ring of the window they lie."""
    for before in range(WINDOW, 2 * WINDOW):
        monitor = Monitor({"site": Range(median=0.5, limit=2.0, ceiling=None)})
        for octave in [0.0] * before + [4.0] * WINDOW:
            monitor.note((["site"], looks([octave])))
        (alarm,) = monitor.alarms()
        assert alarm.text.startswith(f"rows are {2**3.5:.3g} times")


def test_alarms_of_one_batch_come_in_the_order_of_the_model():
    monitor = Monitor({name: Range(median=0.5, limit=2.0, ceiling=1.0) for name in ("a", "b", "c")})
    for _ in range(WINDOW):
        shown = torch.full((1, 8), 448.0)
        monitor.look_at((["c", "a"], shown.expand(2, 8) * 16), (["b"], shown * torch.nan))
    assert [(each.site, each.kind) for each in monitor.alarms()] == [
        ("a", "saturation"), ("b", "nonfinite"), ("c", "saturation"), ("a", "shift"), ("c", "shift"),
    ]  # fmt: skip


def test_who_handles_the_warning_may_ask_for_the_alarms():
    """It waited for ever, and the request with it."""
    server, asked = frozen(tower(), BOTH), []

    class Asks(logging.Handler):
        def emit(self, record):
            asked.append(server.alarms())

    dense, ids = rows(16)
    handler, logger = Asks(), logging.getLogger("loka.serve")
    logger.addHandler(handler)
    request = threading.Thread(target=server, args=((dense * torch.nan, ids),), daemon=True)
    request.start()
    request.join(20)
    logger.removeHandler(handler)
    assert not request.is_alive()
    assert asked == [server.alarms()]
    assert asked[0][0].kind == "nonfinite"


def test_few_saturated_rows_are_no_alarm():
    monitor = Monitor({"site": Range(median=0.0, limit=1.5, ceiling=2.0)})
    for _ in range(WINDOW):
        monitor.note((["site"], looks([0.0], rows=1000, saturated=9)))
    assert monitor.alarms() == ()
    for _ in range(WINDOW):
        monitor.note((["site"], looks([0.0], rows=1000, saturated=11)))
    assert [alarm.kind for alarm in monitor.alarms()] == ["saturation"]
    monitor = Monitor({"site": Range(median=0.0, limit=1.5, ceiling=2.0)})
    for _ in range(4):
        assert len(monitor.alarms()) == 0
        monitor.note((["site"], looks([0.0], rows=10, saturated=1)))
    assert len(monitor.alarms()) == 1


def test_one_of_eight_requests_is_looked_at_at_no_period():
    """Every second request, or any other share of a round of up to 32, has its part of the looks."""
    looked_at = [batch for batch in range(1 << 15) if is_looked_at(batch)]
    assert [batch // EVERY for batch in looked_at] == list(range(len(looked_at)))
    assert looked_at[0] == 0, "the first one, so that few requests are not none"
    for period in range(2, 33):
        shares = np.bincount(np.array(looked_at) % period, minlength=period) / len(looked_at)
        assert np.abs(shares * period - 1).max() < 0.5, "five deviations or more"


def shifted(server, count, *, seed=0, scale=1000.0):
    for turn in range(count):
        dense, ids = rows(16, seed + turn)
        server((dense * scale, ids))


def test_every_second_request_that_is_bad_raises_the_alarm():
    server = frozen(tower(), BOTH)
    for turn in range(4 * EVERY * WINDOW):
        shifted(server, 1, seed=turn, scale=1000.0 if turn % 2 else 1.0)
    assert "shift" in {alarm.kind for alarm in server.alarms()}


def test_a_window_goes_on_over_a_refresh():
    """Of which each version sees less than a window."""
    server = frozen(tower(), BOTH)
    for turn in range(3):
        assert server.alarms() == ()
        shifted(server, 12 * EVERY, seed=100 * turn)
        if turn < 2:
            server.refresh(tower().state_dict())
    assert [alarm.kind for alarm in server.alarms()][:1] == ["shift"]


def test_what_only_weights_of_before_showed_is_no_alarm_of_these():
    known = {"site": Range(median=0.5, limit=2.0, ceiling=None)}
    before = Monitor(known)
    for _ in range(WINDOW):
        before.note((["site"], looks([20.0])))
    assert before.alarms()
    now = Monitor(known, behind=before)
    for _ in range(3 * WINDOW):
        now.note((["site"], looks([0.0])))
    assert now.alarms() == ()


def test_what_later_weights_show_is_no_alarm_of_those_before():
    known = {"site": Range(median=0.5, limit=2.0, ceiling=None)}
    before = Monitor(known)
    for _ in range(WINDOW):
        before.note((["site"], looks([0.0])))
    now = Monitor(known, behind=before)
    for _ in range(WINDOW):
        now.note((["site"], looks([20.0])))
    assert now.alarms()
    before.note((["site"], looks([0.0])))  # by requests of before, or after a rollback
    assert before.alarms() == ()


def test_rows_that_tell_nothing_take_no_place_in_the_window():
    monitor = Monitor({"site": Range(median=0.5, limit=2.0, ceiling=None)})
    for turn in range(4 * WINDOW):
        monitor.note((["site"], looks([20.0 if turn % 4 == 3 else -math.inf])))
    assert [alarm.batch for alarm in monitor.alarms()] == [4 * WINDOW]


@pytest.mark.parametrize(("limit", "blind"), [(3.82, False), (3.83, True)])
def test_a_site_is_blind_from_where_a_shift_of_twenty_times_is_hidden(limit, blind):
    """It is 4.32 octaves, of which whole ones may show half an octave less."""
    assert Range(median=0.5, limit=limit, ceiling=None).blind == blind


@pytest.mark.parametrize("zeros", [False, True])
def test_zeros_alone_are_a_shift_where_calibration_had_none(zeros):
    monitor = Monitor({"site": Range(median=0.5, limit=2.0, ceiling=None, zeros=zeros)})
    for _ in range(WINDOW):
        monitor.look_at((["site"], torch.zeros(1, 8)))
    assert [alarm.text[:15] for alarm in monitor.alarms()] == ([] if zeros else ["rows are 0 time"])


def test_of_a_long_request_the_first_part_is_looked_at():
    server = frozen(tower(), BOTH, buckets=(1, 16))
    dense, ids = rows(16 * WINDOW)
    server((dense * 1000, ids))
    assert server.alarms() == ()
