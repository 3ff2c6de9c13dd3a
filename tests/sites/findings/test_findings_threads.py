"""D1 and E2: one converted model serves many threads, and batches of any width, from its first call on.

What made them fail: copies in eight bits whose version was set before they were written, a last input that
threads shared, and serving scales that came from the first batches.
"""

import threading

import pytest
import torch
from forced import plan_of
from oracle import CLOSE, assert_close, by_hand, off
from small_towers import BOTH_WAYS, EAGER_FIRST
from torch import nn

import loka

THREADS, CALLS = 8, 2_500
ROUNDS = 10  # of which the first follows convert, and every other one a load_state_dict


def _small(seed=0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


class Crowd:
    """Threads that wait for each other and then call at once, each with inputs of its own."""

    def __init__(self):
        self.calls, self.wrong, self.refused = 0, 0, []
        self._lock = threading.Lock()

    def call(self, model, oracle, calls):
        with torch.no_grad():
            inputs = [torch.randn(8, 16, generator=torch.Generator().manual_seed(i)) for i in range(THREADS)]
            expected = [oracle(x) for x in inputs]
        start = threading.Barrier(THREADS)

        def work(place):
            torch.set_num_threads(1)
            wrong, done, refused = 0, 0, []
            start.wait()
            with torch.no_grad():
                for _ in range(calls):
                    try:
                        wrong += off(model(inputs[place]), expected[place]) > CLOSE
                        done += 1
                    except Exception as error:
                        refused.append(error)
            with self._lock:
                self.calls += done
                self.wrong += wrong
                self.refused += refused

        threads = [threading.Thread(target=work, args=(place,)) for place in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("share", [10, pytest.param(1, marks=pytest.mark.slow)], ids=["fewer", "all"])
@EAGER_FIRST
def test_d1_twenty_thousand_calls_from_eight_threads(compiled, share):
    """Right after convert, and right after each of nine loads of other weights, 30 times as large or small.

    Compiled, the first calls of all threads race for the compiler too. A call that used the weights of
    before, or those of another thread's input, is off by far more than the bound.
    """
    plan = plan_of(_small(), torch.randn(8, 16))
    crowd = Crowd()
    found = loka.convert(_small(), plan).eval()
    model = torch.compile(found) if compiled else found
    for index in range(ROUNDS):
        if index:
            state = {name: 30.0 ** (index % 3 - 1) * value for name, value in _small(index).state_dict().items()}
            found.load_state_dict(state)
        elif not compiled:
            found = model = loka.convert(loka.revert(found), plan)
        oracle = _small()
        oracle.load_state_dict(found.state_dict())
        crowd.call(model, by_hand(oracle), CALLS // ROUNDS // share)
    assert not crowd.refused, crowd.refused[0]
    assert crowd.calls == THREADS * CALLS // share == 20_000 // share
    assert crowd.wrong == 0
    counts = loka.health_of(found)
    assert not any(site["bad_a"] or site["bad_b"] for site in counts.values())


def test_d1_converted_anew_under_threads_of_another_model():
    """Two models of one plan share nothing: while one serves, the other is converted, trained and
    reverted.
    """
    plan = plan_of(_small(), torch.randn(8, 16))
    served, oracle = loka.convert(_small(), plan).eval(), by_hand(_small())
    crowd, done = Crowd(), threading.Event()

    def other():
        while not done.is_set():
            model = loka.convert(_small(3), plan)
            model(torch.randn(8, 16)).square().mean().backward()
            loka.revert(model)

    busy = threading.Thread(target=other)
    busy.start()
    try:
        crowd.call(served, oracle, 100)
    finally:
        done.set()
        busy.join()
    assert (crowd.calls, crowd.wrong, crowd.refused) == (800, 0, [])


@BOTH_WAYS
def test_e2_narrower_batches_first(compiled):
    """Twenty batches with values 20 times narrower, then the usual ones, then 50 times wider ones."""
    found = loka.convert(_small(), plan_of(_small(), torch.randn(64, 16))).eval()
    model = torch.compile(found, backend="aot_eager") if compiled else found
    oracle = by_hand(_small())
    with torch.inference_mode():
        for width in (*[0.05] * 20, 1.0, 50.0, 1.0, 0.05):
            x = width * torch.randn(64, 16)
            assert_close(model(x), oracle(x))
