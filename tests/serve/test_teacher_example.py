"""examples/teacher.py, tiny: whose gradient reaches what, what a row may know, and what is counted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from loka.data import Batch
from loka.serve import Latents

EXAMPLE = Path(__file__).parents[2] / "examples" / "teacher.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("teacher_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rows(example: ModuleType, count: int = 64) -> Batch:
    return next(example.batches(0, 0, count, count))


def touched(student: torch.nn.Module, loss: torch.Tensor) -> set[str]:
    """The parts of the student that a loss moves."""
    student.zero_grad()
    loss.backward(retain_graph=True)
    return {
        name.partition(".")[0]
        for name, weight in student.named_parameters()
        if weight.grad is not None
        and bool((weight.grad.coalesce().values() if weight.grad.is_sparse else weight.grad).any())
    }


def test_the_teachers_label_reaches_neither_the_main_head_nor_the_adapter(example: ModuleType) -> None:
    batch = rows(example)
    torch.manual_seed(0)
    front = example.Front(
        dense_features=13,
        vocab_sizes=example.SyntheticClicks(rows=1, seed=0).vocab_sizes,
        dim=8,
        bottom=(32,),
    )
    student = example.Student(example.DLRM(front, top=(64, 32)), latent_width=24)
    latents = torch.randn(64, 24, requires_grad=True)
    hit = (torch.arange(64) % 2).float()
    main, aux = student(batch.dense, batch.sparse, latents, hit)
    part = example.Labelled(batch, {"fp8": {"logit": torch.randn(64)}})
    arm = example.ARMS[example.FULL]

    clicks = example.loss_of(main, aux, part, example.ARMS[example.PLAIN], 1.0)
    both = example.loss_of(main, aux, part, arm, 1.0)
    assert touched(student, clicks) == {"shared", "adapter", "main"}
    assert touched(student, both - clicks) == {"shared", "aux"}
    assert touched(student, both) == {"shared", "adapter", "main", "aux"}
    assert latents.grad is None, "latents are behind a stop of the gradient"

    with torch.no_grad():
        other, _ = student(batch.dense, batch.sparse, latents + 100 * (1 - hit).unsqueeze(1), hit)
        moved, _ = student(batch.dense, batch.sparse, latents * torch.randn(24), hit)
    assert torch.equal(other, main), "a row without a latent reads none"
    assert ((moved != main) == hit.bool()).all()


def test_the_stores_tell_alike_and_differ_in_rounding_alone(example: ModuleType) -> None:
    batch = rows(example)
    told = {name: {"latent": torch.randn(64, 24)} for name in ("fp8", "bf16")}
    empty = Latents.of(
        torch.empty(0, dtype=torch.int64), torch.empty(0, 24), teacher="T", version=0, written=0
    )
    stores = example.Stores({"fp8": empty, "bf16": empty})
    full, exact = example.ARMS[example.FULL], example.Arm("fp8", "fp8", kept="float32")
    for arm in (full, exact):
        values, hit = stores.read(arm, batch, now=0, max_age=5)
        assert not values.any()
        assert not hit.any()
    stores.write([example.Labelled(batch, told)], version=1, now=3)
    (low, hit), (high, same) = (stores.read(arm, batch, now=8, max_age=5) for arm in (full, exact))
    assert hit.all()
    assert torch.equal(hit, same)
    last = {int(key): row for key, row in zip(example.pairs(batch), told["fp8"]["latent"], strict=True)}
    assert torch.equal(high, torch.stack([last[int(key)] for key in example.pairs(batch)]))
    assert 0 < float((low - high).abs().max()) <= float(high.abs().max()) / 16
    for arm, now in ((example.ARMS[example.PLAIN], 8), (full, 9)):  # no latents; too old
        values, hit = stores.read(arm, batch, now=now, max_age=5)
        assert not values.any()
        assert not hit.any()


def test_the_example_runs_and_counts(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Held-out rows hit where an earlier row of the stream has their pair, counted here without a store."""
    arguments = "--seeds 1 --history 4096 --stream 512 --windows 2 --held 256 --batch 128 --max-age 384"
    (outcome,) = example.main(arguments.split())
    printed = capsys.readouterr().out
    assert all(name in printed for name in example.ARMS)

    last = {}
    for place, batch in enumerate(example.batches(0, 4096, 512, 128)):
        last |= dict.fromkeys(example.pairs(batch).tolist(), 256 * (place // 2 + 1))
    ages = [
        512 + 128 * place - last[key]
        for place, batch in enumerate(example.batches(0, 4608, 256, 128))
        for key in example.pairs(batch).tolist()
        if key in last
    ]
    hits = [age for age in ages if age <= 384]
    assert 0 < len(hits) < 256
    assert outcome.hits == len(hits) / 256
    assert outcome.stale == (len(ages) - len(hits)) / 256
    assert outcome.age == pytest.approx(sum(hits) / len(hits))
    assert outcome.fp8_sites > 0
    assert outcome.store_bytes < outcome.float_bytes
    full, plain = outcome.logits[example.FULL], outcome.logits[example.PLAIN]
    assert len(full) == len(outcome.labels) == 256
    assert not torch.equal(full, plain)
    assert all(rate > 0 for rate in outcome.rates.values())
