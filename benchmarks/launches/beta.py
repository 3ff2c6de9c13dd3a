import torch, itertools
from loka.kernels.gemm.adapters import cublaslt as c
from loka.kernels.gemm import algorithms as al
from loka.core.problem import Problem, target_of
from loka.core.recipe import RECIPES, Gemm
from loka.core.numerics.reference import Quantized
from loka.core.timing import time_interleaved
dev=torch.device("cuda",0); torch.zeros(1,device=dev)
R=RECIPES["rowwise_e4m3"]; T=RECIPES["tensorwise_e4m3"]
for m,n,k in [(32768,3456,1024),(32768,1024,1024),(32768,1024,512),(16384,1536,2048),(8192,1024,2816),(8192,1280,1024),(4096,1024,512),(131072,256,256)]:
    p=Problem(gemm=Gemm.GRAD_INPUT,m=m,n=n,k=k,dtype="bfloat16",target=target_of(dev))
    g=torch.Generator(dev).manual_seed(0)
    ra,rb=R.casts(p.gemm); ta,tb=T.casts(p.gemm)
    x=torch.randn(m,k,device=dev,dtype=torch.bfloat16,generator=g).to(torch.float8_e4m3fn); w=torch.randn(n,k,device=dev,dtype=torch.bfloat16,generator=g).to(torch.float8_e4m3fn)
    sa=torch.exp2(torch.randint(-3,3,(m,1),device=dev,generator=g).float()); sb=torch.ones(n,1,device=dev); one=torch.ones(1,1,device=dev)
    C=torch.randn(m,n,device=dev,dtype=torch.bfloat16,generator=g)*30
    A,B=Quantized(x,sa,ra),Quantized(w,sb,rb); A1,B1=Quantized(x,one,ta),Quantized(w,one,tb)
    bf=torch.bfloat16
    out=c._run(A,B,bf,fast=True,addend=C); ref=(c._run(A,B,torch.float32,fast=True)+C.float())
    err=((out.float()-ref).abs()/(ref.abs().clamp_min(1e-3))).max().item()
    n_alg=len(c._plan(c._Key(m,n,k,(x.dtype,w.dtype,bf),(ra.granularity,rb.granularity),True,256,0)).algorithms)
    best=al.faster_than_torch("torch_fast",p,dev); bi=int(best.partition("@")[2]) if best else 0
    P=[c._run(A1,B1,bf,fast=True) for _ in range(4)]; S=[sa]*4
    @torch.compile
    def summed4(p0,p1,p2,p3,s): return ((p0.float()*s).bfloat16()+(p1.float()*s).bfloat16()+(p2.float()*s).bfloat16()+(p3.float()*s).bfloat16())
    summed4(*P,sa)
    runs={"one":lambda: c._run(A1,B1,bf,fast=True,algorithm=bi), "rows":lambda: c._run(A,B,bf,fast=True), "rows+C":lambda: c._run(A,B,bf,fast=True,addend=C), "one+C":lambda: c._run(A1,B1,bf,fast=True,algorithm=bi,addend=C), "sum4":lambda: summed4(*P,sa)}
    r=time_interleaved(runs,baseline="one",device=dev,tie=.02,max_rounds=30)
    t={a:round(v.microseconds.value,1) for a,v in r.timings.items()}
    print((m,n,k),"err",f"{err:.2e}","algs rows",n_alg,"best",best,t,"| 4 by readers",round(4*t["one"]+t["sum4"],1),"in GEMMs",round(t["rows"]+3*t["rows+C"],1), "rows then sum",round(4*t["rows"]+t["sum4"],1),flush=True)
