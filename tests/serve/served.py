import copy
import math

import pytest
import torch
from torch import nn

import loka
from loka.core.budget import Budget
from loka.core.device import fingerprint
from loka.core.exceptions import NoKernelFits
from loka.core.problem import linear_problem
from loka.core.recipe import Gemm
from loka.core.records.plan import Decision, Plan
from loka.kernels.gemm.registry import require_supported
from loka.nn import signature
from loka.serve import freeze
from loka.serve.packaging.aot import Agreement

ROW, POW2, GROUP = "emulated:rowwise_e4m3", "emulated:rowwise_e4m3_pow2", "emulated:blockwise_e4m3"
TENSOR, BLOCK, TORCH = "emulated:tensorwise_e4m3", "emulated:block128_e4m3", "torch:rowwise_e4m3"
BOTH = {"first": ROW, "second": ROW}
EXACT = Agreement(sizes=(1,), equal=1.0, mean_abs=0.0, max_abs=0.0, sqnr_db=math.inf)


class Tower(nn.Module):
    """dense [B, 13], ids [B] -> logits [B]; odd sides, an embedding, a norm and a logit layer in bf16."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 11)
        self.first = nn.Linear(24, 37)
        self.norm = nn.LayerNorm(37)
        self.second = nn.Linear(37, 30, bias=False)
        self.logit = nn.Linear(30, 1)

    def forward(self, dense, ids):
        x = torch.cat([dense, self.table(ids).to(dense.dtype)], dim=1)
        x = torch.relu(self.norm(self.first(x)))
        return self.logit(torch.relu(self.second(x))).squeeze(1).float()


class Cross(nn.Module):
    """Raw parameters: x0 * (x V W) + x, and stacked experts; x [B, 24] -> [B, 4, 16] and [B]."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(24, 8) * 0.2)
        self.w = nn.Parameter(torch.randn(8, 24) * 0.2)
        self.experts = nn.Parameter(torch.randn(4, 24, 16) * 0.2)

    def forward(self, x):
        y = x * (x @ self.v @ self.w) + x
        each = torch.einsum("bi,eio->beo", y, self.experts)
        return {"each": each, "sum": each.sum(dim=(1, 2))}


def plan_for(model, candidates):
    return plan_of(signature(model), candidates, device=next(model.parameters()).device)


def plan_of(model, candidates, device="cpu"):
    machine = fingerprint(device)
    decisions = {}
    for path, chosen in candidates.items():
        names = (chosen, "hp", "hp") if isinstance(chosen, str) else chosen
        for gemm, candidate in zip(Gemm, names, strict=True):
            shape = model.layers[path]
            problem = linear_problem(
                gemm,
                rows=64,
                in_features=shape.in_features,
                out_features=shape.out_features,
                dtype="bfloat16",
                target=machine.target,
            )
            made = Decision(path=path, problem=problem, candidate=candidate, reason="by hand")
            decisions[made.site] = made
    return Plan(model=model, machine=machine, budget=Budget(), timed=False, decisions=decisions)


def skip_where_missing(candidate):
    """torch 2.11 has no GEMM with scales of rows for a CPU."""
    problem = linear_problem(Gemm.OUTPUT, rows=64, in_features=64, out_features=64, dtype="bfloat16", target="cpu")
    try:
        require_supported(candidate, problem)
    except NoKernelFits:
        pytest.skip(f"this torch has no {candidate} here")


def tower(seed=0):
    torch.manual_seed(seed)
    return Tower().eval()


def rows(count, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(count, 13, generator=generator) * scale
    return dense, torch.randint(0, 50, (count,), generator=generator)


def calibration(batches=4, count=40):
    return [rows(count, seed=100 + batch) for batch in range(batches)]


def frozen(model, candidates, **options):
    return freeze(model, plan_for(model, candidates), **{"calibration": calibration(), **options})


def converted(model, plan):
    return loka.convert(copy.deepcopy(model), plan).eval()


def cross_plan(model, candidate):
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        model(torch.randn(64, 24))["sum"].sum().backward()
    layers = probe.stats().model
    return plan_of(layers, dict.fromkeys(layers.layers, candidate))
