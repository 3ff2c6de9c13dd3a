"""torch.set_default_device is the caller's: what LoKA draws and counts on the host lies there all the same."""

import torch
from models import forced_plan
from torch import nn

import loka

POW2 = "emulated:rowwise_e4m3_pow2"


def test_a_probe_does_not_follow_it():
    """Signs were drawn by a generator of the CPU, which a GPU refuses; the meta device has no numbers to add up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    requests = [torch.randn(48, 32) for _ in range(3)]
    with torch.device("meta"):
        with loka.Probe(model, every=1) as probe:
            for x in requests:
                nn.functional.softplus(-model(x)).mean().backward()
        plan = forced_plan(probe.stats(), POW2)
        loka.convert(model, plan)
        model(requests[0]).sum().backward()
    assert {d.candidate for d in plan.decisions.values()} == {POW2}
