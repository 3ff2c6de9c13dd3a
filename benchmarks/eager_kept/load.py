import time; T0 = time.perf_counter()
import argparse, sys, os, cProfile, pstats, contextlib
sys.path[:0] = ["benchmarks/regions", "benchmarks/distributed"]
import torch, loka
from dataclasses import replace
from cells import CELLS
mode, which = sys.argv[1], sys.argv[2]; buckets = [int(b) for b in sys.argv[3].split(",")]
dev = torch.device(sys.argv[4] if len(sys.argv) > 4 else "cuda"); tiny = dev.type == "cpu"
folder = f"/tmp/srv_{which}"
cell = replace(CELLS[f"serve_{which}_2048"], rows=64)
model = cell.model(dev, tiny=tiny).bfloat16().eval()
req, _ = cell.batch(dev, tiny=tiny)
if mode == "freeze":
    from shared import planned
    from loka.serve import freeze
    with loka.Probe(model, every=1, effect_samples=0) as p:
        model(*req).float().sum().backward()
    for q in model.parameters(): q.grad = None
    told = argparse.Namespace(narrowest=16 if tiny else 256, plan=None, batch_size=64, buckets=buckets)
    t = time.perf_counter()
    s = freeze(model, planned(p.stats().model, told, dev), calibration=[req], buckets=buckets)
    print("freeze", round(time.perf_counter() - t, 2)); s.save(folder); sys.exit()
torch.cuda.synchronize() if dev.type == "cuda" else None
import loka.serve
print("before load", round(time.perf_counter() - T0, 2))
if mode.startswith("timed"):
    import loka.serve.graphs as G, loka.serve.model.programs as P, loka.serve.model.traced as TR
    times = {}
    def timed(owner, name):
        f = getattr(owner, name)
        def g(*a, **k):
            t = time.perf_counter()
            try: return f(*a, **k)
            finally: times[name] = times.get(name, 0) + time.perf_counter() - t
        setattr(owner, name, g)
    timed(P, "like"); timed(TR, "_check"); timed(TR, "_compiled"); timed(P, "traced"); timed(P.Programs, "call"); timed(G, "record"); timed(G.Capturer, "_looking"); timed(G, "_microseconds")
    timed(G.Capturer, "_eager"); timed(G, "_check")
    import loka.serve.loading as L, loka.serve.server as SV
    whole = {}
    def phase(owner, name):
        f = getattr(owner, name)
        def g(*a, **k):
            t = time.perf_counter()
            try: return f(*a, **k)
            finally: print("  phase", name, round(time.perf_counter() - t, 3), flush=True)
        setattr(owner, name, g)
    for n in ("own_copy", "_read", "check", "_weights", "frozen_tree", "_filled", "check_apart", "check_outputs", "fingerprint", "Server"): phase(L, n)
    for n in ("_orders_in", "_version"): phase(SV.Server, n)
    for n in ("_eager", "_made_for", "capture"): phase(G.Capturer, n)
    phase(G, "install")
    old = G.Capturer._graph
    def graph(self, inputs, stream):
        times.clear(); t = time.perf_counter()
        try: return old(self, inputs, stream)
        finally: print(inputs[0].shape[0], "graph", round(time.perf_counter() - t, 3), {k: round(v, 3) for k, v in times.items()}, flush=True)
    G.Capturer._graph = graph
prof = cProfile.Profile() if mode == "prof" else contextlib.nullcontext()
from loka.serve import load
t = time.perf_counter()
with prof: s = load(folder, model)
torch.cuda.synchronize() if dev.type == "cuda" else None
print("LOAD", mode, which, buckets, round(time.perf_counter() - t, 2), flush=True)
if mode == "prof":
    st = pstats.Stats(prof); st.sort_stats("cumulative").print_stats(150); st.sort_stats("tottime").print_stats(50)
