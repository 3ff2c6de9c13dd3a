"""Second round: row norms by tensor cores in the loop, p and r loaded before it by pointers, or by TMA behind it."""
import sys, os, time
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
F8 = torch.float8_e4m3fn
D, R = 3456, 512

@triton.jit
def place(pid, M, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, G: tl.constexpr):
    nm = tl.cdiv(M, BM)
    nn = tl.cdiv(N, BN)
    per = G * nn
    group = pid // per
    first = group * G
    size = tl.minimum(nm - first, G)
    return (first + (pid % per) % size) * BM, (pid % per) // size * BN

@triton.jit
def kern(da, db, d0, d1, do, d8, p, r, t, sw, u, longest, sp, sr, bias, M, N: tl.constexpr, K: tl.constexpr, SAME: tl.constexpr, WRITE: tl.constexpr, NORM: tl.constexpr, PRE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr, ST: tl.constexpr):
    m, n = place(tl.program_id(0), M, N, BM, BN, G)
    i = m + tl.arange(0, BM)
    j = n + tl.arange(0, BN)
    at = i[:, None] * N + j[None, :]
    keep = (i < M)[:, None]
    if PRE:
        v0 = tl.load(p + at, mask=keep, other=0.0)
        if not SAME:
            v1 = tl.load(r + at, mask=keep, other=0.0)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    if NORM:
        sq = tl.zeros((BM, BM), dtype=tl.float32)
    for k in tl.range(0, K, BK, num_stages=ST):
        a = da.load([m, k])
        acc = tl.dot(a, db.load([n, k]).T, acc)
        if NORM:
            sq = tl.dot(a, a.T, sq)
    scale = tl.load(t + i, mask=i < M, other=1.0)
    if NORM:
        eye = tl.arange(0, BM)[:, None] == tl.arange(0, BM)[None, :]
        length = tl.sqrt(tl.sum(tl.where(eye, sq, 0.0), axis=1)) * scale * tl.load(longest)
        b = tl.zeros((1024,), dtype=tl.float32)
        for c in tl.static_range(0, N, 1024):
            jj = c + tl.arange(0, 1024)
            b = tl.maximum(b, tl.abs(tl.load(bias + jj, mask=jj < N, other=0.0).to(tl.float32)))
        bound = 448.0 * tl.load(sp + i, mask=i < M, other=1.0) * (length + tl.max(b, axis=0)) + 448.0 * tl.load(sr + i, mask=i < M, other=1.0)
        bits = tl.minimum(bound * 1.06, 3e38).to(tl.int32, bitcast=True)
        power = tl.maximum(((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23), 67 << 23)
        if n == 0:
            tl.store(u + i, power.to(tl.float32, bitcast=True), mask=i < M)
        inv = (0x7F000000 - power).to(tl.float32, bitcast=True)
    else:
        inv = 1.0 / tl.load(u + i, mask=i < M, other=1.0)
    y = acc * (scale * tl.load(sw))[:, None] + tl.load(bias + j).to(tl.float32)[None, :]
    if PRE:
        y = y * v0.to(tl.float32)
        if SAME: y += v0.to(tl.float32)
        else: y += v1.to(tl.float32)
    else:
        w0 = d0.load([m, n]).to(tl.float32)
        y = y * w0
        if SAME: y += w0
        else: y += d1.load([m, n]).to(tl.float32)
    if WRITE:
        do.store([m, n], y.to(tl.bfloat16))
    y = tl.where(tl.abs(y) < float("inf"), y * inv[:, None], float("nan"))
    d8.store([m, n], y.to(tl.float8e4nv))

# BM, BN, BK, warps, stages, norm, pre, G
CONFIGS = [(64,128,128,4,3,0,0,8),(64,128,128,4,3,1,0,8),(64,128,128,4,3,0,1,8),(64,128,128,4,3,1,1,8),(64,128,128,4,2,1,1,8),(64,128,128,4,4,1,1,8),(64,64,128,4,3,1,0,8),(64,64,128,4,3,1,1,8),(64,64,128,4,4,1,1,8),(64,64,128,4,2,1,1,8),
 (128,64,128,4,3,0,1,8),(128,64,128,8,3,0,1,8),(128,128,128,8,3,0,1,8),(64,128,64,4,4,1,1,8),(64,128,64,4,4,0,1,8),(64,128,64,4,4,0,0,8),(64,128,256,4,2,1,1,8),(64,128,128,8,3,1,1,8),(64,128,128,8,3,0,1,8),(64,64,256,4,2,1,1,8),(64,128,128,4,3,0,1,32),(64,128,128,4,3,0,1,2),(64,64,128,4,3,0,1,2),(64,256,128,8,2,0,1,8),(64,128,128,4,3,0,0,32),(64,128,128,4,3,0,0,2),(64,32,128,4,4,0,1,8)]

def launch(c, a, b, x0, x, out, out8, t, sw, u, longest, sp, sr, bias, same, write):
    bm, bn, bk, w, st, norm, pre, g = c
    M, N = x0.shape
    d = lambda z, blk: TensorDescriptor(z, list(z.shape), list(z.stride()), blk)
    ds = d(a, [bm, bk]), d(b, [bn, bk]), d(x0, [bm, bn]), d(x, [bm, bn]), d(out, [bm, bn]), d(out8, [bm, bn])
    tiles = triton.cdiv(M, bm) * triton.cdiv(N, bn)
    kern[(tiles,)](*ds, x0, x, t, sw, u, longest, sp, sr, bias, M, N, a.shape[1], SAME=same, WRITE=write, NORM=norm, PRE=pre, BM=bm, BN=bn, BK=bk, G=g, ST=st, num_warps=w, num_stages=st)

if __name__ == "__main__":
    dev = "cuda"
    w8 = torch.randn(D, R, device=dev).to(F8); bias = torch.randn(D, device=dev).bfloat16()
    one = lambda v, *s: torch.full(s or (1,), v, device=dev)
    import concurrent.futures as cf
    def made(M):
        xs = [torch.randn(M, D, device=dev).bfloat16() for _ in range(4)]; v = [torch.randn(M, R, device=dev).to(F8) for _ in range(3)]
        return xs, v, [torch.empty(M, D, device=dev, dtype=F8) for _ in range(3)], one(.01, M), one(1., M), one(2.0**-5, M)
    xs, v, o8, t, u, s = made(128)
    L = one(25.0)
    def warm(c):
        try:
            for same, wr in ((True, True), (False, True), (False, False)): launch(c, v[0], w8, xs[0], xs[1], xs[2], o8[0], t, one(1.0), u, L, s, s, bias, same, wr)
            torch.cuda.synchronize(); return c, None
        except Exception as e: return c, repr(e)[-300:]
    b0 = time.time()
    with cf.ThreadPoolExecutor(14) as pool: res = list(pool.map(warm, CONFIGS))
    print("compiled", round(time.time() - b0, 1), [(c, e) for c, e in res if e], flush=True)
    good = [c for c, e in res if not e]
    for M in (8192, 2048, 512, 128):
        xs, v, o8, t, u, s = made(M)
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
            xs[1].copy_(x); 
            rows.append((sorted(ts)[2], c, round(err, 4), round(e8, 4)))
        for r in sorted(rows)[:12]: print(M, "chain of 3:", round(r[0], 1), *r[1:], flush=True)
        print("worst errors", max(r[2] for r in rows), max(r[3] for r in rows), flush=True)
