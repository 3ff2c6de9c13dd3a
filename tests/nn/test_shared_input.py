"""Layers that share their input: the same numbers as by themselves, in one GEMM where there were several."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka.core.error import sqnr_db
from loka.core.exceptions import NotConverted
from loka.core.recipe import RECIPES, Gemm
from loka.core.reference import dequantize, quantize
from loka.core.shared_input import Branch, SharedInput
from loka.kernels import quantizer
from loka.kernels.run import kernel_runs, reset_kernel_runs
from loka.nn import convert_linear, health_of, ops, restore_linear
from loka.nn.fp8_linear import fp8_linears
from loka.nn.shared_input import SharedRun, share_input, shared_runs

ROW = "emulated:rowwise_e4m3"
FP8 = (ROW, ROW, ROW)
NAMES = ("q", "k", "v")


class Attention(nn.Module):
    """x [B, S, 24] -> [B, S, 24], one head, v of another width, as foreign code writes it."""

    def __init__(self, *, bias: bool = False, features: int = 24) -> None:
        super().__init__()
        self.q = nn.Linear(features, 40, bias=bias)
        self.k = nn.Linear(features, 40, bias=False)
        self.v = nn.Linear(features, 17, bias=bias)
        self.o = nn.Linear(17, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.view(*q.shape[:-1], 2, 20).flatten(2)
        return self.o((q @ k.mT).softmax(-1) @ v.relu_())


class Odd(nn.Module):
    """q, k and v of what `call` says."""

    def __init__(self, call: Callable[[Odd, torch.Tensor], torch.Tensor], *, features: int = 24) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(features, width, bias=False) for width in (32, 32, 16))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


def group_of(model: nn.Module, *, dense: tuple[str, ...] = ()) -> SharedInput:
    layers = {name: model.get_submodule(name) for name in NAMES}
    return SharedInput(
        in_features=layers["q"].in_features,
        branches=tuple(
            Branch(path=n, out_features=m.out_features, bias=m.bias is not None, dense=n in dense)
            for n, m in layers.items()
        ),
    )


def twins(
    model: nn.Module, candidates: tuple[str, str, str] = FP8, **options: tuple[str, ...]
) -> tuple[nn.Module, nn.Module, SharedRun]:
    """The model with q, k and v as one; the same in FP8, layer by layer; and the group."""
    for name in NAMES:
        convert_linear(model.get_submodule(name), path=name, candidates=candidates)
    apart = copy.deepcopy(model)
    return model, apart, share_input(model, group_of(model, **options))


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    """The same FP8 products, which a wider GEMM adds up in another order: a step of bf16, where it rounds."""
    step = 2.0**-7 if left.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(left, right, rtol=step, atol=step)


def assert_same_grads(left: nn.Module, right: nn.Module) -> None:
    for name, grad in grads(right).items():
        mine = left.get_parameter(name).grad
        assert (mine is None) == (grad is None), name
        if grad is not None:
            assert_same(mine, grad)


def fake(hp: torch.Tensor, gemm: Gemm, side: int) -> torch.Tensor:
    casts = RECIPES["rowwise_e4m3"].casts(gemm)
    assert casts is not None
    return dequantize(quantize(hp, casts[side]))


@pytest.mark.parametrize(
    ("rows", "features", "widths"), [(33, 13, (479, 3, 64)), (1, 100, (16, 16)), (7, 1, (5, 9))]
)
def test_forward_and_every_gradient_match_the_twin(rows: int, features: int, widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(features, n, bias=n != 16) for n in widths)
    for place, layer in enumerate(model):
        convert_linear(layer, path=str(place), candidates=FP8)
    branches = [Branch(path=str(p), out_features=n, bias=n != 16) for p, n in enumerate(widths)]
    share_input(model, SharedInput(in_features=features, branches=tuple(branches)))
    x = torch.randn(rows, features, requires_grad=True)
    outputs = [layer(x) for layer in model]
    given = [torch.randn(rows, n) * 4.0**-place for place, n in enumerate(widths)]
    torch.autograd.backward(outputs, given)
    weights = [layer.weight.detach() for layer in model]
    wide, all_given = torch.cat(weights), torch.cat(given, 1)
    # float32 sums of the same products in another order.
    close = {"rtol": 1e-4, "atol": 1e-4}
    for layer, weight, output, grad in zip(model, weights, outputs, given, strict=True):
        expected = fake(x.detach(), Gemm.OUTPUT, 0) @ fake(weight, Gemm.OUTPUT, 1).t()
        if layer.bias is not None:
            expected = expected + layer.bias.detach()
            torch.testing.assert_close(layer.bias.grad, grad.sum(0), **close)
        torch.testing.assert_close(output, expected, **close)
        grad_weight = fake(grad.t(), Gemm.GRAD_WEIGHT, 0) @ fake(x.detach().t(), Gemm.GRAD_WEIGHT, 1).t()
        torch.testing.assert_close(layer.weight.grad, grad_weight, **close)
    grad_input = fake(all_given, Gemm.GRAD_INPUT, 0) @ fake(wide.t(), Gemm.GRAD_INPUT, 1).t()
    torch.testing.assert_close(x.grad, grad_input, **close)
    # Each operand is rounded once, 31.5 dB for normal data: together 28.5, and 3 dB for so few numbers.
    assert rows < 7 or features == 1 or sqnr_db(x.grad, all_given @ wide) > 25.5


def test_rows_of_one_matrix_quantize_as_those_of_its_parts() -> None:
    parts = [torch.randn(n, 33) * 10.0**n for n in (3, 1, 8)]
    cast = RECIPES["rowwise_e4m3"].casts(Gemm.OUTPUT)[1]
    whole, several = quantize(torch.cat(parts), cast), [quantize(part, cast) for part in parts]
    assert torch.equal(whole.scale, torch.cat([part.scale for part in several]))
    assert torch.equal(whole.data.view(torch.uint8), torch.cat([p.data.view(torch.uint8) for p in several]))


@pytest.mark.parametrize(("octaves", "least"), [(0, 28.4), (12, 28.2), (14, 23.0)])
def test_what_a_branch_with_small_weights_loses_of_the_gradient(octaves: int, least: float) -> None:
    """The worst case: it alone has gradients, and the scales of the weights are the other branch's."""
    torch.manual_seed(0)
    grad, weights = torch.randn(128, 256), torch.randn(512, 128)
    weights[256:] *= 2.0**-octaves
    wide = torch.cat([torch.zeros_like(grad), grad], 1)
    found = fake(wide, Gemm.GRAD_INPUT, 0) @ fake(weights.t(), Gemm.GRAD_INPUT, 1).t()
    assert least < sqnr_db(found, grad @ weights[256:]) < 29.0


@pytest.mark.parametrize("bias", [False, True])
def test_as_one_is_as_one_by_one_but_for_the_summed_gradient(bias: bool) -> None:
    torch.manual_seed(0)
    model, apart, run = twins(Attention(bias=bias), dense=("v",))
    x = torch.randn(3, 5, 24, requires_grad=True)
    y, expected = model(x), apart(x)
    assert_same(y, expected)
    (grad,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
    expected.square().sum().backward()
    x.grad = None
    y.square().sum().backward()
    assert_same_grads(model, apart)
    assert sqnr_db(x.grad, grad) > 25  # two times two roundings apart: 31.5 - 6 dB
    assert (run.together, run.alone) == (3, 0)
    with torch.no_grad():
        assert_same(model.eval()(x), expected)


def test_one_quantization_and_one_gemm_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def counted(hp: torch.Tensor, **sides: object) -> object:
        shapes.append(tuple(hp.shape))
        return quantizer.quantize_pair(hp, **sides)

    monkeypatch.setattr(ops, "quantize_pair", counted)
    model, apart, _ = twins(Attention())
    x = torch.randn(2, 5, 24, requires_grad=True)
    reset_kernel_runs()
    model(x).sum().backward()
    assert kernel_runs() == {(ROW, gemm): 1 for gemm in ("output", "grad_input", "grad_weight")}
    assert shapes == [(10, 24), (97, 24), (10, 97)]  # x, the weights, the gradients
    assert {site: counts["runs"] for site, counts in health_of(model).items()} == dict.fromkeys(
        (f"{name}/{gemm}" for name in NAMES for gemm in Gemm), 1
    )
    shapes.clear()
    reset_kernel_runs()
    apart(x).sum().backward()
    assert set(kernel_runs().values()) == {3}
    assert len(shapes) == 9


def test_gemms_in_high_precision_and_only_some_in_fp8() -> None:
    for candidates in ((ROW, "hp", ROW), (ROW, ROW, "hp"), (ROW, "hp", "hp")):
        model, apart, _ = twins(Attention(), candidates)
        x = torch.randn(2, 5, 24, requires_grad=True)
        expected = torch.autograd.grad(apart(x).sum(), [x, *apart.parameters()])
        found = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        for mine, grad in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(mine, grad)
        assert sqnr_db(found[0], expected[0]) > (25 if candidates[1] == ROW else 100)


def test_unused_frozen_and_an_input_without_gradient() -> None:
    model, apart, _ = twins(
        Odd(lambda m, x: m.q(x).sum() + 0 * m.k(x).detach().sum() + m.v(x).square().sum())
    )
    x = torch.randn(6, 24, requires_grad=True)
    model(x).backward()
    mine, x.grad = x.grad, None
    apart(x).backward()
    assert model.k.weight.grad is None
    assert_same_grads(model, apart)
    assert sqnr_db(mine, x.grad) > 25

    x = torch.randn(2, 6, 24, requires_grad=True)
    model, apart, _ = twins(Attention())
    for each in (model, apart):
        each.k.weight.requires_grad_(False)
        each(x).sum().backward()
    assert_same_grads(model, apart)

    model, apart, _ = twins(Attention())
    reset_kernel_runs()
    model(x.detach()).sum().backward()
    assert (ROW, "grad_input") not in kernel_runs()
    apart(x.detach()).sum().backward()
    assert_same_grads(model, apart)
    for name in NAMES:
        model.get_submodule(name).weight.requires_grad_(False)
    reset_kernel_runs()
    model(x).sum().backward()
    assert (ROW, "grad_weight") not in kernel_runs()


def test_no_rows_and_no_numbers() -> None:
    model, _, run = twins(Odd(lambda m, x: torch.cat([m.q(x), m.k(x), m.v(x)], -1)))
    empty = torch.randn(0, 24, requires_grad=True)
    assert model(empty).shape == (0, 80)
    model(empty).sum().backward()
    assert empty.grad.shape == (0, 24)
    assert not model.k.weight.grad.any()
    assert run.together == 6

    x = torch.randn(5, 24, requires_grad=True)
    spoilt = x.detach().clone()
    spoilt[2, 3] = torch.nan
    assert model(spoilt).isnan().any(1).tolist() == [False, False, True, False, False]
    y = model(x)
    given = torch.ones_like(y)
    given[1, 40] = torch.inf  # of k
    model.zero_grad()
    y.backward(given)
    assert x.grad.isnan().any(1).tolist() == [False, True, False, False, False]
    assert model.k.weight.grad.isnan().any(1).nonzero().tolist() == [[8]]
    assert not model.q.weight.grad.isnan().any()
    with torch.no_grad():
        model.v.weight[4, 0] = torch.nan
        assert model(x).isnan().any(0).nonzero().tolist() == [[68]]
    assert health_of(model)["q/output"]["bad_a"]


def test_outputs_are_columns_unless_dense_and_can_be_changed_in_place() -> None:
    def call(model: Odd, x: torch.Tensor) -> torch.Tensor:
        q, k, v = model.q(x), model.k(x), model.v(x)
        assert (q.stride(), k.is_contiguous(), v.stride()) == ((80, 1), True, (80, 1))
        before = k.clone()
        q.mul_(2.0).relu_()
        assert torch.equal(k, before)
        return q.sum() + k.view(-1).square().sum() + v.sum()

    def dense(model: Odd, x: torch.Tensor) -> torch.Tensor:
        return model.q(x).mul_(2.0).relu_().sum() + model.k(x).view(-1).square().sum() + model.v(x).sum()

    model, apart, _ = twins(Odd(call), dense=("k",))
    apart.call = dense
    x = torch.randn(6, 24)
    for each in (model, apart):
        each(x).backward()
    assert_same_grads(model, apart)

    odd, _, _ = twins(Odd(lambda m, x: torch.tensor([y.is_contiguous() for y in (m.q(x), m.k(x), m.v(x))])))
    assert not odd(x).any()
    odd.v.out_features, odd.v.weight = 9, nn.Parameter(torch.randn(9, 24))
    assert odd(x).all()  # rows of 73 numbers begin anywhere


def changed_input(model: Odd, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    q = model.q(x)
    x.add_(1.0)
    return q.sum() + model.k(x).sum() + model.v(x).sum()


def other_input(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return model.q(x).sum() + model.k(x * 1).sum() + model.v(x).sum()


def changed_weight(model: Odd, x: torch.Tensor) -> torch.Tensor:
    q = model.q(x)
    with torch.no_grad():
        model.k.weight.mul_(2.0)
    return q.sum() + model.k(x).sum() + model.v(x).sum()


def other_mode(model: Odd, x: torch.Tensor) -> torch.Tensor:
    q = model.q(x)
    with torch.no_grad():
        k = model.k(x)
    return q.sum() + k.sum() + model.v(x).sum()


def other_order(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return model.k(x).sum() + model.q(x).sum() + model.v(x).sum()


def twice(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return model.q(x).sum() + model.k(x).sum() + model.k(x).square().sum() + model.v(x).sum()


@pytest.mark.parametrize(
    ("call", "alone"),
    [
        (changed_input, 2),
        (other_input, 1),
        (changed_weight, 1),
        (other_mode, 1),
        (other_order, 1),
        (twice, 1),
    ],
)
def test_another_call_than_planned_is_computed_by_itself(
    call: Callable[[Odd, torch.Tensor], torch.Tensor], alone: int
) -> None:
    model, apart, run = twins(Odd(call))
    x = torch.randn(6, 24)
    y, expected = model(x), apart(x)
    torch.testing.assert_close(y, expected)  # sums of columns and of rows, in another order
    y.backward()
    expected.backward()
    assert_same_grads(model, apart)
    assert run.alone == alone
    assert run._kept is None


def test_nothing_is_kept() -> None:
    model, _, run = twins(Odd(lambda m, x: m.q(x).sum() + m.v(x).sum()))
    x = torch.randn(6, 24)
    model(x)
    assert run._kept is None  # k was not asked for: the module that holds the layers has returned

    seen: list[weakref.ref[torch.Tensor]] = []
    whole, _, run = twins(Odd(lambda m, x: m.q(x).sum() + m.k(x).sum() + keep(m.v(x))))

    def keep(v: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(v))
        return v.sum()

    whole(x)
    gc.collect()
    assert seen[0]() is None
    fresh = torch.randn(6, 24)
    whole.q(fresh)
    assert run._kept is not None
    del fresh
    assert run._kept is None  # nobody can ask for it any more
    whole.q(x).sum().backward()
    assert run._kept is None


def region(model: Odd, x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    def inside(x: torch.Tensor) -> torch.Tensor:
        return (model.q(x) * model.k(x)).sum() + model.v(x).sum()

    return checkpoint(inside, x, use_reentrant=reentrant)


def only_k(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return (model.q(x) * checkpoint(model.k, x, use_reentrant=False)).sum() + model.v(x).sum()


def only_q(model: Odd, x: torch.Tensor) -> torch.Tensor:
    q = checkpoint(lambda x: model.q(x).sin(), x, use_reentrant=False)
    return (q * model.k(x)).sum() + model.v(x).sum()


@pytest.mark.parametrize(
    ("call", "outputs"),
    [
        (lambda m, x: region(m, x, reentrant=False), 2),
        (lambda m, x: region(m, x, reentrant=True), 2),
        (only_k, 3),
        (only_q, 4),
    ],
)
def test_activation_checkpoints(call: Callable[[Odd, torch.Tensor], torch.Tensor], outputs: int) -> None:
    model, apart, run = twins(Odd(call))
    x = torch.randn(6, 24, requires_grad=True)
    reset_kernel_runs()
    model(x).backward()
    assert kernel_runs()[ROW, "output"] == outputs
    apart(x).backward()
    assert_same_grads(model, apart)
    assert run._kept is None


def test_a_compiled_model_runs_them_as_one() -> None:
    def mixed(model: Odd, x: torch.Tensor) -> torch.Tensor:
        q, k = model.q(x), model.k(x)
        with torch.no_grad():
            v = model.v(x)
        return (q.relu_() * k).sum() + v.sum()

    def broken(model: Odd, x: torch.Tensor) -> torch.Tensor:
        q = model.q(x)
        torch._dynamo.graph_break()
        return (q.relu_() * model.k(x)).sum() + model.v(x).mul_(2.0).sum()

    cases = [
        (Attention(bias=True), 1, NAMES, True),
        (Odd(mixed), 2, "qk", True),
        (Odd(broken), 1, NAMES, False),
    ]
    for plain, runs, used, whole in cases:
        model, apart, run = twins(plain)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=whole)
        x = torch.randn(2, 6, 24, requires_grad=True)
        expected = apart(x)
        expected.square().sum().backward()
        for _ in range(2):
            model.zero_grad()
            reset_kernel_runs()
            y = compiled(x)
            y.square().sum().backward()
            assert kernel_runs()[ROW, "output"] == runs
            torch.testing.assert_close(y, expected)
        for name in used:
            assert_same(model.get_submodule(name).weight.grad, apart.get_submodule(name).weight.grad)
        assert run._kept is None


def test_autocast_accumulation_and_leading_sides() -> None:
    model, apart, run = twins(Attention())
    x = torch.randn(2, 3, 5, 24)
    for _ in range(2):
        for each in (model, apart):
            with torch.autocast("cpu", torch.bfloat16):
                each(x.flatten(0, 1)).float().square().sum().backward()
    assert_same_grads(model, apart)
    assert run.together == 6
    with pytest.raises(ValueError, match="the layer takes 24"):
        model(x[..., :20])
    with pytest.raises(TypeError, match="cast one"):
        model(x[0].double())


def test_layers_that_are_used_otherwise_stop_to_run_as_one() -> None:
    model, apart, run = twins(Odd(lambda m, x: m.q(x).sum() + m.k(x).sum() + m.v(x * 1).sum()))
    x = torch.randn(6, 24)
    for _ in range(7):
        model(x)
    with pytest.warns(UserWarning, match="each computes by itself"):
        model(x)
    run.together = 0
    torch.testing.assert_close(model(x), apart(x))
    assert run.together == 0


def test_copies_state_dicts_and_reverting() -> None:
    plain = Attention(bias=True)
    keys, parameters = list(plain.state_dict()), list(plain.parameters())
    model, apart, run = twins(plain)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert "shares its input: q+k+v" in repr(model)
    x = torch.randn(2, 5, 24)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        (theirs,) = shared_runs(other).values()
        assert theirs.layers[0] is other.q
        assert theirs is not run
        theirs.together = 0
        assert_same(other(x), apart(x))
        assert theirs.together == 3
    fresh = Attention(bias=True)
    model.load_state_dict(fresh.state_dict())
    apart.load_state_dict(fresh.state_dict())
    assert_same(model(x), apart(x))
    model.to(torch.bfloat16)
    assert_same(model(x.bfloat16()), apart.to(torch.bfloat16)(x.bfloat16()))
    for layer in fp8_linears(model).values():
        restore_linear(layer)
    assert not model._forward_hooks
    assert all(type(module) is nn.Linear for module in (model.q, model.k, model.v))
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("loka")]


def test_refusals() -> None:
    model = Attention()
    with pytest.raises(NotConverted, match="q is a Linear"):
        share_input(model, group_of(model))
    for name, candidates in zip(NAMES, (FP8, (ROW, "hp", ROW), FP8), strict=True):
        convert_linear(model.get_submodule(name), path=name, candidates=candidates)
    group = group_of(model)
    with pytest.raises(NotConverted, match="k differs from q"):
        share_input(model, group)
    with pytest.raises(NotConverted, match="w is a NoneType"):
        share_input(
            model, replace(group, branches=(*group.branches, Branch(path="w", out_features=9, bias=False)))
        )
    other = Attention()
    for name in NAMES:
        convert_linear(other.get_submodule(name), path=name, candidates=("hp", ROW, ROW))
    with pytest.raises(NotConverted, match="no quantized input"):
        share_input(other, group_of(other))
    model, _, _ = twins(Attention())
    with pytest.raises(NotConverted, match="already"):
        share_input(model, group_of(model))
    model, _, _ = twins(Attention())
    model.k.weight = nn.Parameter(model.k.weight.detach().double())  # no longer one matrix: by themselves
    reset_kernel_runs()
    model.q(torch.randn(2, 24))
    assert kernel_runs() == {(ROW, "output"): 1}


@pytest.mark.gpu
def test_on_a_gpu_in_a_graph() -> None:
    device, row = torch.device("cuda"), "torch:rowwise_e4m3"
    torch.manual_seed(0)
    model, apart, _ = twins(Attention(features=64).to(device, torch.bfloat16), (row, row, row))
    x = torch.randn(4, 48, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step(each: nn.Module) -> torch.Tensor:
        x.grad = None
        each.zero_grad()
        out = each(x)
        out.float().square().mean().backward()
        return out

    expected = step(apart).detach().clone()
    wanted = {name: grad.clone() for name, grad in grads(apart).items() if grad is not None}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(model)
    graph.replay()
    # The same products in another tiling: float32 sums differ by ulps, which bf16 rounds to at most a step.
    assert sqnr_db(out.float(), expected.float()) > 40
    for name, grad in wanted.items():
        assert sqnr_db(model.get_parameter(name).grad.float(), grad.float()) > 40


def test_losses_of_several_branches_go_backward_together_or_say_so() -> None:
    torch.manual_seed(0)
    model, _, run = twins(Odd(lambda m, x: (m.q(x), m.k(x), m.v(x))))
    x = torch.randn(6, 24)
    q, k, _ = model(x)
    q.sum().backward()
    with pytest.raises(
        RuntimeError, match=rf"{run.group.name.replace('+', '.')} run as one.*retain_graph=True"
    ):
        k.sum().backward()
    q, k, _ = model(x)
    q.sum().backward(retain_graph=True)
    k.sum().backward()
    assert model.k.weight.grad.abs().sum() > 0
