import argparse, sys, time, ctypes, functools, collections
sys.path[:0] = ["benchmarks/regions", "benchmarks/distributed"]
import torch
Real = torch.cuda.CUDAGraph
class Kept(Real):
    def __new__(cls, keep_graph=False): return super().__new__(cls, True)
    def __init__(self, *a, **k):
        pass
torch.cuda.CUDAGraph = lambda *a, **k: Real(keep_graph=True)
from dataclasses import replace
import shared, loka
from cells import CELLS
from loka.nn.linears import signature
from loka.serve import freeze
which = sys.argv[1]; buckets = [int(b) for b in sys.argv[2].split(",")]
dev = torch.device("cuda")
cell = replace(CELLS[f"serve_{which}_2048"], rows=512)
model = cell.model(dev, tiny=False).bfloat16().eval()
req,_ = cell.batch(dev, tiny=False)
with loka.Probe(model, every=1, effect_samples=0) as p:
    out = model(*req) if isinstance(req, (tuple, list)) else model(req); out.float().sum().backward()
for q in model.parameters(): q.grad = None
L = ctypes.CDLL("libcuda.so.1"); V = ctypes.c_void_p; Z = ctypes.c_size_t
def ck(r, what):
    if r: raise RuntimeError(f"{what}: {r}")
class MP(ctypes.Structure):
    _fields_ = [("dst", ctypes.c_uint64), ("pitch", Z), ("value", ctypes.c_uint), ("elem", ctypes.c_uint), ("width", Z), ("height", Z)]
def nodes(g):
    n = Z(); ck(L.cuGraphGetNodes(V(g), None, ctypes.byref(n)), "nodes")
    a = (V * n.value)(); ck(L.cuGraphGetNodes(V(g), a, ctypes.byref(n)), "nodes"); return list(a)
def kind(node):
    t = ctypes.c_int(); ck(L.cuGraphNodeGetType(V(node), ctypes.byref(t)), "type"); return t.value
def near(node, which):
    f = getattr(L, f"cuGraphNodeGet{which}_v2"); n = Z()
    ck(f(V(node), None, None, ctypes.byref(n)), which)
    if not n.value: return [], []
    a, e = (V * max(1, n.value))(), (ctypes.c_uint64 * max(1, n.value))()
    ck(f(V(node), a, e, ctypes.byref(n)), which); return list(a)[:n.value], [hex(x) for x in e[:n.value]]
def link(g, a, b):
    e = ctypes.c_uint64(0); ck(L.cuGraphAddDependencies_v2(V(g), ctypes.byref(V(a)), ctypes.byref(V(b)), ctypes.byref(e), Z(1)), "add")
keep = []
def zeros(dst, size):
    class P: __cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (dst, False), "version": 3}
    t = torch.as_tensor(P(), device=dev); g = Real(keep_graph=True)
    s = torch.cuda.Stream()
    with torch.cuda.stream(s): t.fill_(0) if False else None
    with torch.cuda.graph(g, stream=s): t.fill_(0)
    keep.append((t, g)); return g.raw_cuda_graph()
def edit(raw, how):
    c = V(); ck(L.cuGraphClone(ctypes.byref(c), V(raw)), "clone"); g = c.value
    if how != "orig":
        for m in [n for n in nodes(g) if kind(n) == 2]:
            p = MP(); ck(L.cuGraphMemsetNodeGetParams(V(m), ctypes.byref(p)), "params")
            (deps, e1), (outs, e2) = near(m, "Dependencies"), near(m, "DependentNodes")
            if how == "child":
                new = V(); d = (V * max(1, len(deps)))(*deps)
                ck(L.cuGraphAddChildGraphNode(ctypes.byref(new), V(g), d, Z(len(deps)), V(zeros(p.dst, p.width * p.elem))), "child")
                for o in outs: link(g, new.value, o)
                ck(L.cuGraphDestroyNode(V(m)), "destroy")
            elif how == "removed":
                for o in outs:
                    for d in deps: link(g, d, o)
                ck(L.cuGraphDestroyNode(V(m)), "destroy")
            elif how == "fork" and deps:
                d0 = deps[0]; before, _ = near(d0, "Dependencies")
                new = V(); d = (V * max(1, len(before)))(*before)
                ck(L.cuGraphAddMemsetNode(ctypes.byref(new), V(g), d, Z(len(before)), ctypes.byref(p), ctx), "memset")
                for o in outs: link(g, new.value, o); link(g, d0, o)
                ck(L.cuGraphDestroyNode(V(m)), "destroy")
            elif how == "forkchild" and deps:
                d0 = deps[0]; before, _ = near(d0, "Dependencies")
                new = V(); d = (V * max(1, len(before)))(*before)
                ck(L.cuGraphAddChildGraphNode(ctypes.byref(new), V(g), d, Z(len(before)), V(zeros(p.dst, p.width * p.elem))), "child")
                for o in outs: link(g, new.value, o); link(g, d0, o)
                ck(L.cuGraphDestroyNode(V(m)), "destroy")
    x = V(); ck(L.cuGraphInstantiateWithFlags(ctypes.byref(x), V(g), ctypes.c_uint64(0)), "inst"); return x
ctx = V(); ck(L.cuCtxGetCurrent(ctypes.byref(ctx)), "ctx")
with torch.no_grad():
    told = argparse.Namespace(narrowest=256, plan=None, batch_size=2048, buckets=buckets)
    s = freeze(model, shared.planned(p.stats().model, told, dev), calibration=[req], buckets=buckets)
for rows in buckets:
    rec = s.current.replays._graphs[rows].recording; raw = rec.raw_cuda_graph()
    ns = nodes(raw); print(rows, "kinds", collections.Counter(map(kind, ns)))
    for m in ns:
        if kind(m) == 2:
            q = MP(); L.cuGraphMemsetNodeGetParams(V(m), ctypes.byref(q)); print("  memset", hex(q.dst), q.value, q.elem, q.width, q.height, near(m, "Dependencies")[1], near(m, "DependentNodes")[1], [kind(x) for x in near(m, "Dependencies")[0]+near(m, "DependentNodes")[0]])
    seen = collections.Counter(e for n in ns for e in near(n, "Dependencies")[1]); print("  edges", seen)
    made = {}
    for how in ("orig", "child", "removed", "fork", "forkchild"):
        try: made[how] = edit(raw, how)
        except Exception as e: print("  ", how, "failed", e)
    st = torch.cuda.current_stream().cuda_stream; got = collections.defaultdict(list)
    for turn in range(12):
        for how, x in made.items():
            for _ in range(3): ck(L.cuGraphLaunch(x, V(st)), "launch")
            b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True); b.record()
            for _ in range(10): ck(L.cuGraphLaunch(x, V(st)), "launch")
            e.record(); torch.cuda.synchronize(); got[how].append(b.elapsed_time(e) * 100)
    print("  ", {k: round(sorted(v)[len(v)//2], 1) for k, v in got.items()}, flush=True)
