"""Time of parts of a first compiled step by depth, on a CPU: LoKA's joint pass, Inductor, all; converted and bf16."""
import sys, time, cProfile, pstats
from argparse import Namespace
sys.path.insert(0,'benchmarks/regions'); sys.path.insert(0,'benchmarks/distributed')
import torch, loka, models
from shared import planned
from loka.nn.linears import signature
from loka.compiler import joint_pass
depth=int(sys.argv[1]); cls=getattr(models, sys.argv[2]); conv=len(sys.argv)<4
torch.manual_seed(0)
model=models.Stack(cls,64,128,depth)
if conv: loka.convert(model, planned(signature(model), Namespace(plan=None, narrowest=16, batch_size=96), torch.device('cpu')))
x=torch.randn(96,64)
spent=[0.]
orig=joint_pass.RegionPass.__call__
def call(self, graph):
    t=time.perf_counter()
    import os
    pr=cProfile.Profile() if os.environ.get("PROF") else None
    if pr: pr.enable()
    r=orig(self, graph); spent[0]+=time.perf_counter()-t
    if pr: pr.disable(); pstats.Stats(pr).sort_stats("cumtime").print_stats(45)
    return r
joint_pass.RegionPass.__call__=call
import torch._inductor.config as c
c.force_disable_caches=True
step=torch.compile(model)
t=time.perf_counter()
with torch.autocast('cpu', torch.bfloat16): y=step(x)
y.float().square().mean().backward()
print(depth, sys.argv[2:], f"{time.perf_counter()-t:.1f} s, of which LoKA's pass {spent[0]:.2f}", flush=True)
