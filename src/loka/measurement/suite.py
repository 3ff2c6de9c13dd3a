"""A list of GEMM shapes as statistics, so that shapes are measured exactly as a model is.

Each distinct linear shape is a layer of a model that exists on paper only: input [M, K],
weight [N, K], grad_output [M, N], independent normal numbers of the sizes that a layer in
training sees. Shapes that several models share are one layer, with all their names.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from loka.core.problem import DTYPES
from loka.core.records.gemm_bench import SuiteLayer, Use
from loka.core.records.stats import LinearStats, Stats
from loka.core.signature import LinearShape, ModelSignature
from loka.statistics.draw import normal
from loka.zoo.shapes import GemmShape

SPREAD = 0.5  # of the input's features: their scales span e^+-1, so per-row scales have work to do
_INPUT_STD = 1.0
_GRAD_STD = 1e-4  # of grad_output: a mean loss over some thousand rows

_GIB = 1 << 30
_MEMORY_SHARE = 0.9  # of all memory; the rest is workspaces and fragmentation


@dataclass(frozen=True, kw_only=True)
class Suite:
    """`layers` by path; the other rows of the list by name: what they are, or what they need."""

    layers: Mapping[str, SuiteLayer]
    not_covered: Mapping[str, str] = field(default_factory=dict)
    too_large: Mapping[str, str] = field(default_factory=dict)


def suite_of(shapes: Iterable[GemmShape], *, weight_dtype: str = "bfloat16", memory: int) -> Suite:
    """The linear shapes as layers, each distinct one once.

    Args:
        weight_dtype: of the stored weights, which counts for the memory they need.
        memory: bytes that the device has; a shape that needs more is left out, and said so.
    """
    uses: dict[tuple[int, int, int], list[Use]] = {}
    not_covered: dict[str, str] = {}
    too_large: dict[str, str] = {}
    for shape in shapes:
        use = Use(model=shape.model, site=shape.site, count=shape.count)
        if shape.kind != "linear":
            not_covered[_unique(str(shape), not_covered)] = (
                f"{shape.kind}, {shape.batch} x {shape.m}x{shape.k}x{shape.n}"
            )
            continue
        needed = bytes_needed(shape.m, shape.k, shape.n, weight_dtype)
        if needed > memory * _MEMORY_SHARE:
            too_large[_unique(str(shape), too_large)] = (
                f"{shape.m}x{shape.k}x{shape.n} needs about {needed / _GIB:.0f} GiB, "
                f"this device has {memory / _GIB:.0f} GiB"
            )
            continue
        uses.setdefault((shape.m, shape.k, shape.n), []).append(use)
    layers: dict[str, SuiteLayer] = {}
    for (rows, in_features, out_features), several in uses.items():
        path = _unique(f"{_slug(several[0].model)}/{_slug(several[0].site)}", layers)
        layers[path] = SuiteLayer(rows=rows, in_features=in_features, out_features=out_features, uses=tuple(several))
    return Suite(layers=layers, not_covered=not_covered, too_large=too_large)


def bytes_needed(rows: int, in_features: int, out_features: int, weight_dtype: str = "bfloat16") -> int:
    """About the most memory that measuring a layer takes at once.

    The error of a grad_weight: the weight, its float32 reference, a result, and three float64
    copies in which they are compared. The time of a layer: operands, two FP8 copies of each, and
    results, all of true size; up to a gigabyte of operands is rotated.
    """
    weight = in_features * out_features
    everything = rows * in_features + rows * out_features + weight
    held = DTYPES[weight_dtype].itemsize
    error = weight * (held + 4 + 2 + 3 * 8)
    time = everything * (2 + 2 + 2) + weight * 2 * (held - 2) + _GIB
    return max(error, time) + _GIB


def total_memory(device: torch.device) -> int:
    """Bytes of memory that `device` has; what is free now would make a suite depend on the moment."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def suite_stats(suite: Suite, *, weight_dtype: str = "bfloat16") -> Stats:
    """Statistics of the suite for `measure`: bfloat16 activations, all gradients wanted."""
    shapes, layers = {}, {}
    for order, (path, layer) in enumerate(suite.layers.items()):
        shapes[path] = LinearShape(in_features=layer.in_features, out_features=layer.out_features, bias=False)
        operands = {
            "input": normal(layer.in_features, std=_INPUT_STD, spread=SPREAD, seed=0),
            "weight": normal(layer.in_features, rows=layer.out_features, std=layer.in_features**-0.5),
            "grad_output": normal(layer.out_features, std=_GRAD_STD, spread=SPREAD, seed=1),
        }
        layers[path] = LinearStats(
            rows=layer.rows,
            calls=1,
            order=order,
            dtype="bfloat16",
            weight_dtype=weight_dtype,
            needs_input_grad=True,
            needs_weight_grad=True,
            operands=operands,
        )
    return Stats(model=ModelSignature(name="GEMM suite", layers=shapes), steps=1, sampled_steps=1, layers=layers)


def _slug(text: str) -> str:
    """Letters, digits, dots and underscores: nothing that a pattern of sites would take for its own."""
    text = re.sub(r"-+>", "x", text.lower().replace("+", "_plus_"))
    return re.sub(r"[^a-z0-9.-]+", "_", text).strip("_") or "unnamed"


def _unique(name: str, taken: Mapping[str, object]) -> str:
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name} ({count})" if " " in name else f"{name}_{count}"
    return found
