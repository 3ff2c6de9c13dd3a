"""Every kernel, one line each, and the questions generic code asks of them.

A candidate is written "kernel:recipe", for example "torch:rowwise_e4m3". Where a kernel has several
algorithms for a problem, "kernel:recipe@3" pins one, counted from 0 in the library's own order.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from loka.core.exceptions import NoKernelFits, UnknownName
from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem
from loka.core.recipe import RECIPES, Gemm, Recipe
from loka.kernels.gemm.adapters.cublaslt import CUBLASLT, CUBLASLT_FAST
from loka.kernels.gemm.adapters.deep_gemm import DEEP_GEMM
from loka.kernels.gemm.adapters.emulated import EMULATED
from loka.kernels.gemm.adapters.fbgemm import FBGEMM, FBGEMM_FAST
from loka.kernels.gemm.adapters.loka_int8 import LOKA_INT8
from loka.kernels.gemm.adapters.torch_int8 import TORCH_INT8
from loka.kernels.gemm.adapters.torch_scaled import TORCH, TORCH_FAST
from loka.kernels.gemm.adapters.torchao_scaled import TORCHAO, TORCHAO_BLOCK, TORCHAO_FAST
from loka.kernels.gemm.kernel import Kernel
from loka.kernels.gemm.legality import overflows, too_narrow

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        EMULATED,
        TORCH,
        TORCH_FAST,
        TORCH_INT8,
        CUBLASLT,
        CUBLASLT_FAST,
        FBGEMM,
        FBGEMM_FAST,
        DEEP_GEMM,
        TORCHAO,
        TORCHAO_FAST,
        TORCHAO_BLOCK,
        LOKA_INT8,
    )
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A kernel with a recipe, and an algorithm of it where one was pinned."""

    kernel: Kernel
    recipe: Recipe
    algorithm: int | None = None

    @property
    def name(self) -> str:
        pinned = "" if self.algorithm is None else f"@{self.algorithm}"
        return f"{self.kernel.name}:{self.recipe.name}{pinned}"

    @property
    def on_request(self) -> str | None:
        """Why it is measured only when asked for by name, or None."""
        if any(cast.power_of_two for gemm in Gemm for cast in self.recipe.casts(gemm) or ()):
            return "the same time and SQNR as without power-of-two scales"
        if self.recipe.centred:
            return "what it takes off and puts back are operations of their own, which no kernel joins yet"
        if self.recipe.hot:
            return "its residuals are a launch more for each operand: it takes up to twice as long on an H200"
        return self.kernel.on_request

    @property
    def unfrozen(self) -> str | None:
        """What it does that a frozen site (loka/serve/sites.py) does not, or None."""
        if self.recipe.centred:
            return "takes a vector off its input"
        return "multiplies residuals of its operands" if self.recipe.hot else None

    @property
    def unpackaged(self) -> str | None:
        """Why it cannot go into an AOTInductor package (loka/serve/packaging/aot.py), or None."""
        if self.unfrozen:
            return f"cannot go into a package: it {self.unfrozen}, which frozen sites do not"
        if self.recipe.name in self.kernel.packaged:
            return None
        return "cannot go into a package: AOTInductor calls aten ops that have a C shim, and it is none"

    def padded(self, problem: Problem) -> Problem:
        """The problem that runs: with the columns of residuals, after LoKA's zero padding."""
        if problem.gemm is Gemm.OUTPUT and self.recipe.hot:
            problem = replace(problem, k=problem.k + 2 * self.recipe.hot)
        return problem.padded(self.kernel.multiples(problem, self.recipe))

    def unsupported(self, problem: Problem) -> str | None:
        """Why this candidate cannot run `problem` here even when padded, or None."""
        return self.illegal(problem) or self.kernel.missing()

    def illegal(self, problem: Problem) -> str | None:
        """Why it cannot run `problem` wherever its library is installed, or None."""
        if self.recipe.casts(problem.gemm) is None:
            return f"{self.recipe.name} does not define {problem.gemm}"
        if reason := overflows(problem, self.recipe) or too_narrow(problem, self.recipe):
            return reason
        return self.kernel.unsupported(self.padded(problem), self.recipe)

    def run(self, a: Quantized, b: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """out [M, N] in `dtype` from operands quantized and padded for this candidate."""
        return self.kernel.run(a, b, dtype, algorithm=self.algorithm or 0)


@functools.cache
def all_candidates() -> tuple[Candidate, ...]:
    return tuple(
        Candidate(kernel=kernel, recipe=RECIPES[recipe]) for kernel in KERNELS.values() for recipe in kernel.recipes
    )


@functools.cache
def candidate_named(name: str) -> Candidate:
    """Raises UnknownName, listing every candidate."""
    if (found := _found(name)) is not None:
        return found
    known = ", ".join(candidate.name for candidate in all_candidates())
    raise UnknownName(f"no candidate is called {name!r}", way_out=f"'hp', or one of {known}")


def is_candidate(name: str) -> bool:
    """Whether there is a candidate of this name; files of an earlier version may have others."""
    return _found(name) is not None


def _found(name: str) -> Candidate | None:
    head, _, algorithm = name.partition("@")
    for candidate in all_candidates():
        if candidate.name == head and (algorithm.isdecimal() or head == name):
            return replace(candidate, algorithm=int(algorithm)) if algorithm else candidate
    return None


@functools.lru_cache(maxsize=4096)  # asked on every call; a ragged batch makes many problems
def require_supported(name: str, problem: Problem) -> Candidate:
    """The candidate, if it can run `problem` here; else NoKernelFits with every candidate's reason."""
    return _require(name, problem, Candidate.unsupported)


def require_legal(name: str, problem: Problem) -> Candidate:
    """The candidate, if it can run `problem` wherever its library is installed; else NoKernelFits."""
    return _require(name, problem, Candidate.illegal)


def _require(name: str, problem: Problem, reason_of: Callable[[Candidate, Problem], str | None]) -> Candidate:
    candidate = candidate_named(name)
    if reason_of(candidate, problem) is None:
        return candidate
    width = max(len(other.name) for other in all_candidates())
    raise NoKernelFits(
        f"{name} cannot run {problem}",
        why=[f"{c.name.ljust(width)}  {reason_of(c, problem) or 'fits'}" for c in all_candidates()],
        way_out="name a candidate that fits, or 'hp' to keep the site in high precision",
    )
