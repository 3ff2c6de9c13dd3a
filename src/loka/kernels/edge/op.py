"""The op that runs a program: one or two launches on CUDA, its twin elsewhere.

    loka::edge(leaves, rows, input_scale, gradient_scale, tops, program) -> Program.outputs

The program is text, so that a compiled graph and its caches hold all that the op computes. Its outputs' sizes
follow from `rows` and the text alone: `rows` may be a symbol, and a fake asks no tensor for a size.
"""

import torch

from loka.kernels.custom_op import registered
from loka.kernels.edge.outputs import unwritten
from loka.kernels.edge.program import Program, program_of
from loka.kernels.edge.twin import run_program


def _edge(
    leaves: list[torch.Tensor],
    rows: int,
    input_scale: torch.Tensor | None,
    gradient_scale: torch.Tensor | None,
    tops: torch.Tensor | None,
    program: str,
) -> list[torch.Tensor]:
    """`Program.outputs` of the program, in order; arguments as for twin.run_program."""
    parsed = program_of(program)
    if not leaves[0].is_cuda:
        return run_program(parsed, leaves, rows, input_scale, gradient_scale, tops)
    from loka.kernels.edge.triton.program_kernels import run_program_fused  # triton need not be installed elsewhere

    return run_program_fused(parsed, lying(parsed, leaves, rows), rows, input_scale, gradient_scale, tops)


def _edge_fake(leaves: list[torch.Tensor], rows: int, program: str) -> list[torch.Tensor]:
    return unwritten(program_of(program), rows, leaves[0].device)


def lying(program: Program, leaves: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    """The leaves in the layout that the kernels read: the rows of a matrix are contiguous, everything
    else has no gaps.
    """
    found = []
    for index, leaf in enumerate(leaves):
        columns = program.columns.get(index)
        if columns is None:
            found.append(leaf.contiguous())
            continue
        matrix = leaf if leaf.dim() == 2 and leaf.shape[1] == columns else leaf.reshape(rows, columns)
        found.append(matrix if matrix.stride(1) == 1 or columns == 1 else matrix.contiguous())
    return found


edge = registered("loka::edge", _edge, _edge_fake)
