import argparse, sys, time, os, json
sys.path[:0] = ["benchmarks/regions", "benchmarks/distributed"]
import torch
from dataclasses import replace
from cells import CELLS
from shared import planned
from loka.nn.linears import signature
from loka.serve import freeze
from loka.core.recording import record
from loka.core.timing import warm_up
import loka.compiler.gemms as G, loka.compiler.normed as N
arm, which = sys.argv[1], sys.argv[2]; buckets = [int(b) for b in sys.argv[3].split(",")]
dev = torch.device("cuda")
if arm == "base": G._FEW = 0
if arm == "apart":
    old = N._misfit
    N._misfit = lambda p, e: "few rows" if p.site.backward is None and isinstance(p.site.rows, int) and p.site.rows <= 1024 and p.site.inputs >= 1024 else old(p, e)
cell = replace(CELLS[f"serve_{which}_2048"], rows=512)
model = cell.model(dev, tiny=False).bfloat16().eval()
req,_ = cell.batch(dev, tiny=False)
calls = {}
with torch.no_grad():
    if arm in ("bf16", "block"):
        from loka.serve.rows import form_of
        form = form_of(req)
        for rows in buckets:
            torch._dynamo.reset()
            if arm == "bf16": c = torch.compile(model, dynamic=False)
            else:
                from loka.core.compiling import compile_in_place, new_frame
                from copy import deepcopy
                c = deepcopy(model)
                for part in [*c.front.children(), *c.layers, c.top] if hasattr(c, "layers") else []: compile_in_place(part)
            inputs = form.check_rows(dev, rows)
            stream = torch.cuda.Stream(); warm_up(lambda: form.call(c, inputs), stream)
            rec,_ = record(lambda: form.call(c, inputs), dev, stream)
            calls[rows] = rec.replay
    else:
        told = argparse.Namespace(narrowest=256, plan=None, batch_size=2048, buckets=buckets)
        s = freeze(model, planned(signature(model), told, dev), calibration=[req], buckets=buckets)
        calls = {rows: s.current.replays._graphs[rows].recording.replay for rows in buckets}
torch.cuda.synchronize()
open(f"/tmp/ready_{which}_{arm}", "w").close()
print("ready", arm, flush=True)
for turn in range(3):
    while not os.path.exists(f"/tmp/go_{which}_{arm}_{turn}"): time.sleep(0.01)
    found = {}
    for rows, call in calls.items():
        for _ in range(5): call()
        ts = []
        for _ in range(7):
            b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            b.record()
            for _ in range(10): call()
            e.record(); torch.cuda.synchronize(); ts.append(b.elapsed_time(e) * 100)
        found[rows] = round(sorted(ts)[3], 1)
    print(which, arm, turn, json.dumps(found), flush=True)
    open(f"/tmp/done_{which}_{arm}_{turn}", "w").close()
