import csv, numpy as np, sys
r=np.random.default_rng(5)
def make(name,n,nanlab=False,header=("view","order")):
    with open(name,"w",newline="") as f:
        w=csv.writer(f); w.writerow([*header,"age","price","spend","country","shop"])
        c=r.choice(6,n,p=[.4,.25,.03,.12,.1,.1]); s=r.integers(0,30,n); x=r.normal(size=(n,3))
        x[c==2,1]*=30
        z1=x[:,0]-.5*x[:,2]; z2=np.where(c==2,1.5*x[:,2],x[:,0]*.7)-1.2+.03*s
        y1=r.random(n)<1/(1+np.exp(-z1)); y2=r.random(n)<1/(1+np.exp(-z2))
        for i in range(n):
            o="" if nanlab and i%97==0 else int(y2[i])
            w.writerow([int(y1[i]),o,f"{x[i,0]:.4f}",f"{x[i,1]:.4f}",f"{x[i,2]:.4f}",f"c{c[i]}",f"s{s[i]}"])
make("tr.csv",120000); make("te.csv",60000)
import json
json.dump({"label":["view","order"],"dense":["age","price","spend"],"sparse":["country","shop"]},open("schema.json","w"))
