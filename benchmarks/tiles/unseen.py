"""Cells nobody tuned for; the rest as benchmarks/regions/regions.py."""
import math, sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "regions"))
import torch
from torch import nn
import torch.nn.functional as F
import cells
from cells import Cell, Input

class BnTower(nn.Module):
    def __init__(s, widths):
        super().__init__()
        s.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        s.norms = nn.ModuleList(nn.BatchNorm1d(b) for b in widths[1:]); s.out = nn.Linear(widths[-1], 1)
    def forward(s, x):
        for l, n in zip(s.layers, s.norms): x = F.dropout(F.relu(n(l(x))), 0.0, s.training)
        return s.out(x).squeeze(-1)

class GDCN(nn.Module):
    def __init__(s, d, n, over):
        super().__init__()
        s.w = nn.ModuleList(nn.Linear(d, d) for _ in range(n)); s.g = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(n))
        w = [d, *over]; s.mlp = nn.Sequential(*[m for a, b in zip(w, w[1:]) for m in (nn.Linear(a, b), nn.PReLU())], nn.Linear(w[-1], 1))
    def forward(s, x0):
        x = x0
        for w, g in zip(s.w, s.g): x = x0 * w(x) * torch.sigmoid(g(x)) + x
        return s.mlp(x)[:, 0]

class Experts(nn.Module):
    def __init__(s, d, e, h, o, tasks):
        super().__init__()
        s.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, h), nn.SiLU(), nn.Linear(h, o), nn.SiLU()) for _ in range(e))
        s.gates = nn.ModuleList(nn.Linear(d, e) for _ in range(tasks))
        s.heads = nn.ModuleList(nn.Sequential(nn.Linear(o, o // 2), nn.SiLU(), nn.Linear(o // 2, 1)) for _ in range(tasks))
    def forward(s, x):
        y = torch.stack([e(x) for e in s.experts], 1)
        return torch.cat([h(torch.einsum("be,bed->bd", g(x).softmax(-1), y)) for g, h in zip(s.gates, s.heads)], 1)

class Hstu(nn.Module):
    def __init__(s, d, heads):
        super().__init__()
        s.h, s.n1, s.n2 = heads, nn.LayerNorm(d), nn.LayerNorm(d); s.uvqk, s.o = nn.Linear(d, 4 * d), nn.Linear(d, d)
    def forward(s, x):
        B, L, D = x.shape
        u, v, q, k = F.silu(s.uvqk(s.n1(x))).chunk(4, -1)
        q, k, v = (t.view(B, L, s.h, -1).transpose(1, 2) for t in (q, k, v))
        a = F.silu(q @ k.transpose(-1, -2)) / L
        y = (a @ v).transpose(1, 2).reshape(B, L, D)
        return x + s.o(s.n2(y) * u)

class HstuNet(nn.Module):
    def __init__(s, d, heads, n):
        super().__init__(); s.blocks = nn.ModuleList(Hstu(d, heads) for _ in range(n)); s.out = nn.Linear(d, 1)
    def forward(s, x):
        for b in s.blocks: x = b(x)
        return s.out(x.mean(1)).squeeze(-1)

class TwoTower(nn.Module):
    def __init__(s, d, h, o):
        super().__init__(); mk = lambda: nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, h), nn.GELU(), nn.Linear(h, o))
        s.u, s.i, s.t = mk(), mk(), nn.Parameter(torch.tensor(2.0))
    def forward(s, a, b):
        return (F.normalize(s.u(a), dim=-1) * F.normalize(s.i(b), dim=-1)).sum(-1) * s.t.exp()

class Bst(nn.Module):
    def __init__(s, d, L, h):
        super().__init__()
        s.pos = nn.Parameter(torch.randn(L, d) * .02)
        s.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, 4*d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True), 2, enable_nested_tensor=False)
        s.mlp = nn.Sequential(nn.Linear(L*d, h), nn.LeakyReLU(), nn.Linear(h, h//2), nn.LeakyReLU(), nn.Linear(h//2, 1))
    def forward(s, x): return s.mlp(s.enc(x + s.pos).flatten(1)).squeeze(1)

class Mask(nn.Module):
    def __init__(s, k, h, n):
        super().__init__()
        s.m1 = nn.ModuleList(nn.Linear(k, h) for _ in range(n)); s.m2 = nn.ModuleList(nn.Linear(h, k if i == 0 else h) for i in range(n))
        s.f = nn.ModuleList(nn.Linear(k if i == 0 else h, h, bias=False) for i in range(n)); s.ln = nn.ModuleList(nn.LayerNorm(h) for _ in range(n)); s.ln0 = nn.LayerNorm(k); s.out = nn.Linear(h, 1)
    def forward(s, v):
        h = s.ln0(v)
        for a, b, f, ln in zip(s.m1, s.m2, s.f, s.ln): h = F.relu(ln(f(h * b(F.relu(a(v))))))
        return s.out(h)[:, 0]

class DcnMix(nn.Module):
    def __init__(s, k, r, e, n, h):
        super().__init__()
        P = lambda *a: nn.Parameter(torch.randn(*a) / math.sqrt(a[-2]))
        s.V = nn.ParameterList(P(e, k, r) for _ in range(n)); s.C = nn.ParameterList(P(e, r, r) for _ in range(n)); s.U = nn.ParameterList(P(e, r, k) for _ in range(n)); s.b = nn.ParameterList(nn.Parameter(torch.zeros(k)) for _ in range(n))
        s.gate = nn.ModuleList(nn.Linear(k, e, bias=False) for _ in range(n)); s.top = nn.Sequential(nn.Linear(k, h), nn.ReLU(), nn.Linear(h, 1))
    def forward(s, x):
        x0 = x
        for V, C, U, b, g in zip(s.V, s.C, s.U, s.b, s.gate):
            h = torch.tanh(torch.einsum("bk,ekr->ber", x, V)); h = torch.tanh(torch.einsum("ber,ers->bes", h, C))
            y = torch.einsum("ber,erk->bek", h, U) + b
            x = x + torch.einsum("bek,be->bk", x0[:, None]*y, g(x).softmax(-1))
        return s.top(x).squeeze(1)

class Gelu(nn.Module):
    def __init__(s, w):
        super().__init__(); s.l = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(w, w[1:])); s.n = nn.ModuleList(nn.RMSNorm(b) for b in w[1:])
    def forward(s, x):
        for l, n in zip(s.l, s.n): x = F.gelu(n(l(x)), approximate="tanh")
        return x

one = lambda *shape: (lambda scale: [Input(shape=tuple(scale(v) if v > 60 else v for v in shape), grad=True)])
NEW = [
    Cell(name="bn_dropout_12288", rows=12288, make=lambda s: BnTower([s(1664), s(1200), s(800), s(400)]), inputs=one(1664), loss="bce"),
    Cell(name="gdcn_16384", rows=16384, make=lambda s: GDCN(s(832), 3, [s(1024), s(512)]), inputs=one(832), loss="bce"),
    Cell(name="experts_8192", rows=8192, make=lambda s: Experts(s(1280), 6, s(1024), s(512), 3), inputs=one(1280)),
    Cell(name="hstu_256", rows=256, make=lambda s: HstuNet(s(512), 4, 4), inputs=one(50, 512), loss="bce"),
    Cell(name="two_tower_8192", rows=8192, make=lambda s: TwoTower(s(832), s(2048), s(256)), inputs=lambda s: [Input(shape=(s(832),), grad=True)] * 2, loss="bce"),
    Cell(name="bst_4096", rows=4096, make=lambda s: Bst(s(256), 20, s(1024)), inputs=one(20, 256), loss="bce"),
    Cell(name="mask_8192", rows=8192, make=lambda s: Mask(s(1040), s(1536), 3), inputs=one(1040), loss="bce"),
    Cell(name="dcnmix_8192", rows=8192, make=lambda s: DcnMix(s(1664), s(256), 4, 2, s(1024)), inputs=one(1664), loss="bce"),
    Cell(name="rms_gelu_4096x3072", rows=4096, make=lambda s: Gelu([s(3072)] * 5), inputs=one(3072)),
    Cell(name="rms_gelu_20000x640", rows=20000, make=lambda s: Gelu([s(640)] * 5), inputs=one(640)),
]
cells.CELLS.clear(); cells.CELLS.update({c.name: c for c in NEW})
import regions
regions.__file__ = __file__
regions.main()
