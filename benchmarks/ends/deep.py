import sys,time; sys.path[:0]=["tests/compiler","tests"]
import torch
from torch import nn
from converted import plan_for, converted, run
from joint import JointBackend
import loka.compiler.lower as L
n=int(sys.argv[1])
class Block(nn.Module):
    def __init__(s):
        super().__init__(); s.n=nn.LayerNorm(64); s.a=nn.Linear(64,64); s.b=nn.Linear(64,64)
    def forward(s,x): return x+s.b(torch.nn.functional.gelu(s.a(s.n(x))))
torch.manual_seed(0)
m=nn.Sequential(*[Block() for _ in range(n)])
x=torch.randn(32,64).bfloat16()
p=plan_for(m,x); j=converted(m,p); b=JointBackend()
import joint
o=joint.join_sites
def timed(g):
    t=time.time(); r=o(g); print("join",round(time.time()-t,2),"nodes",len(g.nodes)); return r
joint.join_sites=timed
import torch._dynamo; torch._dynamo.config.cache_size_limit=1000
run(torch.compile(j,backend=b),x)
