"""What a converted model should compute, by two ways that share no mechanism with it.

    y = Q(x) Q(W)^T,   dx = Q(dy) Q(W),   dW = Q(dy)^T Q(x)       each GEMM by `run_gemm`

`multiply` is a GEMM by hand, for small models that a test writes twice. `SiteBySite` is for models that
others wrote: a dispatch mode below autograd that tells weights by their memory, in forward and backward
alike, and knows neither modules nor names nor views. It takes a candidate that treats both operands of all
three GEMMs alike, so that which one is the weight does not matter: row scales, e4m3.

Tolerance. Both sides quantize the same numbers and add the same products in float32 in another order, so a
GEMM by itself agrees to 1e-6. What follows it is quantized again, and a value on a rounding boundary then
falls to the other side: one step of 2^-4 of that value, in one of thousands. `CLOSE` is 2e-3 of the norm; a
GEMM that is not quantized at all, or twice, is off by 2e-2 to 4e-2 (28 dB).
"""

from collections import Counter

import torch
from foreign.flops import Memory
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loka.core.recipe import Gemm
from loka.kernels.gemm.run import run_gemm

ROW = "emulated:rowwise_e4m3"
CLOSE = 2e-3
Candidates = tuple[str, str, str]

aten = torch.ops.aten


class _Gemms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, names):
        ctx.save_for_backward(x, weight)
        ctx.names = names
        return run_gemm(names[0], x, weight, gemm=Gemm.OUTPUT, dtype=x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = run_gemm(ctx.names[1], dy, weight.t(), gemm=Gemm.GRAD_INPUT, dtype=dy.dtype)
        dw = run_gemm(ctx.names[2], dy.t(), x.t(), gemm=Gemm.GRAD_WEIGHT, dtype=weight.dtype)
        return dx, dw, None


def multiply(x, weight, names=(ROW, ROW, ROW)):
    """x [..., K] @ weight [N, K]^T -> [..., N]; under autocast x is cast and the weight is not."""
    if torch.is_autocast_enabled("cpu"):
        x = x.to(torch.get_autocast_dtype("cpu"))
    y = _Gemms.apply(x.reshape(-1, x.shape[-1]), weight, names)
    return y.reshape(*x.shape[:-1], weight.shape[0])


class Linear8(nn.Linear):
    """nn.Linear as a site computes it; `by_hand` puts it in place of each nn.Linear of a plain copy."""

    names: Candidates = (ROW, ROW, ROW)

    def forward(self, input):
        y = multiply(input, self.weight, self.names)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def by_hand(model, names=(ROW, ROW, ROW)):
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear8
            module.names = names
    return model


class SiteBySite(TorchDispatchMode):
    """While it is on, every matrix product with a parameter, and its two in backward, run by `candidate`.

    Args:
        but: names of parameters that no site multiplies by.
    """

    def __init__(self, model, *, but=(), candidate=ROW):
        super().__init__()
        self._memory = Memory(model)
        self._but, self._candidate = frozenset(but), candidate
        self._vectors = {name for name, p in model.named_parameters() if p.dim() < 2}
        self._inputs = {}  # memory of what was multiplied -> sizes of weights
        self._kept = []  # so that no address is used again
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet in (aten.mm, aten.bmm):
            return self._product(args[0], args[1], lambda: func(*args, **kwargs))
        if packet in (aten.addmm, aten.baddbmm) and not kwargs:
            product = self._product(args[1], args[2], lambda: None)
            return func(*args) if product is None else product + args[0]
        if packet is aten.convolution and args[1].dim() == 3 and args[1].shape[2] == 1:
            return self._convolution(*args[:3])
        if packet is aten.convolution_backward and args[2].dim() == 3 and args[2].shape[2] == 1:
            return self._convolution_backward(*args[:3], args[-1])
        out = func(*args, **kwargs)
        if packet in (aten.clone, aten._to_copy, aten.slice_copy, aten.cat, aten.stack):
            self._memory.copied(out, args)
        return out

    def _product(self, a, b, plain):
        """a [M, K] @ b [K, N], both perhaps with a batch."""
        if not self._is_sites(a, b):
            return plain()
        if a.dim() == 2:
            return self._gemm(a, b)
        return torch.stack([self._gemm(one, other) for one, other in zip(a.unbind(0), b.unbind(0), strict=True)])

    def _is_sites(self, a, b):
        first, second = self._owner(a), self._owner(b)
        if first and second:
            return False
        if first or second:
            x, weight = (b, a) if first else (a, b)
            if set(first or second) & (self._but | self._vectors):
                return False
            self._inputs.setdefault(_memory(x), set()).add(weight.numel())
            self._kept.append(x)
            self.counts["output or grad_input"] += 1
            return True
        out = a.numel() // a.shape[-1] * b.shape[-1]
        found = any(out in self._inputs.get(_memory(one), ()) for one in (a, b))
        if found and torch._C._current_graph_task_id() != -1:
            self.counts["grad_weight"] += 1
            return True
        return False

    def _owner(self, tensor):
        return list(self._memory.owners(tensor))

    def _gemm(self, a, b):
        return run_gemm(self._candidate, a, b.t(), gemm=Gemm.OUTPUT, dtype=a.dtype)

    def _convolution(self, x, weight, bias):
        rows = x.movedim(1, -1)
        y = self._gemm(rows.reshape(-1, x.shape[1]), weight[:, :, 0].t())
        y = y.reshape(*rows.shape[:-1], -1).movedim(-1, 1)
        self.counts["output or grad_input"] += 1
        return (y if bias is None else y + bias[:, None]).contiguous()

    def _convolution_backward(self, dy, x, weight, wanted):
        dy_rows, x_rows = (t.movedim(1, -1).reshape(-1, t.shape[1]) for t in (dy, x))
        dx = self._gemm(dy_rows, weight[:, :, 0]).reshape(dy.shape[0], dy.shape[2], -1).movedim(-1, 1)
        dw = self._gemm(dy_rows.t(), x_rows).unsqueeze(-1)
        self.counts["output or grad_input"] += 1
        self.counts["grad_weight"] += 1
        return dx, dw, dy.sum((0, 2)) if wanted[2] else None


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def gradients(model):
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def off(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    size = expected.norm()
    return float((found - expected).norm() / size if size > 0 else (found - expected).norm())


def assert_close(found, expected, *, bound=CLOSE, what=""):
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)}, not {tuple(expected.shape)}"
    assert off(found, expected) <= bound, f"{what}: off by {off(found, expected):.2e} of the norm"


def assert_same_gradients(model, expected, *, bound=CLOSE):
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, bound=bound, what=name)
