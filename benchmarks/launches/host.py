"""Compiled steps launched by the host, by graph trees, and where the host's time goes."""
import sys, time, cProfile, pstats, io; sys.path.insert(0, "benchmarks/regions")
import torch, cells, statistics
from pathlib import Path
from torch import nn
import arms as A
from arms import How, build, plan_of, LOKA, arm_of
import loka
how = How(device=torch.device("cuda"), plans=Path("/tmp/plans"))
name = sys.argv[1]
c = cells.CELLS[name]; plan = plan_of(c, how)[0]
made = {}
for arm in ("bf16", "loka"):
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        model = A._prepared(c, how)
        if arm == "loka": loka.convert(model, plan)
        call = torch.compile(model, mode=mode)
        s = arm_of(model, call, c, how)
        for _ in range(6): s.step()
        torch.cuda.synchronize(); made[arm, mode] = s
        print("ready", arm, mode, flush=True)
times = {a: [] for a in made}; host = {a: [] for a in made}
for r in range(8):
    for a, arm in made.items():
        torch.cuda.synchronize(); t = time.perf_counter()
        for _ in range(20): arm.step()
        h = time.perf_counter() - t; torch.cuda.synchronize(); times[a].append((time.perf_counter() - t) / 20 * 1e6); host[a].append(h / 20 * 1e6)
for a in made: print(name, a, "us", round(statistics.median(times[a])), "host", round(statistics.median(host[a])), flush=True)
s = made["loka", None]
prof = cProfile.Profile(); prof.enable()
for _ in range(50): s.step()
prof.disable(); torch.cuda.synchronize()
for key in ("tottime", "cumtime"):
    out = io.StringIO(); pstats.Stats(prof, stream=out).sort_stats(key).print_stats(70); print(out.getvalue()[:14000])
from torch.profiler import profile, ProfilerActivity
with profile(activities=[ProfilerActivity.CPU]) as p:
    for _ in range(20): s.step()
    torch.cuda.synchronize()
print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=40, max_name_column_width=60))
import glob, re
for f in sorted(glob.glob("/tmp/ind/*/*.py"), key=__import__("os").path.getmtime): pass
