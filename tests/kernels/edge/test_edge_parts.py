"""Generated kernels read parts of a matrix as the twin reads the matrix, on a GPU, and in Triton's interpreter."""

import pytest
import torch
import with_triton  # noqa: F401
from edge_programs import CASES, EXACT
from sweeps import sweep
from test_triton_edge import all_of, check

from loka.kernels.edge.program import Kind
from loka.kernels.edge.twin import run_program

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("name", sweep(CASES, list(CASES)[2::6]))
def test_leaves_in_parts(name, device):
    """Where they meet in a tile, where they end with one, and with rows that have gaps between them."""
    for rows, widths in ((33, (5, 570, 25)), (64, (1, 2, 13, 8)), (100, (512, 512, 16))):
        features = sum(widths)
        case = CASES[name](features)
        matrices = [p for p, kind in enumerate(case.program.leaves) if kind is Kind.FULL]
        whole, given = all_of(case, rows, device)
        leaves = list(whole)
        for p in reversed(matrices):
            parts = list(leaves[p].split(widths, dim=1))
            parts[0] = parts[0].contiguous()
            leaves[p : p + 1], case = parts, case.apart(p, widths)
        for out, twin in zip(
            run_program(case.program, leaves, rows, *given),
            run_program(CASES[name](features).program, whole, rows, *given),
            strict=True,
        ):
            assert torch.equal(out.view(torch.uint8), twin.view(torch.uint8))
        check(case, leaves, rows, given, exact=name in EXACT)
