"""The key that kernels, measurements and plans are looked up by: one GEMM on one target."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from loka.core.exceptions import UnknownName
from loka.core.recipe import Gemm
from loka.core.storage.codec import record

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""What sites, their weights and the code between them compute in."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(problem: Problem) -> None:
    sides = (problem.m, problem.n, problem.k)
    if problem.dtype not in DTYPES or not all(side > 0 for side in sides):
        raise ValueError(f"{problem} is no problem")


@record(check=_check)
@dataclass(frozen=True, kw_only=True)
class Problem:
    """out [m, n] = A [m, k] @ B [n, k]^T, with `dtype` for out and `target` to run on.

    `target` is "cpu" or an architecture such as "sm_90", so that legality on a GPU can be
    asked on a machine without one.
    """

    gemm: Gemm
    m: int
    n: int
    k: int
    dtype: str
    target: str

    def __str__(self) -> str:
        return f"{self.gemm} M={self.m} N={self.n} K={self.k} {self.dtype} {self.target}"

    @property
    def flops(self) -> float:
        """Floating-point operations of the product: two for each of its multiplications."""
        return 2.0 * self.m * self.n * self.k

    def padded(self, multiples: tuple[int, int, int]) -> Problem:
        """The problem with m, n, k rounded up to multiples; what runs after zero padding."""
        m, n, k = (round_up(side, to) for side, to in zip((self.m, self.n, self.k), multiples, strict=True))
        return replace(self, m=m, n=n, k=k)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def linear_problem(gemm: Gemm, *, rows: int, in_features: int, out_features: int, dtype: str, target: str) -> Problem:
    """The problem of one GEMM of a linear layer for `rows` input rows (see core/recipe.py)."""
    sides = {
        Gemm.OUTPUT: (rows, out_features, in_features),
        Gemm.GRAD_INPUT: (rows, in_features, out_features),
        Gemm.GRAD_WEIGHT: (out_features, in_features, rows),
    }
    m, n, k = sides[gemm]
    return Problem(gemm=gemm, m=m, n=n, k=k, dtype=dtype, target=target)


def target_of(device: torch.device) -> str:
    """The target of a device: "cpu", or for instance "sm_90" for an H100 or H200."""
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    return device.type


def capability(target: str) -> tuple[int, int] | None:
    """The compute capability of a target, such as (9, 0) for "sm_90"; None for targets that are not NVIDIA GPUs.

    Raises UnknownName for a text that is neither.
    """
    if target.startswith("sm_") and target[3:].isdigit() and len(target) >= 5:
        return int(target[3:-1]), int(target[-1])
    if target in ("cpu", "mps", "xpu", "meta"):
        return None
    raise UnknownName(f"no target is called {target!r}", way_out="'cpu', or a GPU such as 'sm_90'")
