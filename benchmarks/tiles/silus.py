import json, sys
sys.path.insert(0, "tests/kernels/edge")
from edge_programs import silu, tanh
with open(".spike/silus.jsonl", "w") as o:
    for n in (256, 512, 768, 1024, 1280):
        t = round((1 << 24) / n / 32) * 32
        o.write(json.dumps(dict(cell=f"silu_{t}x{n}", text=silu(n).program.to_text(), leaves=[["bfloat16", 2], ["bfloat16", 2], ["float32", 1]], scales=1, gscale=True, tops=True, rows=256, times=1)) + "\n")
