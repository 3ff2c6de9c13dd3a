import argparse, sys, time, os, json, collections
sys.path[:0] = ["benchmarks/regions", "benchmarks/distributed"]
import torch
from dataclasses import replace
from cells import CELLS
from shared import planned
from loka.nn.linears import signature
from loka.serve import freeze
from loka.core.recording import record
from loka.core.timing import warm_up
arm, which = sys.argv[1], sys.argv[2]; buckets = [int(b) for b in sys.argv[3].split(",")]
dev = torch.device("cuda")
import torch._inductor.choices as CH, torch._inductor.config as CF
if arm == "persist":
    old = CH.InductorChoices.should_use_persistent_reduction
    def per(features, coop):
        try:
            if int(features.reduction_numel) <= 1024: return True
        except Exception as e: print("no", e)
        return old(features, coop)
    CH.InductorChoices.should_use_persistent_reduction = staticmethod(per)
if arm == "cd": CF.coordinate_descent_tuning = True
cell = replace(CELLS[f"serve_{which}_2048"], rows=512)
model = cell.model(dev, tiny=False).bfloat16().eval()
req,_ = cell.batch(dev, tiny=False)
calls, alive = {}, []
t=time.time()
with torch.no_grad():
    if arm in ("bf16", "block"):
        from loka.serve.rows import form_of
        form = form_of(req)
        if arm == "block":
            from loka.core.compiling import compile_in_place
            from copy import deepcopy
        for rows in buckets:
            torch._dynamo.reset()
            if arm == "bf16": c = torch.compile(model, dynamic=False)
            else:
                c = deepcopy(model)
                for part in [*c.front.children(), *c.layers, c.top]: compile_in_place(part)
            inputs = form.check_rows(dev, rows); alive += [inputs, c]
            stream = torch.cuda.Stream(); warm_up(lambda: form.call(c, inputs), stream)
            rec,_ = record(lambda: form.call(c, inputs), dev, stream); alive.append(rec)
            calls[rows] = rec.replay
    else:
        told = argparse.Namespace(narrowest=256, plan=None, batch_size=2048, buckets=buckets)
        s = freeze(model, planned(signature(model), told, dev), calibration=[req], buckets=buckets)
        print("sites", len(s.card.sites))
        calls = {rows: s.current.replays._graphs[rows].recording.replay for rows in buckets}
torch.cuda.synchronize()
open(f"/tmp/ready_{which}_{arm}", "w").close()
print("ready", arm, round(time.time()-t,1), flush=True)
for turn in range(3):
    while not os.path.exists(f"/tmp/go_{which}_{arm}_{turn}"): time.sleep(0.01)
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
    print(which, arm, turn, json.dumps(found), flush=True)
    open(f"/tmp/done_{which}_{arm}_{turn}", "w").close()
from torch.profiler import profile, ProfilerActivity
sys.exit()
for rows in buckets:
    if rows < 512: continue
    call = calls[rows]
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(10): call()
        torch.cuda.synchronize()
    tot=collections.Counter(); n=collections.Counter()
    for ev in p.events():
        if ev.device_type == torch.autograd.DeviceType.CUDA: tot[ev.name]+=ev.device_time/10; n[ev.name]+=1
    print("==", which, arm, rows, "sum", round(sum(tot.values()),1), "launches", sum(n.values())/10)
    for k,v in tot.most_common(22): print(f"  {v:8.1f} {n[k]/10:5.1f} {k[:120]}")
open(f"/tmp/prof_{which}_{arm}", "w").close()
