"""python load_profile.py save|load DEVICE FOLDER CELL"""
import sys, time, json, os
t0 = time.perf_counter()
what, dev, folder, name = sys.argv[1:5]
sys.path[:0] = ["benchmarks/distributed", "benchmarks/regions"]
import torch
t1 = time.perf_counter()
import loka, loka.serve
t2 = time.perf_counter()
from argparse import Namespace
from dataclasses import replace
from cells import CELLS
from shared import planned
from loka.nn.linears import signature
t3 = time.perf_counter()
tiny = dev == "cpu"; device = torch.device(dev)
cell = replace(CELLS[f"serve_{name}_2048"], rows=512, name="x")
model = cell.model(device, tiny=tiny).bfloat16().eval()
if dev == "cuda": torch.cuda.synchronize()
t4 = time.perf_counter()
print(f"import torch {t1-t0:.2f} loka {t2-t1:.2f} bench {t3-t2:.2f} model {t4-t3:.2f}", flush=True)
if what == "save":
    plan = planned(signature(model), Namespace(plan=None, narrowest=16 if tiny else 256, batch_size=2048), device)
    requests, _ = cell.batch(device, tiny=tiny)
    server = loka.serve.freeze(model, plan, calibration=[requests], buckets=[512, 2048, 8192] if not tiny else [16, 32])
    print(f"freeze {time.perf_counter()-t4:.2f}", len(server.card.sites), flush=True)
    server.save(folder)
else:
    import cProfile, pstats, io
    pr = cProfile.Profile() if len(sys.argv) > 5 else None
    if pr: pr.enable()
    b = time.perf_counter()
    server = loka.serve.load(folder, model)
    if dev == "cuda": torch.cuda.synchronize()
    print(f"load {time.perf_counter()-b:.2f}", flush=True)
    if pr:
        pr.disable()
        for by, n in (("cumtime", 110), ("tottime", 40)):
            s = io.StringIO(); pstats.Stats(pr, stream=s).sort_stats(by).print_stats(n); print(s.getvalue())
