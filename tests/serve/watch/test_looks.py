from dataclasses import replace

import pytest
import torch
from served import POW2, plan_for
from sweeps import sweep
from test_serve_graphs import PLAN, backend, frozen, inputs, wide
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loka.compiler import notes
from loka.compiler.notes import watched_by
from loka.serve import freeze, graphs, replays
from loka.serve.sites import frozen_sites, observed_by
from loka.serve.watch.monitor import EVERY, look, octaves_of

__all__ = ["backend"]  # a fixture


def test_the_alarm_looks_by_graphs(backend):
    """At rows of the request alone, whatever the bucket; a shift is named, and healthy rows are not."""
    server = frozen(wide())
    for turn in range(40 * EVERY):
        server(inputs(3, seed=turn))
    assert server.alarms() == ()
    for turn in range(20 * EVERY):
        server(inputs(3, seed=turn) * 20)
    assert [(alarm.site, alarm.kind) for alarm in server.alarms()] == [("first", "shift")]
    assert server.refresh(wide().state_dict()) == 2
    assert server.alarms() == ()


def maxima_of(several):
    return [pair for names, maxima in several for pair in zip(names, maxima, strict=True)]


@pytest.mark.parametrize("count", sweep([1, 5, 16], [5]))
def test_looks_see_what_the_sites_get(backend, count):
    """Of regions the octaves of their own scales, of a site by itself its rows; nothing of what only pads."""
    server = frozen(wide())
    replays, x = server.current.replays, inputs(count) * torch.logspace(-3, 3, count)[:, None]
    seen = {}
    plain = replays([x], 16)
    replays.note(lambda *several: seen.update(maxima_of(several)))
    assert not seen
    assert torch.equal(replays([x], 16, looking=True), plain)
    replays.note(lambda *several: seen.update(maxima_of(several)))
    assert {name: len(maxima) for name, maxima in seen.items()} == dict.fromkeys(PLAN, count)
    eager = {}
    with observed_by(lambda name, rows: eager.update({name: look(rows)})), torch.autocast("cpu", torch.bfloat16):
        server.current.module(x)
    for name, maxima in seen.items():
        apart = (octaves_of(maxima) - octaves_of(eager[name])).abs()
        assert apart.max() <= (name != "first"), "behind FP8 a maximum may cross over to the next octave"
        assert apart.sum() <= 1
    replays([inputs(0)], 2, looking=True)
    replays.note(lambda *several: pytest.fail("a request of no rows shows none"))


def test_looks_are_a_kernel_for_sites_that_show_as_many_numbers(backend):
    """And none for each site: 34 sites, most of them behind a norm, took 106 us of a graph of 1.9 ms."""

    launched = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view:
                launched.append(str(func))
            return func(*args, **(kwargs or {}))

    capturer = frozen(wide())._capturer
    names = sorted(PLAN)

    def call():
        healths = [frozen_sites(capturer._template)[name].health.data_ptr() for name in names]
        scales = [(health, torch.rand(256, 1), notes.SCALES) for health in healths]
        behind = [(health, torch.rand(256, 3), notes.FINITE) for health in healths]
        with Launches():
            notes._HERE.watcher(scales + behind)

    sites = []
    _, values = capturer._shown(call, sites)
    assert [seen.name for seen in sites] == 2 * names
    assert len(values) == sum(seen.looked_at * seen.width for seen in sites)
    assert launched == 2 * ["aten.cat.default"]


@pytest.mark.slow
def test_what_a_graph_shows_is_copied_at_once(backend, monkeypatch):
    """Its memory is the compiler's, which may give it to what comes behind."""

    def watched(watcher):
        def then_write(shown):
            watcher(shown)
            for _, scale, _ in shown:
                scale.fill_(7.0)

        return watched_by(then_write)

    found = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(graphs, "watched_by", watched)
        replays = frozen(wide()).current.replays
        replays([inputs(16)], 16, looking=True)
        replays.note(lambda *several: found.extend(maxima_of(several)))
    (one, other) = (maxima for name, maxima in found if name == "first")
    assert torch.equal(one, other)


def test_behind_a_norm_in_a_gemm_only_what_is_finite_is_told(backend):
    """Its inverse rms [T, 1] is no scale of rows, though it looks like one where a block is the whole row."""
    torch.manual_seed(0)
    norm = nn.RMSNorm(64, eps=1e-5, elementwise_affine=False)
    model = nn.Sequential(nn.Linear(16, 64, bias=False), norm, nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 1)).eval()
    plan = plan_for(model, {"0": POW2, "3": POW2})
    calibration = [inputs(40, seed) for seed in range(3)]
    server = freeze(model, plan, calibration=calibration, autocast=torch.bfloat16, buckets=(16,))
    assert "3: the alarm sees what is not finite alone" in str(server)
    for turn in range(20 * EVERY):
        server(inputs(16, turn % 3))
    assert server.alarms() == ()
    x = inputs(16)
    x[2] = torch.inf
    for _ in range(EVERY):
        server(x)
    assert [(alarm.site, alarm.kind) for alarm in server.alarms()] == [("0", "nonfinite")]


def test_alarms_wait_for_what_was_shown(backend, monkeypatch):
    class Later:
        done = False

        def query(self):
            return self.done

        def synchronize(self):
            self.done = True

    made = replays._Waiting.for_device
    monkeypatch.setattr(replays._Waiting, "for_device", lambda *of: replace(made(*of), event=Later()))
    server, x = frozen(wide()), inputs(9)
    x[3, 2] = torch.nan
    server(x)
    assert [(alarm.site, alarm.kind) for alarm in server.alarms()] == [("first", "nonfinite")]
