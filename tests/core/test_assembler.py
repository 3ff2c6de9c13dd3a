import os
import subprocess
from pathlib import Path

import pytest
import torch

from loka.core import assembler
from loka.core.assembler import keeps_constants
from loka.core.compiling import compile_in_place
from loka.core.exceptions import WrongResults

knobs = pytest.importorskip("triton", reason="needs triton").knobs
TOOLS = list(assembler._TOOLS.items())


@pytest.fixture
def bundled(monkeypatch, tool, target):
    monkeypatch.delenv(f"TRITON_{tool.upper()}_PATH", raising=False)
    path = getattr(knobs.nvidia, tool).path
    for name in (f"TRITON_{tool.upper()}_PATH", f"LOKA_{tool.upper()}"):
        monkeypatch.setenv(name, path)  # so that it is undone
    if keeps_constants(path, target):
        pytest.skip(f"{path} drops none")
    yield path
    vars(knobs.nvidia).pop(tool, None)  # back to the environment


@pytest.mark.parametrize(("tool", "target"), TOOLS)
def test_constants_are_kept_by_the_script(bundled, tool, target):
    from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version

    arch = next(arch for arch in (80, 90, 100) if get_ptxas(arch).path == bundled)
    before = get_ptxas_version(arch)
    assembler._keep(tool)
    script = getattr(knobs.nvidia, tool).path
    assert script.endswith(f"{tool}.sh")
    assert keeps_constants(script, target)
    assert get_ptxas_version(arch) != before, "kernels of before are not taken from Triton's cache"
    assembler._keep(tool)
    assert os.environ[f"LOKA_{tool.upper()}"] == bundled, "not the script itself"


@pytest.mark.parametrize(("tool", "target"), TOOLS)
def test_a_script_that_cannot_run_is_refused(bundled, tool, target, monkeypatch, tmp_path):
    before = dict(os.environ)
    for name, text in (("ptxas.sh", ""), ("ptxas_blackwell.sh", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")  # nobody may execute it
    for file, why in (("/nowhere/assembler.py", "No such file"), (tmp_path / "assembler.py", "Permission denied")):
        monkeypatch.setattr(assembler, "__file__", str(file))
        with pytest.raises(WrongResults, match="drops constants") as error:
            assembler._keep(tool)
        assert why in str(error.value)
    for path in tmp_path.iterdir():
        path.chmod(0o755)
        path.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(WrongResults, match="assembles nothing") as error:
        assembler._keep(tool)
    assert f"TRITON_{tool.upper()}_PATH" in str(error.value)
    assert dict(os.environ) == before, "Triton goes on as it was set"


@pytest.mark.parametrize(("tool", "target"), TOOLS)
def test_a_tool_set_in_python_later_is_seen(bundled, tool, target, monkeypatch):
    assembler._keep(tool)
    monkeypatch.setitem(vars(knobs.nvidia), tool, bundled)  # what it is read as cannot be put back
    assembler._keep(tool)
    assert getattr(knobs.nvidia, tool).path.endswith(f"{tool}.sh")
    assert os.environ[f"LOKA_{tool.upper()}"] == bundled


def _after(tmp_path, text):
    path = tmp_path / "some.ptx"
    path.write_text(text)
    script = Path(assembler.__file__).with_name("ptxas.sh")
    done = subprocess.run([script, "-v", path], env={**os.environ, "LOKA_PTXAS": "true"}, capture_output=True)
    return done.returncode, path.read_text()


def test_only_packed_additions_change(tmp_path):
    code, text = _after(tmp_path, "\tadd.s16x2 \t%r4, %r2, -7;\n\tadd.s32 \t%r1, %r2, %r3; // add\n")
    assert code == 0
    first, second, _ = text.split("\n")
    assert "add.s16x2" not in first
    assert ["{a, b}, %r2" in first, "{c, d}, -7" in first, "%r4, {a, b}" in first] == [True] * 3
    assert second == "\tadd.s32 \t%r1, %r2, %r3; // add"


def test_a_packed_addition_of_another_form_is_an_error(tmp_path):
    assert _after(tmp_path, "add.s16x2 %r4,\n %r2, %r3;\n")[0] != 0


class Seen(torch.nn.Module):
    """What a row has of 596 events behind four that every row has, and whether it has any."""

    def forward(self, events):
        seen = torch.arange(596, device=events.device) < events[:, None]
        seen = torch.cat([seen.new_ones(len(events), 4), seen], dim=1)
        return seen, ~seen.any(dim=1, keepdim=True)


@pytest.mark.gpu
def test_a_compiled_mask_is_right():
    events = torch.randint(597, (1024,), device="cuda")
    for found, wanted in zip(compile_in_place(Seen())(events), Seen()(events), strict=True):
        assert torch.equal(found, wanted)
