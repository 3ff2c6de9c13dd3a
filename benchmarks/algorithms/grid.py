import sys, time, torch, collections
sys.path.insert(0, ".spike")
import loka.kernels.gemm.adapters.cublaslt as C
from loka.kernels.gemm.adapters.torch_scaled import TORCH_FAST, TORCH
from loka.kernels.gemm.adapters.cublaslt import CUBLASLT_FAST, CUBLASLT
from loka.core.recipe import RECIPES, Gemm
from loka.core.problem import Problem
from loka.kernels.gemm import algorithms as A
dev = torch.device("cuda"); E = torch.float8_e4m3fn
R = 8
def graph(f):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s): f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=s): f()
    return g
def timed(arms, turns=5):
    got = collections.defaultdict(list)
    for turn in range(turns):
        for key, g in arms.items():
            s_, e_ = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay(); s_.record(); g.replay(); e_.record(); torch.cuda.synchronize(); got[key].append(s_.elapsed_time(e_) * 1000 / R)
    return {k: sorted(v)[len(v)//2] for k, v in got.items()}
def one(m, n, k):
    from loka.core.numerics.reference import Quantized
    sets = {}
    for mode, rec in (("row", "rowwise_e4m3"), ("tensor", "tensorwise_e4m3")):
        ca, cb = RECIPES[rec].casts(Gemm.OUTPUT)
        sets[mode] = []
        for i in range(2):
            a = torch.randn(m, k, device=dev, dtype=torch.bfloat16).to(E); b = torch.randn(n, k, device=dev, dtype=torch.bfloat16).to(E)
            sa, sb = (torch.ones(m, 1, device=dev), torch.ones(n, 1, device=dev)) if mode == "row" else (torch.ones(1, 1, device=dev),) * 2
            sets[mode].append((Quantized(a, sa, ca), Quantized(b, sb, cb)))
    side = torch.randn(m * 64, device=dev)
    def f(kernel, mode, **kw):
        def g():
            for i in range(R):
                side.relu_(); o = kernel.run(*sets[mode][i % 2], torch.bfloat16, **kw)
        return g
    arms = {"relu": graph(lambda: [side.relu_() for _ in range(R)]), "row": graph(f(TORCH_FAST, "row")), "t": graph(f(TORCH_FAST, "tensor"))}
    p = Problem(gemm=Gemm.OUTPUT, m=m, n=n, k=k, dtype="bfloat16", target="sm_90")
    for al in range(CUBLASLT_FAST.algorithms(p, RECIPES["tensorwise_e4m3"])):
        arms[al] = graph(f(CUBLASLT_FAST, "tensor", algorithm=al))
    us = timed(arms); base = us.pop("relu"); us = {k: v - base for k, v in us.items()}
    best = min((k for k in us if k != "row"), key=us.get)
    t0 = time.perf_counter(); got = A.faster_than_torch("torch_fast", p, torch.device("cuda", 0)); spent = (time.perf_counter() - t0) * 1e3
    told = int(got.partition("@")[2]) if got else "t"
    print(f"{m:6} {n:5} {k:5}  row {us['row']:7.2f} first {us['t']:7.2f} best {us[best]:7.2f} #{best} | chosen {told} {us[told]:7.2f} in {spent:.0f} ms | best/row {us[best]/us['row']:.3f} chosen/first {us[told]/us['t']:.3f} missed {us[told]/us[best]:.3f}", flush=True)
one(4096, 512, 512)
began = time.time()
for k in (512, 1024, 1280, 4096, 6144, 8192):
    for n in (256, 512, 1024, 1536, 3456):
        for m in (2048, 8192, 16384, 65536):
            if m * n * 2 > 3e8 or time.time() - began > float(sys.argv[1]): continue
            try: one(m, n, k)
            except Exception as e: print(m, n, k, "failed", type(e), str(e)[:300], flush=True)
print(time.time() - began)
