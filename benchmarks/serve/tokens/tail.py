import argparse, sys, time, threading, random, gc
sys.path[:0] = ["benchmarks/regions", "benchmarks/distributed"]
import torch
from dataclasses import replace
from cells import CELLS
from shared import planned
from loka.nn.linears import signature
from loka.serve import freeze
import loka.serve.load_test as LT
from loka.serve.load_test import percentile
dev = torch.device(sys.argv[1]); tiny = dev.type == "cpu"; seconds = float(sys.argv[2])
cell = replace(CELLS["serve_wukong_2gf_2048"], rows=512)
model = cell.model(dev, tiny=tiny).bfloat16().eval()
req,_ = cell.batch(dev, tiny=tiny)
B = 64 if tiny else 2048
told = argparse.Namespace(narrowest=16 if tiny else 256, plan=None, batch_size=2048, buckets=[B])
s = freeze(model, planned(signature(model), told, dev), calibration=[req], buckets=[B])
def request(rows, seed):
    g = torch.Generator(dev).manual_seed(seed)
    return [torch.randn(rows, *t.shape[1:], device=dev, generator=g).to(t.dtype) for t in req]
draw = random.Random(0); R = [request(draw.randint(1, B), i) for i in range(32)]
here = threading.local(); log = []
def ask(turn):
    r = R[turn % 32]; t0 = time.perf_counter()
    if tiny: s(r); log.append((turn, t0, time.perf_counter())); return
    here.stream = getattr(here, "stream", None) or torch.cuda.Stream()
    with torch.cuda.stream(here.stream):
        a = s(r); t1 = time.perf_counter(); here.stream.synchronize()
    log.append((turn, t0, t1, time.perf_counter()))
for i in range(40): ask(i)
times = []
done = threading.Event()
def work(i):
    while not done.is_set(): ask(i); times.append(time.perf_counter()); i += 4
th = [threading.Thread(target=work, args=(i,)) for i in range(4)]
[t.start() for t in th]; time.sleep(1); done.set(); [t.join() for t in th]
sat = (len(times) - 1) / (times[-1] - times[0])
gpu = s.current.replays._graphs[B].microseconds if s.current.replays else 0
print("saturated/s", round(sat, 1), "us each", round(1e6 / sat, 1), "graph", gpu, flush=True)
def gcs(phase, info):
    if phase == "stop" and info["generation"] == 2: print("GC2", info, time.perf_counter())
gc.callbacks.append(gcs)
for threads in (4, 2, 1):
    for even in (True,):
        log.clear()
        lat, err = None, None
        rate = 0.7 * sat
        due = LT.arrivals(rate, seconds, 0, even=even)
        t_began = time.perf_counter()
        one = LT.load_test(ask, rate=rate, seconds=seconds, threads=threads, even=even)
        L = [e for e in log][-len(due):]
        inside = sorted((e[-1] - e[1]) * 1e3 for e in L)
        host = sorted((e[2] - e[1]) * 1e3 for e in L)
        p = lambda v, q: round(v[min(int(q / 100 * len(v)), len(v) - 1)], 3)
        print(f"threads {threads} p50 {one.milliseconds[50.0]:.3f} p90 {one.milliseconds[90.0]:.3f} p99 {one.milliseconds[99.0]:.3f} p99.9 {one.milliseconds[99.9]:.3f} ratio {one.p99_over_p50:.3f} n {one.answered}; inside p50 {p(inside,50)} p90 {p(inside,90)} p99 {p(inside,99)}; host p50 {p(host,50)} p90 {p(host,90)} p99 {p(host,99)}", flush=True)
        slow = sorted(L, key=lambda e: e[1] - e[-1])[:12]
        base = L[0][1]
        print("  slowest (turn%8, at ms, host, total):", [(e[0] % 8, round((e[1] - base) * 1e3), round((e[2] - e[1]) * 1e3, 2), round((e[-1] - e[1]) * 1e3, 2)) for e in sorted(slow, key=lambda e: e[1])], flush=True)
