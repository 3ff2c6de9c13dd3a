"""A timer without a GPU: it calls every function once, and then races on times that are given."""

import dataclasses

from planted import time_on_cpu

from loka.core.exceptions import first_line
from loka.core.records.report import REGION, Measurement
from loka.core.timing import race
from loka.kernels.gemm.adapters.emulated import EMULATED
from loka.measurement.times import layer_times as timed
from loka.measurement.times import quantize_once_savings
from loka.measurement.times import site_times as times


class FakeTimer:
    """Stands in for `time_interleaved`. `true` gives microseconds by name, 100 for what is not named.

    `races` are the names of each race and `options` what it was asked; `before` sees the names first;
    `racing` is true while it calls the functions.
    """

    def __init__(self, true=None):
        self.true = dict(true or {})
        self.races = []
        self.options = []
        self.racing = False
        self.before = lambda names: None

    def __call__(self, functions, *, baseline, device, seed=0, **options):
        self.before(list(functions))
        self.races.append(list(functions))
        self.options.append(options)
        failures = {}
        self.racing = True
        try:
            for name, function in functions.items():
                try:
                    function()
                except Exception as error:
                    if name == baseline:
                        raise
                    failures[name] = first_line(error)
        finally:
            self.racing = False

        def sample(names, rounds):
            return {
                name: [self.true.get(name, 100.0) * (1 + 5e-4 * ((7 * turn + 3 * place) % 5)) for turn in range(rounds)]
                for place, name in enumerate(names)
            }

        running = [name for name in functions if name not in failures]
        return dataclasses.replace(race(sample, running, baseline=baseline, **options), failures=failures)


def no_region(*args, **options):
    return {REGION: Measurement(unsupported="this test times no regions")}


def install(monkeypatch, timer):
    """Makes `measure` take the CPU for a device that can be timed, with `timer`; no region is timed or compiled."""
    monkeypatch.setattr(times, "time_interleaved", timer)
    monkeypatch.setattr(quantize_once_savings, "time_interleaved", timer)
    monkeypatch.setattr(timed, "time_region", no_region)
    time_on_cpu(monkeypatch)
    return timer


def kernel(name, run=EMULATED.run, algorithms=1):
    """Emulation under another name, with as many algorithms, for rowwise_e4m3."""
    return dataclasses.replace(
        EMULATED,
        name=name,
        library=name,
        recipes=("rowwise_e4m3",),
        run=run,
        algorithms=lambda problem, recipe: algorithms,
    )
