"""Where copies of a step come from: bf16 and LoKA, eager profile with shapes."""
import sys; sys.path.insert(0, "benchmarks/regions")
import torch, cells
from pathlib import Path
from arms import How, build, plan_of, LOKA
from torch.profiler import profile, ProfilerActivity as A
c = cells.CELLS["dcnv2_zoo_8192"]
how = How(device=torch.device("cuda"), plans=Path(".spike/plans"))
for name in ("bf16_whole", LOKA):
    plan = plan_of(c, how)[0] if name == LOKA else None
    arm = build(name, c, how, plan)
    for _ in range(3): arm.step()
    torch.cuda.synchronize()
    with profile(activities=[A.CPU, A.CUDA], record_shapes=True) as p: arm.step(); torch.cuda.synchronize()
    for e in p.events():
        if e.name in ("aten::copy_", "aten::clone", "cudaMemcpyAsync") and e.device_time_total > 15:
            par = []; q = e.cpu_parent
            while q: par.append(q.name[:50]); q = q.cpu_parent
            print(name, e.name, e.input_shapes[:2], round(e.device_time_total, 1), par[:5], flush=True)
