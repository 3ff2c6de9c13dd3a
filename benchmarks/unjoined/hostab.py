import sys, time; sys.path.insert(0, "benchmarks/regions")
import torch, cells, statistics
from pathlib import Path
import arms as A, loka
from arms import How, plan_of, arm_of
how = How(device=torch.device("cuda"), plans=Path(".spike/plans"))
for name in ("tower_mods_8192x1024",):
    c = cells.CELLS[name]; plan = plan_of(c, how)[0]; made = {}
    for arm in ("bf16", "loka"):
        torch._dynamo.reset(); model = A._prepared(c, how)
        if arm == "loka": loka.convert(model, plan)
        s = arm_of(model, torch.compile(model), c, how)
        for _ in range(30): s.step()
        torch.cuda.synchronize(); made[arm] = s
    times = {a: [] for a in made}
    for r in range(10):
        for a, arm in made.items():
            for _ in range(5): arm.step()
            torch.cuda.synchronize(); t = time.perf_counter()
            for _ in range(20): arm.step()
            torch.cuda.synchronize(); times[a].append((time.perf_counter() - t) / 20 * 1e6)
    print(Path(loka.__file__).parents[1], name, {a: (round(statistics.median(v)), round(min(v))) for a, v in times.items()}, flush=True)
