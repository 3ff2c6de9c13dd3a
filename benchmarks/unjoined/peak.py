import sys, time; sys.path[:0]=["./benchmarks/regions","./tests/compiler","./tests"]
import torch, cells, copy
from torch._inductor import config, memory, graph as G
import torch._inductor.scheduler as S
import loka
from loka.nn.linears import signature
from loka.graph.attach import attach
config.fx_graph_cache=False
ROWS=int(sys.argv[2]) if len(sys.argv)>2 else 6144
VARIANT=sys.argv[3] if len(sys.argv)>3 else ""
from dataclasses import replace
cell=replace(cells.CELLS[sys.argv[1]], rows=ROWS)
orig=memory.reorder_for_peak_memory
found=[]
def watch(nodes,name_to_buf,n2f,gi,go,*a):
    r=orig(nodes,name_to_buf,n2f,gi,go,*a)
    est,free=memory.prepare_planning_info(r,name_to_buf,n2f,gi,go)
    peak,_=memory.estimate_peak_memory(r,free,go)
    found.append((peak,len(r),r,free,go))
    if len(found)==2: raise Stop
    return r
import logging; memory.torch_log.info=lambda m,*a: print("   ",m%a) if "peak memory:" in m else None
memory.reorder_for_peak_memory=watch
class Stop(Exception): pass
n=[0]
o=G.GraphLowering.compile_to_module
def stop(self):
    n[0]+=1
    return o(self)
G.GraphLowering.compile_to_module=stop
def run(loka_on):
    found.clear(); n[0]=0; torch._dynamo.reset()
    dev=torch.device("cpu"); m=cell.model(dev,tiny=False)
    inputs,labels=cell.batch(dev,tiny=False)
    if loka_on:
        sites=signature(m).layers
        big=[p for p,l in sites.items() if min(l.in_features,l.out_features)>=128]
        attach(m,{p:sites[p] for p in big},{p:("torch:rowwise_e4m3_pow2","torch:rowwise_e4m3_pow2","torch:rowwise_e4m3_pow2") for p in big},join=True)
        from loka.compiler import install, lower; install(); lower.call_scaled_mm=lambda e: None
        from loka.kernels.gemm import run as R; from loka.core.problem import DTYPES
        R.ScaledGemm.__call__=lambda self,a,b: torch.zeros(self.problem.m,self.problem.n,dtype=DTYPES[self.problem.dtype])
    t=time.time()
    try:
        with torch.autocast("cpu",torch.bfloat16):
            y=torch.compile(m)(*inputs)
        print("ran"); y.sum().backward()
    except Exception as e:
        print("EXC",repr(e)[:300])
    for i,(p,k,r,free,go) in enumerate(found): print("LoKA" if loka_on else "bf16",["fw","bw"][i] if i<2 else i,"peak MB",p>>20,"nodes",k,round(time.time()-t),flush=True)
    if loka_on and len(found)>1:
        peak,k,r,free,go=found[1]
        live=memory.estimate_peak_memory(r,free,go)[1]
        top=max(range(len(live)),key=lambda i: live[i])
        print("peak at node",top,"of",len(r), r[max(top-1,0)].get_name())
        import json
        for i in range(0,len(live),max(1,len(live)//(400 if "all" in sys.argv else 60))): print(i, live[i]>>20, r[i].get_name() if i<len(r) else "", [type(x.node).__name__+":"+str(getattr(x.node,"python_kernel_name","") or "") for x in (r[i].get_nodes() if i<len(r) else [])][:3], [str(q.layout.size)[:40] for q in []])
    return list(found)
if __name__=="__main__":
    run(False); f=run(True)
