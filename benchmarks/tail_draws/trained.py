"""Small trained click models, and the operands of their linear layers batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from loka.data import Batch, SyntheticClicks
from loka.nn.linears import find_linears
from loka.train import TrainConfig, train
from loka.zoo import build

Operands = dict[str, dict[str, torch.Tensor]]
"""By layer and operand, as they are multiplied: bf16, rows first."""


def trained(name: str, *, rows: int, batch_size: int, seed: int) -> tuple[nn.Module, SyntheticClicks]:
    """The zoo's small model after one pass over `rows` synthetic clicks, and the rows after those."""
    source = SyntheticClicks(rows=rows, seed=seed)
    torch.manual_seed(seed)
    model = build(name, dense_features=source.dense_features, vocab_sizes=source.vocab_sizes)
    train(model, source, config=TrainConfig(batch_size=batch_size, schedule="constant", seed=seed))
    return model, SyntheticClicks(rows=rows, seed=seed, first_row=rows)


def operands_of(model: nn.Module, batches: Iterator[Batch]) -> Iterator[Operands]:
    """What flows through every linear layer in forward and backward; the weights stay as they are."""
    found: Operands = {}
    linears, _ = find_linears(model)

    def watch(path: str) -> torch.utils.hooks.RemovableHandle:
        def observe(linear: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            rows = args[0].detach().reshape(-1, args[0].shape[-1]).bfloat16()
            found[path] = {"input": rows, "weight": linear.weight.detach()}
            output.register_hook(lambda g: found[path].update(grad_output=g.reshape(-1, g.shape[-1])))

        return linears[path].register_forward_hook(observe)

    hooks = [watch(path) for path in linears]
    for batch in batches:
        found.clear()
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch.dense, batch.sparse)
        nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.label).backward()
        yield {path: {name: hp.detach().clone() for name, hp in o.items()} for path, o in found.items()}
    for hook in hooks:
        hook.remove()


def some(source: SyntheticClicks, batch_size: int, *, start: int, count: int) -> Iterator[Batch]:
    return itertools.islice(source.batches(batch_size, start=start), count)
