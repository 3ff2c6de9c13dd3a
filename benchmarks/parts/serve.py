import logging; logging.basicConfig(level=logging.WARNING); logging.getLogger("loka.kernels.gemm.algorithms").setLevel(logging.INFO)
import argparse, sys, time, os, json
sys.path[:0] = ["benchmarks/regions", "benchmarks/distributed"]
import torch
from dataclasses import replace
import shared
from cells import CELLS
from loka.nn.linears import signature
from loka.serve import freeze
from loka.serve.rows import form_of
from loka.core.recording import record
from loka.core.timing import warm_up
arm, which = sys.argv[1], sys.argv[2]; tag = os.environ.get("TAG", arm); buckets = [int(b) for b in sys.argv[3].split(",")]
dev = torch.device(sys.argv[4] if len(sys.argv) > 4 else "cuda"); tiny = dev.type == "cpu"
if arm == "int8": shared.IN_REGIONS = ("loka_int8:int8_row", *shared.IN_REGIONS[1:])
cell = replace(CELLS[f"serve_{which}_2048"], rows=512)
model = cell.model(dev, tiny=tiny).bfloat16().eval()
req,_ = cell.batch(dev, tiny=tiny)
calls, alive = {}, []
t=time.time()
import loka
with loka.Probe(model, every=1, effect_samples=0) as p:
    out = model(*req) if isinstance(req, (tuple, list)) else model(req)
    out.float().sum().backward()
for q in model.parameters(): q.grad = None
sig = p.stats().model
with torch.no_grad():
    if arm == "bf16":
        form = form_of(req)
        for rows in buckets:
            torch._dynamo.reset()
            c = torch.compile(model, dynamic=False)
            inputs = form.check_rows(dev, rows); alive += [inputs, c]
            stream = torch.cuda.Stream(); warm_up(lambda: form.call(c, inputs), stream)
            rec,_ = record(lambda: form.call(c, inputs), dev, stream); alive.append(rec)
            calls[rows] = rec.replay
    else:
        told = argparse.Namespace(narrowest=16 if tiny else 256, plan=None, batch_size=2048, buckets=buckets)
        s = freeze(model, shared.planned(sig, told, dev), calibration=[req], buckets=buckets)
        print(arm, which, "sites", len(s.card.sites), flush=True)
        if tiny: print(s(req).output.flatten()[:3], model(*req)[:3] if isinstance(req,(tuple,list)) else model(req)[:3]); sys.exit()
        calls = {rows: s.current.replays._graphs[rows].recording.replay for rows in buckets}
torch.cuda.synchronize()
open(f"/tmp/ready_{which}_{tag}", "w").close()
print("ready", arm, which, round(time.time()-t,1), flush=True)
for turn in range(3):
    while not os.path.exists(f"/tmp/go_{which}_{tag}_{turn}"): time.sleep(0.01)
    found = {}
    for rows, call in calls.items():
        for _ in range(5): call()
        ts = []
        for _ in range(9):
            b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            b.record()
            for _ in range(10): call()
            e.record(); torch.cuda.synchronize(); ts.append(b.elapsed_time(e) * 100)
        found[rows] = round(sorted(ts)[4], 1)
    print(which, tag, turn, json.dumps(found), flush=True)
    open(f"/tmp/done_{which}_{tag}_{turn}", "w").close()
if len(sys.argv) > 5:
    import collections
    from torch.profiler import profile, ProfilerActivity
    for rows, call in calls.items():
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(10): call()
            torch.cuda.synchronize()
        evs=sorted((e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e:e.time_range.start)
        n=len(evs)//10; evs=evs[5*n:6*n]
        print("==", which, arm, rows, "sum", round(sum(e.device_time for e in evs),1), "launches", n, "span", round(evs[-1].time_range.end-evs[0].time_range.start,1))
        for e in evs: print(f"  {e.time_range.start-evs[0].time_range.start:8.1f} {e.device_time:7.1f} {e.name[:110]}")
