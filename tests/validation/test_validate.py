import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_run import RandomRows, SmallModel

from loka.core.budget import Budget
from loka.core.device import fingerprint
from loka.core.exceptions import LokaError, PlanMismatch, UnknownName
from loka.core.records.plan import Plan
from loka.core.storage.codec import encode
from loka.core.storage.files import write_record
from loka.nn import sites_of
from loka.nn.linears import signature
from loka.nn.unwrap import device_of
from loka.report.pages.quality import quality_section
from loka.report.validation_table import validation_table, verdict_line
from loka.train import TrainConfig, train
from loka.train.segments import Segments
from loka.validation import paired_difference
from loka.validation.arms import ArmSpec, arm_named, by_plan, by_recipe
from loka.validation.record import Validation
from loka.validation.runs import folder_of, held_out
from loka.validation.segments import (
    by_segments,
    by_value,
    cluster_named,
    dense_quantiles,
    divide,
    division_named,
    frequent_ids,
)
from loka.validation.validate import validate

CONFIG = TrainConfig(batch_size=64, seed=3, lr=1e-2)
TRAIN, TEST = RandomRows(1280), RandomRows(600, seed=8)


def damaged(model):
    """An arm that is clearly worse: all its logits are two, and it cannot unlearn that."""
    model.mlp[3].weight.requires_grad_(False).zero_()
    model.mlp[3].bias.requires_grad_(False).add_(2.0)


def same(model):
    return model


SAME = ArmSpec(name="same", apply=same, identity={"what": "nothing"})
WORSE = ArmSpec(name="worse", apply=torch.no_grad()(damaged), identity={"what": "damage"})


def run(out, arms=(SAME,), **others):
    return validate(SmallModel, TRAIN, TEST, arms, **{"config": CONFIG, "out": out, "pairs": 4, **others})


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    out = tmp_path_factory.mktemp("validation")
    halves = by_value("first dense is positive", lambda batch: (batch.dense[:, 0] > 0).int())
    return out, run(out, (SAME, WORSE), divisions=[halves, frequent_ids(0, 2)], limit=0.5, segment_limit=0.6)


def test_an_arm_that_changes_nothing_passes_and_a_damaged_one_fails(judged):
    _, found = judged
    same, worse = found.arms
    assert same.average.ne_percent.value == same.average.ne_percent.high == 0.0
    assert same.average.verdict == "pass"
    # Two ids of fifty have too few clicks: named, undecided, and so is the whole.
    assert [s.verdict for s in same.segments] == ["pass", "pass", "undecided", "undecided", "pass"]
    assert "clicks" in same.segments[2].outlook
    assert same.verdict == "undecided"
    assert worse.verdict == found.verdict == "fail"
    assert worse.segments[0].verdict == "fail"
    assert {segment.tail for segment in worse.segments} == {0.05 / 5}
    assert worse.average.tail == 0.05
    assert (worse.average.limit, worse.segments[0].limit) == (0.5, 0.6)


def test_pairs_are_those_of_the_predictions_on_disk(judged):
    out, found = judged
    for seed, pair in found.arms[1].differences.items():
        before, after = held_out(out, "bf16", seed), held_out(out, "worse", seed)
        assert pair == paired_difference(before.logits, after.logits, before.labels)
        expected = [batch.label for batch in TEST.batches(64)]
        assert np.array_equal(before.labels, torch.cat(expected).numpy())


def test_the_record_is_read_back_as_it_was(judged):
    out, found = judged
    again = Validation.load(out / "validation.json")
    assert encode(again) == encode(found)
    assert again.verdict == "fail"
    band = again.band("worse")
    assert (len(band), band[-1].rows) == (20, 1280)  # every step is a point of a run this short
    assert band[-1].difference.low > 0
    assert all(point.difference.value == 0 for point in again.band("same"))


def test_finished_runs_are_not_trained_again_and_pairs_may_grow(tmp_path):
    trained = []

    def log(name, line):
        if line.step == line.total_steps:
            trained.append(name)

    run(tmp_path, pairs=1, on_log=log)
    grown = run(tmp_path, (SAME, WORSE), pairs=2, on_log=log)
    assert trained == ["bf16 seed 3", "same seed 3", "worse seed 3", "bf16 seed 4", "same seed 4", "worse seed 4"]
    assert grown.arms[0].verdict == "undecided"
    assert not list(tmp_path.rglob("checkpoints"))


def test_a_run_that_was_killed_when_it_had_ended_leaves_no_checkpoints(tmp_path, monkeypatch):
    """Between the record and the removal of what it is no longer needed for."""

    def kill(folder):
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr("loka.validation.runs._tidy", kill)
        with pytest.raises(MemoryError):
            run(tmp_path, pairs=1)
    assert list(tmp_path.rglob("state.pt"))
    run(tmp_path, pairs=1)
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "run.json",
        "held_out.safetensors",
        "validation.json",
    }


def test_a_run_that_was_killed_behind_its_last_checkpoint_has_its_whole_curve(tmp_path, monkeypatch):
    """SIGKILL: nothing is written any more, whatever waits in a `finally`."""
    config = replace(CONFIG, checkpoint_every=7)  # of 20 steps
    whole = run(tmp_path / "whole", pairs=1, config=config)

    def killed(*args, **options):
        train(*args, **options)
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr("loka.validation.runs.train", killed)
        with pytest.raises(MemoryError):
            run(tmp_path / "killed", pairs=1, config=config)
    resumed = run(tmp_path / "killed", pairs=1, config=config)
    assert [r.curve for r in resumed.runs] == [r.curve for r in whole.runs]


def test_a_run_of_before_curves_lay_in_checkpoints_begins_anew(tmp_path):
    """Its checkpoints hold no curve, and what `curve.json` held is read by nobody any more."""
    config = replace(CONFIG, checkpoint_every=5)

    def kill(name, line):
        if name.startswith("same") and line.step == 12:
            raise MemoryError

    with pytest.raises(MemoryError):
        run(tmp_path, pairs=1, on_log=kill, config=config)
    (folder_of(tmp_path, "same", 3) / "curve.json").write_text("{}")
    started = []
    run(tmp_path, pairs=1, config=config, on_log=lambda name, line: started.append(line.step))
    assert started == list(range(1, 21))


def test_a_killed_run_goes_on_and_ends_with_the_same_predictions(tmp_path):
    config = replace(CONFIG, checkpoint_every=5)
    whole = run(tmp_path / "whole", pairs=1)
    # An interrupt saves where it is; anything harder loses the steps since the last checkpoint.
    for step, blow in ((7, KeyboardInterrupt), (13, MemoryError)):

        def kill(name, line, step=step, blow=blow):
            if name.startswith("same") and line.step == step:
                raise blow

        with pytest.raises(blow):
            run(tmp_path / "killed", pairs=1, on_log=kill, config=config)
    started = []
    resumed = run(tmp_path / "killed", pairs=1, config=config, on_log=lambda name, line: started.append(line.step))
    assert started == list(range(11, 21))
    for arm in ("bf16", "same"):
        once, twice = held_out(tmp_path / "whole", arm, 3), held_out(tmp_path / "killed", arm, 3)
        assert np.array_equal(once.logits, twice.logits)
    assert [r.curve for r in resumed.runs] == [r.curve for r in whole.runs]


def test_a_damaged_run_is_done_again(tmp_path):
    before = run(tmp_path, pairs=1)
    tensors = folder_of(tmp_path, "same", 3) / "held_out.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])
    (folder_of(tmp_path, "bf16", 3) / "run.json").write_text("{")
    again = run(tmp_path, pairs=1)
    assert encode(again.arms) == encode(before.arms)


@pytest.mark.parametrize(
    ("others", "named"),
    [({"identity": {"mods": True}}, "model"), ({"arms": (ArmSpec(name="same", apply=same, identity={}),)}, "arm")],
)
def test_runs_of_something_else_are_refused(tmp_path, others, named):
    run(tmp_path, pairs=1)
    with pytest.raises(LokaError, match=f"{named}: .* there, .* now"):
        run(tmp_path, **{"pairs": 1, **others})


def test_runs_from_before_schedules_are_read_as_runs_at_a_constant_rate(tmp_path):
    level = replace(CONFIG, schedule="constant")
    before = run(tmp_path, pairs=1, config=level)
    for file in tmp_path.glob("runs/*/run.json"):
        record = json.loads(file.read_text())
        content = record["content"]
        for name in ("schedule", "decay", "final_rate", "average", "average_share"):
            del content["identity"]["config"][name]
        del content["run"]["mean_quality"], content["run"]["final_rate"]
        write_record(file, kind=record["kind"], version=record["version"], content=content)
    trained = []
    again = run(tmp_path, pairs=1, config=level, on_log=lambda name, line: trained.append(name))
    assert not trained
    assert encode(again) == encode(before)
    with pytest.raises(LokaError, match=r"config: schedule is constant there, cosine now\n") as caught:
        run(tmp_path, pairs=1)
    assert not any("batch_size" in line for line in caught.value.why), "what is the same is not listed"


def test_pairs_that_are_copies_are_refused(tmp_path):
    torch.manual_seed(0)
    weights = SmallModel().state_dict()

    def build():
        model = SmallModel()
        model.load_state_dict(weights)
        model.mlp[2].p = 0.0  # dropout's draws are the seed's
        return model

    with pytest.raises(LokaError, match="seeds 3 and 4 give one model"):
        validate(build, TRAIN, TEST, (SAME,), config=CONFIG, out=tmp_path, pairs=2)


def test_arms_are_checked_before_the_control_trains(tmp_path):
    def refuse(model):
        assert device_of(model) == torch.device("cpu")
        raise PlanMismatch("of another model")

    begun = []
    late = replace(SAME, name="late", check=refuse)
    with pytest.raises(PlanMismatch):
        run(tmp_path, (SAME, late), on_start=begun.append, on_log=lambda *told: begun.append(told))
    assert not begun
    assert not list(tmp_path.iterdir())


def test_finished_runs_are_read_where_their_arm_cannot_run(tmp_path):
    """On another machine than the plan's, say."""

    def refuse(model):
        raise PlanMismatch("of another machine")

    first = run(tmp_path, (SAME,))
    again = run(tmp_path, (replace(SAME, check=refuse),))
    assert str(again) == str(first)


def test_two_arms_of_one_name_are_refused(tmp_path):
    for arms in ((SAME, SAME), (replace(SAME, name="bf16"),)):
        with pytest.raises(LokaError, match="arms of one name"):
            run(tmp_path, arms)


def test_an_arm_that_ends_in_nan_fails_and_the_others_go_on(tmp_path):
    def explode(model):
        with torch.no_grad():
            model.mlp[3].weight.fill_(float("inf"))

    exploding = ArmSpec(name="exploding", apply=explode, identity={})
    found = run(tmp_path, (exploding, SAME), pairs=2)
    broken, fine = found.arms
    assert broken.verdict == "fail"
    assert "nan or infinite" in broken.broke
    assert broken.average is None
    assert len(fine.pairs) == 2
    assert encode(Validation.load(tmp_path / "validation.json")) == encode(found)
    with pytest.raises(LokaError, match="control"):
        validate(Exploding, TRAIN, TEST, [SAME], config=CONFIG, out=tmp_path / "b")


class Exploding(SmallModel):
    def forward(self, dense, sparse):
        return super().forward(dense, sparse) * float("inf")


def test_naive_is_tensorwise_with_e5m2_gradients_on_every_layer():
    model = SmallModel()
    by_recipe("naive", rows=64).apply(model)
    sites = sites_of(model)
    assert set(sites) == {"mlp.0", "mlp.3"}
    recipes = ["tensorwise_e4m3", "tensorwise_e5m2", "tensorwise_e5m2"]
    for site in sites.values():
        assert [name.partition(":")[2] for name in site.candidates] == recipes
    rows = SmallModel()
    by_recipe("rowwise_e4m3", rows=64).apply(rows)
    for name in sites_of(rows)["mlp.3"].candidates:
        assert name.endswith(":rowwise_e4m3")


def test_segments_that_a_plan_limits_and_nobody_judges_are_named(tmp_path):
    division = frequent_ids(0, 2)
    judged = divide(TEST, [division], batch_size=64)[0].names[0]
    missing = ("sparse:1 = 7", "dense:2 in (-inf, 0.1]", "night")
    budget, model = Budget(segments=dict.fromkeys((judged, *missing), 1e-3)), signature(SmallModel())
    plan = Plan(model=model, machine=fingerprint("cpu"), budget=budget, timed=False, decisions={})
    found = run(tmp_path, (by_plan(plan), SAME), divisions=[division], pairs=1)
    assert [arm.unjudged for arm in found.arms] == [missing, ()]
    said = found.arms[0].unjudged_line
    assert "; give --segment sparse:1[:N] --segment dense:2[:N], as" in said
    assert said in validation_table(found)
    assert said in quality_section(found)
    assert verdict_line(found.arms[0]).endswith("0.1], night")


def test_unknown_arms_and_segments_list_what_there_is():
    with pytest.raises(LokaError, match="naive, nudged, tensorwise_e4m3, rowwise_e4m3"):
        arm_named("rowwise", rows=64)
    with pytest.raises(LokaError, match="no such file"):
        arm_named("nowhere.json", rows=64)
    for text in ("dense", "dense:x", "label:0", "dense:4", "sparse:2", "dense:0:0", "dense:0:4:1"):
        with pytest.raises(UnknownName):
            division_named(text, TRAIN)


def test_segments_divide_every_row_and_say_what_they_hold():
    quarters, ids = divide(TEST, [dense_quantiles(1), frequent_ids(1, 3)], batch_size=64)
    batches = list(TEST.batches(64))
    dense = torch.cat([batch.dense[:, 1] for batch in batches]).numpy()
    sparse = torch.cat([batch.sparse[:, 1] for batch in batches]).numpy()
    assert np.bincount(quarters.group).tolist() == [150, 150, 150, 150]
    highest = dense[quarters.group == 3]
    assert highest.min() > dense[quarters.group == 2].max()
    counts = np.bincount(sparse)
    top = int(ids.names[0].rpartition("= ")[2])
    assert counts[top] == counts.max()
    assert (sparse[ids.group == 0] == top).all()
    assert len(ids.group) == 600
    assert np.bincount(ids.group).sum() == 600


def test_segments_of_a_trainer_are_divisions_too():
    (divided,) = divide(TEST, [by_segments(Segments.of_column(0, ids=(3, 5)))], batch_size=64)
    ids = torch.cat([batch.sparse[:, 0] for batch in TEST.batches(64)]).numpy()
    assert divided.names == ("sparse 0 = 3", "sparse 0 = 5", "other")
    assert np.array_equal(divided.group == 1, ids == 5)
    assert np.array_equal(divided.group == 2, (ids != 3) & (ids != 5))


def test_ties_and_missing_values_of_a_dense_feature_stay_together():
    values = np.array([0.0] * 70 + [1.0] * 20 + [2.0] * 8 + [np.nan, np.inf])
    group, names = dense_quantiles(5).split(values)
    assert [set(values[group == g][:1].tolist()) for g in range(len(names) - 1)] == [{0.0}, {1.0}, {2.0}]
    assert names[-1] == "dense:5 not finite"
    assert (group[98:] == len(names) - 1).all()
    assert len(set(group[:70])) == 1
    constant, only = dense_quantiles(0).split(np.zeros(10))
    assert set(constant.tolist()) == {0}
    assert len(only) == 1


def test_quantiles_of_a_narrow_feature_have_names_of_their_own():
    """As logarithms of times of day: two of four were (21.25, 21.25]."""
    _, names = dense_quantiles(0, 4).split(np.log1p(1.7e9 + np.arange(1000) * 432))
    assert len(set(names)) == 4


def test_truth_values_are_no_places_of_segments():
    """False was the place of the first segment, so that each held the other's rows."""
    segments = Segments(("rare",), lambda batch: batch.sparse[:, 0] == 3, by="id 3")
    with pytest.raises(ValueError, match=r"torch\.bool"):
        divide(TEST, [by_segments(segments)], batch_size=64)
    with pytest.raises(ValueError, match=r"torch\.bool"):
        train(SmallModel(), TEST, config=CONFIG, segments=segments)


def test_a_cluster_is_a_sparse_feature_of_the_rows(judged, tmp_path):
    shutil.copytree(judged[0], tmp_path / "again")  # its runs are read back
    found = run(tmp_path / "again", (SAME, WORSE), limit=0.5, segment_limit=0.6, cluster=0)
    ids = torch.cat([batch.sparse[:, 0] for batch in TEST.batches(64)])
    unknown = int((ids == 0).sum())
    assert unknown
    variance = found.arms[0].average.variance
    assert variance.clusters == len(ids.unique()) - 1 + unknown
    assert 1 < variance.effective_clusters < variance.clusters
    assert cluster_named("sparse:0", TEST) == 0
    for wrong in ("sparse:99", "dense:0", "user"):
        with pytest.raises(UnknownName, match="sparse:0 to sparse"):
            cluster_named(wrong, TEST)
