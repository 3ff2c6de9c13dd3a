import argparse, sys, time, os, json, collections
sys.path[:0] = ["benchmarks/regions", "benchmarks/distributed"]
import torch, loka
from dataclasses import replace
from cells import CELLS
from shared import planned
from loka.nn.linears import signature
from loka.serve import freeze
from loka.core.recording import record
from loka.core.timing import warm_up
from loka.serve.rows import form_of
arm, which = sys.argv[1], sys.argv[2]; buckets = [int(b) for b in sys.argv[3].split(",")]
dev = torch.device(sys.argv[4] if len(sys.argv) > 4 else "cuda"); tiny = dev.type == "cpu"
import torch._inductor.choices as CH
if arm.endswith("persist"):
    old = CH.InductorChoices.should_use_persistent_reduction
    def per(features, coop):
        try:
            if int(features.reduction_numel) <= 1024: return True
        except Exception as e: print("no", e)
        return old(features, coop)
    CH.InductorChoices.should_use_persistent_reduction = staticmethod(per)
cell = replace(CELLS[f"serve_{which}_2048"], rows=512)
model = cell.model(dev, tiny=tiny).bfloat16().eval()
req,_ = cell.batch(dev, tiny=tiny)
with loka.Probe(model, every=1, effect_samples=0) as p:
    out = model(*req) if isinstance(req, (tuple, list)) else model(req)
    out.float().sum().backward()
for q in model.parameters(): q.grad = None
sig = p.stats().model
calls, alive = {}, []
t=time.time()
with torch.no_grad():
    if arm in ("bf16",):
        form = form_of(req)
        for rows in buckets:
            torch._dynamo.reset()
            c = torch.compile(model, dynamic=False)
            inputs = form.check_rows(dev, rows); alive += [inputs, c]
            stream = torch.cuda.Stream(); warm_up(lambda: form.call(c, inputs), stream)
            rec,_ = record(lambda: form.call(c, inputs), dev, stream); alive.append(rec)
            calls[rows] = rec.replay
    else:
        told = argparse.Namespace(narrowest=16 if tiny else (512 if arm.startswith("wide") else 256), plan=None, batch_size=2048, buckets=buckets)
        s = freeze(model, planned(sig, told, dev), calibration=[req], buckets=buckets)
        print("sites", len(s.card.sites), [x.name if hasattr(x,"name") else x for x in s.card.sites][:20])
        if tiny: print(s(req).output.flatten()[:3], model(*req)[:3]); sys.exit()
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
            for _ in range(20): call()
            e.record(); torch.cuda.synchronize(); ts.append(b.elapsed_time(e) * 50)
        found[rows] = round(sorted(ts)[4], 1)
    print(which, arm, turn, json.dumps(found), flush=True)
    open(f"/tmp/done_{which}_{arm}_{turn}", "w").close()
from torch.profiler import profile, ProfilerActivity
while not os.path.exists(f"/tmp/goprof_{which}_{arm}"): time.sleep(0.01)
for rows in buckets:
    call = calls[rows]
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(20): call()
        torch.cuda.synchronize()
    tot=collections.Counter(); n=collections.Counter()
    for ev in p.events():
        if ev.device_type == torch.autograd.DeviceType.CUDA: tot[ev.name]+=ev.device_time/20; n[ev.name]+=1
    print("==", which, arm, rows, "sum", round(sum(tot.values()),1), "launches", sum(n.values())/20)
    for k,v in tot.most_common(24): print(f"  {v:8.1f} {n[k]/20:5.1f} {k[:120]}")
open(f"/tmp/prof_{which}_{arm}", "w").close()
