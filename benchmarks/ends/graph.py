import sys; sys.path[:0]=["benchmarks/regions","tests/compiler","tests"]
import torch, cells
from joint import JointBackend
from loka.nn.linears import signature
from loka.graph.attach import attach
from dataclasses import replace
cell=cells.CELLS[sys.argv[1]]
if len(sys.argv)>2: cell=replace(cell,rows=int(sys.argv[2]))
dev=torch.device("cpu"); m=cell.model(dev,tiny=False)
inputs,labels=cell.batch(dev,tiny=False)
inputs=[i.requires_grad_() if i.is_floating_point() else i for i in inputs]
sites=signature(m).layers
big=[p for p,l in sites.items() if min(l.in_features,l.out_features)>=128]
attach(m,{p:sites[p] for p in big},{p:("torch:rowwise_e4m3_pow2",)*3 for p in big},join=True)
b=JointBackend()
with torch.autocast("cpu",torch.bfloat16):
    y=torch.compile(m,backend=b)(*inputs)
    y.sum().backward()
print(b.apart)
for g in b.graphs:
    print("=========")
    for n in g.nodes:
        v=n.meta.get("val")
        s=(str(v.dtype)[6:]+str(list(v.shape))) if isinstance(v,torch.Tensor) else ""
        print(n.name, str(n.target)[:60], [str(a)[:60] for a in n.args] , s)
