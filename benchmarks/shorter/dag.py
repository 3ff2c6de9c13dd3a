"""Random residual and cross networks, joined: circles, values, gradients."""
import sys, random, copy, traceback
sys.path[:0]=["./src","./tests","./tests/compiler"]
import torch, loka
from torch import nn
import torch.nn.functional as F
from joint import JointBackend
from converted import converted, plan_for, run, gradients, error
W=32
class Net(nn.Module):
    def __init__(s, seed):
        super().__init__(); r=random.Random(seed); s.ops=[]; s.lins=nn.ModuleList(); s.norms=nn.ModuleList()
        vals=1
        for _ in range(r.randint(4,14)):
            k=r.choice(["lin","lin","lin","add","add","mul","relu","silu","gelu","hswish","ln","rms","lin2","scale","cross","cross","tanh","gate"])
            a,b,c=(max(0,vals-1-int(r.random()**2*4)) for _ in "abc"); a=min(a,vals-1)
            if k in("lin","cross","gate"): s.lins.append(nn.Linear(W,W,bias=r.random()<.7)); s.ops.append((k,a,b,len(s.lins)-1))
            elif k=="lin2":
                s.lins.append(nn.Linear(W,16,bias=r.random()<.5)); s.lins.append(nn.Linear(16,W)); s.ops.append((k,a,b,len(s.lins)-2))
            elif k in("ln","rms"):
                s.norms.append(nn.LayerNorm(W) if k=="ln" else nn.RMSNorm(W)); s.ops.append((k,a,b,len(s.norms)-1))
            else: s.ops.append((k,a,b,c))
            vals+=1
        s.out=[r.randrange(vals) for _ in range(r.randint(1,3))]+[vals-1]
        s.lins.append(nn.Linear(W,W))
    def forward(s,x):
        v=[x]
        for k,a,b,c in s.ops:
            A,B=v[a],v[b]
            if k=="lin": y=s.lins[c](A)
            elif k=="lin2": y=s.lins[c+1](s.lins[c](A))
            elif k=="cross": y=v[0]*s.lins[c](A)+A
            elif k=="gate": y=torch.sigmoid(s.lins[c](A))*B
            elif k=="add": y=A+B
            elif k=="mul": y=A*B*.5
            elif k=="relu": y=F.relu(A)
            elif k=="silu": y=F.silu(A)
            elif k=="gelu": y=F.gelu(A)
            elif k=="hswish": y=F.hardswish(A)
            elif k=="tanh": y=torch.tanh(A)
            elif k in("ln","rms"): y=s.norms[c](A)
            else: y=A*.7
            v.append(y)
        return s.lins[-1](sum(v[i] for i in s.out))
a,b=map(int,sys.argv[1].split(":")); bad=0; given=0
for seed in range(a,b):
    torch.manual_seed(seed); m=Net(seed); x=torch.randn(24,W)
    try:
        plan=plan_for(m,x); torch._dynamo.reset()
        one,jn=converted(m,plan),converted(m,plan)
        exact=copy.deepcopy(m); e=run(exact,x); s=run(one,x)
        be=JointBackend(); comp=torch.compile(jn,backend=be); j=run(comp,x)
        ge,gs,gj=gradients(exact),gradients(one),gradients(jn)
        for n,(o,t,tr) in {"y":(j[0],s[0],e[0]),"dx":(j[1][0],s[1][0],e[1][0]),**{n:(gj[n],gs[n],ge[n]) for n in ge}}.items():
            eo,et=error(o,tr),error(t,tr)
            if not eo<=1.5*et+.02: print("BAD",seed,n,round(eo,4),round(et,4),flush=True); bad+=1
        import json
        for g in be.graphs:
            for node in g.nodes:
                if str(node.target)=="loka.edge.default":
                    p=json.loads(node.args[-1]); given+=len(p["values"])
    except Exception as ex: print("EXC",seed,type(ex).__name__,str(ex)[:300],flush=True); bad+=1
print("done",a,b,"bad",bad,"given",given)
