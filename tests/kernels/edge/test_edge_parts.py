"""Generated kernels read parts of a matrix as the twin reads the matrix, on a GPU, and in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
import with_triton  # noqa: F401
from edge_programs import CASES, EXACT
from sweeps import sweep
from test_triton_edge import all_of, check

from loka.kernels.edge.program import Kind
from loka.kernels.edge.triton.tall import fits
from loka.kernels.edge.triton.values import Code
from loka.kernels.edge.twin import run_program

CPU = torch.device("cpu")
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


def test_a_transposed_value_of_parts_is_computed_by_rows():
    """The other kernel reads none; parts that it need not read are no matter."""
    whole = CASES["silu"](64)
    assert fits(Code(whole.program, ("bfloat16",) * 3), 64)
    for leaf, fitting in ((0, True), (1, False)):
        case = whole.apart(leaf, (16, 48))
        assert fits(Code(case.program, ("bfloat16",) * 4), 64) == fitting


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches what the interpreter reads")
def test_what_lies_beside_a_part_is_not_read(monkeypatch):
    """It is in nobody's result, but may be no memory of the process."""
    from triton.runtime.interpreter import InterpreterBuilder

    read, load = set(), InterpreterBuilder.create_masked_load

    def watched(builder, pointers, mask, *others):
        read.update(pointers.data[mask.data].ravel().tolist())
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)
    for name, rows, widths in (("silu", 33, (5, 570, 25)), ("block_norm", 33, (64, 448, 88)), ("silu", 5, (512, 88))):
        case = CASES[name](sum(widths))
        whole, given = all_of(case, rows, CPU)
        first = next(p for p, kind in enumerate(case.program.leaves) if kind is Kind.FULL)
        around = [torch.zeros(rows + 2, width + 64, dtype=whole[first].dtype) for width in widths]
        parts = [matrix[1:-1, 32:-32] for matrix in around]
        for part, values in zip(parts, whole[first].split(widths, dim=1), strict=True):
            part.copy_(values)
        read.clear()
        apart = case.apart(first, widths)
        check(apart, [*whole[:first], *parts, *whole[first + 1 :]], rows, given, exact=False)
        for matrix, part in zip(around, parts, strict=True):
            size, start = matrix.element_size(), matrix.data_ptr()
            seen = torch.zeros(matrix.numel(), dtype=torch.bool)
            seen[[(at - start) // size for at in read if start <= at < start + matrix.nbytes]] = True
            expected = torch.zeros_like(matrix, dtype=torch.bool)
            expected[1:-1, 32:-32] = True
            assert torch.equal(seen.view(matrix.shape), expected), (name, part.shape)


def test_parts_of_several_dtypes(device):
    case = CASES["identity"](48).apart(0, [16, 8, 24])
    case = replace(case, dtypes=(torch.bfloat16, torch.float32, torch.float16))
    for rows in (7, 64):
        leaves, given = all_of(case, rows, device)
        check(case, leaves, rows, given, exact=True)
