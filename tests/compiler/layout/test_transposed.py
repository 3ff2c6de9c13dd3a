"""What a region reads transposed: one copy in the graph, which Inductor can fuse, and none inside of an op."""

import pytest
import torch
from converted import assert_as_good, converted, plan_for, run
from joint import JointBackend
from torch import nn

from loka.kernels.edge import op
from loka.kernels.edge.op import edge, lying
from loka.kernels.edge.program import Kind, program_of


class Attended(nn.Module):
    """nn.MultiheadAttention reads and gives [B, L, d] and multiplies [L, B, d]; x is read by both layers behind it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.gate, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.attention(x, x, x, need_weights=False)[0].transpose(1, 2)
        return self.gate(y.transpose(1, 2)).sigmoid() * self.down(torch.relu(y.transpose(1, 2)))


def test_leaves_lie_in_rows():
    x = torch.randn(6, 8, 32)
    model = Attended()
    plan = plan_for(model, x)
    by_site, backend = converted(model, plan), JointBackend()
    joined = converted(model, plan)
    found = run(torch.compile(joined, backend=backend), x)
    assert backend.count(edge) > 4
    copies = []
    for graph in backend.graphs:
        for node in graph.nodes:
            if node.target is edge:
                leaves, program = node.args[0], program_of(node.args[-1])
                for leaf, kind in zip(leaves, program.leaves, strict=True):
                    if kind is Kind.FULL:
                        assert leaf.meta["val"].view(-1, program.features).stride(1) == 1, leaf
                        copies += [leaf] if leaf.target is torch.ops.aten.clone.default else []
    assert copies
    assert_as_good(joined, by_site, model, found, run(by_site, x), run(model, x))


@pytest.mark.slow
def test_inductor_lays_what_an_op_reads(monkeypatch, tmp_path):
    """It takes a clone for values alone, and laid the copy as it liked: the op made another one."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.randn(6, 8, 32)
    model = Attended()
    joined = converted(model, plan_for(model, x))
    read = []

    def run_program(program, leaves, rows, *scales):
        laid = lying(program, leaves, rows)
        read.extend(one.data_ptr() == other.data_ptr() for one, other in zip(leaves, laid, strict=True))
        return on_cpu(program, leaves, rows, *scales)

    on_cpu = op.run_program
    monkeypatch.setattr(op, "run_program", run_program)
    run(torch.compile(joined), x)
    assert read
    assert all(read)
