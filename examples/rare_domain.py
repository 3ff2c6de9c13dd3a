"""A domain of 2 % of the rows that the mean hides: budgets for all rows, and for the domain too (docs/segments.md).

On a CPU the cost in speed is in multiplications, INT8 emulated; on a GPU in times of compiled training steps.
"""

import copy

import torch
from torch import nn

import loka
from loka.core.timing import time_interleaved
from loka.planner.frontier import base_time, saved_time
from loka.probe import renew_effects
from loka.train import Segments
from loka.train.automatic.joint_effect import joint_effect

cuda = torch.cuda.is_available()
device = torch.device("cuda" if cuda else "cpu")
half, width, rows, rate = (2048, 4096, 8192, 3e-4) if cuda else (16, 64, 512, 3e-3)


def world(count, seed, share=0.02):
    """In the rare domain a counter (the last column) stands beside columns 300 times smaller, which tell."""
    g = torch.Generator().manual_seed(seed)
    rare = torch.rand(count, generator=g) < share
    told, small = torch.randn(2, count, half, generator=g).unbind()
    told[rare], small[~rare] = 0.0, 0.0
    z = torch.where(rare, 2 * small[:, :4].sum(1), told[:, :4].sum(1))
    small = 0.3 * small
    small[rare, -1] = 100.0
    return torch.cat([told, small], 1).to(device), (torch.rand(count, generator=g) < z.sigmoid()).float().to(device)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2 * half, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=rate)
x, y = world(100_000, seed=0, share=0.3)  # so that it knows the domain well
for step in range(390):
    part = slice(256 * step, 256 * (step + 1))
    loss = nn.functional.binary_cross_entropy_with_logits(model(x[part])[:, 0], y[part])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rate * (1 - step / 390)

with loka.Probe(model, every=1, effect_samples=0) as probe:
    for x in world(2 * rows, seed=1)[0].split(rows):
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            model(x).sum().backward()
batches = zip(*(part.split(1024) for part in world(60_000, seed=2)), strict=True)
segments = Segments(("domain = 7",), lambda batch: torch.where(batch[0][:, -1] > 0, 0, -1), by="counter")
stats = renew_effects(
    model,
    probe.stats(),
    batches,
    segments=segments,
    forward=lambda model, batch: model(batch[0]),
    labels=lambda batch: batch[1],
)
print(stats.parts["domain = 7"])

report = loka.measure(stats, device=device, candidates=("loka_int8:int8_row" if cuda else "emulated:int8_row",))
budgets = {"mean": loka.Budget(ne=2e-2, min_sqnr_db=None)}
budgets["domain too"] = loka.Budget(ne=2e-2, segments={"domain = 7": 1e-2}, min_sqnr_db=None)
plans = {name: loka.plan(report, budget) for name, budget in budgets.items()}
held = world(60_000, seed=3)[0]
rare = held[held[:, -1] > 0]
unit = "time of bf16's GEMMs" if cuda else "multiplications"
for name, plan in plans.items():
    print(name, plan.summary())
    there = joint_effect(model, plan, [rare], forward=lambda model, x: model(x), part="domain = 7")
    print(f"measured there: {there.measured}; saves {saved_time(plan) / base_time(report):.1%} of all {unit}")
assert plans["domain too"].kl_of("domain = 7").high < 1e-2 < plans["mean"].kl_of("domain = 7").low


def step_of(plan):
    twin = copy.deepcopy(model)
    if plan is not None:
        loka.convert(twin, plan)
    call = torch.compile(twin)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(held[:rows]).float().mean()
        return torch.autograd.grad(loss, list(twin.parameters()))

    step()
    return step


if cuda:
    steps = {"bf16": step_of(None)} | {name: step_of(plan) for name, plan in plans.items()}
    for name, timing in time_interleaved(steps, baseline="bf16", keep=tuple(plans), device=device).timings.items():
        print(f"{name}: {timing.microseconds} us, bf16 over it {timing.speedup}")
