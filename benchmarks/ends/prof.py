import sys, torch
from loka.kernels.gemm.triton.gemm import gemm_normed_fused, Config, CONFIGS
from loka.kernels.gemm.epilogue import Epilogue, Activation
from loka.kernels.edge.program import program_of
from loka.kernels.edge.op import edge
dev="cuda"; g=torch.Generator(dev).manual_seed(0)
def go(rows,n,pfile):
    a=(torch.randn(rows,n,device=dev,generator=g)*60).to(torch.float8_e4m3fn); w=(torch.randn(n,n,device=dev,generator=g)*30).to(torch.float8_e4m3fn)
    s=torch.full((1,),2.0**-5,device=dev)
    of=Epilogue(block=256,eps=1e-6,activation=Activation.HARD_SWISH)
    for _ in range(2): gemm_normed_fused(a,w,s,s,of,keep=True)
    line=open(pfile).read().split("\n")[5]; N=n; nb=N//256
    leaves=[torch.rand(rows,nb,1,device=dev,generator=g)/16, torch.randint(0,256,(rows,N),device=dev,dtype=torch.uint8,generator=g), torch.rand(rows,nb,1,device=dev,generator=g), torch.full((rows,1),0.25,device=dev), torch.randn(rows,N,device=dev,generator=g).bfloat16(), torch.rand(rows,nb,1,device=dev,generator=g)+.5]
    one=torch.ones(1,device=dev); r=torch.full((rows,1),0.25,device=dev); tops=torch.rand(rows//32,device=dev,generator=g)
    for _ in range(2): edge(leaves,rows,one,r,tops,line)
    from loka.kernels.gemm.triton import split_gemm as S
    return a
a=go(131072,256,'benchmarks/ends/p256.txt'); go(8192,1024,'benchmarks/ends/p1024.txt')
torch.cuda.synchronize()
