import signal
from dataclasses import replace

import pytest
import torch
from fp8_run import AUTO, CONFIG, PROBED, digest, tower
from models import stats_of
from small_run import RandomRows, stop_at

import loka
from loka.core.budget import Budget
from loka.core.exceptions import CheckpointRefused, NotWritten, UnknownName, WrongResults
from loka.core.numerics.effect import Effect
from loka.core.records.parts import Part
from loka.core.records.plan import Plan
from loka.core.records.report import HP, Report
from loka.core.records.stats import Stats
from loka.data import SyntheticClicks
from loka.measurement.settings import Settings
from loka.nn import fp8_runs, sites_of
from loka.train import TrainConfig, load_newest, train
from loka.train.automatic import auto as module
from loka.train.automatic.as_it_is import relative_width
from loka.train.automatic.auto import NE_ALLOWED, Auto, AutoConfig
from loka.train.automatic.timeline import load_timeline
from loka.zoo import build

STEPS = 30
ROWS = RandomRows(16 * STEPS)


def run(config=AUTO, *, seed=0, track=None, folder=None, **others):
    model, said = tower(seed), []
    auto = Auto(config, folder=str(folder) if folder else None, say=said.append, track=track)
    others = {"config": CONFIG, **others}
    if folder is not None:
        others.setdefault("checkpoints", folder / "checkpoints")
    result = train(model, ROWS, callback=auto, **others)
    return model, auto, result, said


@pytest.fixture
def without_fresh_rows(monkeypatch):
    """What is said of layers by rows that a model has not learnt takes most of a run, and some do not ask it."""
    monkeypatch.setattr(module, "renewed", lambda run, stats, looks, **options: stats)


@pytest.mark.slow
def test_from_a_cold_start_to_fp8(tmp_path):
    model, auto, result, said = run(folder=tmp_path)
    assert auto.phase == "fp8"
    assert list(sites_of(model)) == ["mlp.0", "mlp.4", "mlp.6", "side"]
    assert result.plan.to_json() == auto.plan.to_json() == Plan.load(tmp_path / "plan.json").to_json()
    assert result.steps == STEPS
    assert any("no speed is claimed" in line for line in said)  # of a CPU
    events = load_timeline(tmp_path / "timeline.json")
    assert [(event.phase, event.step) for event in events] == [
        ("probe", 0),
        ("measure", PROBED),
        ("fp8", PROBED),
        ("end", STEPS),
    ]
    assert [event.rows for event in events] == [0, 16 * PROBED, 16 * PROBED, 16 * STEPS]
    seconds = [event.seconds for event in events]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] < seconds[2] < seconds[3]
    stats = Stats.load(tmp_path / "stats")
    assert (stats.steps, stats.sampled_steps) == (PROBED, 4)
    report = Report.load(tmp_path / "report.json")
    assert report.complete
    assert "4 of 12 steps sampled" in str(auto.timeline)
    states = load_newest(tmp_path / "checkpoints").state["optimizers"]["dense"]["state"]
    assert {float(state["step"]) for state in states.values()} == {STEPS}, "the same Adam all the way"


@pytest.mark.usefixtures("without_fresh_rows")
def test_a_folder_that_takes_no_file_is_told_before_the_first_step(tmp_path):
    """`--checkpoints` elsewhere, it was told when the probe had learnt, and ended the run."""
    (tmp_path / "notes.txt").write_text("")
    steps = []
    with pytest.raises(NotWritten, match=r"notes\.txt"):
        train(tower(), ROWS, config=CONFIG, callback=Auto(AUTO, folder=tmp_path / "notes.txt"), on_step=steps.append)
    assert not steps


@pytest.mark.slow
def test_until_it_converts_it_is_the_bf16_run(tmp_path):
    stop = stop_at(PROBED)
    plain = tower()
    with pytest.raises(KeyboardInterrupt):
        train(plain, ROWS, config=CONFIG, on_step=stop)
    with pytest.raises(KeyboardInterrupt):
        run(folder=tmp_path, on_step=stop)
    assert digest(load_newest(tmp_path / "checkpoints").state["model"]) == digest(plain.state_dict())


class KilledWhileMeasuring(Exception):
    pass


def breaking(items, description, total):
    for place, item in enumerate(items):
        if place == 1:
            raise KilledWhileMeasuring
        yield item


@pytest.fixture(scope="module")
def whole():
    return run()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [4, 11, PROBED, "measuring", 19, 29])
def test_killed_in_any_phase_it_goes_on_there(tmp_path, whole, stop):
    straight, all_through, expected, _ = whole
    killed = stop_at(stop, KilledWhileMeasuring)  # nothing is saved: it goes on from the last checkpoint
    with pytest.raises(KilledWhileMeasuring):
        run(folder=tmp_path, on_step=killed, track=breaking if stop == "measuring" else None)
    newest = load_newest(tmp_path / "checkpoints")
    assert newest.state["beside"]["phase"] == (
        "probe" if stop in (4, 11) else "measure" if stop in (PROBED, "measuring") else "fp8"
    )
    model, auto, result, _ = run(folder=tmp_path, seed=1)
    assert result.resumed_from == newest.step > 0
    assert auto.plan.to_json() == all_through.plan.to_json()
    assert result.plan.to_json() == expected.plan.to_json()
    assert result.reading == expected.reading
    assert digest(model.state_dict()) == digest(straight.state_dict())
    assert fp8_runs(model) == fp8_runs(straight)
    events = load_timeline(tmp_path / "timeline.json")
    assert [event.phase for event in events] == ["probe", "measure", "fp8", "end"]


@pytest.mark.slow
def test_a_run_that_ends_before_its_plan_says_so():
    _, auto, result, _ = run(replace(AUTO, least_steps=STEPS, most_steps=STEPS + 1))
    assert (auto.phase, result.plan) == ("probe", None)
    assert "no plan was made: all in bf16" in str(auto.timeline)


@pytest.mark.usefixtures("without_fresh_rows")
def test_ctrl_c_ends_a_measurement(tmp_path):
    def pressing(items, description, total):
        for item in items:
            signal.raise_signal(signal.SIGINT)
            yield item

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(folder=tmp_path, track=pressing)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert load_newest(tmp_path / "checkpoints").state["beside"]["phase"] == "measure"


@pytest.mark.slow
@pytest.mark.usefixtures("without_fresh_rows")
def test_the_probe_ends_when_it_knows_enough(monkeypatch):
    looked = []

    def width(stats):
        looked.append(stats.sampled_steps)
        return 3.0 if len(looked) == 1 else 1.2

    monkeypatch.setattr(module, "relative_width", width)
    monkeypatch.setattr(module, "_LOOK_EVERY", 2)
    _, auto, _, _ = run(replace(AUTO, width=1.5, every=1))
    assert looked[:2] == [6, 8]  # the first looks at or after least_steps
    assert auto.timeline.events[1].step == 8


@pytest.mark.slow
@pytest.mark.usefixtures("without_fresh_rows")
def test_killed_between_a_sample_and_its_look_the_probe_ends_where_it_would_have(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "relative_width", lambda stats: 1.2)
    monkeypatch.setattr(module, "_LOOK_EVERY", 7)
    settings = replace(AUTO, width=1.5, every=10, least_steps=12, most_steps=20)  # samples at 0, 10; a look at 14
    with pytest.raises(KilledWhileMeasuring):
        run(settings, folder=tmp_path, on_step=stop_at(13, KilledWhileMeasuring))
    _, auto, result, _ = run(settings, folder=tmp_path)
    assert result.resumed_from == 12
    assert auto.timeline.events[1].step == 14


@pytest.mark.slow
def test_few_samples_do_not_tell_how_far_a_model_moves(monkeypatch):
    """Two of 40 steps are sampled, one of them of a model that has learnt nothing; two looks are of models that
    have."""
    rows = SyntheticClicks(rows=256 * 60, seed=0)

    def factor():
        torch.manual_seed(0)
        model, said = build("dlrm", dense_features=rows.dense_features, vocab_sizes=rows.vocab_sizes), []
        config = AutoConfig(every=20, least_steps=40, most_steps=40, candidates=("emulated:rowwise_e4m3",))
        train(model, rows, config=TrainConfig(batch_size=256), callback=Auto(config, say=said.append))
        (line,) = [line for line in said if "2 of 40 steps sampled" in line]
        return float(line.rpartition(" ")[2])

    with_looks = factor()
    monkeypatch.setattr(module, "next_look", lambda looks, first: 0)
    assert with_looks < factor() / 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_fresh_rows")
@pytest.mark.parametrize(("most", "ends"), [(20, 12), (10, 10)])
def test_the_probe_goes_on_while_effects_move_by_orders_of_magnitude(most, ends, monkeypatch, tmp_path):
    """Asked again at twice the steps, or at the most; a run killed meanwhile goes on alike."""

    def width(stats):
        return 1e10 if stats.steps < 12 else 1.2

    monkeypatch.setattr(module, "relative_width", width)
    monkeypatch.setattr(Auto, "_narrow", lambda self: True)
    monkeypatch.setattr(module, "_LOOK_EVERY", 2)
    config, looks, look_at = replace(AUTO, least_steps=6, most_steps=most, every=1), [], module.look_at
    monkeypatch.setattr(module, "look_at", lambda stats: (looks.append(stats.steps), look_at(stats))[1])
    model, auto, straight, said = run(config)
    assert looks == [3, 6]
    assert [event.phase for event in auto.timeline.events][:2] == ["probe", "measure"]
    assert auto.timeline.events[1].step == ends
    assert any("not known well enough" in line for line in said)
    with pytest.raises(KilledWhileMeasuring):
        run(config, folder=tmp_path, on_step=stop_at(8, KilledWhileMeasuring))
    again, _, result, _ = run(config, folder=tmp_path, seed=1)
    assert 0 < result.resumed_from <= 8
    assert result.plan.to_json() == straight.plan.to_json()
    assert digest(again.state_dict()) == digest(model.state_dict())


@pytest.mark.slow
@pytest.mark.usefixtures("without_fresh_rows")
@pytest.mark.parametrize(("unknown", "ends"), [("", 12), ("its labels are all alike", 6)])
def test_the_probe_goes_on_while_a_task_is_not_known_well_enough(unknown, ends, monkeypatch):
    gathered = module.gather_renewed

    def with_a_task(stats, renew):
        width = 9.0 if stats.steps < 12 else 1.2
        return replace(gathered(stats, renew), parts={"ctr": Part(task="ctr", rows=128, width=width, unknown=unknown)})

    monkeypatch.setattr(module, "gather_renewed", with_a_task)
    monkeypatch.setattr(module, "relative_width", lambda stats: 1.2)
    monkeypatch.setattr(Auto, "_narrow", lambda self: True)
    monkeypatch.setattr(module, "_LOOK_EVERY", 2)
    _, auto, _, said = run(replace(AUTO, least_steps=6, most_steps=20, every=1))
    assert auto.timeline.events[1].step == ends
    told = "ctr not known well enough for a plan: probing to step 12"
    assert any(told in line for line in said) == (not unknown)


def test_how_narrow_effects_are():
    """What a budget is charged, over the estimate; of layers that do not say, nothing."""
    assert relative_width(with_effects(terms=[1.0, 1.001] * 25)) == pytest.approx(1.0, abs=1e-3)
    wide = relative_width(with_effects(terms=[0.0] * 40 + [5.0] * 10))
    assert 1.2 < wide < 3
    assert relative_width(with_effects(terms=None)) is None


def with_effects(terms):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    stats = stats_of(model, torch.randn(8, 4), torch.sum, effect_samples=0)
    if terms is None:
        return stats
    effect = Effect.of(terms, [[0.5]] * len(terms))
    layers = {p: replace(layer, effects={"rowwise_e4m3": effect}) for p, layer in stats.layers.items()}
    return replace(stats, layers=layers)


@pytest.mark.slow
@pytest.mark.usefixtures("without_fresh_rows")
def test_the_default_budget_is_one_of_ne_where_effects_are_known(tmp_path):
    _, auto, _, _ = run(replace(AUTO, budget=None))
    assert auto.plan.budget == Budget(ne=NE_ALLOWED, regions=False)  # steps are eager


def test_a_budget_without_a_limit_on_ne_is_told_with_the_reason():
    said = []
    auto = Auto(AUTO, say=said.append)
    auto._stats = stats = with_effects(terms=None)
    layers = {path: replace(layer, no_effect="no logits") for path, layer in stats.layers.items()}
    for found, why in ((stats, "no step told"), (replace(stats, layers=layers), "no logits")):
        auto._stats = found
        assert auto._default_budget() == Budget()
        assert said.pop() == f"nothing limits KL/H, of which no effect is known: {why}"


@pytest.mark.slow
@pytest.mark.usefixtures("without_fresh_rows")
def test_where_nothing_may_be_fp8_it_stays_in_bf16(tmp_path):
    plain = tower()
    train(plain, ROWS, config=CONFIG)
    model, auto, result, _ = run(replace(AUTO, budget=Budget(keep=("*",))), folder=tmp_path)
    assert auto.phase == "bf16"
    assert not sites_of(model)
    assert all(decision.candidate == HP for decision in auto.plan.decisions.values())
    assert result.plan is None
    assert digest(model.state_dict()) == digest(plain.state_dict())


@pytest.mark.usefixtures("without_fresh_rows")
def test_a_plan_that_cannot_run_is_said_and_bf16_goes_on(monkeypatch):
    def wrong(*args):
        raise WrongResults("a kernel of this plan returns wrong numbers here")

    monkeypatch.setattr("loka.train.run.convert", wrong)
    model, auto, result, said = run()
    assert auto.phase == "bf16"
    assert "stays in bf16: a kernel of this plan returns wrong numbers here" in said[-1]
    assert result.steps == STEPS
    assert not sites_of(model)


@pytest.mark.usefixtures("without_fresh_rows")
def test_measuring_ends_after_a_minute_and_without_times_bf16_goes_on(monkeypatch):
    measure = module.measure
    monkeypatch.setattr(module, "measure", lambda *a, time_limit, **o: measure(*a, time_limit=time_limit - 45, **o))
    monkeypatch.setattr(module, "has_graphs", lambda device: True)
    _, auto, _, said = run()
    assert auto.phase == "bf16"
    assert "bf16: nothing was timed" in said[-1]
    assert "the time limit of 0 s was reached" in said[-1]


def test_a_mistake_is_an_error(tmp_path):
    with pytest.raises(UnknownName, match="nonsense"):
        run(replace(AUTO, candidates=("nonsense:rowwise_e4m3",)))


@pytest.mark.slow
@pytest.mark.usefixtures("without_fresh_rows")
def test_another_budget_is_another_run(tmp_path):
    run(folder=tmp_path)
    with pytest.raises(CheckpointRefused, match=r"beside\.auto\.budget\.keep"):
        run(replace(AUTO, budget=replace(AUTO.budget, keep=("mlp.0",))), folder=tmp_path)


@pytest.mark.gpu
def test_on_a_gpu_in_graphs(tmp_path):
    """Of two phases each captures its own graph, with tables beside it; NE stays that of bf16. The small DLRM stayed
    in bf16 at these rows: its layers are faster so."""
    rows = SyntheticClicks(rows=16384 * 40, seed=0)
    config = TrainConfig(batch_size=16384, device="cuda", step="graph", log_every=20, checkpoint_every=20)
    auto = Auto(
        AutoConfig(
            every=5,
            least_steps=5,
            most_steps=20,
            budget=Budget(min_sqnr_db=None, min_speedup=0),
            settings=Settings(min_draws=2, max_draws=2, max_rounds=5, search_rounds=3, quantize_once_rounds=3),
        ),
        folder=tmp_path,
    )
    found = []
    for callback in (None, auto):
        torch.manual_seed(0)
        model = build("dlrm", size="mlperf", dense_features=rows.dense_features, vocab_sizes=rows.vocab_sizes)
        loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(256), loka.mods.HardSwish()])
        found.append(train(model, rows, config=config, callback=callback))
        assert found[-1].step_reason is None
    assert auto.phase == "fp8"
    assert auto.plan.timed
    # e4m3 at every site: what it changes in 40 steps is far below what they still learn in one.
    assert found[1].train_ne == pytest.approx(found[0].train_ne, rel=2e-2)


@pytest.mark.parametrize("wrong", [{"least_steps": 0}, {"most_steps": 0}, {"width": 1.0}])
def test_config_refuses(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        AutoConfig(**wrong)
