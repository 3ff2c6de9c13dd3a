import pytest
import torch
from edge_programs import CASES, Writing, silu
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from loka.kernels.edge.op import edge, lying
from loka.kernels.edge.program import Kind
from loka.kernels.edge.twin import run_program

CPU = torch.device("cpu")


def equal(one, other):
    pairs = zip(one, other, strict=True)
    return all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in pairs
    )


@pytest.mark.parametrize("rows", [0, 1, 40])
@pytest.mark.parametrize("name", list(CASES))
def test_the_fake_promises_what_the_op_returns(name, rows):
    case = CASES[name](600)
    leaves, given, text = case.leaves(rows, CPU), case.given(rows, CPU), case.program.to_text()
    real = edge(leaves, rows, *given, text)
    with FakeTensorMode() as mode:
        fake = edge([mode.from_tensor(leaf) for leaf in leaves], rows, *(mode.from_tensor(g) for g in given), text)
    assert len(real) == len(fake) == len(case.program.outputs)
    for made, promised in zip(real, fake, strict=True):
        assert (made.shape, made.dtype) == (promised.shape, promised.dtype)
        assert made.is_contiguous()
        assert promised.is_contiguous()


def test_the_op_aliases_nothing_and_keeps_its_schema():
    case = silu(24)
    text = case.program.to_text()
    arguments = (case.leaves(33, CPU), 33, *case.given(33, CPU), text)
    torch.library.opcheck(edge, arguments, test_utils=("test_schema", "test_faketensor"))


def test_values_that_are_leaves_or_lie_transposed_leave_as_rows_of_their_own():
    w = Writing(16)
    x, scale = w.leaf(dtype=torch.float32), w.leaf(Kind.COLUMN, torch.float32)
    text = w.done(values=(scale, x, w.step("mul", x, scale)), value_dtypes=("float32",) * 3).program.to_text()
    arguments = ([torch.randn(16, 8).t(), torch.randn(8, 1)], 8, None, None, None, text)
    torch.library.opcheck(edge, arguments, test_utils=("test_schema", "test_faketensor"))
    assert all(value.is_contiguous() for value in edge(*arguments))


def test_one_graph_serves_any_number_of_rows():
    case = silu(24)
    text = case.program.to_text()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def run(dy, y, bias, gradient_scale, tops):
        out = edge([dy, y, bias], dy.shape[0], None, gradient_scale, tops, text)
        return [*out[1:], out[0].float()[: dy.shape[0]].to(torch.float8_e4m3fn)]

    for rows in (40, 70, 100):  # fewer have one top, and a size of 1 makes a graph of its own
        leaves = case.leaves(rows, CPU)
        _, gradient_scale, tops = case.given(rows, CPU)
        found = run(*leaves, gradient_scale, tops)
        first, *rest = run_program(case.program, leaves, rows, None, gradient_scale, tops)
        assert equal(found, [*rest, first])
    assert counter.frame_count == 1


def test_leaves_are_laid_out_for_the_kernel():
    case = silu(24)
    dy, y, bias = case.leaves(6, CPU)
    wide = torch.randn(6, 40)[:, 8:32]
    laid = lying(case.program, [dy.view(2, 3, 24), wide, bias.repeat_interleave(2)[::2]], 6)
    assert laid[0].shape == (6, 24)
    assert laid[0].data_ptr() == dy.data_ptr()
    assert laid[1].data_ptr() == wide.data_ptr()  # rows apart are no reason to copy
    assert laid[2].is_contiguous()
    transposed = lying(case.program, [dy, y.t().contiguous().t(), bias], 6)[1]
    assert transposed.stride() == (24, 1)
    assert torch.equal(transposed, y)
    assert case.program.leaves == (Kind.FULL, Kind.FULL, Kind.ROW)
    apart = lying(
        case.apart(1, (3, 21)).program, [dy.view(2, 72), *(x.view(2, 3, -1) for x in y.split([3, 21], 1)), bias], 6
    )
    assert [matrix.shape for matrix in apart[:3]] == [(6, 24), (6, 3), (6, 21)]
