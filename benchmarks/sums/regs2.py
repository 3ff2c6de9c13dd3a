import sys, os, json
sys.path[:0]=["T36",os.environ.get("SRC","src")]; os.environ["TRITON_CACHE_DIR"]="TCACHE"
exec(open('.spike/regs.py').read().split("def comp(")[0].split("import triton, re")[1].join(["import triton, re",""])) if False else None
import triton, re, subprocess, tempfile, collections
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loka.kernels.edge.program import program_of
from loka.kernels.edge.triton import program_kernels as pk, rows as R
from loka.kernels.edge.triton.values import Code
from loka.kernels.edge.triton.tiles import tile_of
from loka.kernels.edge.triton.simplify import simplified
DT={"float32":"*fp32","bfloat16":"*bf16","uint8":"*u8","float8_e4m3fn":"*u8"}
OUT={"row":"*u8","staged":"*u8","integer":"*u8","column":"*i32","transposed":"*i32"}
def go(text,dt,scales,rows):
    p=simplified(program_of(text)); code=Code(p,dt)
    for lim in pk._TURNS[:2]:
        plan=pk._in_turns(code,rows,scales,tile_of(Code(program_of(text),dt)),lim)
        if plan is None: print("none"); return
        kern=plan.rows.kernel; sig,attrs={},{}
        for i,nm in enumerate(R.row_parameters(code)):
            if nm.startswith("leaf"): ty=DT[dt[int(nm[4:-4])]]
            elif nm.endswith("_ptr"): ty=OUT.get(nm[:-4],"*fp32")
            else: ty="i32"
            sig[nm]=ty
            if ty[0]=="*" or nm.startswith("stride") or nm in("padded_rows",): attrs[(i,)]=[["tt.divisibility",16]]
        k=triton.compile(ASTSource(fn=kern,signature=sig,constexprs={},attrs=attrs),target=GPUTarget("cuda",90,32),options={"num_warps":plan.rows.warps,"maxnreg":plan.registers})
        with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
            f.write(k.asm["cubin"]); f.flush()
            nv="T36/triton/backends/nvidia/bin/"
            r=subprocess.run([nv+"cuobjdump","-res-usage",f.name],capture_output=True,text=True).stdout
            t=subprocess.run([nv+"nvdisasm","-c",f.name],capture_output=True,text=True).stdout
        ops=[m.group(1) for l in t.splitlines() if (m:=re.match(r"\s+(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)",l))]
        c=collections.Counter(x.split(".")[0] for x in ops)
        print("features",p.features,"scales",scales,"warps",plan.rows.warps,"limit",plan.registers,re.findall(r"(?:REG|STACK):\d+",r),"smem",k.metadata.shared,"ops",len(ops),{n:c[n] for n in("LDG","STG","LDS","STS","BAR","STL","LDL","SHFL")},flush=True)
line=open('.spike/p1024.txt').read().split("\n")[5]
dt=("float32","uint8","float32","float32","bfloat16","float32")
for F in (512,768,1024):
    d=json.loads(line); d["features"]=F; text=json.dumps(d,separators=(",",":"))
    text=text.replace("1024.0","256.0")
    for s in [int(x) for x in sys.argv[1:]]: go(text,dt,s,65536)
