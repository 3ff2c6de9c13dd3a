"""Serving of cross layers by GEMMs that do all the rest: which kernels run, and that results stay.

Against the path of training two roundings to bfloat16 are left out, of u and of v. In one layer that
is bounded by element below. In a stack it is not that small: a cast to e4m3 makes a whole step of any
difference that crosses a boundary, and after a few casts the two paths round independently. At worst v of
three layers and x of two differ like two roundings to e4m3 of 31.5 dB each, 28.5 dB, and their share
in x' is that of u, 0.45 / 1.45 (tests/nn/test_cross_stack.py): 28.5 - 10 log10(5 * 0.31) = 26.6 dB.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from loka.core.chain import constant_scale
from loka.core.chain_recipe import CHAIN_RECIPES
from loka.core.cross_record import CrossLink, CrossStack
from loka.core.error import sqnr_db
from loka.core.problem import round_up
from loka.core.producer import cast_given, padded
from loka.core.recipe import Format, Gemm
from loka.core.report import site_name
from loka.kernels.launches import launches, reset_launches
from loka.kernels.run import kernel_runs, reset_kernel_runs
from loka.nn.chain import dissolve_chains, form_chains
from loka.nn.cross_serving import ServedLayer, cross_serve, served_layers
from loka.nn.cross_stack import CrossLayer, CrossState, Delayed, LowWeight, cross_forward, multiply_by
from loka.nn.cross_state import RunningCross
from loka.nn.dataflow import find_chains
from loka.zoo.dcn import CrossLayer as Cross

LAYERS = 3
LEAST_DB = 26.5
MADE = "tensorwise_e4m3"
FAST = ServedLayer(u=f"fused_cross:{MADE}", v=f"cast_gemm:{MADE}", exact_u=False, exact_v=False)
FULL = ServedLayer(u=f"fused_cross:{MADE}", v=None, exact_u=False, exact_v=False)


def low_weight(weight: torch.Tensor) -> LowWeight:
    scale = torch.tensor([constant_scale(weight.abs().max().item(), Format.E4M3.max)], device=weight.device)
    low = padded(
        cast_given(weight.float(), scale).view(torch.uint8), *(round_up(s, 16) for s in weight.shape)
    )
    return LowWeight(row=low.view(Format.E4M3.dtype), turned=low.t().contiguous(), scale=scale)


def stack_of(
    features: int, rank: int | None, device: torch.device
) -> tuple[list[tuple[torch.Tensor | None, torch.Tensor]], list[torch.Tensor | None], CrossState]:
    """Weights of Xavier's size, biases but for one, and the state that forward reads."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).bfloat16().to(device)

    inner = rank or features
    std = (2 / (features + inner)) ** 0.5
    weights = [
        (normal(inner, features, std=std) if rank else None, normal(features, inner, std=std))
        for _ in range(LAYERS)
    ]
    biases = [None if place == 1 else normal(features, std=0.1) for place in range(LAYERS)]

    def delayed() -> Delayed:
        return Delayed(scale=torch.full((1,), 2.0**-5, device=device))

    layers = tuple(
        CrossLayer(
            u=low_weight(u),
            x=delayed(),
            grad_outer=delayed(),
            v=None if v is None else low_weight(v),
            inner=None if v is None else delayed(),
            grad_inner=None if v is None else delayed(),
        )
        for v, u in weights
    )
    name = f"{'torch_fast' if device.type == 'cuda' else 'emulated'}:{MADE}"
    multiply = multiply_by(lambda where, gemm: name)
    largest = torch.zeros(1, dtype=torch.int32, device=device)
    return weights, biases, CrossState(layers=layers, largest=largest, multiply=multiply)


@pytest.mark.parametrize("joint", [True, False], ids=["x is x0", "x is another"])
@pytest.mark.parametrize("rank", [20, None], ids=["low rank", "full rank"])
def test_serving_agrees_with_the_path_of_training(
    rank: int | None, joint: bool, device: torch.device
) -> None:
    weights, biases, state = stack_of(100, rank, device)
    x0, other = torch.randn(2, 137, 100, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    x = x0 if joint else other
    before, _ = cross_forward(x0, x, weights, biases, state, keep=False)
    after = cross_serve(x0, x, biases, state, [FAST if rank else FULL] * LAYERS).hp
    assert after is not None
    assert after.dtype == torch.bfloat16
    assert sqnr_db(after, before) >= LEAST_DB


def test_one_layer_differs_by_the_rounding_of_u_alone(device: torch.device) -> None:
    """2^-8 of x_0 u, and both results are rounded to bfloat16."""
    weights, biases, state = stack_of(100, None, device)
    state = CrossState(layers=state.layers[:1], largest=state.largest, multiply=state.multiply)
    x0, x = torch.randn(2, 137, 100, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    before, _ = cross_forward(x0, x, weights[:1], biases[:1], state, keep=False)
    after = cross_serve(x0, x, biases[:1], state, [FULL]).hp
    assert after is not None
    bias = biases[0]
    assert bias is not None
    grown = (after.double() - x.double()).abs() + (x0.double() * bias.double()).abs()  # at least |x_0 u|
    bound = 2.0**-8 * (grown * (1 + 2.0**-6) + 2.01 * after.double().abs())
    if device.type == "cuda":
        # Another order of sums, in registers of 14 bits: 33 terms for each of 4 steps of K.
        bound = bound + 4 * 33 * 2.0**-13 * 32 * 2.0**-5 * grown.abs().amax()
    assert ((after.double() - before.double()).abs() <= bound).all()
    assert not torch.equal(after, before), "a rounding fewer shows"


def test_what_serves_a_layer() -> None:
    link = CrossLink(path="c", u="c.u", v="c.v", features=64, rank=16, bias=True)
    full = CrossLink(path="d", u="d.u", v=None, features=64, rank=None, bias=True)
    stack = CrossStack(layers=(link, full), joint=True)
    recipe = CHAIN_RECIPES["e4m3_row"]

    def served(
        u: str = "torch_fast", v: str = "torch", dtype: torch.dtype = torch.bfloat16, target: str = "sm_90"
    ) -> tuple[ServedLayer, ...] | None:
        names = {"c.u": u, "c.v": v, "d.u": "torch_fast"}
        kernels = {site_name(path, Gemm.OUTPUT): f"{name}:{MADE}" for path, name in names.items()}
        return served_layers(stack, recipe, kernels, dtype=dtype, target=target)

    low = ServedLayer(u=f"fused_cross:{MADE}", v=f"cast_gemm_exact:{MADE}", exact_u=False, exact_v=True)
    assert served() == (low, FULL)
    assert served(v="torch_fast") == (FAST, FULL)
    assert served(target="cpu") is None
    assert served(target="sm_89") is None
    assert served(dtype=torch.float32) is None
    assert served(u="emulated") is None


class Net(nn.Module):
    def __init__(self, features: int, rank: int | None) -> None:
        super().__init__()
        self.cross = nn.ModuleList(Cross(features, rank=rank) for _ in range(LAYERS))
        for parameter in self.cross.parameters():
            if parameter.dim() == 2:
                nn.init.xavier_normal_(parameter)

    def forward(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for layer in self.cross:
            x = layer(x0, x)
        return x


def formed(features: int, rank: int | None, rows: int, device: torch.device) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    model = Net(features, rank).to(device, torch.bfloat16)
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    form_chains(model, [], [(stack, "e4m3_row", {}) for stack in find_chains(model, x).crosses])
    model(x)  # primes the scales
    return model, x


def test_serving_alone_runs_the_fused_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, where only the tests ask for it. Training runs what it ran."""
    if device.type == "cpu":
        monkeypatch.setattr(RunningCross, "served", lambda *arguments: (FAST,) * LAYERS)

    model, x = formed(100, 20, 37, device)
    plain = copy.deepcopy(model)
    dissolve_chains(plain)

    def runs(grad: bool) -> torch.Tensor:
        reset_kernel_runs()
        reset_launches()
        with torch.set_grad_enabled(grad):
            return model(x)

    trained = runs(True)
    assert {name.partition("_")[0] for name, _ in kernel_runs()} <= {"emulated:tensorwise", "torch"}
    assert launches()["cross_produce"] == LAYERS
    served = runs(False)
    assert kernel_runs() == {(FAST.u, "output"): LAYERS, (FAST.v, "output"): LAYERS}
    assert launches() == {"produce": 1, "fold": 1, "gemm": 2 * LAYERS}
    assert sqnr_db(served, trained) >= LEAST_DB
    assert sqnr_db(served, plain(x)) >= 21, "as tests/nn/test_cross_layers.py derives"


def test_what_cannot_be_served_so_runs_as_it_is_trained() -> None:
    """On a CPU; launches show that no scales are copied for a backward that does not come."""
    model, x = formed(100, 20, 37, torch.device("cpu"))
    reset_launches()
    with torch.no_grad():
        model(x)
    assert launches() == {"produce": 1 + LAYERS, "gemm": 2 * LAYERS, "cross_produce": LAYERS}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "features", "rank"), [(8192, 3456, 512), (512, 3456, 512), (2047, 1000, None)]
)
def test_real_sizes_agree_with_training(rows: int, features: int, rank: int | None) -> None:
    model, x = formed(features, rank, rows, torch.device("cuda"))
    trained = model(x)
    reset_kernel_runs()
    with torch.no_grad():
        served = model(x)
    assert kernel_runs()[FAST.u, "output"] == LAYERS
    assert kernel_runs().get((FAST.v, "output"), 0) == (LAYERS if rank else 0)
    assert sqnr_db(served, trained) >= LEAST_DB


@pytest.mark.gpu
def test_a_graph_that_serves_follows_its_input() -> None:
    model, x = formed(512, 64, 1000, torch.device("cuda"))
    with torch.no_grad():
        model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        x.copy_(x.flip(0))
        graph.replay()
        assert torch.equal(out, model(x))
