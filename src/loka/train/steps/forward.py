"""How a batch goes into a model, and in which precision."""

from __future__ import annotations

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


def predict(model: nn.Module, inputs: tuple[torch.Tensor, ...], precision: Precision) -> torch.Tensor:
    """Logits [B] in float32. Raises LokaError for a model that returns anything else."""
    device = inputs[0].device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
        logits = model(*inputs)
    if not isinstance(logits, torch.Tensor) or logits.shape != inputs[0].shape[:1]:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise LokaError(
            f"the model returns {shape}, not one logit for each of {inputs[0].shape[0]} rows",
            why=["rows have one label here"],
            way_out="return the logits [B] of one task; a model of several trains in a loop of yours, with "
            "loka.Probe, loka.plan and loka.convert around it (docs/ne.md)",
        )
    return logits.float()


def rows_of(batch: Batch, first: int, last: int) -> Batch:
    """Rows [first, last) of a batch."""
    return Batch(**{name: tensor[first:last] for name, tensor in batch.tensors().items()})


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
