"""torch.compile of converted models, whole, nested and by block: the eager results, and no site lost.

Where Dynamo traces past a mode, or recomputes a checkpoint without it, results drift towards high precision
and the count of sites shows which one is missing.
"""

import itertools

import pytest
import torch
from forced import OTHERS_WARN, plan_of, planned, ran
from foreign.registry import FOREIGN
from foreign.spec import call, train_step
from oracle import CLOSE, assert_close, assert_same_gradients, gradients
from sweeps import sweep
from torch import nn

import loka

pytestmark = OTHERS_WARN
ROWS = 32
# One of each way of writing a GEMM and of each kind of checkpoint; the others write theirs alike.
WHOLE = (
    "dataclass_tower", "chunks", "splits", "functions", "autoencoder_tied", "next_item_tied", "used_twice",
    "experts_bmm", "experts_einsum", "experts_baddbmm", "encoder_batch_first", "encoder_padded",
    "cross_attention", "shared_attention", "lora_parameters", "weight_norm", "deepctr_autoint",
    "deepctr_xdeepfm", "checkpoint_modules", "checkpoint_modules_reentrant", "checkpoint_function",
    "checkpoint_function_reentrant", "torchrec_dlrm_dcn", "hf_gpt2_classifier", "hf_llama_checkpointed",
)  # fmt: skip
ALWAYS = ("checkpoint_function",)
INDUCTOR = ("slices", "functions", "shared_attention", "checkpoint_function", "used_twice")
# Inductor fuses norms and softmax, whose last bits then differ: more values fall to the other side.
FUSED = 5 * CLOSE


def _eager(known):
    model = known.converted()
    loss = train_step(known.foreign, model, ROWS)
    assert ran(model) == known.fp8
    return loss, gradients(model)


def _compare(known, model, compiled, *, bound=CLOSE):
    foreign = known.foreign
    loss, expected = _eager(known)
    found = foreign.loss(call(compiled, foreign.inputs(ROWS)))
    found.backward()
    assert_close(found, loss, bound=bound, what="loss")
    assert_same_gradients(model, expected, bound=bound)
    assert ran(model) == known.fp8


@pytest.mark.parametrize("name", sweep(WHOLE, ALWAYS))
def test_fullgraph(name):
    """One graph where the original has one, with every site in it, forward and backward."""
    known = planned(name)
    assert known.foreign.fullgraph
    model = known.converted()
    _compare(known, model, torch.compile(model, fullgraph=True, backend="aot_eager"))


@pytest.mark.slow
@pytest.mark.parametrize("name", INDUCTOR)
def test_fullgraph_by_inductor(name):
    known = planned(name)
    model = known.converted()
    _compare(known, model, torch.compile(model, fullgraph=True), bound=FUSED)


@pytest.mark.slow
def test_every_model_that_has_one_graph_is_listed_or_of_a_listed_kind():
    """Also those with breaks run: two are compiled here, whose original is no full graph."""
    assert all(FOREIGN[name].fullgraph for name in (*WHOLE, *INDUCTOR))
    for name in ("lstm_tower", "checkpoint_sequential"):
        known = planned(name)
        assert not known.foreign.fullgraph
        model = known.converted()
        _compare(known, model, torch.compile(model, backend="aot_eager"))


BLOCKS = ("checkpoint_modules", "encoder_batch_first", "torchrec_dlrm_dcn")


@pytest.mark.parametrize("name", sweep(BLOCKS, BLOCKS[:1]))
def test_by_block(name):
    """`module.compile()` of each child by itself."""
    known = planned(name)
    model = known.converted()
    for child in model.children():
        child.compile(backend="aot_eager")
    _compare(known, model, model)


NESTED = tuple(itertools.product(("fuxictr_dcnv2_parallel", "deepctr_xdeepfm"), (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "outer"), NESTED)
def test_nested(name, outer):
    """Inner modules are replaced by compiled ones, after convert; names of sites stay what they were."""
    known = planned(name)
    model = known.converted()
    for child_name, child in list(model.named_children()):
        if any(True for _ in child.parameters()) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            setattr(model, child_name, torch.compile(child, backend="aot_eager"))
    expected = _eager(known)
    whole = torch.compile(model, backend="aot_eager") if outer else model
    loss = known.foreign.loss(call(whole, known.foreign.inputs(ROWS)))
    loss.backward()
    assert_close(loss, expected[0])
    found = {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients(model).items()}
    assert found.keys() == expected[1].keys()
    for parameter, gradient in expected[1].items():
        assert_close(found[parameter], gradient, what=parameter)
    assert ran(model) == known.fp8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slices", "experts_einsum"])
def test_other_batches_make_no_wrong_graph(name):
    """Three sizes, of which the last two share one graph with a symbolic batch."""
    known = planned(name)
    model, eager = known.converted(), known.converted()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (32, 48, 21):
        model.zero_grad()
        eager.zero_grad()
        loss = known.foreign.loss(call(compiled, known.foreign.inputs(rows)))
        loss.backward()
        assert_close(loss, train_step(known.foreign, eager, rows))
        assert_same_gradients(model, gradients(eager))
    assert ran(model) == known.fp8


@pytest.mark.slow
def test_converted_after_it_was_compiled():
    """The graph of before convert is not used any more, nor that of before revert."""
    known = planned("experts_einsum")
    foreign, model = known.foreign, known.foreign.build()
    compiled = torch.compile(model, backend="aot_eager")
    plain = foreign.loss(call(compiled, foreign.inputs(ROWS))).detach()
    loka.convert(model, known.plan)
    _compare(known, model, compiled)
    loka.revert(model)
    torch.testing.assert_close(foreign.loss(call(compiled, foreign.inputs(ROWS))).detach(), plain)


class _Halves(nn.Module):
    """A layer, and two parameters that it reads by getters; a hook breaks the graph inside of its forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 48)
        self.first = nn.Parameter(torch.randn(48, 32) / 6)
        self.second = nn.Parameter(torch.randn(2, 32, 48) / 6)
        self.fixed = nn.Parameter(torch.randn(32, 32) / 6, requires_grad=False)

    def forward(self, x):
        x = torch.relu(self.layer(x)) @ self.first.T.mT @ self.fixed.data
        return x @ self.second.mT[0].T.float() if x.requires_grad else x


@pytest.mark.parametrize("hooked", sweep([False, True], [True]), ids=["broken", "hooked"])
def test_graphs_that_break_inside_of_an_owner(hooked):
    """Between the graphs nothing is compiled under the mode: Dynamo took one getter of a tensor for another."""
    x = torch.randn(ROWS, 32)
    plan, steps = plan_of(_Halves(), x), []
    for made in (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")):
        model = loka.convert(_Halves(), plan)
        if hooked:
            model.layer.register_full_backward_hook(lambda *_: None)
        else:
            model.layer.register_forward_hook(torch.compiler.disable(lambda *_: None))
        compiled = made(model)
        for _ in range(2):
            y = compiled(x.clone().requires_grad_())
            y.square().mean().backward()
        steps.append((y.detach(), gradients(model), ran(model)))
    assert_close(*(y for y, _, _ in steps))
    assert_same_gradients(model, steps[0][1])
    assert steps[0][2] == steps[1][2] == set(plan.decisions)
