import torch, time, sys, json, os
from concurrent.futures import ProcessPoolExecutor
from loka.kernels.gemm.triton.split_gemm import EXACT, FAST, choose, split_gemm
SHAPES=[(256,256,131072),(512,512,65536),(256,1024,81920),(1024,256,81920),(256,256,81920),(1024,1024,8192),(768,768,8192),(1024,1024,4096),(2048,512,2048),(512,3456,8192),(3456,512,8192),(512,3456,16384),(512,512,12800),(2048,512,12800),(640,640,20000),(512,1024,32768),(256,512,32768),(2048,2048,8192),(1024,3456,32768),(512,1024,8192),(3072,768,8192),(768,3072,8192),(128,512,49152),(1024,2048,6144),(1200,1664,12288),(400,800,12288)]
if os.environ.get("TINY"): SHAPES=[(64,64,512)]
dev="cuda"
def work(shape_i):
    m,n,k=SHAPES[shape_i]
    a=torch.randn(m,k,device=dev).to(torch.float8_e4m3fn); b=torch.randn(n,k,device=dev).to(torch.float8_e4m3fn)
    one=torch.ones(1,device=dev)
    for fast in (False,True):
        for alg in range(len(FAST if fast else EXACT)):
            try: split_gemm(a,b,one,one,torch.bfloat16,fast=fast,config=choose(m,n,fast=fast,algorithm=alg))
            except Exception as e: print("fail",shape_i,fast,alg,str(e)[:100])
    torch.cuda.synchronize()
    return shape_i
def bench(fns, reps=12, rounds=7):
    graphs={}
    for name,(f,copies) in fns.items():
        try:
            s=torch.cuda.Stream()
            with torch.cuda.stream(s):
                for c in copies: f(*c)
            torch.cuda.synchronize()
            g=torch.cuda.CUDAGraph()
            with torch.cuda.graph(g):
                for i in range(reps): f(*copies[i%len(copies)])
            graphs[name]=g
        except Exception as e: print(name, str(e)[:100])
    t={n:[] for n in graphs}
    for _ in range(rounds):
        for n,g in graphs.items():
            e0,e1=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            g.replay(); e0.record(); g.replay(); e1.record(); torch.cuda.synchronize()
            t[n].append(e0.elapsed_time(e1)*1e3/reps)
    return {n:sorted(v)[len(v)//2] for n,v in t.items()}
if __name__=="__main__":
    import torch.multiprocessing as mp
    mp.set_start_method("spawn")
    t0=time.time()
    with ProcessPoolExecutor(12, mp_context=mp.get_context("spawn")) as ex: list(ex.map(work, range(len(SHAPES))))
    print("compiled", round(time.time()-t0,1), flush=True)
    for m,n,k in SHAPES:
        size=(m+n)*k; copies=max(2,min(8,int(120e6//size)+1))
        one=torch.ones(1,device=dev); one2=one.view(1,1)
        cs=[]
        for _ in range(copies):
            cs.append((torch.randn(m,k,device=dev).to(torch.float8_e4m3fn), torch.randn(n,k,device=dev).to(torch.float8_e4m3fn)))
        cb=[(torch.randn(m,k,device=dev,dtype=torch.bfloat16),torch.randn(n,k,device=dev,dtype=torch.bfloat16)) for _ in range(2)]
        fns={"bf16":(lambda a,b: a@b.t(), cb),
             "torch":(lambda a,b: torch._scaled_mm(a,b.t(),one2,one2,out_dtype=torch.bfloat16,use_fast_accum=False),cs),
             "fast":(lambda a,b: torch._scaled_mm(a,b.t(),one2,one2,out_dtype=torch.bfloat16,use_fast_accum=True),cs)}
        for f in (False,True):
            for alg in range(len(FAST if f else EXACT)):
                cfg=choose(m,n,fast=f,algorithm=alg)
                fns[f"split{'F' if f else ''}{alg}"]=(lambda a,b,f=f,cfg=cfg: split_gemm(a,b,one,one,torch.bfloat16,fast=f,config=cfg),cs)
        r=bench(fns)
        print((m,n,k), {n:round(v,1) for n,v in r.items()}, "best exact split/torch", round(min(v for n,v in r.items() if n in("split0","split1"))/r["torch"],2), "bytes us", round(size/4.2e6,1), flush=True)
