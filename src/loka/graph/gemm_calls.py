"""Which torch calls are GEMMs with a weight, brought to one form.

    y [..., N] = x [..., K] @ weight [N, K]^T
    y [E, M, N] = x [E, M, K] @ weight [E, N, K]^T    for E stacked weights

`gemm_of` reads F.linear, matmul, mm, bmm, mv by a vector, addmm, baddbmm, einsum, tensordot and convolutions
whose kernel is one; the weight may stand on either side. (Not mv of a matrix that is the weight: it has one
row, as the power iteration of a spectral norm.) Probe and a converted model share it, so what was measured is
what runs. Everything here is views and constants, which torch.compile traces without a trace of it in
the graph. Calls that it cannot bring to the form return None; accounting names them (graph/flops.py).
"""

import operator
import string
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Layout = Callable[[torch.Tensor], torch.Tensor]


class GemmCall(NamedTuple):
    """A call in the form above. `x` and `weight` are views of its operands.

    `source` is the operand that `weight` is a view of. `rows` brings the call's output, or its gradient,
    to y; `output` brings y to what the call returns without its bias. `form` tells apart what one weight
    can be used for: "linear" for [N, K] as it lies, "matmul" for [K, N], an equation for einsum.
    """

    source: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    form: str
    rows: Layout
    output: Layout
    bias: torch.Tensor | None = None


def gemm_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: Any) -> GemmCall | None:
    """The call as a GEMM whose weight is the operand for which `is_weight(tensor)` holds, or None."""
    if kwargs.get("out") is not None:
        return None
    kwargs = {name: value for name, value in kwargs.items() if name != "out"}
    if func in _LINEAR:
        return _linear(*args, is_weight=is_weight, **kwargs)
    if func in _PRODUCTS:
        a, b = (*args, *(kwargs[name] for name in ("input", "self", "other", "mat2", "vec") if name in kwargs))[:2]
        return None if func in _VECTORS and is_weight(a) else _product(a, b, None, is_weight)
    if func in _REVERSED:
        return _product(args[1], args[0], None, is_weight)
    if func in _ADDED:
        return _added(*args, is_weight=is_weight, **kwargs)
    if func in _EINSUM:
        return _einsum_call(args, is_weight)
    if func in _TENSORDOT:
        return _tensordot(*args, is_weight=is_weight, **kwargs)
    if func in _CONVOLUTIONS:
        return _convolution(*args, is_weight=is_weight, **kwargs)
    return None


_LINEAR = {F.linear}
_VECTORS = {torch.mv, torch.Tensor.mv}
_PRODUCTS = _VECTORS | {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    operator.matmul,  # what torch.export traces for it
    torch.Tensor.mm,
    torch.Tensor.bmm,
}
_REVERSED = {torch.Tensor.__rmatmul__}
_ADDED = {torch.addmm, torch.baddbmm, torch.Tensor.addmm, torch.Tensor.baddbmm}
_EINSUM = {torch.einsum}
_TENSORDOT = {torch.tensordot}
_CONVOLUTIONS = {F.conv1d, F.conv2d}
GEMMS = frozenset(_LINEAR | _PRODUCTS | _REVERSED | _ADDED | _EINSUM | _TENSORDOT | _CONVOLUTIONS)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _last_swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2)


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_weight: Any
) -> GemmCall | None:
    if weight.dim() != 2 or not is_weight(weight) or is_weight(input):
        return None
    return GemmCall(weight, input, weight, "linear", _same, _same, bias)


def _product(a: Any, b: Any, bias: torch.Tensor | None, is_weight: Any) -> GemmCall | None:
    """a @ b, with one of them the weight."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return None
    first, second = is_weight(a), is_weight(b)
    if first == second:  # no weight, or a product of two weights
        return None
    return _times_weight(a, b, bias) if second else _weight_times(a, b, bias)


def _times_weight(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> GemmCall | None:
    """x @ w, with w [K], [K, N] or [E, K, N]."""
    if w.dim() == 1 and x.dim() >= 1:
        return GemmCall(w, x, w.unsqueeze(0), "matmul", _append_side, _drop_last, bias)
    if w.dim() == 2 and x.dim() == 1:
        return GemmCall(w, x.unsqueeze(0), w.t(), "matmul", _prepend_side, _drop_first, bias)
    if w.dim() == 2:
        return GemmCall(w, x, w.t(), "matmul", _same, _same, bias)
    if w.dim() != 3:
        return None
    experts = w.shape[0]
    if x.dim() == 3 and x.shape[0] == experts and experts > 1:
        return GemmCall(w, x, w.transpose(1, 2), "matmul", _same, _same, bias)
    if x.dim() == 2 or (x.dim() == 3 and (x.shape[0] == 1 or experts == 1)):  # all weights read the same
        rows, features = x.shape[-2], w.shape[2]  # written out: of no rows, -1 could be any number
        together = w.transpose(1, 2).reshape(experts * features, w.shape[1])
        if x.dim() == 3 and x.shape[0] > 1:
            return GemmCall(w, x, together, "matmul", _same, _same, bias)

        def output(y: torch.Tensor) -> torch.Tensor:
            return y.reshape(rows, experts, features).transpose(0, 1)

        def to_rows(out: torch.Tensor) -> torch.Tensor:
            return out.transpose(0, 1).reshape(rows, experts * features)

        return GemmCall(w, x.reshape(rows, x.shape[-1]), together, "matmul", to_rows, output, bias)
    if x.dim() == 4 and x.shape[1] == experts:
        first, rows = x.shape[0], x.shape[2]

        def leading(y: torch.Tensor) -> torch.Tensor:
            return y.reshape(experts, first, rows, y.shape[-1]).transpose(0, 1)

        def trailing(out: torch.Tensor) -> torch.Tensor:
            return out.transpose(0, 1).reshape(experts, first * rows, out.shape[-1])

        return GemmCall(w, trailing(x), w.transpose(1, 2), "matmul", trailing, leading, bias)
    return None


def _weight_times(w: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> GemmCall | None:
    """w @ x, with w [N, K] or [E, N, K]: y^T = x^T w^T."""
    if w.dim() == 2 and x.dim() == 1:
        return GemmCall(w, x.unsqueeze(0), w, "linear", _prepend_side, _drop_first, bias)
    if w.dim() == 1 and x.dim() == 2:
        return GemmCall(w, x.t(), w.unsqueeze(0), "linear", _append_side, _drop_last, bias)
    if w.dim() == 2 and x.dim() >= 2:
        return GemmCall(w, _last_swapped(x), w, "linear", _last_swapped, _last_swapped, bias)
    if w.dim() == 3 and x.dim() == 3 and x.shape[0] == w.shape[0] and w.shape[0] > 1:
        return GemmCall(w, _last_swapped(x), w, "linear", _last_swapped, _last_swapped, bias)
    return None


_append_side, _prepend_side = partial(torch.unsqueeze, dim=-1), partial(torch.unsqueeze, dim=0)
_drop_last, _drop_first = partial(torch.squeeze, dim=-1), partial(torch.squeeze, dim=0)


def _added(
    input: torch.Tensor,
    first: Any = None,
    second: Any = None,
    *,
    is_weight: Any,
    beta: float = 1,
    alpha: float = 1,
    **named: Any,
) -> GemmCall | None:
    """input + first @ second: the bias is the first argument."""
    first = named.get("mat1", named.get("batch1", first))
    second = named.get("mat2", named.get("batch2", second))
    if beta != 1 or alpha != 1:
        return None
    return _product(first, second, input, is_weight)


def _einsum_call(args: tuple[Any, ...], is_weight: Any) -> GemmCall | None:
    if len(args) in (4, 5) and isinstance(args[0], torch.Tensor):
        args = (_equation_of(args[1], args[3], *args[4:]), args[0], args[2])
    if not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    if len(operands) != 2:
        return None
    first, second = is_weight(operands[0]), is_weight(operands[1])
    if first == second:
        return None
    return _einsum(args[0], operands[0], operands[1], weight_first=first)


def _equation_of(*subscripts: Any) -> str:
    """Of subscripts in lists, as torch writes it; eager torch has done so before a function mode is asked."""

    left, right, *out = ("".join("..." if n is Ellipsis else _LETTERS[n] for n in each) for each in subscripts)
    return "->".join([f"{left},{right}", *out])


_LETTERS = string.ascii_uppercase + string.ascii_lowercase


def _spelled_out(equation: str, a: torch.Tensor, b: torch.Tensor) -> str:
    """With a letter for each side that "..." stands for; as it is where operands have fewer sides than letters."""
    inputs, out = equation.split("->")
    texts = inputs.split(",")
    sides = [each.dim() - len(text) + 3 if "..." in text else 0 for text, each in zip(texts, (a, b), strict=True)]
    if min(sides) < 0:
        return equation
    free = "".join(letter for letter in _LETTERS if letter not in equation)[: max(sides)]
    left, right = (text.replace("...", free[len(free) - n :]) for text, n in zip(texts, sides, strict=True))
    return f"{left},{right}->{out.replace('...', free)}"


def _einsum(equation: str, a: torch.Tensor, b: torch.Tensor, *, weight_first: bool) -> GemmCall | None:
    """An equation of two operands in which every letter is of one kind.

    Letters of both operands and the output stack weights (E); of both operands alone they are contracted
    (K); the others are rows (of x) and outputs (of the weight).
    """
    spaced = equation.replace(" ", "")
    if spaced.count("->") > 1 or spaced.count(",") != 1:
        return None
    if "->" not in spaced:  # torch's implicit output: what appears once, in order
        once = sorted(c for c in set(spaced) - set(".,") if spaced.count(c) == 1)
        spaced += "->" + "..." * ("..." in spaced) + "".join(once)
    inputs, out = (_spelled_out(spaced, a, b) if "." in spaced else spaced).split("->")
    left, right = inputs.split(",")
    of_w, of_x = (left, right) if weight_first else (right, left)
    w, x = (a, b) if weight_first else (b, a)
    if (len(of_w), len(of_x)) != (w.dim(), x.dim()):
        return None  # torch says so
    letters = (of_x, of_w, out)
    if any(len(set(part)) != len(part) for part in letters) or set(out) - set(of_x) - set(of_w):
        return None
    stacked = "".join(c for c in of_w if c in of_x and c in out)
    inner = "".join(c for c in of_w if c in of_x and c not in out)
    rows = "".join(c for c in of_x if c not in of_w)
    outputs = "".join(c for c in of_w if c not in of_x)
    if not inner or set(rows + outputs) - set(out):
        return None
    size = dict(zip(of_w, w.shape, strict=True))
    if any(size.setdefault(c, side) != side for c, side in zip(of_x, x.shape, strict=True)):
        return None  # a side of one that torch broadcasts
    count, contracted, height, width = (_product_of(size, part) for part in (stacked, inner, rows, outputs))
    x_form = _permuted(x, of_x, stacked + rows + inner)
    w_form = _permuted(w, of_w, stacked + outputs + inner)
    order = stacked + rows + outputs
    sides = [size[c] for c in order]
    back = [order.index(c) for c in out]
    forth = [out.index(c) for c in order]
    if stacked and count > 1:
        x_form = x_form.reshape(count, height, contracted)
        w_form = w_form.reshape(count, width, contracted)
        flat: tuple[int, ...] = (count, height, width)
    else:
        x_form = x_form.reshape(*(size[c] for c in rows), contracted) if rows else x_form.reshape(1, contracted)
        w_form = w_form.reshape(width, contracted)
        flat = (*(size[c] for c in rows), width) if rows else (1, width)

    def output(y: torch.Tensor) -> torch.Tensor:
        return y.reshape(sides).permute(back)

    def to_rows(result: torch.Tensor) -> torch.Tensor:
        return result.permute(forth).reshape(flat)

    return GemmCall(w, x_form, w_form, spaced, to_rows, output)


def _product_of(size: dict[str, int], letters: str) -> int:
    product = 1
    for letter in letters:
        product *= size[letter]
    return product


def _permuted(tensor: torch.Tensor, have: str, want: str) -> torch.Tensor:
    return tensor.permute([have.index(c) for c in want])


def _tensordot(a: torch.Tensor, b: torch.Tensor, dims: Any = 2, *, is_weight: Any) -> GemmCall | None:
    if isinstance(dims, torch.Tensor):
        return None
    if isinstance(dims, int):
        dims = (list(range(a.dim() - dims, a.dim())), list(range(dims)))
    of_a = [side % a.dim() for side in dims[0]]
    of_b = [side % b.dim() for side in dims[1]]
    first, second = is_weight(a), is_weight(b)
    if first == second or not of_a:
        return None
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    left = alphabet[: a.dim()]
    free = iter(alphabet[a.dim() :])
    right = "".join(left[of_a[of_b.index(side)]] if side in of_b else next(free) for side in range(b.dim()))
    kept = "".join(c for side, c in enumerate(left) if side not in of_a)
    kept += "".join(c for side, c in enumerate(right) if side not in of_b)
    return _einsum(f"{left},{right}->{kept}", a, b, weight_first=first)


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    is_weight: Any,
) -> GemmCall | None:
    """A kernel of one: every position is a row. Weight [N, C, 1] or [N, C, 1, 1], input [B, C, positions]."""
    if not is_weight(weight) or is_weight(input) or groups != 1 or input.dim() != weight.dim():
        return None
    if any(side != 1 for side in weight.shape[2:]) or not _all(stride, 1):
        return None
    if not (padding == "valid" or padding == "same" or _all(padding, 0)):
        return None
    if bias is not None:
        bias = bias.reshape(-1, *([1] * (input.dim() - 2)))
    return GemmCall(weight, input.movedim(1, -1), weight.flatten(1), "conv", _channels_last, _channels_second, bias)


def _all(value: Any, wanted: int) -> bool:
    return all(one == wanted for one in value) if isinstance(value, (tuple, list)) else value == wanted


_channels_last = partial(torch.movedim, source=1, destination=-1)
_channels_second = partial(torch.movedim, source=-1, destination=1)


def lies_across(x: torch.Tensor) -> bool:
    """Whether x [B, d, n] lies as [B, n, d]: a GEMM of its rows reads across memory."""
    return bool(x.dim() == 3 and min(x.shape[1:]) > 1 and x.stride(1) == 1 and x.stride(2) > 1)
