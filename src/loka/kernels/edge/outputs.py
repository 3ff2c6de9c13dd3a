"""Allocates the memory for what a program writes, as the op, its fake and its kernels agree on."""

import torch

from loka.core.problem import round_up
from loka.kernels.edge.program import GROUP, Program
from loka.kernels.edge.twin import value_shape


def unwritten(program: Program, rows: int, device: torch.device) -> list[torch.Tensor]:
    """Uninitialised memory for `Program.outputs`, in order; `rows` may be symbolic."""
    columns, high = round_up(program.features, 16), round_up(rows, 16)
    shapes: dict[str, tuple[int, ...]] = {
        "row": (rows, columns),
        "column": (columns, high),
        "r": (rows, 1),
        "integer": (rows, columns),
        "step": (rows, 1),
        "tops": (-(-rows // GROUP),),
        "transposed": (columns, high),
        "top": (1,),
    }
    dtypes = dict.fromkeys(("row", "column", "transposed"), torch.float8_e4m3fn)
    dtypes["integer"] = torch.int8
    for number, (index, dtype) in enumerate(zip(program.values, program.value_dtypes, strict=True)):
        shapes[f"value{number}"] = value_shape(program, program.kinds[index], rows)
        dtypes[f"value{number}"] = getattr(torch, dtype)
    return [
        torch.empty(*shapes.get(name, (program.features,)), dtype=dtypes.get(name, torch.float32), device=device)
        for name in program.outputs
    ]
