"""Six layers, eagerly, on one GPU: bf16, sites by single launches, and by graphs; host and whole ms of a step.

    python benchmarks/unasked/eager.py 2048 6144

The second arm by the code of 460ee1fe (`git archive 460ee1fe src`, PYTHONPATH) is what it was before. NOT YET RUN.
"""

import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import torch
from shared import Tower, planned

import loka
from loka.nn.linears import signature

switch = getattr(loka.nn, "eager_graphs", lambda on: None)


def made(kind, width, batch, device):
    torch.manual_seed(0)
    model = Tower(width, 6).to(device)
    if kind != "bf16":
        loka.convert(model, planned(signature(model), Namespace(plan=None, narrowest=16, batch_size=batch), device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(batch, width, device=device)

    def step():
        switch(None if kind == "graphs" else False)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()

    return model, step


def timed(step, count=30):
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * host / count, 1e3 * (time.perf_counter() - began) / count


width, batch = int(sys.argv[1]), int(sys.argv[2])
arms = {kind: made(kind, width, batch, torch.device("cuda", 0)) for kind in ("bf16", "single", "graphs")}
for _ in range(5):
    found = {kind: timed(step) for kind, (_, step) in arms.items()}
    base = found["bf16"][1]
    print({kind: f"host {h:.2f} whole {w:.2f} ({w / base:.2f}x)" for kind, (h, w) in found.items()}, flush=True)
pairs = zip(arms["single"][0].parameters(), arms["graphs"][0].parameters(), strict=True)
print("weights equal bit for bit:", all(torch.equal(a, b) for a, b in pairs))
