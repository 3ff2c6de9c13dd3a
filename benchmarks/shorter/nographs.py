"""Compiled steps launched by the host, without CUDA graphs: bf16 against LoKA, in turns."""
import sys, time; sys.path.insert(0, "benchmarks/regions")
import torch, cells, statistics
from pathlib import Path
from arms import How, build, plan_of, LOKA
how = How(device=torch.device("cuda"), plans=Path(".spike/plans"))
for name in ("tower_mods_8192x1024", "dcnv2_zoo_8192"):
    c = cells.CELLS[name]; arms = {}
    for arm in ("bf16_whole", LOKA):
        arms[arm] = build(arm, c, how, plan_of(c, how)[0] if arm == LOKA else None)
        for _ in range(5): arms[arm].step()
    torch.cuda.synchronize(); times = {a: [] for a in arms}; host = {a: [] for a in arms}
    for r in range(8):
        for a, arm in arms.items():
            torch.cuda.synchronize(); t = time.perf_counter()
            for _ in range(20): arm.step()
            h = time.perf_counter() - t; torch.cuda.synchronize(); times[a].append((time.perf_counter() - t) / 20 * 1e6); host[a].append(h / 20 * 1e6)
    m = {a: statistics.median(v) for a, v in times.items()}
    print(name, {a: (round(m[a]), round(statistics.median(host[a]))) for a in m}, "LoKA over bf16", round(m["bf16_whole"] / m[LOKA], 3), flush=True)
    torch._dynamo.reset()
