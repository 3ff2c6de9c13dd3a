"""Towers of Linear - BlockNorm - activation, and that joined they are as good as by sites."""

import torch
from converted import assert_as_good, converted, plan_for, run
from joint import JointBackend
from torch import nn

from loka.compiler.normed import normed_gemm
from loka.kernels.gemm.epilogue import Activation
from loka.nn import BlockNorm

X = torch.randn(70, 64, generator=torch.Generator().manual_seed(1))
ACTIVATIONS = {
    Activation.NONE: nn.Identity,
    Activation.HARD_SWISH: nn.Hardswish,
    Activation.RELU: nn.ReLU,
    Activation.SWISH: nn.SiLU,
    Activation.GELU: nn.GELU,
}


def tower(activation=Activation.HARD_SWISH, block=64):
    torch.manual_seed(0)
    make = ACTIVATIONS[activation]
    return nn.Sequential(
        nn.Linear(64, 128, bias=False), BlockNorm(128, block), make(),
        nn.Linear(128, 256, bias=False), BlockNorm(256, block), make(),
        nn.Linear(256, 32),
    )  # fmt: skip


def compiled(model, x=X, **options):
    plan = plan_for(model, x, **options)
    by_site, joined = (converted(model, plan) for _ in range(2))
    return by_site, joined, JointBackend()


def check(model, epilogues, x=X, **options):
    """That joined it is as good as by sites, with so many GEMMs that have an epilogue."""
    by_site, joined, backend = compiled(model, x, **options)
    truth, theirs, ours = (run(m, x) for m in (model, by_site, torch.compile(joined, backend=backend)))
    assert not backend.apart
    assert backend.count(normed_gemm) == epilogues
    assert_as_good(joined, by_site, model, ours, theirs, truth)
    return backend
