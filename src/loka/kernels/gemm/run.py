"""Runs one candidate on high-precision operands: pad, quantize, multiply, count.

Models and measurements call kernels here only, so its counter proves what ran. (The self-check
calls them too, and does not count.)
"""

from collections import Counter
from dataclasses import dataclass

import torch

from loka.core.numerics.centring import restore, subtract
from loka.core.numerics.reference import Quantized
from loka.core.problem import DTYPES, Problem, dtype_name, target_of
from loka.core.recipe import Casts, Gemm
from loka.core.records.report import HP
from loka.kernels.gemm.kernel import Into
from loka.kernels.gemm.registry import Candidate, require_supported
from loka.kernels.quantize.quantizer import append_residuals, quantize_operand
from loka.kernels.quantize.side import BAD_A, BAD_B

_RUNS: Counter[tuple[str, str]] = Counter()


def kernel_runs() -> dict[tuple[str, str], int]:
    """How often each (candidate, gemm) was launched from Python in this process.

    A CUDA-graph capture counts once and its replays do not; of a compiled region the GEMMs that are torch's
    own op do not count (compiler/scaled_mm.py). `nn.health_of` counts all of these.
    """
    return dict(_RUNS)


def reset_kernel_runs() -> None:
    _RUNS.clear()


def fit(low: torch.Tensor, sides: tuple[int, int]) -> torch.Tensor:
    """Operands are padded to 16; a kernel that wants other sides, of a ragged batch say, gets a copy."""
    if low.shape == sides:
        return low
    raw = low.view(torch.uint8)[: sides[0], : sides[1]]
    grown = torch.nn.functional.pad(raw, (0, sides[1] - raw.shape[1], 0, sides[0] - raw.shape[0]))
    return grown.contiguous().view(low.dtype)


@dataclass(frozen=True, kw_only=True)
class ScaledGemm:
    """A candidate that was found fit for a problem: how to quantize for it, and how to run it.

    `padded_a` and `padded_b` are the sides that the quantized operands must have.
    """

    name: str
    candidate: Candidate
    problem: Problem
    casts: Casts
    padded_a: tuple[int, int]
    padded_b: tuple[int, int]

    def __call__(self, a: Quantized, b: Quantized) -> torch.Tensor:
        """out [M, N] from operands quantized by `casts` into the padded sides."""
        kind = a.data.device.type
        if torch.is_autocast_enabled(kind):
            # It would recast the float32 operands of kernels that are made of torch's own ops.
            with torch.autocast(kind, enabled=False):
                out = self.candidate.run(a, b, DTYPES[self.problem.dtype])
        else:
            out = self.candidate.run(a, b, DTYPES[self.problem.dtype])
        count_run(self)
        m, n = self.problem.m, self.problem.n
        if out.shape == (m, n) and out.is_contiguous():
            return out
        # No view, in which autograd would let nobody write: `contiguous` is one of whole rows.
        return out[:m, :n].clone(memory_format=torch.contiguous_format)


def count_run(run: ScaledGemm) -> None:
    _RUNS[run.name, run.problem.gemm.value] += 1


def into_of(run: ScaledGemm) -> Into | None:
    """What writes the whole result of a GEMM into memory that is given; None where only a new tensor holds it."""
    whole = (run.padded_a[0], run.padded_b[0]) == (run.problem.m, run.problem.n)
    return run.candidate.kernel.into(run.candidate.recipe) if whole else None


def scaled_gemm(name: str, problem: Problem) -> ScaledGemm:
    """The candidate as a function for exactly this problem.

    Raises NoKernelFits: the candidate cannot run it; nothing else is tried.
    """
    candidate = require_supported(name, problem)
    casts = candidate.recipe.casts(problem.gemm)
    assert casts is not None
    padded = candidate.padded(problem)
    return ScaledGemm(
        name=name,
        candidate=candidate,
        problem=problem,
        casts=casts,
        padded_a=(padded.m, padded.k),
        padded_b=(padded.n, padded.k),
    )


def run_gemm(
    candidate: str,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    gemm: Gemm,
    dtype: torch.dtype,
    health: torch.Tensor | None = None,
    centre: torch.Tensor | None = None,
    hot: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [M, N] = a [M, K] @ b [N, K]^T in `dtype`, through `candidate`.

    Args:
        candidate: "hp", which computes in the dtype of `a`, or "kernel:recipe".
        a, b: high-precision operands with any strides.
        health: int64 [3] that receives [runs, non-finite A, non-finite B].
        centre: float32 [K], taken off a and put back times b (core/numerics/centring.py); None is zero.
        hot: int64 [32], the columns of a hot recipe; None: none.

    Raises:
        NoKernelFits: the candidate cannot run this problem; nothing else is tried.
    """
    if centre is not None:
        out = run_gemm(candidate, subtract(a, centre), b, gemm=gemm, dtype=dtype, health=health, hot=hot)
        return restore(out, centre, b)
    # Autocast would recast the float32 operands of the emulated kernel.
    with torch.autocast(a.device.type, enabled=False):
        if candidate == HP:
            _RUNS[candidate, gemm.value] += 1
            return (a @ b.to(a.dtype).t()).to(dtype)
        (m, k), n = a.shape, b.shape[0]
        if 0 in (m, n, k):
            return torch.zeros(m, n, dtype=dtype, device=a.device)
        problem = Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype_name(dtype), target=target_of(a.device))
        run = scaled_gemm(candidate, problem)
        low_a = quantize_operand(a, run.casts[0], padded=run.padded_a, health=health, slot=BAD_A)
        low_b = quantize_operand(b, run.casts[1], padded=run.padded_b, health=health, slot=BAD_B)
        append_residuals(low_a, a, hot)
        append_residuals(low_b, b, hot, second=True)
        return run(low_a, low_b)
