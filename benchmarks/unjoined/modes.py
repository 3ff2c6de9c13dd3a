"""Small models by regions under torch.compile's modes: the numbers of the default mode, over steps with other rows."""
import sys, copy, time; sys.path[:0] = ["tests/compiler", "tests"]
import torch, loka
from small_models import MODELS, made
from models import forced_plan
dev = "cuda"
def step(call, model, x, seed):
    x = x.clone().requires_grad_()
    for p in model.parameters(): p.grad = None
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast("cuda", torch.bfloat16): y = call(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
    y.backward(g)
    return [y.detach().float().clone(), x.grad.float().clone(), *(p.grad.float().clone() for p in model.parameters() if p.grad is not None)]
def error(a, b): return float((a - b).norm() / b.norm().clamp_min(1e-20))
worst = {}
for name in MODELS:
    plain = made(name).to(dev).train(); x0 = torch.randn(256, 64, device=dev)
    try:
        c = copy.deepcopy(plain)
        with loka.Probe(c, every=1, effect_samples=0) as probe: step(c, c, x0, 0)
        cand = "torch_fast:rowwise_e4m3_pow2"
        plan = loka.plan(loka.measure(probe.stats(), candidates=[cand], errors_only=True), force={"*": cand})
    except Exception as e: print(name, "no plan", type(e).__name__, str(e)[:150], flush=True); continue
    found = {}
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset(); m = loka.convert(copy.deepcopy(plain), plan); t = time.time()
        try:
            call = torch.compile(m, mode=mode)
            found[mode] = [step(call, m, torch.randn(256, 64, generator=torch.Generator().manual_seed(k)).to(dev), k) for k in range(6)]
        except Exception as e: print(name, mode, "FAILED", type(e).__name__, str(e)[:300], flush=True)
    bf = [step(plain, plain, torch.randn(256, 64, generator=torch.Generator().manual_seed(k)).to(dev), k) for k in range(6)]
    own = max(error(a, b) for s, t in zip(found["default"], bf) for a, b in zip(s, t))
    for mode, steps in found.items():
        e = max(error(a, b) for s, t in zip(steps, found["default"]) for a, b in zip(s, t))
        print(name, mode, "largest error to default", f"{e:.2e}", "of default to bf16", f"{own:.2e}", len(loka.regions(m).applied), "regions", round(time.time() - t), "s", flush=True)
