import sys; sys.path[:0]=["tests/compiler","tests"]
import torch, test_normed as T
from torch import nn
from converted import error, gradients, run
for size in (0.0,1e-20,1e-10,1e-9,1e-8,1e-7,1e-6,1e-5,1.0):
    torch.manual_seed(0)
    blocks=[nn.Sequential(nn.Linear(64,64,bias=False),T.BlockNorm(64,64),nn.SiLU()) for _ in range(4)]
    m=nn.Sequential(*blocks,nn.Linear(64,32)); x=T.X.clone(); x[[5,-1]]*=size
    bs,j,b=T.compiled(m,x)
    t,th,ou=(run(q,x) for q in (m,bs,torch.compile(j,backend=b)))
    e,o,to=(gradients(q) for q in (m,bs,j))
    rest=[i for i in range(70) if i not in (5,69)]
    print(size,"out",round(error(th[0],t[0]),3),round(error(ou[0],t[0]),3),"other rows",round(error(ou[0][rest],t[0][rest]),3),"dx rest",round(error(th[1][0][rest],t[1][0][rest]),3),round(error(ou[1][0][rest],t[1][0][rest]),3),"dW",[(round(error(o[n],e[n]),2),round(error(to[n],e[n]),2)) for n in e if "weight" in n])
