"""bf16 and loka, eager: host and whole ms of a step; six layers 2048, batch 6144."""
import sys, time, os
from argparse import Namespace
sys.path.insert(0, "benchmarks/distributed")
import torch
from shared import Tower, planned
import loka
from loka.nn.linears import signature
def made(kind, width, batch, device):
    torch.manual_seed(0)
    model = Tower(width, 6).to(device)
    if kind != "bf16":
        told = Namespace(plan=None, narrowest=16, batch_size=batch)
        loka.convert(model, planned(signature(model), told, device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(batch, width, device=device)
    def step():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
    return model, step
def timed(step, count):
    torch.cuda.synchronize(); began = time.perf_counter()
    for _ in range(count): step()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * host / count, 1e3 * (time.perf_counter() - began) / count
width, batch, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", 0)
arms = {k: made(k, width, batch, device) for k in ("bf16", "loka")}
for k, (_, step) in arms.items():
    for _ in range(12): step()
torch.save([p.detach().cpu() for p in arms["loka"][0].parameters()], out)
rows = []
for _ in range(5):
    r = {k: timed(step, 30) for k, (_, step) in arms.items()}
    rows.append(r)
    print(os.path.dirname(loka.__file__)[-24:], width, {k: f"host {h:.2f} whole {w:.2f}" for k, (h, w) in r.items()}, f"ratio {r['loka'][1]/r['bf16'][1]:.2f}", flush=True)
try:
    from loka.kernels.triton import graphs as g
    print("captures", g._kept.captures, "launches", g._kept.launches, "kept", len(g._kept.graphs))
except ImportError: pass
if len(sys.argv) > 4:
    from torch.profiler import profile, ProfilerActivity
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        for _ in range(5): arms["loka"][1]()
        torch.cuda.synchronize()
    print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=50))
    import cProfile, pstats
    c = cProfile.Profile(); c.enable()
    for _ in range(50): arms["loka"][1]()
    c.disable(); pstats.Stats(c).sort_stats("tottime").print_stats(25)
