import re
from pathlib import Path

import pytest
from forked import run_script
from sweeps import sweep

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]

# tests/scale/test_scale_page.py and tests/serve/test_teacher_example.py
TESTED_APART = {"search_parallel.py", "teacher.py"}
LONG = ("bench", "train", "budget", "scale", "segments", "validate")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in TESTED_APART]


def run(code, name, folder):
    """In a process of its own and an empty folder."""
    (empty := folder / "empty").mkdir()
    return run_script(code, name=name, cwd=empty, output=folder / "printed")


# The others take longest, and what they call has tests of its own.
@pytest.mark.parametrize(
    "page", sweep(WITH_CODE, [page for page in WITH_CODE if page.stem not in LONG]), ids=lambda page: page.stem
)
def test_code_blocks_run(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    printed = run("\n".join(blocks), page.name, tmp_path)
    for shown in re.findall(r"prints\n\n```text\n(.*?)```", page.read_text(), flags=re.S):
        assert shown.strip() in printed


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example, tmp_path):
    run(example.read_text(), example.name, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_code_is_ten_lines():
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    assert len([line for line in block.splitlines() if line.strip()]) <= 11  # the import and ten


OF_A_KIND = [page for page in PAGES if page.name not in ("README.md", "log.md")]


@pytest.mark.parametrize("page", OF_A_KIND, ids=lambda page: page.stem)
def test_a_page_says_of_which_kind_it_is(page):
    kinds = "Tutorial|How-to|Concept|Reference"
    third = page.read_text().splitlines()[2]
    assert re.match(rf"\*({kinds})( and ({kinds.lower()}))?\.\*", third), "the line below the title"


def test_every_page_is_in_the_list_of_pages():
    listed = (ROOT / "docs" / "README.md").read_text()
    for page in PAGES[1:]:
        path = page.relative_to(ROOT / "docs").as_posix()
        assert path == "README.md" or f"]({path})" in listed, path


def test_tests_that_pages_name_are_there():
    """A page that says which test shows something is believed without a look."""
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    gone = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            linked = [page.parent / name for name in re.findall(r"\]\(([^)#]*tests/[^)#]*\.py)", line)]
            text = "".join(path.read_text() for path in linked if path.is_file())
            told = set(re.findall(r"`(test_\w+)`", line)) - names if linked else set()
            gone += [f"{page.name}: {name}" for name in told if f"def {name}(" not in text]
    assert not gone
