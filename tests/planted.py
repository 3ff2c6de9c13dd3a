"""Kernels that exist for a while: timed without a GPU, or with bugs of the kind that adapters have."""

import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch

from loka.compiler import gemms
from loka.core.recipe import RECIPES
from loka.kernels.gemm import registry


def forget():
    for cached in (registry.all_candidates, registry.candidate_named, registry.require_supported, gemms._run_of):
        cached.cache_clear()


@contextmanager
def registered(*kernels, alone=False):
    try:
        with mock.patch.dict(registry.KERNELS, {kernel.name: kernel for kernel in kernels}, clear=alone):
            forget()
            yield
    finally:
        forget()


def time_on_cpu(monkeypatch):
    """`measure` takes the CPU for a device that can be timed, and compiles no regions ahead."""
    measure = sys.modules["loka.measurement.measure"]
    monkeypatch.setattr(measure, "has_graphs", lambda device: True)
    monkeypatch.setattr(measure, "compile_regions_ahead", lambda *cells: [])


def neighbour(quantized, dim):
    """Every group reads the scale of its neighbour before it in `dim`: 0 rows, 1 columns."""
    return replace(quantized, scale=quantized.scale.roll(1, dims=dim))


def order(quantized):
    """The scales lie in memory row by row and are read as if column by column."""
    return replace(quantized, scale=quantized.scale.t().reshape(quantized.scale.shape))


def transposed(quantized):
    """Block (i, j) reads the scale of block (j, i), where there is one."""
    side = min(quantized.scale.shape)
    scale = quantized.scale.clone()
    scale[:side, :side] = quantized.scale[:side, :side].t()
    return replace(quantized, scale=scale)


def turned_block(quantized):
    """Data: within each 16 of K, the two halves change places."""
    rows, columns = quantized.shape
    whole = columns // 16 * 16
    data = quantized.data.clone().view(torch.uint8)
    halves = data[:, :whole].view(rows, -1, 2, 8).flip(2).reshape(rows, whole)
    return replace(quantized, data=torch.cat([halves, data[:, whole:]], dim=1).view(quantized.data.dtype))


BUGS = {
    "A's scales from the neighbour in K": lambda a, b: (neighbour(a, 1), b),
    "B's scales from the neighbour in K": lambda a, b: (a, neighbour(b, 1)),
    "both scales from the neighbour in K": lambda a, b: (neighbour(a, 1), neighbour(b, 1)),
    "A's scales from the neighbouring row": lambda a, b: (neighbour(a, 0), b),
    "B's scales from the neighbouring row": lambda a, b: (a, neighbour(b, 0)),
    "A's scales in the wrong order": lambda a, b: (order(a), b),
    "B's scales in the wrong order": lambda a, b: (a, order(b)),
    "A's scales transposed": lambda a, b: (transposed(a), b),
    "B's scales transposed": lambda a, b: (a, transposed(b)),
    "A's scales without effect": lambda a, b: (replace(a, scale=torch.ones_like(a.scale)), b),
    "B's scales the wrong way up": lambda a, b: (a, replace(b, scale=b.scale.reciprocal())),
    "A's scales in the place of B's": lambda a, b: (a, replace(b, scale=fitted(a.scale, b.scale))),
    "A's data in another order along K": lambda a, b: (turned_block(a), b),
    "B's data a row further": lambda a, b: (a, replace(b, data=rolled(b.data))),
}


def fitted(scale, like):
    rows, columns = like.shape
    repeated = scale.repeat(-(-rows // scale.shape[0]), -(-columns // scale.shape[1]))
    return repeated[:rows, :columns]


def rolled(data):
    return data.view(torch.uint8).roll(1, dims=0).view(data.dtype)


def broken(kernel, bug, *, name):
    """`kernel` under another name, with the bug. It does not say that it emulates."""

    def run(a, b, dtype, *, algorithm=0):
        return kernel.run(*bug(a, b), dtype, algorithm=algorithm)

    return replace(kernel, name=name, run=run, emulates=False)


@pytest.fixture
def plant(monkeypatch):
    """plant(kernel, recipe, ...) registers a kernel, and recipes that are not registered yet."""

    def register(kernel, *recipes):
        for recipe in recipes:
            monkeypatch.setitem(RECIPES, recipe.name, recipe)
        names = tuple(dict.fromkeys([*kernel.recipes, *(recipe.name for recipe in recipes)]))
        monkeypatch.setitem(registry.KERNELS, kernel.name, replace(kernel, recipes=names))
        forget()

    yield register
    monkeypatch.undo()
    forget()
