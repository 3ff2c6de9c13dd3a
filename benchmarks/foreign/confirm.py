import sys, os, time
sys.path.insert(0, os.path.dirname(__file__))
import copy, torch, loka
from foreign_models import MODELS, batch, loss_of
from loka.measurement.settings import COARSE
name, B, device = sys.argv[1], 4096, "cuda"
src = open(os.path.join(os.path.dirname(__file__), "foreign_gpu.py")).read()
ns = {"__file__": __file__}
exec(src[:src.index("try:\n")].replace('name, device, B = sys.argv[1], sys.argv[2], int(sys.argv[3])', f'name, device, B = "{name}", "cuda", 4096'), ns)
T=time.time()
torch.manual_seed(0); model = MODELS[name]().to(device)
with loka.Probe(model, every=1) as probe: ns["train"](model, model, 3)
stats = probe.stats()
report = loka.measure(stats, settings=COARSE, candidates=("torch_fast:tensorwise_e4m3", "torch_fast:rowwise_e4m3", "torch:rowwise_e4m3"))
print(name, "measured", round(time.time()-T), flush=True)
d, ids, y = batch(model, B, device, 5)
def step(m):
    with torch.autocast(device, dtype=torch.bfloat16): o = m(d, ids)
    loss_of(o, y).backward()
for least in (1.0, 1.05):
    plan = loka.plan(report, loka.Budget(min_sqnr_db=20, min_speedup=least))
    paths = {k.rpartition("/")[0]: (v.speedup.value if v.speedup else None) for k, v in plan.decisions.items() if v.candidate != "hp"}
    print(name, least, {k: v and round(v, 3) for k, v in paths.items()}, plan.summary()[-160:])
    if not paths: continue
    if least > 1 and set(paths) == before: print("as before"); continue
    before = set(paths)
    t = time.time()
    try: found = loka.confirm(model, plan, step)
    except Exception as e: print(name, "CONFIRM", type(e).__name__, e, flush=True); continue
    print(name, least, round(time.time()-t), "s\n", found, "\n", found.plan.notes[-1], flush=True)
    if name == "BST" and least == 1.0:
        from torch.profiler import profile, ProfilerActivity
        lo = copy.deepcopy(model); loka.convert(lo, plan); cl = torch.compile(lo)
        for _ in range(3): step(cl)
        with profile(activities=[ProfilerActivity.CUDA]) as prof: step(cl)
        rows = sorted(((e.key, e.device_time_total, e.count) for e in prof.key_averages()), key=lambda r: -r[1])[:16]
        print("--", round(sum(e.device_time_total for e in prof.key_averages())))
        for k, tt, n in rows: print(f"   {tt:8.1f} {n:5.1f} {k[:110]}", flush=True)
