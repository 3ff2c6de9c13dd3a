import sys, os
sys.path[:0]=["TRITON","src"]
os.environ["TRITON_CACHE_DIR"]="triton-cache"
import re, subprocess, tempfile, collections
import triton
assert triton.__version__=="3.6.0", triton.__version__
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
src=open('benchmarks/ends/fuse.py').read().replace("\nmain()\n","\n")
exec(src)
DT = {"float32": "*fp32", "bfloat16": "*bf16", "uint8": "*u8"}
OUT = {"row":"*u8","staged":"*u8","integer":"*u8","column":"*i32","transposed":"*i32"}
def comp(pfile, line, dt, product, high, warps, vector, resident, parts, regs, stages, k):
    p=program_of(open(pfile).read().split("\n")[line])
    text,code=source(p,dt,product,high,vector,resident,parts,k,stages=stages)
    kern=compiled(text,"edge_rows",NAMES)
    names=R.row_parameters(code)+["a","w","w_scale_ptr","groups","PROGRAMS"]
    sig,attrs={}, {}
    for i,nm in enumerate(names):
        if nm.startswith("leaf"): ty=DT[dt[int(nm[4:-4])]]
        elif nm=="a": ty=f"tensordesc<fp8e4nv[{high}, {k}]>"
        elif nm=="w": ty=f"tensordesc<fp8e4nv[{p.features//parts}, {k}]>"
        elif nm=="PROGRAMS": continue
        elif nm.endswith("_ptr"): ty=OUT.get(nm[:-4],"*fp32")
        else: ty="i32"
        sig[nm]=ty
        if ty[0]=="*" or nm.startswith("stride") or nm in("padded_rows",): attrs[(i,)]=[["tt.divisibility",16]]
    sig["PROGRAMS"]="constexpr"
    s=ASTSource(fn=kern,signature=sig,constexprs={("PROGRAMS",):264} if False else {"PROGRAMS":264},attrs=attrs)
    return triton.compile(s,target=GPUTarget("cuda",90,32),options={"num_warps":warps,"maxnreg":regs})
def sass(k):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(k.asm["cubin"]); f.flush()
        nv="TRITON/triton/backends/nvidia/bin/"
        text=subprocess.run([nv+"nvdisasm","-c",f.name],capture_output=True,text=True).stdout
        res=subprocess.run([nv+"cuobjdump","-res-usage",f.name],capture_output=True,text=True).stdout
    ops=[]
    for line in text.splitlines():
        m=re.match(r"\s+(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)",line)
        if m: ops.append(m.group(1))
    return text,ops,res
if __name__=="__main__":
    dt=("float32","uint8","float32","float32","bfloat16","float32")
    for cfg in [(64,8,8,True,1,128,1),(64,8,8,True,2,128,1),(64,8,8,True,2,128,2),(64,8,16,True,2,128,1),(64,16,8,True,1,128,1),(128,16,8,True,1,128,1),(64,4,8,True,1,255,1),(64,8,8,False,2,80,1)]:
        high,warps,vector,resident,parts,regs,stages=cfg
        try:
            k=comp('benchmarks/ends/p256.txt',5,dt,4,high,warps,vector,resident,parts,regs,stages,256)
            t,ops,res=sass(k); c=collections.Counter(o.split(".")[0] for o in ops)
            held=high*256/(32*warps)
            print(cfg,"ops",len(ops),"per element %.1f"%(len(ops)/held),"smem",k.metadata.shared, re.findall(r"REG:\d+|STACK:\d+|LOCAL:\d+",res), c.most_common(14),flush=True)
        except Exception as e: print(cfg,"FAILED",repr(e)[:300],flush=True)
