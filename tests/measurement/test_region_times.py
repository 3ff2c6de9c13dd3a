import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from models import stats_of
from torch import nn

import loka
from loka.compiler.gemms import region_gemm
from loka.compiler.listing import regions
from loka.core.error import Estimate
from loka.core.records.report import CHAINED, HP, REGION, REGION_INT8, Measurement
from loka.core.signature import LinearShape
from loka.kernels.quantize.fp8_weights import fp8_weights
from loka.kernels.quantize.int8_weights import int8_weights
from loka.measurement import Settings
from loka.measurement.cache import TimesCache
from loka.measurement.times import layer_times as timing
from loka.measurement.times import region_times
from loka.measurement.times.region_times import LAYERS, region_key, time_region
from loka.nn.fp8_weight import dequantized

sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))
from joint import JointBackend
from timers import FakeTimer, install

CPU = torch.device("cpu")
EMULATED = ("emulated:rowwise_e4m3_pow2",) * 3
INTEGERS = ("emulated:int8_row", *EMULATED[1:])
QUICK = Settings(max_draws=4, quantize_once_rounds=9)
ROWWISE = "emulated:rowwise_e4m3"


def layer_of(sides, *, first=False, frozen=False):
    """Statistics of one layer at 32 rows; it is the first of its model, or its weight is frozen."""
    model = nn.Sequential(nn.Linear(*sides))
    model[0].weight.requires_grad_(not frozen)
    with loka.Probe(model, every=1, effect_samples=0) as probe, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(32, sides[0], requires_grad=not first)).float().square().mean().backward()
    return probe.stats().layers["0"]


def shape(sides, *, bias=True):
    return LinearShape(in_features=sides[0], out_features=sides[1], bias=bias)


def timed_cell(layer, sides=(32, 16), **options):
    return time_region(layer, shape(sides), device=CPU, settings=QUICK, **options)


def of_all(**runs):
    return {f"layers.{i}/{gemm}": count for i in range(LAYERS) for gemm, count in runs.items()}


class Spy(FakeTimer):
    def __init__(self, true):
        super().__init__(true)
        self.cells = {}

    def __call__(self, functions, **options):
        for name, step in functions.items():
            self.cells[name] = step.__closure__[_place(step, "model")].cell_contents
        return super().__call__(functions, **options)


def _place(step, name):
    return step.__code__.co_freevars.index(name)


@pytest.fixture
def spy(monkeypatch):
    timer = Spy({HP: 100.0, REGION: 50.0, REGION_INT8: 52.0})
    monkeypatch.setattr(region_times, "time_interleaved", timer)
    monkeypatch.setattr(region_times, "ARMS", {REGION: EMULATED, REGION_INT8: INTEGERS})
    return timer


@pytest.fixture
def backend(monkeypatch):
    """Compiles cells in the place of Inductor, which takes ten times as long."""
    torch._dynamo.reset()
    backend, compiled = JointBackend(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: compiled(call, backend=backend, **options))
    return backend


def test_both_arms_run_compiled_forward_and_backward(spy):
    """In bfloat16 under autocast, the weight in float32; the FP8 arm in one region."""
    layer, before = layer_of((32, 48)), torch.get_rng_state()
    found = timed_cell(layer, (32, 48))
    assert set(found) == {HP, REGION, REGION_INT8}
    assert found[REGION_INT8].speedup.value == pytest.approx(100 / 52, rel=0.01)
    assert found[REGION].speedup.value == pytest.approx(2.0, rel=0.01)
    assert found[REGION].microseconds.value == pytest.approx(50 / LAYERS, rel=0.01)
    assert found[HP].microseconds.value == pytest.approx(100 / LAYERS, rel=0.01)
    assert found[REGION].rounds
    assert spy.options == [{"keep": [HP, REGION, REGION_INT8], "max_rounds": 9, "deadline": None}]
    assert regions(spy.cells[REGION]).applied == tuple((f"layers.{i}",) for i in range(LAYERS))
    runs = {site: counts["runs"] for site, counts in loka.health_of(spy.cells[REGION]).items()}
    assert runs == of_all(output=3, grad_input=3, grad_weight=3)
    assert not regions(spy.cells[HP]).planned
    for cell in spy.cells.values():
        assert {p.grad.dtype for p in cell.parameters()} == {torch.float32}
        assert all(p.grad.isfinite().all() and p.grad.any() for p in cell.parameters())
    assert torch.equal(torch.get_rng_state(), before), "a training that measures in between goes on alike"


@pytest.mark.slow
def test_a_chain_goes_there_and_back(spy, backend):
    """32 to 48 features, to 32, twice: one region of four layers, of whose time each has a fourth."""
    found = timed_cell(layer_of((32, 48)), (32, 48), chained=True)
    assert found[REGION].microseconds.value == pytest.approx(50 / CHAINED, rel=0.01)
    assert found[HP].microseconds.value == pytest.approx(100 / CHAINED, rel=0.01)
    cell = spy.cells[REGION]
    assert [(one.in_features, one.out_features) for one in cell.layers] == [(32, 48), (48, 32)] * 2
    assert regions(cell).applied == (tuple(f"layers.{i}" for i in range(CHAINED)),)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in cell.parameters())


def test_a_layer_without_a_gradient_for_its_input_is_in_no_chain(timed):
    """As each of a chain's layers has one. A frozen one is, and what is served."""
    first = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    stats = stats_of(first, torch.randn(24, 32), effect_samples=0)
    assert set(measured(stats).times_in_chains) == {"2"}
    assert set(measured(stats.for_inference()).times_in_chains) == {"0", "2"}
    assert measured(stats).complete


@pytest.mark.slow  # a cell that is trained is compiled and timed in every run of the tests
def test_a_frozen_layer_has_no_grad_weight(spy):
    layer = layer_of((32, 16), frozen=True)
    found = time_region(layer, shape((32, 16), bias=False), device=CPU, settings=QUICK)
    assert found[REGION].speedup
    assert all(p.grad is None for cell in spy.cells.values() for p in cell.parameters())
    runs = {site: counts["runs"] for site, counts in loka.health_of(spy.cells[REGION]).items()}
    assert runs == of_all(output=3, grad_input=3, grad_weight=0)


@pytest.mark.slow
def test_a_served_layer_keeps_its_weight_in_fp8(spy, backend):
    """Its time holds no quantization of the weight, and plans of kept weights have times of their own."""
    served = dataclasses.replace(
        layer_of((32, 16), first=True, frozen=True), weight_dtype="bfloat16", dtype="bfloat16", kept_weight=True
    )
    found = timed_cell(served)
    assert found[REGION].speedup
    assert backend.count(region_gemm) == 2 * LAYERS
    assert not backend.count(fp8_weights)
    assert not backend.count(int8_weights)
    assert not backend.count(dequantized)
    as_it_is = dataclasses.replace(served, kept_weight=False)
    timed_cell(as_it_is)
    assert backend.count(fp8_weights) == backend.count(int8_weights) == 1


@pytest.fixture
def uncompiled(spy, monkeypatch):
    """Cells run as written, and count as joined: for what does not depend on a compiler."""
    monkeypatch.setattr(region_times, "compile_in_place", lambda cell: cell)
    listed = regions(nn.Identity())
    monkeypatch.setattr(region_times, "regions", lambda cell: listed)
    return spy


@pytest.mark.parametrize("sides", [(13, 32), (32, 13)])
def test_sides_that_do_not_fit_are_told_and_nothing_is_compiled(sides, spy, monkeypatch):
    monkeypatch.setattr(region_times, "compile_in_place", None)
    found = timed_cell(layer_of(sides), sides)
    assert list(found) == [REGION]
    side = "in_features" if sides[0] == 13 else "out_features"
    assert found[REGION].unsupported == f"{side} = 13 is no multiple of 16"
    assert not spy.races


@pytest.mark.slow
def test_a_layer_over_few_tokens_is_told_and_nothing_is_compiled(spy, backend, monkeypatch):
    """A cell of rows that lie one after another was half as slow as what served Wukong did with it."""
    layer = dataclasses.replace(layer_of((64, 32)), over_tokens=True)
    with monkeypatch.context() as context:
        context.setattr(region_times, "compile_in_place", None)
        found = timed_cell(layer, (64, 32))
    assert list(found) == [REGION]
    assert "few tokens" in found[REGION].unsupported
    assert not spy.races
    assert region_key(layer, shape((64, 32))) != region_key(layer_of((64, 32)), shape((64, 32)))
    many = dataclasses.replace(layer_of((272, 16)), over_tokens=True)
    assert REGION in timed_cell(many, (272, 16))
    assert spy.races


def test_a_first_layer_gives_its_input_no_gradient(uncompiled):
    timed_cell(layer_of((32, 16), first=True))
    runs = {site: counts["runs"] for site, counts in loka.health_of(uncompiled.cells[REGION]).items()}
    assert runs == of_all(output=3, grad_input=0, grad_weight=3)


def test_a_cell_that_is_not_joined_is_no_region(spy, monkeypatch):
    """Such as where torch.compile is switched off by the environment."""
    monkeypatch.setattr(region_times, "compile_in_place", lambda cell: cell)
    found = timed_cell(layer_of((32, 16)))
    assert list(found) == [REGION, REGION_INT8]
    assert found[REGION].unsupported.startswith("it was not joined: it ran, but not compiled")
    assert not spy.races


@pytest.mark.parametrize("failing", [HP, REGION])
def test_an_arm_that_fails_is_a_reason(failing, uncompiled, monkeypatch):
    def compiled(cell):
        if bool(regions(cell).planned) == (failing == REGION):
            cell.forward = lambda z: 1 / 0
        return cell

    monkeypatch.setattr(region_times, "compile_in_place", compiled)
    found = timed_cell(layer_of((32, 16)))
    why = Measurement(unsupported="cannot be timed: ZeroDivisionError: division by zero")
    assert found == dict.fromkeys([HP] if failing == HP else [REGION, REGION_INT8], why)
    assert not uncompiled.races


def test_integers_that_fail_leave_fp8_its_time(uncompiled, monkeypatch):
    monkeypatch.setattr(region_times, "_no_kernel", lambda arm, *rest: "no kernel" if "int8" in arm else None)
    found = timed_cell(layer_of((32, 16)))
    assert found[REGION].speedup
    assert found[REGION_INT8] == Measurement(unsupported="no kernel")


@pytest.mark.parametrize("failing", [HP, REGION])
def test_an_arm_that_cannot_be_captured_is_a_reason(failing, uncompiled, monkeypatch):
    def uncaptured(functions, **options):
        def fail():
            raise RuntimeError("not permitted when stream is capturing")

        return uncompiled({**functions, failing: fail}, **options)

    monkeypatch.setattr(Spy, "__call__", FakeTimer.__call__)
    monkeypatch.setattr(region_times, "time_interleaved", uncaptured)
    found = timed_cell(layer_of((32, 16)))
    assert found[REGION].unsupported.startswith("cannot be timed: RuntimeError: not permitted")
    assert found[REGION].microseconds is None


def test_too_little_memory_while_capturing_says_nothing_of_the_layer(uncompiled, monkeypatch):
    def full(functions, **options):
        def fail():
            raise torch.OutOfMemoryError("tried to allocate")

        return uncompiled({**functions, REGION: fail}, **options)

    monkeypatch.setattr(Spy, "__call__", FakeTimer.__call__)
    monkeypatch.setattr(region_times, "time_interleaved", full)
    with pytest.raises(torch.OutOfMemoryError):
        timed_cell(layer_of((32, 16)))


def test_what_a_deadline_cuts_short_is_not_known(uncompiled, monkeypatch):
    layer = layer_of((32, 16))
    ended = {"deadline": False, "rounds": True, "decided": True}
    for end, known in ended.items():

        def timer(*args, end=end, **options):
            return dataclasses.replace(uncompiled(*args, **options), ended=end)

        monkeypatch.setattr(region_times, "time_interleaved", timer)
        found = timed_cell(layer, deadline=0.0)
        assert (found is not None) == known


def test_layers_that_take_equally_long_share_a_key():
    one, first, frozen = (layer_of((32, 16), first=f, frozen=z) for f, z in ((0, 0), (1, 0), (0, 1)))
    key = region_key(one, shape((32, 16)))
    assert key != region_key(one, shape((32, 16)), chained=True)
    assert key == region_key(layer_of((32, 16)), shape((32, 16)))
    others = [
        region_key(first, shape((32, 16))),
        region_key(frozen, shape((32, 16))),
        region_key(one, shape((32, 16), bias=False)),
        region_key(one, shape((16, 32))),
    ]
    assert key not in others


@pytest.fixture
def twins():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    model.append(nn.Linear(16, 13))
    return stats_of(model, torch.randn(24, 32, requires_grad=True), effect_samples=0)


class Regions:
    """Stands in for `time_region`: half of hp's time, or what `found` says."""

    def __init__(self):
        self.shapes = []
        self.found = {
            HP: Measurement(microseconds=Estimate(100.0, 99.0, 101.0), speedup=Estimate(1.0, 1.0, 1.0)),
            REGION: Measurement(microseconds=Estimate(50.0, 49.0, 51.0), speedup=Estimate(2.0, 1.9, 2.1)),
        }
        self.deadlines = []

    def __call__(self, layer, shape, *, device, settings, deadline=None, arms=(), chained=False):
        self.shapes.append((shape.in_features, shape.out_features, *(["chained"] if chained else [])))
        self.deadlines.append(deadline)
        return self.found


@pytest.fixture
def timed(monkeypatch):
    install(monkeypatch, FakeTimer())
    stub = Regions()
    monkeypatch.setattr(timing, "time_region", stub)
    return stub


def measured(stats, **options):
    return loka.measure(stats, device="cpu", settings=QUICK, candidates=[ROWWISE], **options)


def test_measuring_times_each_shape_once_and_keeps_it(twins, timed, tmp_path):
    report = measured(twins, cache=tmp_path)
    assert report.complete
    assert set(report.region_times) == {"0", "2", "4", "5"}
    alone = [(32, 32), (32, 16), (16, 13)]
    assert timed.shapes == [place for sides in alone for place in (sides, (*sides, "chained"))]
    assert report.region_times["0"] == report.region_times["2"] == timed.found
    assert report.times_in_chains == report.region_times, "each feeds another, or is fed"
    assert report.reads == {"2": ("0",), "4": ("2",), "5": ("4",)}
    assert timed.deadlines == [None] * 6
    again = measured(twins, cache=tmp_path)
    assert (again.region_times, again.times_in_chains) == (report.region_times, report.times_in_chains)
    assert len(timed.shapes) == 6, "they are on disk"
    assert "in a compiled region 0 takes 50.0 us with the code around it, 100.0 us in hp (2.00x)" in str(report)


def test_without_times_there_are_none_of_regions(twins, timed, tmp_path):
    first = measured(twins, errors_only=True, out=tmp_path / "report.json")
    assert first.complete
    assert (first.region_times, timed.shapes) == ({}, [])
    whole = measured(twins, out=tmp_path / "report.json")
    assert whole.complete
    assert set(whole.region_times) == set(whole.times_in_chains) == {"0", "2", "4", "5"}


def test_what_is_cut_short_or_too_big_is_noted_and_tried_again(twins, timed, tmp_path, monkeypatch):
    out, cache, found = tmp_path / "report.json", tmp_path / "cache", timed.found
    timed.found = None
    part = measured(twins, out=out, cache=cache, time_limit=1e6)
    assert not part.complete
    assert part.region_times == {}
    assert part.notes == ("not timed in a region: 0, 2, 4, 5",)
    assert None not in timed.deadlines

    def full(*args, **options):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(timing, "time_region", full)
    part = measured(twins, out=out, cache=cache)
    assert part.notes[0] == "not timed in a region: 0, 2, 4, 5"
    assert "a layer of 32 x 32 in a region: not timed: the GPU has too little memory" in part.notes
    timed.found = found
    monkeypatch.setattr(timing, "time_region", timed)
    whole = measured(twins, out=out, cache=cache)
    assert whole.complete
    assert whole.notes == ()
    assert loka.Report.load(out) == whole


def test_when_the_time_is_up_only_the_cache_is_asked(twins, timed, monkeypatch):
    layer, sides = twins.layers["0"], twins.model.layers["0"]
    cache = TimesCache(None)
    early, late = (
        timing.Timer(
            machine=measured(twins).machine,
            device=CPU,
            settings=QUICK,
            candidates=(ROWWISE,),
            cache=cache,
            deadline=deadline,
        )
        for deadline in (None, 0.0)
    )
    timed.shapes.clear()
    assert timing.time_in_region(layer, sides, late) is None
    assert timed.shapes == []
    found = timing.time_in_region(layer, sides, early)
    assert timing.time_in_region(layer, sides, late) == found == timed.found
    assert timed.shapes == [(32, 32)]
