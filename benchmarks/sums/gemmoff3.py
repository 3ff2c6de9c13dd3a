import sys, os
sys.path[:0]=["T36",os.environ.get("SRC","src")]
os.environ["TRITON_CACHE_DIR"]="TCACHE"
import re, subprocess, tempfile, collections, itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from loka.kernels.gemm.triton import gemm as G
def comp(bm,bn,bk,stages,warps,parts,flatten,keep,regs,out="fp8e4nv"):
    part=bn//parts
    sig={"a":f"tensordesc<fp8e4nv[{bm}, {bk}]>","w":f"tensordesc<fp8e4nv[{bn}, {bk}]>","out":f"tensordesc<{out}[{bm}, {part}]>","z":f"tensordesc<u8[{bm}, {part}]>" if keep else f"tensordesc<{out}[{bm}, {part}]>",
      "inverse_ptr":"*fp32","steps_ptr":"*fp32",**({"scales_ptr":"*fp32"} if "scales_ptr" in open(G.__file__).read() else {}),"scale_a_ptr":"*fp32","scale_w_ptr":"*fp32","rows":"i32","columns":"i32","inner":"i32"}
    import triton.language as tl
    con={"EPS":1e-6,"VANISHING":2.0**-14,"NORM":256,"ACTIVATION":1,"INVERSE":16.0,"OUT":tl.float8e4nv,"KEEP":keep,"ROWS":False,"FAST":True,"HARDWARE":True,"TMA":True,"BLOCK_M":bm,"BLOCK_N":bn,"BLOCK_K":bk,"PARTS":parts,"GROUP":8,"FLATTEN":flatten,"PROGRAMS":132}
    for c in con: sig[c]="constexpr"
    n=[i for i,k in enumerate(sig) if sig[k]!='constexpr' and i>=4]
    attrs={(i,):[["tt.divisibility",16]] for i in n}
    k=triton.compile(ASTSource(fn=G._gemm,signature=sig,constexprs=con,attrs=attrs),target=GPUTarget("cuda",90,32),options={"num_warps":warps,"num_stages":stages,**({"maxnreg":regs} if regs else {})})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(k.asm["cubin"]); f.flush()
        res=subprocess.run(["T36/triton/backends/nvidia/bin/cuobjdump","-res-usage",f.name],capture_output=True,text=True).stdout
    return k.metadata.shared, re.findall(r"REG:\d+|STACK:\d+",res)

import collections
def full(*c):
    return comp(*c)
for name,c in G.CONFIGS.items():
    if name=="whole" or name=="low": continue
    print(name, comp(c.block_m,256,c.block_k,c.stages,c.warps,c.parts,c.flatten,True,0),flush=True)
