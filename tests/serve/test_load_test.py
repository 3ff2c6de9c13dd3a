import itertools
import math
import statistics
import threading
import time

import pytest

from loka.core.exceptions import ServeRefused
from loka.serve.load_test import arrivals, load_test, measure_capacity, percentile


def test_arrivals_are_poisson():
    times = arrivals(1000.0, 20.0, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) == pytest.approx(20_000, abs=5 * math.sqrt(20_000))
    assert times == sorted(times)
    assert times[-1] < 20
    assert statistics.mean(gaps) == pytest.approx(1e-3, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1e-3, rel=0.05)  # of an exponential, as large as its mean
    assert arrivals(1000.0, 20.0, seed=1) == times != arrivals(1000.0, 20.0, seed=2)


def test_percentiles():
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0, 50, 99, 99.9, 100)] == [1, 50, 99, 100, 100]
    assert [percentile(range(1, 1000 * k + 1), 99.9) for k in (1, 41)] == [999, 40_959]
    assert percentile([7.0], 50) == 7.0
    assert math.isnan(percentile([], 50))


def test_waiting_behind_a_stall_counts(monkeypatch):
    """One answer takes 0.3 s. A closed loop would see one slow request; here all that arrive then wait."""
    monkeypatch.setattr("loka.serve.load_test.measure_capacity", lambda *_, **__: 1000.0)
    found = load_test(lambda turn: time.sleep(0.3 if turn == 20 else 0.0005), rate=200.0, seconds=0.6)
    assert found.arrived == found.answered > 60
    assert found.milliseconds[99.0] > 200
    assert found.milliseconds[90.0] > 100  # 60 arrive while it stalls, half of all


def test_a_latency_is_from_the_request_s_own_arrival(monkeypatch):
    monkeypatch.setattr("loka.serve.load_test.measure_capacity", lambda *_, **__: 1000.0)
    found = load_test(lambda turn: None, rate=5.0, seconds=0.7, even=True)
    assert 0 <= found.milliseconds[50.0] < 150, "200 ms lie between two"


def test_an_overloaded_server_is_not_waited_for_and_has_no_median():
    """Of 80 requests about 12 are answered, all of them late; the median of these would be told as the server's."""
    began = time.perf_counter()
    found = load_test(lambda turn: time.sleep(0.05), rate=200.0, seconds=0.4, grace=0.2)
    assert time.perf_counter() - began < 3
    assert 0 < found.answered == found.arrived - found.unanswered < found.arrived / 2
    assert "unanswered" in str(found)
    assert {*found.milliseconds.values(), found.p99_over_p50} == {math.inf}


def test_what_is_not_answered_is_slower_than_all(monkeypatch):
    """2 in 100 hang: the 99th of 100 is one of them, however fast the others are."""
    monkeypatch.setattr("loka.serve.load_test.measure_capacity", lambda *_, **__: 1000.0)
    over = threading.Event()

    def hangs(turn):
        if turn in (10, 50):
            over.wait()

    found = load_test(hangs, rate=100.0, seconds=1.005, threads=8, grace=0.3, even=True)
    over.set()
    assert (found.arrived, found.unanswered) == (100, 2)
    assert found.milliseconds[50.0] <= found.milliseconds[90.0] < 1000
    assert found.milliseconds[99.0] == found.milliseconds[99.9] == found.p99_over_p50 == math.inf
    assert "p99 not answered, p99.9 not answered; 2 unanswered, 0 failed" in str(found)
    assert "of all that arrived: p50 " in str(found)
    assert "at 100.0/s, 10% of the 1000.0/s" in str(found)


def test_failures_are_counted(monkeypatch):
    monkeypatch.setattr("loka.serve.load_test.measure_capacity", lambda *_, **__: 1000.0)

    def answer(turn):
        if turn % 2:
            raise ValueError("no such row")

    found = load_test(answer, rate=300.0, seconds=0.2)
    assert found.failed == found.arrived // 2 > 10
    assert (found.answered, found.unanswered) == (found.arrived - found.failed, 0)
    assert "ValueError: no such row" in str(found)
    assert found.milliseconds[99.0] == math.inf, "a failure is no fast answer"


def test_a_server_that_fails_before_the_test():
    """Refused where it answers nothing; one that fails now and then is tested, and its failures are counted."""

    def broken(turn):
        raise KeyError("weights")

    with pytest.raises(ServeRefused, match="answered none of the") as caught:
        load_test(broken, rate=50.0, seconds=0.05)
    assert "KeyError: 'weights'" in str(caught.value)

    asked = []

    def sometimes(turn):
        asked.append(turn)
        time.sleep(0.001)
        if turn % 2 == 0:
            raise ValueError("now and then")

    assert measure_capacity(sometimes, seconds=0.2) <= (len(asked) - 3) / 2 / 0.2
    found = load_test(sometimes, rate=100.0, seconds=0.3)
    assert found.failed == math.ceil(found.arrived / 2)


def test_an_interrupted_test_asks_no_more(monkeypatch):
    asked, stop = [], iter([])  # next(stop) ends the waiting, as Ctrl-C does
    monkeypatch.setattr("loka.serve.load_test.measure_capacity", lambda *_, **__: 1000.0)
    monkeypatch.setattr("threading.Thread.join", lambda *_: next(stop))
    with pytest.raises(StopIteration):
        load_test(asked.append, rate=100.0, seconds=1.0, even=True)
    time.sleep(0.3)
    assert len(asked) < 5


def test_settings_that_cannot_be(monkeypatch):
    for options in ({"rate": 0.0}, {"rate": math.inf}, {"threads": 0}, {"load": -1.0}, {"grace": -1.0}):
        with pytest.raises(ServeRefused, match="no load test has"):
            load_test(lambda turn: None, seconds=0.05, **options)
    with pytest.raises(ServeRefused, match="no request arrives in"):
        load_test(lambda turn: None, rate=1e-3, seconds=0.05)
    monkeypatch.setattr("loka.serve.load_test.measure_capacity", lambda *_, **__: 1000.0)
    with pytest.raises(ServeRefused, match="more than 1000000"):
        load_test(lambda turn: None, rate=6e5, seconds=2.0)
