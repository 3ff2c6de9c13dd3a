"""Networks of round numbers, whose times can be worked out by hand, and a tower on many GPUs of them."""

import sys
from pathlib import Path

import torch
from torch import nn

from loka.core.records.network import Link, Network, Quantity
from loka.scaling.cluster import scale_across

EXAMPLE = Path(__file__).parents[2] / "examples" / "h200-ib.json"
ROWS = 8192


def exactly(value):
    return Quantity(value=value, low=value, high=value, origin="assumed", comment="by hand")


def network(*, inside=(2, 100), between=(5, 10), per_node=8, launch=1, memory=1000, share=1):
    """Links as (alpha in us, bandwidth in GB/s); every end lies at the value."""
    return Network(
        name="by hand",
        gpus_per_node=per_node,
        inside=Link(alpha_us=exactly(inside[0]), bandwidth_gbps=exactly(inside[1])),
        between=Link(alpha_us=exactly(between[0]), bandwidth_gbps=exactly(between[1])),
        launch_us=exactly(launch),
        memory_gbps=exactly(memory),
        elementwise_share=exactly(share),
    )


def tower(width=2048, depth=3):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def across(model=None, **options):
    given = {"network": network(), "gpus": (8, 64), "batch_size": ROWS} | options
    return scale_across(model or tower(), torch.randn(4, 2048), **given)


def with_module(folder, name, code):
    """A fixture's `folder` with a module in it, which the command that runs there may import."""
    (folder / f"{name}.py").write_text(code)
    before = list(sys.path)
    yield folder
    sys.path[:] = before
    sys.modules.pop(name, None)


def row(found, gpus, engine, gather, gradients="bf16"):
    (one,) = (
        row
        for row in found.rows
        if (row.gpus, row.engine, row.gather, row.gradients) == (gpus, engine, gather, gradients)
    )
    return one
