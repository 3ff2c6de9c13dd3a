import torch, time
import sys; sys.path.insert(0,".spike")
from loka.kernels.gemm.triton.split_gemm import EXACT, choose, split_gemm
from shapes import bench
dev="cuda"
one=torch.ones(1,device=dev); one2=one.view(1,1)
def go(m,n,k,dt):
    size=(m+n)*k; copies=max(2,min(8,int(120e6//size)+1))
    cs=[(torch.randn(m,k,device=dev).to(torch.float8_e4m3fn), torch.randn(n,k,device=dev).to(torch.float8_e4m3fn)) for _ in range(copies)]
    cfg=choose(m,n,fast=False)
    r=bench({"torch":(lambda a,b: torch._scaled_mm(a,b.t(),one2,one2,out_dtype=dt,use_fast_accum=False),cs),
       "split":(lambda a,b: split_gemm(a,b,one,one,dt,fast=False,config=cfg),cs)}, reps=8, rounds=5)
    t=-(-m//128)*-(-n//128)
    print(f"{m}x{n}x{k} {str(dt)[6:]} tiles {t} torch {r['torch']:.1f} split {r['split']:.1f} ratio {r['split']/r['torch']:.2f}", flush=True)
t0=time.time()
for m,n in ((64,64),(64,256),(128,128),(128,256),(256,256),(128,512),(256,512),(512,256),(384,384),(512,512),(256,1024),(640,640),(512,768),(1024,512),(768,768)):
    for k in (8192,16384,32768,65536,131072):
        if (m+n)*k > 1.1e8: continue
        go(m,n,k,torch.float32)
        if time.time()-t0>75: print("stopped"); break
for m,n,k in ((256,512,32768),(512,512,65536),(512,512,32768),(256,1024,32768),(128,256,65536)): go(m,n,k,torch.bfloat16)
