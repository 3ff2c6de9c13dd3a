import sys, time, os
from pathlib import Path
sys.path.insert(0, "benchmarks/regions")
import torch, loka
from arms import *
import arms as A
from cells import CELLS
OUT = Path(os.environ["OUT"])
how = A.How(device=torch.device("cuda"), budget=loka.Budget(ne=None, min_speedup=1.0))
cell = CELLS["swiglu_8192x1024-2816"]
stats, _ = A.probed(cell, how)
for turn in range(2):
    began = time.monotonic()
    report = loka.measure(stats, device=how.device, candidates=how.candidates, settings=how.settings, cache=OUT / f"cache{turn}")
    report.save(OUT / f"report{turn}.json")
    plan = loka.plan(report, how.budget)
    print(turn, f"{time.monotonic()-began:.0f} s", plan.summary(), flush=True)
    for kind in ("region_times", "times_in_chains"):
        for path, times in getattr(report, kind).items():
            if path.startswith("blocks.0"):
                for name, m in times.items():
                    print("  ", kind, path, name, m.microseconds, m.unsupported, flush=True)
    for site, d in plan.decisions.items():
        if d.path.startswith("blocks.0"): print("  ", site, d.candidate, "|", d.reason, flush=True)
    print(report.notes if hasattr(report, "notes") else "")
    import shutil; shutil.rmtree(OUT / f"cache{turn}", ignore_errors=True)
