"""The operands of a layer's GEMMs, drawn from its learnt statistics."""

from collections.abc import Mapping

import torch

from loka.core.problem import DTYPES
from loka.core.recipe import Gemm
from loka.core.records.report import HP
from loka.core.records.stats import LinearStats
from loka.kernels.gemm.registry import candidate_named
from loka.statistics.draw import Sampler, samplers
from loka.statistics.effect_depths import hot_of

Operands = dict[str, torch.Tensor]
"""input [T, in], weight [out, in], grad_output [T, out], in the dtypes the model uses."""

_TIMED_ROWS = 16_384  # rows drawn for timing; longer operands repeat them
_ROTATION_BYTES = 1 << 30  # copies of the operands to rotate, so that none stays in the L2
_ROTATION = 8  # as many calls as a graph holds at most


def draw_operands(
    layer: LinearStats, by_name: Mapping[str, Sampler], rows: int, generator: torch.Generator
) -> Operands:
    """One draw of `rows` rows, in the dtypes that the model uses."""
    dtypes = {"input": layer.dtype, "weight": layer.weight_dtype, "grad_output": layer.dtype}
    return {name: draw(rows, generator).to(DTYPES[dtypes[name]]) for name, draw in by_name.items()}


def hot_of_input(layer: LinearStats, candidate: str, device: torch.device | str = "cpu") -> torch.Tensor | None:
    """The columns [32] int64 whose residuals it takes too; None: it takes none, or no effect tells which."""
    output = None if candidate == HP else candidate_named(candidate).recipe.output
    found = hot_of(layer, output[0]) if output is not None and output[0].hot else None
    return None if found is None else found[0].to(device)


def any_columns(candidate: str, device: torch.device) -> torch.Tensor | None:
    """As many columns [hot] int64 as the candidate's recipe takes, for timing: times do not depend on which they are.

    None where it takes none.
    """
    count = 0 if candidate == HP else candidate_named(candidate).recipe.hot
    return torch.arange(0, 2 * count, 2, device=device) if count else None


def sides(gemm: Gemm, operands: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a GEMM written A @ B^T (core/recipe.py)."""
    if gemm is Gemm.OUTPUT:
        return operands["input"], operands["weight"]
    if gemm is Gemm.GRAD_INPUT:
        return operands["grad_output"], operands["weight"].t()
    return operands["grad_output"].t(), operands["input"].t()


def with_weight_cast(operands: Operands) -> Operands:
    """With the weight in the dtype of the input, as bf16 gets it: autocast's cache casts it once in a step."""
    return {**operands, "weight": operands["weight"].to(operands["input"].dtype)}


def rotated_operands(layer: LinearStats, *, device: torch.device, seed: int) -> list[Operands]:
    """Operands of the true size in up to 8 copies, fewer where those would fill a gigabyte."""
    generator = torch.Generator(device).manual_seed(seed)
    plain = samplers(layer.operands, device, keep_tails=False)  # times do not depend on tails
    operands = draw_operands(layer, plain, min(layer.rows, _TIMED_ROWS), generator)
    for name in ("input", "grad_output"):
        if name in operands:
            repeats = -(-layer.rows // operands[name].shape[0])
            operands[name] = operands[name].repeat(repeats, 1)[: layer.rows]
    size = sum(operand.nbytes for operand in operands.values())
    copies = max(1, min(_ROTATION, _ROTATION_BYTES // max(size, 1)))
    others = [{name: operand.clone() for name, operand in operands.items()} for _ in range(copies - 1)]
    return [operands, *others]
