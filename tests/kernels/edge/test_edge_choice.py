import pytest
import torch
import with_triton  # noqa: F401
from edge_programs import CASES, Writing

from loka.kernels.edge.program import Kind
from loka.kernels.edge.triton import program_kernels as fused


@pytest.mark.parametrize(
    ("name", "rows", "features", "spills", "kernels"),
    [
        ("rounded_norm", 4096, 1024, False, ["edge_rows"]),
        ("rounded_norm", 4096, 1024, True, ["edge_rows", "edge_tall"]),
        ("rounded_norm", 4095, 1024, False, ["edge_rows", "edge_tall"]),
        ("gelu", 4096, 2064, False, ["edge_rows", "edge_tall"]),
        ("relu", 4096, 1024, False, ["edge_rows", "edge_tall"]),  # a sum over rows
    ],
)
def test_one_kernel_does_for_many_rows_that_registers_hold(monkeypatch, name, rows, features, spills, kernels):
    ran = []
    monkeypatch.setattr(fused.Launch, "run", lambda launch, *_: ran.append(launch.kernel.fn.__name__))
    monkeypatch.setattr(fused.Launch, "resident", lambda launch, arguments: (132, 0))
    monkeypatch.setattr(fused.Launch, "spilled", lambda launch, *_: 100 * spills)
    case, device = CASES[name](features), torch.device("cpu")
    fused.run_program_fused(case.program, case.leaves(rows, device), rows, *case.given(rows, device))
    assert ran == kernels


@pytest.mark.parametrize(("rows", "more"), [(64, []), (63, ["rows"])])
def test_a_kernel_takes_what_it_reads(rows, more):
    """Each argument costs the host time at a launch, and in a package is an operand that Inductor may write anew."""
    w = Writing(1024)
    x, mean, bias = w.leaf(), w.leaf(Kind.COLUMN, torch.float32), w.leaf(Kind.ROW)
    value = w.step("add", w.step("sub", x, mean), bias)
    program = w.done(values=(value,), value_dtypes=("bfloat16",)).program
    plan = fused.plan_of(program, ("bfloat16", "float32", "bfloat16"), rows, None, 0)
    assert plan.rows.kernel.arg_names == ["leaf0_ptr", "leaf1_ptr", "leaf2_ptr", "value0_ptr", *more, "stride0"]
