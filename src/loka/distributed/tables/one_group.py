"""Rows that replicas trained apart, as one group of all their ranks would have made them.

With a loss that is the mean over a replica's own rows of data, one group's gradient of a row is G = sum_r G_r / R,
and row-wise AdaGrad, V += |G|^2 / D and w -= lr G / (sqrt(V) + eps), is not linear in it: the mean of replicas'
momentum grows by mean_r |G_r|^2 / D. Of a row that one replica alone has looked up that is R times as much, the c
of momentum-scaled AdaGrad (arXiv 2508.03854); where replicas agree it is as much, and most rows lie between.
What a replica sends tells its gradients, summed over the K steps since the last exchange:

    sum_k |G_rk|^2 = D (V_r - V0)
    sum_k G_rk     = (w0 - w_r) (sqrt(V_r) + eps) / lr = S_r,    no longer than sqrt(K D (V_r - V0))
    D (V - V0)     = (sum_r D (V_r - V0) + sum_{r != s} <S_r, S_s> / K) / R^2,    at least |S|^2 / K, S = sum_r S_r / R
    w              = w0 - lr S / (sqrt(V) + eps),    no further from w0 than the furthest replica

The first two bounds are Cauchy-Schwarz's; x / sqrt(V0 + x^2) grows with x, whence the last. Of one step all of it is
exact, and S_r is as long as its bound whatever the rate is by now. Of more, replicas have gone ways of their own, V_r
has grown within them, and <S_r, S_s> / K is what products of gradients of one step sum to in expectation where any
order of the steps is as likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Change = tuple[torch.Tensor, Sequence[torch.Tensor]]  # of a replica: indices among the rows; of w [n, D], of V


@dataclass(frozen=True, kw_only=True)
class AdaGrad:
    """Row-wise AdaGrad: its rate, and what it adds to the root of V."""

    lr: float
    eps: float


def as_one_group(
    before: Sequence[torch.Tensor], changes: Sequence[Change], adagrad: AdaGrad, steps: int
) -> list[torch.Tensor]:
    """w [rows, D] and V of all rows, from w0 and V0 and what each replica changed of them in `steps` steps.

    A rate of zero hides where gradients point: they count as independent then. V beyond float32 stays, and w too.
    """
    w0, v0 = before[0], before[1].flatten()
    replicas, inverse = len(changes), 1 / adagrad.lr if adagrad.lr else 0.0
    moved, total = torch.zeros_like(w0), torch.zeros_like(w0)  # sums of lr S_r, and of S_r / sqrt(D) within its bound
    squares, own, furthest = torch.zeros_like(v0), torch.zeros_like(v0), torch.zeros_like(v0)
    for indices, (of_w, of_v) in changes:
        square = of_v.flatten().clamp_min(0)
        length = (steps * square).clamp_max(torch.finfo(v0.dtype).max).sqrt()
        root = (v0[indices] + of_v.flatten()).clamp(0, torch.finfo(v0.dtype).max).sqrt() + adagrad.eps
        step = -of_w * root[:, None]
        if steps == 1:
            summed = _as_long(step, length)
        else:
            summed = _no_longer(step * inverse / w0.shape[1] ** 0.5, length)
        moved.index_add_(0, indices, step)
        total.index_add_(0, indices, summed)
        squares.index_add_(0, indices, square)
        own.index_add_(0, indices, summed.square().sum(dim=1))
        furthest[indices] = torch.maximum(furthest[indices], of_w.norm(dim=1))
    together = total.square().sum(dim=1)
    grown = torch.maximum(squares + (together - own) / steps, together / steps) / replicas**2
    v = v0 + grown
    root = v.sqrt() + adagrad.eps
    w = w0 - _no_longer(moved / (replicas * torch.where(root > 0, root, 1))[:, None], furthest)
    beyond = v0.isinf()
    return [torch.where(beyond[:, None], w0, w), torch.where(beyond, v0, v).view_as(before[1])]


def _no_longer(x: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Rows of x [rows, D], those shortened that are longer than `most`."""
    return x * (most / _lengths(x)).clamp_max(1)[:, None]


def _as_long(x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Rows of x, each as long as told; those of zeros stay."""
    return x / _lengths(x)[:, None] * length[:, None]


def _lengths(x: torch.Tensor) -> torch.Tensor:
    return x.norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
