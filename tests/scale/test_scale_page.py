"""The page of steps on many GPUs shows the record's numbers; the search by Optuna asks for them."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from command_line import loka as run
from networks import EXAMPLE

from loka.core.records.across import Across

SEARCH = EXAMPLE.with_name("search_parallel.py")


def test_bars_and_lines_are_the_records_numbers(tmp_path: Path) -> None:
    run(
        "scale", "dcnv2", "--network", EXAMPLE, "--gpus", "8,16", "--engine", "hsdp", "--engine", "ddp",
        "--page", "page.html", "--out", "across.json", cwd=tmp_path,
    )  # fmt: skip
    page, found = (tmp_path / "page.html").read_text(), Across.load(tmp_path / "across.json")
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    plain = {name: [r for r in found.rows if r.plain and r.engine == name] for name in ("ddp", "hsdp/8")}
    assert len(drawings) == len(plain)
    for drawn, rows in zip(drawings, plain.values(), strict=True):
        most = max(max(r.bf16.high, r.planned.high) for r in rows) * 1.08
        pixels = (260 - 38 - 24) / most  # of a microsecond
        names = ("gemms", "other", "exposed")
        heights = [float(h) for h in re.findall(r'<rect[^>]* height="([\d.]+)"', drawn)]
        parts = [getattr(one, name) for r in rows for one in (r.bf16_parts, r.parts) for name in names]
        tenth = {"abs": 0.11}
        assert heights == pytest.approx([max(us * pixels, 0.5) for us in parts], **tenth)
        lines = re.findall(r'points="[\d.]+,([\d.]+) [\d.]+,([\d.]+)"', drawn)
        ends = [step.high - step.low for r in rows for step in (r.bf16, r.planned)]
        assert [float(a) - float(b) for a, b in lines] == pytest.approx([us * pixels for us in ends], **tenth)
        for row in rows:
            assert f">{row.speedup.value:.2f}x<" in drawn
            assert f"{row.gpus} GPUs, by plan: GEMMs {row.parts.gemms / 1e3:.2f} ms" in drawn
    assert all(f"{quantity.origin}: " in page for quantity in found.assumptions.values())
    assert "--network too" in run("scale", "dcnv2", "--page", "page.html", cwd=tmp_path, fails=2)


def test_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    found = runpy.run_path(str(SEARCH))
    found["objective"].__globals__["GPUS"] = 16

    class Trial(dict):  # type: ignore[type-arg]
        def suggest_categorical(self, name: str, values: tuple[str, ...]) -> str:
            assert self.get(name, values[0]) in values
            return self.get(name, values[0])

        def set_user_attr(self, name: str, ends: list[float]) -> None:
            self[name] = ends

    trials = [Trial(engine="hsdp", plan=plan, gather="fp8") for plan in ("bf16", "all")]
    bf16, planned = map(found["objective"], trials)
    assert planned < bf16
    for trial, told in zip(trials, (bf16, planned), strict=True):
        assert trial["ends"][0] < told < trial["ends"][1]
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit, match="pip install optuna"):
        runpy.run_path(str(SEARCH), run_name="__main__")
