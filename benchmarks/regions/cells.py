"""What is measured: a model, its batch, and whether it is trained or served."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from models import MLP, DCNv2, FeedForward, GatedFeedForward, Stack, Tower
from torch import nn

import loka
from loka.zoo import HistoryTable, build, dense_part
from loka.zoo.inventory import FEATURES, Features

Scale = Callable[[int], int]
"""A width as it is, or a small one in its place."""

FIELDS, DENSE = 26, 13
CRITEO = Features()
TINY_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Input:
    """A tensor of the batch: its shape without the rows, and whether it gets a gradient; or lengths 0 to `longest`."""

    shape: tuple[int, ...] = ()
    grad: bool = False
    longest: int | None = None


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
            if wanted.longest is None:
                x = torch.randn(rows, *wanted.shape, device=device, generator=generator).bfloat16()
                tensors.append(x.requires_grad_(wanted.grad and self.trained))
            else:
                tensors.append(torch.linspace(0, wanted.longest, rows, device=device).long())
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
    return lambda scale: [Input(shape=(DENSE,)), Input(shape=(FIELDS, scale(dim)), grad=True)]


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
    mods: bool = False,
    features: Features = CRITEO,
    tasks: int = 1,
    trained: bool = True,
    gate: bool = False,
) -> Cell:
    """The dense part of a model of the zoo; with `mods` as benchmarks/wukong_step has it."""

    def sized(scale: Scale) -> tuple[str, int, int, int]:
        """The size, fields, their width, and events."""
        fields, events = features.sparse, features.events or 0
        if scale(dim) == dim:
            return size, fields, dim, events
        return "hybrid" if "hybrid" in size else "small", min(fields, FIELDS), 16, min(events, 32)

    def make(scale: Scale) -> nn.Module:
        chosen, fields, width, events = sized(scale)
        whole = build(
            kind,
            dense_features=features.dense,
            vocab_sizes=(1,) * fields,
            size=chosen,
            history=HistoryTable(column=fields - 1) if events else None,
            tasks=tasks,
        )
        model = dense_part(whole)
        for path, parameter in model.named_parameters():
            if "embeddings" in path:  # the table of one row a field that nobody looks up
                parameter.requires_grad_(False)
        if mods:
            block = 256 if width == dim else 16
            loka.mods.apply(model, [loka.mods.NoBias(), loka.mods.BlockNorm(block), loka.mods.HardSwish()])
        return model

    def inputs(scale: Scale) -> Sequence[Input]:
        _, fields, width, events = sized(scale)
        found = [Input(shape=(features.dense,)), Input(shape=(fields, width), grad=True)]
        if events:
            found += [Input(shape=(events, width), grad=True), Input(longest=events)]
        return found

    return Cell(
        name=f"{'' if trained else 'serve_'}{name}_{rows}",
        rows=rows,
        make=make,
        inputs=inputs,
        loss="bce" if tasks == 1 else "given",
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
    _zoo("dcnv2_zoo", "dcnv2", "mlperf", 128, 8192, gate=True),
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
    _zoo("wukong_2gf_without_mods", "wukong", "2gf", 160, 6144),
    *(_zoo("wukong_2gf", "wukong", "2gf", 160, rows, mods=True, trained=False) for rows in (512, 2048, 8192)),
    _zoo("kunlun", "kunlun", "paper", 384, 64, features=FEATURES["kunlun", "paper"]),
    _zoo("interformer", "interformer", "paper", 160, 1024, features=FEATURES["interformer", "paper"]),
    _zoo("hstu", "hstu", "dlrmv3", 512, 128, features=FEATURES["hstu", "hybrid512"]),
    _zoo("hstu_hybrid", "hstu", "hybrid512", 512, 128, features=FEATURES["hstu", "hybrid512"]),
    _zoo("dhen", "dhen", "elfm", 160, 1024, features=FEATURES["dhen", "elfm"]),
    _zoo("mmoe", "mmoe", "wide", 128, 32768, tasks=2),
    _zoo("dlrm", "dlrm", "mlperf", 128, 32768),
    *(_dcnv2_raw(rows, trained=False) for rows in (2048, 16384)),
]

CELLS: dict[str, Cell] = {cell.name: cell for cell in _ALL}
