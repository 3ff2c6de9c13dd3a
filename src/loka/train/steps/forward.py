"""How a batch goes into a model, and in which precision."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from loka.core.exceptions import LokaError
from loka.data.batch import Batch
from loka.train.config import Precision


def arguments(batch: Batch) -> tuple[torch.Tensor, ...]:
    """What the model is called with: `dense` and `sparse`, then what else the batch has, but the label."""
    return tuple(tensor for name, tensor in batch.tensors().items() if name != "label")


def tasks_in(batch: Batch) -> int:
    return 1 if batch.label.ndim == 1 else batch.label.shape[1]


def predict(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], precision: Precision, *, tasks: int = 1
) -> torch.Tensor:
    """Logits in float32, [B] of one task or [B, tasks], in memory of their own: a block that replays a CUDA graph
    writes to what it returned before. Raises LokaError for a model that returns anything else."""
    device = inputs[0].device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits = model(*inputs)
    rows = inputs[0].shape[0]
    wanted = (rows,) if tasks == 1 else (rows, tasks)
    if not isinstance(logits, torch.Tensor) or logits.shape != wanted:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise LokaError(
            f"the model returns {shape}, not {'one logit' if tasks == 1 else f'{tasks} logits'} for each of "
            f"{rows} rows",
            why=["rows have one label here" if tasks == 1 else f"rows have {tasks} labels here"],
            way_out="return a logit for each label: "
            + ("`.squeeze(1)` at the end of forward makes [B] of [B, 1]; " if shape == (rows, 1) else "")
            + "`loka.zoo.build(..., tasks=)` of the zoo's models; the "
            'labels are those of the schema: "label": "click", or "label": ["click", "buy"] (docs/data.md)',
        )
    return logits.to(torch.float32, copy=True)


@contextlib.contextmanager
def matrix_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Inside, float32 matrices are multiplied on a GPU as `precision` says: in TF32, or in full.

    It is a setting of the process, put back at the end. bf16 leaves it alone: what autocast leaves in float32
    runs as the user has it.
    """
    if device.type != "cuda" or precision == "bf16":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def repeatable(asked: bool) -> Iterator[None]:
    """Inside, torch computes the same bits each time, or raises RuntimeError for an operation that cannot.

    Without it Inductor times a reduction's launches where it first runs and keeps the fastest, which adds up in
    another order, in a cache that other processes write to. Memory is not filled before it is written: that is
    for finding faults, and takes a launch each time.
    """
    if not asked:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]
