"""How operands are quantized: format, granularity, and the recipes that combine them.

A GEMM is always written out = A @ B^T with both operands K-major, because that is the only
eight-bit layout of Hopper's tensor cores. A recipe names one `Cast` for A and one for B, per GEMM:

    output       A = input [T, in]            B = weight [out, in]
    grad_input   A = grad_output [T, out]     B = weight^T [in, out]
    grad_weight  A = grad_output^T [out, T]   B = input^T [in, T]

Every scale dequantizes: hp = low * scale, with `low` FP8 or INT8.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

import torch

from loka.core.exceptions import UnknownName


class Gemm(StrEnum):
    """The three GEMMs of a linear layer, by the names torchao uses."""

    OUTPUT = "output"
    GRAD_INPUT = "grad_input"
    GRAD_WEIGHT = "grad_weight"


# Each tensor feeds two GEMMs: one takes it as it lies, the other its transpose; as which operand.
SHARED_OPERANDS: dict[str, tuple[tuple[Gemm, int], tuple[Gemm, int]]] = {
    "input": ((Gemm.OUTPUT, 0), (Gemm.GRAD_WEIGHT, 1)),
    "weight": ((Gemm.OUTPUT, 1), (Gemm.GRAD_INPUT, 1)),
    "grad_output": ((Gemm.GRAD_INPUT, 0), (Gemm.GRAD_WEIGHT, 0)),
}


class Format(Enum):
    """Eight-bit formats: OCP FP8, and symmetric INT8.

    `max` is the largest finite value; `mantissa` counts stored bits. Below 2^min_exponent numbers are a
    constant step apart, `smallest_subnormal`: that is all of INT8, -127 to 127 (-128 is not used).
    """

    E4M3 = (torch.float8_e4m3fn, 448.0, 3, -6)
    E5M2 = (torch.float8_e5m2, 57344.0, 2, -14)
    INT8 = (torch.int8, 127.0, 7, 7)

    def __init__(self, dtype: torch.dtype, largest: float, mantissa: int, min_exponent: int) -> None:
        self.dtype = dtype
        self.max = largest
        self.mantissa = mantissa
        self.min_exponent = min_exponent

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.min_exponent - self.mantissa)

    @property
    def uniform(self) -> bool:
        """Whether all its numbers are one step apart, as integers are."""
        return not self.dtype.is_floating_point

    @property
    def max_terms(self) -> int | None:
        """How many products fit an int32 sum in any case: 127 * 127 * 131072 < 2^31. None for
        floating-point formats.
        """
        return 131_072 if self.uniform else None

    @property
    def largest_power(self) -> float:
        """The largest power of two p that leaves all values finite as a scale: max * p < 2^128."""
        return 2.0 ** (127 - math.floor(math.log2(self.max)))


class Granularity(Enum):
    """How many rows and columns of an operand share one scale; None is the whole side."""

    TENSOR = (None, None)
    ROW = (1, None)
    GROUP_1X128 = (1, 128)
    BLOCK_128X128 = (128, 128)

    def group(self, rows: int, columns: int) -> tuple[int, int]:
        """The group's sides for an operand of `rows` x `columns`."""
        group_rows, group_columns = self.value
        return group_rows or torch.sym_max(rows, 1), group_columns or torch.sym_max(columns, 1)


@dataclass(frozen=True)
class Cast:
    """How one operand becomes FP8 or INT8. With `power_of_two` scales, requantizing is exact.

    `centred`: of the input of `output`, from which a vector was taken before (core/numerics/centring.py).
    `hot`: how many columns' residuals stand behind an operand of `output` (core/numerics/hot_columns.py).
    """

    format: Format
    granularity: Granularity
    power_of_two: bool = False
    centred: bool = False
    hot: int = 0

    @property
    def name(self) -> str:
        """A name such as "e4m3_row" or "e5m2_tensor", by which measurements of quantization are stored."""
        suffix = ("_pow2" if self.power_of_two else "") + ("_centred" if self.centred else "")
        suffix += f"_hot{self.hot}" if self.hot else ""
        return f"{self.format.name}_{self.granularity.name}{suffix}".lower()


Casts = tuple[Cast, Cast]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The casts of A and B for each GEMM; None where the recipe does not apply."""

    name: str
    output: Casts | None
    grad_input: Casts | None
    grad_weight: Casts | None

    @property
    def centred(self) -> bool:
        """Whether the input of `output` is centred, so that a site needs a vector to subtract."""
        return self.output is not None and self.output[0].centred

    @property
    def hot(self) -> int:
        """For how many columns `output` takes the rounding residuals too; a site needs to know which ones."""
        return self.output[0].hot if self.output is not None else 0

    def casts(self, gemm: Gemm) -> Casts | None:
        by_gemm = {Gemm.OUTPUT: self.output, Gemm.GRAD_INPUT: self.grad_input, Gemm.GRAD_WEIGHT: self.grad_weight}
        return by_gemm[gemm]


def _everywhere(name: str, granularity: Granularity, *, power_of_two: bool = False) -> Recipe:
    cast = Cast(Format.E4M3, granularity, power_of_two)
    return Recipe(name=name, output=(cast, cast), grad_input=(cast, cast), grad_weight=(cast, cast))


def _centred(name: str, cast: Cast) -> Recipe:
    """A recipe for `output` alone, whose gradients do not depend on it."""
    return Recipe(name=name, output=(replace(cast, centred=True), cast), grad_input=None, grad_weight=None)


def _hot(name: str, cast: Cast) -> Recipe:
    """A recipe for `output` alone."""
    low = replace(cast, hot=32)
    return Recipe(name=name, output=(low, replace(low, centred=False)), grad_input=None, grad_weight=None)


_TENSOR = Cast(Format.E4M3, Granularity.TENSOR)
_GRADIENT = Cast(Format.E5M2, Granularity.TENSOR)
_GROUP = Cast(Format.E4M3, Granularity.GROUP_1X128)
_BLOCK = Cast(Format.E4M3, Granularity.BLOCK_128X128)
_ROW = Cast(Format.E4M3, Granularity.ROW)
_INTEGER = Cast(Format.INT8, Granularity.ROW)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        _everywhere("tensorwise_e4m3", Granularity.TENSOR),
        # torchao "tensorwise" and TransformerEngine HYBRID: e5m2 for grad_output, which is
        # always operand A. Its `output` GEMM is that of tensorwise_e4m3.
        Recipe(name="tensorwise_e5m2", output=None, grad_input=(_GRADIENT, _TENSOR), grad_weight=(_GRADIENT, _TENSOR)),
        _everywhere("rowwise_e4m3", Granularity.ROW),
        _everywhere("rowwise_e4m3_pow2", Granularity.ROW, power_of_two=True),
        # DeepSeek-V3: 1x128 groups against 128x128 weight blocks; both 1x128 in grad_weight.
        Recipe(
            name="blockwise_e4m3", output=(_GROUP, _BLOCK), grad_input=(_GROUP, _BLOCK), grad_weight=(_GROUP, _GROUP)
        ),
        # Square blocks on both sides: a tensor and its transpose share data and scales.
        _everywhere("block128_e4m3", Granularity.BLOCK_128X128),
        # Symmetric INT8 for `output` alone: gradients have the heavy tails that a uniform step is poor at,
        # so backward stays in FP8, by a recipe of its own at each of its GEMMs.
        Recipe(name="int8_row", output=(_INTEGER, _INTEGER), grad_input=None, grad_weight=None),
        _centred("int8_row_centred", _INTEGER),
        _centred("rowwise_e4m3_centred", _ROW),
        _hot("rowwise_e4m3_hot32", _ROW),
        _hot("rowwise_e4m3_centred_hot32", replace(_ROW, centred=True)),
    )
}


def recipe_in(candidate: str) -> str:
    """The recipe's name in "kernel:recipe" or "kernel:recipe@algorithm"; "hp" as it is."""
    return candidate.partition("@")[0].rpartition(":")[2]


def recipe_named(name: str) -> Recipe:
    """The recipe of that name. Raises UnknownName, which lists the known recipes."""
    if name not in RECIPES:
        raise UnknownName(f"no recipe is called {name!r}", way_out=f"one of {', '.join(RECIPES)}")
    return RECIPES[name]
