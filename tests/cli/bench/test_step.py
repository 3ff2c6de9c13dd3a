import dataclasses
import functools
import sys
import types
from collections import Counter

import pytest
import torch
from command_line import measure_coarsely
from torch import nn
from typer.testing import CliRunner

from loka.cli.app import app
from loka.cli.commands import step
from loka.cli.commands.step import DISPATCH, EVERYWHERE, StepConfig, run_step_bench
from loka.cli.inputs import open_data
from loka.core.error import Estimate
from loka.core.exceptions import LokaError, MissingLibrary, PlanMismatch, UnknownName
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Measurement, Report
from loka.core.storage.files import read_record, write_record
from loka.nn import sites_of
from loka.nn.linears import find_linears, is_prediction
from loka.planner import plan
from loka.probe import Probe
from loka.train.steps import step_time
from loka.train.steps.step_time import StepTime

ROWWISE = "emulated:rowwise_e4m3"
TORCHAO = [
    "torchao tensorwise",
    "torchao tensorwise, its filter",
    "torchao rowwise",
    "torchao rowwise, its filter",
    "torchao rowwise_with_gw_hp",
]
ALL = [DISPATCH, *(f"{name} everywhere" for name in EVERYWHERE), *TORCHAO]


class FakeSteps:
    """Stands in for `time_steps`: builds no arm, and says what it was told to say of each."""

    def __init__(self):
        self.arms = {}
        self.baseline = None
        self.rows = 0
        self.options = {}
        self.failures = {}

    def __call__(self, baseline, arms, batch, *, on_result, **options):
        self.baseline, self.arms, self.rows, self.options = baseline, dict(arms), len(batch), options
        for place, name in enumerate((baseline.name, *arms)):
            if name in self.failures:
                on_result(StepTime(name=name, failure=self.failures[name]))
                continue
            time = Estimate(2000.0 / (1 + place), 1900.0 / (1 + place), 2100.0 / (1 + place))
            speedup = Estimate(1.0 + place, 0.9 + place, 1.1 + place)
            on_result(StepTime(name=name, microseconds=time, speedup=speedup, low_precision=place))
        return {}


@pytest.fixture(scope="module", autouse=True)
def measured_coarsely():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "measure", measure_coarsely)
        yield


@pytest.fixture
def steps(monkeypatch):
    """The CPU passes for a device with CUDA graphs; probing and measuring are real."""
    fake = FakeSteps()
    monkeypatch.setattr(step, "time_steps", fake)
    monkeypatch.setattr(step, "has_graphs", lambda device: True)
    return fake


def recorded(folder):
    return read_record(folder / "step.json", kind="loka-bench-step", version=1, way_out="", parse=lambda c: c)


def config_in(out, **changes):
    config = StepConfig(
        model="dlrm",
        batch_size=32,
        out=out,
        command="loka bench step",
        device="cpu",
        probe_steps=2,
        candidates=(ROWWISE,),
        rounds=9,
        compile_blocks=False,
    )
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module")
def data():
    return open_data(None, rows=100, seed=0, holdout=0.01)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, data):
    config = config_in(tmp_path_factory.mktemp("measured"))
    return step._report(config, data)


def never(*args, **options):
    raise AssertionError("nothing has to be probed or measured")


def test_an_unknown_arm_is_told_all_that_exist(steps, data, tmp_path):
    with pytest.raises(UnknownName, match="no arm is called magic, more of it") as caught:
        run_step_bench(config_in(tmp_path / "out", arms=("magic", DISPATCH, "more of it")), data)
    assert caught.value.way_out == f"one of {', '.join(ALL)}"
    assert not (tmp_path / "out").exists(), "it is refused before anything is probed"


def test_a_cpu_is_refused(data, tmp_path):
    with pytest.raises(LokaError, match="cpu has none") as caught:
        run_step_bench(config_in(tmp_path / "out"), data)
    assert caught.value.way_out == "run this on a machine with a GPU"
    assert not (tmp_path / "out").exists()


def test_what_is_written(steps, tmp_path, monkeypatch):
    broken = f"{EVERYWHERE[1]} everywhere"
    steps.failures = {broken: "RuntimeError: no kernel image"}
    command = ["bench", "step", "--model", "dlrm", "--batch-size", "32", "--device", "cpu", "--eager"]
    command += ["--candidate", ROWWISE, "--rounds", "11", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0

    assert (steps.baseline.name, list(steps.arms), steps.rows) == ("bf16", ALL, 32)
    assert steps.options == {"device": torch.device("cpu"), "compile_blocks": False, "rounds": 11}

    content = recorded(tmp_path)
    assert list(content["arms"]) == ["bf16", *ALL]
    assert content["arms"][broken] == {
        "microseconds": None,
        "speedup": None,
        "low_precision": 0,
        "failure": "RuntimeError: no kernel image",
    }
    assert content["arms"][DISPATCH]["microseconds"] == [1000.0, 950.0, 1050.0]
    assert content["arms"][DISPATCH]["speedup"] == [2.0, 1.9, 2.1]
    assert content["arms"][DISPATCH]["low_precision"] == 1
    assert (content["model"], content["batch"], content["compiled"]) == ("dlrm", 32, False)
    assert content["machine"]["torch"] == torch.__version__

    decided = Plan.load(tmp_path / "plan.json")
    assert content["plan"] == decided.summary()
    assert {d.candidate for d in decided.decisions.values()} == {HP, ROWWISE}

    table = (tmp_path / "step.txt").read_text().splitlines()
    assert table[0].split("  ")[0] == "arm"
    assert len(table) == 2 + len(ALL)
    [row] = [line for line in table if line.startswith(broken)]
    assert row.endswith("RuntimeError: no kernel image")
    [row] = [line for line in table if line.startswith(DISPATCH)]
    assert "1.000" in row, "milliseconds"

    before = (tmp_path / "report.json").read_bytes()
    monkeypatch.setattr(step, "Probe", never)
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "report.json").read_bytes() == before, "a report that is there is used"


def test_results_are_kept_as_they_come(steps, data, tmp_path, monkeypatch):
    """What was timed before an unusable GPU ends the run is in the record."""

    def dies(baseline, arms, batch, **options):
        options["on_result"](StepTime(name=baseline.name, microseconds=Estimate(9.0, 8.0, 10.0)))
        raise torch.AcceleratorError("an illegal memory access was encountered")

    config = config_in(tmp_path, arms=(TORCHAO[0],))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "time_steps", dies)
        with pytest.raises(torch.AcceleratorError):
            run_step_bench(config, data)
    arms = recorded(tmp_path)["arms"]
    assert arms["bf16"]["microseconds"] == [9.0, 8.0, 10.0]
    assert list(arms) == ["bf16"]


def test_torchao_alone_needs_no_report(steps, data, tmp_path, monkeypatch):
    for name in ("Probe", "measure", "plan_report"):
        monkeypatch.setattr(step, name, never)
    found = run_step_bench(config_in(tmp_path, arms=(TORCHAO[2], TORCHAO[0])), data)
    assert list(found) == ["bf16", TORCHAO[2], TORCHAO[0]], "in the order asked for"
    assert {path.name for path in tmp_path.iterdir()} == {"step.json"}
    assert recorded(tmp_path)["plan"] is None


@pytest.mark.slow
def test_one_candidate_everywhere(measured, data, tmp_path):
    """At every site that runs it, whatever the budget says; hp where it cannot run and at narrow outputs."""
    refused, absent = "top.0/output", "top.3/grad_input"
    sites = dict(measured.sites)
    for name, changed in {refused: {ROWWISE: Measurement(unsupported="not on Tuesdays")}, absent: {}}.items():
        others = {key: value for key, value in sites[name].measurements.items() if key != ROWWISE}
        sites[name] = dataclasses.replace(sites[name], measurements={**others, **changed})
    decided = step._everywhere(dataclasses.replace(measured, sites=sites), ROWWISE)
    assert set(decided.decisions) == set(sites)
    for name, decision in decided.decisions.items():
        narrow = is_prediction(measured.model.layers[decision.path].out_features)
        wanted = HP if narrow or name in (refused, absent) else ROWWISE
        assert decision.candidate == wanted, name
    counts = Counter(decision.candidate for decision in decided.decisions.values())
    assert min(counts[HP], counts[ROWWISE]) > 2
    assert decided.decisions["logit/output"].candidate == HP

    fresh = functools.partial(step._fresh, config_in(tmp_path), data.train)
    model = step._by_plan(fresh, decided)()
    wide = [path for path, shape in measured.model.layers.items() if not is_prediction(shape.out_features)]
    assert step._count(model) == len(sites_of(model)) == len(wide)
    with pytest.raises(UnknownName, match="no candidate is called 'cutlass:rowwise'"):
        step._everywhere(measured, "cutlass:rowwise")


def test_every_planned_arm_is_of_its_own_candidate(measured, data, tmp_path):
    fresh = functools.partial(step._fresh, config_in(tmp_path), data.train)
    decided = plan(measured)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "convert", lambda model, decided: decided)
        patch.setattr(step, "_everywhere", lambda report, candidate: f"all {candidate}")
        arms = step._planned_arms(fresh, measured, decided)
        built = {name: arm.build() for name, arm in arms.items()}
    assert built == {DISPATCH: decided, **{f"{name} everywhere": f"all {name}" for name in EVERYWHERE}}


def test_without_torchao_its_arms_say_how_to_get_it(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    config = config_in(tmp_path, arms=tuple(TORCHAO))
    fresh = functools.partial(step._fresh, config, data.train)
    batch = next(iter(data.train.batches(32)))
    for name, arm in step._torchao_arms(fresh, batch).items():
        with pytest.raises(MissingLibrary, match=name.partition(",")[0]) as caught:
            arm.build()
        assert caught.value.way_out == "pip install 'loka[torchao]'"

    def race(functions, **options):
        timing = types.SimpleNamespace(microseconds=Estimate(1.0, 1.0, 1.0), speedup=Estimate(1.0, 1.0, 1.0))
        return types.SimpleNamespace(timings=dict.fromkeys(functions, timing), failures={})

    monkeypatch.setattr(step_time, "time_interleaved", race)
    monkeypatch.setattr(step_time, "has_graphs", lambda device: True)
    monkeypatch.setattr(step, "has_graphs", lambda device: True)
    found = run_step_bench(config, data)
    assert found["bf16"].failure is None
    table = step.step_table(found)
    for name in TORCHAO:
        reason = f"MissingLibrary: {name.partition(',')[0]} (pip install 'loka[torchao]')"
        assert found[name].failure == reason
        assert reason in table


def test_torchao_gets_the_layers_that_its_recipe_runs(data, tmp_path, monkeypatch):
    """With a stand-in that records what it was asked: sides of 16, no prediction, no views for rowwise."""
    taken = {}

    def convert(model, *, config, module_filter_fn):
        taken[config] = [path for path, module in model.named_modules() if module_filter_fn(module, path)]
        return model

    library = types.ModuleType("torchao.float8")
    library.Float8LinearConfig = types.SimpleNamespace(from_recipe_name=lambda name: name)
    library._auto_filter_for_recipe = lambda recipe, filter_fqns: lambda module, path: path.startswith("top")
    library.convert_to_float8_training = convert
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", library)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = nn.Linear(13, 32)
            self.bottom = nn.Linear(32, 32)
            self.tokens = nn.Linear(16, 16, bias=False)
            self.top = nn.Linear(32, 32)
            self.logit = nn.Linear(32, 1)

        def forward(self, dense, sparse):
            x = self.bottom(self.odd(dense)).unflatten(1, (16, 2)).transpose(1, 2)
            return self.logit(self.top(self.tokens(x).flatten(1))).squeeze(1)

    batch = next(iter(data.train.batches(32)))
    arms = step._torchao_arms(Net, batch)
    expected = {
        "torchao tensorwise": ["bottom", "tokens", "top"],
        "torchao tensorwise, its filter": ["top"],
        "torchao rowwise": ["bottom", "top"],
        "torchao rowwise, its filter": ["top"],
        "torchao rowwise_with_gw_hp": ["bottom", "top"],
    }
    for name, paths in expected.items():
        taken.clear()
        model = arms[name].build()
        assert taken == {name.partition(",")[0].removeprefix("torchao "): paths}, name
        assert not any(module._forward_pre_hooks for module in model.modules()), "looking left nothing"
    assert list(arms) == list(expected)


def test_the_same_weights_for_every_arm(data, tmp_path):
    """Arms start from one model with the mods of the demo, ready to train, whatever was drawn before."""
    config = config_in(tmp_path, seed=3)
    first = step._fresh(config, data.train)
    torch.randn(5)
    second = step._fresh(config, data.train)
    assert first.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    biased = [path for path, linear in find_linears(first)[0].items() if linear.bias is not None]
    assert biased == ["logit"]
    other = step._fresh(dataclasses.replace(config, seed=4), data.train)
    assert not torch.equal(other.logit.weight, first.logit.weight)


def test_statistics_of_before_are_of_models_with_mods(data, tmp_path):
    """Until then a user's model had them too, and has none now."""
    (tmp_path / "stats").mkdir()
    (tmp_path / "stats" / "stats.json").touch()

    def probed_before(name):
        config = config_in(tmp_path, model=name)
        content = {what: value for what, value in step._identity(config, data).items() if what != "mods"}
        write_record(tmp_path / step._PROBED, kind=step._PROBED_KIND, version=1, content=content)
        return step._probed_before(config, data)

    assert probed_before("dlrm")
    with pytest.raises(PlanMismatch, match="mods: True there, False now"):
        probed_before("mine:Net")


def test_effects_are_by_the_labels_or_by_the_given_rate(data, tmp_path, monkeypatch):
    told = []

    def probe(model, **options):
        told.append(options["base_rate"])
        return Probe(model, **options)

    monkeypatch.setattr(step, "Probe", probe)
    monkeypatch.setattr(step, "measure", lambda *args, **options: None)
    step._report(config_in(tmp_path / "counted"), data)
    step._report(config_in(tmp_path / "given", base_rate=0.25), data)
    labels = torch.cat([batch.label for batch in data.train.batches(32)])
    assert told == [pytest.approx(labels.mean().item()), 0.25]


@pytest.mark.slow
def test_statistics_in_the_folder_are_not_gathered_again(steps, data, tmp_path, monkeypatch):
    config = config_in(tmp_path)
    (tmp_path / "stats").mkdir()
    (tmp_path / "stats" / "stats.json").write_text("of a probe that was interrupted")
    run_step_bench(config, data)
    first = Report.load(tmp_path / "report.json").stats_digest
    monkeypatch.setattr(step, "Probe", never)
    monkeypatch.setattr(step, "train", never)
    run_step_bench(dataclasses.replace(config, rounds=11), data)
    assert Report.load(tmp_path / "report.json").stats_digest == first


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch_size": 16}, "batch size: 32 there, 16 now"),
        ({"model": "dcnv2"}, "model: dlrm there, dcnv2 now"),
        ({"seed": 7}, "seed: 0 there, 7 now"),
        ({"base_rate": 0.5}, r"base rate: None there, 0\.5 now"),
    ],
)
def test_statistics_of_another_run_are_refused(changes, told, steps, data, tmp_path, monkeypatch):
    """The plan was made for 256 rows, and timed with 4096, without a word."""
    monkeypatch.setattr(step, "measure", lambda *args, **options: None)
    config = config_in(tmp_path)
    step._report(config, data)
    with pytest.raises(PlanMismatch, match=told) as refused:
        step._report(dataclasses.replace(config, **changes), data)
    assert "--out" in refused.value.way_out
    other = open_data(None, rows=100, seed=1, holdout=0.01)
    with pytest.raises(PlanMismatch, match="data: "):
        step._report(config, other)
