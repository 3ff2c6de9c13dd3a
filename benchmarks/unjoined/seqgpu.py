"""Steps with launches joined and not: bits, times launched by the host and as CUDA graphs, memory."""
import sys, time, statistics; sys.path.insert(0, "benchmarks/regions")
import torch, cells, arms as A
from pathlib import Path
from arms import How, build, plan_of, LOKA
import loka
from loka.compiler.sequences import grouping, op
from loka.kernels.triton import graphs as kept, launch
how = How(device=torch.device("cuda"), plans=Path(".spike/plans"))
def captured(step):
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(3): step()
        g = torch.cuda.CUDAGraph(); torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(); b = torch.cuda.memory_allocated()
        with torch.cuda.graph(g, stream=s): step()
    torch.cuda.synchronize(); return g, (torch.cuda.max_memory_allocated() - b) >> 20
def clock(f, n=20):
    for _ in range(4): f()
    torch.cuda.synchronize(); t = time.perf_counter()
    for _ in range(n): f()
    h = time.perf_counter() - t; torch.cuda.synchronize(); return (time.perf_counter() - t) / n * 1e6, h / n * 1e6
for name in sys.argv[1:]:
    c = cells.CELLS[name]; plan = plan_of(c, how)[0]; made = {}; bits = {}
    for arm, dev in (("bf16", 0), ("single", 0), ("64", 64), ("256", 256), ("all", 1 << 20)):
        torch._dynamo.reset(); grouping._DEVICES = ('cuda',) if dev else (); grouping._MOST = dev << 20
        m = build("bf16_whole" if arm == "bf16" else LOKA, c, how, plan); made[arm] = m
        bits[arm] = []
        for _ in range(8):
            out = m.step(); torch.cuda.synchronize(); bits[arm].append([out.clone(), *(l.grad.clone() for l in m.leaves)])
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); b = torch.cuda.memory_allocated(); del out
        bits[arm] = [[x.cpu() for x in s] for s in bits[arm]]
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); b = torch.cuda.memory_allocated(); m.step(); torch.cuda.synchronize()
        print(name, arm, "peak of an eager step MiB", (torch.cuda.max_memory_allocated() - b) >> 20, flush=True)
    same = [all(torch.equal(x, y) for x, y in zip(s, t)) for s, t in zip(bits["single"], bits["all"])]
    steps = [all(torch.equal(x, y) for x, y in zip(bits["all"][0], t)) for t in bits["all"]]
    print(name, "bits of joined are those of single, by step", same, "own steps alike", steps, "complete", [r.complete for r, _ in launch._RECORDINGS.values()].count(False), "of", len(launch._RECORDINGS), "incomplete", flush=True)
    times = {a: [] for a in made}
    for r in range(8):
        for a, m in made.items(): times[a].append(clock(m.step))
    for a in made: print(name, a, "launched by the host: us", *(round(statistics.median(x)) for x in zip(*times[a])), flush=True)
    print("kept graphs", len(kept._kept.graphs), "captures", kept._kept.captures, "launches", kept._kept.launches, "refused", kept._kept.refused)
    gs = {a: captured(m.step) for a, m in made.items()}; times = {a: [] for a in made}
    for r in range(8):
        for a, (g, _) in gs.items(): times[a].append(clock(g.replay))
    for a in made: print(name, a, "in a CUDA graph: us", round(statistics.median(x[0] for x in times[a]), 1), "peak MiB", gs[a][1], flush=True)
    if name == sys.argv[1]:
        import cProfile, pstats, io
        prof = cProfile.Profile(); prof.enable()
        for _ in range(50): made["all"].step()
        prof.disable(); torch.cuda.synchronize()
        for key in ("tottime", "cumtime"):
            o = io.StringIO(); pstats.Stats(prof, stream=o).sort_stats(key).print_stats(40); print(o.getvalue()[:7000])
    del made, gs, m, g; import gc; gc.collect(); torch._dynamo.reset(); torch.cuda.empty_cache()
