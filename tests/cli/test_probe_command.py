import hashlib
import signal
import sys

import pytest
from command_line import loka

from loka.core.numerics.effect import NO_PROMISE
from loka.core.records.stats import Stats

FEW = ("--model", "dlrm", "--rows", "3000", "--batch-size", "128")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probed")
    text = loka("train", *FEW, "--checkpoints", "run", cwd=folder)
    assert "held out" in text
    return folder


def digests(folder):
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_effects_are_of_rows_behind_those_of_training(tmp_path):
    text = loka("probe", *FEW, "--every", 6, "--out", "stats", cwd=tmp_path)
    assert "effects on KL/H: of 6 of 6 sites from 595 rows that training has not used" in text
    for layer in Stats.load(tmp_path / "stats").layers.values():
        for effect in layer.effects.values():
            assert (effect.count, effect.spread) == (595, 595), "none has faded; a row of each batch is left out"
            assert effect.log_variance > 0, "H is that of the labels, counted"
            assert 0.05 < effect.probabilities[0] / effect.count < 0.5


@pytest.mark.slow
def test_a_checkpoint_is_probed_as_it_is(folder):
    before = digests(folder / "run")
    text = loka("probe", *FEW, "--checkpoint", "run", "--out", "stats", cwd=folder)
    assert "after 19 steps" in text
    assert "no weight moved" in text
    assert "other rows" not in text
    assert digests(folder / "run") == before
    stats = Stats.load(folder / "stats")
    assert stats.final_rate == 0, "its rate fell along a cosine to the end"
    assert not stats.skipped
    for layer in stats.layers.values():
        assert set(layer.operands) == {"input", "weight", "grad_output"}
        assert layer.rows == 128
        assert max(effect.count for effect in layer.effects.values()) == 127 + 127 + 87
    again = loka("probe", *FEW, "--checkpoint", "run/step-00000019", "--out", "again", cwd=folder)
    assert "step-00000019" in again
    assert Stats.load(folder / "again").digest() == stats.digest()


@pytest.mark.slow
def test_a_checkpoint_of_no_use_is_refused(folder, tmp_path):
    assert "holds no checkpoint" in loka("probe", *FEW, "--checkpoint", "none", cwd=folder, fails=2)
    other = loka("probe", "--model", "dcnv2", "--rows", 3000, "--checkpoint", "run", cwd=folder, fails=2)
    assert "trained another model than this" in other
    longer = loka("probe", *FEW, "--rows", 4000, "--checkpoint", "run", "--out", tmp_path / "longer", cwd=folder)
    assert "trained on other rows than these: ids" in longer, "held out are rows from 3200 on"
    few = ("--model", "dlrm", "--rows", "3000", "--batch-size", "2048")
    assert "smaller --batch-size" in loka("probe", *few, "--checkpoint", "run", cwd=folder, fails=2)


@pytest.mark.slow
def test_labels_that_are_all_equal_promise_nothing(tmp_path):
    """Before, NE was nan and the plan promised 3.6e-5."""
    rows = ["label,a,b", *(f"0,{at % 7 / 7},{at % 13}" for at in range(1200))]
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    (tmp_path / "schema.json").write_text('{"label": "label", "dense": ["a"], "sparse": ["b"]}')
    command = ("--model", "dlrm", "--batch-size", 64, "--data", "rows.csv", "--schema", "schema.json")
    text = loka("probe", *command, "--every", 4, "--out", "stats", cwd=tmp_path)
    assert "no KL/H is measured and none is promised" in text
    assert "every site: nothing can be promised on KL/H: all 960 labels are negative" in text
    for layer in Stats.load(tmp_path / "stats").layers.values():
        assert not layer.effects
        assert layer.no_effect.startswith(NO_PROMISE)


def test_interrupted_it_says_of_which_steps_the_statistics_are(tmp_path, monkeypatch):
    """They can be measured like those of all steps, and the trainer spoke of checkpoints that a probe has none of."""

    def progress(*_):
        def track(items, what, total):
            for place, item in enumerate(items):
                if place == 5:
                    signal.raise_signal(signal.SIGINT)
                yield item

        return track

    monkeypatch.setattr(sys.modules["loka.cli.commands.probe"], "ProgressBars", progress)
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        text = loka("probe", *FEW, "--every", 3, "--out", "stats", cwd=tmp_path, fails=130)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert "interrupted: what stats holds, if anything, is of the steps so far" in text
    assert "checkpoint" not in text
    assert 0 < Stats.load(tmp_path / "stats").steps < 19
