import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import loka
from loka.core.records.report import Report
from loka.report.pages.page import page
from loka.validation.compare import Comparison

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")

SCRIPT = """
onload = () => {
  const d = frame.contentDocument, table = d.querySelector("#sites table");
  const head = [...table.tHead.rows[0].cells].findIndex(c => c.textContent === "speed-up");
  const column = () => [...table.tBodies[0].rows].map(r => parseFloat(r.cells[head].dataset.v));
  table.tHead.rows[0].cells[head].click();
  const down = column();
  table.tHead.rows[0].cells[head].click();
  const up = column();
  document.body.textContent = JSON.stringify({
    width: d.documentElement.scrollWidth, down, up,
    dark: matchMedia("(prefers-color-scheme: dark)").matches,
    ground: frame.contentWindow.getComputedStyle(d.body).backgroundColor})
    .replace(/[<>&]/g, "");
}"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_a_phone_and_sorts(tmp_path, dark):
    report = Report.load(ROOT / "benchmarks/wukong_step/report.json.xz")
    compared = Comparison.load(ROOT / "benchmarks/first_light/wukong-2gf/train.json.xz")
    text = page(report=report, plan=loka.plan(report), validation=compared)
    inside = f'<iframe id="frame" style="width:390px;height:800px;border:0" srcdoc="{html.escape(text)}"></iframe>'
    meta = '<meta name="color-scheme" content="light dark">'
    (tmp_path / "page.html").write_text(f"<!doctype html>{meta}<body>{inside}<script>{SCRIPT}</script>")
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [BROWSER, *options, "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path / 'page.html'}"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=90).stdout
    told = re.search(r"\{.*\}", made)
    assert told is not None, made[:500]
    found = json.loads(told[0])
    assert found["width"] <= 390
    assert found["dark"] is dark
    assert found["ground"] == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert found["down"] == sorted(found["down"], reverse=True)
    assert found["up"] == sorted(found["up"])
    assert len(found["up"]) == 15
