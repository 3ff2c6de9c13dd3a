import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_importing_needs_torch_and_numpy_alone():
    """Every other installed package is hidden; what torch itself imports stays visible."""
    script = """
import sys, torch, numpy
before = set(sys.modules)
class Hidden:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("torch", "numpy", "loka"):
            raise ImportError(f"{name} is hidden")
        return None
sys.meta_path.insert(0, Hidden())
import loka
new = {name.partition(".")[0] for name in set(sys.modules) - before}
extra = new - set(sys.stdlib_module_names) - {"torch", "numpy", "loka"}
assert not extra, extra
assert "torch._dynamo" not in sys.modules
model = torch.nn.Sequential(torch.nn.Linear(8, 16))
with loka.Probe(model, every=2):
    pass
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@pytest.mark.slow
def test_importing_loka_and_its_models_leaves_triton_alone():
    """It reads its environment when it is first imported, which is for the user to decide until then."""
    script = "import sys, loka.zoo; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_imports_point_one_way():
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


def python_files():
    return [file for room in ("src", "tests", "benchmarks", "examples") for file in (ROOT / room).rglob("*.py")]


def test_files_stay_small():
    long = {}
    for path in python_files():
        lines = len(path.read_text().splitlines())
        if lines > (600 if "triton" in path.parts else 400):
            long[str(path)] = lines
    assert not long


def test_folders_stay_small():
    files = Counter(path.parent for path in python_files() if path.name != "__init__.py")
    assert not {str(folder): number for folder, number in files.items() if number > 15}


def test_nothing_loads_what_can_execute():
    """torch.load only with weights_only, no pickle, no eval: a file must not run code.

    Text of kernels is made, and run by kernels/triton/source.py alone, from numbers and from names that we
    wrote: what comes from outside is a Program (kernels/edge/program.py), whose ops and kinds are out of
    closed lists and whose other content is integers, floats and booleans; its constructor checks that.
    """
    forbidden = re.compile(r"pickle\.loads?\(|Unpickler\(|(?<![.\w])(?:eval|exec)\(|allow_pickle=True|yaml\.load")
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        plain = re.sub(r'""".*?"""', "", text, flags=re.S)
        if path.parts[-3:] == ("kernels", "triton", "source.py"):
            assert plain.count("exec(") == 1
            plain = plain.replace("exec(", "")
        assert not forbidden.search(plain), path
        for call in re.findall(r"\btorch\.load\((.*)\)", text):
            assert "weights_only=True" in call, path


def test_tests_have_names_of_their_own():
    """They are imported by their names alone: of two alike the second is not found, or another file's helpers are."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    counts = Counter(path.name for path in paths if path.name != "conftest.py")
    assert not [name for name, count in counts.items() if count > 1]


def test_the_checkout_stays_small():
    """Raw results are release assets (benchmarks/README.md); tables stay. Nine tenths are code and tests."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=True)
    there = [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    sizes = {name: (ROOT / name).stat().st_size for name in there}
    results = [name for name in there if name.startswith("benchmarks/") and not name.endswith(".py")]
    assert sum(map(sizes.__getitem__, results)) < 1.5e6, sorted(results, key=sizes.__getitem__)[-5:]
    most = 5.85 * 2**20  # MB as `du` and `ls` count them
    assert sum(sizes.values()) < most, sorted(sizes, key=sizes.__getitem__)[-5:]
