import errno
import itertools
import os

import pytest
import torch
from small_run import small_model
from torch import nn

from loka.core.exceptions import CheckpointRefused
from loka.core.numerics.label_rate import LabelRate
from loka.train import CheckpointNotSaved, load_newest, newest_step, save
from loka.train.checkpointing.checkpoint import holds_checkpoints, load_one
from loka.train.checkpointing.identity import layout
from loka.train.checkpointing.state import capture, rate_in, restore, restore_model
from loka.train.running import RunningTasks, label_rates


@pytest.fixture
def folder(tmp_path):
    for step in (10, 20):
        save(tmp_path, step=step, state={"step": step}, identity={})
    return tmp_path


def damage(path):
    (path / "state.pt").write_bytes(b"")


def test_the_newest_counts_though_it_is_damaged(folder):
    damage(folder / "step-00000020")
    assert newest_step(folder) == 20
    assert holds_checkpoints(folder)


@pytest.mark.parametrize("name", ["", "missing", ".unfinished-step-00000010", "step-1"])
def test_what_is_no_checkpoint_does_not_count(tmp_path, name):
    if name != "missing":
        (tmp_path / name).mkdir(exist_ok=True)
    folder = tmp_path / "missing" if name == "missing" else tmp_path
    assert newest_step(folder) == 0
    assert not holds_checkpoints(folder)
    assert load_one(folder) is None


def test_steps_of_more_digits_are_newer(folder):
    save(folder, step=123_456_789, state={"step": 123_456_789}, identity={}, keep=3)
    assert newest_step(folder) == 123_456_789
    assert load_newest(folder).state == {"step": 123_456_789}


def test_one_is_named_or_is_the_newest(folder):
    for path, step in [(folder, 20), (folder / "step-00000010", 10), (folder / "step-00000020", 20)]:
        found = load_one(path)
        assert (found.step, found.state, found.path.parent) == (step, {"step": step}, folder)
    assert load_one(folder / "step-00000030") is None


def test_a_named_one_that_is_damaged_gives_way_to_none(folder):
    damage(folder / "step-00000020")
    assert load_one(folder).step == 10
    with pytest.raises(CheckpointRefused, match="step-00000020 cannot be used") as error:
        load_one(folder / "step-00000020")
    assert "checksum" in error.value.why[0]


def of(model, **optimizers):
    running = RunningTasks()
    return capture(model, optimizers, running), running


def test_labels_of_a_state_are_those_that_were_added():
    model, running = small_model(), RunningTasks()
    for labels in ([1.0, 0, 0, 1], [0.0, 1, 0]):
        running.add(torch.full((len(labels),), 9.0), torch.full((len(labels),), 5.0), torch.tensor(labels))
    assert label_rates(capture(model, {}, running)["running"]) == LabelRate(positives=3, rows=7)


def test_the_rate_is_a_share_of_its_peak():
    model = small_model()
    tables = torch.optim.SGD(model.table.parameters(), lr=3.0)
    dense = torch.optim.SGD(model.mlp.parameters(), lr=0.5)
    assert rate_in(of(model, sparse=tables, dense=dense)[0]) is None  # no schedule
    dense.param_groups[0] |= {"initial_lr": 2.0}
    assert rate_in(of(model, sparse=tables, dense=dense)[0]) == 0.25


def test_what_compiled_code_holds_stays_the_same_tensor(tmp_path):
    """Rates on a device, and buffers of the size that they have in the state."""
    model = small_model()
    optimizer = torch.optim.Adam(model.mlp.parameters(), lr=torch.tensor(0.5))
    state, running = of(model, dense=optimizer)
    state["buffers"] = {"largest": torch.tensor(7.0)}
    state["optimizers"]["dense"]["param_groups"][0]["lr"] = torch.tensor(0.25)
    largest, rate = model.largest, optimizer.param_groups[0]["lr"]
    restore(state, model, {"dense": optimizer}, running, path=tmp_path)
    assert model.largest is largest
    assert largest == 7
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones((), dtype=torch.float64)])
def test_a_buffer_of_another_shape_or_type_is_taken_from_the_state(tmp_path, value):
    state, _ = of(model := small_model())
    restore_model({**state, "buffers": {"largest": value}}, model, path=tmp_path)
    assert torch.equal(model.largest, value)
    assert model.largest.dtype == value.dtype


def test_a_buffer_that_the_first_use_makes_is_made(tmp_path):
    state, _ = of(model := small_model())
    restore_model({**state, "buffers": {"mlp.0.seen": torch.ones(2)}}, model, path=tmp_path)
    assert torch.equal(model.mlp[0].get_buffer("seen"), torch.ones(2))
    assert "mlp.0.seen" not in model.state_dict()


def test_random_numbers_go_on_where_they_were(tmp_path):
    state, running = of(model := small_model())
    drawn = torch.rand(4)
    restore(state, model, {}, running, path=tmp_path)
    assert torch.equal(torch.rand(4), drawn)


def test_the_layout_tells_models_apart():
    first, wider, other = nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3).double()
    assert layout(first) == layout(nn.Linear(2, 3))
    assert layout(first)["weights"] == 9
    assert len({layout(model)["layout"] for model in (first, wider, other, nn.Sequential(first))}) == 4


def test_the_layout_in_checkpoints_of_before_is_that_of_today():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    assert layout(model) == {"class": "Sequential", "weights": 9, "layout": "991d20f9039293b8"}


def test_a_buffer_that_modules_share_is_there_by_each_name():
    """A model that keeps one for each, as a copy does that was made by hand, takes both."""
    model = small_model()
    model.mlp[0].register_buffer("largest", model.largest, persistent=False)
    assert set(of(model)[0]["buffers"]) == {"largest", "mlp.0.largest"}


@pytest.mark.parametrize(
    ("saved", "wanted", "says"),
    [
        ({"config": {"lr": 0.1}}, {}, "config: {'lr': 0.1} in the checkpoint, None now"),
        ({}, {"config": {"lr": 0.1}}, "config: None in the checkpoint, {'lr': 0.1} now"),
        ({"plan": {"sites": {"a": "b"}}}, {"plan": None}, "plan: {'sites': {'a': 'b'}} in the checkpoint, None now"),
        ({"beside": {"a": 1}}, {"beside": {"a": 2}}, "beside.a: 1 in the checkpoint, 2 now"),
        ({"beside": {"a": 1, "b": 2}}, {"beside": {"a": 1}}, "beside.b: 2 in the checkpoint, None now"),
        ({"beside": {"valve": 1}}, {"beside": {"valve": 2}}, "beside.valve: 1 in the checkpoint, 2 now"),
    ],
)
def test_a_run_of_another_kind_is_told_by_what_it_lacks(tmp_path, saved, wanted, says):
    save(tmp_path, step=1, state={}, identity=saved)
    assert load_newest(tmp_path, identity=saved).step == 1
    with pytest.raises(CheckpointRefused, match="belongs to another run") as error:
        load_newest(tmp_path, identity=wanted)
    assert error.value.why == (says,)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({"plan": {"sites": {}, "wholes": {}, "turned": []}}, {"plan": {"sites": {}}}),
        ({"beside": {"valve": 1, "a": {"chains": 2, "b": 3}}}, {"beside": {"a": {"b": 3}}}),
        ({"beside": {"valve": 1, "chain_recipes": None}}, {"beside": None}),
    ],
)
def test_what_earlier_versions_noted_of_layers_that_ran_alone_is_passed_over(tmp_path, saved, wanted):
    save(tmp_path, step=1, state={}, identity=saved)
    assert load_newest(tmp_path, identity=wanted).step == 1


@pytest.mark.parametrize("flush", [0, 1, 2, 3])
def test_whichever_flush_finds_the_disk_full_the_reason_is_told_and_one_can_resume(folder, monkeypatch, flush):
    """Of the state, the manifest, the folder that they are in, and the one that holds it."""
    flushed, sync = itertools.count(), os.fsync

    def full(handle):
        if next(flushed) == flush:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointNotSaved) as error:
        save(folder, step=30, state={"step": 30}, identity={})
    assert "No space left on device" in error.value.why[0]
    assert "free space" in error.value.way_out
    assert flush == 3 or sorted(folder.iterdir()) == before
    assert load_newest(folder).step in ((20, 30) if flush == 3 else (20,))
