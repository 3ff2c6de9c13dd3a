"""A stack of cross layers in FP8 against autograd of the plain formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from loka.core.chain import constant_scale
from loka.core.error import sqnr_db
from loka.core.problem import round_up
from loka.core.producer import cast_given, padded
from loka.core.recipe import Format, Gemm
from loka.nn.cross_stack import (
    CrossLayer,
    CrossState,
    Delayed,
    LowWeight,
    cross_backward,
    cross_forward,
    multiply_by,
)

CPU = dict.fromkeys(Gemm, "emulated:tensorwise_e4m3")
GPU = {
    Gemm.OUTPUT: "torch_fast:tensorwise_e4m3",
    Gemm.GRAD_INPUT: "torch_fast:tensorwise_e4m3",
    Gemm.GRAD_WEIGHT: "torch:tensorwise_e4m3",
}

ROWS, FEATURES, RANK, LAYERS = 37, 100, 20, 3  # no multiple of 16 among the sides
# Rounding to e4m3 leaves an operand with 31.5 dB. A layer's u has four such sources (x, V, v, U); its
# share of x_{l+1} is 0.45 / 1.45 in power (Xavier's u has 0.67 of the std of x), so that three layers leave
# 3.7 sources; a weight's gradient has four of its own. 31.5 - 10 log10(7.7) = 22.6.
LEAST_DB = 22.0


@pytest.fixture
def tensors(device: torch.device) -> Callable[..., torch.Tensor]:
    """Normal tensors of the given sides in bfloat16, reproducible."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).bfloat16().to(device)

    return make


def weights_of(
    make: Callable[..., torch.Tensor], features: int, rank: int | None
) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
    """Xavier's, as DCN-V2 starts from."""
    inner = rank or features
    std = (2 / (features + inner)) ** 0.5
    return [
        (make(inner, features, std=std) if rank else None, make(features, inner, std=std))
        for _ in range(LAYERS)
    ]


def low_weight(weight: torch.Tensor) -> LowWeight:
    scale = torch.tensor([constant_scale(weight.abs().max().item(), Format.E4M3.max)], device=weight.device)
    low = cast_given(weight.float(), scale).view(torch.uint8)
    low = padded(low, *(round_up(side, 16) for side in low.shape)).view(Format.E4M3.dtype)
    turned = low.view(torch.uint8).t().contiguous().view(low.dtype)
    return LowWeight(row=low, turned=turned, scale=scale)


def delayed(device: torch.device) -> Delayed:
    return Delayed(
        scale=torch.ones(1, device=device),
        seen=torch.zeros(1, dtype=torch.int32, device=device),
        counts=torch.zeros(2, dtype=torch.int64, device=device),
    )


def state_of(weights: list[tuple[torch.Tensor | None, torch.Tensor]]) -> CrossState:
    device = weights[0][1].device
    layers = tuple(
        CrossLayer(
            u=low_weight(u),
            x=delayed(device),
            grad_outer=delayed(device),
            v=None if v is None else low_weight(v),
            inner=None if v is None else delayed(device),
            grad_inner=None if v is None else delayed(device),
        )
        for v, u in weights
    )
    largest = torch.zeros(1, dtype=torch.int32, device=device)
    names = GPU if device.type == "cuda" else CPU
    return CrossState(layers=layers, largest=largest, multiply=multiply_by(lambda where, gemm: names[gemm]))


def slots(state: CrossState) -> list[Delayed]:
    found = [s for layer in state.layers for s in (layer.x, layer.inner, layer.grad_outer, layer.grad_inner)]
    return [slot for slot in found if slot is not None]


def update(state: CrossState) -> None:
    """What the scale book does between steps, without a history."""
    state.largest.zero_()
    for slot in slots(state):
        assert slot.seen is not None
        assert slot.counts is not None
        largest = slot.seen.view(torch.float32).item()
        if largest > 0:
            slot.scale.fill_(constant_scale(largest, Format.E4M3.max))
        slot.seen.zero_()
        slot.counts.zero_()


def plain(
    x0: torch.Tensor,
    x: torch.Tensor,
    weights: list[tuple[torch.Tensor | None, torch.Tensor]],
    biases: list[torch.Tensor | None],
) -> torch.Tensor:
    for (v, u), bias in zip(weights, biases, strict=True):
        outer = (x if v is None else x @ v.t()) @ u.t()
        x = x0 * (outer if bias is None else outer + bias) + x
    return x


@pytest.mark.parametrize("joint", [True, False], ids=["x is x0", "x is another"])
@pytest.mark.parametrize("rank", [RANK, None], ids=["low rank", "full rank"])
def test_output_and_all_gradients_match_autograd(
    rank: int | None, joint: bool, tensors: Callable[..., torch.Tensor]
) -> None:
    x0 = tensors(ROWS, FEATURES)
    x = x0 if joint else tensors(ROWS, FEATURES)
    weights = weights_of(tensors, FEATURES, rank)
    biases = [tensors(FEATURES, std=0.1), None, tensors(FEATURES, std=0.1)]
    # Rows of very different gradients, as recommendation models have them; one has none.
    grad = tensors(ROWS, FEATURES) * torch.logspace(-6, 0, ROWS, device=x.device)[:, None].bfloat16()
    grad[5] = 0

    leaves = [t.float().requires_grad_() for t in (x0, x)]
    doubles = [tuple(None if w is None else w.float().requires_grad_() for w in pair) for pair in weights]
    shifts = [None if bias is None else bias.float().requires_grad_() for bias in biases]
    expected = plain(leaves[0], leaves[0] if joint else leaves[1], doubles, shifts)
    expected.backward(grad.float())

    state = state_of(weights)
    for _ in range(4):  # scales follow what the step before saw
        update(state)
        out, kept = cross_forward(x0, x, weights, biases, state)
        assert kept is not None
        got = cross_backward(grad, kept, weights, state)

    assert all(slot.counts is not None and slot.counts[0] == 0 for slot in slots(state)), "saturated"
    assert out.dtype == got.x0.dtype == torch.bfloat16
    pairs = {"out": (out, expected.detach()), "x0": (got.x0, leaves[0].grad)}
    assert (got.x is None) == joint
    if got.x is not None:
        pairs["x"] = (got.x, leaves[1].grad)
    for place in range(LAYERS):
        v, u = doubles[place]
        pairs[f"u{place}"] = (got.u[place], u.grad)
        bias, shift = got.bias[place], shifts[place]
        assert (bias is None) == (shift is None)
        if bias is not None and shift is not None:
            pairs[f"bias{place}"] = (bias, shift.grad)
        low = got.v[place]
        assert (low is None) == (v is None)
        if low is not None and v is not None:
            pairs[f"v{place}"] = (low, v.grad)
    decibels = {name: sqnr_db(a, b) for name, (a, b) in pairs.items()}
    assert min(decibels.values()) >= LEAST_DB, decibels
    for low, high in ((got.x0, leaves[0].grad), (got.x, leaves[1].grad)):
        if low is None or high is None:
            continue
        assert not low[5].any(), "no gradient came in at this row"
        rows = [row for row in range(ROWS) if row != 5]
        # Every row by itself: one of small gradients is not lost beside the others. A row's own noise
        # scatters, but a unit that is wrong is wrong by two at least, which leaves 6 dB.
        assert min(sqnr_db(low[row], high[row]) for row in rows) >= 12


def test_inference_gives_the_same_and_keeps_nothing(tensors: Callable[..., torch.Tensor]) -> None:
    x0, weights = tensors(ROWS, FEATURES), weights_of(tensors, FEATURES, RANK)
    state = state_of(weights)
    trained, _ = cross_forward(x0, x0, weights, [None] * LAYERS, state)
    inferred, kept = cross_forward(x0, x0, weights, [None] * LAYERS, state, keep=False)
    assert kept is None
    assert torch.equal(trained, inferred)


def test_nan_in_one_row_shows_there_and_in_the_weights(tensors: Callable[..., torch.Tensor]) -> None:
    """A bad gradient stays in its row of dx_0 and reaches every weight's gradient, as in plain PyTorch."""
    x0, weights = tensors(ROWS, FEATURES), weights_of(tensors, FEATURES, RANK)
    state, grad = state_of(weights), tensors(ROWS, FEATURES)
    grad[7, 3] = torch.inf
    _, kept = cross_forward(x0, x0, weights, [None] * LAYERS, state)
    assert kept is not None
    got = cross_backward(grad, kept, weights, state)
    assert got.x0[7].isnan().all()
    assert got.x0[[row for row in range(ROWS) if row != 7]].isfinite().all()
    for gradient in (*got.u, *got.v):
        assert gradient is not None
        assert gradient.isnan().all()


def test_backward_is_linear_in_powers_of_two(tensors: Callable[..., torch.Tensor]) -> None:
    """Units take a power of two out of every row exactly: gradients of rows scale, bit for bit."""
    x0, weights = tensors(ROWS, FEATURES), weights_of(tensors, FEATURES, RANK)
    state, grad = state_of(weights), tensors(ROWS, FEATURES)
    _, kept = cross_forward(x0, x0, weights, [None] * LAYERS, state)
    assert kept is not None
    powers = torch.ldexp(torch.ones(ROWS), torch.arange(ROWS) % 24 - 20).to(grad)[:, None]
    first = cross_backward(grad, kept, weights, state)
    state.largest.zero_()
    second = cross_backward(grad * powers, kept, weights, state)
    assert torch.equal(first.x0 * powers, second.x0)
