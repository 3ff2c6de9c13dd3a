import sys, json, torch, itertools, pickle
from loka.kernels.edge.program import program_of
from loka.kernels.edge.op import edge
from loka.kernels.edge.triton import program_kernels as pk
from loka.kernels.triton import launch as L
dev="cuda"; mode=sys.argv[1]; only=mode.startswith("compile"); part,of=(map(int,mode[7:].split("/")) if only else (0,1))
J=lambda f: json.load(open(f".spike/{f}.json"))
dcn,relu,ln,ffn,top,relu2=map(J,("dcn","p_relu_8192x1024","p_ln_silu_8192x2048","p_ffn_8192x768-3072","p_mlp_top_32768","p_relu_8192x2048"))
def widened(o,F):
    o=json.loads(json.dumps(o)); d=json.loads(o["text"]); old=d["features"]; d["features"]=d["block"]=F; o["text"]=json.dumps(d,separators=(",",":"))
    for l in o["leaves"]: l[1]=[F if x==old else x for x in l[1]]
    return o
CASES={"relu 8192x1024 last":(relu[5],8192),"relu 8192x1024":(relu[6],8192),"relu 4096x1024":(relu[6],4096),"relu 2048x1024":(relu[6],2048),"relu 8192x2048":(relu2[6],8192),
 "relu 8192x640":(widened(relu[6],640),8192),"relu 6144x4096":(widened(relu[6],4096),6144),
 "ln_silu last":(ln[5],8192),"ln_silu":(ln[6],8192),"ln_silu 8192x1024":(widened(ln[6],1024),8192),"ln_silu 8192x512":(widened(ln[6],512),8192),
 "ffn 768 plain":(ffn[12],8192),"ffn 3072":(ffn[13],8192),"ffn 768":(ffn[14],8192),
 "top 256":(top[3],32768),"top 512":(top[4],32768),"top 1024":(top[5],32768),
 "dcn 12":(dcn[12],8192),"dcn 23":(dcn[23],8192),"dcn 24":(dcn[24],8192),"dcn 13":(dcn[13],8192),"dcn 16":(dcn[16],8192),"dcn 18":(dcn[18],8192),"relu 131072x256":(dcn[24],131072),"relu 65536x512":(dcn[13],65536)}
def timed(f,n=8):
    f(); torch.cuda.synchronize()
    if only: return 0
    gr=torch.cuda.CUDAGraph()
    with torch.cuda.graph(gr):
        for _ in range(n): f()
    gr.replay(); torch.cuda.synchronize(); ts=[]
    for _ in range(5):
        a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record(); gr.replay(); gr.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)/(2*n)*1000)
    return sorted(ts)[2]
def make(spec,R,T,g):
    if spec is None: return None
    dt,shape,stride=spec
    shape=[T if i==0 and d==R else d for i,d in enumerate(shape)] if spec[1]!=[-(-R//32)] else [-(-T//32)]
    t=torch.randn(shape,device=dev,generator=g) if dt in("bfloat16","float8_e4m3fn") else torch.exp2(torch.randint(-3,3,shape,device=dev,generator=g).float())
    return t.to(getattr(torch,dt)) if dt!="uint8" else (t*200).to(torch.uint8)
def case(name):
    o,T=CASES[name]; R=o["rows"]; g=torch.Generator(dev).manual_seed(0)
    # leaves of rows: those whose first side is R and kind is not row
    kinds=json.loads(o["text"])["leaves"]
    leaves=[make(l,R if k!="row" else -1,T,g) for l,k in zip(o["leaves"],kinds)]
    return leaves,T,make(o["in"],R,T,g),make(o["gs"],R,T,g),make(o["tops"],R,T,g),o["text"]
jobs=[]
for name,(o,T) in CASES.items():
    f=program_of(o["text"]).features
    jobs.append((name,{}))
    for hi,wi,tw in ((64,128,4),(128,128,8),(64,128,2),(64,64,4)): jobs.append((name,{"high":hi,"wide":wi,"tall_warps":tw}))
    for wk in (264,396,528,1056): jobs.append((name,{"walkers":wk}))
    for w,h,s,ap in itertools.product((1,2,4,8,16),(8,16,32),(1,3),(1,2,4)):
        el=f/(32*w)
        if 8<=el<=36 and 32*w*8<=f*1.5 and w*ap<=16 and (ap==1 or f<=512) and (s==3 or h==32 and ap==1):
            for wk in (264,396,528,1056): jobs.append((name,{"warps":w,"held":h,"stages":s,"apart":ap,"walkers":wk}))
if __name__=="__main__":
    res=[]; made={}
    for n,(name,tile) in enumerate(jobs):
        if only and (hash(str((name,{k:v for k,v in tile.items() if k!="walkers"})))%of!=part or tile.get("walkers",264)!=264): continue
        if name not in made: made.clear(); made[name]=case(name)
        a=made[name]; pk.TILE.clear(); pk.TILE.update(tile); pk._plan.cache_clear(); L._RECORDINGS.clear()
        try: us=timed(lambda: edge(*a))
        except Exception as e: print(name,tile,"FAILED",repr(e)[:100],flush=True); continue
        res.append((us,name,tile))
    if not only:
        pickle.dump(res,open(sys.argv[2]+"/res.pkl","wb"))
        for name in CASES:
            mine=[r for r in res if r[1]==name]; base=[r for r in mine if not r[2]][0][0]
            print(name,program_of(CASES[name][0]["text"]).features,"base %.1f"%base,"; ".join("%s %.1f"%("x".join(map(str,r[2].values())),r[0]) for r in mine if len(r[2]) in(1,3)))
            for r in sorted((r for r in mine if len(r[2])>3),key=lambda r:r[0])[:5]: print("   %.1f"%r[0],r[2],flush=True)
        print(len(jobs))
