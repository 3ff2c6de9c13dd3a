import sys, json, torch
from loka.kernels.edge.program import program_of
from loka.kernels.edge.op import edge
dev="cuda"; g=torch.Generator(dev).manual_seed(0)
data=json.load(open(sys.argv[1])); T=int(sys.argv[2])
def timed(f,n=8):
    f(); f(); torch.cuda.synchronize()
    gr=torch.cuda.CUDAGraph()
    with torch.cuda.graph(gr):
        for _ in range(n): f()
    gr.replay(); torch.cuda.synchronize(); ts=[]
    for _ in range(7):
        a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record(); gr.replay(); gr.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)/(2*n)*1000)
    return sorted(ts)[3]
def make(spec,R):
    if spec is None: return None
    dt,shape,stride=spec; s=T//R
    shape=[d*s if i==0 and d==R else d for i,d in enumerate(shape)]
    if spec and shape and spec[1][0]!=R and spec[1]==[-(-R//32)]: shape=[-(-T//32)]
    t=torch.rand(shape,device=dev,generator=g)+.1
    return t.to(getattr(torch,dt)) if dt!="uint8" else (t*200).to(torch.uint8)
seen=set(); tot=0
SZ={"bfloat16":2,"float32":4,"uint8":1,"float8_e4m3fn":1,"float16":2,"bool":1}
for i,o in enumerate(data):
    p=program_of(o["text"]); leaves=[make(l,o["rows"]) for l in o["leaves"]]
    a=(leaves,T,make(o["in"],o["rows"]),make(o["gs"],o["rows"]),make(o["tops"],o["rows"]),o["text"])
    t=timed(lambda: edge(*a)); tot+=t
    n=T*p.features
    by=sum(SZ[l[0]] for l,k in zip(o["leaves"],p.leaves) if k=="full")+p.row+p.column+(p.transposed is not None)+p.integers+sum(SZ[d] for v,d in zip(p.values,p.value_dtypes) if p.kinds[v]=="full")
    from loka.kernels.edge.triton import program_kernels as pk
    from loka.core.problem import dtype_name
    dt=tuple(dtype_name(l.dtype) for l in leaves); sc=0 if a[2] is None else 1 if a[2].numel()==1 else 2
    pl=pk.plan_of(p,dt,T,sc,64)
    print(i,p.features,"row" if p.row else "","col" if p.column else "","tr" if p.transposed is not None else "","sums",len(p.sums),"us %.1f"%t,"bytes/el",by,"at 4.3 TB/s %.1f"%(n*by/4.3e6),"turns" if pl.turns else ("rows" if pl.rows else "")+("+tall" if pl.tall else ""),flush=True)
print("total",tot)
