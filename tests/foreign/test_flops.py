import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .flops import Flops, count_flops


class Held(nn.Module):
    """Parameters of the given shapes, in attributes a, b, ..."""

    def __init__(self, *shapes):
        super().__init__()
        for name, shape in zip("abcd", shapes, strict=False):
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def counted(run, *shapes):
    held = Held(*shapes)
    return count_flops(held, lambda: run(held))


X = torch.randn(5, 3)  # M = 5, K = 3

WRITTEN = {
    "linear": (lambda m: F.linear(X, m.a), (7, 3), 2 * 5 * 3 * 7),
    "linear with bias": (lambda m: F.linear(X, m.a, torch.zeros(7)), (7, 3), 2 * 5 * 3 * 7),
    "linear of tokens": (lambda m: F.linear(torch.randn(5, 2, 3), m.a), (7, 3), 2 * 10 * 3 * 7),
    "linear of transposed tokens": (
        lambda m: F.linear(torch.randn(5, 3, 2).transpose(1, 2), m.a, torch.zeros(7)), (7, 3), 2 * 10 * 3 * 7,
    ),
    "at": (lambda m: X @ m.a, (3, 7), 2 * 5 * 3 * 7),
    "mm": (lambda m: torch.mm(X, m.a), (3, 7), 2 * 5 * 3 * 7),
    "weight first": (lambda m: torch.mm(m.a, X), (7, 5), 2 * 7 * 5 * 3),
    "addmm": (lambda m: torch.addmm(torch.zeros(7), X, m.a), (3, 7), 2 * 5 * 3 * 7),
    "matmul of columns": (lambda m: torch.matmul(m.a, torch.randn(5, 3, 1)), (3, 3), 2 * 5 * 3 * 3),
    "vector": (lambda m: X @ m.a, (3,), 2 * 5 * 3),
    "matrix by vector": (lambda m: m.a @ X[0], (7, 3), 2 * 7 * 3),
    "addmv": (lambda m: torch.addmv(torch.zeros(5), X, m.a), (3,), 2 * 5 * 3),
    "dot": (lambda m: X[0] @ m.a, (3,), 2 * 3),
    "bmm": (lambda m: torch.bmm(X.expand(4, 5, 3), m.a), (4, 3, 7), 2 * 4 * 5 * 3 * 7),
    "baddbmm": (
        lambda m: torch.baddbmm(torch.zeros(4, 1, 7), X.expand(4, 5, 3), m.a), (4, 3, 7), 2 * 4 * 5 * 3 * 7,
    ),
    "einsum of experts": (lambda m: torch.einsum("bi,eio->beo", X, m.a), (4, 3, 7), 2 * 4 * 5 * 3 * 7),
    "einsum of slots": (
        lambda m: torch.einsum("ecd,edf->ecf", torch.randn(4, 2, 3), m.a), (4, 3, 7), 2 * 4 * 2 * 3 * 7,
    ),
    "tensordot": (
        lambda m: torch.tensordot(torch.randn(5, 2, 3), m.a, dims=([-1], [0])), (3, 7), 2 * 10 * 3 * 7,
    ),
    "conv1d of one": (lambda m: F.conv1d(torch.randn(5, 3, 6), m.a), (7, 3, 1), 2 * 5 * 6 * 3 * 7),
    "conv1d": (lambda m: F.conv1d(torch.randn(5, 3, 6), m.a), (7, 3, 2), 2 * 5 * 5 * 7 * 3 * 2),
    "grouped conv1d": (lambda m: F.conv1d(torch.randn(5, 4, 6), m.a, groups=2), (8, 2, 1), 2 * 5 * 6 * 8 * 2),
    "conv2d": (lambda m: F.conv2d(torch.randn(2, 3, 4, 4), m.a, stride=2), (7, 3, 2, 2), 2 * 2 * 7 * 4 * 12),
    "transposed conv1d": (
        lambda m: F.conv_transpose1d(torch.randn(5, 3, 6), m.a), (3, 7, 2), 2 * 5 * 3 * 6 * 14,
    ),
    "rows": (lambda m: F.linear(X, m.a[2:6]), (7, 3), 2 * 5 * 3 * 4),
    "columns": (lambda m: F.linear(X, m.a[:, 1:4]), (7, 9), 2 * 5 * 3 * 7),
    "chunk": (lambda m: F.linear(X, m.a.chunk(2)[1]), (8, 3), 2 * 5 * 3 * 4),
    "split": (lambda m: F.linear(X, m.a.split([6, 2])[1]), (8, 3), 2 * 5 * 3 * 2),
    "transposed": (lambda m: F.linear(X, m.a.t()), (3, 7), 2 * 5 * 3 * 7),
    "viewed": (lambda m: F.linear(X, m.a.view(7, 3)), (21,), 2 * 5 * 3 * 7),
    "cast": (lambda m: F.linear(X.bfloat16(), m.a.to(torch.bfloat16)), (7, 3), 2 * 5 * 3 * 7),
    "cast, transposed and cloned": (
        lambda m: X.bfloat16() @ m.a.to(torch.bfloat16).t().contiguous(), (7, 3), 2 * 5 * 3 * 7,
    ),
    "detached": (lambda m: F.linear(X, m.a.detach()), (7, 3), 2 * 5 * 3 * 7),
    "data": (lambda m: F.linear(X, m.a.data), (7, 3), 2 * 5 * 3 * 7),
    "copied into a buffer": (lambda m: F.linear(X, torch.zeros(7, 3).copy_(m.a)), (7, 3), 2 * 5 * 3 * 7),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("written", WRITTEN)
def test_a_gemm_with_a_parameter(written, mode):
    run, shape, flops = WRITTEN[written]
    with mode():
        found = counted(run, shape)
    assert found == Flops(flops, flops, {"a": flops}, {}, {})


def test_autocast_casts_a_parameter_once_and_twice():
    def run(m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            F.linear(X, m.a)
            F.linear(X, m.a)

    assert counted(run, (7, 3)).by_parameter == {"a": 2 * 2 * 5 * 3 * 7}


def test_products_without_a_parameter():
    query = torch.randn(2, 4, 6, 8)  # B, H, L, E
    key, value = torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)

    def run(m):
        F.scaled_dot_product_attention(query, key, value)
        torch.bmm(torch.randn(4, 5, 3), torch.randn(4, 3, 2))
        F.linear(X, m.a)

    found = counted(run, (7, 3))
    attention, pairs, owned = 2 * 2 * (2 * 4 * 6 * 9 * 8), 2 * 4 * 5 * 3 * 2, 2 * 5 * 3 * 7
    assert found.total == attention + pairs + owned
    assert found.with_parameter == owned
    assert sorted(found.without_parameter.values()) == sorted([attention, pairs])
    assert not found.unaccounted


@pytest.mark.parametrize(
    "weight",
    [
        lambda m: m.a * 2,
        lambda m: m.a.clone().mul_(2),
        lambda m: torch.zeros(7, 3).copy_(m.a).copy_(torch.ones(7, 3)),
        lambda m: torch.cat([m.a[:3], torch.ones(4, 3)]),
    ],
)
def test_a_computed_weight_is_no_parameter(weight):
    found = counted(lambda m: F.linear(X, weight(m)), (7, 3))
    assert (found.total, found.with_parameter) == (2 * 5 * 3 * 7, 0)


def test_a_bias_of_any_shape_is_no_operand():
    found = counted(lambda m: torch.addmm(m.a, X, torch.randn(3, 7)), (5, 7))
    assert (found.with_parameter, found.without_parameter) == (0, {"addmm": 2 * 5 * 3 * 7})


def test_several_parameters_in_one_matrix_and_in_one_product():
    joined = counted(lambda m: F.linear(X, torch.cat([m.a, m.b])), (4, 3), (2, 3))
    assert joined.by_parameter == {"a+b": 2 * 5 * 3 * 6}
    product = counted(lambda m: X @ (m.a @ m.b), (3, 4), (4, 7))
    assert product.by_parameter == {"a+b": 2 * 3 * 4 * 7}
    assert product.without_parameter == {"mm": 2 * 5 * 3 * 7}
    low_rank = counted(lambda m: X @ m.a @ m.b, (3, 4), (4, 7))
    assert low_rank.by_parameter == {"a": 2 * 5 * 3 * 4, "b": 2 * 5 * 4 * 7}


def test_parameters_in_one_storage_are_told_apart():
    flat = torch.randn(7 * 3 + 4 * 3)
    model = nn.Module()
    model.first, model.second = nn.Parameter(flat[:21].view(7, 3)), nn.Parameter(flat[21:].view(4, 3))
    found = count_flops(model, lambda: (F.linear(X, model.second), F.linear(X, model.first)))
    assert found.by_parameter == {"second": 2 * 5 * 3 * 4, "first": 2 * 5 * 3 * 7}


def test_an_address_that_is_used_again_is_no_copy():
    def run(m):
        for _ in range(20):
            m.a.to(torch.bfloat16)  # freed at once, were it not kept
            F.linear(X.bfloat16(), torch.ones(7, 3, dtype=torch.bfloat16))

    assert counted(run, (7, 3)).with_parameter == 0


def test_tied_parameters_have_their_first_name():
    model = nn.Sequential(nn.Embedding(9, 3), nn.Linear(3, 9, bias=False))
    model[1].weight = model[0].weight
    found = count_flops(model, lambda: model(torch.arange(4)))
    assert found == Flops(2 * 4 * 3 * 9, 2 * 4 * 3 * 9, {"0.weight": 2 * 4 * 3 * 9}, {}, {})


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_an_lstm_by_its_two_weights(mode):
    model = nn.LSTM(3, 4)
    with mode():
        found = count_flops(model, lambda: model(torch.randn(6, 2, 3)))
    assert found.by_parameter == {"weight_ih_l0": 2 * 12 * 3 * 16, "weight_hh_l0": 2 * 12 * 4 * 16}
    assert not found.unaccounted


@pytest.mark.parametrize("padded", [False, True])
def test_the_fused_encoder_layer_of_evaluation(padded):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    mask = torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.inference_mode():
        found = count_flops(model, lambda: model(torch.randn(2, 5, 8), src_key_padding_mask=mask if padded else None))
    tokens, pairs = (8, 25 + 9) if padded else (10, 25 + 25)
    assert found.with_parameter == 2 * tokens * (3 * 64 + 64 + 2 * 8 * 16)
    assert found.total - found.with_parameter == 4 * 8 * pairs
    assert len(found.by_parameter) == 4
    assert not found.unaccounted


def test_a_backward_has_two_gemms_for_each():
    model = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2))
    x = X.clone().requires_grad_()
    found = count_flops(model, lambda: model(x).sum().backward())
    forward = 2 * 5 * (3 * 7 + 7 * 2)
    assert found.total == 3 * forward
    assert found.with_parameter == 2 * forward  # grad_weight reads activations alone


def test_what_is_not_known_is_named():
    model = nn.Bilinear(3, 4, 2)
    found = count_flops(model, lambda: model(torch.randn(5, 3), torch.randn(5, 4)))
    assert found.unaccounted == {"_trilinear": 1}
