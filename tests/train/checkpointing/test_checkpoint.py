import io
import json
import os
import pickle
import re
import resource
from pathlib import Path

import pytest
import torch
from durable import flushed_before, folder_flushed_after, watch_disk

from loka.core.exceptions import CheckpointRefused
from loka.core.storage.files import sha256_of_file, write_record
from loka.train import CheckpointNotSaved, load_newest, save
from loka.train.checkpointing import checkpoint, step_folders

IDENTITY = {"config": {"lr": 0.1, "seed": 0}, "source": "rows"}


def state(step):
    return {"weight": torch.full((1000,), float(step)), "nested": {"count": step, "betas": (0.9, 0.999)}}


@pytest.fixture
def folder(tmp_path):
    for step in (10, 20):
        save(tmp_path, step=step, state=state(step), identity=IDENTITY)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def newest(folder):
    return folder / "step-00000020"


def truncate(path):
    file = path / "state.pt"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_byte(path):
    file = path / "state.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def truncate_manifest(path):
    file = path / "manifest.json"
    file.write_bytes(file.read_bytes()[:-20])


def forge(**fields):
    def damage(path):
        file = path / "manifest.json"
        content = {**json.loads(file.read_text())["content"], **fields}
        write_record(file, kind="training checkpoint", version=2, content=content)

    return damage


def with_number(text):
    def damage(path):
        file = path / "manifest.json"
        file.write_text(file.read_text().replace('"step": 20', f'"step": {text}'))

    return damage


def pipe(name):
    def damage(path):
        (path / name).unlink()
        os.mkfifo(path / name)

    return damage


BREAKAGES = {
    "is not that of a training checkpoint": [
        forge(identity=[1]),
        forge(identity=None),
        forge(step="20"),
        forge(step=20.0),
        forge(sha256=7),
        forge(bytes="1"),
        forge(more=1),
    ],
    "is not complete JSON": [with_number("1e999"), with_number("9" * 400), with_number("NaN")],
    "not a regular file": [pipe("manifest.json"), pipe("state.pt")],
    "checksum of state.pt": [truncate, flip_a_byte],
    "no such file": [lambda path: (path / "manifest.json").unlink()],
    "not complete JSON": [truncate_manifest],
    "No such file": [lambda path: (path / "state.pt").unlink()],
    "its manifest is that of step 20": [
        lambda path: path.rename(path.with_name("step-00000030")),
        lambda path: path.rename(path.with_name("step-00000015")),
    ],
}


def test_round_trip(folder):
    found = load_newest(folder, identity=IDENTITY)
    assert (found.step, found.path, found.skipped) == (20, newest(folder), ())
    assert torch.equal(found.state["weight"], state(20)["weight"])
    assert found.state["nested"] == state(20)["nested"]


def test_an_empty_or_missing_folder_has_none(tmp_path):
    assert load_newest(tmp_path, identity=IDENTITY) is None
    assert load_newest(tmp_path / "missing", identity=IDENTITY) is None


@pytest.mark.parametrize(("reason", "damage"), [(r, d) for r, ds in BREAKAGES.items() for d in ds])
def test_a_damaged_checkpoint_is_skipped_and_named(folder, reason, damage):
    damage(newest(folder))
    found = load_newest(folder, identity=IDENTITY)
    assert found.step == 10
    assert torch.equal(found.state["weight"], state(10)["weight"])
    (line,) = found.skipped
    assert str(folder) in line
    assert reason in line
    assert line.endswith("used step-00000010 instead")


class Payload:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_code_in_a_checkpoint_is_not_run(folder, tmp_path):
    save(folder, step=30, state={"weight": Payload(tmp_path / "ran")}, identity=IDENTITY)
    found = load_newest(folder, identity=IDENTITY)
    assert found.step == 20
    assert "state.pt does not load: it asks for" in found.skipped[0]
    assert "weights_only" not in found.skipped[0]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (pickle.dumps({"weight": 1}, protocol=4), "it holds more than|it is damaged"),
        (b"cos\nsystem\n(S'true'\ntR.", "it asks for|it holds more than"),
        (b"PK\x03\x04" + bytes(100), "it is damaged"),
        (b"", "it is damaged"),
        (b"\x80\x02" + b"]" * 1000, "it holds more than|it is damaged"),
        (b"\x80\x02K\x01.", "holds a int, not a state|does not load"),
    ],
)
def test_bytes_that_are_no_state_give_way_to_the_checkpoint_before(folder, state, says):
    file = newest(folder) / "state.pt"
    file.write_bytes(state)
    forge(sha256=sha256_of_file(file))(newest(folder))
    found = load_newest(folder, identity=IDENTITY)
    assert found.step == 10
    assert re.search(says, found.skipped[0]), found.skipped
    assert "weights_only" not in found.skipped[0]


def test_a_list_is_no_state(folder):
    file = newest(folder) / "state.pt"
    torch.save([1, 2], file)
    forge(sha256=sha256_of_file(file))(newest(folder))
    assert "holds a list, not a state" in load_newest(folder, identity=IDENTITY).skipped[0]


def test_all_broken_lists_each(folder):
    truncate(newest(folder))
    truncate_manifest(folder / "step-00000010")
    with pytest.raises(CheckpointRefused) as error:
        load_newest(folder, identity=IDENTITY)
    assert [line.split(":")[0] for line in error.value.why] == ["step-00000020", "step-00000010"]
    assert error.value.way_out


def test_another_run_is_refused_with_the_differences(folder):
    other = {"config": {"lr": 0.2, "seed": 0, "clip": 1.0}, "source": "rows"}
    with pytest.raises(CheckpointRefused, match="belongs to another run") as error:
        load_newest(folder, identity=other)
    assert error.value.why == (
        "config.clip: None in the checkpoint, 1.0 now",
        "config.lr: 0.1 in the checkpoint, 0.2 now",
    )


def test_a_forged_config_is_that_of_another_run(folder):
    for path in folder.iterdir():
        forge(identity={**IDENTITY, "config": [1]})(path)
    with pytest.raises(CheckpointRefused, match=r"config: \[1\] in the checkpoint"):
        load_newest(folder, identity=IDENTITY)


def test_an_interrupted_save_is_reported_then_removed(folder):
    left = folder / ".unfinished-step-00000030"
    left.mkdir()
    (left / "state.pt").write_bytes(b"half")
    found = load_newest(folder, identity=IDENTITY)
    assert found.step == 20
    assert found.skipped == (f"{left}: its save was interrupted; used step-00000020 instead",)
    save(folder, step=30, state=state(30), identity=IDENTITY)
    assert names(folder) == ["step-00000020", "step-00000030"]
    assert load_newest(folder, identity=IDENTITY).skipped == ()


def test_only_a_half_first_save_starts_over(tmp_path):
    (tmp_path / ".unfinished-step-00000010").mkdir()
    assert load_newest(tmp_path, identity=IDENTITY) is None


def test_keeps_the_newest(folder):
    save(folder, step=30, state=state(30), identity=IDENTITY, keep=2)
    assert names(folder) == ["step-00000020", "step-00000030"]
    save(folder, step=40, state=state(40), identity=IDENTITY, keep=1)
    assert names(folder) == ["step-00000040"]


def test_a_broken_later_checkpoint_does_not_push_out_good_ones(folder):
    truncate(newest(folder))
    save(folder, step=15, state=state(15), identity=IDENTITY, keep=2)
    assert names(folder) == ["step-00000010", "step-00000015", "step-00000020"]
    save(folder, step=20, state=state(20), identity=IDENTITY, keep=2)  # replaces the broken one
    found = load_newest(folder, identity=IDENTITY)
    assert (found.step, found.skipped) == (20, ())


def test_a_real_write_error_leaves_the_previous_checkpoint(folder):
    before = names(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))  # the write itself fails, as on a full disk
    try:
        with pytest.raises(CheckpointNotSaved, match="step-00000030") as error:
            save(folder, step=30, state=state(30), identity=IDENTITY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.why == ("File too large", "step-00000020 is the newest checkpoint, as it was")
    assert names(folder) == before
    assert load_newest(folder, identity=IDENTITY).step == 20


def test_a_checkpoint_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    seen = watch_disk(monkeypatch)
    target = save(tmp_path, step=10, state=state(10), identity=IDENTITY)
    assert flushed_before(seen, target, "/state.pt")
    assert flushed_before(seen, target, f"/.unfinished-{target.name}"), "the names inside of it"
    assert folder_flushed_after(seen, target)


def test_a_state_that_torch_cannot_write_leaves_the_previous_checkpoint(folder, monkeypatch):
    def cannot(*arguments):
        raise RuntimeError("a tensor without storage")

    monkeypatch.setattr("torch.save", cannot)
    before = names(folder)
    with pytest.raises(CheckpointNotSaved, match="a tensor without storage"):
        save(folder, step=30, state=state(30), identity=IDENTITY)
    assert names(folder) == before


def test_the_newest_is_the_largest_number_not_the_last_name(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step=step, state=state(1), identity=IDENTITY)
    assert load_newest(tmp_path, identity=IDENTITY).step == 100_000_000


def test_a_disk_that_takes_a_part_at_a_time_gets_all_of_it(tmp_path, monkeypatch):
    """One write takes 2 GB at most, and the checksum is of what the file holds, right or wrong."""

    class Part(io.FileIO):
        def write(self, data):
            return super().write(data[:1000])

    monkeypatch.setattr(step_folders, "_Written", type("Short", (step_folders._Written, Part), {}))
    weight = torch.arange(1000.0)
    save(tmp_path, step=30, state={"weight": weight}, identity=IDENTITY)
    assert torch.equal(load_newest(tmp_path, identity=IDENTITY).state["weight"], weight)


def test_a_removal_that_is_cut_short_leaves_no_half_under_a_valid_name(folder, monkeypatch):
    monkeypatch.setattr(step_folders.shutil, "rmtree", lambda *given, **named: None)
    save(folder, step=30, state=state(30), identity=IDENTITY, keep=1)
    assert [name for name in names(folder) if name.startswith("step-")] == ["step-00000030"]


def test_what_another_rank_finds_damaged_is_used_by_none(folder, monkeypatch):
    """Each rank looks at some of the files."""
    together, asked = checkpoint.together, []

    def beside_another(*given):
        mine, told = together(*given)
        if told != [""]:
            return mine, told
        asked.append(told)
        return mine, ["", "a checksum differs"] if len(asked) == 1 else told

    monkeypatch.setattr(checkpoint, "together", beside_another)
    found = load_newest(folder, identity=IDENTITY)
    assert found.step == 10
    assert "a checksum differs" in found.skipped[0]
