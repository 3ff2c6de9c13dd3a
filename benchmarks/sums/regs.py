"""Registers and spills of layouts of a program that transposes in turns: regs.py INDEX knob..."""
import sys, os, json
sys.path[:0]=["T36","src"]; os.environ["TRITON_CACHE_DIR"]="TCACHE"
import triton, re, subprocess, tempfile, collections
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loka.kernels.edge.program import program_of
from loka.kernels.edge.triton import program_kernels as pk, rows as R
from loka.kernels.edge.triton.values import Code
from loka.kernels.edge.triton.tiles import tile_of
from loka.kernels.edge.triton.simplify import simplified
from loka.kernels.triton.source import compiled
from loka.kernels.edge.triton.device import NAMES
DT={"float32":"*fp32","bfloat16":"*bf16","uint8":"*u8","float8_e4m3fn":"*u8"}
OUT={"row":"*u8","staged":"*u8","integer":"*u8","column":"*i32","transposed":"*i32"}
def comp(o,knob,regs=None):
    p=simplified(program_of(o["text"])); dt=tuple(l[0] for l in o["leaves"])
    pk.KNOB=knob
    src={}
    orig=pk.row_source
    def rs(c,l): src["text"]=orig(c,l); src["code"]=c; return src["text"]
    pk.row_source=rs; pk._row_kernel.cache_clear()
    try: plan=pk._in_turns(Code(p,dt),8192,1 if o["in"] and len(o["in"][1])==1 else 2,tile_of(Code(p,dt)),64)
    finally: pk.row_source=orig
    code=src["code"]; kern=plan.rows.kernel
    sig,attrs={},{}
    for i,nm in enumerate(R.row_parameters(code)):
        if nm.startswith("leaf"): ty=DT[dt[int(nm[4:-4])]]
        elif nm.endswith("_ptr"): ty=OUT.get(nm[:-4],"*fp32")
        else: ty="i32"
        sig[nm]=ty
        if ty[0]=="*" or nm.startswith("stride") or nm in("padded_rows",): attrs[(i,)]=[["tt.divisibility",16]]
    s=ASTSource(fn=kern,signature=sig,constexprs={},attrs=attrs)
    return triton.compile(s,target=GPUTarget("cuda",90,32),options={"num_warps":plan.rows.warps,"maxnreg":regs or knob[4]}),src["text"]
def res(k):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(k.asm["cubin"]); f.flush()
        nv="T36/triton/backends/nvidia/bin/"
        r=subprocess.run([nv+"cuobjdump","-res-usage",f.name],capture_output=True,text=True).stdout
        text=subprocess.run([nv+"nvdisasm","-c",f.name],capture_output=True,text=True).stdout
    ops=[m.group(1) for l in text.splitlines() if (m:=re.match(r"\s+(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)",l))]
    return re.findall(r"(?:REG|STACK|LOCAL):\d+",r),ops,k.metadata.shared
if __name__=="__main__":
    data=json.load(open(".spike/dcn.json"))
    for arg in sys.argv[1:]:
        i,high,warps,width,apart,regs,vec,both=map(int,arg.split(","))
        o=data[i]
        try:
            k,text=comp(o,(high,warps,width,bool(apart),regs,vec,bool(both))); r,ops,sh=res(k)
            c=collections.Counter(x.split(".")[0] for x in ops)
            f=program_of(o["text"]).features
            print(arg,"features",f,r,"smem",sh,"ops/el %.1f"%(len(ops)/(4*high*f/(32*warps))),{n:c[n] for n in("LDG","STG","LDS","STS","BAR","STL","LDL","SHFL")},flush=True)
        except Exception as e: print(arg,"FAILED",repr(e)[:600],flush=True)
