"""Records of older versions, which ran several layers as one: what is not used any more is dropped, each site
runs as the plan decides for it, and a plan by which layers run together is refused."""

import json
import lzma
from pathlib import Path

import pytest
import torch
from models import stats_of
from torch import nn

import loka
from loka.core.exceptions import FileRefused
from loka.core.records.plan import Plan
from loka.core.records.stats import flatten, unflatten
from loka.core.storage.codec import encode
from loka.core.storage.files import read_record, write_record
from loka.measurement import Settings
from loka.nn import health_of, sites_of

STORED = lzma.decompress((Path(__file__).parent / "stored_stats.json.xz").read_bytes())
GROUP = {
    "in_features": 32,
    "branches": [
        {"path": "gate", "out_features": 48, "bias": False, "dense": False},
        {"path": "up", "out_features": 48, "bias": True, "dense": True},
    ],
}
EPILOGUE = {"norm": "none", "block": 0, "eps": 0.0, "gamma": False, "beta": False, "activation": "relu"}
LINK = {"path": "up", "in_features": 32, "out_features": 48, "bias": True, "members": ["act"]}
CHAIN = {"prologue": EPILOGUE, "members": [], "links": [{**LINK, "epilogue": EPILOGUE}]}
CROSS = {"path": "c", "u": "gate", "v": None, "features": 32, "rank": None, "bias": False}
STACK = {"layers": [CROSS], "joint": True, "reader": None}
TIMES = {"microseconds": None, "hp_microseconds": None, "speedup": None}
TOGETHER = {
    "chains": {"up": {"chain": CHAIN, "recipe": "e4m3_row", "candidates": {}, "reason": "fastest", **TIMES}},
    "crosses": {"c": {"stack": STACK, "recipe": "e4m3_row", "candidates": {}, "reason": "", **TIMES}},
    "turned": {"gate": [1.5, 1.4, 1.6]},
}
NOBODY = {"errors": {}, "microseconds": None, "speedup": None, "rounds": 0, "unsupported": "no time"}
CANDIDATE = "emulated:rowwise_e4m3"


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(32, 48, bias=False), nn.Linear(32, 48)
        self.logit = nn.Linear(48, 1)

    def forward(self, x):
        return self.logit(torch.sigmoid(self.gate(x)) * self.up(x)).squeeze(1)


@pytest.fixture(scope="module")
def stats():
    torch.manual_seed(0)  # errors near the default limit decide what is planned
    model = Gated()
    return stats_of(model, torch.randn(64, 32, requires_grad=True))


@pytest.fixture(scope="module")
def report(stats):
    settings = Settings(rows=64, max_draws=4)
    return loka.measure(stats, device="cpu", candidates=[CANDIDATE], settings=settings)


def aged(file, **keys):
    header = json.loads(file.read_bytes())
    kind, version = header["kind"], header["version"]
    content = read_record(file, kind=kind, version=version, way_out="", parse=lambda content: dict(content))
    write_record(file, kind=kind, version=version, content={**content, **keys})


def test_stats(stats, tmp_path):
    stats.save(tmp_path)
    aged(tmp_path / "stats.json", shared=[GROUP])
    old = loka.Stats.load(tmp_path)
    assert old.digest() == stats.digest()
    old.save(tmp_path)
    assert "shared" not in (tmp_path / "stats.json").read_text()


def restored(change=lambda layer: None):
    """Statistics that an earlier LoKA wrote, with empty tensors, after `change` of their layer "0"."""
    content = json.loads(STORED)["content"]
    change(content["layers"]["0"])
    tensors = {
        f"{path}/{operand}/{name}": torch.zeros(0)
        for path, layer in content["layers"].items()
        for operand, found in layer["operands"].items()
        for name in found["tensors"]
    }
    return unflatten(content, tensors)


def test_stored_statistics_are_written_again_with_the_same_bytes():
    before = json.loads(STORED)["content"]
    del before["tensors"]  # the file of them, and its checksum
    found, tensors = flatten(restored())
    assert json.dumps(found) == json.dumps(before)
    assert len(tensors) == sum(
        len(entry["tensors"]) for layer in before["layers"].values() for entry in layer["operands"].values()
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda layer: layer.update(rows="many"), r"layers\.0\.rows has to be a whole number"),
        (lambda layer: layer.update(dtype="float7"), r"layers\.0: a dtype or a number of rows"),
        (lambda layer: layer["operands"].pop("input"), r"layers\.0: it lacks the statistics of its input"),
        (lambda layer: layer["effects"]["rowwise_e4m3"].update(count=-1), r"rowwise_e4m3: .*no effect"),
        (lambda layer: layer.update(colour=1), r"layers\.0 has colour, of which nothing is known"),
    ],
)
def test_damaged_statistics_are_refused_by_their_place(change, why):
    with pytest.raises(ValueError, match=why):
        restored(change)


def test_report(report, tmp_path):
    file = tmp_path / "report.json"
    report.save(file)
    aged(file, shared=[GROUP], shared_times={"gate+up": {"hp": NOBODY}})
    assert loka.Report.load(file) == report


@pytest.fixture
def saved(report, tmp_path):
    plan = loka.plan(report)
    plan.save(tmp_path / "plan.json")
    return plan, tmp_path / "plan.json"


def test_plan(saved):
    plan, file = saved
    times = {"microseconds": [50.0, 49.0, 51.0], "hp_microseconds": None, "speedup": None}
    aged(file, shared=[{"group": GROUP, "reason": "fastest as one", **times}])
    old = Plan.load(file)
    assert old == plan
    model = loka.convert(Gated(), old)
    assert set(sites_of(model)) == {"gate", "up"}
    model(torch.randn(64, 32)).sum().backward()
    ran = {site for site, found in health_of(model).items() if found["runs"] == 1}
    assert ran == {f"{path}/{gemm}" for path in ("gate", "up") for gemm in ("output", "grad_weight")}


def test_statistics_of_layers_that_feed_each_other(stats, tmp_path):
    stats.save(tmp_path)
    layers = json.loads((tmp_path / "stats.json").read_bytes())["content"]["layers"]
    layers["gate"]["turned"] = 8
    aged(tmp_path / "stats.json", chains=[CHAIN], crosses=[STACK], layers=layers)
    old = loka.Stats.load(tmp_path)
    assert old.digest() == stats.digest()
    with loka.Probe(Gated(), resume=old) as probe:
        pass
    assert set(probe.stats().layers) == set(stats.layers)


def test_a_report_with_their_times(report, tmp_path):
    file = tmp_path / "report.json"
    report.save(file)
    aged(
        file,
        chains=[CHAIN],
        crosses=[STACK],
        chain_times={"up": {"hp": NOBODY, "fused:e4m3_row": NOBODY}},
        turned_times={"gate": NOBODY},
        settings={**report.settings, "chain_recipes": None},
    )
    old = loka.Report.load(file)
    assert old.sites == report.sites
    assert loka.plan(old) == loka.plan(report)


@pytest.mark.parametrize("allowed", ["measured", "always", "never"])
def test_a_plan_without_them_and_the_budget_of_before(saved, allowed):
    plan, file = saved
    budget = {**encode(plan.budget), "chains": allowed, "chain_recipes": ["e4m3_row_z8", "e4m3_row"]}
    aged(file, chains={}, crosses={}, turned={}, budget=budget)
    assert Plan.load(file) == plan
    aged(file, chains={}, budget={**budget, "min_sqnr": 3})
    with pytest.raises(FileRefused, match="min_sqnr"):
        Plan.load(file)


@pytest.mark.parametrize(
    ("kind", "told"),
    [("chains", "chains: up"), ("crosses", "stacks of cross layers: c"), ("turned", "turned layers: gate")],
)
def test_a_plan_by_which_layers_run_together_is_refused(saved, kind, told):
    plan, file = saved
    aged(file, **{kind: TOGETHER[kind]})
    with pytest.raises(FileRefused, match="planned by an earlier version") as refused:
        Plan.load(file)
    assert refused.value.why == (told,)
    assert "plan again from its report: `loka plan REPORT --out PLAN`" in str(refused.value)
    with pytest.raises(FileRefused, match="earlier version"):
        Plan.from_json({**plan.to_json(), kind: TOGETHER[kind]})
