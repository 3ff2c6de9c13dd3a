import sys, time, copy, json, traceback, fcntl, os
sys.path.insert(0, os.path.dirname(__file__))
import torch, loka, loka.serve
from contextlib import contextmanager
from foreign_models import MODELS, batch, loss_of
name, device, B = sys.argv[1], sys.argv[2], int(sys.argv[3])
tiny = device == "cpu"
out = {"model": name}
T0 = time.time()
def say(**k):
    out.update(k); print(name, round(time.time()-T0), str(k)[:400], file=sys.stderr, flush=True)
@contextmanager
def alone():
    with open("foreign.lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX); yield
def train(model, call, steps, lr=1e-3):
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr); losses = []
    for i in range(steps):
        d, ids, y = batch(model, B, device, 100+i)
        with torch.autocast(device, dtype=torch.bfloat16): o = call(d, ids)
        l = loss_of(o, y); opt.zero_grad(); l.backward(); opt.step(); losses.append(float(l))
    return losses
def timed(model, call):
    d, ids, y = batch(model, B, device, 5)
    def step():
        with torch.autocast(device, dtype=torch.bfloat16): o = call(d, ids)
        loss_of(o, y).backward()
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        for _ in range(3): step()
    torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=s): step()
    def once(n=20):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True); torch.cuda.synchronize(); a.record()
        for _ in range(n): g.replay()
        b.record(); torch.cuda.synchronize(); return a.elapsed_time(b)/n*1e3
    return once
try:
    torch.manual_seed(0); model = MODELS[name](tiny=tiny).to(device)
    start = copy.deepcopy(model)
    with loka.Probe(model, every=1) as probe:
        train(model, model, 3)
    stats = probe.stats()
    from loka.measurement.settings import COARSE
    how = dict(settings=COARSE, candidates=("torch_fast:tensorwise_e4m3", "torch_fast:rowwise_e4m3", "torch:rowwise_e4m3")) if device == "cuda" else {}
    t = time.time(); report = loka.measure(stats, **how); say(measure_s=round(time.time()-t, 1))
    plan = loka.plan(report, loka.Budget(min_sqnr_db=20, min_speedup=1.0, regions=True) if device == "cuda" else loka.Budget(min_sqnr_db=10))
    sites = {k: v.candidate for k, v in plan.decisions.items()}
    low = [k for k, v in sites.items() if v != "hp"]
    say(sites=len(sites), fp8=len(low), coverage=str(getattr(report, "coverage", ""))[:80], skipped=dict(report.skipped))
    bf = copy.deepcopy(start); lo = copy.deepcopy(start)
    loka.convert(lo, plan)
    t = time.time(); cb, cl = torch.compile(bf), torch.compile(lo)
    lb = train(bf, cb, 12); ll = train(lo, cl, 12); say(bf16=lb[-1], loka=ll[-1], worst=max(abs(a-b) for a, b in zip(lb, ll)), compile_s=round(time.time()-t, 1))
    # the same against eager converted
    le = copy.deepcopy(start); loka.convert(le, plan); e = train(le, le, 12); say(eager=e[-1], worst_eager=max(abs(a-b) for a, b in zip(e, ll)))
    r = loka.regions(lo); say(regions=str(r)[-300:] if name == "DeepFM" else "")
    for n, p in lo.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all(): say(nonfinite=n)
    if device == "cuda":
        with alone():
            a, b = timed(bf, cb), timed(lo, cl); ra = [(a(), b()) for _ in range(7)]
            say(us=[round(min(x[i] for x in ra), 1) for i in (0, 1)], speedup=round(sorted(x/y for x, y in ra)[3], 3))
    # serving
    loka.revert(lo); lo.eval()
    cal = [batch(lo, 512, device, 900+i)[:2] for i in range(4)]
    out_fp8 = [k for k in low if k.endswith("/output")]
    if not out_fp8: say(serve="nothing in fp8 to serve")
    else:
        t = time.time(); server = loka.serve.freeze(lo, plan, calibration=cal, autocast=torch.bfloat16, buckets=(64, 512) if device == "cuda" else (64,)); say(freeze_s=round(time.time()-t, 1), graphs=server.graphs)
        def leaves(o): return list(o.values()) if isinstance(o, dict) else [o]
        conv = copy.deepcopy(lo); loka.convert(conv, plan); conv.eval()
        def err():
            worst = 0
            for n in (3, 64, 700):
                d, ids, _ = batch(lo, n, device, 77+n); ans = leaves(server((d, ids)).output)
                with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16): ref = leaves(lo(d, ids)); c = leaves(conv(d, ids))
                for x, y, z in zip(ans, ref, c): worst = max(worst, float((x.float()-y.float()).norm()/y.float().norm()), float((x.float()-z.float()).norm()/z.float().norm()))
            return worst
        w1 = err()
        with torch.no_grad():
            for p in lo.parameters(): p.mul_(1.05)
            for p, q in zip(conv.parameters(), lo.parameters()): p.copy_(q)
        server.refresh(lo.state_dict()); w2 = err()
        import tempfile; f = tempfile.mkdtemp(); server.save(f); server2 = loka.serve.load(f, MODELS[name](tiny=tiny).to(device))
        d, ids, _ = batch(lo, 64, device, 3); same = all(torch.equal(x, y) for x, y in zip(leaves(server((d, ids)).output), leaves(server2((d, ids)).output)))
        say(serve_err=w1, after_refresh=w2, loaded_same=same, dropped=len(server.card.dropped), kept=len(server.card.kept), alarms=[str(a) for a in server.alarms()][:2], apart=len(server.apart()))
except Exception as error:
    say(error=f"{type(error).__name__}: {error}"[:1500], trace=traceback.format_exc()[-1200:])
print(json.dumps(out), flush=True)
