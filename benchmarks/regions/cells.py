"""What is measured: a model, its batch, and whether it is trained or served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from models import MLP, DCNv2, FeedForward, GatedFeedForward, Stack, Tower
from torch import nn

import loka
from loka.zoo import build, dense_part

Scale = Callable[[int], int]
"""A width as it is, or a small one in its place."""

FIELDS, DENSE = 26, 13
TINY_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor of the batch: its shape without the rows, and whether it gets a gradient."""

    shape: tuple[int, ...]
    grad: bool


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One line of the table.

    Attributes:
        loss: "bce" for models of logits [B]; "given" for parts of a model: a random gradient of the output.
        gate: one of the few that decide.
    """

    name: str
    rows: int
    make: Callable[[Scale], nn.Module]
    inputs: Callable[[Scale], Sequence[Input]]
    loss: Literal["bce", "given"] = "given"
    trained: bool = True
    gate: bool = False

    def model(self, device: torch.device, *, tiny: bool) -> nn.Module:
        """The same weights at every call on a device."""
        torch.manual_seed(0)
        with device:
            model = self.make(tiny_width if tiny else full_width)
        return model.to(device)

    def batch(self, device: torch.device, *, tiny: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Random normal inputs in bfloat16, and labels of which one in five is a click."""
        rows = TINY_ROWS if tiny else self.rows
        generator = torch.Generator(device).manual_seed(1)
        tensors = []
        for wanted in self.inputs(tiny_width if tiny else full_width):
            x = torch.randn(rows, *wanted.shape, device=device, generator=generator).bfloat16()
            tensors.append(x.requires_grad_(wanted.grad and self.trained))
        return tensors, (torch.rand(rows, device=device, generator=generator) < 0.2).float()


def full_width(width: int) -> int:
    return width


def tiny_width(width: int) -> int:
    """A sixteenth, in steps of 16, which FP8 GEMMs ask for."""
    return max(16, round(width / 256) * 16)


def _one(width: int) -> Callable[[Scale], Sequence[Input]]:
    return lambda scale: [Input(shape=(scale(width),), grad=True)]


def _features(dim: int) -> Callable[[Scale], Sequence[Input]]:
    """Dense features, which get no gradient, and pooled embeddings, which do."""
    return lambda scale: [
        Input(shape=(DENSE,), grad=False),
        Input(shape=(FIELDS, scale(dim)), grad=True),
    ]


def _tower_mods(rows: int, widths: Sequence[int], label: str, *, gate: bool = False) -> Cell:
    """Linear - BlockNorm(256) - HardSwish, made of Linear - LayerNorm - SiLU by LoKA's mods."""

    def make(scale: Scale) -> nn.Module:
        model = Tower([scale(width) for width in widths], nn.SiLU, norm=nn.LayerNorm)
        block = min(256, scale(256))
        loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(block), loka.mods.HardSwish()])
        return model

    return Cell(name=f"tower_mods_{rows}x{label}", rows=rows, make=make, inputs=_one(widths[0]), gate=gate)


def _tower(
    kind: str, rows: int, width: int, activation: type[nn.Module], norm: type[nn.Module] | None, gate: bool
) -> Cell:
    return Cell(
        name=f"{kind}_{rows}x{width}",
        rows=rows,
        make=lambda scale: Tower([scale(width)] * 7, activation, norm=norm),
        inputs=_one(width),
        gate=gate,
    )


def _ffn(kind: str, rows: int, width: int, hidden: int, block: type[nn.Module], gate: bool) -> Cell:
    return Cell(
        name=f"{kind}_{rows}x{width}-{hidden}",
        rows=rows,
        make=lambda scale: Stack(block, scale(width), scale(hidden)),
        inputs=_one(width),
        gate=gate,
    )


def _mlp(name: str, rows: int, widths: Sequence[int], *, logit: bool) -> Cell:
    return Cell(
        name=f"{name}_{rows}",
        rows=rows,
        make=lambda scale: MLP([scale(width) for width in widths], logit=logit),
        inputs=_one(widths[0]),
        loss="bce" if logit else "given",
    )


def _dcnv2_raw(rows: int, *, trained: bool = True, gate: bool = False) -> Cell:
    def make(scale: Scale) -> nn.Module:
        return DCNv2(
            dense=DENSE,
            fields=FIELDS,
            bottom=[scale(width) for width in (512, 256, 128)],
            layers=3,
            rank=scale(512),
            over=[scale(width) for width in (1024, 1024, 512, 256)],
        )

    return Cell(
        name=f"{'' if trained else 'serve_'}dcnv2_raw_{rows}",
        rows=rows,
        make=make,
        inputs=_features(128),
        loss="bce",
        trained=trained,
        gate=gate,
    )


def _zoo(
    name: str,
    kind: str,
    size: str,
    dim: int,
    rows: int,
    *,
    mods: bool,
    trained: bool = True,
    gate: bool = False,
) -> Cell:
    """The dense part of a model of the zoo; with `mods` as benchmarks/wukong_step has it."""

    def make(scale: Scale) -> nn.Module:
        tiny = scale(dim) != dim
        whole = build(kind, dense_features=DENSE, vocab_sizes=(1,) * FIELDS, size="small" if tiny else size)
        model = dense_part(whole)
        for path, parameter in model.named_parameters():
            if "embeddings" in path:  # the table of one row a field that nobody looks up
                parameter.requires_grad_(False)
        if mods:
            block = 16 if tiny else 256
            loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(block), loka.mods.HardSwish()])
        return model

    return Cell(
        name=f"{'' if trained else 'serve_'}{name}_{rows}",
        rows=rows,
        make=make,
        inputs=_features(dim),
        loss="bce",
        trained=trained,
        gate=gate,
    )


_ALL = [
    _tower_mods(8192, (1024,) * 7, "1024", gate=True),
    _tower("relu", 8192, 1024, nn.ReLU, None, gate=True),
    _tower("relu", 8192, 2048, nn.ReLU, None, gate=True),
    _tower("ln_silu", 8192, 2048, nn.SiLU, nn.LayerNorm, gate=True),
    _ffn("ffn", 8192, 768, 3072, FeedForward, gate=True),
    _dcnv2_raw(16384, gate=True),
    _zoo("dcnv2_zoo", "dcnv2", "mlperf", 128, 8192, mods=False, gate=True),
    _zoo("wukong_2gf", "wukong", "2gf", 160, 6144, mods=True, gate=True),
    _tower_mods(4096, (1024,) * 7, "1024"),
    _tower_mods(2048, (2048,) * 7, "2048"),
    _tower_mods(6144, (2048,) * 7, "2048"),
    _tower_mods(6144, (4096,) * 7, "4096"),
    _tower_mods(6144, (4608, 8192, 8192, 8192), "4608-8192"),
    _tower_mods(65536, (512,) * 7, "512"),
    _tower_mods(2048, (512,) * 7, "512"),
    _tower_mods(8192, (768,) * 7, "768"),
    _tower_mods(1024, (4096,) * 7, "4096"),
    _tower_mods(131072, (256,) * 7, "256"),
    _tower("relu", 4096, 1024, nn.ReLU, None, gate=False),
    _mlp("mlp_top", 32768, (480, 1024, 1024, 512, 256), logit=False),
    _mlp("mlp_over", 8192, (3456, 1024, 1024, 512, 256), logit=True),
    _ffn("swiglu", 8192, 1024, 2816, GatedFeedForward, gate=False),
    _zoo("wukong_0.5gf", "wukong", "0.5gf", 160, 6144, mods=True),
    _zoo("wukong_2gf_without_mods", "wukong", "2gf", 160, 6144, mods=False),
    *(_zoo("wukong_2gf", "wukong", "2gf", 160, rows, mods=True, trained=False) for rows in (512, 2048, 8192)),
    *(_dcnv2_raw(rows, trained=False) for rows in (2048, 16384)),
]

CELLS: dict[str, Cell] = {cell.name: cell for cell in _ALL}
