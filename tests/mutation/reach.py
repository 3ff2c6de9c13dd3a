"""Which tests reach which lines; and tests in forks of a process that has imported torch, not the package.

Every test is measured once, as a context of `coverage`, and what was found is kept for as long as no file of
the package or of the tests changes. A mutant then needs the tests that reach its statement, the fastest
first. An import of torch takes longer than most of them, so that each mutant gets a fork, which imports the
package from a folder that the mutant is in.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BROKEN = 70  # the status of a fork whose work raised, which says nothing about a mutant
MEMORY = 8 * 2**30  # a mutant may ask for any amount
IMPORT = "at import"  # comes by a line before any test runs
# Without the package, and without what starts threads when it is imported.
PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "safetensors.torch",
    "hypothesis",
    "triton",
    "pyarrow.parquet",
)


@dataclass(frozen=True)
class Reach:
    """What tests took, fixtures included, and by file and line who came by; without tests that failed."""

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    def of_statement(self, source: str, file: str, line: int) -> list[str] | None:
        """Tests that reach the statement, the fastest first. None: it runs when the file is imported."""
        tree = ast.parse(source)
        inner, in_function = statement(tree, line)
        if not in_function:
            return None
        known = self.lines.get(file, {})
        tests = {test for number in inner for test in known.get(number, ())}
        return self._by_speed(tests) if IMPORT not in tests else None

    def of_file(self, source: str, file: str, suites: Sequence[str]) -> list[str]:
        """Tests that reach a function of the file, and those of `suites` in files that import it."""
        tree, module = ast.parse(source), file.removeprefix("src/").removesuffix(".py").replace("/", ".")
        known = self.lines.get(file, {})
        reached = {test for line, by in known.items() if statement(tree, line)[1] for test in by}
        reached.discard(IMPORT)
        area = [test for test in self.seconds if test.startswith(tuple(suites))]
        texts = {name: (ROOT / name).read_text() for name in {test.split("::")[0] for test in area}}
        importing = {test for test in area if module in texts[test.split("::")[0]]}
        return self._by_speed(reached | importing)

    def without(self, tests: Iterable[str]) -> Reach:
        out = set(tests)
        seconds = {test: took for test, took in self.seconds.items() if test not in out}
        lines = {
            file: {line: [test for test in by if test not in out] for line, by in known.items()}
            for file, known in self.lines.items()
        }
        return Reach(seconds, lines)

    def _by_speed(self, tests: Iterable[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self.seconds[test], test))


def statement(tree: ast.Module, line: int) -> tuple[range | list[int], bool]:
    """The lines of the innermost statement around a line, without those inside it; is it in a function?"""
    around: list[ast.stmt] = []
    for node in ast.walk(tree):  # outer ones come first
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno):
            around.append(node)
    if not around:
        return [line], False
    inner = around[-1]
    inside = {
        number
        for node in ast.walk(inner)
        if isinstance(node, ast.stmt) and node is not inner
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    own = [n for n in range(inner.lineno, (inner.end_lineno or inner.lineno) + 1) if n not in inside]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return own, any(isinstance(node, functions) for node in around[:-1])


def preload() -> None:
    """Whatever is slow to import and is the same for all mutants. A fork can have no GPU."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "loka" not in sys.modules, "forks would find the package imported"


def fork(work: Callable[[], int], *, seconds: float) -> int:
    """The exit status of `work` in a process that ends after so many seconds, unless it sets another alarm.

    Its processes end with it. As subprocess tells it, a status below zero is the signal that ended it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = BROKEN
        try:
            os.setpgid(0, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends even what hangs in C++
            signal.setitimer(signal.ITIMER_REAL, seconds)
            status = int(work())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    with contextlib.suppress(OSError):  # the child does it too; whoever comes first
        os.setpgid(child, child)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return ended


def run_tests(arguments: Sequence[str], plugin: object, *, package: Path, temporary: Path) -> int:
    """pytest in this process, which is a fork, over the package in the folder `package`."""
    quiet = os.open(temporary / "printed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.chdir(ROOT)
    sys.path[:0] = [str(package), str(ROOT / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    plain = ["-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    return int(pytest.main([*plain, f"--basetemp={temporary / 'tests'}", *arguments], plugins=[plugin]))


# Measuring


class _Measured:
    """A pytest plugin: a context for each test, and for each fixture that tests share."""

    def __init__(self, files: Sequence[str]) -> None:
        import coverage

        self.coverage = coverage.Coverage(
            data_file=None, include=[str(ROOT / f) for f in files], config_file=False
        )
        self.files = files
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.contexts: dict[str, list[str]] = {}
        self.shared: dict[str, tuple[str, str, float]] = {}
        self.fixtures: dict[str, list[str]] = {}
        self.caches: dict[str, list[Any]] = {}
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._forget()
        began, self.within = time.monotonic(), 0.0
        self.now = f"test {len(self.contexts)}"
        self.contexts[self.now] = [item.nodeid]
        self.fixtures[item.nodeid] = list(getattr(item, "fixturenames", ()))
        self.coverage.switch_context(self.now)
        result = yield
        self.coverage.switch_context("")
        self.seconds[item.nodeid] = time.monotonic() - began - self.within
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        context, began = f"fixture {len(self.shared)}", time.monotonic()
        self.coverage.switch_context(context)
        result = yield
        self.coverage.switch_context(self.now)
        took = time.monotonic() - began
        self.within += took
        self.shared[context] = (fixturedef.baseid, fixturedef.argname, took)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def _forget(self) -> None:
        """What a function remembers, the next test would not reach."""
        for name, module in list(sys.modules.items()):
            if name.startswith("loka.") and name not in self.caches:
                self.caches[name] = [v for v in vars(module).values() if hasattr(v, "cache_clear")]
        for several in self.caches.values():
            for cached in several:
                cached.cache_clear()

    def reach(self) -> Reach:
        self.coverage.stop()
        for context, (base, name, took) in self.shared.items():
            users = [t for t, used in self.fixtures.items() if name in used and t.startswith(base)]
            self.contexts[context] = users
            for test in users:
                self.seconds[test] += took
        passed = {test: round(took, 3) for test, took in self.seconds.items() if test not in self.failed}
        by = {name: {test for test in tests if test in passed} for name, tests in self.contexts.items()}
        by[""] = {IMPORT}
        data = self.coverage.get_data()
        lines = {
            file: {
                line: sorted(set().union(*(by[context] for context in several)))
                for line, several in data.contexts_by_lineno(str(ROOT / file)).items()
            }
            for file in self.files
        }
        return Reach(passed, lines)


def measured(files: Sequence[str], suites: Sequence[str], *, kept: Path) -> Reach:
    """What tests in `suites` reach of `files`; from `kept`, or anew for files of tests that changed since.

    Where the package changed, or what tests share, all are measured anew, in minutes.
    """
    tests = [test for suite in suites for test in sorted((ROOT / suite).rglob("test_*.py")) or [ROOT / suite]]
    shared = sorted({*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")} - {*_all_tests()})
    common = _hash([path for path in shared if path.parent != Path(__file__).parent], *files)
    names = {test.relative_to(ROOT).as_posix(): _hash([test], common) for test in tests}
    out = kept / "reach.json"
    known = json.loads(out.read_text()) if out.exists() else {}
    known = {name: found for name, found in known.items() if found["of"] == names.get(name)}
    if missing := sorted(names.keys() - known.keys()):
        print(f"measures which lines the tests of {len(missing)} files reach", flush=True)
        kept.mkdir(parents=True, exist_ok=True)

        def work() -> int:
            plugin = _Measured(files)
            status = run_tests(missing, plugin, package=ROOT / "src", temporary=kept)
            known.update(_by_file(plugin.reach(), {name: names[name] for name in missing}))
            (part := out.with_suffix(".part")).write_text(json.dumps(known))
            part.rename(out)
            return status

        if status := fork(work, seconds=7200):
            print(f"status {status}: {kept / 'printed'} says which tests failed; no mutant gets those")
        known = json.loads(out.read_text())
    return _together(known)


def _all_tests() -> Iterable[Path]:
    return (ROOT / "tests").rglob("test_*.py")


def _hash(paths: Sequence[Path], *others: str) -> str:
    hashed = hashlib.sha256(repr(others).encode())
    for path in paths:
        hashed.update(path.read_bytes())
    return hashed.hexdigest()[:16]


def _by_file(reach: Reach, names: dict[str, str]) -> dict[str, Any]:
    """By file of tests; in each, lines that import runs."""
    parts: dict[str, Any] = {name: {"of": of, "seconds": {}, "lines": {}} for name, of in names.items()}
    for test, seconds in reach.seconds.items():
        parts[test.split("::")[0]]["seconds"][test] = seconds
    for file, known in reach.lines.items():
        for line, tests in known.items():
            for test in tests:
                for name in names if test == IMPORT else [test.split("::")[0]]:
                    parts[name]["lines"].setdefault(file, {}).setdefault(str(line), []).append(test)
    return parts


def _together(parts: dict[str, Any]) -> Reach:
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, list[str]]] = {}
    for part in parts.values():
        seconds |= part["seconds"]
        for file, known in part["lines"].items():
            for line, tests in known.items():
                lines.setdefault(file, {}).setdefault(int(line), []).extend(tests)
    return Reach(seconds, lines)


# Judging


class _Chosen:
    """A pytest plugin: certain tests in their order, each with an end; `told` gets what runs and fails."""

    def __init__(self, tests: dict[str, float], *, patience: float, told: Path) -> None:
        self.tests, self.patience, self.told = tests, patience, told
        self.order = {test: place for place, test in enumerate(tests)}
        self.end = time.monotonic() + 3 * patience + 3 * sum(tests.values())

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        # A failure is enough: none is made smaller, and none is kept for those who run the tests next.
        quick = settings(settings(), database=None, phases=[Phase.explicit, Phase.generate])
        settings.register_profile("mutants", quick)
        settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda i: self.order[i.nodeid])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._tell("runs", item.nodeid)
        seconds = min(self.patience + 10 * self.tests[item.nodeid], self.end - time.monotonic())
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell("failed", report.nodeid)

    def _tell(self, what: str, test: str) -> None:
        with self.told.open("a") as file:
            file.write(json.dumps([what, test]) + "\n")


def run_chosen(
    tests: Sequence[str],
    reach: Reach,
    *,
    package: Path,
    temporary: Path,
    patience: float,
    all_of: bool = False,
) -> tuple[int, list[tuple[str, str]]]:
    """The status of pytest over those tests, until one fails or `all_of` them; what ran and what failed."""
    (told := temporary / "told").write_text("")
    plugin = _Chosen({test: reach.seconds[test] for test in tests}, patience=patience, told=told)
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))

    def work() -> int:
        sys.dont_write_bytecode = True  # the next mutant of this file may have its size and its second
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        only = [] if all_of else ["-x"]
        return run_tests([*only, *files], plugin, package=package, temporary=temporary)

    status = fork(work, seconds=patience + 120)
    return status, [tuple(json.loads(line)) for line in told.read_text().splitlines()]
