"""Random dense models, converted by force, compiled and served: compared with themselves run eagerly.

    python tests/robustness/gpu/fuzz_gpu.py --workers 14 --seconds 380 --seeds 0:5000            # one H200
    python tests/robustness/gpu/fuzz_gpu.py --device cpu --tiny --workers 2 --seeds 0:60          # here; no code is generated
    python tests/robustness/gpu/fuzz_gpu.py --device cpu --tiny --only 17                         # one seed: source, plan, tensors
    python tests/robustness/gpu/fuzz_gpu.py --device cpu --tiny --backend inductor --seeds 0:10   # with Inductor's C++

A model is Python text from a seed (`--only SEED` prints it; it lies in FOLDER/m_SEED.py). Rules, for each tensor (outputs, loss,
gradients of parameters and inputs, buffers): c compiled, e eager converted (and e_i, the same with weights and inputs moved by a
last bit of bf16), h the model in high precision:
    |c - h| <= 2 max_i |e_i - h| + 0.02 |h|,   |c - e| <= max(3 max_i |e_i - e|, 1.5 max_i |e_i - h|) + 0.02 |h|,   and by rows and columns likewise.
A FLAG is taken apart by two more compilations: the model in high precision, and converted with regions=False.
"""

import argparse
import contextlib
import copy
import gc
import importlib.util
import math
import multiprocessing as mp
import os
import queue
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in ("src", "tests", "tests/compiler"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

HEADER = """import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from loka.nn.block_norm import BlockNorm


class Model(nn.Module):
    def __init__(self):
        super().__init__()
"""


# ---------------------------------------------------------------------------------------------- models as text


class V:
    """A value of forward: a name, its features, and how many tokens (None: [B, d])."""

    def __init__(self, name, d, t=None, fresh=False):
        self.name, self.d, self.t, self.fresh = name, d, t, fresh


class Gen:
    def __init__(self, seed, tiny, serve):
        self.r = random.Random(seed * 7919 + 13)
        self.tiny, self.serve = tiny, serve
        self.init, self.fwd, self.pool, self.n, self.sites = [], [], [], 0, 0
        self.tags = []
        r = self.r
        self.mode = r.choices(["autocast", "bf16", "fp32", "inner", "fp16"], [60, 18, 8, 10, 4])[0]
        self.fp32_params = self.mode != "bf16"
        self.typed = self.mode in ("bf16", "fp32")  # dtypes must fit by themselves

    # -- pieces
    def w(self, odd=0.13):
        r = self.r
        if r.random() < odd:
            pick = r.choices(["eight", "prime", "small", "any"], [4, 3, 1, 2])[0]
            if pick == "eight":
                return r.choice([8, 24, 40, 56, 72, 88, 104] if self.tiny else [8, 24, 40, 72, 136, 200, 328, 520])
            if pick == "prime":
                return r.choice([7, 13, 37, 61] if self.tiny else [7, 13, 37, 61, 131, 257, 479])
            return r.choice([1, 2, 3, 4]) if pick == "small" else r.randint(5, 70 if self.tiny else 300)
        if self.tiny:
            return r.choice([16, 32, 48, 64, 64, 96, 128])
        return r.choice([16, 32, 48, 64, 96, 128, 128, 192, 256, 256, 320, 384, 512, 512, 640, 768, 1024])

    def name(self, prefix="v"):
        self.n += 1
        return f"{prefix}{self.n}"

    def let(self, expr, d, t=None, fresh=False):
        v = V(self.name(), d, t, fresh)
        self.fwd.append(f"{v.name} = {expr}")
        return v

    def put(self, v):
        self.pool.append(v)
        return v

    def mod(self, text, prefix="m"):
        name = self.name(prefix)
        self.init.append(f"self.{name} = {text}")
        return f"self.{name}"

    def par(self, *shape, scale=None):
        name = self.name("p")
        scale = f"{(shape[-1] ** -0.5 if scale is None else scale):.4f}"
        self.init.append(f"self.{name} = nn.Parameter(torch.randn({', '.join(map(str, shape))}) * {scale})")
        return f"self.{name}"

    def pick(self, t=None, least=1, fresh=False):
        """A value, late ones rather; of tokens or not, or any."""
        fits = [v for v in self.pool if (t is None or (v.t is not None) == t) and v.d >= least]
        if not fits:
            return None
        return self.r.choice(fits[-3:]) if self.r.random() < 0.7 else self.r.choice(fits)

    def lin(self, x, n, expr=None, plain=False):
        """Text of one GEMM with a parameter over the last side."""
        r, d, e = self.r, x.d, expr or x.name
        self.sites += 1
        kind = "linear" if plain or r.random() < 0.62 else r.choice(["flinear", "at", "matmul", "addmm", "einsum", "dots"])
        if x.t is not None and kind == "addmm":
            kind = "flinear"
        if kind == "linear":
            return f"{self.mod(f'nn.Linear({d}, {n}, bias={r.random() < 0.6})')}({e})"
        if kind == "flinear":
            bias = f", {self.par(n, scale=0.1)}" if r.random() < 0.5 else ""
            return f"F.linear({e}, {self.par(n, d)}{bias})"
        if kind == "at":
            tail = f" + {self.par(n, scale=0.1)}" if r.random() < 0.4 else ""
            return f"({e} @ {self.par(n, d)}.T{tail})"
        if kind == "matmul":
            return f"torch.matmul({e}, {self.par(d, n, scale=d ** -0.5)})"
        if kind == "addmm":
            return f"torch.addmm({self.par(n, scale=0.1)}, {e}, {self.par(d, n, scale=d ** -0.5)})"
        if kind == "einsum":
            return f"torch.einsum('{'b' if x.t is None else 'bt'}d,od->{'b' if x.t is None else 'bt'}o', {e}, {self.par(n, d)})"
        return f"torch.einsum('...d,do->...o', {e}, {self.par(d, n, scale=d ** -0.5)})"

    ACTS = ["F.relu({})", "torch.relu({})", "F.silu({})", "F.gelu({})", "F.gelu({}, approximate='tanh')", "F.hardswish({})",
            "F.leaky_relu({}, 0.1)", "F.relu({}).square()", "torch.tanh({})", "torch.sigmoid({})", "F.mish({})", "F.elu({})",
            "F.softplus({})", "F.relu6({})", "F.hardtanh({})", "F.softsign({})", "{}.clamp(-1.0, 2.0)", "F.selu({})",
            "F.hardsigmoid({})", "F.logsigmoid({})", "torch.clamp({}, min=-0.5)", "torch.abs({})", "torch.sin({})",
            "F.threshold({}, 0.1, 0.0)", "torch.where({0} > 0, {0}, 0.2 * {0})", "torch.maximum({0}, 0.5 * {0})", "F.celu({})"]

    def act(self, e, common=0.5):
        r = self.r
        a = r.choice(self.ACTS[:6]) if r.random() < common else r.choice(self.ACTS)
        if "{0}" in a:
            return a.format(self.let(e, 1).name)
        return a.format(e)

    def norm(self, e, d, t=None):
        r = self.r
        kinds = ["ln", "ln0", "rms", "l2", "block", "rmshand", "lnhand"]
        if t is None and d > 1:
            kinds += ["bn", "gn"]
        k = r.choice(kinds)
        if d < 12:  # over a few numbers that may be alike gradients have no bound
            return f"({e} * 0.5)"
        if k == "ln":
            return f"{self.mod(f'nn.LayerNorm({d})')}({e})"
        if k == "ln0":
            return f"F.layer_norm({e}, ({d},))"
        if k == "rms":
            return f"{self.mod(f'nn.RMSNorm({d}, eps=1e-5)')}({e})"
        if k == "l2":
            return f"F.normalize({e}, dim=-1, eps=1e-3) * {d ** 0.5:.3f}"
        if k == "block":
            return f"{self.mod(f'BlockNorm({d}, {r.choice([64, 128, 256, 32])})')}({e})"
        v = self.let(e, d, t).name
        if k == "rmshand":
            return f"{v} * torch.rsqrt({v}.square().mean(-1, keepdim=True) + 1e-5)"
        if k == "lnhand":
            return f"({v} - {v}.mean(-1, keepdim=True)) / ({v}.var(-1, keepdim=True, unbiased=False) + 1e-4).sqrt()"
        if k == "bn":
            return f"{self.mod(f'nn.BatchNorm1d({d})')}({v})"
        groups = r.choice([g for g in (1, 2, 4, 8) if d % g == 0 and (g == 1 or d // g >= 12)])
        return f"{self.mod(f'nn.GroupNorm({groups}, {d})')}({v})"

    # -- operations; each puts a value, or returns None where it does not fit
    def op_layer(self):
        x, n = self.pick(), self.w()
        e, order = self.lin(x, n), self.r.choice(["a", "na", "an", "n", "", "a", "a", "na"])
        for c in order:
            e = self.act(e) if c == "a" else self.norm(e, n, x.t)
        return self.put(self.let(e, n, x.t))

    def op_sequential(self):
        x, parts = self.pick(), []
        d = x.d
        acts = ["nn.ReLU()", "nn.SiLU()", "nn.GELU()", "nn.Hardswish()", "nn.ReLU(inplace=True)", "nn.Mish()", "nn.Tanh()",
                "nn.GELU('tanh')", "nn.LeakyReLU(0.05)", "nn.PReLU()", "nn.Sigmoid()"]
        for _ in range(self.r.randint(2, 3)):
            n = self.w(0.1)
            self.sites += 1
            parts.append(f"nn.Linear({d}, {n}, bias={self.r.random() < 0.6})")
            if self.r.random() < 0.4 and n > 11:
                parts.append(self.r.choice([f"nn.LayerNorm({n})", f"BlockNorm({n}, 128)", f"nn.RMSNorm({n})"]))
            parts.append(self.r.choice(acts[:4]) if self.r.random() < 0.6 else self.r.choice(acts))
            if self.r.random() < 0.15:
                parts.append("nn.Dropout(0.0)")
            d = n
        m = self.mod(f"nn.Sequential({', '.join(parts)})")
        return self.put(self.let(f"{m}({x.name})", d, x.t))

    def op_tower(self):
        """A loop over a ModuleList, with or without residuals."""
        x, n, depth = self.pick(), None, self.r.randint(2, 3)
        n = x.d
        if n < 12 or n > 600:
            return None
        m = self.mod(f"nn.ModuleList(nn.Linear({n}, {n}) for _ in range({depth}))")
        self.sites += depth
        v = self.let(x.name, n, x.t)
        body = self.act("layer(h)") if self.r.random() < 0.7 else "layer(F.layer_norm(h, (%d,))).relu()" % n
        if body.startswith("torch.where") or "v" in body.split("(")[0] or "layer" not in body:
            body = "F.gelu(layer(h))"
            while "layer" in self.fwd[-1] and self.fwd[-1].startswith("v"):
                self.fwd.pop()
        res = self.r.choice(["h + ", "", "0.5 * h + "])
        self.fwd += [f"h = {v.name}", f"for layer in {m}:", f"    h = {res}{body}", f"{v.name} = h"]
        return self.put(v)

    def op_residual(self):
        x, mid = self.pick(least=8), self.w()
        if x is None:
            return None
        e = self.norm(x.name, x.d, x.t) if self.r.random() < 0.5 else x.name
        h = self.let(self.act(self.lin(x, mid, e)), mid, x.t)
        e = f"{x.name} + {self.lin(h, x.d)}"
        if self.r.random() < 0.3:
            e = self.norm(f"({e})", x.d, x.t)
        return self.put(self.let(e, x.d, x.t))

    def op_gated(self):
        x, mid = self.pick(), self.w(0.1)
        how = self.r.choice(["swiglu", "chunk", "sigmoid", "self"])
        if how == "swiglu":
            e = f"{self.act(self.lin(x, mid))} * {self.lin(x, mid)}"
        elif how == "chunk":
            a, b = self.name(), self.name()
            self.fwd.append(f"{a}, {b} = {self.lin(x, 2 * mid)}.{self.r.choice(['chunk(2, dim=-1)', f'split({mid}, dim=-1)'])}")
            e = f"{a} * {self.act(b)}"
        elif how == "sigmoid":
            e = f"torch.sigmoid({self.lin(x, mid)}) * {self.lin(x, mid)}"
        else:
            mid = x.d
            e = f"{x.name} * {self.r.choice(['', '2 * '])}torch.sigmoid({self.lin(x, mid)})"
        h = self.let(e, mid, x.t)
        if self.r.random() < 0.5:
            n = self.w(0.1)
            return self.put(self.let(self.lin(h, n), n, x.t))
        return self.put(h)

    def op_cross(self):
        x0 = self.pick(t=False, least=8)
        if x0 is None:
            return None
        x = x0
        for _ in range(self.r.randint(1, 3)):
            if self.r.random() < 0.5:
                y = self.lin(x, x0.d)
            else:
                low = self.let(self.lin(x, k := self.r.choice([8, 16, 32, 64])), k)
                y = self.lin(low, x0.d)
            y = self.r.choice(["{x0} * {y} + {x}", "{x} + {x0} * {y}", "torch.addcmul({x}, {x0}, {y})", "{x0} * ({y} + 0.1) + {x}"]).format(
                x0=x0.name, x=x.name, y=y
            ) if not self.mixed() else f"{x0.name} * {y} + {x.name}"
            x = self.let(y, x0.d)
        if self.r.random() < 0.6:
            x = self.let(self.norm(x.name, x.d), x.d)
        return self.put(x)

    def mixed(self):
        return not self.typed

    def op_cat(self):
        a, b = self.pick(t=False), self.pick(t=False)
        if a is None or a.d + b.d > (256 if self.tiny else 1400):
            return None
        return self.put(self.let(f"torch.cat([{a.name}, {b.name}], dim={self.r.choice([1, -1])})", a.d + b.d))

    def op_tokens(self):
        """[B, d] -> [B, t, d / t], or its transpose."""
        x = self.pick(t=False, least=32)
        if x is None:
            return None
        ts = [t for t in (2, 3, 4, 5, 8, 16, 32) if x.d % t == 0 and x.d // t >= 2]
        if not ts:
            return None
        t = self.r.choice(ts)
        form = self.r.choice(["{}.view(-1, {}, {})", "{}.reshape(-1, {}, {})", "{}.unflatten(1, ({}, {}))"])
        if "view(" in form:
            form = form.replace(".view", ".contiguous().view")
        e = form.format(x.name, t, x.d // t)
        if self.r.random() < 0.25:
            return self.put(self.let(f"{e}.transpose(1, 2)", t, x.d // t))
        return self.put(self.let(e, x.d // t, t))

    def op_stack(self):
        a = self.pick(t=False)
        b = [v for v in self.pool if v.t is None and v.d == a.d]
        several = [a.name] + [self.r.choice(b).name for _ in range(self.r.randint(1, 3))]
        return self.put(self.let(f"torch.stack([{', '.join(several)}], dim=1)", a.d, len(several)))

    def op_mix(self):
        """A layer over tokens."""
        x = self.pick(t=True)
        if x is None:
            return None
        n = self.r.choice([2, 4, 8, 16, 32, 64])
        self.sites += 1
        how = self.r.randrange(4)
        if how == 0:
            e = f"{self.mod(f'nn.Linear({x.t}, {n}, bias={self.r.random() < 0.5})')}({x.name}.transpose(1, 2)).transpose(1, 2)"
        elif how == 1:
            e = f"{self.par(n, x.t)} @ {x.name}"
        elif how == 2:
            e = f"torch.einsum('btd,ot->bod', {x.name}, {self.par(n, x.t)})"
        else:
            e = f"({x.name}.transpose(1, 2) @ {self.par(x.t, n, scale=x.t ** -0.5)}).mT"
        if self.r.random() < 0.6:
            e = self.act(e)
        if self.r.random() < 0.3:
            e = self.norm(f"({e})", x.d, n)
        return self.put(self.let(e, x.d, n))

    def op_flat(self):
        x = self.pick(t=True)
        if x is None:
            return None
        how = self.r.randrange(6)
        if how <= 2 and x.d * x.t <= (256 if self.tiny else 2048):
            return self.put(self.let(self.r.choice(["{}.flatten(1)", "{0}.reshape({0}.shape[0], -1)"]).format(x.name), x.d * x.t))
        if how == 3:
            return self.put(self.let(f"{x.name}.{self.r.choice(['mean(1)', 'sum(dim=1)', 'amax(1)'])}", x.d))
        if how == 4:
            return self.put(self.let(f"{x.name}[:, {self.r.randrange(x.t)}]", x.d))
        return self.put(self.let(f"({x.name} * torch.softmax({self.par(x.t, 1)}, 0)).sum(1)", x.d))

    def op_dots(self):
        """The interaction of DLRM, or attention."""
        x = self.pick(t=True)
        if x is None or x.t > 32:
            return None
        if self.r.random() < 0.4 and x.d % 2 == 0 and x.d >= 8:
            q = [self.name() for _ in range(3)]
            self.fwd.append(f"{', '.join(q)} = {self.lin(x, 3 * x.d)}.chunk(3, -1)")
            h = self.r.choice([1, 2])
            heads = [f"{n}.unflatten(-1, ({h}, {x.d // h})).transpose(1, 2)" for n in q]
            e = f"F.scaled_dot_product_attention({', '.join(heads)}).transpose(1, 2).flatten(2)"
            o = self.let(e, x.d, x.t)
            return self.put(self.let(f"{x.name} + {self.lin(o, x.d)}", x.d, x.t))
        e = f"torch.bmm({x.name}, {x.name}.transpose(1, 2)) * {x.d ** -0.5:.4f}"
        if x.t * x.t > 512 or x.t < 2:
            return None
        v = self.let(e, x.t, x.t)
        if self.r.random() < 0.5:
            i = self.name("i")
            self.init.append(f"self.register_buffer('{i}', torch.triu_indices({x.t}, {x.t}, 1), persistent={self.r.random() < 0.5})")
            return self.put(self.let(f"{v.name}[:, self.{i}[0], self.{i}[1]]", x.t * (x.t - 1) // 2))
        return self.put(self.let(f"{v.name}.flatten(1)", x.t * x.t))

    def op_shared(self):
        """One layer at two sites."""
        x, n = self.pick(least=8), self.w(0.1)
        if x is None:
            return None
        other = self.let(self.act(x.name), x.d, x.t)
        self.sites += 2
        if self.r.random() < 0.5:
            m = self.mod(f"nn.Linear({x.d}, {n})")
            calls = [f"{m}({v.name})" for v in (x, other)]
        else:
            p = self.par(n, x.d)
            calls = [f"F.linear({x.name}, {p})", f"({other.name} @ {p}.T)"]
        e = self.r.choice(["{} + {}", "{} * torch.sigmoid({})", "torch.cat([{}, {}], dim=-1)", "torch.maximum({}, {})"])
        return self.put(self.let(e.format(*calls), 2 * n if "cat" in e else n, x.t))

    def op_tied(self):
        """x W, and back by W^T."""
        x, n = self.pick(least=16), self.w(0.1)
        if x is None:
            return None
        p = self.par(n, x.d)
        self.sites += 2
        h = self.let(self.act(f"F.linear({x.name}, {p})"), n, x.t)
        return self.put(self.let(f"{h.name} @ {p}", x.d, x.t))

    def op_fan(self):
        """Several layers of one input."""
        x, n = self.pick(), self.w(0.1)
        parts = [self.act(self.lin(x, n)) if self.r.random() < 0.6 else self.lin(x, n) for _ in range(self.r.randint(2, 3))]
        how = self.r.choice(["sum", "cat", "prod", "stack"]) if x.t is None else self.r.choice(["sum", "cat"])
        if how == "sum":
            return self.put(self.let(" + ".join(parts), n, x.t))
        if how == "prod":
            return self.put(self.let(" * ".join(f"torch.tanh({p})" for p in parts), n, x.t))
        if how == "stack":
            return self.put(self.let(f"torch.stack([{', '.join(parts)}], dim=1)", n, len(parts)))
        return self.put(self.let(f"torch.cat([{', '.join(parts)}], dim=-1)", n * len(parts), x.t))

    def op_moe(self):
        x, n, k = self.pick(t=False), self.w(0.1), self.r.choice([2, 3, 4])
        if x is None:
            return None
        g = self.let(f"torch.softmax({self.lin(x, k)}, dim=-1)", k)
        how = self.r.randrange(3)
        if how == 0:
            self.sites += k
            m = self.mod(f"nn.ModuleList(nn.Linear({x.d}, {n}) for _ in range({k}))")
            e = f"sum({g.name}[:, i : i + 1] * {self.r.choice(['F.silu(expert(%s))', 'expert(%s).relu()', 'expert(%s)']) % x.name} for i, expert in enumerate({m}))"
        elif how == 1:
            p = self.par(k, x.d, n, scale=x.d ** -0.5)
            self.sites += 1
            each = self.let(self.act(f"torch.einsum('bi,eio->beo', {x.name}, {p})"), n, k)
            e = f"({each.name} * {g.name}.unsqueeze(-1)).sum(1)"
        else:
            outs = [self.let(self.act(self.lin(x, n)), n).name for _ in range(k)]
            s = self.let(f"torch.stack([{', '.join(outs)}], dim=1)", n, k)
            e = f"({g.name}.unsqueeze(1){self.same(s.name)} @ {s.name}).squeeze(1)"
        return self.put(self.let(e, n))

    def same(self, other):
        return f".to({other}.dtype)"

    def op_inplace(self):
        x, n = self.pick(), self.w()
        v = self.let(self.lin(x, n), n, x.t)
        how = self.r.randrange(7)
        if how == 0:
            self.fwd.append(f"{v.name}.relu_()")
        elif how == 1:
            self.fwd.append(f"F.relu({v.name}, inplace=True)")
        elif how == 2:
            self.fwd.append(f"{v.name} += {self.par(n, scale=0.1)}")
        elif how == 3 and n > 4:
            self.fwd.append(f"{v.name}[..., : {n // 2}].mul_({self.r.choice([0.5, -1.0, 2.0])})")
        elif how == 4:
            self.fwd += [f"{v.name} = {v.name}.clone()", f"{v.name}[..., {n // 2} :] = 0.25"]
        elif how == 5:
            self.fwd.append(f"{v.name}.add_({self.lin(x, n)})")
        else:
            self.fwd.append(f"{v.name}.clamp_(-1.5, 1.5)")
        return self.put(v)

    def op_checkpoint(self):
        x, mid = self.pick(), self.w(0.1)
        n = x.d if self.r.random() < 0.4 else self.w(0.1)
        self.sites += 2
        norm = f"nn.LayerNorm({mid}), " if mid > 11 and self.r.random() < 0.5 else ""
        m = self.mod(f"nn.Sequential(nn.Linear({x.d}, {mid}), {norm}{self.r.choice(['nn.SiLU()', 'nn.GELU()', 'nn.ReLU()'])}, nn.Linear({mid}, {n}))")
        return self.put(self.let(f"checkpoint({m}, {x.name}, use_reentrant=False)", n, x.t))

    def op_mask(self):
        x = self.pick()
        how = self.r.randrange(6)
        if how == 0:
            e = f"{x.name}.masked_fill({x.name} < -1.0, 0.0)"
        elif how == 1:
            e = f"torch.where({x.name}.abs() > 0.3, {x.name}, torch.zeros_like({x.name}))"
        elif how == 2:
            e = f"{x.name} * keep.view({'-1, 1' if x.t is None else '-1, 1, 1'}).to({x.name}.dtype)"
        elif how == 3:
            e = f"torch.where(keep.view({'-1, 1' if x.t is None else '-1, 1, 1'}), {x.name}, {self.par(x.d, scale=0.3)}.to({x.name}.dtype))"
        elif how == 4:
            e = f"F.dropout({x.name}, 0.0, self.training)"
        else:
            e = f"{x.name} * ({x.name} > 0)"
        return self.put(self.let(e, x.d, x.t))

    def op_scalar(self):
        x = self.pick()
        e = self.r.choice(["{0} * 3.0", "{0} / 4", "{0} - {0}.mean(-1, keepdim=True)", "torch.log1p({0}.abs())", "{0} * torch.sigmoid({1})",
                           "{0}.sign() * {0}.abs().clamp_min(1e-3).sqrt()", "torch.exp(-{0}.square())", "{0} + 0.0", "-{0}", "{0} * {2}",
                           "{0} / (1.0 + {0}.abs())", "torch.softmax({0}, dim=-1)", "{0}.detach() * 0.5 + {0}", "{0}.pow(3) * 0.1",
                           "{0} * {0}.square().mean(-1, keepdim=True).add(1e-3).rsqrt()", "torch.tanh({0}) * {0}.amax(-1, keepdim=True)",
                           "{0} * torch.tanh({3})"])
        p, s, a = "", "", ""
        if "{1}" in e:
            p = self.par(x.d, scale=1.0)
        if "{2}" in e:
            s = self.par(x.d, scale=0.5)
        if "{3}" in e:
            a = self.par(1, scale=1.0)
        return self.put(self.let(e.format(x.name, p, s, a), x.d, x.t))

    def op_slice(self):
        x = self.pick(least=32)
        if x is None:
            return None
        k = self.r.choice([x.d // 2, 16, x.d // 2 // 16 * 16 or 16])
        e = self.r.choice(["{0}[..., :{1}]", "{0}[..., {2}:]", "{0}.narrow(-1, 3, {1})", "{0}.flip(-1)[..., :{1}]", "{0}[..., ::2]",
                           "{0}.roll(3, -1)", "F.pad({0}, (0, 16))"])
        d = {"{0}[..., ::2]": -(-x.d // 2), "{0}.roll(3, -1)": x.d, "F.pad({0}, (0, 16))": x.d + 16}.get(e, k)
        if "narrow" in e and k + 3 > x.d:
            return None
        return self.put(self.let(e.format(x.name, k, x.d - k), d, x.t))

    def op_cast(self):
        x = self.pick()
        if self.typed:
            e = self.r.choice(["F.silu({0}.float()).to({0}.dtype)", "{0}.double().mul(0.5).to({0}.dtype)", "{0}.half().to({0}.dtype)",
                               "{0}.bfloat16().to({0}.dtype)"])
        else:
            e = self.r.choice(["{0}.float()", "{0}.bfloat16()", "torch.tanh({0}.float())", "F.gelu({0}.to(torch.bfloat16))", "{0}.half().float()"])
        return self.put(self.let(e.format(x.name), x.d, x.t))

    def op_noautocast(self):
        if self.mode not in ("autocast", "inner"):
            return None
        x, n = self.pick(), self.w()
        v = V(self.name(), n, x.t)
        self.fwd += ["with torch.autocast(x.device.type, enabled=False):",
                     f"    {v.name} = {self.mod(f'nn.Linear({x.d}, {n})')}({x.name}.float())"]
        self.sites += 1
        return self.put(v)

    def op_mixrows(self):
        """What mixes rows ends a region."""
        x = self.pick(t=False)
        if self.serve or x is None:
            return None
        e = self.r.choice(["{0} - {0}.mean(0)", "{0} - {0}.mean(0, keepdim=True).detach()", "{0} / (1e-2 + {0}.std(0, unbiased=False))",
                           "torch.cat([{0}[1:], {0}[:1]])", "{0}.flip(0)", "({0}.T.contiguous()).T", "{0}.roll(1, 0)"])
        return self.put(self.let(e.format(x.name), x.d))

    def op_transposed(self):
        """(W x^T)^T: weights on the left."""
        x, n = self.pick(t=False), self.w(0.1)
        if x is None:
            return None
        self.sites += 1
        return self.put(self.let(self.act(f"({self.par(n, x.d)} @ {x.name}.t()).t()"), n))

    # -- the whole
    def build(self):
        r = self.r
        d0 = self.w(0.25) if r.random() < 0.9 else 13
        self.columns = [("x", "dense", d0)]
        self.put(V("x", d0))
        if r.random() < 0.3:
            t, d = r.choice([2, 4, 7, 16]), r.choice([8, 16, 32, 64])
            self.columns.append(("tok", "tokens", (t, d)))
            self.put(V("tok", d, t))
        if r.random() < 0.3:
            n, d = r.choice([10, 100, 1000]), r.choice([8, 16, 32])
            self.columns.append(("ids", "ids", (n, 4)))
            table = self.mod(f"nn.Embedding({n}, {d})", "table")
            self.put(self.let(f"{table}(ids)", d, 4))
        if r.random() < 0.25:
            self.columns.append(("x2", "dense", k := self.w(0.2)))
            self.put(V("x2", k))
        self.columns.append(("keep", "keep", None))
        if d0 < 16 or r.random() < 0.4:
            n = self.w(0.0)
            self.put(self.let(self.act(self.lin(self.pool[0], n)), n))
        ops = {"layer": 10, "sequential": 5, "tower": 2, "residual": 6, "gated": 7, "cross": 5, "cat": 5, "tokens": 4, "stack": 3, "mix": 6,
               "flat": 4, "dots": 3, "shared": 3, "tied": 2, "fan": 5, "moe": 4, "inplace": 4, "checkpoint": 2, "mask": 3, "scalar": 5,
               "slice": 3, "cast": 2, "noautocast": 2, "mixrows": 2, "transposed": 2}
        goal, guard = r.randint(3, 7), 0
        while self.sites < goal and guard < 60:
            guard += 1
            op = r.choices(list(ops), list(ops.values()))[0]
            if getattr(self, f"op_{op}")() is not None:
                self.tags.append(op)
        for v in self.pool:
            assert v.d >= 1
        # heads, and what leaves as a view
        import re

        outs, late = [], self.pool[-1]
        used = "\n".join(line.partition(" = ")[2] or line for line in self.fwd)
        unread = [v for v in self.pool if v.name != late.name and not re.search(rf"\b{v.name}\b", used)]
        unread = [v for v in unread if v.name.startswith("v")]
        if unread and r.random() < 0.5:
            parts, width = [], 0
            for v in [late, *unread]:
                d = v.d if v.t is None else v.d * v.t
                if width + d <= (300 if self.tiny else 2500):
                    parts.append(v.name if v.t is None else f"{v.name}.flatten(1)")
                    width += d
                elif v is not late:
                    outs.append(v)
            if width:
                late = self.let(f"torch.cat([{', '.join(parts)}], dim=1)", width)
        else:
            outs += unread
        flat = late
        if late.t is not None:
            flat = self.let(f"{late.name}.flatten(1)" if late.t * late.d <= 4096 else f"{late.name}.mean(1)", late.t * late.d if late.t * late.d <= 4096 else late.d)
        n = r.choice([1, 1, 2, 16, self.w()])
        head = self.let(self.lin(flat, n, plain=True), n)
        if n == 1 and r.random() < 0.6:
            head = self.let(f"{head.name}.squeeze(1)", 1)
        outs.insert(0, head)
        for _ in range(r.choice([0, 0, 1, 2])):
            v = self.pick()
            e = r.choice(["{0}", "{0}", "{0}.float()", "{0}[..., :3]", "{0} * 2"] + ([] if self.serve else ["{0}.transpose(0, 1)"]))
            outs.append(self.let(e.format(v.name), v.d, v.t))
        forms = ["tuple"] * 2 + ["dict", "list"]
        names = [v.name for v in outs]
        if len(outs) == 1:
            self.fwd.append(f"return {names[0]}")
        else:
            form = r.choice(forms)
            self.fwd.append({"tuple": f"return {', '.join(names)}", "list": f"return [{', '.join(names)}]",
                             "dict": "return {" + ", ".join(f"'o{i}': {n}" for i, n in enumerate(names)) + "}"}[form])
        signature = ", ".join(["self", *(c[0] for c in self.columns)])
        body = self.fwd
        if self.mode == "inner":
            body = ["with torch.autocast(x.device.type, torch.bfloat16):", *("    " + line for line in self.fwd)]
        text = HEADER + "".join(f"        {line}\n" for line in self.init or ["pass"])
        text += f"\n    def forward({signature}):\n" + "".join(f"        {line}\n" for line in body)
        return text


# ------------------------------------------------------------------------------------------------- one case


class Skip(Exception):
    pass


def load(text, seed, folder):
    path = Path(folder) / f"m_{seed}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"m_{seed}_{os.getpid()}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.Model


class Case:
    def __init__(self, seed, told):
        import torch

        self.torch, self.seed, self.told = torch, seed, told
        self.r = random.Random(seed * 104729 + 7)
        self.device = torch.device(told.device)
        self.cuda = self.device.type == "cuda"
        self.serve = (self.r.random() < 0.25) if told.kind == "any" else told.kind == "serve"
        self.gen = Gen(seed, told.tiny, self.serve)
        self.text = self.gen.build()
        self.flags, self.worst, self.notes = [], (0.0, ""), []
        self.table = []

    def say(self, *words):
        if self.told.only is not None:
            print(*words, flush=True)

    # -- data
    def batch(self, rows, seed):
        torch, r = self.torch, random.Random(seed)
        g = torch.Generator().manual_seed(seed)
        dtype = torch.bfloat16 if self.gen.mode == "bf16" else torch.float32
        made = []
        for name, kind, shape in self.gen.columns:
            if kind == "ids":
                made.append(torch.randint(0, shape[0], (rows, shape[1]), generator=g))
            elif kind == "keep":
                made.append(torch.rand(rows, generator=g) > 0.3)
            else:
                size = (rows, shape) if kind == "dense" else (rows, *shape)
                x = torch.randn(size, generator=g)
                if self.data == "heavy":
                    x = x * torch.exp(torch.randn(size[:1] + (1,) * (len(size) - 1), generator=g))
                elif self.data == "offset":
                    x = x + 3.0 * (torch.arange(size[-1]) % 3 == 0)
                elif self.data == "columns":
                    x = x * torch.exp2((torch.arange(size[-1]) % 5).float() - 2)
                elif self.data == "sparse":
                    x = F_relu(x)
                    x[rows // 3] = 0
                made.append(x.to(dtype))
        return [x.to(self.device) for x in made]

    def model(self, seed):
        torch = self.torch
        torch.manual_seed(seed)
        model = self.cls().to(self.device)
        if self.gen.mode == "bf16":
            model = model.to(torch.bfloat16)
        return model

    def autocast(self):
        torch, mode = self.torch, self.gen.mode
        if mode in ("autocast", "fp16"):
            return torch.autocast(self.device.type, torch.bfloat16 if mode == "autocast" else torch.float16)
        return contextlib.nullcontext()

    # -- plan
    def plan(self, model, batch, output_only=False):
        import loka
        from loka.core.device import fingerprint
        from loka.core.problem import linear_problem
        from loka.core.recipe import Gemm
        from loka.core.records.plan import Decision, Plan
        from loka.kernels.gemm.registry import candidate_named

        torch, r, probed = self.torch, self.r, copy.deepcopy(model)
        with loka.Probe(probed, every=1, effect_samples=0) as probe:
            with self.autocast():
                outs = self.leaves(probed(*batch))
            sum(o.float().square().mean() for o in outs).backward()
        stats = probe.stats()
        here = fingerprint(self.device)
        fast, slow = (("torch_fast", "torch") if self.cuda else ("emulated", "emulated"))
        region = (f"{fast}:rowwise_e4m3_pow2", f"{fast}:rowwise_e4m3_pow2", f"{slow}:rowwise_e4m3_pow2")
        integer = "loka_int8:int8_row" if self.cuda else "emulated:int8_row"
        kernels = ("torch", "torch_fast", "emulated", "loka_split", "loka_int8", "torch_int8", "cublaslt") if self.cuda else ("emulated", "torch")
        from loka.kernels.gemm.registry import all_candidates

        style = r.choices(["region", "int8", "mixed", "single"], [62, 12, 17, 9])[0]
        single = None
        decisions, centres, hots = {}, {}, {}
        for path, layer in stats.layers.items():
            shape = stats.model.layers[path]
            problems = [
                linear_problem(g, rows=max(layer.rows, 1), in_features=shape.in_features, out_features=shape.out_features,
                               dtype=layer.dtype if g is not Gemm.GRAD_WEIGHT else layer.weight_dtype, target=here.target)
                for g in Gemm
            ]
            names = list(region)
            if style == "int8" and r.random() < 0.8:
                names[0] = integer
            if style == "mixed" and r.random() < 0.6 or style == "single":
                for i, p in enumerate(problems):
                    fits = [c.name for c in all_candidates() if c.kernel.name in kernels and c.unsupported(p) is None]
                    if output_only:
                        fits = [c for c in fits if candidate_named(c).unfrozen is None and "block128" not in c]
                    if style == "single":
                        single = single or r.choice(["tensorwise_e4m3", "tensorwise_e5m2", "rowwise_e4m3", "blockwise_e4m3", "block128_e4m3",
                                                     "rowwise_e4m3_hot32", "int8_row_centred", "rowwise_e4m3_centred"])
                        fits = [c for c in fits if c.endswith(":" + single)] or [c for c in fits if c.endswith("tensorwise_e4m3")] or fits
                    names[i] = r.choice([*fits, "hp"] if style == "mixed" else fits) if fits else "hp"
            for i, p in enumerate(problems):
                if names[i] != "hp" and candidate_named(names[i]).unsupported(p) is not None:
                    names[i] = "hp"
                if output_only and i:
                    names[i] = "hp"
            if names[0] != "hp":
                recipe = candidate_named(names[0]).recipe
                g = torch.Generator().manual_seed(self.seed)
                if recipe.centred:
                    centres[path] = tuple((0.3 * torch.randn(shape.in_features, generator=g)).tolist())
                if recipe.hot:
                    hots[path] = tuple(sorted(torch.randperm(shape.in_features, generator=g)[: recipe.hot].tolist()))
            for p, name in zip(problems, names, strict=True):
                made = Decision(path=path, problem=p, candidate=name, reason="by hand")
                decisions[made.site] = made
        self.style = style if single is None else f"{style}:{single}"
        return Plan(model=stats.model, machine=here, budget=loka.Budget(), timed=False, decisions=decisions, centres=centres, hot_columns=hots)

    # -- a step
    def leaves(self, outs):
        if isinstance(outs, self.torch.Tensor):
            return [outs]
        return list(outs.values()) if isinstance(outs, dict) else list(outs)

    def step(self, call, model, batch, state, moved=0, loss_seed=5):
        """All that a step computes, by name, float32; the weights and buffers of `state` first."""
        if self.told.plant == "eager" and call is not model:
            call, moved = model, 21
        torch = self.torch
        self.restore(model, state, moved)
        model.zero_grad(set_to_none=True)
        given = []
        g = torch.Generator(device=self.device).manual_seed(1000 + moved)
        for x in batch:
            x = x.detach().clone()
            if x.is_floating_point():
                if moved:
                    x = x * (1 + self.bit * torch.randn(x.shape, generator=g, device=self.device)).to(x.dtype)
                if self.input_grads:
                    x.requires_grad_()
            given.append(x)
        with self.autocast():
            outs = self.leaves(call(*given))
        loss = self.loss(outs, loss_seed)
        loss.backward()
        found = {f"out{i}": o.detach() for i, o in enumerate(outs)}
        found["loss"] = loss.detach()
        found |= {f"d.{c[0]}": x.grad for c, x in zip(self.gen.columns, given) if x.grad is not None}
        found |= {f"g.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        found |= {f"b.{n}": b for n, b in model.named_buffers() if b.is_floating_point()}
        return {n: t.detach().to(torch.float32, copy=True) for n, t in found.items()}

    def loss(self, outs, seed):
        torch, total = self.torch, 0.0
        for i, o in enumerate(outs):
            g = torch.Generator().manual_seed(seed + i)
            o = o.float()
            if self.loss_kind == "direction":
                total = total + (o * torch.randn(o.shape, generator=g).to(o.device)).sum()
            elif self.loss_kind == "bce":
                label = (torch.rand(o.shape, generator=g) > 0.7).float().to(o.device)
                total = total + torch.nn.functional.binary_cross_entropy_with_logits(o, label)
            else:
                total = total + (o - torch.randn(o.shape, generator=g).to(o.device)).square().mean()
        return total

    def restore(self, model, state, moved=0):
        torch = self.torch
        g = torch.Generator(device=self.device).manual_seed(2000 + moved)
        with torch.no_grad():
            for n, t in [*model.named_parameters(), *model.named_buffers()]:
                if n not in state:
                    continue
                t.copy_(state[n])
                if moved and isinstance(t, torch.nn.Parameter):
                    t.mul_((1 + self.bit * torch.randn(t.shape, generator=g, device=self.device)).to(t.dtype))

    def state(self, model):
        return {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}

    # -- comparing
    def judge(self, where, c, es, h, hs=None, kind=""):
        """Compiled, eager ones (the first as it is), high precision; all by name."""
        torch = self.torch
        sizes, self.few = {}, max((t.shape[0] for n, t in h.items() if n.startswith("out")), default=0) < 64
        for n, t in h.items():
            sizes.setdefault(n[:2], []).append(float(t.norm()) / max(t.numel(), 1) ** 0.5)
        middle = {k: sorted(v)[len(v) // 2] for k, v in sizes.items()}
        if self.told.plant and where != "hp compiled" and where != "regions=False":
            c = self.planted(c)
        for n in h:
            if n not in es[0]:
                self.flag(where, n, "MISSING eager")
                continue
            if n not in c:
                self.flag(where, n, "MISSING compiled")
                continue
            t, e, truth = c[n], es[0][n], h[n]
            if t.shape != e.shape:
                self.flag(where, n, f"SHAPE {tuple(t.shape)} {tuple(e.shape)}")
                continue
            if not truth.isfinite().all():
                self.notes.append(f"{n} of hp is not finite")
                continue
            if not all(x[n].isfinite().all() for x in es):
                if self.gen.mode != "fp16":
                    self.flag(where, n, "EAGER NOT FINITE")
                continue
            if not t.isfinite().all():
                self.flag(where, n, f"NOT FINITE {int((~t.isfinite()).sum())} of {t.numel()}")
                continue
            if not t.numel():
                continue
            floor = 1e-3 * middle[n[:2]] * t.numel() ** 0.5 + 1e-30
            nh = float(truth.norm())
            off_h = float((t - truth).norm())
            off_e = float((t - e).norm())
            e_h = max(float((x[n] - truth).norm()) for x in es)
            spread = max(float((x[n] - e).norm()) for x in es[1:])
            p = max((float((x[n] - truth).norm()) for x in hs or ()), default=0.0)
            if t.numel() <= 64:  # few numbers say little of rounding: by what moves of 3 % do as well
                e_h = max(e_h, p)
                if t.numel() <= 4:
                    e_h *= 1.5
            if self.few:
                e_h, spread = 1.3 * e_h, 1.3 * spread
            loss = n == "loss"
            slack = 0.02 * nh + floor
            if loss:  # a sum of many that cancel: by the outputs' errors it is judged above
                slack += 0.03 * max(abs(float(truth)), 1e-3) + (3 * float(sum((es[0][k] - h[k]).norm() for k in h if k.startswith("out"))) if self.loss_kind == "direction" else 0.0)
            rules = [("hp", off_h, 2.0 * e_h + slack), ("eager", off_e, max(3.0 * spread, 1.5 * e_h) + slack)]
            # slices
            if t.dim() >= 2 and min(t.shape[0], t[0].numel()) > 1 and t.numel() > 64:
                flat = [x.reshape(x.shape[0], -1) for x in (t, truth, *(x[n] for x in es))]
                for dim, side in ((1, "row"), (0, "column")):
                    size = flat[1].norm(dim=dim)
                    typical = float(size.square().mean().sqrt()) + 1e-30
                    own = size + 0.1 * typical
                    off = [((x - flat[1]).norm(dim=dim) / own) for x in (flat[0], *flat[2:])]
                    worst = int(off[0].argmax())
                    rules.append((f"{side} {worst}", float(off[0].max()), (3.2 if self.few else 2.5) * max(float(o.max()) for o in off[1:]) + 0.15 + floor / typical))
                    apart = [(x - flat[2]).norm(dim=dim) for x in (flat[0], *flat[3:])]
                    apart = [a / own for a in apart]
                    bound = max(4 * max(float(a.max()) for a in apart[1:]), 2 * max(float(o.max()) for o in off[1:]))
                    rules.append((f"{side}~ {int(apart[0].argmax())}", float(apart[0].max()), bound * (1.3 if self.few else 1) + 0.15 + floor / typical))
            ratio, rule, found, bound = max((f / b, r, f, b) for r, f, b in rules)
            self.table.append((where, n, ratio, off_h / (nh + 1e-30), e_h / (nh + 1e-30), off_e / (nh + 1e-30), spread / (nh + 1e-30), rule))
            if ratio > self.worst[0]:
                self.worst = (ratio, f"{where}/{n}")
            if ratio > 1:
                self.flag(where, n, f"by {rule} {found:.3g} > {bound:.3g}; |h| {nh:.3g} c-h {off_h / (nh + 1e-30):.3f} e-h {e_h / (nh + 1e-30):.3f} "
                          f"c-e {off_e / (nh + 1e-30):.3f} spread {spread / (nh + 1e-30):.3f} {tuple(t.shape)}", ratio)
            if hs is not None and not loss:  # eager itself, beside high precision moved by what eight bits move
                if min(float((x[n] - truth).norm()) for x in es) > 8 * p + 0.15 * nh + 3 * floor:
                    self.flag(where, n, f"EAGER {e_h / (nh + 1e-30):.3f} of hp, moved hp {p / (nh + 1e-30):.3f} {tuple(t.shape)}", e_h / (8 * p + 0.15 * nh + 1e-30))

    def planted(self, c):
        """A fault in what is compiled, to see whether the rules see it."""
        c, kind, r = dict(c), self.told.plant, random.Random(self.seed)
        if kind == "eager":
            return c
        n = r.choice([n for n, t in c.items() if t.dim() == 2 and min(t.shape) > 7 and (kind != "grad" or n.startswith("g."))] or ["loss"])
        t = c[n].clone() if n in c else None
        if t is None:
            return c
        if kind == "grad":
            t *= 1.25
        elif kind == "row" and t.dim() == 2:
            t[t.shape[0] - 1] = 0
        elif kind == "column" and t.dim() == 2:
            t[:, t.shape[1] - 1] *= -1
        c[n] = t
        return c

    def flag(self, where, name, what, ratio=99.0):
        self.flags.append((ratio, where, name, what))

    # -- cases
    def run(self):
        self.data = self.r.choice(["normal", "normal", "heavy", "offset", "columns", "sparse"])
        self.loss_kind = self.r.choices(["direction", "bce", "square"], [50, 25, 25])[0]
        self.input_grads = self.r.random() < 0.75
        self.bit = 2.0**-9 if self.gen.mode != "bf16" else 2.0**-8
        self.cls = load(self.text, self.seed, self.told.folder)
        self.say(self.text)
        return self.serving() if self.serve else self.training()

    def rows(self):
        if self.told.tiny:
            return self.r.choice([17, 32, 48, 64, 100, 33])
        return self.r.choice([1000, 513, 17, 4096, 2048, 128, 257, 3000, 1024, 64])

    def refs(self, eager, hp, batch, state, count=5, wide=True):
        """Eager ones, high precision, and high precision moved by 3 %."""
        es = [self.step(eager, eager, batch, state, moved=i) for i in range(count + 1)]
        h = self.step(hp, hp, batch, state)
        hs = None
        if wide:
            bit, self.bit = self.bit, 0.03
            hs = [self.step(hp, hp, batch, state, moved=i) for i in (11, 12)]
            self.bit = bit
        return es, h, hs

    def compile(self, model, dynamic=None, mode=None):
        torch = self.torch
        torch._dynamo.reset()
        if self.told.backend == "joint":
            from joint import JointBackend

            self.backend = JointBackend(fused=self.r.random() < 0.5)
            return torch.compile(model, backend=self.backend, dynamic=dynamic)
        return torch.compile(model, dynamic=dynamic, mode=mode)

    def training(self):
        import loka

        torch, r = self.torch, self.r
        rows = self.rows()
        dynamic = r.choice([None, None, None, True, True])
        batch = self.batch(rows, self.seed + 1)
        hp = self.model(self.seed).train()
        if r.random() < 0.12:
            names = [p for p in hp.parameters() if p.dim() >= 2]
            if len(names) > 1:
                r.choice(names).requires_grad_(False)
        self.kinds = f"train {self.gen.mode} B={rows} {self.data} {self.loss_kind}{' dyn' if dynamic else ''}"
        plan = self.plan(hp, batch)
        self.say(plan)
        self.kinds += f" {self.style}"
        state = self.state(hp)
        eager = loka.convert(copy.deepcopy(hp), plan)
        joined = loka.convert(copy.deepcopy(hp), plan)
        reduce = self.cuda and self.told.backend == "inductor" and r.random() < 0.08
        call = self.compile(joined, dynamic, "reduce-overhead" if reduce else None)
        if reduce:
            self.kinds += " reduce-overhead"
        mark = torch.compiler.cudagraph_mark_step_begin if reduce else (lambda: None)
        es, h, hs = self.refs(eager, hp, batch, state)
        mark()
        c = self.step(call, joined, batch, state)
        self.judge("first", c, es, h, hs)
        regions = loka.regions(joined)
        sites = {d.path for d in plan.decisions.values() if d.candidate != "hp"}
        inside = sum(len(x) if hasattr(x, "__len__") else 0 for x in regions.applied)
        self.notes.append(f"{inside}/{len(sites)} joined in {len(regions.applied)}" + (f", {len(regions.breaks)} breaks" if regions.breaks else ""))
        self.say(regions)
        # other numbers, by what is compiled
        other, fresh = self.batch(rows, self.seed + 2), self.state(self.model(self.seed + 9))
        es2, h2, hs2 = self.refs(eager, hp, other, fresh)
        for _ in range(2 if reduce else 1):
            mark()
            c2 = self.step(call, joined, other, fresh)
        self.judge("second", c2, es2, h2, hs2)
        # the first again: the same bits
        mark()
        again = self.step(call, joined, batch, state)
        same = [n for n in c if n in again and not torch.equal(c[n].nan_to_num(), again[n].nan_to_num())]
        if same and "ids" not in {x[0] for x in self.gen.columns}:
            far = max(float((c[n] - again[n]).norm() / (c[n].norm() + 1e-30)) for n in same)
            self.notes.append(f"rerun differs in {len(same)} ({far:.1e})")
            if far > 0.02 and not all(float((c[n] - again[n]).norm()) <= 3 * max(float((x[n] - es[0][n]).norm()) for x in es[1:]) + 1e-3 * float(h[n].norm()) for n in same if n in h):
                self.flag("again", same[0], f"a rerun differs by {far:.3g}")
        # a ragged batch
        if r.random() < 0.3 or dynamic:
            count = r.choice([rows // 2 + 1, max(rows - 7, 2), 33, 5])
            ragged = self.batch(count, self.seed + 3)
            es3, h3, hs3 = self.refs(eager, hp, ragged, state)
            mark()
            c3 = self.step(call, joined, ragged, state)
            self.judge(f"ragged {count}", c3, es3, h3, hs3)
            self.kinds += f" ragged={count}"
        # in a graph
        if self.cuda and not reduce and r.random() < 0.5:
            self.in_graph(call, joined, batch, other, state, c, es, h)
        if self.flags:
            self.bisect(hp, plan, batch, state, es, h, dynamic)

    def in_graph(self, call, joined, batch, other, state, c, es, h):
        from loka.train import graphed

        torch = self.torch
        self.kinds += " graph"
        params = [p for p in joined.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(params, lr=torch.tensor(0.0, device=self.device), capturable=self.cuda)
        inside = self.autocast

        def step(*xs):
            optimizer.zero_grad(set_to_none=True)
            if self.input_grads:
                xs = [x.detach().requires_grad_() if x.is_floating_point() else x for x in xs]
            with inside():
                outs = self.leaves(call(*xs))
            total = 0.0
            for o, v in zip(outs, directions):
                o = o.float()
                if self.loss_kind == "direction":
                    total = total + (o * v).sum()
                elif self.loss_kind == "bce":
                    total = total + torch.nn.functional.binary_cross_entropy_with_logits(o, v)
                else:
                    total = total + (o - v).square().mean()
            total.backward()
            optimizer.step()
            return (total.detach(), *[o.detach() for o in outs])

        directions = []
        for i, n in enumerate(k for k in c if k.startswith("out")):
            g = torch.Generator().manual_seed(5 + i)
            shape = c[n].shape
            if self.loss_kind == "bce":
                directions.append((torch.rand(shape, generator=g) > 0.7).float().to(self.device))
            else:
                directions.append(torch.randn(shape, generator=g).to(self.device))
        recorded = graphed(step, *batch, model=joined, optimizers=optimizer, warmup=2)
        for turn in range(5):
            self.restore(joined, state)
            results = recorded(*(other if turn in (1, 3) else batch))
        if self.cuda:
            torch.cuda.synchronize()
        if not recorded.graphed:
            self.notes.append(f"no graph: {recorded.reason}")
            return
        found = {f"out{i}": o.float().clone() for i, o in enumerate(results[1:])}
        found |= {f"g.{n}": p.grad.float().clone() for n, p in joined.named_parameters() if p.grad is not None}
        self.restore(joined, state)
        again = {n: t for n, t in c.items() if n in found}
        differ = 0
        for n, t in found.items():
            if n not in c:
                self.flag("graph", n, "MISSING uncaptured")
                continue
            if torch.equal(t, again[n]) or (t.isnan() & again[n].isnan()).all():
                continue
            differ += 1
            off = float((t - again[n]).norm())
            bound = 1e-3 * float(again[n].norm()) + 1.0 * max(float((x[n] - es[0][n]).norm()) for x in es[1:]) + 1e-30
            if not off <= bound:
                self.flag("graph", n, f"captured differs by {off:.3g} of {float(again[n].norm()):.3g}, bound {bound:.3g}", off / bound)
        self.notes.append(f"graph: {differ} of {len(found)} differ in bits")
        joined.zero_grad(set_to_none=True)

    def bisect(self, hp, plan, batch, state, es, h, dynamic):
        """Whether the compiler alone, or sites by themselves under it, are off as well."""
        import loka

        mine, self.flags, table = self.flags, [], self.table
        for what, model, eager in (
            ("hp compiled", copy.deepcopy(hp), None),
            ("regions=False", None, None),
        ):
            before = len(self.flags)
            try:
                if model is None:
                    model = loka.convert(copy.deepcopy(hp), plan, regions=False)
                    refs, truth = es, h
                else:
                    refs = [self.step(hp, hp, batch, state, moved=i) for i in range(4)]
                    truth = h
                c = self.step(self.compile(model, dynamic), model, batch, state)
                if what == "hp compiled":
                    # the tensor as it is: eager hp itself is the truth, moved ones are the rounding
                    self.judge(what, c, refs, truth)
                else:
                    self.judge(what, c, refs, truth)
                text = f"{len(self.flags) - before} flags"
                if len(self.flags) > before:
                    worst = max(self.flags[before:])
                    text += f" ({worst[2]}: {worst[3]})"
            except Exception as error:
                text = f"raises {type(error).__name__}"
            mine.append((0.0, "bisect", what, text))
        self.flags = mine

    # -- serving
    def serving(self):
        import loka
        from loka.core.exceptions import LokaError, ServeRefused

        torch, r = self.torch, self.r
        model = self.model(self.seed).eval()
        with torch.no_grad():
            for n, b in model.named_buffers():
                if "running_mean" in n:
                    b.normal_()
                elif "running_var" in n:
                    b.uniform_(0.5, 2.0)
        rows = 64 if self.told.tiny else 512
        batch = self.batch(rows, self.seed + 1)
        plan = self.plan(model, batch, output_only=True)
        buckets = r.choice([(16, 64), (1, 32, 128), (48,), (8, 100)]) if self.told.tiny else r.choice([(16, 128, 1024), (1, 64, 512), (100, 1000), (2048,), (8, 513)])
        if self.cuda:
            buckets = buckets[-2:]
        autocast = {"autocast": torch.bfloat16, "fp16": torch.float16}.get(self.gen.mode)
        self.kinds = f"serve {self.gen.mode} {self.data} {self.style} buckets={buckets}"
        self.say(plan)
        if not any(d.candidate != "hp" for d in plan.decisions.values()):
            raise Skip("nothing in eight bits")
        calibration = [self.batch(rows, self.seed + 20 + i) for i in range(3)]
        request = lambda xs: xs[0] if len(xs) == 1 else tuple(xs)
        try:
            server = loka.serve.freeze(model, plan, calibration=[request(b) for b in calibration], autocast=autocast, buckets=buckets)
        except ServeRefused as refused:
            raise Skip(f"refused: {str(refused).splitlines()[0][:150]}") from None
        self.say(server)
        apart = server.apart()
        self.notes.append(f"{len(server.card.sites)} sites, {len(apart)} apart, graphs {server.graphs}")
        self.static = any(s.scale == "static" for s in server.card.sites.values())
        self.answers("frozen", server, model, plan, buckets, calibration, autocast)
        # other weights
        other = self.model(self.seed + 9).eval()
        state = other.state_dict()
        self.say("refresh")
        server.refresh(state)
        self.answers("refreshed", server, other, plan, buckets, calibration, autocast)
        if r.random() < 0.5:
            server.refresh(model.state_dict())
            self.answers("refreshed back", server, model, plan, buckets, calibration, autocast)
            server.rollback()
            self.answers("rolled back", server, other, plan, buckets, calibration, autocast)
        if r.random() < 0.3:
            with tempfile.TemporaryDirectory() as folder:
                server.save(folder)
                loaded = loka.serve.load(folder, self.model(self.seed + 4).eval())
                xs = self.batch(buckets[0] + 3, self.seed + 31)
                a, b = (self.leaves(s(request(xs)).output) for s in (server, loaded))
                for i, (p, q) in enumerate(zip(a, b)):
                    if not torch.equal(p.nan_to_num(), q.nan_to_num()):
                        far = float((p.float() - q.float()).norm() / (p.float().norm() + 1e-30))
                        self.flag("load", f"out{i}", f"a loaded server differs by {far:.3g}")

    def answers(self, where, server, model, plan, buckets, calibration, autocast):
        import loka

        torch, r = self.torch, self.r
        request = lambda xs: xs[0] if len(xs) == 1 else tuple(xs)
        eager = loka.convert(copy.deepcopy(model), plan).eval().requires_grad_(False)
        hp = copy.deepcopy(model).eval().requires_grad_(False)
        state = self.state(hp)
        sizes = dict.fromkeys([1, max(buckets[0] - 1, 1), buckets[-1], buckets[-1] + 5, r.randint(2, buckets[-1] + 1)])

        def answer(by, xs, moved=0, bit=None):
            before, self.bit = self.bit, bit or self.bit
            try:
                return answered(by, xs, moved)
            finally:
                self.bit = before

        def answered(by, xs, moved):
            g = torch.Generator(device=self.device).manual_seed(77 + moved)
            if moved:
                xs = [x * (1 + self.bit * torch.randn(x.shape, generator=g, device=self.device)).to(x.dtype) if x.is_floating_point() else x for x in xs]
            self.restore(by, state, moved)
            with torch.no_grad(), torch.autocast(self.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
                return {f"out{i}": o.float().clone() for i, o in enumerate(self.leaves(by(*xs)))}

        for size in sizes:
            xs = self.batch(size, self.seed + 40 + size)
            got = server(request(xs))
            found = {f"out{i}": o.float().clone() for i, o in enumerate(self.leaves(got.output))}
            # padded as the server does it, in parts of the largest bucket
            parts = []
            for begin in range(0, size, buckets[-1]):
                part = [x[begin : begin + buckets[-1]] for x in xs]
                n = part[0].shape[0]
                bucket = next(b for b in buckets if b >= n)
                padded = [torch.cat([x, x[-1:].expand(bucket - n, *x.shape[1:])]) if bucket > n else x for x in part]
                wide = [answer(hp, padded, moved, 0.03) for moved in (11, 12)]
                whole = [answer(m, padded, moved) for m, moved in ((hp, 0), (eager, 0), (eager, 1), (eager, 2), (eager, 3))] + wide
                if self.told.plant == "eager":
                    whole.append(answer(eager, padded, 21))
                parts.append([{k: v[:n] for k, v in w.items()} for w in whole])
            h, *es = [{k: torch.cat([p[i][k] for p in parts]) for k in parts[0][i]} for i in range(len(parts[0]))]
            es, hs = es[:4], es[4:6]
            if self.told.plant == "eager":
                found = {k: torch.cat([p[7][k] for p in parts]) for k in parts[0][7]}
            self.judge(f"{where} {size}", found, es, h, hs)
            again = self.leaves(server(request(xs)).output)
            if not self.told.plant and any(not torch.equal(a.float().nan_to_num(), found[f"out{i}"].nan_to_num()) for i, a in enumerate(again)):
                self.flag(f"{where} {size}", "bits", "the same request, other bits")
            if not self.cuda and not self.static and not self.told.plant:
                for n in found:
                    if not torch.equal(found[n].nan_to_num(), es[0][n].nan_to_num()):
                        self.flag(f"{where} {size}", n, f"not bit-equal to the converted model, {float((found[n] - es[0][n]).abs().max()):.3g}")
        # NaN stays in its row
        if not self.static:
            xs = self.batch(buckets[-1], self.seed + 90)
            clean = [o.clone() for o in self.leaves(server(request(xs)).output)]
            for x in xs:
                if x.is_floating_point():
                    x[buckets[-1] // 2] = math.nan
            dirty = self.leaves(server(request(xs)).output)
            keep = torch.arange(buckets[-1], device=self.device) != buckets[-1] // 2
            for i, (a, b) in enumerate(zip(clean, dirty)):
                if not torch.equal(a[keep].nan_to_num(), b[keep].nan_to_num()):
                    self.flag(where, f"out{i}", "a row of NaN changes others")


def F_relu(x):
    return x.clamp_min(0)


# ------------------------------------------------------------------------------------------------ the workers


def ready(told):
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if told.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import logging

    import torch

    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch.backends.cuda.matmul.allow_tf32 = False
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    logging.getLogger("loka").setLevel(logging.ERROR)
    return torch


def one(seed, told):
    """(status, line, details, fatal)"""
    import torch

    began = time.monotonic()
    case, fatal = None, False
    try:
        case = Case(seed, told)
        case.kinds = "serve" if case.serve else "train"
        case.run()
        status = "FLAG" if case.flags else "ok"
        details = "\n".join(f"    {w} {n}: {t}" for _, w, n, t in sorted(case.flags, key=lambda f: (f[1] == "bisect", -f[0]))[:12])
    except Skip as why:
        status, details = "skip", ""
        case.notes.append(str(why))
    except Exception as error:
        status = "CRASH"
        details = traceback.format_exc()
        fatal = "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError"
        if case is not None:
            case.notes.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:200]}")
    took = time.monotonic() - began
    kinds = getattr(case, "kinds", "")
    tags = ",".join(case.gen.tags) if case else ""
    worst = f"worst {case.worst[0]:.2f} {case.worst[1]}" if case and case.worst[1] else ""
    line = f"{seed:>5} {status:<5} {took:5.1f}s {kinds} [{tags}] {worst}; {'; '.join(dict.fromkeys(case.notes)) if case else ''}"
    if told.only is not None and case is not None:
        for where, n, ratio, ch, eh, ce, sp, rule in case.table:
            print(f"  {where:12} {n:24} ratio {ratio:5.2f} ({rule})  c-h {ch:.4f} e-h {eh:.4f} c-e {ce:.4f} spread {sp:.4f}")
    torch._dynamo.reset()
    return status, line, details, fatal


def worker(told, seeds, results, place, stop):
    """One process: seeds in, results out; it ends itself where CUDA is unusable."""
    sys.stdout = sys.stderr = open(os.devnull, "w")
    torch = ready(told)
    done = 0
    while not stop.is_set():
        try:
            seed = seeds.get(timeout=1)
        except queue.Empty:
            break
        results.put(("began", place, seed))
        status, line, details, fatal = one(seed, told)
        results.put(("done", place, seed, status, line, details))
        done += 1
        if fatal:
            results.close()
            results.join_thread()  # what was put is sent
            os._exit(3)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    results.put(("ended", place, None))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=380)
    parser.add_argument("--limit", type=float, default=150, help="seconds of one case")
    parser.add_argument("--seeds", default="0:5000")
    parser.add_argument("--only", type=int)
    parser.add_argument("--kind", default="any", choices=["any", "train", "serve"])
    parser.add_argument("--backend", choices=["inductor", "joint"], help="default: inductor on a GPU, joint (no code generation) on a CPU")
    parser.add_argument("--plant", choices=["grad", "row", "column", "eager"],
                        help="what is compared has a fault: is it seen? eager: it is the eager model, moved once more: is it let go?")
    parser.add_argument("--folder", default=None)
    told = parser.parse_args()
    told.backend = told.backend or ("inductor" if told.device == "cuda" else "joint")
    told.folder = told.folder or tempfile.mkdtemp(prefix="fuzz_models_")
    os.makedirs(told.folder, exist_ok=True)
    if told.only is not None:
        ready(told)
        status, line, details, _ = one(told.only, told)
        print(line)
        print(details)
        return
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    context = mp.get_context("spawn")
    first, last = map(int, told.seeds.split(":"))
    seeds, results, stop = context.Queue(), context.Queue(), context.Event()
    for seed in range(first, last):
        seeds.put(seed)
    began, processes, busy, ended = time.monotonic(), {}, {}, set()

    def start(place):
        processes[place] = context.Process(target=worker, args=(told, seeds, results, place, stop), daemon=True)
        processes[place].start()

    for place in range(told.workers):
        start(place)
    counts, bad = {}, []
    while len(ended) < told.workers and time.monotonic() - began < told.seconds:
        if time.monotonic() - began > told.seconds - 15:
            stop.set()  # none begins another case
        try:
            got = results.get(timeout=0.5)
        except queue.Empty:
            got = None
        if got is not None:
            kind, place, seed, *rest = got
            if kind == "began":
                busy[place] = (seed, time.monotonic())
            elif kind == "ended":
                ended.add(place)
            else:
                busy.pop(place, None)
                status, line, details = rest
                counts[status] = counts.get(status, 0) + 1
                print(line, flush=True)
                if status in ("FLAG", "CRASH"):
                    bad.append((status, line, details))
                    if status == "FLAG":
                        print(details, flush=True)
            continue  # all that is known first
        for place, process in list(processes.items()):
            if place in ended:
                continue
            seed, since = busy.get(place, (None, None))
            late = since is not None and time.monotonic() - since > told.limit
            if late or not process.is_alive():
                if late:
                    process.kill()
                if seed is not None:
                    status = "TIME" if late else "DIED"
                    counts[status] = counts.get(status, 0) + 1
                    line = f"{seed:>5} {status}  {time.monotonic() - since:5.1f}s exit code {process.exitcode}"
                    print(line, flush=True)
                    bad.append((status, line, ""))
                busy.pop(place, None)
                start(place)
    for process in processes.values():
        process.kill()
    print(f"\n==== {sum(counts.values())} cases in {time.monotonic() - began:.0f} s: {counts}; models in {told.folder}")
    if busy:
        print(f"unfinished: {', '.join(f'{seed} ({time.monotonic() - since:.0f} s)' for seed, since in busy.values())}")
    for status, line, details in bad:
        print(line)
        if status == "FLAG":
            print(details)
    shown = {}
    for status, line, details in bad:
        if status == "CRASH":
            shown.setdefault("\n".join(details.strip().splitlines()[-1:])[:120], []).append((line, details))
    for key, several in list(shown.items())[:5]:
        print(f"\n---- {len(several)} like this: {several[0][0]}\n{several[0][1][-6000:]}")
    for key, several in list(shown.items())[5:]:
        print(f"\n---- {len(several)} like: {key} ({several[0][0].split()[0]})")


if __name__ == "__main__":
    main()
