import sys, time, torch, collections
from loka.kernels.gemm.registry import candidate_named, KERNELS
from loka.core.recipe import RECIPES, Gemm
from loka.core.problem import Problem
from loka.core.numerics.reference import Quantized
dev = torch.device("cuda"); E = torch.float8_e4m3fn; R = 4
def graph(f):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s): f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=s): f()
    return g
def one(m, n, k):
    ca, cb = RECIPES["tensorwise_e4m3"].casts(Gemm.GRAD_WEIGHT)
    sets = [(Quantized(torch.randn(m, k, device=dev, dtype=torch.bfloat16).to(E), torch.ones(1, 1, device=dev), ca), Quantized(torch.randn(n, k, device=dev, dtype=torch.bfloat16).abs().to(E), torch.ones(1, 1, device=dev), cb)) for _ in range(2)]
    p = Problem(gemm=Gemm.GRAD_WEIGHT, m=m, n=n, k=k, dtype="float32", target="sm_90")
    side = torch.randn(1 << 20, device=dev)
    names = ["torch", "loka_split"] + [f"cublaslt@{i}" for i in range(KERNELS["cublaslt"].algorithms(p, RECIPES["tensorwise_e4m3"]))] + ["torch_fast", "loka_split_fast", "cublaslt_fast@0"]
    def f(name):
        kern, _, al = name.partition("@")
        def g():
            for i in range(R): side.relu_(); o = KERNELS[kern].run(*sets[i % 2], torch.float32, algorithm=int(al or 0))
            return o
        return g
    arms = {"relu": graph(lambda: [side.relu_() for _ in range(R)])}; 
    for name in names:
        try: arms[name] = graph(f(name))
        except Exception as e: print(name, str(e)[:80])
    got = collections.defaultdict(list)
    for turn in range(5):
        for key, g in arms.items():
            s_, e_ = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay(); s_.record(); g.replay(); e_.record(); torch.cuda.synchronize(); got[key].append(s_.elapsed_time(e_) * 1000 / R)
    us = {k: sorted(v)[2] for k, v in got.items()}; base = us.pop("relu"); us = {k: v - base for k, v in us.items()}
    exact = sets[0][0].data.double() @ sets[0][1].data.double().t(); den = sets[0][0].data.double().abs() @ sets[0][1].data.double().abs().t()
    err = {x: float(((KERNELS[x.partition("@")[0]].run(*sets[0], torch.float32, algorithm=int(x.partition("@")[2] or 0)).double() - exact).abs() / den).max()) for x in ("torch", "loka_split", "cublaslt@0")}
    lt = {k: v for k, v in us.items() if k.startswith("cublaslt@")}; best = min(lt, key=lt.get)
    print(f"{m:5} {n:5} {k:7} torch {us['torch']:7.2f} split {us['loka_split']:7.2f} lt@0 {us.get('cublaslt@0', 0):7.2f} best {lt[best]:7.2f} {best[8:]} | lt0/split {us['cublaslt@0']/us['loka_split']:.3f} lt0/torch {us['cublaslt@0']/us['torch']:.3f} | fast: torch {us['torch_fast']:.2f} split {us['loka_split_fast']:.2f} lt {us['cublaslt_fast@0']:.2f} | err " + " ".join(f"{v:.1e}" for v in err.values()), flush=True)
t = time.time()
for k in (131072, 65536, 32768, 16384, 8192):
    for m, n in ((256, 256), (512, 512), (256, 512), (384, 384), (1024, 256), (768, 512), (1024, 512), (128, 256), (768, 768), (1024, 1024), (256, 128), (2048, 256), (64, 256)):
        if time.time() - t > float(sys.argv[1]): sys.exit()
        try: one(m, n, k)
        except Exception as e: print(m, n, k, "failed", str(e)[:200], flush=True)
