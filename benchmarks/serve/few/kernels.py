import argparse, sys, time, collections
sys.path[:0] = ["benchmarks/regions", "benchmarks/distributed"]
import torch
from dataclasses import replace
from cells import CELLS
from shared import planned
from loka.nn.linears import signature
from loka.serve import freeze
from loka.core.recording import record
from loka.core.timing import warm_up
dev = torch.device("cuda"); buckets=[512, 2048]
cell = replace(CELLS["serve_wukong_2gf_2048"], rows=512)
model = cell.model(dev, tiny=False).bfloat16().eval()
req,_ = cell.batch(dev, tiny=False)
told = argparse.Namespace(narrowest=256, plan=None, batch_size=2048, buckets=buckets)
import threading
t=time.time(); s = freeze(model, planned(signature(model), told, dev), calibration=[req], buckets=buckets); print("freeze", time.time()-t, flush=True)
t=time.time(); found = s.package("/tmp/m.pt2", batch=(1, 8192)); print("package", time.time()-t, flush=True)
loaded = torch._inductor.aoti_load_package("/tmp/m.pt2", run_single_threaded=True)
from torch.profiler import profile, ProfilerActivity
def table(name, replay):
    for _ in range(5): replay()
    torch.cuda.synchronize()
    b,e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    b.record()
    for _ in range(50): replay()
    e.record(); torch.cuda.synchronize(); print("==", name, "%.1f us" % (b.elapsed_time(e)*20), flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(10): replay()
        torch.cuda.synchronize()
    tot=collections.Counter(); n=collections.Counter()
    for ev in p.events():
        if ev.device_type == torch.autograd.DeviceType.CUDA: tot[ev.name]+=ev.device_time/10; n[ev.name]+=1
    print("sum", round(sum(tot.values()),1), "launches", sum(n.values())/10)
    for k,v in tot.most_common(32): print(f"  {v:8.1f} {n[k]/10:5.1f} {k[:150]}")
with torch.no_grad():
    for rows in buckets:
        made = s.card.form.check_rows(dev, rows)
        inputs = [torch.randn_like(x) if x.is_floating_point() else x for x in made]
        stream = torch.cuda.Stream(); warm_up(lambda: loaded(*inputs), stream)
        rec,_ = record(lambda: loaded(*inputs), dev, stream)
        table(f"package {rows}", rec.replay)
        table(f"graph {rows}", s.current.replays._graphs[rows].recording.replay)
    c = torch.compile(model, dynamic=False)
    for rows in buckets:
        made = s.card.form.check_rows(dev, rows)
        inputs = [torch.randn_like(x) if x.is_floating_point() else x for x in made]
        stream = torch.cuda.Stream(); warm_up(lambda: s.card.form.call(c, inputs), stream)
        rec,_ = record(lambda: s.card.form.call(c, inputs), dev, stream)
        table(f"bf16 {rows}", rec.replay)
