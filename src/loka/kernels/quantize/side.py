"""What one quantized copy of a tensor is to be: its cast, its padding, where its scales lie.

`health` int64 [3, 3] of a site counts for each GEMM [runs, non-finite A seen, non-finite B seen].
"""

from dataclasses import dataclass

import torch

from loka.core.numerics.reference import Quantized
from loka.core.problem import round_up
from loka.core.recipe import Cast, Gemm, Granularity

RUNS, BAD_A, BAD_B = 0, 1, 2
_GEMMS = tuple(Gemm)


def new_health(device: torch.device | str) -> torch.Tensor:
    return torch.zeros(len(_GEMMS), 3, dtype=torch.int64, device=device)


def health_index(gemm: Gemm, flag: int) -> int:
    """The index of BAD_A or BAD_B of a GEMM, in `health` row by row."""
    return 3 * _GEMMS.index(gemm) + flag


def run_index(flag: int) -> int:
    """The index at which the run is counted that sets `flag`, the index of a flag: A's has one, B's has none, -1."""
    return flag - BAD_A + RUNS if flag % 3 == BAD_A else -1


@dataclass(frozen=True, kw_only=True)
class Side:
    """One copy of a tensor: how it is cast and the sides it is padded to with zeros.

    `flag` is the index in `health` that is set when a group holds NaN or infinity, `count` the
    index that counts this quantization as a run; -1 for neither.
    """

    cast: Cast
    padded: tuple[int, int]
    flag: int = -1
    count: int = -1

    def __hash__(self) -> int:
        """Worked out once: eager steps look sides up at every call, and hashing enums is slow."""
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash((self.cast, self.padded, self.flag, self.count))
            object.__setattr__(self, "_hash", known)
        return known


Operand = tuple[torch.Tensor, Side | None, Side | None]
"""hp [R, C], the copy that is wanted of it, and that of its transpose."""
Copies = tuple[Quantized | None, Quantized | None]


def empty_scale(cast: Cast, sides: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Unwritten scales [groups of rows, groups of columns] of a quantized tensor, as they lie in memory.

    On CUDA 1x128 scales are column-major with rows padded to 4 floats, 128x128 scales row-major
    with columns padded to 4: what cuBLASLt, CUTLASS and DeepGEMM read without a copy.
    """
    group_rows, group_columns = cast.granularity.group(*sides)
    high, wide = -(-sides[0] // group_rows), -(-sides[1] // group_columns)
    if device.type == "cuda" and cast.granularity is Granularity.GROUP_1X128:
        return torch.empty(wide, round_up(high, 4), dtype=torch.float32, device=device).t()[:high]
    if device.type == "cuda" and cast.granularity is Granularity.BLOCK_128X128:
        return torch.empty(high, round_up(wide, 4), dtype=torch.float32, device=device)[:, :wide]
    return torch.empty(high, wide, dtype=torch.float32, device=device)
