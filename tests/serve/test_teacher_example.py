import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "examples"))
example = import_module("teacher")
SIZES = "--seeds 1 --history 4096 --stream 512 --windows 2 --held 256 --batch 128 --max-age 200"


def touched(student, loss):
    student.zero_grad()
    loss.backward(retain_graph=True)
    moved = {name: weight.grad for name, weight in student.named_parameters() if weight.grad is not None}
    return {name.partition(".")[0] for name, grad in moved.items() if grad.to_dense().any()}


def test_the_teachers_label_reaches_neither_the_main_head_nor_the_adapter():
    rows = next(example.Sizes().batches(0, 0, 64, 64))
    vocab_sizes = example.SyntheticClicks(rows=1, seed=0).vocab_sizes
    front = example.Front(dense_features=13, vocab_sizes=vocab_sizes, dim=8, bottom=(32,))
    student = example.Student(example.DLRM(front, top=(64, 32)), latent_width=24)
    latents, hit = torch.randn(64, 24, requires_grad=True), (torch.arange(64) % 2).float()
    main, aux = student(rows.dense, rows.sparse, latents, hit)
    told = {"fp8": {"logit": torch.randn(64)}}
    clicks, both = (
        example.loss_of(example.ARMS[name], main, aux, rows, told) for name in (example.PLAIN, example.FULL)
    )
    assert touched(student, clicks) == {"shared", "adapter", "main"}
    assert touched(student, both - clicks) == {"shared", "aux"}
    assert touched(student, both) == {"shared", "adapter", "main", "aux"}
    assert latents.grad is None, "latents are behind a stop of the gradient"
    with torch.no_grad():
        moved, _ = student(rows.dense, rows.sparse, torch.randn(64, 24), hit)
    assert torch.equal(moved != main, hit.bool()), "a row without a latent reads none"


def test_stores_differ_in_rounding_alone():
    rows = next(example.Sizes().batches(0, 0, 64, 64))
    told = {name: {"latent": torch.randn(64, 24)} for name in ("fp8", "bf16")}
    none = torch.empty(0, dtype=torch.int64), torch.empty(0, 24)
    empty = example.Latents.of(*none, teacher="T", version=0, written=0)
    stores = example.Stores({"fp8": empty, "bf16": empty}, {})
    full, exact = example.ARMS[example.FULL], example.Arm(latents="float32")
    assert not any(stores.read(arm, rows, now=0)[1].any() for arm in (full, exact))
    stores.write(rows, told, version=1, written=3)
    (low, hit), (high, same) = (stores.read(arm, rows, now=8, max_age=5) for arm in (full, exact))
    assert hit.all()
    assert torch.equal(hit, same)
    last = dict(zip(example.pairs(rows).tolist(), told["fp8"]["latent"], strict=True))
    assert torch.equal(high, torch.stack([last[key] for key in example.pairs(rows).tolist()]))
    assert 0 < float((low - high).abs().max()) <= float(high.abs().max()) / 16
    for arm, now in ((example.ARMS[example.PLAIN], 8), (full, 9)):  # no latents; too old
        assert not any(found.any() for found in stores.read(arm, rows, now=now, max_age=5))


def test_a_history_too_short_to_probe_is_refused(capsys):
    with pytest.raises(SystemExit):
        example.main(["--history", "512"])
    assert "and 16 of the history" in capsys.readouterr().err


@pytest.mark.slow
def test_the_example_runs_and_counts(capsys):
    """Held-out rows hit where an earlier row of the stream has their pair, counted here without a store."""
    (outcome,) = example.main(SIZES.split())
    printed = capsys.readouterr().out
    assert all(name in printed for name in example.ARMS)
    last = {}
    for place, batch in enumerate(example.Sizes().batches(0, 4096, 512, 128)):
        last |= dict.fromkeys(example.pairs(batch).tolist(), 256 * (place // 2 + 1))
    keys = example.pairs(next(example.Sizes().batches(0, 4608, 256, 256))).tolist()
    ages = [512 - last[key] for key in keys if key in last]
    hits = [age for age in ages if age <= 200]
    assert 0 < len(hits) < len(ages) < 256
    assert outcome.numbers["hits"] == len(hits) / 256
    assert outcome.numbers["too old"] == (len(ages) - len(hits)) / 256
    assert outcome.numbers["age, rows"] == pytest.approx(sum(hits) / len(hits))
    assert outcome.numbers["FP8 sites"] > 0
    logits = outcome.logits
    assert all(len(found) == 256 and found.isfinite().all() for found in logits.values())
    assert not torch.equal(logits[example.FULL], logits[example.PLAIN])
