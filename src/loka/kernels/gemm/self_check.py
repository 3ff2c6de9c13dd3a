"""Does a candidate compute what it claims, on this device? A few small problems, elementwise bounds.

A kernel that reads a wrong scale is not slower, and on operands whose groups are alike it is hardly
less exact either (docs/self_check.md). So the operands here are made to tell groups apart:

    A[i, k] = s_k |z_ik| 2^( R_A(i / 128) + T_A(i) + C(k / 128))
    B[j, k] = s_k |z_jk| 2^( R_B(j / 128) + T_B(j) - C(k / 128) + P(k / 128))

with R, T, C, P made of multiples of irrational numbers modulo a width, so that no two neighbouring rows,
columns or 128-blocks have like magnitudes, transposed or shifted by one; |z| log-uniform in
[1/4, 1]; s_k = +1 or -1. A and B share s_k, so every product in a sum has the same sign and

    |out_ij| = S_ij = sum over k of |a_ik b_jk|:      nothing cancels, nothing hides.

Why a wrong kernel cannot pass by luck. One sign is the worst case for the tensor cores too: they cut every
term off towards zero, and the losses add up. The bound on a right one (K <= 640, bf16, computed) is

    fast accumulation       4.4 % of |out|; such kernels have tensor or row scales only
    float32 accumulation    1.2 % of |out|

and 0.4 % more where a kernel rounds to bfloat16 twice. Against that stands

* a wrong scale of a row or a tensor. It multiplies |out| by f; neighbouring rows' scales are an octave
  apart or more, so f <= 1/2 or f >= 2, an error of at least 50 % of |out|: 10 bounds, or 31.
* a wrong scale of one 128-block of K, which changes that block's share of S alone. C makes A large where
  B is small, so shares differ by P only and none is below 9 % (3 or 5 blocks). Neighbours' scales are
  2.9 octaves apart along K, 2.1 down the 128-blocks of rows, 1.6 across the diagonal: the error is at
  least 67 % of 9 %, 6 % of |out|: 3.7 bounds, in every output of the block.
* two scales wrong together, A's and B's shifted alike: C cancels, P does not.
* data of one operand in another order along K: s_k no longer match, and |out| falls to about S / sqrt(K),
  a twentieth.

tests/kernels/gemm/test_self_check.py plants all of these, and measures the distances and shares named here.
"""

from __future__ import annotations

import functools
import math

import torch

from loka.core.device import synchronize
from loka.core.exceptions import first_line
from loka.core.numerics.hot_columns import append
from loka.core.numerics.reference import Quantized, accumulation_bound, dequantize, half_step, quantize, scaled_mm
from loka.core.problem import DTYPES, Problem, target_of
from loka.core.recipe import Gemm
from loka.kernels.gemm.registry import Candidate, candidate_named
from loka.kernels.quantize.quantizer import append_residuals, quantize_operand

Sides = tuple[int, int, int]

# 3 and 5 blocks of 128 along K: not multiples of 4 (pytorch/ao#4209). The first fits every layout
# rule by odd multiples, 4 * 33, 16 * 17 and 128 * 3; the second fits none, so it is padded.
_SIDES: tuple[Sides, ...] = ((132, 272, 384), (389, 333, 601))
# For candidates with other rules (few rows, squares, large powers of two), in this order.
_OTHER_SIDES: tuple[Sides, ...] = (
    *((1, 272, 384), (4, 272, 384), (16, 272, 384), (64, 320, 384)),
    *((128, 384, 640), (256, 384, 640), (384, 512, 640), (512, 256, 384), (640, 640, 640)),
)
_DTYPES = ("bfloat16", "float32")
_OTHER_DTYPES = ("float16",)

_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples modulo 1 keep neighbours farthest apart: 0.38 at least
_ZERO_ROW = 5  # of both operands
_ZERO_BLOCK = 1  # of A: rows 128.., columns 128..


def self_check(name: str, *, gemm: Gemm, device: torch.device | str) -> str | None:
    """None if candidate `name` is right on `device`, else the evidence in one or two lines.

    An exception in the kernel is evidence, as is a non-finite result. The quantizer is compared
    with its reference too. Runs once for each (kernel, recipe, algorithm, gemm, device) in a process
    and does not count in `kernel_runs`.

    A pinned algorithm "kernel:recipe@3" means the fourth of a problem's own list, which may be
    shorter here: then its last one runs. What is checked is how the adapter passes data, scales and
    padding; that the algorithm is right at its true size is compared while measuring.

    Raises:
        UnknownName: no candidate is called so.
        torch.OutOfMemoryError: a full GPU says nothing about the kernel.
        AssertionError: the candidate runs none of the problems known here, so it must not pass.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _evidence(candidate_named(name), gemm, device)


@functools.cache  # by the whole candidate: a kernel replaced under the same name is checked anew
def _evidence(candidate: Candidate, gemm: Gemm, device: torch.device) -> str | None:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        problems = _problems(candidate, gemm, device)
        assert problems, (
            f"{candidate.name} runs no {gemm} on {device} that the self-check knows; it needs a shape for it"
        )
        for problem in problems:
            found = _check(candidate, problem, device)
            if found is not None:
                m, n, k = problem.m, problem.n, problem.k
                return f"M={m} N={n} K={k} {problem.dtype}: {found}"
    return None


def _problems(candidate: Candidate, gemm: Gemm, device: torch.device) -> list[Problem]:
    def supported(sides: tuple[Sides, ...], dtypes: tuple[str, ...]) -> list[Problem]:
        several = [
            Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype, target=target_of(device))
            for dtype in dtypes
            for m, n, k in sides
        ]
        return [problem for problem in several if candidate.unsupported(problem) is None]

    return (
        supported(_SIDES, _DTYPES)
        or supported(_OTHER_SIDES, _DTYPES)[:1]
        or supported((*_SIDES, *_OTHER_SIDES), _OTHER_DTYPES)[:1]
    )


def _check(candidate: Candidate, problem: Problem, device: torch.device) -> str | None:
    """Runs one problem and compares every number; None if all are right, else the evidence."""
    casts = candidate.recipe.casts(problem.gemm)
    assert casts is not None
    padded = candidate.padded(problem)
    a, b = operands(problem, device)
    dtype = DTYPES[problem.dtype]
    try:
        low_a = quantize_operand(a, casts[0], padded=(padded.m, padded.k), health=None, slot=-1)
        low_b = quantize_operand(b, casts[1], padded=(padded.n, padded.k), health=None, slot=-1)
        if device.type != "cpu":  # on a CPU the quantizer is the reference
            for operand, hp, low in (("A", a, low_a), ("B", b, low_b)):
                found = _quantizer_evidence(operand, hp, low)
                if found is not None:
                    return found
        if candidate.recipe.hot and problem.gemm is Gemm.OUTPUT:
            columns = torch.arange(0, 2 * candidate.recipe.hot, 2, device=device)
            wrong = _residuals(a, low_a, columns, second=False) + _residuals(b, low_b, columns, second=True)
            if wrong:
                return f"{wrong} of its residuals differ from the reference"
        out = _pinned_here(candidate, padded, device).run(low_a, low_b, dtype)
        synchronize(device)  # a fault of the kernel belongs here, not to what comes next
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"it raised {first_line(error)}"[:300]
    if out.dtype != dtype or tuple(out.shape) != (padded.m, padded.n):
        return f"the result is {out.dtype} {tuple(out.shape)}, not {dtype} {(padded.m, padded.n)}"
    # float64: the product of float32 operands must not depend on whether TF32 is allowed here.
    expected = (dequantize(low_a).double() @ dequantize(low_b).double().t())[: problem.m, : problem.n]
    bound = _bound(low_a, low_b, candidate, dtype).double()[: problem.m, : problem.n]
    bound += candidate.kernel.rounding(padded, candidate.recipe) * expected.abs()
    return compare(out[: problem.m, : problem.n].double(), expected, bound)


def _pinned_here(candidate: Candidate, padded: Problem, device: torch.device) -> Candidate:
    if not candidate.algorithm or device.type == "cpu":
        return candidate
    count = candidate.kernel.algorithms(padded, candidate.recipe)
    return Candidate(
        kernel=candidate.kernel, recipe=candidate.recipe, algorithm=max(min(candidate.algorithm, count - 1), 0)
    )


def _bound(a: Quantized, b: Quantized, candidate: Candidate, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU: float32 sums in any order, and one rounding to `dtype`."""
    if a.data.device.type != "cpu":
        return accumulation_bound(a, b, fast=candidate.kernel.fast, dtype=dtype)
    absolute = dequantize(a).abs() @ dequantize(b).abs().t()
    return a.shape[1] * 2.0**-23 * absolute + half_step(dtype) * scaled_mm(a, b, dtype=torch.float32).abs()


def _quantizer_evidence(operand: str, hp: torch.Tensor, low: Quantized) -> str | None:
    # On the CPU, where a division by FMAX is one; on a GPU torch multiplies by 1 / FMAX, an ulp away.
    expected = quantize(hp.cpu(), low.cast, padded=low.shape)
    scales = int((low.scale.cpu() != expected.scale).sum())
    values = int((low.data.cpu().float() != expected.data.float()).sum())  # float: -0 equals 0
    if not scales and not values:
        return None
    return (
        f"the quantizer is wrong for operand {operand} ({low.cast.name}): {scales} of "
        f"{low.scale.numel()} scales and {values} of {low.data.numel()} values differ from the reference"
    )


def _residuals(hp: torch.Tensor, low: Quantized, columns: torch.Tensor, *, second: bool) -> int:
    twin = Quantized(low.data.cpu().clone(), low.scale.cpu(), low.cast)
    append(twin, hp.cpu(), columns.cpu(), second=second)
    append_residuals(low, hp, columns, second=second)
    return int((low.data.cpu().float() != twin.data.float()).sum())


def operands(problem: Problem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A [M, K] and B [N, K] as the module docstring defines them, strided as a linear layer passes them.

    Row 5 of both is zero where there are more than 5, and so is a 128-block of A where there is a second.
    """
    a, b = _operands(problem.m, problem.n, problem.k)
    a, b = (operand.to(device=device, dtype=DTYPES[problem.dtype]) for operand in (a, b))
    if problem.gemm is Gemm.GRAD_WEIGHT:  # dY^T
        a = a.t().contiguous().t()
    if problem.gemm is not Gemm.OUTPUT:  # W^T and x^T
        b = b.t().contiguous().t()
    return a, b


@functools.lru_cache(maxsize=len(_SIDES))
def _operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In float32, on the CPU whatever the default device, so that they are the same everywhere."""
    generator = torch.Generator(device="cpu").manual_seed(7)
    signs = torch.randint(0, 2, (k,), generator=generator, device="cpu") * 2.0 - 1

    def noise(rows: int) -> torch.Tensor:
        return signs * torch.exp2(-2 * torch.rand(rows, k, generator=generator, device="cpu"))

    blocks = _spread(k, _GOLDEN, 8.0, each=128)
    shares = _spread(k, math.sqrt(2), 2.0, each=128)
    rows_a = _spread(m, math.sqrt(2), 8.0, each=128) + _spread(m, _GOLDEN, 6.0)
    rows_b = _spread(n, math.sqrt(3), 8.0, each=128) + _spread(n, _GOLDEN, 6.0)
    a = noise(m) * torch.exp2(rows_a.unsqueeze(1) + blocks - 11)
    b = noise(n) * torch.exp2(rows_b.unsqueeze(1) - blocks + shares - 3)
    for operand in (a, b):
        operand[_ZERO_ROW : _ZERO_ROW + 1] = 0
    first = 128 * _ZERO_BLOCK
    a[first : first + 128, first : first + 128] = 0
    return a, b


def _spread(count: int, step: float, width: float, *, each: int = 1) -> torch.Tensor:
    """width * frac(step * (i // each)) for i < count: neighbours are far apart for irrational steps."""
    index = torch.arange(count, dtype=torch.float64, device="cpu") // each
    return ((index * step).frac() * width).float()


def compare(out: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> str | None:
    """None where |out - expected| <= bound everywhere, else how many are not, and the worst. [M, N] each."""
    gap = (out - expected).abs()
    wrong = ~(gap <= bound)  # a NaN is wrong
    count = int(wrong.sum())
    if not count:
        return None
    excess = torch.where(torch.isfinite(gap), gap / bound.clamp_min(1e-300), math.inf)
    worst = int(torch.where(wrong, excess, -1.0).argmax())
    row, column = divmod(worst, out.shape[1])
    got, right, allowed = (float(t[row, column]) for t in (out, expected, bound))
    text = (
        f"{count} of {out.numel()} outputs are outside the bound; the worst at [{row}, {column}]: "
        f"got {got:.6g}, expected {right:.6g} +- {allowed:.2g}"
    )
    likeness = _likeness(out, expected, wrong)
    return f"{text}; {likeness}" if likeness else text


def _likeness(out: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> str | None:
    """What a wrong result looks like: unwritten, off by a scale, or wrong in some rows or columns alone; else None."""
    if not torch.isfinite(out).all():
        return f"{int((~torch.isfinite(out)).sum())} are not finite"
    if not out[wrong].any():
        return "all of those are 0, as if never written"
    octaves = (out / expected).abs().log2()
    octaves = octaves.where(wrong & torch.isfinite(octaves), torch.nan)
    many = int(wrong.sum()) > wrong.numel() // 4  # any factor fits a few
    for what, spread in (
        ("all are off by one factor: a tensor scale", _deviation(octaves.reshape(1, -1), 1)),
        ("each row is off by a factor of its own: scales of A", _deviation(octaves, 1)),
        ("each column is off by a factor of its own: scales of B", _deviation(octaves, 0)),
    ):
        if many and spread < 0.005:  # octaves; rounding to bf16 leaves 0.002
            return what
    rows, columns = wrong.any(dim=1), wrong.any(dim=0)
    parts = [
        f"only in {what} {int(found.nonzero()[0])} to {int(found.nonzero()[-1])}"
        for what, found in (("rows", rows), ("columns", columns))
        if int(found.sum()) < 0.9 * found.numel()
    ]
    return " and ".join(parts) or None


def _deviation(octaves: torch.Tensor, dim: int) -> float:
    """How far numbers lie from the median of their row or column, in octaves: the median over rows or columns."""
    middle = octaves.nanmedian(dim=dim, keepdim=True).values
    return float((octaves - middle).abs().nanmean(dim=dim).nanmedian())
