"""A stack of cross layers served with the chain that reads it: the same bits as apart, and apart where
somebody could tell."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from loka.core.error import sqnr_db
from loka.core.exceptions import NotConverted
from loka.kernels.gemm_cross import gemm_cross
from loka.kernels.launches import launches, reset_launches
from loka.nn.chain import dissolve_chains, form_chains, running_chains
from loka.nn.chain_state import CALIBRATION
from loka.nn.cross import running_crosses
from loka.nn.cross_ops import serve as serve_stack
from loka.nn.cross_serving import ServedLayer
from loka.nn.cross_state import RunningCross
from loka.nn.dataflow import find_chains
from loka.zoo import build
from loka.zoo.dcn import CrossLayer

ROWS, FEATURES, RANK, LAYERS, OUT = 37, 100, 20, 3, 24  # no multiple of 16 but the last
MADE = "tensorwise_e4m3"
FAST = ServedLayer(u=f"fused_cross:{MADE}", v=f"cast_gemm:{MADE}", exact_u=False, exact_v=False)


class Net(nn.Module):
    """x_0 -> cross layers -> deep -> logit; `between` may do anything with what deep reads."""

    def __init__(self, *, out: int = OUT, norm: bool = False) -> None:
        super().__init__()
        self.cross = nn.ModuleList(CrossLayer(FEATURES, rank=RANK) for _ in range(LAYERS))
        for parameter in self.cross.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_normal_(parameter)
        before = [nn.LayerNorm(FEATURES)] if norm else []
        self.deep = nn.Sequential(*before, nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, out))
        self.logit = nn.Linear(out, 1)
        self.between: Callable[[torch.Tensor], Any] = _nothing

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        x = self.crossed(x0)
        self.between(x)
        return self.logit(self.deep(x))

    def crossed(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return x


def _nothing(x: torch.Tensor) -> None:
    """What a module of the tests does between the two unless told otherwise; pickle finds it."""


def batch(device: torch.device, rows: int = ROWS, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def form(model: nn.Module, x: torch.Tensor) -> None:
    """Every stack, and every chain but the logit."""
    found = find_chains(model, x)
    chains = [(chain, "e4m3_row", {}) for chain in found.chains if chain.name != "logit"]
    form_chains(model, chains, [(stack, "e4m3_row", {}) for stack in found.crosses])


def _served(
    running: RunningCross, dtype: torch.dtype, device: torch.device
) -> tuple[ServedLayer, ...] | None:
    return (FAST,) * LAYERS if dtype == torch.bfloat16 else None


@pytest.fixture
def served(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving by fused kernels, on a CPU too, where only the tests ask for it."""
    if device.type == "cpu":
        monkeypatch.setattr(RunningCross, "served", _served)


def trained(device: torch.device, **options: Any) -> tuple[Net, torch.Tensor]:
    """Formed, with scales from two training steps, so that serving leaves them alone; in evaluation."""
    torch.manual_seed(0)
    model, x = Net(**options).to(device, torch.bfloat16), batch(device)
    form(model, x)
    for _ in range(2):
        model(x).sum().backward()
    model.zero_grad()
    return model.eval(), x


def serve(model: nn.Module, x: torch.Tensor, *, apart: bool = False) -> torch.Tensor:
    """Without gradients; `apart` as in training mode, in which nothing else of these models differs."""
    model.train(apart)
    with torch.no_grad():
        out = model(x)
    model.eval()
    return out


def quantizations() -> int:
    """Launches of a quantization by itself since the last `reset_launches`."""
    return launches().get("quantize", 0)


def ran_together(model: nn.Module, x: torch.Tensor) -> bool:
    reset_launches()
    serve(model, x)
    return quantizations() == 0


def test_x_of_the_last_layer_is_handed_over_in_fp8(served: None, device: torch.device) -> None:
    """Apart, x_L under the chain's scale to e4m3 and back is the same x_L in bfloat16 to quantize: e4m3 has
    fewer bits and the scale is a power of two. So the chain by itself must give the same bits."""
    model, x = trained(device)
    running = running_crosses(model)["cross.0"]
    reader = running_chains(model)["deep.0"]
    assert running.reader is reader
    assert "served with deep.0" in repr(model)
    assert ran_together(model, x)
    together = serve(model, x)
    with torch.no_grad():
        low = serve_stack(running, x, x, running.parameters(), scale_out=reader.input_scale(0)).row
        assert low is not None
        last = (low[:, :FEATURES].float() * reader.input_scale(0)).bfloat16()
        assert torch.equal(model.logit(model.deep(last)), together)
        # x_L as it is apart, in bfloat16: what is between them is one rounding to e4m3, 31.5 dB.
        model.train()
        assert sqnr_db(last, model.crossed(x)) > 31
    # 1 of 32 roundings to e4m3 goes the other way, as two roundings in a row do where the first one ends
    # halfway; each then is off by half a step, as before: 31.5 + 15 dB less what the chain's own casts add.
    assert sqnr_db(together, serve(model, x, apart=True)) > 28


def test_the_kernel_may_write_fp8_alone(device: torch.device) -> None:
    a, w = (torch.randn(37, 48), torch.randn(112, 48))
    low = [side.to(device, torch.float8_e4m3fn) for side in (a, w)]
    one, x = torch.ones(1, device=device), batch(device)
    both = gemm_cross(*low, one, one, None, x, x, scale_out=one)
    alone = gemm_cross(*low, one, one, None, x, x, scale_out=one, keep=False)
    assert alone.hp is None
    assert both.hp is not None
    assert both.row is not None
    assert alone.row is not None
    assert torch.equal(alone.row.view(torch.uint8), both.row.view(torch.uint8))
    with pytest.raises(ValueError, match="neither"):
        gemm_cross(*low, one, one, None, x, x, keep=False)


def test_integers_give_the_same_bits_as_apart(served: None, device: torch.device) -> None:
    """Where bfloat16 holds x_L exactly, nothing at all differs."""
    torch.manual_seed(0)
    model, generator = Net(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.cross.parameters():
            ones = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.copy_(ones * (torch.rand(parameter.shape, generator=generator) < 0.1))
    model.to(device, torch.bfloat16)
    x = torch.randint(-1, 2, (ROWS, FEATURES), generator=generator).to(device, torch.bfloat16)
    form(model, x)
    model(x).sum().backward()
    last = model.crossed(x)
    assert torch.equal(last, last.round())
    assert 4 < last.abs().amax() <= 256, "the weights do something, and bfloat16 holds what they do"
    apart = serve(model, x, apart=True)
    assert apart.std() > 0
    assert ran_together(model, x)
    assert torch.equal(serve(model, x), apart)


def test_a_launch_and_two_passes_fewer(served: None, device: torch.device) -> None:
    model, x = trained(device)
    counted = []
    for apart in (True, False):
        reset_launches()
        serve(model, x, apart=apart)
        counted.append(dict(launches()))
    assert counted[0].pop("quantize") == 1
    assert counted[0] == counted[1]


def test_what_is_served_as_it_is_trained_gives_the_same_bits(device: torch.device) -> None:
    """In float32 no fused kernel serves, and the two run as one all the same: nothing is handed over then."""
    torch.manual_seed(0)
    model, x = Net().to(device), batch(device).float()
    form(model, x)
    for _ in range(2):
        model(x).sum().backward()
    wide = torch.stack([x, x.flip(0)])
    for given in (x, wide, x[:0]):
        apart = serve(model, given, apart=True)
        assert torch.equal(serve(model, given), apart)
        assert apart.shape == (*given.shape[:-1], 1)


def test_under_autocast(served: None, device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Net().to(device), batch(device).float()
    with torch.autocast(device.type, torch.bfloat16):
        form(model, x)
        for _ in range(2):
            model(x).sum().backward()
        assert ran_together(model, x)
        assert sqnr_db(serve(model, x), serve(model, x, apart=True)) > 25
    # Without autocast the stack computes in float32, and so does the chain.
    assert serve(model, x).dtype == torch.float32


def _keep(x: torch.Tensor, kept: list[torch.Tensor] = []) -> None:  # noqa: B006
    kept[:] = [x]


def _sum(x: torch.Tensor) -> None:
    x.sum()


@pytest.mark.parametrize("between", [_keep, _sum], ids=["kept", "read"])
def test_another_reader_keeps_them_apart(between: Callable[[torch.Tensor], Any]) -> None:
    model, x = Net(), torch.randn(ROWS, FEATURES)
    assert [stack.reader for stack in find_chains(model, x).crosses] == ["deep.0"]
    model.between = between
    form(model, x)
    assert running_crosses(model)["cross.0"].stack.reader is None
    assert running_crosses(model)["cross.0"].reader is None


@pytest.mark.parametrize("options", [{"norm": True}, {"out": FEATURES}], ids=["norm", "as wide as the stack"])
def test_chains_that_cannot_take_it(options: Any) -> None:
    model, x = Net(**options), torch.randn(ROWS, FEATURES)
    form(model, x)
    running = running_crosses(model)["cross.0"]
    assert running.stack.reader == "deep.0"
    assert list(running_chains(model)) == [f"deep.{int('norm' in options)}"]
    assert running.reader is None
    assert torch.equal(serve(model, x), serve(model, x, apart=True))


def test_the_zoo_hands_over() -> None:
    model = build("dcnv2", dense_features=13, vocab_sizes=[10] * 6)
    inputs = torch.randn(8, 13), torch.zeros(8, 6, dtype=torch.int64)
    (stack,) = find_chains(model, *inputs).crosses
    (chain,) = [chain for chain in find_chains(model, *inputs).chains if chain.name == "deep.0"]
    assert stack.feeds(chain)


@pytest.mark.parametrize("where", ["cross.0", "cross.2", "deep", "deep.0"])
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_hooks_see_what_they_would_see_apart(
    kind: str, where: str, served: None, device: torch.device
) -> None:
    model, x = trained(device)
    apart, plain = serve(model, x, apart=True), serve(model, x)
    seen: list[torch.Tensor] = []
    module = model.get_submodule(where)
    if kind == "pre":
        handle = module.register_forward_pre_hook(lambda module, args: seen.append(args[-1]))
    else:
        handle = module.register_forward_hook(lambda module, args, out: seen.append(args[-1]))
    assert torch.equal(serve(model, x), apart)
    assert seen[0].shape == (ROWS, FEATURES)
    handle.remove()
    assert torch.equal(serve(model, x), plain)
    handle = model.register_forward_hook(lambda module, args, out: seen.append(out))
    assert ran_together(model, x), "what holds both sees neither"
    handle.remove()
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        assert not ran_together(model, x)
    finally:
        everywhere.remove()


def test_gradients_keep_them_apart(served: None, device: torch.device) -> None:
    """In evaluation, too: of the input alone, of the stack alone, of the chain alone."""
    model, x = trained(device)
    twin = copy.deepcopy(model).train()
    for wanting in ("input", "cross", "deep"):
        found = []
        for net in (model, twin):
            leaf = x.clone().requires_grad_(wanting == "input")
            for parameter in net.parameters():
                parameter.requires_grad_(False)
            if wanting != "input":
                net.get_submodule(wanting).requires_grad_()
            net.zero_grad()
            out = net(leaf)
            out.backward(torch.ones_like(out))
            found.append([out, leaf.grad, *(p.grad for p in net.parameters())])
        assert any(gradient is not None for gradient in found[0][1:])
        for one, other in zip(*found, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    model.requires_grad_(False)
    reset_launches()
    model(x)
    assert quantizations() == 0, "nobody wants gradients, though they are enabled"


def test_the_chain_by_itself_and_other_tensors(served: None, device: torch.device) -> None:
    model, x = trained(device)
    with torch.no_grad():
        first = model.deep(x)
        result = model.crossed(x)
        assert result.shape == (ROWS, OUT), "the chain's own"
        own = model.deep(x)  # kept, for a tensor that came to lie where the last result lay would pass for it
        assert torch.equal(own, first), "what was served before leaves no trace"
        with pytest.raises(ValueError, match=f"{OUT} features"):
            model.deep(result.clone())
        assert torch.equal(model.logit(model.deep(model.crossed(x))), model(x))
        other = batch(device, rows=ROWS + 3, seed=5)
        # Libraries may add in another order for another number of rows; a step of FP8 of one of 50 features.
        torch.testing.assert_close(serve(model, other)[:7], serve(model, other[:7]), rtol=2**-5, atol=2**-6)


def test_a_chain_that_is_called_otherwise_than_the_stack_is_refused(
    served: None, device: torch.device
) -> None:
    model, x = trained(device)
    with torch.no_grad():
        result = model.crossed(x)
    with pytest.raises(NotConverted, match="without gradients"):
        model.deep(result)
    with (
        pytest.raises(NotConverted, match="autocast"),
        torch.no_grad(),
        torch.autocast(device.type, torch.float16),
    ):
        model.deep(result)
    model.train()
    with torch.no_grad():
        last = model.crossed(x)
    model.deep(last).sum().backward()
    assert model.deep[0].weight.grad is not None


def test_what_is_not_finite_stays_in_its_row(served: None, device: torch.device) -> None:
    model, x = trained(device)
    before = serve(model, x)
    x[7, 5], x[11, 6] = torch.nan, torch.inf
    for apart in (True, False):
        after = serve(model, x, apart=apart)
        bad = torch.zeros(ROWS, 1, dtype=torch.bool, device=device)
        bad[[7, 11]] = True
        assert torch.equal(~after.isfinite(), bad)
    assert torch.equal(after[~bad], before[~bad])


def test_serving_alone_takes_its_scale_as_apart(served: None, device: torch.device) -> None:
    """From x_L in bfloat16, for the first batches; then it is handed over."""
    torch.manual_seed(0)
    model = Net().to(device, torch.bfloat16)
    form(model, batch(device))
    twin = copy.deepcopy(model)
    for seed in range(CALIBRATION + 1):
        x = batch(device, seed=seed) * (1 + seed)
        assert not ran_together(model, x)
        serve(twin, x, apart=True)
    snapshots = [running_chains(net)["deep.0"].state.book.snapshot() for net in (model, twin)]
    assert snapshots[0] == snapshots[1]
    assert snapshots[0]["deep.0/input"]["amax"] > 0
    assert ran_together(model, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_hands_over_to_its_own_chain(
    copied: Callable[[nn.Module], nn.Module], served: None, device: torch.device
) -> None:
    model, x = trained(device)
    other, before = copied(model), serve(model, x)
    assert torch.equal(serve(other, x), before)
    assert ran_together(other, x)
    with torch.no_grad():
        for parameter in other.deep.parameters():
            parameter.zero_()
    assert torch.equal(serve(other, x), other.logit.bias.expand(ROWS, 1))
    assert torch.equal(serve(model, x), before)
    dissolve_chains(other)
    assert [type(module) for module in other.modules()] == [type(module) for module in Net().modules()]
    assert not [name for module in other.modules() for name in vars(module) if name.startswith("loka")]


def _whole(model: Net) -> nn.Module:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def _cross(model: Net) -> nn.Module:
    for layer in model.cross:
        layer.compile(backend="aot_eager", fullgraph=True)
    return model


def _deep(model: Net) -> nn.Module:
    model.deep.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.parametrize("compiled", [_whole, _cross, _deep], ids=["the model", "the layers", "the chain"])
def test_torch_compile_runs_the_same(
    compiled: Callable[[Net], nn.Module], served: None, device: torch.device
) -> None:
    """All of it, or a part of it with the rest eager, and whichever way it ran before."""
    model, x = trained(device)
    together, apart = serve(model, x), serve(model, x, apart=True)
    torch.compiler.reset()
    low = compiled(model)
    assert torch.equal(serve(low, x), together)
    assert ran_together(low, x)
    assert torch.equal(serve(low, x, apart=True), apart)
    assert torch.equal(serve(low, x), together)


def test_what_is_compiled_trains_apart_and_heeds_hooks(served: None, device: torch.device) -> None:
    model, x = trained(device)
    apart, weight = serve(model, x, apart=True), model.deep[0].weight
    (gradient,) = torch.autograd.grad(model(x).sum(), weight)
    torch.compiler.reset()
    low = _whole(model)
    (found,) = torch.autograd.grad(low(x).sum(), weight)
    assert torch.equal(found, gradient)
    low = _cross(model)  # what was compiled ignores hooks that come later; anew it sees them
    handle = model.deep.register_forward_pre_hook(_apart)
    assert torch.equal(serve(low, x), apart)
    handle.remove()


def _apart(module: nn.Module, args: tuple[torch.Tensor]) -> None:
    assert args[0].shape[1] == FEATURES


@pytest.mark.gpu
def test_a_graph_that_serves_follows_its_input() -> None:
    device = torch.device("cuda")
    model, x = trained(device)
    before = serve(model, x)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        graph.replay()
        assert torch.equal(out, before)
        x.copy_(batch(device, seed=9))
        graph.replay()
        assert torch.equal(out, model(x))


@pytest.mark.gpu
def test_what_never_trained_is_handed_over_in_a_graph() -> None:
    """A capture takes scales as they are."""
    device = torch.device("cuda")
    model, x = Net().to(device, torch.bfloat16), batch(device)
    form(model, x)
    model.eval()
    with torch.no_grad():
        model(x)
        reset_launches()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            model(x)
    assert quantizations() == 0
