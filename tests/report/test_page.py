import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import loka
from loka.cli.commands.ne import show_frontier
from loka.compiler.joint_sites import IN_REGIONS
from loka.core.error import Estimate
from loka.core.exceptions import LokaError
from loka.core.numerics.reference import quantize
from loka.core.recipe import Cast, Format, Granularity
from loka.core.records.report import Measurement, Report
from loka.report.pages.depths import DEEPEST, Ranges, octaves, quantile
from loka.report.pages.html import Cell, Html, number, table, tag
from loka.report.pages.page import page
from loka.report.pages.plan import layer_rows
from loka.report.pages.quality import Bar, forest
from loka.report.pages.sites import best_of
from loka.report.pages.svg import Scale, fit
from loka.statistics.depths import depth_histogram
from loka.train.automatic.timeline import Event
from loka.validation.annealed import Annealed
from loka.validation.arms import by_plan, key_of
from loka.validation.compare import Comparison
from loka.validation.paired import PairedDifference
from loka.validation.record import ArmVerdict, SeedPair, Validation
from loka.validation.runs import CurvePoint, Run
from loka.validation.validate import BY_MEAN
from loka.validation.variance import PairVariance
from loka.validation.verdicts import RowsVerdict

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert('1')</script>\"&<img src=x onerror=alert(2)>"


class Reader(HTMLParser):
    void = frozenset({"meta", "br"})

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.elements = []
        self.text = ""
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def hostile_validation():
    variance = PairVariance(mean=0.004, pairs=4, rows=9000, between_pairs=0.003, rows_error=0.001)
    judged = RowsVerdict(name=HOSTILE, variance=variance, clicks=900, limit=0.02, tail=0.05)
    poor = replace(judged, variance=replace(variance, pairs=1, between_pairs=math.nan), name="poor")
    pair = PairedDifference(Estimate(0.1, 0.0, 0.2), Estimate(0, 0, 0), Estimate(0, 0, 0), rows=9000)
    pairs = tuple(SeedPair(seed=seed, difference=pair) for seed in range(4))
    arm = ArmVerdict(
        name=HOSTILE,
        pairs=pairs,
        average=judged,
        segments=(judged, poor),
        readings=(replace(judged, name=f"{BY_MEAN} {HOSTILE}"),),
    )
    broken = ArmVerdict(name="broken", pairs=(), average=None, broke=HOSTILE)
    curve = tuple(CurvePoint(1000 * step, 0.9, 0.9 + 0.1 / step) for step in range(1, 30))
    runs = [Run(arm=name, seed=seed, curve=curve) for seed in range(4) for name in ("bf16", HOSTILE)]
    return Validation(
        model=HOSTILE,
        control="bf16",
        limit=0.02,
        segment_limit=0.02,
        seeds=(0, 1, 2, 3),
        arms=(arm, broken),
        runs=tuple(runs),
        context={HOSTILE: HOSTILE},
        annealed=Annealed(final_rate=1.0),
    )


class Hostile(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(13, 64))
        self.rest = nn.Sequential(nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.rest(self.get_submodule(HOSTILE)(x)).squeeze(1)


@pytest.fixture(scope="module")
def records():
    torch.manual_seed(0)
    model = Hostile()
    with loka.Probe(model, every=1) as probe:
        for x in torch.randn(4, 128, 13):
            labels = (x[:, 0] > 0.5).float()
            nn.functional.binary_cross_entropy_with_logits(model(x), labels).backward()
    stats = probe.stats()
    report = loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"])
    begun = [(HOSTILE, 0, 0.0, ""), ("measure", 10, 5.0, HOSTILE), ("fp8", 10, 8.0, ""), ("end", 50, 20.0, "")]
    timeline = [
        Event(phase=phase, step=step, rows=100 * step, seconds=at, note=note) for phase, step, at, note in begun
    ]
    return {
        "stats": stats,
        "report": report,
        "plan": loka.plan(report, loka.Budget(ne=1e-2)),
        "validation": hostile_validation(),
        "timeline": timeline,
    }


@pytest.fixture(scope="module")
def whole(records):
    return page(**records)


def test_a_hostile_name_stays_text(whole):
    read = Reader(whole)
    names = [name for name, _ in read.elements]
    assert names.count("script") == 1
    assert "img" not in names
    # Every one of them is there to be read, as it was given.
    assert read.text.count(HOSTILE) > 8
    for name, attributes in read.elements:
        assert not [key for key in attributes if key.startswith("on")], name


def test_it_needs_no_network(whole):
    read = Reader(whole)
    outside = {"src", "srcset", "data", "action", "poster"}
    for _, attributes in read.elements:
        assert not outside & set(attributes)
        assert attributes.get("href", "#").startswith("#")
    style = re.search(r"<style>(.*?)</style>", whole, flags=re.S)
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert "link" not in [name for name, _ in read.elements]


def test_links_lead_to_sections_and_every_section_has_what_was_given(whole):
    read = Reader(whole)
    identities = [a["id"] for _, a in read.elements if "id" in a]
    assert len(set(identities)) == len(identities)
    targets = [a["href"][1:] for name, a in read.elements if name == "a"]
    assert targets == ["quality", "curves", "plan", "frontier", "sites", "depths", "timeline"]
    assert set(targets) <= set(identities)
    assert "No " not in re.findall(r"<section[^>]*>.*?</section>", whole, flags=re.S)[2][:400]
    for told in ("knee", "undecided", "smallest error", "past e4m3 normal", "what came of it"):
        assert told in read.text


def test_the_same_records_make_the_same_bytes(records, whole):
    assert page(**records) == whole
    assert "object at 0x" not in whole


@pytest.mark.parametrize(
    ("given", "commands"),
    [
        ("plan", ["loka validate", "loka measure", "loka probe", "loka train --auto"]),
        ("stats", ["loka validate", "loka measure", "loka plan"]),
        ("report", ["loka validate", "loka plan", "loka probe"]),
        ("validation", ["loka plan", "loka measure", "loka probe"]),
        ("timeline", ["loka validate", "loka plan", "loka measure", "loka probe"]),
    ],
)
def test_what_is_not_given_is_said_to_be_missing(records, given, commands):
    read = Reader(page(**{given: records[given]}))
    assert len([name for name, _ in read.elements if name == "section"]) == 7
    for command in commands:
        assert command in read.text


def test_nothing_and_records_of_different_models_are_refused(records):
    with pytest.raises(LokaError, match="no record"):
        page()
    other = Report.load(ROOT / "benchmarks/wukong_step/report.json.xz")
    with pytest.raises(LokaError, match="different models"):
        page(report=other, stats=records["stats"])


def test_a_plan_of_another_report_is_refused(records):
    """Its errors stood beside another measurement's, without a word."""
    plan = records["plan"]
    site = next(name for name, decision in plan.decisions.items() if decision.sqnr_db is not None)
    moved = replace(plan.decisions[site], sqnr_db=Estimate(1.0, 0.5, 1.5))
    with pytest.raises(LokaError, match=r"(?s)plan is of another report.*1 \[0\.5, 1\.5\] dB in the plan"):
        page(plan=replace(plan, decisions={**plan.decisions, site: moved}), report=records["report"])
    page(plan=plan, report=records["report"])


def test_a_report_of_other_statistics_is_refused(records):
    """Its numbers stood beside another window's distributions. One for inference is of statistics derived from
    them."""
    stats, report = records["stats"], records["report"]
    path, layer = next(iter(stats.layers.items()))
    grown = replace(layer, effects={name: replace(e, total=2 * e.total) for name, e in layer.effects.items()})
    other = replace(stats, layers={**stats.layers, path: grown})
    with pytest.raises(LokaError, match="measured on other statistics"):
        page(stats=replace(stats, steps=40), report=report)
    served = stats.for_inference(batch=0.25)
    report = loka.measure(served, device="cpu", candidates=["emulated:rowwise_e4m3"])
    page(stats=stats, report=report)
    with pytest.raises(LokaError, match=r"emulated:rowwise_e4m3 costs KL/H .* there, and .* by these"):
        page(stats=other, report=report)


def test_a_large_model_folds_and_the_layers_that_save_most_come_first():
    report = Report.load(ROOT / "benchmarks/wukong_step/report.json.xz")
    plan = loka.plan(report)
    saved = [row.saved_us or 0.0 for row in layer_rows(plan)]
    assert saved == sorted(saved, reverse=True)
    # The rows add up to what the plan says of itself.
    told = re.search(r"(\d+) us in hp, (\d+) us by plan", plan.summary())
    assert sum(saved) == pytest.approx(int(told[1]) - int(told[2]), abs=2)
    text = page(report=report, plan=plan)
    read = Reader(text)
    assert all(site in read.text for site in report.sites)
    unfolded = re.sub(r"<details>.*</details>", "", text, flags=re.S)  # greedy: all of them
    assert unfolded.count("<tr>") < 60
    assert len(text) < 400_000


@pytest.mark.parametrize("suffix", ["", "_pow2"])
def test_a_layer_in_a_region_is_shown_with_its_candidates(suffix):
    """Also where the report knows its recipe without powers of two alone."""
    report = Report.load(ROOT / "benchmarks/wukong_step/report.json.xz")
    path = max(report.sites.values(), key=lambda site: site.measurements["hp"].microseconds.value).path
    sites = {}
    for name, site in report.sites.items():
        row = site.measurements["torch_fast:rowwise_e4m3"]
        known = {f"{kernel}:rowwise_e4m3{suffix}": row for kernel in ("torch", "torch_fast")}
        sites[name] = replace(site, measurements={"hp": site.measurements["hp"], **known})
    times = {
        name: Measurement(microseconds=Estimate(us, us, us), speedup=Estimate(*[1000 / us] * 3))
        for name, us in (("hp", 1000.0), ("region", 250.0))
    }
    report = replace(report, sites=sites, region_times={path: times})
    plan = loka.plan(report)
    shown = [best_of(site, plan) for site in sites.values() if site.path == path]
    assert len(shown) > 1
    assert all(best.decided and best.candidate in IN_REGIONS for best in shown)
    assert "in a compiled region" in Reader(page(report=report, plan=plan)).text


def test_a_report_without_a_plan_says_what_its_numbers_lack(records, capsys):
    stats = replace(records["stats"], steps=40)
    given = {"not_clicks": "no clicks", "notes": ("a site was late",), "no_effect": {"rest": "old"}}
    report = replace(records["report"], stats_digest=stats.digest(), **given)
    text = Reader(page(report=report, stats=stats)).text
    for told in ("no clicks", "a site was late", "effect on KL/H not known: rest: old"):
        assert told in text.partition("Error and time of every site")[2]
    assert "no clicks" in text.partition("KL/H buys")[2].partition("Error and time")[0]
    show_frontier(report, loka.Budget(), None)
    assert "note: no clicks" in capsys.readouterr().out
    assert text.count("4 of 40 steps") == 2, "both in the head and beside the distributions"


def test_integers_are_not_called_fp8(records):
    plan = records["plan"]
    site, decision = next((s, d) for s, d in plan.decisions.items() if d.candidate != "hp" and "output" in s)
    plan = replace(plan, decisions={**plan.decisions, site: replace(decision, candidate="emulated:int8_row")})
    assert "GEMMs in FP8 or INT8" in page(plan=plan)
    assert "sites in eight bits" in page(report=records["report"]), "a frontier has what may be integers"
    assert "run in FP8 or INT8" in plan.coverage_lines()[0]


def test_demo_records_are_shown_too():
    found = Comparison.load(ROOT / "benchmarks/first_light/wukong-2gf/train.json.xz")
    across = found.across
    assert across.ne_percent.value == pytest.approx(-0.05, abs=0.01)  # as its README says
    text = Reader(page(validation=found)).text
    assert "noise: bf16 nudged" in text
    assert "undecided" in text


def test_whose_verdicts_they_are_is_said(records):
    """Those of another plan of the model look the same."""
    plan, found = records["plan"], records["validation"]
    other = replace(plan, notes=("another",))
    ran = replace(found.arms[0], name="mine", key=key_of(by_plan(plan), "ctr"), task="ctr")
    found = replace(found, arms=(ran, replace(found.arms[0], name="naive", key="0123456789abcdef")))
    assert "The plan on this page is what mine, ctr ran." in page(plan=plan, validation=found)
    told = Reader(page(plan=other, validation=found)).text
    assert f"No arm ran the plan on this page ({key_of(by_plan(other), 'ctr')}, {key_of(by_plan(other), '')})" in told
    assert "mine, ctr (" + ran.key in told
    assert "naive (0123456789abcdef)" in told
    assert "the plan on this page" not in page(validation=found).lower()
    demo = Comparison.load(ROOT / "benchmarks/first_light/wukong-2gf/train.json.xz")
    demo = replace(demo, context={"plan": plan.summary()})
    assert "Not by the plan" not in page(plan=plan, validation=demo)
    assert "Not by the plan on this page" in page(plan=replace(plan, decisions={}), validation=demo)


def test_zeros_are_not_past_the_normal_numbers(records):
    stats = records["stats"]
    layer = stats.layers["rest.1"]
    given = layer.operands["input"]
    x = torch.tensor([1.0, 2.0**-14.3, 2.0**-25, 0.0]).repeat(8, 1)
    told, spoilt = (depth_histogram(each, Granularity.TENSOR).table for each in (x, x.log()))
    held = {**given.tensors, "depth_tensor": told + spoilt}
    layer = replace(layer, operands={**layer.operands, "input": replace(given, tensors=held)})
    text = page(stats=replace(stats, layers={"rest.1": layer}))
    (row,) = [row for row in re.findall(r"<tr>(.*?)</tr>", text) if ">input<" in row and "%" in row]
    assert re.findall(r"[0-9.]+ %", row)[:2] == ["12.50 %", "12.50 %"], "past normal numbers, and flushed"


def test_octaves_are_shares_by_depth():
    torch.manual_seed(0)
    x = torch.exp(3 * torch.randn(64, 512))
    x[0, :7] = 0
    found = octaves(depth_histogram(x, Granularity.TENSOR).table)
    magnitude = x[x != 0].abs().double()
    depth = torch.log2(magnitude.max() / magnitude).floor().clamp_max(DEEPEST - 1)
    expected = torch.bincount(depth.long(), minlength=DEEPEST).double() / len(depth)
    # An element on an octave's edge may fall on either side; there are none but the amax.
    assert found == pytest.approx(expected.tolist(), abs=1e-9)
    half = quantile(found, 0.5)
    assert half == pytest.approx(float(torch.log2(magnitude.max() / magnitude).median()), abs=0.1)


@pytest.mark.parametrize("format", list(Format))
def test_ranges_are_where_quantizing_changes(format):
    ranges = Ranges.of(format)
    around = [2.0**-depth for depth in (ranges.flushed + 0.01, ranges.flushed - 0.01, ranges.normal)]
    x = torch.tensor([[1.0, *around]])
    made = quantize(x, Cast(format, Granularity.TENSOR))
    data = made.data.float()[0]
    assert data[0] == format.max
    assert data[1] == 0
    assert data[2] == format.smallest_subnormal
    assert data[3] == min(2.0**format.min_exponent, format.max)  # of integers none is a normal number


def test_text_is_escaped_and_markup_is_not():
    assert tag("td", "<b>", tag("i", "x"), title='"<') == Html('<td title="&quot;&lt;">&lt;b&gt;<i>x</i></td>')
    rows = [(Cell("1,000", 1000.0), f"row {i}") for i in range(40)]
    text = table(("n", "name"), rows, caption="<c>", first=5)
    assert text.count("<table ") == 2
    assert "&lt;c&gt;: the first 5 of 40" in text
    assert 'data-v="1000.0"' in text
    alone = table(("a", "b"), [(number(None), "x")], caption="c")
    assert "<th" in alone
    assert ">a<" not in alone  # a column of dashes says nothing


def test_scales_and_ticks():
    scale = Scale(low=0.0, high=10.0, start=100.0, end=0.0)
    assert (scale(0), scale(10), scale(2.5), scale(99)) == (100, 0, 75, 0)
    assert scale.ticks() == [0, 2, 4, 6, 8, 10]
    logarithmic = Scale(low=1e-6, high=1e-2, start=0.0, end=4.0, log=True)
    assert logarithmic(1e-4) == pytest.approx(2)
    assert 1e-4 in logarithmic.ticks()
    assert fit([math.nan, math.inf]) == (0.0, 1.0)
    low, high = fit([3.0, 3.0])
    assert low < 3 < high


def test_an_interval_without_an_end_runs_out_of_the_frame():
    drawn = forest([Bar("one pair", Estimate(0.01, -math.inf, math.inf)), Bar("none", Estimate(*[math.nan] * 3))], 0.02)
    assert "nan" not in drawn.replace("+nan % [+nan, +nan]", "")
    assert "inf" not in re.sub(r"<title>.*?</title>", "", drawn)


def test_a_time_line_tells_how_long_each_phase_took(records):
    section = page(timeline=records["timeline"]).partition('id="timeline"')[2]
    rows = [re.sub(r"<[^>]*>", " ", row).split() for row in re.findall(r"<tr>(.*?)</tr>", section)]
    assert rows[2][:5] == ["measure", "10", "5.0", "3.0", "-"]  # nothing is trained while measuring
    assert rows[3] == ["fp8", "10", "8.0", "12.0", "333"]  # 4000 rows in 12 s
    assert rows[4][:4] == ["end", "50", "20.0", "-"]
    assert "20 s up to the last entry" in section


def test_the_read_out_of_the_mean_and_whether_it_is_annealed_are_shown(whole):
    text = Reader(whole).text
    assert "bf16 is NOT annealed: the last rate is 1 of the peak" in text
    assert BY_MEAN in text
