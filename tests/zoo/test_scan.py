"""The chunked scan is the recurrence, and its projections alone are sites."""

import pytest
import torch

import loka
from loka.zoo import HSTU, Front, build
from loka.zoo.history import HistoryTable
from loka.zoo.scan import ScanLayer, chunked_scan, decays


def recurrence(x: torch.Tensor, log_a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    state = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[2])
    found = []
    for t in range(x.shape[1]):
        state = log_a[:, t, :, None, None].exp() * state + torch.einsum("bhp,bn->bhpn", x[:, t], b[:, t])
        found.append(torch.einsum("bhpn,bn->bhp", state, c[:, t]))
    return torch.stack(found, dim=1)


@pytest.mark.parametrize(("length", "chunk"), [(1, 4), (4, 4), (7, 3), (13, 1), (13, 5), (3, 64)])
def test_a_chunked_scan_is_the_recurrence(length: int, chunk: int) -> None:
    """float64, forward and all gradients; decays to e^-40, which ratios of products would lose."""
    x, b, c = (torch.randn(2, length, *rest, dtype=torch.float64) for rest in ((3, 4), (5,), (5,)))
    log_a = -torch.logspace(-3, 1.6, length, dtype=torch.float64).expand(2, 3, -1).transpose(1, 2)
    inputs = [t.clone().requires_grad_() for t in (x, log_a, b, c)]
    found, expected = chunked_scan(*inputs, chunk=chunk), recurrence(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_the_layer_is_causal_and_forgets_as_its_rates_say() -> None:
    layer = ScanLayer(8, heads=2, value_dim=3, state_dim=4, chunk=4).double()
    assert torch.nn.functional.softplus(layer.step).tolist() == pytest.approx([1e-3, 1e-1], rel=1e-5)
    x, sees = torch.randn(2, 9, 8, dtype=torch.float64), torch.empty(0)
    changed = x.clone()
    changed[:, 5] = torch.randn(2, 8)
    moved = (layer(changed, sees) - layer(x, sees)).abs().amax(dim=(0, 2)) > 1e-12
    assert moved.tolist() == [False] * 5 + [True] * 4
    left = decays(torch.full((4,), -0.5))
    assert left.tril().equal(left)
    assert left[3].tolist() == pytest.approx([torch.tensor(-0.5 * i).exp().item() for i in (3, 2, 1, 0)])


def test_its_projections_are_sites_and_the_scan_stays_bf16() -> None:
    model = build("hstu", size="hybrid", dense_features=5, vocab_sizes=(4, 9), history=HistoryTable(column=1))
    inputs = torch.randn(8, 5), torch.ones(8, 2).long(), torch.ones(8, 20).long(), torch.arange(8)
    ran = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            if func is torch.einsum:
                ran.append(found.dtype)
            return found

    with loka.Probe(model, every=1) as probe, torch.autocast("cpu", dtype=torch.bfloat16), Watched():
        model(*inputs).float().mean().backward()
    stats = probe.stats()
    first = [site for site in stats.layers if site.startswith("layers.0.")]
    assert first == ["layers.0.into", "layers.0.out"]
    assert "layers.1.uvqk" in stats.layers
    assert ran == [torch.bfloat16] * 5
    assert any("layers.0" in line and "no site" in line for line in stats.coverage.lines())


def test_scans_are_named_among_the_layers() -> None:
    for wrong in ((2,), (0, 1)):
        with pytest.raises(ValueError, match="of 2 layers: count from 0, and leave one to attention"):
            HSTU(
                Front(dense_features=1, vocab_sizes=(3,), dim=4, bottom=None),
                width=4,
                layers=2,
                heads=1,
                value_dim=4,
                key_dim=4,
                top=(8,),
                reach=4,
                scans=wrong,
            )
