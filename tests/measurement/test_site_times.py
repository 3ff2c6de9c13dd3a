import math
import time

import pytest
import torch
from planted import registered
from timers import FakeTimer, install, kernel

from loka.core.error import Estimate
from loka.core.numerics.reference import scaled_mm
from loka.core.problem import linear_problem
from loka.core.recipe import RECIPES, Gemm
from loka.kernels.gemm.registry import candidate_named
from loka.measurement.cache import TimesCache
from loka.measurement.settings import Settings
from loka.measurement.times.quantize_once_savings import SHARED_OPERANDS, shared_casts, time_quantize_once
from loka.measurement.times.site_times import rivals_of, time_site

CPU = torch.device("cpu")
ROWWISE, TENSORWISE = "emulated:rowwise_e4m3", "emulated:tensorwise_e4m3"


def problem(gemm):
    dtype = "float32" if gemm is Gemm.GRAD_WEIGHT else "bfloat16"
    return linear_problem(gemm, rows=40, in_features=24, out_features=56, dtype=dtype, target="cpu")


def operands(copies=2):
    torch.manual_seed(0)
    x, w, dy = torch.randn(40, 24).bfloat16(), torch.randn(56, 24), torch.randn(40, 56).bfloat16()
    return [{"input": x, "weight": w, "grad_output": dy} for _ in range(copies)]


def run_site(names, gemm=Gemm.OUTPUT, **options):
    options = {"settings": Settings(), **options}
    return time_site(operands(), problem(gemm), ["hp", *names], device=CPU, **options)


@pytest.mark.parametrize("gemm", list(Gemm))
def test_the_whole_site_is_timed(gemm, monkeypatch):
    timer = install(monkeypatch, FakeTimer({"hp": 100.0, ROWWISE: 50.0}))
    found = run_site([ROWWISE, TENSORWISE], gemm)
    assert timer.races == [["hp", ROWWISE, TENSORWISE]]
    assert found.timings[ROWWISE].speedup.value == pytest.approx(2.0, rel=0.01)
    assert found.timings[ROWWISE].microseconds.value == pytest.approx(50, rel=0.01)
    assert (found.failures, found.pinned, found.cut_short) == ({}, {}, False)


def test_algorithms_are_searched_and_the_winner_is_pinned(monkeypatch):
    ran = []

    def run(a, b, dtype, *, algorithm=0):
        ran.append(algorithm)
        if algorithm == 3:
            raise RuntimeError("not enough workspace\nin line 5")
        out = scaled_mm(a, b, dtype=dtype)
        return out.flip(0) if algorithm == 4 else out  # the fastest, and wrong

    timer = FakeTimer({f"many:rowwise_e4m3@{i}": us for i, us in enumerate([60, 55, 40, 1, 1])})
    install(monkeypatch, timer)
    with registered(kernel("many", run, algorithms=5)):
        found = run_site([ROWWISE, "many:rowwise_e4m3"], rivals={})
        again = run_site(["many:rowwise_e4m3@1"])
    pinned = "many:rowwise_e4m3@2"
    assert timer.races[0] == [f"many:rowwise_e4m3@{i}" for i in range(3)]
    assert timer.races[1] == ["hp", ROWWISE, pinned]
    assert found.pinned == {"many:rowwise_e4m3": pinned}
    assert set(found.timings) == {"hp", ROWWISE, pinned}
    assert {3, 4} <= set(ran)
    assert ran[-1] == 1
    assert timer.races[2] == ["hp", "many:rowwise_e4m3@1"], "a pinned candidate is not searched"
    assert set(again.timings) == {"hp", "many:rowwise_e4m3@1"}


def test_a_kernel_none_of_whose_algorithms_works_says_why(monkeypatch):
    def raises(a, b, dtype, *, algorithm=0):
        raise RuntimeError("no algorithm")

    def negated(a, b, dtype, *, algorithm=0):
        return -scaled_mm(a, b, dtype=dtype)

    install(monkeypatch, FakeTimer())
    with registered(kernel("raises", raises, 2), kernel("wrong", negated, 2)):
        found = run_site([ROWWISE, "raises:rowwise_e4m3", "wrong:rowwise_e4m3"])
    assert set(found.timings) == {"hp", ROWWISE}
    assert "no algorithm" in found.failures["raises:rowwise_e4m3"]
    assert "@1: -6.0 dB from the product" in found.failures["wrong:rowwise_e4m3"]


def test_what_cannot_be_captured_is_a_failure_under_the_name_asked_for(monkeypatch):
    calls = []

    def third(a, b, dtype, *, algorithm=0):
        calls.append(algorithm)
        if len(calls) > 4:  # checked twice, searched twice, then the site
            raise RuntimeError("capture")
        return scaled_mm(a, b, dtype=dtype)

    install(monkeypatch, FakeTimer())
    with registered(kernel("late", third, 2)):
        found = run_site(["late:rowwise_e4m3", ROWWISE])
    assert found.failures == {"late:rowwise_e4m3": "RuntimeError: capture"}
    assert found.pinned == {}
    assert set(found.timings) == {"hp", ROWWISE}


def test_an_algorithm_that_cannot_be_the_baseline_of_the_search(monkeypatch):
    timer = install(monkeypatch, FakeTimer({"many:rowwise_e4m3@1": 50.0}))

    def first_fails(names):
        if names[0].endswith("@0"):
            raise RuntimeError("cannot be captured")

    timer.before = first_fails
    with registered(kernel("many", algorithms=3)):
        assert run_site(["many:rowwise_e4m3"]).pinned == {"many:rowwise_e4m3": "many:rowwise_e4m3@1"}


def test_the_deadline_reaches_every_race(monkeypatch):
    timer = install(monkeypatch, FakeTimer())
    past = time.monotonic() - 1
    with registered(kernel("many", algorithms=2)):
        found = run_site([ROWWISE, "many:rowwise_e4m3"], deadline=past)
    assert [options["deadline"] for options in timer.options] == [past, past]
    assert len(found.timings) == 3
    assert not found.cut_short, "everything was decided in the first batch"
    unreachable = Settings(tie=1e-9)
    assert run_site([ROWWISE], deadline=past, settings=unreachable).cut_short
    assert not run_site([ROWWISE], settings=unreachable).cut_short


def test_rivals_are_those_at_least_as_exact():
    def errors(value):
        return {"sqnr_db": Estimate(value, value - 0.2, value + 0.2)}

    rivals = rivals_of(
        {"hp": errors(math.inf), "row": errors(28.5), "row too": errors(28.3), "e5m2": errors(24.5),
         "nan": errors(math.nan)}
    )  # fmt: skip
    assert rivals["e5m2"] == ["hp", "row", "row too", "e5m2"]
    assert rivals["row"] == ["hp", "row", "row too"]
    assert rivals["row too"] == ["hp", "row", "row too"]
    assert rivals["hp"] == ["hp"]
    assert "nan" not in rivals["row"]


def test_rivals_hold_for_pinned_names(monkeypatch):
    """The coarse candidate is the fastest; it must not drive out the pinned exact one."""
    timer = install(monkeypatch, FakeTimer({"hp": 100, ROWWISE: 10, TENSORWISE: 80}))
    timer.true.update({"many:rowwise_e4m3@0": 60, "many:rowwise_e4m3@1": 50})
    exact = ["hp", "many:rowwise_e4m3"]
    with registered(kernel("many", algorithms=2)):
        found = run_site(
            [ROWWISE, TENSORWISE, "many:rowwise_e4m3"],
            rivals={"hp": ["hp"], "many:rowwise_e4m3": exact, TENSORWISE: exact, ROWWISE: [*exact, ROWWISE]},
        )
    assert timer.options[-1]["rivals"]["many:rowwise_e4m3@1"] == ["hp", "many:rowwise_e4m3@1"]
    assert found.timings["many:rowwise_e4m3@1"].rounds >= found.timings[TENSORWISE].rounds


def names_everywhere(*names):
    return {gemm: ["hp", *(n for n in names if candidate_named(n).recipe.casts(gemm))] for gemm in Gemm}


def test_each_pair_of_casts_is_shared_once(monkeypatch):
    """Row alone and column alone against both: the pair's own time comes off once."""
    true = {"e4m3_row+": 10.0, "+e4m3_row": 14.0, "e4m3_row+e4m3_row": 15.0}
    true |= {"e4m3_tensor+": 12.0, "+e4m3_tensor": 12.0, "e4m3_tensor+e4m3_tensor": 13.0}
    timer = install(monkeypatch, FakeTimer(true))
    problems = {gemm: problem(gemm) for gemm in Gemm}
    found = time_quantize_once(
        operands(),
        problems,
        names_everywhere(ROWWISE, TENSORWISE, "torch:rowwise_e4m3"),
        device=CPU,
        settings=Settings(),
    )
    assert set(found.saved) == set(SHARED_OPERANDS) == {"input", "weight", "grad_output"}
    pairs = {f"{row}+{column}" for row in ("e4m3_row", "e4m3_tensor") for column in ("e4m3_row", "e4m3_tensor")}
    for tensor in SHARED_OPERANDS:
        assert set(found.saved[tensor]) == pairs
        assert found.saved[tensor]["e4m3_row+e4m3_row"].value == pytest.approx(9.0, rel=0.01)
        assert found.saved[tensor]["e4m3_tensor+e4m3_tensor"].value == pytest.approx(11.0, rel=0.01)
        assert found.saved[tensor]["e4m3_row+e4m3_tensor"].value == pytest.approx(-78.0, rel=0.01)
    assert len(timer.races) == 3
    assert all(len(names) == 4 + 2 + 2 for names in timer.races), "single casts are timed once"


def test_gradients_in_e5m2_and_gemms_that_never_run(monkeypatch):
    install(monkeypatch, FakeTimer())
    problems = {gemm: problem(gemm) for gemm in Gemm}
    found = time_quantize_once(
        operands(), problems, names_everywhere("emulated:tensorwise_e5m2"), device=CPU, settings=Settings()
    )
    assert set(found.saved) == {"grad_output"}, "its output GEMM is that of tensorwise_e4m3"
    assert set(found.saved["grad_output"]) == {"e5m2_tensor+e5m2_tensor"}
    first_layer = {gemm: ["hp", ROWWISE] for gemm in (Gemm.OUTPUT, Gemm.GRAD_WEIGHT)}
    assert set(shared_casts(problems, first_layer)) == {"input"}
    assert shared_casts(problems, {gemm: ["hp"] for gemm in Gemm}) == {}


def test_the_copies_have_the_sides_that_the_gemms_want():
    """`block` pads as its kernel asks; of several the largest."""
    wide = kernel("wide")
    object.__setattr__(wide, "multiples", lambda p, recipe: (64, 32, 128))
    problems = {gemm: problem(gemm) for gemm in Gemm}
    cast = RECIPES["rowwise_e4m3"].casts(Gemm.OUTPUT)[0]
    with registered(wide):
        found = shared_casts(problems, names_everywhere(ROWWISE, "wide:rowwise_e4m3"))
        assert shared_casts(problems, names_everywhere("wide:rowwise_e4m3", ROWWISE)) == found
    assert found["input"] == ({cast: (64, 128)}, {cast: (32, 128)})  # x [40, 24], x^T [24, 40]
    assert found["weight"] == ({cast: (64, 128)}, {cast: (32, 128)})  # W [56, 24], W^T [24, 56]
    assert found["grad_output"] == ({cast: (64, 128)}, {cast: (64, 128)})  # dY [40, 56], dY^T [56, 40]
    assert shared_casts(problems, names_everywhere(ROWWISE))["input"] == ({cast: (40, 24)}, {cast: (24, 40)})


KEY = {"problem": {"m": 1}, "candidates": ["hp"]}


NUMBERS = tuple[int, ...]


def test_the_cache_keeps_and_finds(tmp_path):
    cache = TimesCache(tmp_path / "new" / "folder")
    assert cache.get(KEY, NUMBERS) is None
    cache.put(KEY, (1, 2))
    assert cache.get(KEY, NUMBERS) == (1, 2)
    later = TimesCache(tmp_path / "new" / "folder")
    assert later.get(KEY, NUMBERS) == (1, 2)
    assert later.get({**KEY, "candidates": ["hp", "x"]}, NUMBERS) is None
    assert TimesCache(None).get(KEY, NUMBERS) is None
    assert later.notes == []


@pytest.mark.parametrize("damage", ["truncated", "edited", "of another key", "not a file"])
def test_a_damaged_entry_is_said_and_measured_again(damage, tmp_path):
    TimesCache(tmp_path).put(KEY, (1, 2))
    (file,) = tmp_path.iterdir()
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "edited":
        file.write_text(file.read_text().replace("hp", "hq"))
    elif damage == "of another key":
        TimesCache(tmp_path).put({"other": 1}, (3,))
        (other,) = (path for path in tmp_path.iterdir() if path != file)
        other.replace(file)
    else:
        file.unlink()
        file.mkdir()
    cache = TimesCache(tmp_path)
    assert cache.get(KEY, NUMBERS) is None
    assert "timed again" in cache.notes[0]
    assert str(file) in cache.notes[0]
    if damage != "not a file":
        cache.put(KEY, (5,))
        assert TimesCache(tmp_path).get(KEY, NUMBERS) == (5,)


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    cache = TimesCache(tmp_path / "file" / "folder")
    cache.put(KEY, (1,))
    cache.put({"other": 1}, (2,))
    assert cache.get(KEY, NUMBERS) == (1,), "within one measurement it is remembered all the same"
    assert len(cache.notes) == 1
    assert "not cached" in cache.notes[0]
