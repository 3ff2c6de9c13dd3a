import sys, time, collections, ctypes
import torch
import loka.kernels.gemm.adapters.cublaslt as C
from loka.core.numerics.reference import Quantized, quantize
from loka.core.recipe import Granularity
from nvmath.bindings import cublasLt
C._REQUESTED = 64
L = ctypes.CDLL("libcuda.so.1"); V = ctypes.c_void_p; Z = ctypes.c_size_t
def kinds(g):
    n = Z(); L.cuGraphGetNodes(V(g), None, ctypes.byref(n)); a = (V * n.value)(); L.cuGraphGetNodes(V(g), a, ctypes.byref(n))
    c = collections.Counter()
    for x in a:
        t = ctypes.c_int(); L.cuGraphNodeGetType(V(x), ctypes.byref(t)); c[t.value] += 1
    return c
dev = torch.device("cuda"); E = torch.float8_e4m3fn
bf, f32 = torch.bfloat16, torch.float32
R = 8
F = [  # m, n, k : output / grad_input, fast, bf16
 (8192,512,3456),(8192,3456,512),(8192,1024,3456),(8192,3456,1024),(8192,1024,1024),(8192,512,1024),(8192,1024,512),
 (16384,512,3456),(16384,3456,512),(16384,1024,3456),
 (131072,256,256),(65536,512,512),(8192,768,768),(4096,1024,1024),(2048,2048,2048),(6144,2048,2048),(6144,4096,4096),(1024,4096,4096),(8192,2048,2048),
 (8192,3072,768),(8192,768,3072),(8192,2816,1024),(8192,1024,2816),
 (512,512,3456),(512,3456,512),(512,1024,3456),(512,1024,1024),(512,512,1024),
 (2048,512,3456),(2048,3456,512),(2048,1024,3456),(2048,1024,1024),(2048,512,1024)]
W = [(512,3456,8192),(3456,512,8192),(1024,3456,8192),(1024,1024,8192),(512,1024,8192),(512,3456,16384),(3456,512,16384),(1024,3456,16384),
 (256,256,131072),(512,512,65536),(768,768,8192),(1024,1024,4096),(2048,2048,2048),(2048,2048,6144),(4096,4096,6144),(4096,4096,1024),(2048,2048,8192),(3072,768,8192),(768,3072,8192),(2816,1024,8192)]
def graph(f):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s): f()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(g, stream=s): out = f()
    g.instantiate(); return g, out
def timed(arms, turns=7):
    got = collections.defaultdict(list)
    for turn in range(turns):
        for key, (g, out) in arms.items():
            s_, e_ = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay(); s_.record(); g.replay(); e_.record(); torch.cuda.synchronize(); got[key].append(s_.elapsed_time(e_) * 1000 / R)
    return {k: sorted(v)[len(v)//2] for k, v in got.items()}
def one(m, n, k, fast, dt, mode):
    gen = torch.Generator(dev).manual_seed(0)
    sets = []
    for i in range(2):
        a = torch.randn(m, k, device=dev, generator=gen).to(E); b = torch.randn(n, k, device=dev, generator=gen).to(E)
        if mode == "row": sa, sb = torch.rand(m, 1, device=dev) + .5, torch.rand(n, 1, device=dev) + .5
        else: sa, sb = torch.ones((1,1), device=dev), torch.ones((1,1), device=dev)
        sets.append((a, b, sa, sb))
    side = torch.randn(m * 64, device=dev)
    out = torch.empty(m, n, dtype=dt, device=dev); ws = torch.empty(32 << 20, dtype=torch.uint8, device=dev)
    def t():
        for i in range(R):
            a, b, sa, sb = sets[i % 2]; side.relu_()
            o = torch._scaled_mm(a, b.t(), scale_a=sa, scale_b=sb.t(), out_dtype=dt, use_fast_accum=fast)
        return o
    G = Granularity.ROW if mode == "row" else Granularity.TENSOR
    plan = C._plan(C._Key(m, n, k, (E, E, dt), (G, G), fast, 256, 0))
    names = cublasLt.MatmulDescAttribute
    def c(al):
        address, size = plan.algorithms[al]
        def f():
            o = None
            for i in range(R):
                a, b, sa, sb = sets[i % 2]; side.relu_()
                o = torch.empty(m, n, dtype=dt, device=dev)
                plan.pointers[:] = sb.data_ptr(), sa.data_ptr()
                cublasLt.matmul_desc_set_attribute(plan.descriptor, int(names.A_SCALE_POINTER), plan.where, 8)
                cublasLt.matmul_desc_set_attribute(plan.descriptor, int(names.B_SCALE_POINTER), plan.where + 8, 8)
                cublasLt.matmul(plan.handle, plan.descriptor, C._ALPHA, b.data_ptr(), plan.layouts[0], a.data_ptr(), plan.layouts[1], C._BETA,
                   o.data_ptr(), plan.layouts[2], o.data_ptr(), plan.layouts[2], address, ws.data_ptr(), size, torch.cuda.current_stream().cuda_stream)
            return o
        return f
    def empty():
        for i in range(R): side.relu_()
        return side
    arms = {"relu": graph(empty)}
    try: arms["torch"] = graph(t)
    except Exception as e: print("torch failed", str(e)[:80])
    for al in range(len(plan.algorithms)):
        try: arms[al] = graph(c(al))
        except Exception as e: print("failed", al, str(e)[:100]); 
    us = timed(arms); base = us.pop("relu")
    ref = arms["torch"][1].float() if "torch" in arms else None
    ok = {a: (float((arms[a][1].float() - ref).abs().max()), kinds(arms[a][0].raw_cuda_graph())[2]) for a in us} if ref is not None else {}
    order = sorted((k for k in us if k != "torch"), key=us.get)
    tt = us.get("torch", float("nan")) - base
    print(f"{(m,n,k)} {mode} {'fast' if fast else 'exact'} {str(dt)[6:]} relu {base:.2f} torch {tt:.2f} ms{ok.get('torch',(0,0))[1]} algos {len(plan.algorithms)}: " +
          ", ".join(f"#{a} {us[a]-base:.2f} ms{ok.get(a,(0,0))[1]} d{ok.get(a,(0,0))[0]:.2g} ws{plan.algorithms[a][1]>>10}K" for a in order[:4]) +
          (f" | first {us[0]-base:.2f}" if 0 in us else "") + f" | gain {tt/(us[order[0]]-base):.3f}" if order else "", flush=True)
began = time.time(); limit = float(sys.argv[1])
for (m, n, k) in F:
    for mode in ("row", "tensor"):
        if time.time() - began > limit: break
        try: one(m, n, k, True, bf, mode)
        except Exception as e: print((m,n,k), mode, "failed", type(e), str(e)[:200], flush=True)
for (m, n, k) in W:
    for mode in ("row", "tensor"):
        if time.time() - began > limit: break
        try: one(m, n, k, False, bf, mode)
        except Exception as e: print((m,n,k), mode, "failed", type(e), str(e)[:200], flush=True)
print("seconds", time.time() - began)
