"""_of_one_input: random graphs of views and casts."""
import torch, pytest, random
from torch import nn
from test_serve_graphs import backend
import test_serve_graphs as T
from served import plan_for, POW2
from loka.serve import freeze
from loka.serve.rows import leaves
class V(nn.Module):
    def __init__(s, kind):
        super().__init__(); s.kind=kind; s.a=nn.Linear(16,16); s.b=nn.Linear(16,16); s.c=nn.Linear(16,16)
    def forward(s,x):
        k=s.kind; n=x.shape[0]
        if k=="f16": u,v,w=x.half().float(), x.bfloat16().float(), x
        if k=="T": t=x.view(n,4,4); u,v,w=t.mT.reshape(n,16), t.reshape(n,16), t.transpose(1,2).contiguous().view(n,16)
        if k=="slice": t=torch.cat([x,x*2],1); u,v,w=t[:,:16],t[:,8:24],t[:,16:]
        if k=="expand": t=x[:,:4]; u,v,w=t.unsqueeze(1).expand(n,4,4).reshape(n,16), t.unsqueeze(2).expand(n,4,4).reshape(n,16), t.repeat(1,4)
        if k=="mut": t=x.clone(); u=s.a(t); t[:,:3]=7; return u, s.b(t), s.c(x)
        if k=="mut2": t=x.clone(); r=t.view(n,16); u=s.a(r); t.mul_(2); return u, s.b(r), s.c(t.clone())
        if k=="double": u,v,w=x.double().float(), x.bfloat16(), x.bfloat16().half().float()
        if k=="int": u,v,w=x.long().float(), x, x.to(torch.int8).float()
        if k=="ac":
            with torch.autocast("cpu",enabled=False): u=s.a(x.float())
            return u.float(), s.b(x).float(), s.c(x.bfloat16()).float()
        if k=="flip": u,v,w=x.flip(1),x.roll(1,1),x
        return s.a(u).float(), s.b(v).float(), s.c(w).float()
@pytest.mark.parametrize("cast",[torch.bfloat16,None])
@pytest.mark.parametrize("k","f16 T slice expand mut mut2 double int ac flip".split())
def test_k(backend,k,cast):
    torch.manual_seed(0); m=V(k).eval()
    args=dict(calibration=[T.inputs(40,i) for i in range(3)], autocast=cast, buckets=(2,16))
    p=plan_for(m,{"a":POW2,"b":POW2,"c":POW2})
    s=freeze(m,p,graphs=True,**args); e=freeze(m,p,graphs=False,**args)
    from loka.compiler.gemms import region_gemm
    for c in (2,9,16):
        for i,(a,b) in enumerate(zip(leaves(s(T.inputs(c)).output),leaves(e(T.inputs(c)).output))):
            if not torch.equal(a,b): print(k,cast,c,i,(a-b).abs().max().item(), b.abs().max().item())
