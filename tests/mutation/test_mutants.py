"""The tool that asks whether tests notice mistakes."""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from mutants import AREAS, COUNT, ROOT, all_mutants, changes, chosen, mutated, score
from reach import BROKEN, Reach, fork, statement

SOURCE = """
def grown(x: int = 3) -> "float | None":
    check(x)
    if x < 2 and not done:
        return max(x, 1) + 0.5
    return None
"""


def test_each_change_is_one_and_is_made() -> None:
    made = [what for _, what, _ in changes(ast.parse(SOURCE))]
    assert sorted(made) == sorted(
        ["3 -> 4", "call left out", "And -> Or", "Lt -> LtE", "2 -> 3", "not left out", "Add -> Sub",
         "max -> min", "1 -> 2", "0.5 -> 1.5"]
    )  # fmt: skip
    plain = ast.unparse(ast.parse(SOURCE))
    texts = {mutated(SOURCE, number) for number in range(len(made))}
    assert len(texts) == len(made)
    assert plain not in texts


def test_the_same_mutants_are_chosen_everywhere_some_of_each_area() -> None:
    every = all_mutants()
    drawn = chosen(every)
    assert drawn == chosen(all_mutants())
    assert len({mutant.name for mutant in drawn}) == len(drawn) == COUNT
    assert {mutant.area for mutant in drawn} == set(AREAS)
    for mutant in drawn[:10]:
        source = (ROOT / mutant.file).read_text()
        compile(mutated(source, mutant.number), mutant.file, "exec")


REACHED = """
LIMIT = (
    3
)

class Box:
    size: int = 4

    @cached(5)
    def grow(self, by=6):
        if (
            by > 7
        ):
            return self.size + 8
        for one in range(9):
            self.size += (
                10
            )
        return lambda: 11
"""


@pytest.mark.parametrize(
    ("value", "lines", "in_function"),
    [(3, {2, 3, 4}, False), (4, {7}, False), (5, None, False), (6, {10}, False), (7, {11, 12, 13}, True),
     (8, {14}, True), (9, {15}, True), (10, {16, 17, 18}, True), (11, {19}, True)],
)  # fmt: skip
def test_a_change_belongs_to_its_innermost_statement(
    value: int, lines: set[int] | None, in_function: bool
) -> None:
    tree = ast.parse(REACHED)
    (line,) = (n.lineno for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value == value)
    found = statement(tree, line)
    assert found[1] == in_function
    assert lines is None or set(found[0]) == lines


def test_the_fastest_test_that_reaches_a_statement_comes_first() -> None:
    reach = Reach(
        {"slow": 2.0, "fast": 1.0, "elsewhere": 0.5}, {"f.py": {12: ["slow"], 13: ["fast"], 14: ["slow"]}}
    )
    assert reach.of_statement(REACHED, "f.py", 12) == ["fast", "slow"]
    assert reach.of_statement(REACHED, "f.py", 14) == ["slow"]
    assert reach.of_statement(REACHED, "f.py", 19) == []
    assert reach.of_statement(REACHED, "f.py", 3) is None
    assert reach.of_file(REACHED, "f.py", ["tests/core"]) == ["fast", "slow"]


def test_a_fork_says_how_it_ended() -> None:
    assert fork(lambda: 3, seconds=30) == 3
    assert fork(lambda: 1 // 0, seconds=30) == BROKEN
    assert fork(lambda: os.kill(os.getpid(), signal.SIGKILL) or 0, seconds=30) == -signal.SIGKILL
    assert fork(lambda: time.sleep(30) or 0, seconds=0.05) == -signal.SIGALRM


def test_the_score_names_survivors() -> None:
    entry = {"area": "core", "name": "a.py:1#0", "change": "Lt -> LtE"}
    text = score([{**entry, "status": "survived 9 tests"}, {**entry, "status": "killed", "name": "b"}])
    assert text.count("1 of    2 killed, 50 %") == 2  # the area, and all
    assert "survived 9 tests: a.py:1#0  Lt -> LtE" in text
