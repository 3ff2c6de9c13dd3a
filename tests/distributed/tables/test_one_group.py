import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loka.distributed.tables.one_group import AdaGrad, as_one_group

ROWS, WIDTH = 40, 12


def stepped(w, v, gradient, adagrad):
    v = v + gradient.square().mean(dim=1)
    root = v.sqrt() + adagrad.eps
    return w - adagrad.lr * gradient / torch.where(root > 0, root, 1)[:, None], v


def trained(gradients, w0, v0, adagrad):
    """Replicas by themselves: gradients [K, R, rows, D], rows of zeros where none has looked up."""
    changes = []
    for of_one in gradients.unbind(1):
        w, v = w0, v0
        for gradient in of_one:
            w, v = stepped(w, v, gradient, adagrad)
        changed = (of_one != 0).any(dim=2).any(dim=0).nonzero().flatten()
        changes.append((changed, [(w - w0)[changed], (v - v0)[changed]]))
    return changes


def one_group(gradients, w, v, adagrad):
    for gradient in gradients.mean(dim=1):
        w, v = stepped(w, v, gradient, adagrad)
    return w, v


def drawn(seed, steps, replicas, *, agreement=0.0, looked_up=0.7, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    own = torch.randn(steps, replicas, rows, WIDTH, **draw)
    common = torch.randn(1, 1, rows, WIDTH, **draw)
    kept = torch.rand(steps, replicas, rows, 1, **draw) < looked_up
    return (own + agreement * common) * kept, torch.randn(rows, WIDTH, **draw), torch.rand(rows, **draw)


@given(
    seed=st.integers(0, 1000),
    replicas=st.integers(1, 4),
    agreement=st.sampled_from([0.0, 1.0, 100.0]),
    looked_up=st.sampled_from([0.3, 1.0]),
    momentum=st.sampled_from([0.0, 1.0, 1e4]),
    eps=st.sampled_from([0.0, 1e-8, 1.0]),
)
def test_one_step_is_one_groups(seed, replicas, agreement, looked_up, momentum, eps):
    """In float64: a difference of V and of w leaves 2^-52 of them, 1e4 at most, and D / lr of that."""
    adagrad = AdaGrad(lr=0.1, eps=eps)
    gradients, w0, v0 = drawn(seed, 1, replicas, agreement=agreement, looked_up=looked_up)
    v0 = v0 * momentum
    w, v = as_one_group([w0, v0], trained(gradients, w0, v0, adagrad), adagrad, 1)
    right_w, right_v = one_group(gradients, w0, v0, adagrad)
    torch.testing.assert_close(v, right_v, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(w, right_w, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("looked_up", [0.1, 1.0])
@pytest.mark.parametrize("agreement", [0.0, 0.5, 2.0])
def test_of_more_steps_momentum_is_right_in_the_mean(replicas, looked_up, agreement):
    """4,000 rows; V0 is large, so that rates stay as they are in a window. The mean over replicas is up to four
    times as large, and c = R takes up to as much too much off."""
    adagrad = AdaGrad(lr=0.1, eps=1e-8)
    gradients, w0, v0 = drawn(1, 8, replicas, agreement=agreement, looked_up=looked_up, rows=4000)
    v0 = v0 + 1e4
    changes = trained(gradients, w0, v0, adagrad)
    w, v = as_one_group([w0, v0], changes, adagrad, 8)
    right_w, right_v = one_group(gradients, w0, v0, adagrad)
    assert abs(float((v - v0).sum() / (right_v - v0).sum()) - 1) < 0.02
    torch.testing.assert_close(w, right_w, rtol=0, atol=1e-3 * float((right_w - w0).abs().max()))


def test_steps_that_cancel_are_no_longer_than_one_groups_could_be():
    """Opposite gradients with the rounding of eight bits: V is nearly zero then, and what is left points anywhere.
    A step of row-wise AdaGrad moves a row by at most lr sqrt(D), and the codes of a replica by 5 sigma more."""
    adagrad = AdaGrad(lr=0.1, eps=1e-8)
    g = torch.randn(1, 1, ROWS, WIDTH)
    gradients = torch.cat([g, -g], dim=1)
    w0, v0 = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS)
    for steps in (1, 8):
        (at, (dw, dv)), other = trained(gradients, w0, v0, adagrad)
        rounded = dw * (1 + 2.0**-5 * torch.randn_like(dw))
        w, v = as_one_group([w0, v0], [(at, [rounded, dv]), other], adagrad, steps)
        assert (v > 0).all()
        assert (w.norm(dim=1) <= 1.2 * adagrad.lr * WIDTH**0.5).all()


def test_a_rate_of_zero_and_a_number_that_is_none():
    w0, v0, at = torch.ones(3, WIDTH), torch.zeros(3, 1), torch.tensor([0, 1])
    still = [(at, [torch.zeros(2, WIDTH), torch.ones(2, 1)])] * 2
    w, v = as_one_group([w0, v0], still, AdaGrad(lr=0.0, eps=0.0), 1)
    assert torch.equal(w, w0)
    assert v.flatten().tolist() == [0.5, 0.5, 0.0], "as of independent gradients"
    bad = torch.full((2, WIDTH), 0.1)
    bad[1, 2] = torch.nan
    w, v = as_one_group([w0, v0], [(at, [bad, torch.ones(2, 1)]), still[0]], AdaGrad(lr=0.1, eps=1e-8), 1)
    assert w.isfinite().all(dim=1).tolist() == [True, False, True]
    assert v.isfinite().flatten().tolist() == [True, False, True]


def test_numbers_at_the_ends_of_float32():
    """V of 1e18 squared is finite, times D it is not; a V beyond float32 freezes its row, as in one process."""
    adagrad = AdaGrad(lr=0.1, eps=1e-8)
    w0, v0, at = torch.zeros(3, 128), torch.tensor([0.0, 0.0, torch.inf]), torch.arange(3)
    g = torch.full((3, 128), 1e18)
    g[1] = 1e20
    w, v = stepped(w0, v0, g, adagrad)
    change = (at, [w - w0, v - v0])
    made_w, made_v = as_one_group([w0, v0], [change, change], adagrad, 1)
    torch.testing.assert_close(made_w, w, rtol=1e-5, atol=0)
    torch.testing.assert_close(made_v, v, rtol=1e-5, atol=0)
