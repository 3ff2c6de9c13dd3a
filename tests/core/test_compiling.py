import pytest
import torch
from torch import nn

from loka.core.compiling import compile_in_place, mend_compilers, new_frame, run_as_written
from loka.nn.block_norm import BlockNorm


def tower():
    return nn.Sequential(nn.Linear(32, 32), BlockNorm(32, 16), nn.Hardswish(), nn.Linear(32, 16))


@pytest.fixture
def graphs(monkeypatch):
    found = []

    def keep(graph, inputs):
        found.append(graph)
        return graph

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **how: compile(call, backend=keep, **how))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def test_a_sequential_is_one_graph(graphs):
    model, x = tower(), torch.randn(4, 32)
    plain = model(x)
    same = compile_in_place(model)
    assert same is model
    assert torch.equal(model(x), plain)
    assert len(graphs) == 1
    assert str(graphs[0].code).count("linear(") == 2, "both linear layers are in it"
    run_as_written(model)
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == list(tower().state_dict())


def test_however_many_came_before(graphs):
    """Dynamo compiles eight different modules in one frame, and runs the others as written."""
    for width in range(12):
        compile_in_place(nn.Linear(8, 8 + width))(torch.randn(2, 8))
        assert len(graphs) == width + 1


def test_alike_modules_share_a_frame_that_they_are_given(graphs):
    frame, x = new_frame(), torch.randn(4, 32)
    for _ in range(3):
        model = tower()
        plain = model(x)
        assert torch.equal(compile_in_place(model, frame)(x), plain), "with its own weights"
    assert len(graphs) == 1


def test_an_op_s_arguments_are_described_only_for_who_reads_that():
    """torch 2.11 asks for the text of each op without a lowering, and the text grows eightfold with each block."""
    from torch._inductor.exc import LoweringException, OperatorIssue
    from torch._logging import LazyString

    mend_compilers(), mend_compilers()
    asked = []

    class Value:
        def __str__(self):
            asked.append(None)
            return "a value"

    text = OperatorIssue.operator_str("an op", [Value()], {"wide": True})
    assert not asked
    assert str(text) == "  target: an op\n  args[0]: a value\n  kwargs: {'wide': True}"
    assert "args[0]: a value" in str(LoweringException(ValueError("no"), "an op", [Value()], {}))
    assert len(asked) == 2
    lazily = LazyString(OperatorIssue.operator_str, "an op", [Value()], {"wide": True})
    assert str(lazily) == str(text), "as torch 2.13 asks"
