"""The tool that asks whether tests notice mistakes."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutants import AREAS, COUNT, ROOT, Mutant, all_mutants, changes, chosen, mutated, score, suite_of

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
        assert all(Path(file).exists() for file in suite_of(mutant))


def test_the_tests_nearest_to_a_change_come_first() -> None:
    first = suite_of(Mutant("core", "src/loka/core/error.py", 0, 1, ""))[0]
    assert "loka.core.error" in Path(first).read_text()


def test_the_score_names_survivors() -> None:
    entry = {"area": "core", "name": "a.py:1#0", "change": "Lt -> LtE"}
    text = score([{**entry, "status": "survived"}, {**entry, "status": "killed", "name": "b"}])
    assert "1 of    2 killed, 50 %" in text
    assert "survived: a.py:1#0  Lt -> LtE" in text
