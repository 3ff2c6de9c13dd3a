import sys, time, logging, threading
logging.basicConfig(level=logging.WARNING); logging.getLogger("loka").setLevel(logging.INFO)
sys.path[:0] = ["benchmarks/regions"]
import torch, loka
from loka.kernels.gemm.algorithms import faster_than_torch
from loka.core.problem import Problem
from loka.core.recipe import Gemm
from loka.core.recording import may_capture_eagerly
from loka.kernels.gemm.run import kernel_runs
from loka.kernels.gemm.adapters import cublaslt_c
print("missing", cublaslt_c.why_missing())
dev = torch.device("cuda", 0)
for m, n, k, f in [(8192, 3456, 512, "torch_fast"), (8192, 512, 3456, "torch_fast"), (16384, 512, 4096, "torch_fast"), (8192, 1024, 1024, "torch_fast"), (65536, 512, 512, "torch_fast"), (8192,768,1536,"torch_fast"), (8192, 1536, 4096, "torch_fast")]:
    p = Problem(gemm=Gemm.OUTPUT, m=m, n=n, k=k, dtype="bfloat16", target="sm_90")
    r = torch.cuda.get_rng_state(), torch.get_rng_state(); t = time.perf_counter()
    print((m, n, k), faster_than_torch(f, p, dev), round(time.perf_counter() - t, 3), "s", torch.equal(r[0], torch.cuda.get_rng_state()) and torch.equal(r[1], torch.get_rng_state()), flush=True)
for m, n, k in [(3456, 512, 8192), (2816, 1024, 8192), (256, 256, 131072), (512, 512, 65536)]:
    p = Problem(gemm=Gemm.GRAD_WEIGHT, m=m, n=n, k=k, dtype="float32", target="sm_90"); t = time.perf_counter()
    print((m, n, k), faster_than_torch("torch", p, dev), round(time.perf_counter() - t, 3), flush=True)
from cells import CELLS
from arms import build, How, ARMS
from pathlib import Path
import dataclasses
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[m for _ in range(2) for m in (nn.Linear(512, 3456), nn.ReLU(), nn.Linear(3456, 512), nn.ReLU())]).cuda()
x = torch.randn(8192, 512, device="cuda")
with loka.Probe(model, every=1) as p:
    with torch.autocast("cuda", torch.bfloat16): model(x).float().square().mean().backward()
stats = p.stats()
model.zero_grad()
t = time.perf_counter(); report = loka.measure(stats, device=dev, candidates=("torch_fast:rowwise_e4m3_pow2", "torch:rowwise_e4m3_pow2", "torch_fast:tensorwise_e4m3"), settings=__import__("loka.measurement.settings", fromlist=["COARSE"]).COARSE); print("measure", time.perf_counter() - t)
plan = loka.plan(report, loka.Budget(ne=None, min_speedup=1.0)); print(plan.summary())
loka.convert(model, plan)
c = torch.compile(model)
for _ in range(2):
    with torch.autocast("cuda", torch.bfloat16): c(x).float().square().mean().backward()
print({k: v for k, v in kernel_runs().items() if "cublaslt" in k[0]})
print(loka.regions(model))
print([t.name for t in threading.enumerate()], may_capture_eagerly(0))
