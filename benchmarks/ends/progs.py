import sys, json
exec(open('benchmarks/ends/graph.py').read().split("print(b.apart)")[0])
from loka.kernels.edge.op import edge
R=int(sys.argv[2]); out=[]
for g in b.graphs:
    for n in g.nodes:
        if n.target is edge:
            def d(a):
                if a is None: return None
                v=a.meta['val']; return [str(v.dtype)[6:], list(v.shape), list(v.stride())]
            out.append({"leaves":[d(a) for a in n.args[0]],"rows":R,"in":d(n.args[2]),"gs":d(n.args[3]),"tops":d(n.args[4]),"text":n.args[5],"name":n.name})
        elif "loka" in str(n.target) or "_scaled_mm" in str(n.target) or ".mm" in str(n.target):
            v=n.meta.get("val"); print(n.name, str(n.target), [list(a.meta['val'].shape) for a in n.args if hasattr(a,'meta') and hasattr(a.meta.get('val'),'shape')], list(v.shape) if hasattr(v,'shape') else '', str(n.args[5:9])[:90])
json.dump(out,open(sys.argv[3],'w')); print(len(out))
for i,o in enumerate(out):
    p=json.loads(o["text"]); print(i,o["name"],"features",p["features"],"grad",p["gradient"] is not None,"row",p["row"],"col",p["column"],"tr",p["transposed"] is not None,"sums",len(p["sums"]),"values",list(zip(p["values"],p["value_dtypes"])),"steps",len(p["steps"]),[(k,l[0]) for k,l in zip(p["leaves"],o["leaves"])])
