"""Mutants: does a test fail when a line of the code is wrong?

    make mutants                                    300 mutants, one after the other; goes on where it stopped
    make mutants SHARD=2/8                          every eighth of them, for eight machines
    python tests/mutation/mutants.py --score OUT    the share that was killed, and who survived

A mutant is the package with one small change: a comparison that lets equality in or out, plus for minus, a
constant one off, `and` for `or`, min for max, a call that is left out. The seed says which 300 of all there
are, the same everywhere. A test that fails, or that does not end, kills a mutant. Survivors show what no
test asks.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import itertools
import json
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from reach import BROKEN, ROOT, Reach, measured, preload, run_chosen

COUNT, SEED, PATIENCE = 300, 0, 20.0
# What is changed, and the tests that ought to notice.
AREAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "twins": (
        (
            "src/loka/core/numerics/reference.py",
            "src/loka/kernels/edge/twin.py",
            "src/loka/kernels/quantize/weight_copies.py",
        ),
        ("tests/kernels", "tests/core/numerics"),
    ),
    "checkpoints": (
        ("src/loka/train/checkpointing",),
        ("tests/train/checkpointing",),
    ),
    "core": (("src/loka/core",), ("tests/core",)),
    "planner": (("src/loka/planner",), ("tests/planner",)),
    "readers": (("src/loka/data",), ("tests/data",)),
}
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
_NAMED = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Mutant:
    """The `number`-th change that can be made in a file."""

    area: str
    file: str
    number: int
    line: int
    change: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}#{self.number}"


def changes(tree: ast.Module) -> Iterator[tuple[int, str, Any]]:
    """Line, what changes, and a function that changes the tree in place; in a fixed order."""
    annotations = {id(inner) for node in ast.walk(tree) for inner in _not_run(node)}
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Compare) and (other := _COMPARED.get(type(node.ops[0]))):
            yield node.lineno, _told(type(node.ops[0]), other), _set(node.ops, 0, other())
        elif isinstance(node, ast.BinOp | ast.AugAssign) and (swapped := _COMPUTED.get(type(node.op))):
            yield node.lineno, _told(type(node.op), swapped), _attribute(node, "op", swapped())
        elif isinstance(node, ast.BoolOp):
            turned = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield node.lineno, _told(type(node.op), turned), _attribute(node, "op", turned())
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node.lineno, "not left out", _attribute(node, "op", ast.UAdd())
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield node.lineno, f"{node.value} -> {value}", _attribute(node, "value", value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in _NAMED:
            yield node.lineno, f"{node.id} -> {_NAMED[node.id]}", _attribute(node, "id", _NAMED[node.id])
        elif isinstance(node, ast.Attribute) and node.attr in _NAMED:
            yield (
                node.lineno,
                f"{node.attr} -> {_NAMED[node.attr]}",
                _attribute(node, "attr", _NAMED[node.attr]),
            )
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node.lineno, "call left out", _attribute(node, "value", ast.Constant(value=None))


def _not_run(node: ast.AST) -> Iterator[ast.AST]:
    """Annotations, which are texts, and what only type checkers read."""
    parts: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef):
        parts = [node.returns]
    elif isinstance(node, ast.arg | ast.AnnAssign):
        parts = [node.annotation]
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        parts = [node]
    for part in parts:
        if part is not None:
            yield from ast.walk(part)


def _told(before: type, after: type) -> str:
    return f"{before.__name__} -> {after.__name__}"


def _set(items: list[Any], place: int, value: Any) -> Any:
    return lambda: items.__setitem__(place, value)


def _attribute(node: ast.AST, name: str, value: Any) -> Any:
    return lambda: setattr(node, name, value)


def mutated(source: str, number: int) -> str:
    tree = ast.parse(source)
    list(changes(tree))[number][2]()
    return ast.unparse(ast.fix_missing_locations(tree))


def all_mutants(root: Path = ROOT) -> list[Mutant]:
    """A file that two areas name is the first one's."""
    found: dict[str, list[Mutant]] = {}
    for area, (places, _) in AREAS.items():
        for place in places:
            path = root / place
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                name = file.relative_to(root).as_posix()
                made = enumerate(changes(ast.parse(file.read_text())))
                several = [Mutant(area, name, number, line, what) for number, (line, what, _) in made]
                found.setdefault(name, several)
    return [mutant for several in found.values() for mutant in several]


def chosen(mutants: Sequence[Mutant], *, count: int = COUNT, seed: int = SEED) -> list[Mutant]:
    """`count` of them, about as many of each area."""
    drawn = random.Random(seed)
    by_area: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_area.setdefault(mutant.area, []).append(mutant)
    for several in by_area.values():
        drawn.shuffle(several)
    rounds = itertools.zip_longest(*by_area.values())
    return [mutant for several in rounds for mutant in several if mutant is not None][:count]


def tests_of(mutant: Mutant, reach: Reach) -> list[str]:
    """The area's tests that reach the statement; if it runs at import, those that use or import the file."""
    suites = AREAS[mutant.area][1]
    source = (ROOT / mutant.file).read_text()
    found = reach.of_statement(source, mutant.file, mutant.line)
    if found is None:
        found = reach.of_file(source, mutant.file, suites)
    return [test for test in found if test.startswith(suites)]


def judge(mutant: Mutant, reach: Reach, *, package: Path, patience: float) -> dict[str, Any]:
    """Runs the tests on the copy of the package with that change, and takes the change back."""
    began, by, tests = time.monotonic(), "", tests_of(mutant, reach)
    status = f"survived {len(tests)} tests" if tests else "survived: not reached"
    if tests:
        file, source = package.parent / mutant.file, ROOT / mutant.file
        file.write_text(mutated(source.read_text(), mutant.number))
        ended, told = run_chosen(tests, reach, package=package, temporary=package.parent, patience=patience)
        shutil.copy2(source, file)
        if ended not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            assert ended != BROKEN, (package.parent / "printed").read_text()
            status = "killed" if ended > 0 else f"killed, {signal.Signals(-ended).name}"
            by = told[-1][1] if told else "import"
    seconds = round(time.monotonic() - began, 1)
    return {**asdict(mutant), "name": mutant.name, "status": status, "by": by, "seconds": seconds}


def unfounded(results: Sequence[dict[str, Any]], reach: Reach, *, package: Path) -> set[str]:
    """Tests that killed a mutant and fail on the package as it is, in the same way of running them."""
    killers = sorted({entry["by"] for entry in results} & set(reach.seconds))
    if not killers:
        return set()
    _, told = run_chosen(killers, reach, package=package, temporary=package.parent, patience=300, all_of=True)
    return {test for what, test in told if what == "failed"} | (set(killers) - {test for _, test in told})


def done_before(out: Path) -> dict[str, dict[str, Any]]:
    lines = out.read_text().splitlines() if out.exists() else []
    return {entry["name"]: entry for entry in map(json.loads, filter(None, lines))}


def alive(entry: dict[str, Any]) -> bool:
    return entry["status"].startswith("survived")


def score(results: Sequence[dict[str, Any]]) -> str:
    counts = Counter((entry["area"], alive(entry)) for entry in results)
    counts.update(("all", alive(entry)) for entry in results)
    lines = []
    for area in [*AREAS, "all"]:
        killed, of = counts[area, False], counts[area, False] + counts[area, True]
        if of:
            lines.append(f"{area:12} {killed:4} of {of:4} killed, {100 * killed / of:.0f} %")
    lines += [f"{e['status']}: {e['name']}  {e['change']}" for e in results if alive(e)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/mutants/1of1.jsonl"), help="a line a mutant")
    parser.add_argument("--shard", default="1/1", help="I/N: every N-th, from the I-th")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds beyond ten times a test's")
    parser.add_argument("--again", action="store_true", help="judge those anew that survived before")
    parser.add_argument(
        "--score", type=Path, nargs="*", help="files of shards: print their score, run nothing"
    )
    given = parser.parse_args()
    if given.score is not None:
        known = {
            name: entry for out in given.score or [given.out] for name, entry in done_before(out).items()
        }
        print(score(list(known.values())))
        return
    index, of = map(int, given.shard.split("/"))
    every = all_mutants()
    mine = chosen(every, count=given.count, seed=given.seed)[index - 1 :: of]
    before = done_before(given.out)
    if given.again:
        before = {name: entry for name, entry in before.items() if not alive(entry)}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    preload()
    suites = [place for _, places in AREAS.values() for place in places]
    reach = measured(sorted({mutant.file for mutant in every}), suites, kept=given.out.parent.absolute())
    with tempfile.TemporaryDirectory() as folder:
        package = Path(shutil.copytree(ROOT / "src", Path(folder) / "src"))
        compileall.compile_dir(package, quiet=2)

        def judged(mutants: Sequence[Mutant]) -> None:
            for mutant in mutants:
                found = judge(mutant, reach, package=package, patience=given.patience)
                before[mutant.name] = found
                with given.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
                told = f"{found['status']:22} {found['seconds']:6.1f} s  {mutant.name}  {mutant.change}"
                print(told, flush=True)

        judged([mutant for mutant in mine if mutant.name not in before])
        while failing := unfounded([before[mutant.name] for mutant in mine], reach, package=package):
            print("fail without a mutant, too:", *sorted(failing), sep="\n  ", flush=True)
            reach = reach.without(failing)
            judged([mutant for mutant in mine if before[mutant.name]["by"] in failing])
    results = [before[mutant.name] for mutant in mine]
    print(score(results))


if __name__ == "__main__":
    main()
