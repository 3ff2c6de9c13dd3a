"""Time of operator_str as torch 2.11 would call it (eagerly), in a converted stack compiled on a CPU."""
import sys, time
from argparse import Namespace
sys.path.insert(0,'benchmarks/regions'); sys.path.insert(0,'benchmarks/distributed')
import torch, loka, models
from shared import planned
from loka.nn.linears import signature
import torch._inductor.graph as G
import torch._inductor.lowering as L
import torch._inductor.exc as exc
depth=int(sys.argv[1]); cls=getattr(models, sys.argv[2], None)
orig=exc.OperatorIssue.operator_str
class Lazy:
    def __init__(self, f, *a):
        if len(a) != 3: return
        t=time.perf_counter(); s=f(*a); print("   str", a[0], f"{time.perf_counter()-t:.2f} s, {len(str(s))} chars", flush=True)
    def __str__(self): return ""
G.LazyString=Lazy
torch.manual_seed(0)
model=models.Stack(cls,64,128,depth) if cls else __import__("shared").Tower(64,depth)
loka.convert(model, planned(signature(model), Namespace(plan=None, narrowest=16, batch_size=96), torch.device('cpu')))
exc.OperatorIssue.operator_str=staticmethod(orig)
x=torch.randn(96,64)
step=torch.compile(model)
t=time.perf_counter()
with torch.autocast('cpu', torch.bfloat16): y=step(x)
y.float().square().mean().backward()
print(f"{time.perf_counter()-t:.1f} s")
