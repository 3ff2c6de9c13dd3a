"""A fresh process: a plan, convert, torch.compile, one step. Seconds of the first step; 'off': as before the mend."""
import sys, time
sys.path.insert(0,'benchmarks/regions'); sys.path.insert(0,'benchmarks/distributed')
from argparse import Namespace
import torch, loka, models
from loka.core import compiling
if sys.argv[4] == "off": compiling._describe_ops_when_asked = lambda: None
from shared import planned
from loka.nn.linears import signature
depth, cls, rows = int(sys.argv[1]), getattr(models, sys.argv[2]), int(sys.argv[3])
import torch._inductor.config as c
c.force_disable_caches = True
torch.manual_seed(0)
width, hidden = (768, 3072) if sys.argv[2] == "FeedForward" else (1024, 2816)
model = models.Stack(cls, width, hidden, depth).cuda()
if sys.argv[4] != "bf16": loka.convert(model, planned(signature(model), Namespace(plan=None, narrowest=16, batch_size=rows), torch.device('cuda')))
x = torch.randn(rows, width, device='cuda')
step = torch.compile(model)
t = time.perf_counter()
for _ in range(2):
    with torch.autocast('cuda', torch.bfloat16): y = step(x)
    y.float().square().mean().backward()
torch.cuda.synchronize()
print(sys.argv[1:], f"{time.perf_counter()-t:.1f} s", flush=True)
