import torch, time, sys
import sg
from shapes import bench
dev="cuda"; one=torch.ones(1,device=dev); one2=one.view(1,1)
V=[(1024,8,4),(512,8,4),(256,8,4),(512,16,4),(256,16,4),(256,16,2),(128,16,1),(256,32,4),(128,32,2)]
for m,n,k in ((256,256,131072),(256,256,32768),(128,256,65536),(256,512,32768),(256,512,16384),(512,512,16384),(512,512,65536),(256,1024,81920),(768,768,16384),(1024,512,16384),(512,512,8192)):
    size=(m+n)*k; copies=max(2,min(8,int(120e6//size)+1)); dt=torch.float32
    cs=[(torch.randn(m,k,device=dev).to(torch.float8_e4m3fn), torch.randn(n,k,device=dev).to(torch.float8_e4m3fn)) for _ in range(copies)]
    cfg=sg.choose(m,n,fast=False)
    fns={"torch":(lambda a,b: torch._scaled_mm(a,b.t(),one2,one2,out_dtype=dt,use_fast_accum=False),cs)}
    for v in V:
        def f(a,b,v=v):
            sg._REDUCED,sg.AT_ONCE_,sg.WARPS_=v
            return sg.split_gemm(a,b,one,one,dt,fast=False,config=cfg)
        fns[str(v)]=(f,cs)
    # fewer splits
    from dataclasses import replace
    t=-(-m//128)*-(-n//128)
    for sp in (max(132//t//2,1),):
        def f(a,b,c=replace(cfg,splits=sp)):
            sg._REDUCED,sg.AT_ONCE_,sg.WARPS_=(256,16,4)
            return sg.split_gemm(a,b,one,one,dt,fast=False,config=c)
        fns[f"half splits {sp}"]=(f,cs)
    def f(a,b,c=replace(cfg,per_sm=2)):
        sg._REDUCED,sg.AT_ONCE_,sg.WARPS_=(256,16,4)
        return sg.split_gemm(a,b,one,one,dt,fast=False,config=c)
    fns["2 a SM"]=(f,cs)
    r=bench(fns, reps=8, rounds=5)
    print((m,n,k), {a:round(b,1) for a,b in r.items()}, flush=True)
