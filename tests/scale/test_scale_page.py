import re
import runpy
import sys

import pytest
from command_line import loka as run
from networks import EXAMPLE

from loka.core.records.across import Across

SEARCH = str(EXAMPLE.with_name("search_parallel.py"))


def test_bars_and_lines_are_the_records_numbers(tmp_path):
    asked = ("--network", EXAMPLE, "--gpus", "8,16", "--engine", "ddp", "--page", "page.html", "--out", "a.json")
    run("scale", "dcnv2", *asked, cwd=tmp_path)
    page, found = (tmp_path / "page.html").read_text(), Across.load(tmp_path / "a.json")
    assert page.count("<svg") == 1
    steps = [pair for r in found.rows if r.plain for pair in ((r.bf16, r.bf16_parts), (r.planned, r.parts))]
    pixels = (260 - 38 - 24) / 1.08 / max(step.high for step, _ in steps)  # of a microsecond; to a tenth each
    heights = [max(us * pixels, 0.5) for _, p in steps for us in (p.gemms, p.other, p.exposed)]
    drawn = re.findall(r'<rect[^>]* height="([\d.]+)"', page)
    assert list(map(float, drawn)) == pytest.approx(heights, abs=0.11)
    ends = [(step.high - step.low) * pixels for step, _ in steps]
    lines = re.findall(r'points="[\d.]+,([\d.]+) [\d.]+,([\d.]+)"', page)
    assert [float(low) - float(high) for low, high in lines] == pytest.approx(ends, abs=0.11)
    assert f"16 GPUs, by plan: GEMMs {steps[-1][1].gemms / 1e3:.2f} ms" in page
    assert all(f"{quantity.origin}: " in page for quantity in found.assumptions.values())
    assert "--network too" in run("scale", "dcnv2", "--page", "page.html", cwd=tmp_path, fails=2)


@pytest.mark.slow
def test_the_search(monkeypatch):
    class Trial(dict):
        def suggest_categorical(self, name, values):
            return self.get(name, values[0])

        set_user_attr = dict.__setitem__

    objective = runpy.run_path(SEARCH)["objective"]
    objective.__globals__["GPUS"] = 16
    trials = [Trial(engine="hsdp", plan=plan, gather="fp8") for plan in ("bf16", "all")]
    bf16, planned = map(objective, trials)
    assert trials[1]["ends"][0] < planned < bf16 < trials[0]["ends"][1]
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit, match="pip install optuna"):
        runpy.run_path(SEARCH, run_name="__main__")
