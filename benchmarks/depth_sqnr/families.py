"""Operands of many kinds, as a recommendation model has them: each function makes float32 [rows, columns]."""

from __future__ import annotations

from collections.abc import Callable

import torch

Make = Callable[[int, int, torch.Generator], torch.Tensor]


def _normal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator)


def _uniform(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(rows, columns, generator=generator)


def _student(freedom: int) -> Make:
    def make(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        squares = sum(_normal(rows, columns, generator).square() for _ in range(freedom))
        return _normal(rows, columns, generator) / (squares / freedom).sqrt()

    return make


def _lognormal(spread: float, *, zeros: float = 0.0) -> Make:
    def make(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        kept = _uniform(rows, columns, generator) >= zeros
        return (spread * _normal(rows, columns, generator)).exp() * kept

    return make


def _sparse(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return _normal(rows, columns, generator) * (_uniform(rows, columns, generator) >= 0.9)


def _scaled(by_row: float, by_column: float) -> Make:
    def make(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
        row = (by_row * _normal(rows, 1, generator)).exp()
        column = (by_column * _normal(1, columns, generator)).exp()
        return _normal(rows, columns, generator) * row * column

    return make


def _low_rank(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    common = _normal(rows, 4, generator) @ _normal(4, columns, generator)
    return common + 0.1 * _normal(rows, columns, generator)


def _relu_outlier(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    hp = _normal(rows, columns, generator).relu()
    hp[:, columns // 2] *= 60
    return hp


def _tanh(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tanh(2 * _normal(rows, columns, generator))


def _tables(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Embeddings of tables with scales of their own (few distinct rows each), then raw counters."""
    width, parts, done = 16, [], 0
    while done + width < columns:
        table = _normal(37, width, generator) * (1.5 * _normal(1, 1, generator) - 2).exp()
        parts.append(table[torch.randint(37, (rows,), generator=generator)])
        done += width
    parts.append((2 * _normal(rows, columns - done, generator)).exp())
    return torch.cat(parts, dim=1)


def _bf16(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return _normal(rows, columns, generator).bfloat16().float()


FAMILIES: dict[str, Make] = {
    "normal": _normal,
    "normal in bf16": _bf16,
    "student t2": _student(2),
    "student t3": _student(3),
    "lognormal s=1": _lognormal(1),
    "lognormal s=2": _lognormal(2),
    "lognormal s=3": _lognormal(3),
    "zero-inflated lognormal": _lognormal(2, zeros=0.6),
    "sparse 90 %": _sparse,
    "column scales": _scaled(0, 1.5),
    "row scales": _scaled(1.5, 0),
    "gradient-like": _scaled(2, 1),
    "low rank": _low_rank,
    "relu, outlier channel": _relu_outlier,
    "tanh": _tanh,
    "tables and counters": _tables,
}
