"""Pairs of one model: as it is, with its sites eagerly, and with them joined."""

import copy

import torch
from models import forced_plan

import loka
from loka.core.records.report import HP

JOINED, INT8 = "emulated:rowwise_e4m3_pow2", "emulated:int8_row"


def plan_for(model, *inputs, autocast=True, force=None):
    """Every site that a region takes, forced into FP8, but for those that `force` names; of a copy, in training."""
    model = copy.deepcopy(model).train()
    with loka.Probe(model, every=1, effect_samples=0) as probe:
        run(model, *inputs, autocast=autocast)
    return forced_plan(probe.stats(), JOINED, *sorted({*(force or {}).values()}), force=force)


def converted(model, plan):
    return loka.convert(copy.deepcopy(model), plan)


def run(model, *inputs, autocast=True, seed=3):
    inputs = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(*inputs)
    generator = torch.Generator().manual_seed(seed)
    (y.float() * torch.randn(y.shape, generator=generator)).sum().backward()
    return y.detach().float(), [x.grad for x in inputs]


def gradients(model):
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def error(found, expected):
    """Relative, in the norm."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_as_good(joined, by_site, plain, found, eagerly, expected):
    """What `run` gave of three models, and their gradients: no further from the plain one than by sites."""
    exact, one_by_one, together = (gradients(model) for model in (plain, by_site, joined))
    triples = [(found[0], eagerly[0], expected[0]), (found[1][0], eagerly[1][0], expected[1][0])]
    triples += [(together[name], one_by_one[name], exact[name]) for name in exact]
    for ours, theirs, truth in triples:
        assert error(ours, truth) <= 1.3 * error(theirs, truth) + 0.005  # bfloat16 of the bias's gradient


def fp8_sites(plan):
    return {d.path for d in plan.decisions.values() if d.candidate != HP}
