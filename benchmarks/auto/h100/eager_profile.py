"""Eager six-layer tower: step times, host profile."""
import sys, time, cProfile, pstats, io
from argparse import Namespace
from pathlib import Path
sys.path.insert(0, "benchmarks/distributed")
import torch
from shared import Tower, planned
import loka
from loka.nn.linears import signature
dev = torch.device(sys.argv[1]); width = int(sys.argv[2]); batch = int(sys.argv[3])
def made(kind):
    torch.manual_seed(0)
    model = Tower(width, 6).to(dev)
    if kind != "bf16":
        told = Namespace(plan=None, narrowest=16, batch_size=batch)
        loka.convert(model, planned(signature(model), told, dev))
    opt = torch.optim.AdamW(model.parameters(), fused=dev.type == "cuda")
    x = torch.randn(batch, width, device=dev)
    def step():
        opt.zero_grad()
        with torch.autocast(dev.type, torch.bfloat16):
            y = model(x)
        y.float().square().mean().backward()
        opt.step()
    def fwd():
        with torch.autocast(dev.type, torch.bfloat16), torch.no_grad():
            model(x)
    return step, fwd
sync = torch.cuda.synchronize if dev.type == "cuda" else (lambda: None)
def timed(f, n):
    sync(); t = time.perf_counter()
    for _ in range(n): f()
    h = time.perf_counter() - t; sync()
    return 1e3 * h / n, 1e3 * (time.perf_counter() - t) / n
steps = {k: made(k) for k in ("bf16", "loka")}
for k, (step, fwd) in steps.items():
    for _ in range(10): step()
for r in range(3):
    for k, (step, fwd) in steps.items():
        print(k, "step host %.2f all %.2f ms" % timed(step, 30), "fwd host %.2f all %.2f" % timed(fwd, 30), flush=True)
if dev.type == "cuda":
    from torch.profiler import profile, ProfilerActivity
    for k, (step, fwd) in steps.items():
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
            for _ in range(10): step()
            sync()
        print(k); print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60))
        print(p.key_averages().table(sort_by="self_cuda_time_total", row_limit=16, max_name_column_width=60))
step, fwd = steps["loka"]
pr = cProfile.Profile(); pr.enable()
for _ in range(100): fwd()
pr.disable(); sync()
s = io.StringIO(); pstats.Stats(pr, stream=s).sort_stats("tottime").print_stats(40); print(s.getvalue())
# backward's host time, in the main thread: the function's own
from loka.nn import site_gemms
pr = cProfile.Profile()
orig = site_gemms.backward_parts
def wrapped(*a):
    pr.enable()
    try: return orig(*a)
    finally: pr.disable()
site_gemms.backward_parts = wrapped
for _ in range(100): step()
sync()
s = io.StringIO(); pstats.Stats(pr, stream=s).sort_stats("tottime").print_stats(30); print(s.getvalue())
