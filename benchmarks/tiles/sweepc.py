"""New tiles against old ones: programs of cells and families at other widths, in turns."""
import json, sys, time
import torch
import sweepb as S, sweep2
import loka.kernels.edge.triton.program_kernels as pk
from loka.core.problem import round_up
from loka.kernels.edge.program import Kind
from loka.kernels.edge.triton.tiles import Tile
from loka.kernels.edge.triton.rows import row_indices
NEW, TURNS = pk.tile_of, pk._TURNS
def old_tile(code):
    program = code.program; columns = round_up(program.features, 16)
    most = 32 if len(program.sums) < 2 else 24
    warps = next((w for w in (4, 8) if -(-columns // (256 * w)) * 8 <= most), 16)
    ix = row_indices(code, staged=program.transposed is not None)
    deep = any(code.kinds[p] is Kind.BLOCK for p in ix); summed = any(code.is_row_sum(p) for p in ix)
    if summed and program.sums: return Tile(warps=warps, held=32 if columns > 1024 and warps == 4 else 16)
    return Tile(warps=warps, held=8 if deep else 32 if columns <= 512 or (summed and warps == 4) else 16)
def use(old):
    pk.tile_of, pk._TURNS = (old_tile, (128, 0)) if old else (NEW, TURNS)
    pk._plan.cache_clear(); pk._RESIDENT.clear()
def jobs():
    rs = S.unique(S.load(".spike/silus.jsonl"))
    fam = []
    for name, r in sweep2.pick().items():
        c = json.loads(r["text"])
        for n in ():
            if name.startswith(("turn", "gate")) and n not in (128, 256): continue
            fam.append({**{k: v for k, v in r.items() if k != "cells"}, "cell": f"{name}_{round((1 << 24) / n / 32) * 32}x{n}", "text": json.dumps({**c, "features": n, "block": n}, separators=(",", ":")), "rows": 256, "times": 1})
    found = []
    for r in rs + S.unique(fam):
        p = S.program_of(r["text"]); dt = tuple(d for d, _ in r["leaves"]); T = S.rows_of(r)
        plans = []
        for old in (True, False):
            use(old); plans.append(pk.plan_of(p, dt, T, r["scales"], pk._TURNS[0]))
        same = (plans[0].high, plans[0].registers, plans[0].rows and (plans[0].rows.warps, plans[0].rows.kernel)) == (plans[1].high, plans[1].registers, plans[1].rows and (plans[1].rows.warps, plans[1].rows.kernel))
        if not same: found.append(r)
    return found
def compile_part(a):
    part, of = a
    for i, (r, old) in enumerate([(r, o) for r in jobs() for o in (0, 1)]):
        if i % of == part:
            use(old)
            try: pk._run(*S.given(r))
            except Exception as e: print("compile", str(e)[:200], flush=True)
    torch.cuda.synchronize()
if __name__ == "__main__":
    t0 = time.time(); rs = jobs(); print(len(rs), "programs differ", flush=True)
    if len(sys.argv) < 2:
        for r in rs: print(r["cells"], S.rows_of(r), json.loads(r["text"])["features"])
        sys.exit()
    import torch.multiprocessing as mp
    with mp.get_context("spawn").Pool(15) as pool: pool.map(compile_part, [(i, 15) for i in range(15)], chunksize=1)
    print("compiled", round(time.time() - t0), flush=True)
    from statistics import median
    def graph(sets, n):
        s = torch.cuda.Stream()
        with torch.cuda.stream(s):
            for a in sets: pk._run(*a)
            torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, stream=s):
                for _ in range(n):
                    for a in sets: pk._run(*a)
        return g
    with open(sys.argv[1], "w") as o:
        for r in rs:
            size = S.nbytes(r); sets = [S.given(r, seed) for seed in range(max(1, min(4, (160 << 20) // size + 1)))]; n = 2 if size > 1e8 else 4
            graphs = {}
            for old in (1, 0): use(old); graphs[old] = graph(sets, n)
            times = {0: [], 1: []}; a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            for i in range(10):
                for old in ((0, 1) if i % 2 else (1, 0)):
                    a.record(); graphs[old].replay(); b.record(); torch.cuda.synchronize()
                    if i > 1: times[old].append(a.elapsed_time(b) * 1e3 / n / len(sets))
            was, now = median(times[1]), median(times[0])
            o.write(json.dumps(dict(cells=r["cells"], times=r["times"], features=json.loads(r["text"])["features"], rows=S.rows_of(r), was=was, now=now)) + "\n")
            print(r["cells"][0], "x", r["times"], "T", S.rows_of(r), "N", json.loads(r["text"])["features"], f"{was:.1f} {now:.1f} {now / was:.3f} {size / now / 1e6:.2f} TB/s", flush=True)
            del graphs
