"""Training and judging the proof's runs: several arms of one seed side by side on one device.

Rows lie on the device. A step of an arm, tables and optimizers included, is one CUDA graph
(train/steps/graphed.py) on a stream of its own; the arms of a seed take each batch in turn, so that small
kernels share the GPU. Nothing is compiled. Tables have dense gradients here, with which row-wise AdaGrad does
the same. On a CPU steps run eagerly.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from loka.data import SyntheticClicks
from loka.data.batch import Batch
from loka.train.average import Weights, as_averaged, averaged_weights, due
from loka.train.config import AverageKind, TrainConfig
from loka.train.optim import build_optimizers
from loka.train.schedule import rate_factor, schedulers
from loka.train.steps.graphed import graphed

NAMES = ("dense", "sparse", "sequence", "lengths", "label")
"""Of a row; `sequence` and `lengths` only where rows have a history."""
BLOCK = 8192


@dataclass(frozen=True)
class Rows:
    """Rows on a device, a `Source`: dense [N, D] float32, sparse [N, F] int32, label [N] float32.

    With a history also sequence [N, L] int32 and lengths [N] int32; else None.
    """

    dense: torch.Tensor
    sparse: torch.Tensor
    sequence: torch.Tensor | None
    lengths: torch.Tensor | None
    label: torch.Tensor

    @property
    def rows(self) -> int:
        return len(self.label)

    @property
    def identity(self) -> str:
        return f"synthetic rows on the device, {self.rows}"

    def part(self, first: int, count: int) -> Rows:
        several = [getattr(self, name) for name in NAMES]
        return Rows(*(None if one is None else one[first : first + count] for one in several))

    @property
    def features(self) -> tuple[torch.Tensor, ...]:
        """What a model is called with."""
        return tuple(one for name in NAMES[:-1] if (one := getattr(self, name)) is not None)

    def batches(self, batch_size: int, *, start: int = 0) -> Iterator[Batch]:
        for at in range(start * batch_size, self.rows, batch_size):
            few = self.part(at, batch_size)
            ids = {name: one.long() for name in NAMES[1:-1] if (one := getattr(few, name)) is not None}
            yield Batch(dense=few.dense, label=few.label, **ids)


def generate(folder: Path, *, rows: int, seed: int, history: int, workers: int) -> None:
    """`folder`/{dense,sparse,label}.npy of the synthetic world, sequences too with `history`; done once."""
    done = folder / "done"
    if done.exists() and done.read_text() == f"{rows} {seed} {history}":
        return
    folder.mkdir(parents=True, exist_ok=True)
    for left in (done, *(folder / f"{name}.npy" for name in NAMES)):  # of another world
        left.unlink(missing_ok=True)
    world = SyntheticClicks(rows=rows, seed=seed)
    shapes: dict[str, tuple[int, ...]] = {
        "dense": (rows, world.dense_features),
        "sparse": (rows, len(world.vocab_sizes)),
        "label": (rows,),
    }
    if history:
        shapes |= {"sequence": (rows, history), "lengths": (rows,)}
    for name, shape in shapes.items():
        kind = np.float32 if name in ("dense", "label") else np.int32
        np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=kind, shape=shape)
    parts = max(workers * 4, 1)
    fresh = multiprocessing.get_context("spawn")  # threads of this process do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=fresh) as pool:
        jobs = [pool.submit(_generate_part, folder, rows, seed, history, part, parts) for part in range(parts)]
        for job in jobs:
            job.result()
    done.write_text(f"{rows} {seed} {history}")


def _generate_part(folder: Path, rows: int, seed: int, history: int, part: int, parts: int) -> None:
    torch.set_num_threads(1)
    first = sum(SyntheticClicks(rows=rows, seed=seed, shard=at, shards=parts).rows for at in range(part))
    into = {name: np.load(path, mmap_mode="r+") for name in NAMES if (path := folder / f"{name}.npy").exists()}
    world = SyntheticClicks(rows=rows, seed=seed, history=history, shard=part, shards=parts)
    for batch in world.batches(BLOCK):
        for name, tensor in batch.tensors().items():
            into[name][first : first + len(batch)] = tensor.numpy()
        first += len(batch)


def load(folder: Path, device: str) -> Rows:
    def read(path: Path) -> torch.Tensor | None:
        return torch.from_numpy(np.load(path)).to(device) if path.exists() else None

    return Rows(*(read(folder / f"{name}.npy") for name in NAMES))  # type: ignore[arg-type]


@dataclass
class Trained:
    """A run of one arm that has ended. `mean_logits` are those of the mean of the last tenth's weights."""

    model: nn.Module
    logits: np.ndarray
    final_rate: float
    how: str
    mean_logits: np.ndarray | None = None


class _Run:
    """One arm under way."""

    def __init__(self, model: nn.Module, config: TrainConfig, steps: int, batch: tuple[torch.Tensor, ...]) -> None:
        self.model, self.config, self.steps = model, config, steps
        self.optimizers = build_optimizers(model, config)
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.sparse = False
        if config.device == "cuda":
            for group in self.optimizers["sparse"].param_groups:
                group["lr"] = torch.tensor(group["lr"], device="cuda")
        self.schedulers = schedulers(self.optimizers, config, steps)
        self.average = averaged_weights(model, config, steps)
        self.stream = torch.cuda.Stream() if config.device == "cuda" else None
        self._step = graphed(self._learn, *batch, model=model, optimizers=self.optimizers.values())

    def step(self, number: int, batch: tuple[torch.Tensor, ...]) -> None:
        with _on(self.stream):
            self._step(*batch)
            for scheduler in self.schedulers.values():
                scheduler.step()
            if self.average is not None and due(number + 1, self.steps, self.config):
                self.average.update_parameters(Weights(self.model))

    def close(self) -> str:
        how = repr(self._step)
        self._step.reset()
        return how

    def _learn(self, *batch: torch.Tensor) -> torch.Tensor:
        *features, label = batch
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        loss = F.binary_cross_entropy_with_logits(predict(self.model, *features), label)
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
        return loss


def train_arms(
    build: Callable[[], nn.Module],
    arms: Sequence[Callable[[nn.Module], object]],
    rows: Rows,
    held_out: Rows,
    *,
    config: TrainConfig,
    averaged: int | None = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Trained]:
    """Each arm from the same weights over the same batches; the `averaged`-th keeps a mean of its weights."""
    steps = rows.rows // config.batch_size
    size = config.batch_size

    def batch(source: Rows, at: int) -> tuple[torch.Tensor, ...]:
        few = source.part(at * size, size)
        return *few.features, few.label

    runs = []
    for place, arm in enumerate(arms):
        torch.manual_seed(config.seed)
        model = build().to(config.device)
        arm(model)
        kind: AverageKind = "tail" if place == averaged else "none"
        runs.append(_Run(model, replace(config, average=kind), steps, batch(rows, 0)))
    _sync(config)
    began = time.perf_counter()
    for number in range(steps):
        for run in runs:
            run.step(number, batch(rows, number))
        if number == 20:
            _sync(config)
            began = time.perf_counter()
    _sync(config)
    seconds = time.perf_counter() - began
    say(f"{1e3 * seconds / max(steps - 21, 1):.2f} ms a step of {len(runs)} arms")
    found = []
    rate = rate_factor(steps - 1, steps, config)
    for run in runs:
        how = run.close()
        logits = evaluate(run.model, held_out, config)
        mean_logits = None
        if run.average is not None:
            with as_averaged(run.model, run.average, config=config):
                mean_logits = evaluate(run.model, held_out, config)
        found.append(Trained(run.model, logits, rate, how, mean_logits))
    return found


@torch.no_grad()
def evaluate(model: nn.Module, rows: Rows, config: TrainConfig, *, bf16: bool = True) -> np.ndarray:
    """Logits [N] float32 in eval mode, in batches as large as training's: scales of tensors depend on that.

    Under bf16 autocast as in training, or all in float32, where what a site's error changes can be seen
    alone: any change of an activation makes bf16 round the rest of the model otherwise.
    """
    size, training = config.batch_size, model.training
    model.eval()
    out = torch.empty(rows.rows, device=config.device)
    whole = rows.rows // size * size
    if config.device == "cuda" and whole >= 4 * size:
        given = [torch.empty_like(one) for one in rows.part(0, size).features]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for buffer, one in zip(given, rows.features, strict=True):
                buffer.copy_(one[:size])
            for _ in range(2):
                predict(model, *given, bf16=bf16)
        torch.cuda.current_stream().wait_stream(side)
        torch.clear_autocast_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            z = predict(model, *given, bf16=bf16)
        torch.clear_autocast_cache()
        for at in range(0, whole, size):
            for buffer, one in zip(given, rows.features, strict=True):
                buffer.copy_(one[at : at + size])
            graph.replay()
            out[at : at + size] = z
    else:
        whole = 0
    for at in range(whole, rows.rows, size):
        few = rows.part(at, size)
        out[at : at + size] = predict(model, *few.features, bf16=bf16)
    model.train(training)
    return out.cpu().numpy()


def predict(model: nn.Module, dense: torch.Tensor, *ids: torch.Tensor, bf16: bool = True) -> torch.Tensor:
    """Logits [B] float32."""
    with torch.autocast(dense.device.type, dtype=torch.bfloat16, enabled=bf16):
        return model(dense, *(one.long() for one in ids)).float()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _sync(config: TrainConfig) -> None:
    if config.device == "cuda":
        torch.cuda.synchronize()


def divergence(z: np.ndarray, low: np.ndarray) -> np.ndarray:
    """KL of each row [N] of predictions with logits `low` from those with `z`."""
    z, low = z.astype(np.float64), low.astype(np.float64)
    p = 1 / (1 + np.exp(-z))
    return np.maximum(p * (z - low) + np.logaddexp(0, low) - np.logaddexp(0, z), 0)


def entropy(labels: np.ndarray) -> float:
    q = float(labels.mean())
    return -q * math.log(q) - (1 - q) * math.log1p(-q)
