"""SASS of an edge program for sm_90, made without a GPU."""
import sys, json, os, subprocess, re, collections, tempfile
sys.path[:0] = ["TRITON", "./src"]
os.environ.setdefault("TRITON_CACHE_DIR", "triton-cache")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import loka.kernels.edge.triton.program_kernels as pk
from loka.kernels.edge.program import program_of, Kind
DT = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "uint8": "*u8", "float8_e4m3fn": "*u8", "bool": "*u8", "float8_e5m2":"*u8"}
OUT = {"row":"*u8","staged":"*u8","r":"*fp32","integer":"*u8","step":"*fp32","part":"*fp32","column":"*i32","transposed":"*i32","top":"*fp32","tops":"*fp32","input_scale":"*fp32","gradient_scale":"*fp32","given":"*fp32"}
def compile_rows(program, dtypes, rows, scales, registers, tall=False):
    plan = pk.plan_of(program, dtypes, rows, scales, registers)
    L = plan.tall if tall else plan.rows
    fn = L.kernel
    sig, attrs = {}, {}
    vals = dict(zip((f"value{i}_ptr" for i in range(len(program.values))), program.value_dtypes))
    consts = {}
    for i, name in enumerate(L.parameters):
        if name.startswith("leaf"): ty = DT[dtypes[int(name[4:-4])]]
        elif name in vals: ty = DT[vals[name]]
        elif name.endswith("_ptr"): ty = OUT.get(name[:-4], "*fp32")
        else: ty = "i32"
        sig[name] = ty
        if ty[0] == "*" or name.startswith("stride") or name == "padded_rows": attrs[(i,)] = [["tt.divisibility", 16]]
    src = ASTSource(fn=fn, signature=sig, constexprs=consts, attrs=attrs)
    opts = {"num_warps": L.warps, **({"maxnreg": plan.registers} if plan.registers and not tall else {})}
    k = triton.compile(src, target=GPUTarget("cuda", 90, 32), options=opts)
    return plan, L, k
def sass(k):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(k.asm["cubin"]); f.flush()
        nv = "TRITON/triton/backends/nvidia/bin/"
        text = subprocess.run([nv+"nvdisasm","-c",f.name],capture_output=True,text=True).stdout
        res = subprocess.run([nv+"cuobjdump","-res-usage",f.name],capture_output=True,text=True).stdout
    ops=[]
    for line in text.splitlines():
        m=re.match(r"\s+(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]+)",line)
        if m: ops.append(m.group(1))
    return text, ops, res
if __name__=="__main__":
    rs=[json.loads(l) for l in open("./programs.jsonl")]
    r=rs[int(sys.argv[1])]
    p=program_of(r["text"]); dt=tuple(d for d,_ in r["leaves"])
    for regs in (64,128):
        plan,L,k=compile_rows(p,dt,131072,r["scales"],regs)
        t,ops,res=sass(k)
        c=collections.Counter(o.split(".")[0] for o in ops)
        held = 32*p.features/(32*L.warps) if plan.turns else plan.high*p.features/(32*L.warps)
        print(r["cell"],p.features,"turns",plan.turns,"warps",L.warps,"regs",plan.registers,"elements/thread",held,"ops",len(ops),"per element",round(len(ops)/held,1), re.findall(r"REG:\d+|STACK:\d+|SHARED:\d+|LOCAL:\d+",res))
        print(c.most_common(40))
        open(f"sass_{sys.argv[1]}_{regs}.txt","w").write(t)
