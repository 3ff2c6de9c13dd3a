"""Families of programs at other widths."""
import json, sys
import sweepb as sweep
from sweepb import *
FAMS = {"turn_z8": ("tower_mods_131072x256", 2), "turn_bf16": ("tower_mods_131072x256", 4), "turn_col": ("tower_mods_131072x256", 1)}
def pick():
    rs = load(".spike/programs.jsonl"); cell = lambda n: [r for r in rs if r["cell"] == n]
    P = lambda r: program_of(r["text"])
    t = cell("tower_mods_131072x256"); f = {"turn_z8": t[2], "turn_bf16": t[4], "turn_col": t[1]}
    first = lambda n, ok: next(r for r in cell(n) if ok(P(r), r))
    f["gelu_bias"] = first("bst_4096", lambda p, r: p.features == 1024 and p.sums and p.transposed is not None and len(p.steps) > 10 and sweep.rows_of(r) > 5000)
    f["ln3"] = first("ffn_8192x768-3072", lambda p, r: len(p.sums) == 3)
    f["lnsilu3"] = first("ln_silu_8192x2048", lambda p, r: len(p.sums) == 3 and p.transposed is not None)
    f["relu_bias"] = first("relu_8192x1024", lambda p, r: p.sums and p.transposed is not None)
    f["rms_sum"] = first("swiglu_8192x1024-2816", lambda p, r: p.sums)
    f["gate_turn"] = first("swiglu_8192x1024-2816", lambda p, r: not p.sums and p.transposed is not None and p.column)
    f["plain_sum"] = first("bst_4096", lambda p, r: p.sums and p.features == 768)
    f["fwd_ln"] = first("ln_silu_8192x2048", lambda p, r: not p.sums and len(p.values) == 2 and p.row and len(r["leaves"]) == 5)
    f["fwd_ln_res"] = first("ffn_8192x768-3072", lambda p, r: not p.sums and len(p.values) == 3)
    f["fwd_gelu"] = first("bst_4096", lambda p, r: p.features == 1024 and not p.sums and p.row and len(p.steps) > 5)
    return f
def widths(r, name):
    c = json.loads(r["text"])
    for n in (128, 256, 384, 512, 768, 1024, 2048):
        for t in {round((1 << 25) / n / 32) * 32, 8192}:
            if t == 8192 and n not in (512, 1024): continue
            yield {**r, "cell": f"{name}_{t}x{n}", "text": json.dumps({**c, "features": n, "block": n}, separators=(",", ":")), "rows": 256, "times": 1}
if __name__ == "__main__":
    with open(sys.argv[1], "w") as o:
        for name, r in pick().items():
            r = {k: v for k, v in r.items() if k != "cells"}
            for w in widths(r, name): o.write(json.dumps(w) + "\n")
