"""Optimizers of recommendation models: Adam for dense weights, row-wise AdaGrad for tables.

Row r of a table, with its duplicate gradients summed first:

    acc_r += mean_j(g_rj^2)
    w_r   -= lr * g_r / (sqrt(acc_r) + eps)

One float32 per row instead of one per weight; the same update as "exact row-wise AdaGrad"
in FBGEMM's table-batched embeddings, which TorchRec uses.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from loka.core.exceptions import LokaError
from loka.distributed.dense_sharding import sparse_tables
from loka.distributed.tables.sharded_tables import FusedTables, sharded_modules
from loka.train.config import TrainConfig


class RowwiseAdagrad(torch.optim.Optimizer):
    """For tables [rows, width] with sparse or dense gradients; rows without a gradient stay."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float = 0.1, eps: float = 1e-8) -> None:
        if not lr >= 0 or not eps > 0:
            raise ValueError(f"lr={lr} has to be at least 0 and eps={eps} above 0")
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for table in group["params"]:
                if table.ndim != 2:
                    raise ValueError(f"a table has shape [rows, width], not {tuple(table.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._update(table, lr=group["lr"], eps=group["eps"])
        return loss

    def _update(self, table: torch.Tensor, *, lr: float, eps: float) -> None:
        state = self.state[table]
        if not state:
            state["sum"] = torch.zeros(table.shape[0], dtype=torch.float32, device=table.device)
        gradient = table.grad
        assert gradient is not None
        if not gradient.is_sparse:
            gradient = gradient.float()
            accumulated = state["sum"].add_(gradient.square().mean(dim=1))
            table.sub_((_rate(accumulated, lr, eps) * gradient).to(table.dtype))
            return
        rows, values = (_summed_by_row if gradient.is_cuda else _coalesced)(gradient)
        # A row stands once, or adds zeros besides, so these sums have one order.
        accumulated = state["sum"].index_add_(0, rows, values.square().mean(dim=1))[rows]
        table.index_add_(0, rows, (-_rate(accumulated, lr, eps) * values).to(table.dtype))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # The base class casts state to the dtype of the table, which would round the
        # accumulators of a bf16 table.
        tables = [table for group in self.param_groups for table in group["params"]]
        for index, saved in state_dict["state"].items():
            table = tables[index]
            self.state[table]["sum"] = saved["sum"].to(table.device, torch.float32, copy=True)


def _coalesced(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_summed_by_row`, without the zeros at the end. On a CPU nothing waits for the count, and
    zeros would be work.
    """
    gradient = gradient.float().coalesce()
    return gradient.indices()[0], gradient.values()


def _summed_by_row(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers int64 [N] and float32 sums [N, width] of a sparse gradient of N values: each row once, ascending,
    with the sum of its values, and then the last row again with zeros. Only the device knows how many rows there
    are, and `coalesce` would wait for it, at every table in every step.
    """
    if gradient._nnz() == 0:
        return gradient._indices()[0], gradient._values().float()
    ids, order = gradient._indices()[0].sort(stable=True)
    place = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).long()]).cumsum(0)
    lengths = torch.zeros_like(ids).index_add_(0, place, torch.ones_like(ids))
    values = gradient._values()[order].float()
    sums = torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0.0)
    return ids[-1:].repeat(len(ids)).index_copy_(0, place, ids), sums


def _rate(accumulated: torch.Tensor, lr: float, eps: float) -> torch.Tensor:
    return (lr / (accumulated.sqrt() + eps)).unsqueeze(1)


def build_optimizers(model: nn.Module, config: TrainConfig) -> dict[str, torch.optim.Optimizer]:
    """The optimizers by kind: `sparse` for tables whose module has `sparse=True`, `fused` for tables that TorchRec
    shards, `dense` for all other weights.

    A kind without weights has no entry. Raises LokaError where the config asks for what tables that learn in backward
    cannot do.
    """
    sharded = sharded_modules(model)
    if sharded:
        _require_fused(config)
    fused = {weight for module in sharded.values() for weight in module.parameters()}
    tables = set(sparse_tables(model))
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight not in fused]
    dense = [weight for weight in trained if weight not in tables]
    sparse = [weight for weight in trained if weight in tables]
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if dense:
        device = dense[0].device
        cuda = device.type == "cuda"  # where one kernel moves a quarter of the bytes of torch's default
        if config.step == "graph" and cuda:  # what a graph reads has to lie on the device
            rate = torch.tensor(config.lr, device=device)
            optimizers["dense"] = torch.optim.Adam(dense, lr=rate, capturable=True, fused=True)
        else:
            optimizers["dense"] = torch.optim.Adam(dense, lr=config.lr, fused=cuda or None)
    if sparse:
        optimizers["sparse"] = RowwiseAdagrad(sparse, lr=config.sparse_lr)
    if sharded:
        optimizers["fused"] = FusedTables(model, lr=config.sparse_lr)
    if not optimizers:
        raise ValueError("the model has no weight that requires a gradient; there is nothing to train")
    return optimizers


def _require_fused(config: TrainConfig) -> None:
    if config.accumulate > 1:
        raise LokaError(
            f"accumulate is {config.accumulate}, and tables that TorchRec shards learn in each backward",
            why=["each part of a batch would be an update of its own"],
            way_out="leave --accumulate out, and take more ranks or a smaller --batch-size",
        )
    if config.average != "none":
        raise LokaError(
            f"average is {config.average!r}, a copy of all weights, and TorchRec's tables lie on many ranks",
            way_out="leave --average out, or train with --engine torch",
        )
