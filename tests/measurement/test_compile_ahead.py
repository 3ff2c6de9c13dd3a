import dataclasses

import pytest
from planted import registered
from timers import FakeTimer, install, kernel

import loka
from loka.core.exceptions import UnknownName
from loka.core.problem import linear_problem
from loka.core.progress import untracked
from loka.core.recipe import Gemm
from loka.core.records.report import HP
from loka.measurement import Settings
from loka.measurement.times.compile_ahead import compile_ahead

PROBLEMS = tuple(
    linear_problem(Gemm.OUTPUT, rows=rows, in_features=32, out_features=48, dtype="bfloat16", target="sm_90")
    for rows in (16, 32, 64)
)


class Compiler:
    """A `precompile` that keeps what it was given, and says `ticks` times that a problem is done."""

    def __init__(self, ticks=None):
        self.calls = []
        self.ticks = ticks

    def __call__(self, problems, on_done):
        self.calls.append(tuple(problems))
        for _ in range(len(problems) if self.ticks is None else self.ticks):
            on_done()


class Bars:
    def __init__(self):
        self.asked = []
        self.steps = []
        self.ended = []

    def __call__(self, items, description, total):
        place = len(self.asked)
        self.asked.append((description, total))
        self.steps.append(0)
        self.ended.append(False)
        for item in items:
            self.steps[place] += 1
            yield item
        self.ended[place] = True


def compiling(name, compiler, missing=None, *recipes):
    return dataclasses.replace(
        kernel(name), precompile=compiler, missing=lambda: missing, recipes=recipes or ("rowwise_e4m3",)
    )


def test_each_kernel_compiles_all_problems_once():
    first, second, absent, unasked = Compiler(), Compiler(), Compiler(), Compiler()
    kernels = (
        compiling("first", first, None, "rowwise_e4m3", "tensorwise_e4m3"),
        compiling("second", second),
        compiling("absent", absent, "not installed"),
        compiling("unasked", unasked),
        kernel("plain"),
    )
    bars = Bars()
    names = [HP, "first:rowwise_e4m3", "first:tensorwise_e4m3", "second:rowwise_e4m3"]
    names += ["absent:rowwise_e4m3", "plain:rowwise_e4m3"]
    with registered(*kernels):
        compile_ahead(PROBLEMS, names, bars)
    assert first.calls == [PROBLEMS]
    assert second.calls == [PROBLEMS]
    assert absent.calls == unasked.calls == []
    assert bars.asked == [("compiling first", 3), ("compiling second", 3)]
    assert bars.steps == [3, 3]
    assert bars.ended == [True, True], "a bar that does not end stays on the terminal"


@pytest.mark.parametrize("ticks", [0, 2, 5])
def test_a_kernel_that_miscounts(ticks):
    """Ticks beyond the problems are no error; with fewer the bar goes no further than one more."""
    bars, compiler = Bars(), Compiler(ticks)
    with registered(compiling("first", compiler)):
        compile_ahead(PROBLEMS, ["first:rowwise_e4m3"], bars)
        compile_ahead(PROBLEMS, ["first:rowwise_e4m3"], untracked)
    assert compiler.calls == [PROBLEMS, PROBLEMS]
    assert bars.steps == [min(ticks + 1, 3)]


def test_nothing_to_compile():
    bars, compiler = Bars(), Compiler()
    with registered(compiling("first", compiler)):
        compile_ahead((), ["first:rowwise_e4m3"], bars)
        compile_ahead(PROBLEMS, [], bars)
        compile_ahead(PROBLEMS, [HP], bars)
    assert compiler.calls == []
    assert bars.asked == []
    with pytest.raises(UnknownName, match="no candidate is called 'magic'"):
        compile_ahead(PROBLEMS, ["magic"], bars)


def test_a_compiler_that_fails_is_heard():
    def broken(problems, on_done):
        raise RuntimeError("nvcc is not here")

    broken_kernel = dataclasses.replace(kernel("broken"), precompile=broken)
    with registered(broken_kernel), pytest.raises(RuntimeError, match="nvcc"):
        compile_ahead(PROBLEMS, ["broken:rowwise_e4m3"], untracked)


def test_measuring_on_a_cpu_compiles_nothing(stats):
    compiler = Compiler()
    with registered(compiling("first", compiler)):
        report = loka.measure(stats, device="cpu", candidates=["first:rowwise_e4m3"], settings=Settings())
    assert report.complete
    assert compiler.calls == []


@pytest.mark.slow
def test_measuring_where_times_are_taken_compiles_what_is_left(stats, monkeypatch, tmp_path):
    install(monkeypatch, FakeTimer())
    compiler, out = Compiler(), tmp_path / "report.json"
    settings = Settings(rows=8)
    with registered(compiling("first", compiler)):
        for _ in range(2):
            report = loka.measure(stats, device="cpu", candidates=["first:rowwise_e4m3"], settings=settings, out=out)
    assert report.complete
    [problems] = compiler.calls
    assert len(set(problems)) == len(problems) == 2 * len(report.sites)
    assert {site.problem for site in report.sites.values()} < set(problems)
    rows = {p.k if p.gemm is Gemm.GRAD_WEIGHT else p.m for p in problems}
    assert rows == {8, 40}
