import json, sys, torch, collections
from torch.profiler import profile, ProfilerActivity
from loka.kernels.edge.program import program_of, Kind
from loka.kernels.edge.op import edge
from loka.kernels.edge.triton import program_kernels as pk
from loka.core.recording import record
dev=torch.device("cuda")
E=json.load(open("benchmarks/parts/edges.json"))
VARIANTS=[{}, {"warps":8}, {"warps":16}, {"warps":4,"held":64},{"warps":8,"held":32},{"vector":4,"warps":8},{"warps":2}]
flush=torch.empty(64<<20,device=dev,dtype=torch.uint8)
for idx in (1,3,5,7,2,8):
    e=E[idx]
    for rows in (512,2048,8192):
        p=program_of(e["text"])
        leaves=[]
        for (shape,dt),kind in zip(e["leaves"],p.leaves):
            shape=[rows if s==64 else s for s in shape]
            x=torch.randn(shape,device=dev); x=x.abs()+1 if kind is Kind.COLUMN else x
            leaves.append(x.to(getattr(torch,dt.split(".")[1])))
        last=max((i for i,k in enumerate(p.leaves) if k is Kind.FULL), default=0)
        src=torch.randn_like(leaves[last].float()).to(leaves[last].dtype)
        res={}
        ref=None
        for v in VARIANTS:
            pk.TILE.clear(); pk.TILE.update(v)
            try:
                def run():
                    leaves[last].copy_(src)
                    return edge(leaves, rows, None, None, None, e["text"])
                s=torch.cuda.Stream()
                with torch.cuda.stream(s):
                    run(); run()
                torch.cuda.synchronize()
                g=torch.cuda.CUDAGraph()
                with torch.cuda.graph(g): out=run()
                for _ in range(3): g.replay()
                with profile(activities=[ProfilerActivity.CUDA]) as pr:
                    for _ in range(12): g.replay()
                    torch.cuda.synchronize()
                t=sorted(ev.device_time for ev in pr.events() if "edge" in ev.name)
                res[str(v)]=round(t[len(t)//2],2)
                if ref is None: ref=[o.clone() for o in out]
                assert all(torch.equal(a.view(torch.uint8) if a.dtype==torch.float8_e4m3fn else a, b.view(torch.uint8) if b.dtype==torch.float8_e4m3fn else b) for a,b in zip(ref,out))
            except Exception as x: res[str(v)]=repr(x)[:60]
        print(idx, p.features, rows, json.dumps(res), flush=True)
