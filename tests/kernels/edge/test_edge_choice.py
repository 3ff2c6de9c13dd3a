import pytest
import torch
import with_triton  # noqa: F401
from edge_programs import CASES

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
