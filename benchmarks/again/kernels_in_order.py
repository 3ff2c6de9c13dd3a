"""python seqprof.py ROOT CELL PLANS OUT STAGE"""
import json, sys, gc, time
from pathlib import Path
root, name, plans, out, stage = Path(sys.argv[1]).resolve(), sys.argv[2], Path(sys.argv[3]).resolve(), sys.argv[4], sys.argv[5]
sys.path[:0] = [str(root / "src"), str(root / "benchmarks/regions"), str(root / "benchmarks/distributed")]
import torch, loka
assert str(root) in loka.__file__, loka.__file__
import arms as A
from cells import CELLS
device = torch.device(sys.argv[6] if len(sys.argv) > 6 else "cuda")
tiny = device.type == "cpu"
how = A.How(device=device, plans=plans, tiny=tiny)
cell = CELLS[name]
t = time.time()
plan, _ = A.plan_of(cell, how)
arm = A.build("loka", cell, how, plan)
arm.step()
if device.type == "cuda": torch.cuda.synchronize()
print(root, name, stage, "compiled", round(time.time() - t, 1), flush=True)
if stage == "compile": sys.exit()
from loka.core.timing import warm_up
from loka.core.recording import record
stream = torch.cuda.Stream()
from race import Arms
arms = Arms(device, traced=True)
arms.add("loka", arm.step, arm.leaves)
one = arms.first
# time one replay, many
from torch.profiler import profile, ProfilerActivity
for leaf in arm.leaves: leaf.grad = None
for _ in range(10): one.replay()
torch.cuda.synchronize()
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
for _ in range(30): one.replay()
end.record(); end.synchronize()
step_us = begin.elapsed_time(end) * 1e3 / 30
rows = None
with profile(activities=[ProfilerActivity.CUDA]) as p:
    for _ in range(5): one.replay()
    torch.cuda.synchronize()
ev = sorted([e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA], key=lambda e: e.time_range.start)
n = len(ev) // 5
assert len(ev) == 5 * n, len(ev)
seq = [(ev[i].name[:90], sorted(ev[i + k * n].time_range.elapsed_us() for k in range(5))[2]) for i in range(n)]
Path(out).write_text(json.dumps({"root": str(root), "cell": name, "step_us": step_us, "sum": sum(u for _, u in seq), "seq": seq}))
print(root, name, "step", round(step_us, 1), "kernels", n, "sum", round(sum(u for _, u in seq), 1), flush=True)
