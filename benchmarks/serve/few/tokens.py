import torch, torch.nn.functional as F
dev="cuda"
from loka.nn.block_norm import BlockNorm
def timeit(f, n=20):
    s=torch.cuda.Stream()
    with torch.cuda.stream(s):
        for _ in range(3): f(0)
    torch.cuda.synchronize()
    G=torch.cuda.CUDAGraph()
    with torch.cuda.graph(G):
        for i in range(n): f(i)
    for _ in range(3): G.replay()
    ts=[]
    for _ in range(5):
        b,e=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        b.record(); G.replay(); e.record(); torch.cuda.synchronize(); ts.append(b.elapsed_time(e)*1e3/n)
    return round(sorted(ts)[2],2)
def pad(W):
    P=torch.zeros(W.shape[0], (W.shape[1]+7)//8*8, device=dev, dtype=W.dtype); P[:, :W.shape[1]]=W; return P[:, :W.shape[1]]
with torch.no_grad():
  for B in (64, 512, 2048, 8192):
    for n,m in ((64,32),(64,24),(27,32),(27,24),(27,64)):
        d=160
        X=[torch.randn(B,n,d,device=dev,dtype=torch.bfloat16) for _ in range(3)]
        W=torch.randn(m,n,device=dev,dtype=torch.bfloat16); Wp=pad(W)
        f1=lambda i,W=W: torch.bmm(X[i%3].transpose(1,2), W.t().expand(B,n,m))
        f2=lambda i,W=W: torch.bmm(W.expand(B,m,n), X[i%3])
        f3=lambda i,W=W: torch.mm(X[i%3].transpose(1,2).reshape(-1,n), W.t())
        r={"f1":timeit(f1),"f2":timeit(f2),"mm_copy":timeit(f3)}
        if n==27: r|={"f1p":timeit(lambda i: f1(i,Wp)),"f2p":timeit(lambda i: f2(i,Wp))}
        ok=(f1(0).transpose(1,2).float()-f2(0).float()).abs().max().item()
        print("bmm",B,n,m,r,"diff",ok,flush=True)
    # layer tail
    norm=BlockNorm(160,160).to(dev).bfloat16() if True else None
    fm=[torch.randn(B,32*160,device=dev,dtype=torch.bfloat16) for _ in range(3)]
    X=[torch.randn(B,64,160,device=dev,dtype=torch.bfloat16) for _ in range(3)]
    W=torch.randn(32,64,device=dev,dtype=torch.bfloat16)*.1
    t=torch.rand(B,1,device=dev)
    def tail1(x,f,W): return norm(torch.cat([f.view(-1,32,160), torch.bmm(x.transpose(1,2), W.t().expand(x.shape[0],64,32)).transpose(1,2)],1)+x)
    def tail2(x,f,W): return norm(torch.cat([f.view(-1,32,160), torch.bmm(W.expand(x.shape[0],32,64), x)],1)+x)
    def sc(g): return lambda x,f,W,t: g(x,(f*t).to(f.dtype),W)
    for name,g in (("tail1",tail1),("tail2",tail2)):
        torch._dynamo.reset(); c=torch.compile(g,dynamic=False); a=timeit(lambda i: c(X[i%3],fm[i%3],W))
        torch._dynamo.reset(); c2=torch.compile(sc(g),dynamic=False); b=timeit(lambda i: c2(X[i%3],fm[i%3],W,t))
        print(name,B,"plain",a,"scaled",b,flush=True)
