import pytest
import torch
from durable import full
from models import odd_mlp, train_steps
from probed_models import probed
from torch import nn

import loka
from loka.core.exceptions import FileRefused, LokaError, NotWritten, PlanMismatch


def run(model, part, **options):
    with loka.Probe(model, every=2, **options) as probe:
        for rows in part:
            model.zero_grad()
            model(rows).sum().backward()
    return probe.stats()


def test_statistics_of_another_model_are_refused():
    stats = probed(odd_mlp(), 2)
    with pytest.raises(PlanMismatch, match="0 is 13 -> 8"):
        loka.Probe(nn.Sequential(nn.Linear(13, 8)), resume=stats)


@pytest.mark.parametrize("damage", ["truncate tensors", "truncate json", "delete tensors", "edit json"])
def test_damaged_statistics_are_refused(tmp_path, damage):
    probed(odd_mlp(), 2).save(tmp_path)
    record = tmp_path / "stats.json"
    tensors = next(tmp_path.glob("tensors-*"))
    if damage == "truncate tensors":
        tensors.write_bytes(tensors.read_bytes()[:1000])
    elif damage == "delete tensors":
        tensors.unlink()
    elif damage == "truncate json":
        record.write_bytes(record.read_bytes()[:200])
    else:
        record.write_text(record.read_text().replace('"steps": 2', '"steps": 3'))
    with pytest.raises(FileRefused, match="probe again"):
        loka.Stats.load(tmp_path)


def test_resuming_with_another_full_covariance_is_refused():
    stats = probed(odd_mlp(), 2)
    with pytest.raises(LokaError, match="full_covariance"):
        loka.Probe(odd_mlp(), full_covariance=64, resume=stats)


def kept(stats):
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in stats.layers.values()
        for operand in layer.operands.values()
        for tensor in operand.tensors.values()
    )


def test_resuming_from_statistics_for_inference_is_refused():
    """It went on with the rows of requests as the size of training's GEMMs, by which they are timed."""
    stats = probed(odd_mlp(), 1)
    with pytest.raises(LokaError, match="for inference"):
        loka.Probe(odd_mlp(), resume=stats.for_inference(batch=4))


@pytest.mark.slow
def test_memory_is_bounded_and_told():
    """What is told is what the record holds, and two float64 numbers for each Gaussian; it stays."""
    model = nn.Sequential(nn.Linear(13, 30), nn.ReLU(), nn.Linear(30, 1))
    seen = []
    with loka.Probe(model, every=1, full_covariance=20, rank=5) as probe:
        for _ in range(3):
            train_steps(model, 20)  # more than the maxima of the last batches that are kept
            seen.append(probe.memory())
    assert seen[0] == seen[1] == seen[2]
    assert set(seen[0]) == {"input", "weight", "grad_output", "effects"}
    assert all(seen[0].values())
    assert sum(seen[0].values()) == kept(probe.stats()) + 4 * 16
    weights = [13 * 30, 30 * 1]  # their means; then U and V, in full up to 20 and diagonal beyond
    sides = [30 + 13**2, 1 + 30]
    tables = sum(t.nbytes for n, t in all_tensors(probe.stats(), "weight") if n.startswith("depth_"))
    assert seen[0]["weight"] == 4 * (sum(weights) + sum(sides)) + tables


def all_tensors(stats, operand):
    return [item for layer in stats.layers.values() for item in layer.operands[operand].tensors.items()]


def test_a_full_disk_is_told_while_training(tmp_path, monkeypatch):
    model = odd_mlp()
    monkeypatch.setattr("loka.core.storage.files.os.fsync", full)
    with (
        pytest.raises(LokaError, match="No space left on device"),
        loka.Probe(model, every=50, save_to=tmp_path, save_every=1),
    ):
        train_steps(model, 10_000)  # far fewer are run
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_ends_training_is_raised_and_a_failed_save_noted(tmp_path, monkeypatch):
    def fail():
        with loka.Probe(model, every=1, save_to=tmp_path):
            train_steps(model, 1)
            raise KeyError("the user's own")

    model = odd_mlp()
    monkeypatch.setattr("loka.core.storage.files.os.fsync", full)
    with pytest.raises(KeyError) as ended:
        fail()
    assert "No space left on device" in ended.value.__notes__[0]


def test_an_interrupted_run_and_its_rest_learn_the_same_bits(tmp_path):
    """The randomness of a sampled step is a function of the seed and its number."""
    x = [torch.randn(60, 13) for _ in range(8)]
    model = odd_mlp()
    options = {"rows": 20, "depth_rows": 10, "rank": 8, "effect_samples": 60, "effect_step": 16}
    whole = run(model, x, **options)
    run(model, x[:3], **options, save_to=tmp_path)
    both = run(model, x[3:], **options, resume=loka.Stats.load(tmp_path), save_to=tmp_path)
    assert both.digest() == loka.Stats.load(tmp_path).digest() == whole.digest()
    assert (both.steps, both.layers["0"].operands["input"].numbers["count"]) == (8, 4 * 20)


def test_a_folder_that_takes_no_file_is_told_before_the_first_step(tmp_path):
    """It was told when training was over, and what was learnt was gone."""
    (tmp_path / "stats").write_text("no folder")
    model = odd_mlp()
    with pytest.raises(NotWritten, match="cannot write"), loka.Probe(model, save_to=tmp_path / "stats"):
        pytest.fail("no step may begin")
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("inside", [False, True])
def test_statistics_and_reports_behind_a_file_are_refused_by_name(tmp_path, inside):
    """FileExistsError and NotADirectoryError of Python's, which say no way out."""
    stats = probed(odd_mlp(), 1)
    file = tmp_path / "file"
    file.write_text("somebody's")
    folder = file / "stats" if inside else file
    with pytest.raises(NotWritten, match="cannot write"):
        stats.save(folder)
    with pytest.raises(NotWritten, match="cannot write"):
        loka.measure(stats, device="cpu", candidates=["emulated:rowwise_e4m3"], out=folder / "report.json")
    assert file.read_text() == "somebody's"
