"""What takes the time of an edge that transposes: its text with parts switched off at run time."""
import sys, os, re, json, linecache
sys.path.insert(0, "src"); sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import torch, sw
import loka.kernels.edge.outputs as eo
import loka.kernels.edge.triton.program_kernels as pk, loka.kernels.edge.triton.rows as rw
from loka.kernels.triton.source import compiled
from loka.kernels.edge.triton.device import NAMES
rs = sw.load(os.path.dirname(os.path.abspath(__file__)) + "/programs.jsonl")
def off(text, pattern):
    return re.sub(rf"^(    )({pattern})", r"\1if count == -7: \2", text, flags=re.M)
V = {
 "as is": lambda t: t,
 "no transposed": lambda t: off(t, r"tl\.store\(transposed_ptr"),
 "no column, transposed": lambda t: off(off(t, r"tl\.store\(transposed_ptr"), r"tl\.store\(column_ptr"),
 "no stores": lambda t: off(off(off(t, r"tl\.store\(transposed_ptr"), r"tl\.store\(column_ptr"), r"tl\.store\(row_ptr"),
 "no top": lambda t: t.replace("top = top_of(given_ptr, count)", "top = tl.load(given_ptr)"),
 "no r": lambda t: off(t, r"tl\.store\(r_ptr"),
}
def timed(sets, n):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        for a in sets: pk._run(*a)
        torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            for _ in range(n):
                for a in sets: pk._run(*a)
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True); best = []
    for i in range(10):
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        if i > 1: best.append(a.elapsed_time(b) * 1e3 / (n * len(sets)))
    return sorted(best)[len(best) // 2]
make = pk.row_source
for i in map(int, sys.argv[1].split(",")):
    r = rs[i]; size = sw.nbytes(r); sets = [sw.given(r, seed) for seed in range(max(1, min(4, (160 << 20) // size + 1)))]
    def go(name, text=lambda t: t, tile={}, group=32, turns=pk._TURNS):
        rw.GROUP = pk.GROUP = eo.GROUP = group
        pk._TURNS = turns; pk.row_source = lambda code, launch: text(make(code, launch))
        pk.TILE.clear(); pk.TILE.update(tile); pk._plan.cache_clear(); pk._RESIDENT.clear(); pk._row_kernel.cache_clear(); pk._SPILLED.clear()
        try: print(r["cell"], i, name, f"{timed(sets, 2 if size > 1e8 else 4):.1f}", flush=True)
        except Exception as e: print(r["cell"], i, name, str(e)[:200], flush=True)
        rw.GROUP = pk.GROUP = eo.GROUP = 32; pk._TURNS = (64, 128, 0)
    for name, f in V.items(): go(name, f)
    for g in (16, 64): go(f"group {g}", group=g)
    go("group 64, 128 registers", group=64, turns=(128, 0))
    go("128 registers", turns=(128, 0))
    go("turns 16", tile={"turns": 16}); go("turns 64", tile={"turns": 64}); go("group 16 turns 64", tile={"turns": 64}, group=16)
    go("two kernels", tile={"many": 1 << 30})
