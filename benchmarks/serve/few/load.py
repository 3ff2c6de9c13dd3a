import time; t0 = time.time()
import sys, functools, cProfile, pstats
sys.path[:0] = ["benchmarks/regions"]
import torch
t1 = time.time()
import loka, loka.serve
t2 = time.time()
from dataclasses import replace
from cells import CELLS
dev = torch.device(sys.argv[2]); tiny = dev.type == "cpu"
cell = replace(CELLS[f"serve_{sys.argv[1]}_2048"], rows=512)
model = cell.model(dev, tiny=tiny).bfloat16().eval()
if dev.type == "cuda": torch.cuda.synchronize()
print(f"torch {t1-t0:.2f} loka {t2-t1:.2f} model {time.time()-t2:.2f}")
import loka.serve.loading as L, loka.serve.graphs as G, loka.core.compiling as C, loka.serve.server as S
began = time.time(); depth = [0]
def timed(mod, name):
    f = getattr(mod, name)
    @functools.wraps(f)
    def g(*a, **k):
        depth[0] += 1
        t = time.time(); r = f(*a, **k); depth[0] -= 1
        print(f"{time.time()-began:6.2f} {'  '*depth[0]}{name} {time.time()-t:.2f}", flush=True); return r
    setattr(mod, name, g)
prof = "prof" in sys.argv
if not prof:
    for n in ("own_copy", "_read", "fingerprint", "check", "skeleton_of", "_weights", "_filled", "frozen_tree", "check_apart", "check_outputs", "_check_same"): timed(L, n)
    for n in ("_microseconds", "record", "_check"): timed(G, n)
    timed(G.Capturer, "_graph"); timed(G, "like"); timed(L, "load_precise") if hasattr(L, "load_precise") else None
    if hasattr(C, "_by_sizes"):
        timed(C, "_compiled")
        by = C._by_sizes
        def marked(m, i):
            print(f"{time.time()-began:6.2f} dynamo graph {len(m.graph.nodes)}"); return by(m, i)
        C._by_sizes = marked
    else:
        import loka.serve.model.programs as P, loka.serve.model.traced as T
        timed(P, "traced"); timed(T, "_lifted")
t = time.time()
if prof:
    p = cProfile.Profile(); p.enable()
s = loka.serve.load(sys.argv[3], model)
if dev.type == "cuda": torch.cuda.synchronize()
if prof:
    p.disable(); st = pstats.Stats(p); st.sort_stats("cumulative").print_stats(140); st.sort_stats("tottime").print_stats(40)
print(f"LOAD {time.time()-t:.2f}")

print("US", {r: round(g.microseconds, 1) for r, g in s._current.replays._graphs.items()} if s._current.replays else None)
