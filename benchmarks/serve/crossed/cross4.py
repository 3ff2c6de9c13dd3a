"""Third round: a program keeps its columns of W in shared memory and walks down the rows; loads of the next rows are in flight."""
import sys, os, time
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
F8 = torch.float8_e4m3fn
D, R = 3456, 512

@triton.jit
def panel(da, db, d0, d1, do, d8, t, sw, u, longest, sp, sr, bias, M, N: tl.constexpr, K: tl.constexpr, SAME: tl.constexpr, WRITE: tl.constexpr, NORM: tl.constexpr, PER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ST: tl.constexpr):
    nn: tl.constexpr = (N + BN - 1) // BN
    n = tl.program_id(0) % nn * BN
    w = db.load([n, 0])
    j = n + tl.arange(0, BN)
    b = tl.load(bias + j, mask=j < N, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sw)
    if NORM:
        c = tl.zeros((1024,), dtype=tl.float32)
        for k in range(0, N, 1024):
            jj = k + tl.arange(0, 1024)
            c = tl.maximum(c, tl.abs(tl.load(bias + jj, mask=jj < N, other=0.0).to(tl.float32)))
        most = tl.max(c, axis=0)
        long = tl.load(longest)
    for tile in tl.range(tl.program_id(0) // nn, tl.cdiv(M, BM), PER, num_stages=ST):
        m = tile * BM
        i = m + tl.arange(0, BM)
        a = da.load([m, 0])
        acc = tl.dot(a, w.T)
        scale = tl.load(t + i, mask=i < M, other=1.0)
        if NORM:
            sq = tl.dot(a, a.T)
            eye = tl.arange(0, BM)[:, None] == tl.arange(0, BM)[None, :]
            length = tl.sqrt(tl.sum(tl.where(eye, sq, 0.0), axis=1)) * scale * long
            bound = 448.0 * tl.load(sp + i, mask=i < M, other=1.0) * (length + most) + 448.0 * tl.load(sr + i, mask=i < M, other=1.0)
            bits = tl.minimum(bound * 1.06, 3e38).to(tl.int32, bitcast=True)
            power = tl.maximum(((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23), 67 << 23)
            tl.store(u + i, power.to(tl.float32, bitcast=True), mask=(i < M) & (n == 0))
            inv = (0x7F000000 - power).to(tl.float32, bitcast=True)
        else:
            inv = 1.0 / tl.load(u + i, mask=i < M, other=1.0)
        y = acc * (scale * s)[:, None] + b
        v0 = d0.load([m, n]).to(tl.float32)
        y = y * v0
        if SAME: y += v0
        else: y += d1.load([m, n]).to(tl.float32)
        if WRITE:
            do.store([m, n], y.to(tl.bfloat16))
        y = tl.where(tl.abs(y) < float("inf"), y * inv[:, None], float("nan"))
        d8.store([m, n], y.to(tl.float8e4nv))

# BM, BN, warps, stages, norm, per (0: as many as fit, times ctas a multiprocessor)
CONFIGS = [(64,128,4,2,0,1),(64,128,4,1,0,1),(64,128,8,2,0,1),(64,64,4,2,0,1),(64,64,4,1,0,2),(64,64,4,2,0,2),(64,64,8,2,0,1),(64,64,4,1,0,3),(64,128,4,2,1,1),(64,128,8,2,1,1),(64,64,4,2,1,2),(64,64,4,2,1,1),(128,64,8,2,0,1),(128,64,4,2,0,1),(64,128,4,1,0,2),(64,64,4,3,0,1),(64,32,4,2,0,2),(64,64,4,3,1,1),(64,128,8,1,0,2)]

def launch(c, a, b, x0, x, out, out8, t, sw, u, longest, sp, sr, bias, same, write, sms=132):
    bm, bn, w, st, norm, ctas = c
    M, N = x0.shape
    d = lambda z, blk: TensorDescriptor(z, list(z.shape), list(z.stride()), blk)
    ds = d(a, [bm, a.shape[1]]), d(b, [bn, a.shape[1]]), d(x0, [bm, bn]), d(x, [bm, bn]), d(out, [bm, bn]), d(out8, [bm, bn])
    nn = triton.cdiv(N, bn)
    per = max(1, min(sms * ctas // nn, triton.cdiv(M, bm)))
    panel[(nn * per,)](*ds, t, sw, u, longest, sp, sr, bias, M, N, a.shape[1], SAME=same, WRITE=write, NORM=norm, PER=per, BM=bm, BN=bn, ST=st, num_warps=w, num_stages=st)

if __name__ == "__main__":
    dev = "cuda"
    w8 = torch.randn(D, R, device=dev).to(F8); bias = torch.randn(D, device=dev).bfloat16()
    one = lambda v, *s: torch.full(s or (1,), v, device=dev)
    import concurrent.futures as cf
    def made(M):
        xs = [torch.randn(M, D, device=dev).bfloat16() for _ in range(4)]; v = [torch.randn(M, R, device=dev).to(F8) for _ in range(3)]
        return xs, v, [torch.empty(M, D, device=dev, dtype=F8) for _ in range(3)], one(.01, M), one(1., M), one(2.0**-5, M)
    L = one(25.0)
    good, b0 = CONFIGS, time.time()
    from torch.cuda import OutOfMemoryError
    for M in (8192, 2048, 512, 128):
        xs, v, o8, t, u, s = made(M)
        def warm(c):
            try:
                for same, wr in ((True, True), (False, True), (False, False)): launch(c, v[0], w8, xs[0], xs[1], xs[2], o8[0], t, one(1.0), u, L, s, s, bias, same, wr)
                torch.cuda.synchronize(); return c, None
            except Exception as e: return c, repr(e)[-200:]
        with cf.ThreadPoolExecutor(14) as pool: res = list(pool.map(warm, good))
        print("compiled", round(time.time() - b0, 1), [(c, e) for c, e in res if e], flush=True)
        good = [c for c, e in res if not e]
        u.fill_(1.0)
        want = ((v[0].float() @ w8.float().t()) * .01 + bias.float()) * xs[0].float() + xs[1].float()
        rows = []
        for c in good:
            x = xs[1].clone()
            launch(c, v[0], w8, xs[0], x, xs[2], o8[0], t, one(1.0), u, L, s, s, bias, False, True)
            err = float((xs[2].float() - want).abs().max() / want.abs().max()); e8 = float((o8[0].float() * u[:, None] - want).norm() / want.norm())
            sw = one(1.0)
            def chain():
                launch(c, v[0], w8, xs[0], xs[0], xs[1], o8[0], t, sw, u, L, s, s, bias, True, True)
                launch(c, v[1], w8, xs[0], xs[1], xs[2], o8[1], t, sw, u, L, s, s, bias, False, True)
                launch(c, v[2], w8, xs[0], xs[2], xs[3], o8[2], t, sw, u, L, s, s, bias, False, False)
            st = torch.cuda.Stream(); g = torch.cuda.CUDAGraph()
            with torch.cuda.stream(st): chain()
            torch.cuda.synchronize()
            with torch.cuda.graph(g, stream=st):
                for _ in range(4): chain()
            ts = []
            for _ in range(5):
                b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                b.record(); [g.replay() for _ in range(5)]; e.record(); torch.cuda.synchronize(); ts.append(b.elapsed_time(e) * 1000 / 20)
            xs[1].copy_(x); u.fill_(1.0)
            rows.append((sorted(ts)[2], c, round(err, 4), round(e8, 4)))
        for r in sorted(rows)[:9]: print(M, "chain of 3:", round(r[0], 1), *r[1:], flush=True)
        print("worst errors", max(r[2] for r in rows), max(r[3] for r in rows), flush=True)
