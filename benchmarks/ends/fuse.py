"""Spike: a dgrad GEMM and the edge behind it as one Triton kernel, for narrow layers."""
import sys, re, itertools
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from loka.kernels.edge.program import program_of
from loka.kernels.edge.triton import program_kernels as pk, rows as R
from loka.kernels.edge.triton.values import Code
from loka.kernels.edge.triton.simplify import simplified
from loka.kernels.edge.triton.device import NAMES
from loka.kernels.triton.source import compiled
from loka.kernels.edge.op import edge

def source(program, dtypes, product, high, vector, resident, parts, inner, even=True, stages=1):
    """high: rows of a tile = 4 * rows of a turn."""
    program = simplified(program); code = Code(program, dtypes)
    n = program.features
    launch = R.RowLaunch(rows=high//4, sides=R.sides_of(code, 10**6, staged=program.transposed is not None), vector=vector, walks=False, stages=1, even=even, copy=True, staged=program.transposed is not None, turns=True, scales=1)
    text = R.row_source(code, launch).split("\n")
    head = next(i for i,l in enumerate(text) if l.startswith("def "))
    out = text[:head] + [text[head].replace("):", f", a, w, w_scale_ptr, groups, PROGRAMS: tl.constexpr):")]
    body = text[head+1:]
    pre, loop = [], []
    for l in body:
        l = l.replace("tl.program_id(0).to(tl.int64) * 32", "group.to(tl.int64) * %d" % high)
        if re.match(rf"\s+raw{product}_t\d_0 = ", l): continue
        if "top = top_of" in l or "by = inverse_of_power" in l or l.strip().startswith(("c_0 =","inside_0 =","kept_0 =","w = tl.arange","q_t")) and "q_t" not in l:
            pre.append(l); continue
        l = l.replace("tl.store(tops_ptr + tl.program_id(0),", "tl.store(tops_ptr + group * %d + tl.arange(0, %d)," % (high//32, high//32))
        l = l.replace("[32])", f"[{high}])").replace("q = tl.arange(0, 32)", f"q = tl.arange(0, {high})")
        l = l.replace("w[:, None]", "wr[:, None]").replace("4 * w +", "4 * wr +").replace("(high + w <","(high + wr <")
        if "tl.program_id(0) == 0" in l: l = l.replace("tl.program_id(0) == 0","group == 0")
        loop.append("    "+l)
    width = n//parts
    I = "    "
    pre = [p.replace("    w = tl.arange","    wr = tl.arange") for p in pre]
    lines = pre + [I+"w_scale = tl.load(w_scale_ptr)"]
    if resident:
        lines += [I+f"right{p} = w.load([{p*width}, 0])" for p in range(parts)]
    lines += [I+f"for group in tl.range(tl.program_id(0), groups, PROGRAMS, num_stages={stages}):", I*2+f"left = a.load([group * {high}, 0])"]
    for p in range(parts):
        lines += [I*2+ (f"right = right{p}" if resident else f"right = w.load([{p*width}, 0])"),
                  I*2+f"acc{p} = (tl.dot(left, right.T) * w_scale).to(tl.bfloat16)"]
    if parts==1: lines += [I*2+"prod = acc0"]
    elif parts==2: lines += [I*2+f"prod = tl.reshape(tl.permute(tl.join(acc0, acc1), (0, 2, 1)), [{high}, {n}])"]
    else:
        lines += [I*2+f"prod = tl.reshape(tl.permute(tl.join(tl.reshape(tl.permute(tl.join(acc0, acc1), (0, 2, 1)), [{high}, {n//2}]), tl.reshape(tl.permute(tl.join(acc2, acc3), (0, 2, 1)), [{high}, {n//2}])), (0, 2, 1)), [{high}, {n}])"]
    lines += [I*2+f"even, odd = tl.split(tl.permute(tl.reshape(prod, [{high//2}, 2, {n}]), (0, 2, 1)))",
              I*2+f"p_0, p_2 = tl.split(tl.permute(tl.reshape(even, [{high//4}, 2, {n}]), (0, 2, 1)))",
              I*2+f"p_1, p_3 = tl.split(tl.permute(tl.reshape(odd, [{high//4}, 2, {n}]), (0, 2, 1)))"]
    lines += [I*2+f"raw{product}_t{t}_0 = p_{t}" for t in range(4)]
    return "\n".join(out+lines+loop)+"\n", code

def main():
    rows, n, k = (int(x) for x in sys.argv[1:4]); pfile=sys.argv[4]
    lines=open(pfile).read().split("\n"); program=program_of(lines[5])
    dt=("float32","uint8","float32","float32","bfloat16","float32")
    dev="cuda"; g=torch.Generator(dev).manual_seed(0)
    N=program.features; nb=N//program.block
    dy=(torch.randn(rows,k,device=dev,generator=g)*60).to(torch.float8_e4m3fn)
    wt=(torch.randn(n,k,device=dev,generator=g)*30).to(torch.float8_e4m3fn)
    ws=torch.full((1,),2.0**-10,device=dev)
    leaves=[torch.rand(rows*nb,1,1,device=dev,generator=g)/16, torch.randint(0,256,(rows,N),device=dev,dtype=torch.uint8,generator=g), torch.rand(rows*nb,1,1,device=dev,generator=g), torch.full((rows,1),0.25,device=dev), None, torch.rand(rows*nb,1,1,device=dev,generator=g)+.5]
    if nb>1: leaves=[l if l is None or l.shape[0]!=rows*nb else l.view(rows,nb,1) for l in leaves]
    one=torch.ones(1,device=dev); r=torch.full((rows,1),0.25,device=dev); tops=torch.rand(rows//32,device=dev,generator=g)
    def gemm(): return torch._scaled_mm(dy,wt.t(),one,ws,out_dtype=torch.bfloat16,use_fast_accum=True)
    def unfused():
        p=gemm(); return edge([*leaves[:4],p,leaves[5]],rows,one,r,tops,lines[5])
    expected=unfused()
    names=program.outputs
    def timed(f):
        for _ in range(3): f()
        s=torch.cuda.Stream(); 
        gr=torch.cuda.CUDAGraph()
        with torch.cuda.graph(gr):
            for _ in range(8): f()
        gr.replay(); torch.cuda.synchronize(); ts=[]
        for _ in range(9):
            a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record(); gr.replay(); gr.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)/16*1000)
        return sorted(ts)[4]
    print("gemm", timed(gemm), "edge", timed(lambda: edge([*leaves[:4],expected_p,leaves[5]],rows,one,r,tops,lines[5])) if (globals().__setitem__('expected_p',gemm()) is None) else 0, "both", timed(unfused), flush=True)
    from loka.kernels.edge.outputs import unwritten
    sms=torch.cuda.get_device_properties(0).multi_processor_count
    for high,warps,vector,resident,parts,per,regs,stages in [(64,8,8,False,1,2,128,1),(64,8,8,True,1,2,128,1),(64,8,8,True,2,2,128,1),(64,8,8,True,2,2,128,2),(64,8,16,True,2,2,128,1),(64,16,8,True,1,1,128,1),(64,16,8,True,1,1,128,2),(128,16,8,True,1,1,128,1),(64,8,8,False,2,3,80,1),(64,4,8,False,1,3,168,1),(64,4,8,True,1,2,255,1),(128,8,8,True,2,1,255,2)]:
        try:
            text,code=source(program,dt,4,high,vector,resident,parts,k,stages=stages)
            if len(sys.argv)>5: print(text); return
            kern=compiled(text,"edge_rows",NAMES)
            outs=unwritten(program,rows,torch.device(dev)); named=dict(zip(names,outs))
            arg={f"{m}_ptr":pk._words(o,m) for m,o in named.items()}
            arg|={f"leaf{i}_ptr":pk._numbers(l) for i,l in enumerate(leaves) if l is not None}
            arg|={"leaf4_ptr":one,"stride1":N,"stride4":N,"rows":rows,"padded_rows":rows,"span":high,"count":tops.numel(),"input_scale_ptr":one,"gradient_scale_ptr":r,"given_ptr":tops}
            params=R.row_parameters(code)
            vals=[arg.get(p,one) for p in params]
            groups=rows//high; programs=min(per*sms,groups)
            ad=TensorDescriptor.from_tensor(dy,[high,k]); wd=TensorDescriptor.from_tensor(wt,[n//parts,k])
            def run(): return kern[(programs,)](*vals,ad,wd,ws,groups,PROGRAMS=programs,num_warps=warps,maxnreg=regs)
            c=run(); torch.cuda.synchronize()
            diff={m:float((a.view(torch.uint8).int()-b.view(torch.uint8).int()).ne(0).float().mean()) if a.dtype==torch.float8_e4m3fn else float((a-b).abs().max()) for m,a,b in zip(names,outs,expected)}
            print((high,warps,vector,resident,parts,per,regs,stages),"us %.1f"%timed(run),"regs",c.n_regs,"spills",c.n_spills,"smem",c.metadata.shared,diff,flush=True)
        except Exception as e:
            print((high,warps,vector,resident,parts,per,regs,stages),"FAILED",repr(e)[:200],flush=True)
main()
