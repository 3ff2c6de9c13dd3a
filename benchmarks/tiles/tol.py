import os, sys, time
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, "benchmarks/regions")
import torch, loka
import loka.kernels.edge.triton.program_kernels as pk
TOL = int(os.environ["TOL"]); seen = set()
def spills(self, arguments, registers):
    key = self.kernel, self.warps, registers
    c = self._compiled(arguments, registers)
    if key not in seen:
        seen.add(key)
        if TOL == 0: print(f"   limit {registers} regs {c.n_regs} spills {c.n_spills} warps {self.warps} leaves {[str(arguments[k].dtype)[6:] for k in arguments if k.startswith('leaf')]} outs {[k for k in arguments if k in ('row_ptr','column_ptr','transposed_ptr','integer_ptr','step_ptr')]} scale {arguments.get('input_scale_ptr') is not None and arguments['input_scale_ptr'].numel()}", flush=True)
    return c.n_spills > TOL
pk.Launch.spills = spills
from arms import How, build, plan_of, LOKA
import cells
for name in sys.argv[1:]:
    cell = cells.CELLS[name]
    how = How(device=torch.device("cuda"), plans=Path(".spike/plans"))
    plan, _ = plan_of(cell, how)
    arm = build(LOKA, cell, how, plan)
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        for _ in range(3): arm.step()
        torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s): arm.step()
    a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab"); ts = []
    for _ in range(60):
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
    print(name, "TOL", TOL, sorted(ts)[30], flush=True)
    if TOL == 0:
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA]) as prof: g.replay(); torch.cuda.synchronize()
        for e in sorted(prof.events(), key=lambda e: e.time_range.start):
            if "edge" in e.name: print("     ", e.name, round(e.time_range.elapsed_us(), 1))
    del g, arm
