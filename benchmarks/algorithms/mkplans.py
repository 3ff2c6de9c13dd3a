import sys, json, dataclasses
from pathlib import Path
sys.path[:0] = ["benchmarks/regions"]
import torch, loka
from cells import CELLS
from loka.nn.linears import signature
from loka.core.recipe import Gemm
from loka.core.problem import linear_problem, Problem
old = Path(".spike/plans"); out = Path(".spike/full"); out.mkdir(exist_ok=True)
T = loka.Plan.load(Path("OLD/benchmarks/once_more/plans/relu_8192x1024.plan.json"))
d0 = next(iter(T.decisions.values())); hp = None
for f in sorted(old.glob("*.plan.json")):
    name = f.name.removesuffix(".plan.json"); rec = json.load(open(f)); cell = CELLS[name]
    with torch.device("meta"):
        try: model = cell.model(torch.device("meta"), tiny=False)
        except Exception as e: print(name, "meta fails", e); continue
    sig = signature(model)
    made = {}
    real = Path(f"OLD/benchmarks/once_more/plans/{f.name}")
    if real.exists():
        R = loka.Plan.load(real)
        decs = {k: dataclasses.replace(d, candidate=rec["decisions"].get(k, "hp")) for k, d in R.decisions.items()}
        print(name, "real", {k for k in rec["decisions"]} ^ set(decs), sum(d.candidate != R.decisions[k].candidate for k, d in decs.items()))
        dataclasses.replace(R, decisions=decs).save(out / f.name); continue
    for site, cand in rec["decisions"].items():
        path, g = site.rsplit("/", 1)
        i, o, *_ = sig.layers[path].__dict__.values() if hasattr(sig.layers[path], "__dict__") else sig.layers[path]
        p = linear_problem(Gemm(g), rows=cell.rows, in_features=i, out_features=o, dtype="float32" if g == "grad_weight" else "bfloat16", target="sm_90")
        made[site] = dataclasses.replace(d0, path=path, problem=p, candidate=cand, reason="recorded")
    plan = dataclasses.replace(T, model=sig, decisions=made)
    plan.save(out / f.name); loka.Plan.load(out / f.name)
    print(name, len(made), sig.layers[path])
