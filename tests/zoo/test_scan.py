import pytest
import torch

import loka
from loka.zoo import build
from loka.zoo.history import HistoryTable
from loka.zoo.presets import _PRESETS
from loka.zoo.sequences.scan import ScanLayer, chunked_scan


def recurrence(x, log_a, b, c):
    state, found = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[2]), []
    for t in range(x.shape[1]):
        state = log_a[:, t, :, None, None].exp() * state + torch.einsum("bhp,bn->bhpn", x[:, t], b[:, t])
        found.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (4, 4), (7, 3), (13, 1), (13, 5), (3, 64)])
def test_a_chunked_scan_is_the_recurrence(length, chunk):
    """float64, forward and all gradients; decays to e^-40, which ratios of products would lose."""
    close = {"rtol": 1e-10, "atol": 1e-10}
    x, b, c = (torch.randn(2, length, *rest, dtype=torch.float64) for rest in ((3, 4), (5,), (5,)))
    log_a = -torch.logspace(-3, 1.6, length, dtype=torch.float64).expand(2, 3, -1).transpose(1, 2)
    inputs = [t.clone().requires_grad_() for t in (x, log_a, b, c)]
    both = chunked_scan(*inputs, chunk=chunk), recurrence(*inputs)
    torch.testing.assert_close(*both, **close)
    weight = torch.randn_like(x)
    for pair in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in both), strict=True):
        torch.testing.assert_close(*pair, **close)


def test_the_layer_is_causal():
    layer = ScanLayer(8, heads=2, value_dim=3, state_dim=4, chunk=4).double()
    assert torch.nn.functional.softplus(layer.step).tolist() == pytest.approx([1e-3, 1e-1], rel=1e-5)
    x, sees = torch.randn(2, 9, 8, dtype=torch.float64), torch.empty(0)
    changed = x.index_copy(1, torch.tensor([5]), torch.randn(2, 1, 8, dtype=torch.float64))
    moved = (layer(changed, sees) - layer(x, sees)).abs().amax(dim=(0, 2)) > 1e-12
    assert moved.tolist() == [False] * 5 + [True] * 4


def test_its_projections_are_sites_and_the_scan_stays_bf16():
    model = build("hstu", size="hybrid", dense_features=5, vocab_sizes=(4, 9), history=HistoryTable(column=1))
    ran = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if func is torch.einsum:
                ran.append(found.dtype)
            return found

    inputs = torch.randn(8, 5), torch.ones(8, 2).long(), torch.ones(8, 20).long(), torch.arange(8)
    with loka.Probe(model, every=1) as probe, torch.autocast("cpu", dtype=torch.bfloat16), Watched():
        model(*inputs).float().mean().backward()
    stats = probe.stats()
    sites = [site for site in stats.layers if site.startswith("layers.")]
    assert sites == ["layers.0.into", "layers.0.out", "layers.1.uvqk", "layers.1.out"]
    assert ran == [torch.bfloat16] * 5
    assert any("layers.0" in line and "no site" in line for line in stats.coverage.lines())


@pytest.mark.parametrize("wrong", [(2,), (0, 1)])
def test_one_layer_is_left_to_attention(wrong, monkeypatch):
    monkeypatch.setitem(_PRESETS["hstu", "hybrid"], "scans", wrong)
    with pytest.raises(ValueError, match="of 2 layers: count from 0, and leave one to attention"):
        build("hstu", size="hybrid", dense_features=5, vocab_sizes=(4, 9))
