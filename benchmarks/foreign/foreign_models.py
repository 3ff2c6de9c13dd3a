"""Hand-written models of the literature, unlike the zoo's."""
import math, torch
from torch import nn
import torch.nn.functional as F

class DeepFM(nn.Module):
    def __init__(s, fields=26, d=32, h=1000, tiny=False):
        super().__init__(); 
        if tiny: fields, d, h = 5, 8, 40
        s.f, s.emb = fields, nn.Embedding(1000*fields, d); s.lin = nn.Embedding(1000*fields, 1)
        s.mlp = nn.Sequential(nn.Linear(fields*d, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Dropout(0.0), nn.Linear(h, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, h//2), nn.ReLU(), nn.Linear(h//2, 1))
        s.register_buffer("off", torch.arange(fields)*1000)
    def forward(s, dense, ids):
        e = s.emb(ids + s.off); fm = 0.5*(e.sum(1).square()-e.square().sum(1)).sum(1)
        return s.lin(ids+s.off).sum((1,2)) + fm + s.mlp(e.flatten(1)).squeeze(1)
class AutoInt(nn.Module):
    def __init__(s, fields=26, d=64, heads=4, layers=3, h=1024, tiny=False):
        super().__init__()
        if tiny: fields, d, heads, layers, h = 5, 16, 2, 2, 32
        s.emb = nn.Embedding(1000*fields, d); s.att = nn.ModuleList(nn.MultiheadAttention(d, heads, batch_first=True) for _ in range(layers))
        s.res = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(layers)); s.top = nn.Linear(fields*d, h); s.out = nn.Linear(h, 1)
        s.register_buffer("off", torch.arange(fields)*1000)
    def forward(s, dense, ids):
        x = s.emb(ids + s.off)
        for a, r in zip(s.att, s.res): x = F.relu(a(x, x, x, need_weights=False)[0] + r(x))
        return s.out(F.gelu(s.top(x.flatten(1)))).squeeze(-1)
class MaskNet(nn.Module):
    def __init__(s, fields=26, d=40, h=1536, n=3, tiny=False):
        super().__init__()
        if tiny: fields, d, h, n = 5, 8, 48, 2
        s.emb = nn.Embedding(1000*fields, d); k = fields*d
        s.m1 = nn.ModuleList(nn.Linear(k, h) for _ in range(n)); s.m2 = nn.ModuleList(nn.Linear(h, k if i == 0 else h) for i in range(n))
        s.f = nn.ModuleList(nn.Linear(k if i == 0 else h, h, bias=False) for i in range(n)); s.ln = nn.ModuleList(nn.LayerNorm(h) for _ in range(n)); s.ln0 = nn.LayerNorm(d)
        s.out = nn.Linear(h, 1); s.register_buffer("off", torch.arange(fields)*1000)
    def forward(s, dense, ids):
        e = s.emb(ids + s.off); v = e.flatten(1); h = s.ln0(e).flatten(1)
        for a, b, f, ln in zip(s.m1, s.m2, s.f, s.ln):
            h = F.relu(ln(f(h * b(F.relu(a(v))))))
        return s.out(h)[:, 0]
class DCNMix(nn.Module):
    """Low-rank experts by einsum over raw parameters."""
    def __init__(s, fields=26, d=64, r=256, e=4, n=3, h=1024, tiny=False):
        super().__init__()
        if tiny: fields, d, r, e, n, h = 5, 8, 8, 2, 2, 32
        k = fields*d + 13; k += -k % 16; s.k = k
        s.emb = nn.Embedding(1000*fields, d)
        s.V = nn.ParameterList(nn.Parameter(torch.randn(e, k, r)/math.sqrt(k)) for _ in range(n)); s.C = nn.ParameterList(nn.Parameter(torch.randn(e, r, r)/math.sqrt(r)) for _ in range(n))
        s.U = nn.ParameterList(nn.Parameter(torch.randn(e, r, k)/math.sqrt(r)) for _ in range(n)); s.b = nn.ParameterList(nn.Parameter(torch.zeros(k)) for _ in range(n))
        s.gate = nn.ModuleList(nn.Linear(k, e, bias=False) for _ in range(n)); s.top = nn.Sequential(nn.Linear(k, h), nn.ReLU(), nn.Linear(h, 1))
        s.register_buffer("off", torch.arange(fields)*1000)
    def forward(s, dense, ids):
        x = torch.cat([dense, s.emb(ids+s.off).flatten(1)], 1); x0 = x = F.pad(x, (0, s.k - x.shape[1]))
        for V, C, U, b, g in zip(s.V, s.C, s.U, s.b, s.gate):
            h = torch.tanh(torch.einsum("bk,ekr->ber", x, V)); h = torch.tanh(torch.einsum("ber,ers->bes", h, C))
            y = torch.einsum("ber,erk->bek", h, U) + b
            x = x + torch.einsum("bek,be->bk", x0[:, None]*y, g(x).softmax(-1))
        return s.top(x).squeeze(1)
class DIN(nn.Module):
    def __init__(s, d=128, h=512, L=50, tiny=False):
        super().__init__()
        if tiny: d, h, L = 16, 32, 6
        s.L = L; s.items = nn.Embedding(5000, d); s.a1 = nn.Linear(4*d, h); s.a2 = nn.Linear(h, 1); s.prelu = nn.PReLU(h)
        s.f1, s.f2, s.f3 = nn.Linear(2*d+13, 2*h), nn.Linear(2*h, h), nn.Linear(h, 1); s.bn = nn.BatchNorm1d(2*h)
        s.alpha = nn.Parameter(torch.zeros(2*h))
    def forward(s, dense, ids):
        t = s.items(ids[:, 0]); hist = s.items(ids.repeat(1, 4)[:, :s.L]); q = t[:, None].expand_as(hist)
        w = s.a2(s.prelu((s.a1(torch.cat([q, hist, q-hist, q*hist], -1))).transpose(1, 2)).transpose(1, 2)).squeeze(-1)
        mask = ids.repeat(1, 4)[:, :s.L] % 5 != 0
        w = w.masked_fill(~mask, -1e4).softmax(1)
        u = torch.bmm(w[:, None], hist).squeeze(1)
        z = s.f1(torch.cat([u, t, dense], -1)); p = torch.sigmoid(s.bn(z)); z = p*z + (1-p)*s.alpha*z
        return s.f3(F.silu(s.f2(z)))[..., 0]
class BST(nn.Module):
    def __init__(s, d=256, L=20, h=1024, tiny=False):
        super().__init__()
        if tiny: d, L, h = 16, 5, 32
        s.L, s.items, s.pos = L, nn.Embedding(5000, d), nn.Parameter(torch.randn(L, d)*.02)
        s.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, 4*d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True), 2, enable_nested_tensor=False)
        s.mlp = nn.Sequential(nn.Linear(L*d+13, h), nn.LeakyReLU(), nn.Linear(h, h//2), nn.LeakyReLU(), nn.Linear(h//2, 1))
    def forward(s, dense, ids):
        x = s.enc(s.items(ids[:, :s.L]) + s.pos)
        return s.mlp(torch.cat([x.flatten(1), dense], 1)).squeeze(1)
class PLE(nn.Module):
    def __init__(s, fields=26, d=48, h=1024, e=4, tiny=False):
        super().__init__()
        if tiny: fields, d, h, e = 5, 8, 32, 2
        k = fields*d; s.emb = nn.Embedding(1000*fields, d); s.w1 = nn.Parameter(torch.randn(3*e, k, h)/math.sqrt(k)); s.b1 = nn.Parameter(torch.zeros(3*e, 1, h))
        s.g = nn.ModuleList(nn.Linear(k, 2*e) for _ in range(2)); s.e = e
        s.tower = nn.ModuleList(nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1)) for _ in range(2)); s.register_buffer("off", torch.arange(fields)*1000)
    def forward(s, dense, ids):
        x = s.emb(ids+s.off).flatten(1)
        z = F.relu(torch.baddbmm(s.b1, x[None].expand(3*s.e, -1, -1), s.w1))
        out = {}
        for t, name in enumerate(("ctr", "cvr")):
            own = torch.cat([z[t*s.e:(t+1)*s.e], z[2*s.e:]], 0)
            out[name] = s.tower[t](torch.einsum("ebh,be->bh", own, s.g[t](x).softmax(-1))).squeeze(1)
        return out
class TwoTower(nn.Module):
    def __init__(s, fields=26, d=64, h=2048, o=256, tiny=False):
        super().__init__()
        if tiny: fields, d, h, o = 6, 8, 32, 16
        s.emb = nn.Embedding(1000*fields, d); s.half = fields//2; k = s.half*d
        mk = lambda: nn.Sequential(nn.Linear(k, h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, o))
        s.u, s.i = mk(), mk(); s.t = nn.Parameter(torch.tensor(2.0)); s.register_buffer("off", torch.arange(fields)*1000)
    def forward(s, dense, ids):
        e = s.emb(ids+s.off); a = F.normalize(s.u(e[:, :s.half].flatten(1)), dim=-1); b = F.normalize(s.i(e[:, s.half:2*s.half].flatten(1)), dim=-1)
        return (a*b).sum(-1)*s.t.exp()
class RankMixer(nn.Module):
    """Token mixing by a permutation, an FFN of its own for each token (bmm)."""
    def __init__(s, T=16, d=256, n=2, tiny=False):
        super().__init__()
        if tiny: T, d, n = 4, 16, 2
        s.T, s.d = T, d; s.emb = nn.Embedding(26000, d)
        s.n1 = nn.ModuleList(nn.LayerNorm(d) for _ in range(n)); s.n2 = nn.ModuleList(nn.LayerNorm(d) for _ in range(n))
        s.w1 = nn.ParameterList(nn.Parameter(torch.randn(T, d, 4*d)/math.sqrt(d)) for _ in range(n)); s.w2 = nn.ParameterList(nn.Parameter(torch.randn(T, 4*d, d)/math.sqrt(4*d)) for _ in range(n))
        s.out = nn.Linear(d, 1)
    def forward(s, dense, ids):
        x = s.emb(ids[:, :s.T] if ids.shape[1] >= s.T else ids.repeat(1, 4)[:, :s.T])
        B = x.shape[0]
        for n1, n2, w1, w2 in zip(s.n1, s.n2, s.w1, s.w2):
            m = x.view(B, s.T, s.T, s.d//s.T).transpose(1, 2).reshape(B, s.T, s.d); x = n1(m + x)
            h = F.gelu(torch.bmm(x.transpose(0, 1), w1)); x = n2(torch.bmm(h, w2).transpose(0, 1) + x)
        return s.out(x.mean(1)).squeeze(-1)
class FinalMLP(nn.Module):
    def __init__(s, fields=26, d=32, h=1027, heads=4, tiny=False):
        super().__init__()
        if tiny: fields, d, h, heads = 5, 8, 36, 2
        k = fields*d; s.emb = nn.Embedding(1000*fields, d); h2 = (h//heads)*heads; s.heads, s.hd = heads, h2//heads
        s.fs1, s.fs2 = (nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, k), nn.Sigmoid()) for _ in range(2))
        s.m1, s.m2 = (nn.Sequential(nn.Linear(k, h), nn.ReLU(), nn.Linear(h, h2), nn.ReLU()) for _ in range(2))
        s.w = nn.Parameter(torch.randn(heads, s.hd, s.hd)*.02); s.wx, s.wy = nn.Linear(h2, 1), nn.Linear(h2, 1); s.register_buffer("off", torch.arange(fields)*1000)
    def forward(s, dense, ids):
        x = s.emb(ids+s.off).flatten(1); a = s.m1(x*s.fs1(dense)*2); b = s.m2(x*s.fs2(dense)*2)
        A, Bm = a.view(-1, s.heads, s.hd), b.view(-1, s.heads, s.hd)
        return (torch.einsum("bhi,hij->bhj", A, s.w)*Bm).sum((1, 2)) + s.wx(a).squeeze(1) + s.wy(b).squeeze(1)
class GatedFFN(nn.Module):
    """GLU blocks with RMSNorm, gradient checkpointing around each block, weight norm on the last."""
    def __init__(s, d=768, h=2048, n=3, tiny=False):
        super().__init__()
        if tiny: d, h, n = 24, 48, 2
        s.inp = nn.Linear(13, d); s.emb = nn.EmbeddingBag(5000, d, mode="sum")
        s.n = nn.ModuleList(nn.RMSNorm(d) for _ in range(n)); s.gu = nn.ModuleList(nn.Linear(d, 2*h, bias=False) for _ in range(n)); s.dn = nn.ModuleList(nn.Linear(h, d, bias=False) for _ in range(n))
        s.out = nn.utils.parametrizations.weight_norm(nn.Linear(d, 1))
    def block(s, i, x):
        g, u = s.gu[i](s.n[i](x)).chunk(2, -1); return x + s.dn[i](F.silu(g)*u)
    def forward(s, dense, ids):
        x = s.inp(dense) + s.emb(ids)
        for i in range(len(s.gu)):
            x = torch.utils.checkpoint.checkpoint(s.block, i, x, use_reentrant=False) if s.training and i % 2 else s.block(i, x)
        return s.out(x).squeeze(-1)
class Tied(nn.Module):
    """One tower used twice, a transposed tied projection, a frozen layer, float64 head."""
    def __init__(s, d=512, h=2048, tiny=False):
        super().__init__()
        if tiny: d, h = 16, 32
        s.emb = nn.Embedding(5000, d); s.a, s.b, s.c = nn.Linear(d, h), nn.Linear(h, d), nn.Linear(d, d); s.c.requires_grad_(False); s.out = nn.Linear(2*d, 1)
    def tower(s, x): return F.linear(F.mish(s.b(F.hardswish(s.a(x)))) , s.a.weight[:, :]) @ s.a.weight
    def forward(s, dense, ids):
        u, v = s.emb(ids[:, 0]), s.emb(ids[:, 1]); u, v = s.tower(u), s.tower(v)
        return s.out(torch.cat([u, s.c(v)], -1)).float().squeeze(1)
MODELS = {c.__name__: c for c in (DeepFM, AutoInt, MaskNet, DCNMix, DIN, BST, PLE, TwoTower, RankMixer, FinalMLP, GatedFFN, Tied)}
def batch(model, B, device, seed):
    g = torch.Generator().manual_seed(seed); f = getattr(model, "off", torch.zeros(26)).numel()
    ids = torch.randint(0, 1000, (B, f), generator=g); dense = torch.randn(B, 13, generator=g); y = (torch.rand(B, generator=g) < 0.3).float()
    return dense.to(device), ids.to(device), y.to(device)
def loss_of(out, y):
    outs = out.values() if isinstance(out, dict) else [out]
    return sum(F.binary_cross_entropy_with_logits(o.float(), y) for o in outs)
