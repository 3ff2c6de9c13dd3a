"""What a kernel must say about itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from loka.core.numerics.reference import Quantized
from loka.core.problem import Problem
from loka.core.recipe import Recipe

Multiples = tuple[int, int, int]


class Run(Protocol):
    """out [M, N] = A [M, K] @ B [N, K]^T in `dtype`; `algorithm` picks one where a kernel has several."""

    def __call__(self, a: Quantized, b: Quantized, dtype: torch.dtype, *, algorithm: int = 0) -> torch.Tensor: ...


class Into(Protocol):
    """As `Run`, into `out` [M, N]. Its launches depend on addresses, sides and types alone, so a graph of them is right
    for all that lies at the addresses."""

    def __call__(self, a: Quantized, b: Quantized, out: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class PaddedTo:
    """`multiples` of a kernel that pads every problem alike; no closure, so that a kernel can be pickled."""

    m: int
    n: int
    k: int

    def __call__(self, problem: Problem, recipe: Recipe) -> Multiples:
        return self.m, self.n, self.k


def nothing_missing() -> str | None:
    return None


def rounds_once(problem: Problem, recipe: Recipe) -> float:
    return 0.0


def one_algorithm(problem: Problem, recipe: Recipe) -> int:
    return 1


def only_new_results(recipe: Recipe) -> Into | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A way to compute out [M, N] = A [M, K] @ B [N, K]^T from quantized operands.

    Attributes:
        library: whose kernel it is: "torch", "torchao", "fbgemm", "deep_gemm", "cublaslt", "emulated".
        unsupported: why this problem, with its exact sides, cannot run on its target under this
            recipe, which defines its GEMM, or None. Answers on any machine for any target; nothing is
            executed or imported.
        multiples: what to pad M, N and K to beforehand (zeros are exact). Where padding cures
            `unsupported`, LoKA pads.
        run: computes; only called for what `unsupported` accepts.
        missing: why the library cannot be used on this machine at all, or None.
        algorithms: how many algorithms `run` can choose from for a problem it supports; asked on
            the GPU only. Measuring searches them and the candidate's name pins the winner.
        precompile: compiles ahead, in parallel processes, what running these problems would compile
            one after the other; (problems, on_done), where on_done is called after each.
        fast: accumulates all of K in the tensor core's register of about 14 bits
            (core/numerics/reference.accumulation_bound).
        rounding: relative error of its results beyond their one rounding to the problem's dtype:
            2^-8 where they pass through bfloat16 on the way.
        packaged: recipes by which `run` is aten ops that AOTInductor can call without loka.
        into: what writes a result into memory that is given, by this recipe; None where nothing does.
        emulates: True for a stand-in that shows the numerics and has no speed.
        on_request: why it is measured only when asked for by name.
    """

    name: str
    library: str
    recipes: tuple[str, ...]
    unsupported: Callable[[Problem, Recipe], str | None]
    multiples: Callable[[Problem, Recipe], Multiples]
    run: Run
    missing: Callable[[], str | None] = nothing_missing
    algorithms: Callable[[Problem, Recipe], int] = one_algorithm
    precompile: Callable[[Sequence[Problem], Callable[[], None]], None] | None = None
    fast: bool = False
    rounding: Callable[[Problem, Recipe], float] = rounds_once
    packaged: tuple[str, ...] = ()
    into: Callable[[Recipe], Into | None] = only_new_results
    emulates: bool = False
    on_request: str | None = None
