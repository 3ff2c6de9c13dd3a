"""Programs of edges of some cells, captured on a CPU with fewer rows: JSON lines (cell, program, leaves, scales, tops, T factor)."""
import json, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "regions"))
import torch, loka
import loka.kernels.edge.op as op
from loka.kernels.edge.twin import run_program
found = {}
CELL = None
def record(program, leaves, rows, input_scale, gradient_scale, tops):
    key = (CELL, program.to_text(), tuple((str(l.dtype)[6:], l.dim()) for l in leaves),
           0 if input_scale is None else 1 if input_scale.numel() == 1 else 2, gradient_scale is not None, tops is not None, rows)
    found[key] = found.get(key, 0) + 1
    return run_program(program, leaves, rows, input_scale, gradient_scale, tops)
op.run_program = record
from arms import How, build, plan_of, LOKA
import cells
def go(cell, rows):
    global CELL
    CELL = cell.name
    c = replace(cell, rows=rows)
    how = How(device=torch.device("cpu"), candidates=("emulated:rowwise_e4m3_pow2", "emulated:rowwise_e4m3"), force={"*": "emulated:rowwise_e4m3_pow2"}, probe_steps=1)
    plan, _ = plan_of(c, how)
    before = len(found)
    arm = build(LOKA, c, how, plan)
    arm.step(); r = loka.regions(arm.model); print(str(r)[:600] if len(found) == before else "")
    print(CELL, len(found) - before, flush=True)
names = sys.argv[2].split(",")
for name in names:
    try: go(cells.CELLS[name], int(sys.argv[3]) if len(sys.argv) > 3 else 512)
    except Exception as e:
        import traceback; traceback.print_exc()
out = Path(sys.argv[1])
with out.open("a") as f:
    for (cell, text, leaves, scales, g, t, rows), n in found.items():
        f.write(json.dumps(dict(cell=cell, text=text, leaves=leaves, scales=scales, gscale=g, tops=t, rows=rows, times=n)) + "\n")
