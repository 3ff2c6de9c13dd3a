"""MMoE's step with its gradients' sums in parts or not: times in CUDA graphs, memory, errors."""
import sys, time, statistics; sys.path.insert(0, "benchmarks/regions")
import torch, cells, arms as A, gc
from pathlib import Path
from arms import How, build, plan_of, LOKA
from loka.compiler.layout import partial_sums as ps
from loka.compiler import lower
how = How(device=torch.device("cuda"), plans=Path(".spike/plans"))
def captured(step):
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3): step()
        gc.collect(); torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.reset_peak_memory_stats(); b = torch.cuda.memory_allocated()
        step(); torch.cuda.synchronize(); eager = (torch.cuda.max_memory_allocated() - b) >> 20
        g = torch.cuda.CUDAGraph()
        torch.cuda.reset_peak_memory_stats(); b = torch.cuda.memory_allocated()
        with torch.cuda.graph(g, stream=s): step()
    torch.cuda.synchronize(); return g, (torch.cuda.max_memory_allocated() - b) >> 20, eager
on = lower.add_in_parts
for name in sys.argv[1:]:
    c = cells.CELLS[name]; t = time.time(); plan = plan_of(c, how)[0]; print(name, "plan", round(time.time() - t), plan.summary if hasattr(plan, "summary") else "", flush=True); gs = {}; grads = {}
    for arm in ("bf16", "off", "3", "2"):
        torch._dynamo.reset(); t = time.time()
        lower.add_in_parts = (lambda e: None) if arm == "off" else on
        ps._AT_ONCE = 2 if arm == "2" else 3; ps._FEW = ps._AT_ONCE + 1
        m = build("bf16_whole" if arm == "bf16" else LOKA, c, how, plan); m.step()
        gs[arm] = (*captured(m.step), m); grads[arm] = [l.grad.float().clone() for l in m.leaves]
        print(name, arm, "ready", round(time.time() - t), "peak MiB of a graph, of a launched step", gs[arm][1:3], flush=True)
    for arm in ("off", "3", "2"): print(name, arm, "gradients to bf16's", [round(float((x - y).norm() / y.norm().clamp_min(1e-20)), 4) for x, y in zip(grads[arm], grads["bf16"])][:6], flush=True)
    times = {a: [] for a in gs}
    for r in range(9):
        for a, (g, *_) in gs.items():
            torch.cuda.synchronize(); e = [torch.cuda.Event(enable_timing=True) for _ in range(2)]; g.replay(); e[0].record()
            for _ in range(10): g.replay()
            e[1].record(); torch.cuda.synchronize(); times[a].append(e[0].elapsed_time(e[1]) * 100)
    for a in gs: print(name, a, "us", round(statistics.median(times[a]), 1), "bf16 over it", round(statistics.median(x / y for x, y in zip(times["bf16"], times[a])), 4), flush=True)
    del gs, m, g; gc.collect(); torch._dynamo.reset(); torch.cuda.empty_cache()
