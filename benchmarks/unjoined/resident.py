import sys, statistics; sys.path.insert(0, ".spike")
import torch, triton
from triton.tools.tensor_descriptor import TensorDescriptor as TD
from loka.kernels.gemm.epilogue import Activation, Epilogue, Normed, Rounded
from loka.kernels.gemm.triton.gemm import gemm_normed_fused, _ACTIVATIONS
from res import _gemm_resident
def graph(f, n=20):
    f(); torch.cuda.synchronize(); s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        f(); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s):
            for _ in range(n): f()
    torch.cuda.synchronize(); return g
def us(gs, n=20, rounds=7):
    t = {k: [] for k in gs}
    for _ in range(rounds):
        for k, g in gs.items():
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            g.replay(); a.record(); g.replay(); b.record(); torch.cuda.synchronize(); t[k].append(a.elapsed_time(b) * 1000 / n)
    return {k: round(statistics.median(v), 1) for k, v in t.items()}
def resident(a, w, sa, sw, e, keep, bm, warps, parts, stages, per_sm):
    m, n = a.shape[0], w.shape[0]; bn = max(triton.next_power_of_2(n), 64); bk = max(triton.next_power_of_2(a.shape[1]), 32)
    out = torch.empty(m, n, dtype=torch.float8_e4m3fn, device="cuda"); inv = torch.empty(m, n // e.block, device="cuda")
    z = Rounded(torch.empty(m, n, dtype=torch.uint8, device="cuda"), torch.empty_like(inv)) if keep else None
    part = [bm, bn // parts]
    _gemm_resident[(132 * per_sm,)](TD.from_tensor(a, [bm, bk]), TD.from_tensor(w, [bn, bk]), TD.from_tensor(out, part), TD.from_tensor(z.values if keep else out, part),
        inv, z.steps if keep else inv, sa, sw, m, n, a.shape[1], EPS=e.eps, NORM=e.block, ACTIVATION=_ACTIVATIONS[e.activation].value, INVERSE=1.0 / e.scale, KEEP=keep,
        ROWS=sa.numel() > 1, FAST=True, HARDWARE=True, TMA=True, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, PARTS=parts, GROUP=8, FLATTEN=False, PROGRAMS=132 * per_sm, STAGES=stages, num_warps=warps, num_stages=stages)
    return Normed(out, inv, z)
torch.manual_seed(0)
VAR = [(64,4,1,2,1),(64,4,2,2,1),(64,4,2,2,2),(64,4,2,3,1),(64,4,1,3,1),(128,8,2,3,1),(128,8,1,2,1),(64,4,2,4,2),(64,4,1,2,2),(64,4,1,2,3),(64,8,2,2,2)]
for m, k, n, block, keep in ((131072,256,256,256,True),(131072,256,256,64,True),(131072,256,256,64,False),(131072,128,256,64,True),(131072,256,128,64,True),(32768,256,256,64,True),(8192,256,256,64,True)):
    a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn); w = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    sa = torch.exp2(torch.randint(-3, 3, (m,), device="cuda").float()); sw = torch.full((1,), 0.125, device="cuda")
    e = Epilogue(activation=Activation.HARD_SWISH, block=block, eps=1e-5)
    want = gemm_normed_fused(a, w, sa, sw, e, keep=keep); gs = {"now": graph(lambda: gemm_normed_fused(a, w, sa, sw, e, keep=keep))}
    from loka.kernels.gemm.triton.gemm import CONFIGS
    for c in CONFIGS:
        try: gs[c] = graph(lambda: gemm_normed_fused(a, w, sa, sw, e, keep=keep, config=CONFIGS[c]))
        except Exception as x: print("  no", c, type(x).__name__, str(x)[:80])
    for v in VAR:
        try:
            got = resident(a, w, sa, sw, e, keep, *v); torch.cuda.synchronize()
            same = torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8)) and (not keep or torch.equal(got.z.values, want.z.values) and torch.equal(got.z.steps, want.z.steps)) and torch.equal(got.inverse_rms, want.inverse_rms)
            if not same: print("  DIFFERS", v, (got[0].float() - want[0].float()).abs().max().item(), (got[0].view(torch.uint8) != want[0].view(torch.uint8)).float().mean().item())
            gs[v] = graph(lambda: resident(a, w, sa, sw, e, keep, *v))
        except Exception as x: print("  no", v, type(x).__name__, str(x)[:100])
    byts = m * k + m * n * (2 if keep else 1)
    print((m, k, n, block, keep), "bytes at 4.2 TB/s", round(byts / 4.2e6, 1), us(gs), flush=True)
