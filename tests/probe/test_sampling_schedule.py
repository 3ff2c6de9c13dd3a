import random
from itertools import pairwise

import pytest
import torch
from sweeps import sweep

from loka.probe.sampling_schedule import LONGEST, Auto, Clock, CudaClock, Every, WallClock, clock_of, sampling_of

PLAIN = 0.010


def run(cadence, steps, *, sampled, plain=lambda step: PLAIN, start=0, late=0):
    """The sampled steps, and the share that samples really took; times are told `late` steps late."""
    taken, told, extra, total = [], [], 0.0, 0.0
    for step in range(start, start + steps):
        if len(told) > late:
            cadence.costs.took(*told.pop(0))
        due = cadence.due(step)
        seconds = sampled(step) if due else plain(step)
        if due:
            taken.append(step)
            extra += seconds - PLAIN
        told.append((step, seconds))
        total += PLAIN
    return taken, extra / total


@pytest.mark.parametrize(("every", "known"), [(10, True), (2, False), (1, False)])
def test_a_fixed_cadence_knows_its_share(every, known):
    """A sample costs 4 plain steps here. With too few plain steps in between nothing is known."""
    cadence = Every(every)
    run(cadence, 1000, sampled=lambda step: 5 * PLAIN)
    assert cadence.overhead == (pytest.approx(4 / every, rel=0.05) if known else None)


@pytest.mark.parametrize("late", [0, 3])
def test_cheap_samples_come_at_the_geometric_gaps(late):
    """One that costs 2 % of a step is never held back."""
    taken, share = run(Auto(overhead=0.01), 20_000, sampled=lambda step: PLAIN * 1.02, late=late)
    assert taken[:8] == [0, 50, 100, 150, 200, 250, 312, 390]
    assert max(b - a for a, b in pairwise(taken)) == 2000
    assert share < 0.001


@pytest.mark.parametrize("times", [5, 30, 150])
@pytest.mark.parametrize("overhead", sweep([0.01, 0.03], [0.01]))
def test_the_share_stays_under_the_overhead(times, overhead):
    """Costs and steps vary by a fifth; what is left is one sample of 1.2 * `times` steps, and the two
    on trust before anything was earned, over the whole run."""
    noise = random.Random(times)
    steps = 120_000
    taken, share = run(
        Auto(overhead=overhead),
        steps,
        sampled=lambda step: PLAIN * (1 + times * noise.uniform(0.8, 1.2)),
        plain=lambda step: PLAIN * noise.uniform(0.9, 1.1),
    )
    assert share <= overhead + 1.2 * times / steps
    geometric = 60  # samples that the gaps alone would allow: (120,000 - 8000) / 2000, and a few
    assert len(taken) >= min(0.8 * overhead * steps / times, geometric)  # and what may be spent, is


def test_a_sample_is_never_further_than_the_longest_gap():
    """One that costs 10,000 steps would have to wait a million."""
    taken, _ = run(Auto(overhead=0.01), 100_000, sampled=lambda step: PLAIN * 10_000)
    assert max(b - a for a, b in pairwise(taken)) == LONGEST
    assert len(taken) == 2 + (100_000 - 50 - 1) // LONGEST


def test_work_done_once_is_not_charged():
    """The first sample traces the model, and the step after it compiles: neither is a sample's cost."""
    plain = lambda step: 60.0 if step == 1 else PLAIN  # noqa: E731
    once = Auto(overhead=0.01)
    first, _ = run(once, 5000, sampled=lambda step: 20.0 if step == 0 else 3 * PLAIN, plain=plain)
    never, _ = run(Auto(overhead=0.01), 5000, sampled=lambda step: 3 * PLAIN)
    assert first == never
    # What is counted: two steps' extra time for each sample, the first one taken to be like the second.
    assert once.overhead == pytest.approx(2 * len(first) / 5000, rel=0.01)


def test_a_sample_that_turns_out_dear_is_paid_back():
    """From step 10,000 on samples cost 50 steps instead of 1: the share of all that follows holds."""
    taken, share = run(Auto(overhead=0.01), 200_000, sampled=lambda step: PLAIN * (2 if step < 10_000 else 51))
    assert share <= 0.01 + 50 / 200_000
    late = [step for step in taken if step > 20_000]
    assert min(b - a for a, b in pairwise(late)) >= 2000


def test_what_a_sample_leaves_to_the_next_step_is_its_cost():
    cadence, taken = Auto(overhead=0.01), []
    for step in range(30_000):
        due = cadence.due(step)
        taken += [step] if due else []
        cadence.costs.took(step, PLAIN * (21 if step - 1 in taken[-1:] else 1))  # the next step pays for it
    assert len(taken) - 2 <= 30_000 * 0.01 / 20


def test_an_evaluation_in_a_sampled_step_is_not_its_cost():
    """A minute in every sampled step but every third: what the others show decides."""
    cadence, taken = Auto(overhead=0.01), []
    for step in range(20_000):
        due = cadence.due(step)
        taken += [step] if due else []
        cadence.costs.took(step, None if due and len(taken) % 3 else PLAIN)
    undisturbed, _ = run(Auto(overhead=0.01), 20_000, sampled=lambda step: PLAIN)
    assert taken == undisturbed


def test_steps_that_cannot_be_timed():
    cadence, taken = Auto(overhead=0.01), []
    for step in range(50_000):
        taken += [step] if cadence.due(step) else []
        cadence.costs.took(step, None)
    assert taken[:8] == [0, 50, 100, 150, 200, 250, 312, 390]
    assert [b - a for a, b in pairwise(taken[7:])] == [LONGEST, LONGEST]


def test_a_run_that_goes_on_waits_a_little():
    taken, _ = run(Auto(overhead=0.01, start=8123), 4100, sampled=lambda step: PLAIN, start=8123)
    assert taken == [8173, 10173, 12173]


@pytest.mark.parametrize("every", [0, -3, "often", 1.5, True])
def test_what_cannot_be(every):
    with pytest.raises(ValueError, match="every is"):
        sampling_of(every, overhead=0.01)


def test_an_overhead_that_cannot_be():
    for overhead in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="overhead is"):
            sampling_of("auto", overhead=overhead)
    assert isinstance(sampling_of("auto", overhead=0.01), Auto)
    assert isinstance(sampling_of(7, overhead=0.0), Every)


class Late(Clock):
    """Marks are numbers; one has passed when the device has got that far."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.device = 0.0

    def _now(self):
        return self.now

    def _passed(self, mark):
        return mark <= self.device

    def _between(self, begin, end):
        return end - begin


def test_clocks_tell_each_step_once_and_when_it_is_over():
    clock, told = Late(), []
    for step, now in enumerate((0.0, 1.0, 3.0, 6.0)):
        clock.now = now
        clock.mark(step)
        if step == 1:
            clock.disturb()
    clock.read(lambda *step: told.append(step))
    assert told == []  # the device is far behind, and nobody waits for it
    clock.device = 3.0
    clock.read(lambda *step: told.append(step))
    clock.read(lambda *step: told.append(step))
    assert told == [(0, 1.0), (1, None)]
    clock.device = 10.0
    clock.read(lambda *step: told.append(step))
    assert told == [(0, 1.0), (1, None), (2, 3.0)]


def test_the_clock_of_a_device():
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, WallClock)
    assert isinstance(clock_of(torch.device("cuda", 0)), CudaClock)
    told = []
    clock.mark(0)
    clock.mark(1)
    clock.read(lambda *step: told.append(step))
    assert told[0][0] == 0
    assert told[0][1] >= 0


@pytest.mark.gpu
def test_a_gpu_is_timed_without_waiting_for_it():
    """A kernel of about 0.1 s lies between two marks, and the CPU is long past both."""
    clock = clock_of(torch.device("cuda", torch.cuda.current_device()))
    told = []
    torch.cuda.synchronize()
    clock.mark(0)
    torch.cuda._sleep(200_000_000)
    clock.mark(1)
    clock.read(lambda *step: told.append(step))
    assert told == []
    torch.cuda.synchronize()
    clock.read(lambda *step: told.append(step))
    assert told[0][0] == 0
    assert 0.02 < told[0][1] < 2
