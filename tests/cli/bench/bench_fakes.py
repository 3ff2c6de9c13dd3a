"""Races on given times, without a GPU, for the GEMM benchmark."""

import dataclasses

import torch
from planted import registered, time_on_cpu

from loka.core.error import Estimate
from loka.core.records.report import HP, REGION, Measurement
from loka.core.timing import race
from loka.kernels.gemm.adapters.emulated import EMULATED


def _raced(known, baseline, **options):
    def sample(names, rounds):
        return {name: [known[name]] * rounds for name in names}

    return race(sample, list(known), baseline=baseline, **options)


class ByResult:
    """Stands in for `time_interleaved`. Runs every function once and looks its time up by name and result:
    `times` are microseconds by (candidate, shape of its result), 100 for "hp" and what is not named.

    A layer's candidates "a | b | c" take the sum of what each takes for its result.
    """

    def __init__(self, times):
        self.times = dict(times)
        self.races = []

    def __call__(self, functions, *, baseline, device, seed=0, **options):
        self.races.append(list(functions))
        return _raced({name: self._time(name, function()) for name, function in functions.items()}, baseline, **options)

    def _time(self, name, results):
        if isinstance(results, torch.Tensor):
            return self.times.get((name, tuple(results.shape)), 100.0)
        assert isinstance(results, tuple)
        names = name.split(" | ") if " | " in name else [name] * len(results)
        return sum(self._time(part, result) for part, result in zip(names, results, strict=True))


class Passes:
    """Quantization passes of 20 us a copy; one that makes both saves `saved` of 40."""

    def __init__(self, saved):
        self.saved = saved

    def __call__(self, functions, **options):
        known = {name: 20.0 if "" in name.split("+") else 40.0 - self.saved for name in functions}
        return _raced(known, str(options["baseline"]), keep=list(functions))


def _in_regions(*args, **options):
    """Ten times as fast as hp, which no bench of sites may take for its own."""
    times = {HP: Estimate(100.0, 100.0, 100.0), REGION: Estimate(10.0, 10.0, 10.0)}
    return {
        name: Measurement(microseconds=us, speedup=Estimate(*[100.0 / us.value] * 3), rounds=9)
        for name, us in times.items()
    }


def install(monkeypatch, *, measured, confirmed=None, saved=0.0):
    """`measure` and `confirm` time on the CPU, by these tables; returns the timer of `confirm`."""
    timer = ByResult(measured if confirmed is None else confirmed)
    time_on_cpu(monkeypatch)
    monkeypatch.setattr("loka.measurement.times.site_times.time_interleaved", ByResult(measured))
    monkeypatch.setattr("loka.measurement.times.quantize_once_savings.time_interleaved", Passes(saved))
    monkeypatch.setattr("loka.measurement.rerace.time_interleaved", timer)
    monkeypatch.setattr("loka.measurement.times.layer_times.time_region", _in_regions)
    return timer


def libraries(*names):
    """For a while only these libraries exist: emulation under their names, rowwise_e4m3 alone."""
    of = {"recipes": ("rowwise_e4m3",), "emulates": False}
    return registered(*(dataclasses.replace(EMULATED, name=name, library=name, **of) for name in names), alone=True)
