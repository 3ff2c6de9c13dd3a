import torch, time, logging
from loka.kernels.gemm import algorithms as al
from loka.kernels.gemm.adapters.cublaslt import uncut, _usual_plan
from loka.core.problem import Problem, target_of
from loka.core.recipe import RECIPES, Gemm
from loka.core.timing import time_interleaved
dev=torch.device("cuda",0); torch.zeros(1,device=dev)
def P(g,m,n,k): return Problem(gemm=Gemm(g),m=m,n=n,k=k,dtype="bfloat16",target=target_of(dev))
for name,g,m,n,k in [("torch_fast","output",8192,3456,512),("torch_fast","output",8192,512,3456),("torch_fast","grad_input",8192,3456,512),("torch_fast","output",8192,1024,3456),("torch","grad_weight",512,3456,8192),("torch","grad_weight",3456,512,8192),("torch","grad_weight",2816,1024,8192),("torch_fast","output",8192,1024,1024)]:
    first,other=al._OTHERS[name]; p=P(g,m,n,k)
    un=uncut(p,al._RECIPE,fast=other.fast); all_=[(i,s) for i,(_,s) in enumerate(_usual_plan(p,al._RECIPE,fast=other.fast).algorithms)]
    gen=torch.Generator(dev).manual_seed(0)
    out=[]
    for draw in (al._of_all_magnitudes, al._normal):
        a,b=al._operands(p,draw,gen); e=first.run(a,b,torch.bfloat16); r=[]
        for i in un:
            o=other.run(a,b,torch.bfloat16,algorithm=i); ne=(o!=e).sum().item(); r.append((i,ne))
        out.append(r)
    print(name,g,m,n,k,"algs",all_,"uncut",un,"wide draws",out[0],"normal",out[1], "nan",bool(e.isnan().any()),flush=True)
    a,b=al._operands(p,al._normal,gen)
    runs={first.name:(lambda: first.run(a,b,torch.bfloat16))}
    for i in un: runs[f"{other.name}@{i}"]=(lambda i=i: other.run(a,b,torch.bfloat16,algorithm=i))
    race=time_interleaved(runs,baseline=first.name,device=dev,tie=.02,max_rounds=30)
    print("   ",{n:round(t.speedup.value,3) for n,t in race.timings.items() if t.speedup},race.winner,flush=True)
    t=time.time(); print("   timed:",al._timed(first,other,p,dev),round(time.time()-t,2),flush=True)
