"""Chains whose scales come from the tensors at hand: nothing saturates, and nothing is remembered."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cuda_sync import nothing_synchronizes
from models import Checkpointed
from test_chain import assert_backward_runs_twice, backward, device, form, sqnr_db
from test_handover import Net, batch, serve
from test_handover import _served as served_fused
from torch import nn

import loka
from loka.core.chain import Activation, Epilogue
from loka.core.chain_recipe import CHAIN_RECIPES, FUSED_GEMM
from loka.core.exceptions import NoKernelFits
from loka.core.fusion import forced_fusion
from loka.core.producer import NO_PARAMETERS, differentiate
from loka.kernels import launches as counted
from loka.kernels.run import kernel_runs, reset_kernel_runs
from loka.nn import BlockNorm, HardSwish, chain_snapshot, count_rounding
from loka.nn import chain as chain_module
from loka.nn.chain import _fused_kernels, form_chains, running_chains
from loka.nn.cross_state import RunningCross
from loka.nn.dataflow import find_chains
from loka.probe.settings import Settings
from loka.train.valve import _Seen

CURRENT = "e4m3_row_current"


def mlp(*, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Not a norm in it: nothing bounds any of its tensors."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), activation(), nn.Linear(128, 96), activation(), nn.Linear(96, 64)]
    return nn.Sequential(*layers).to(device())


def formed(recipe: str = CURRENT, model: nn.Module | None = None) -> tuple[nn.Module, nn.Module]:
    plain = mlp() if model is None else model.to(device())
    low = copy.deepcopy(plain)
    first = next(low.parameters())
    form(low, torch.randn(8, first.shape[-1], dtype=first.dtype, device=device()), recipe)
    return plain, low


def data(rows: int = 256, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, width, device=device()), torch.randn(rows, 64, device=device())


def worst_db(low: nn.Module, plain: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Of the output, the gradient of x and those of all parameters."""
    pairs = zip(backward(low, x, grad), backward(plain, x, grad), strict=True)
    return min(sqnr_db(found, exact) for found, exact in pairs)


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128, bias=False), BlockNorm(128, 64), HardSwish(), nn.Linear(128, 64))


@pytest.mark.parametrize(("build", "factor"), [(mlp, 1e3), (normed, 1e-3)])
def test_a_jump_of_a_thousand_between_two_steps(build: Callable[[], nn.Module], factor: float) -> None:
    """Delayed scales leave an octave to what comes. Without norms activations follow the input up; behind a
    norm gradients follow it the other way, by the factor of one over the deviation. What current scales
    then have is what delayed ones have where it was no jump: in a model that saw nothing before."""
    x, grad = data()
    found = {}
    for recipe in ("e4m3_row", CURRENT):
        plain, low = formed(recipe, build())
        for _ in range(2):
            backward(low, x, grad)
        count_rounding(low)
        found[recipe] = worst_db(low, plain, factor * x, grad)
        lost = sum(slot["saturated"] for name, slot in chain_snapshot(low).items() if "weight" not in name)
        assert (lost == 0) == (recipe == CURRENT)
    plain, fresh = formed("e4m3_row", build())
    assert found[CURRENT] > worst_db(fresh, plain, factor * x, grad) - 1 > 9
    assert found["e4m3_row"] < 3


def test_nothing_is_remembered() -> None:
    """A step after others, of other sizes, of NaN and of zeros, is the step of a model that made none."""
    x, grad = data()
    _, low = formed()
    _, fresh = formed()
    for other in (1e4 * x, x * math.nan, 0 * x, 1e-4 * x):
        backward(low, other, grad)
    with torch.no_grad():
        low(100 * x)
    for found, one in zip(backward(low, x, grad), backward(fresh, x, grad), strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("where", ["input", "gradient"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_row_leaves_the_others_alone(where: str, bad: float) -> None:
    """What is not finite has no say in a scale: the step's other rows are what they are without it."""
    x, grad = data()
    _, low = formed()
    hit = (x if where == "input" else grad).clone()
    hit[7, 3] = bad
    clean = torch.arange(256, device=device()) != 7
    found = backward(low, *((hit, grad) if where == "input" else (x, hit)))
    whole = backward(low, x, grad)
    for one, other in zip(found[:2], whole[:2], strict=True):
        # Row 7 may have held a maximum: then other rows have a scale that is a power of two smaller.
        assert sqnr_db(one[clean], other[clean]) > 25
    assert not found[0 if where == "input" else 1][7].isfinite().all()
    assert found[2].isnan().any()


def test_backward_has_the_scales_of_its_own_forward() -> None:
    """Two forwards of different sizes, then both backwards; and serving in between."""
    x, grad = data()
    _, low = formed()
    apart = [backward(low, factor * x, grad)[2:] for factor in (1.0, 1000.0)]
    outs = [low(factor * x) for factor in (1.0, 1000.0)]
    with torch.no_grad():
        low(1e-3 * x)
    parameters = list(low.parameters())
    for out, expected in zip(outs, apart, strict=True):
        for found, one in zip(torch.autograd.grad(out, parameters, grad), expected, strict=True):
            assert torch.equal(found, one)


def test_checkpoints_compilation_copies_and_second_backwards_change_nothing() -> None:
    x, grad = data(64)
    plain, low = formed()
    assert list(low.state_dict()) == list(plain.state_dict())
    first = backward(low, x, grad)
    compiled = torch.compile(low, backend="aot_eager", fullgraph=True)
    for model in (Checkpointed(low, reentrant=True), compiled, copy.deepcopy(low)):
        for found, one in zip(backward(model, x, grad), first, strict=True):
            assert torch.equal(found, one)
    low.zero_grad()
    assert_backward_runs_twice(low, x, grad)


def test_launches_of_a_step_are_counted() -> None:
    """In forward one to begin with and one for each tensor without a bound; in backward one to begin with
    and one a link, but for the last where it has no norm; and two to scale what leaves the chain by rows."""
    for build, produced, derived in ((mlp, 3, 2), (normed, 1, 1)):
        _, low = formed(CURRENT, build())
        x, grad = data()
        optimizer = torch.optim.SGD(low.parameters(), lr=1e-3)
        backward(low, x, grad)
        optimizer.step()
        counted.reset_launches()
        backward(low, x, grad)
        links = len(running_chains(low)["0"].chain.links)
        found = counted.launches()
        assert found.pop("scale") == 2 + produced + derived
        assert found.pop("units") == 3
        found.pop("produce", None)
        assert found == {"book": 1, "bank": 1, "quantize": 1, "gemm": 3 * links, "derive": links}


def test_the_gradient_that_enters_needs_no_pass() -> None:
    """In units its rows are at most 1 before the slopes of activations, of which 1.5 is the steepest."""
    y = torch.linspace(-9, 9, 20001, dtype=torch.float32)
    for activation in Activation:
        epilogue = Epilogue(activation=activation)
        slope, *_ = differentiate(torch.ones(20001, 1), y[:, None], epilogue, NO_PARAMETERS)
        assert slope.abs().max() <= 1.5
    x, grad = data()
    for activation in (nn.Hardswish, nn.GELU):
        plain, low = formed(model=nn.Sequential(*mlp(activation=activation), activation()).to(device()))
        count_rounding(low)
        assert worst_db(low, plain, x, grad) > 18
        assert chain_snapshot(low)["4/grad_output"]["saturated"] == 0


def test_eight_bits_and_a_prologue() -> None:
    """Current scales from what backward starts from, be it Z in eight bits; and of a prologue with gamma."""
    both_of = replace(CHAIN_RECIPES["e4m3_row_z8"], name="both", current=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHAIN_RECIPES, "both", both_of)
        x, grad = data()
        model = nn.Sequential(nn.RMSNorm(64), *normed())
        nn.init.constant_(model[0].weight, 1e4)
        plain, low = formed("both", model)
        assert running_chains(low)["1"].rounds_z(0)
        assert worst_db(low, plain, 1e3 * x, grad) > 18


def test_no_epilogue_of_a_gemm_writes_under_a_scale_that_it_cannot_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serving either: the maximum is that of this very batch."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False))
    _, low = formed(CURRENT, plain.bfloat16())
    running, x = running_chains(low)["0"], data()[0].bfloat16()
    site, fused = "0/output", f"{FUSED_GEMM}:tensorwise_e4m3"
    monkeypatch.setattr(chain_module, "target_of", lambda device: "cpu")
    for training in (False, True):
        found = _fused_kernels(running.chain, running.recipe, torch.device("cuda"), training=training)
        assert site not in found
    running.serving = {site: fused}  # and if it were named all the same
    slot = running.inputs[1]
    assert slot is not None
    running.state.book.prime(slot, torch.ones(()))  # by a plan of before, with delayed scales
    reset_kernel_runs()
    with torch.no_grad():
        assert sqnr_db(low(1000 * low(x)), plain(1000 * plain(x))) > 22
    assert (fused, "output") not in kernel_runs()
    with pytest.raises(NoKernelFits, match="its scale needs the maximum"):
        form_chains(plain, [(running.chain, CURRENT, {site: fused})])


def test_served_with_the_cross_layers_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one call, but x_L is written in bf16, for its maximum is not known before: the bits of apart."""
    torch.manual_seed(0)
    model, x = Net().to(device(), torch.bfloat16), batch(device())
    found = find_chains(model, x)
    chains = [(chain, CURRENT, {}) for chain in found.chains if chain.name != "logit"]
    form_chains(model, chains, [(stack, "e4m3_row", {}) for stack in found.crosses])
    reader = running_chains(model)["deep.0"]
    for slot in (slot for slot in reader.inputs if slot is not None):
        reader.state.book.prime(slot, torch.ones(()))  # by a plan of before, with delayed scales
    reader.state._trained = True
    model.eval()
    if device().type == "cpu":  # where only tests serve by fused kernels
        monkeypatch.setattr(RunningCross, "served", served_fused)
    counted.reset_launches()
    serve(model, x)
    assert counted.launches()["quantize"] >= 1
    assert torch.equal(serve(model, x), serve(model, x, apart=True))
    with pytest.raises(NoKernelFits, match="by the recipe e4m3_row only"):
        form_chains(copy.deepcopy(Net()), [], [(stack, CURRENT, {}) for stack in found.crosses])


def test_the_valve_sees_nothing_saturate() -> None:
    x, grad = data()
    _, low = formed()
    running = running_chains(low)["0"]
    backward(low, x, grad)
    hook = low[0].register_forward_hook(_Seen("0", None, running), with_kwargs=True)
    spread = 1e5 * x
    spread[:, ::2] *= 2.0**-40
    backward(low, spread, grad)
    hook.remove()
    counts = chain_snapshot(low)["0/input"]
    assert counts["saturated"] == 0
    assert counts["underflowed"] == x.numel() / 2


@forced_fusion()
def test_a_budget_admits_it() -> None:
    x = data(64)[0].cpu()
    model = mlp().cpu()
    with loka.Probe(model, every=1) as probe:
        model(x).square().mean().backward()
    report = loka.measure(probe.stats(), device="cpu", settings=Settings(min_draws=2, max_draws=2))
    usual = loka.plan(report, loka.Budget(chains="always"))
    assert usual.chains["0"].recipe != CURRENT, "nobody asked for it"
    plan = loka.plan(report, loka.Budget(chains="always", chain_recipes=(CURRENT,)))
    assert loka.Plan.from_json(plan.to_json()) == plan
    loka.convert(model, plan)
    assert running_chains(model)["0"].recipe.current
    model(x).square().mean().backward()


@pytest.mark.gpu
def test_a_step_does_not_synchronize_and_can_be_captured() -> None:
    x, grad = (tensor.bfloat16() for tensor in data(1024))
    low = formed()[1].bfloat16()
    leaf = x.clone().requires_grad_()

    def step() -> list[torch.Tensor]:
        return list(torch.autograd.grad(low(leaf), [leaf, *low.parameters()], grad))

    for _ in range(3):
        step()
    with nothing_synchronizes():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaf.mul_(1000)  # the graph takes its scales anew
    graph.replay()
    for found, one in zip(captured, step(), strict=True):
        assert sqnr_db(found, one) > 40  # weights' scales may be a step apart
